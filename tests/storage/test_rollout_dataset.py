"""Datasets of trajectories: every step once, in order, with the recorded episode ends."""

import os
import shutil
import warnings

import numpy as np
import pytest
import torch

from canter.storage.rollout_files import DatasetError, RolloutDataset, RolloutFileBase, TrajectoryWriter
from canter.utils.checkpoint import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*trajectories for .* environments")


def dataset(directory, num_envs=1, **given):
    return RolloutDataset(directory, num_envs, device="cpu", **given)


def play(data, limit=1000):
    """(step, env) -> (k, t, done, timeout) until the dataset ends."""
    rows = []
    for _ in range(limit):
        try:
            batch, _ = data.get_transition_batch()
        except StopIteration:
            return rows
        seen = torch.cat([batch.observation, batch.done[:, None], batch.timeout[:, None]], 1).int().tolist()
        rows.append([tuple(row) for row in seen])
    return rows


def starts(rows, env):
    """The trajectories that an environment began, by their number."""
    return [rows[i][env][0] for i in range(len(rows)) if i == 0 or rows[i - 1][env][2]]


# ------------------------------------------------------------------ base
class Spy(RolloutFileBase):
    def __init__(self, **given):
        super().__init__("somewhere", 3, "cpu", **given)
        self.calls = []

    def reset_all(self):
        self.calls.append("all")

    def refresh_handlers(self, env_ids):
        self.calls.append(env_ids.tolist())

    def get_buffer(self, num_transitions_per_env=None):
        lead = (3,) if num_transitions_per_env is None else (num_transitions_per_env, 3)
        fields = [torch.zeros(lead) for _ in range(8)]
        return RolloutDataset.Transition(*fields)

    def fill_transition(self, buffer, env_ids=None):
        self.calls.append("fill")
        buffer.reward[:] = self.calls.count("fill")


def test_a_batch_is_a_row_or_k_rows_and_resets_once():
    spy = Spy()
    assert spy.get_batch().reward.tolist() == [1, 1, 1]
    assert spy.get_batch(2).reward.tolist() == [[2, 2, 2], [3, 3, 3]]
    assert spy.calls.count("all") == 1


# ------------------------------------------------------------------ content
def test_every_field_of_a_row_is_of_one_step(record):
    data = dataset(record({4: (0, 3)}))
    for t in range(3):
        batch = data.get_batch()
        assert batch.observation.tolist() == [[4, t]]
        assert batch.privileged_observation.tolist() == [[4, t, -t]]
        assert batch.action.tolist() == [[400 + t]]
        assert batch.reward.tolist() == [400 + t]
        assert batch.done.tolist() == [t == 2]
        if t < 2:
            assert batch.next_observation.tolist() == [[4, t + 1]]
            assert batch.next_privileged_observation.tolist() == [[4, t + 1, -t - 1]]
    assert batch.done.dtype == batch.timeout.dtype == torch.bool


def test_files_of_a_trajectory_are_continuous(record):
    rows = play(dataset(record({0: (0, 4, 9)})))
    assert [row[0][1] for row in rows] == list(range(9))
    assert [row[0][2] for row in rows] == [0] * 8 + [1]


def test_k_rows_are_the_same_rows(record):
    directory = record({0: (0, 4, 9), 1: (0, 6), 2: (0, 3), 3: (0, 5)})
    single, several = dataset(directory, 2, dataset_loops=-1), dataset(directory, 2, dataset_loops=-1)
    batch = several.get_batch(20)
    assert batch.observation.shape == (20, 2, 2)
    for t in range(20):
        row = single.get_batch()
        for name, value in row.items():
            assert torch.equal(value, getattr(batch, name)[t]), (name, t)


def test_switching_sets_done_and_timeout_unless_the_row_was_terminal(record):
    ends = {"terminated": (1, 0), "": (1, 1), "truncated": (1, 1)}
    for ended, flags in ends.items():
        rows = play(dataset(record({0: (0, 3), 1: (0, 2)}, name=f"d{ended}", ended=ended)))
        assert [row[0][2:] for row in rows] == [(0, 0), (0, 0), flags, (0, 0), flags]


def test_recorded_timeouts_arrive_and_absent_ones_are_zero(tmp_path, make_steps):
    for name, has in (("with", True), ("without", False)):
        with TrajectoryWriter(tmp_path / name) as writer:
            arrays = make_steps(0, 0, 3, timeouts=has)
            arrays["dones"][1] = 1  # an episode that ended inside the file
            if has:
                arrays["timeouts"][1] = True
            writer.add(0, arrays, 0)
        rows = play(dataset(tmp_path / name))
        assert [row[0][3] for row in rows] == [0, int(has), 1]


def test_the_next_observation_at_a_boundary_begins_the_next_trajectory(record):
    data = dataset(record({0: (0, 2), 1: (0, 2)}))
    data.get_batch()
    batch = data.get_batch()
    assert batch.done.tolist() == [True]
    assert batch.next_observation.tolist() == [[1, 0]]
    assert data.get_batch().observation.tolist() == [[1, 0]]


def test_the_buffer_is_the_same_memory_every_time(record):
    data = dataset(record({0: (0, 6)}))
    first = {name: value.data_ptr() for name, value in data.get_batch().items()}
    assert {name: value.data_ptr() for name, value in data.get_batch().items()} == first
    assert data.get_buffer(3).reward.data_ptr() == data.get_buffer(3).reward.data_ptr()


def test_dicts_and_images_keep_their_structure_and_kind(tmp_path):
    with TrajectoryWriter(tmp_path) as writer:
        image = np.arange(3, dtype=np.uint8).reshape(3, 1, 1, 1) * np.ones((1, 2, 2, 1), np.uint8)
        arrays = {"observations.camera": image, "observations.arm.angle": np.ones((3, 1), np.float32)}
        rest = {"rewards": np.zeros((3, 1), np.float32), "dones": np.zeros((3, 1), np.uint8)}
        writer.add(0, {**arrays, **rest, "actions": np.arange(3)}, 0)
    data = dataset(tmp_path)
    data.get_batch()
    batch = data.get_batch(1)
    assert batch.observation["camera"].dtype == torch.uint8
    assert batch.observation["camera"].flatten().tolist() == [1] * 4
    assert batch.next_observation["camera"].flatten().tolist() == [2] * 4
    assert batch.observation["arm"]["angle"].shape == (1, 1, 1)
    assert batch.action.tolist() == [[1]]


def test_compressed_components_come_back_in_segment_order(tmp_path):
    image = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 2, 2)
    metadata = {
        "obs_segments": {"camera": [2, 2], "speed": [1]},
        "obs_disassemble_mapping": {"camera": "normalized_image"},
    }
    with TrajectoryWriter(tmp_path, metadata) as writer:
        arrays = {
            "obs_speed": np.arange(3, dtype=np.float32)[:, None],
            "obs_camera": np.rint(image * 255).astype(np.uint8),
            "actions": np.zeros((3, 1), np.float32),
            "rewards": np.zeros((3, 1), np.float32),
            "dones": np.zeros((3, 1), np.uint8),
        }
        writer.add(0, arrays, 0)
    batch = dataset(tmp_path).get_batch(3)
    want = np.concatenate([image.reshape(3, 4), np.arange(3)[:, None]], 1)
    assert np.abs(batch.observation[:, 0].numpy() - want).max() <= 0.5 / 255 + 1e-6
    assert batch.observation.dtype == torch.float32


# ------------------------------------------------------------------ order
def test_one_loop_plays_every_trajectory_once_in_each_of_several_loops(record):
    directory = record(dict.fromkeys(range(4), (0, 3)))
    for loops in (1, 3):
        rows = play(dataset(directory, 2, dataset_loops=loops))
        assert len(rows) == 6 * loops
        played = sorted(starts(rows, 0) + starts(rows, 1))
        assert played == sorted(list(range(4)) * loops)


def test_below_one_loop_is_for_ever(record):
    assert len(play(dataset(record({0: (0, 3)}), dataset_loops=-1), limit=50)) == 50
    assert len(play(dataset(record({0: (0, 3)}, name="b"), dataset_loops=0), limit=50)) == 50


@pytest.mark.parametrize("given", [{}, {"random_shuffle_traj_order": True, "starting_frame_range": (0, 3)}])
def test_a_loaded_dataset_continues_where_the_saved_one_was(record, tmp_path, given):
    directory = record({0: (0, 2, 7), 1: (0, 4), 2: (0, 3, 5), 3: (0, 6)})
    shutil.copytree(directory, tmp_path / "moved")

    def make(where, seed):
        return dataset(where, 2, dataset_loops=3, mark_first_frame_done=True, seed=seed, **given)

    whole = play(make(directory, 1))
    assert len(whole) > 20
    for begun in range(1, len(whole), 2):
        first, second = make(directory, 1), make(tmp_path / "moved", 2)
        assert play(first, begun) == whole[:begun]
        save_checkpoint(tmp_path / "state.pt", {"dataset": first.state_dict()})
        second.load_state_dict(load_checkpoint(tmp_path / "state.pt")["dataset"])
        assert play(second) == whole[begun:], begun
        play(first)
        assert (second.num_played, second.num_dataset_looped) == (first.num_played, 3)
    fresh = make(directory, 1)
    fresh.load_state_dict(make(directory, 2).state_dict())  # of one that has not begun
    assert play(fresh) == whole


def test_a_changed_dataset_starts_from_the_beginning(record):
    directory = record({0: (0, 4), 1: (0, 4), 2: (0, 4)})
    first = dataset(directory, 2, dataset_loops=-1)
    play(first, 2)
    with pytest.raises(LookupError, match="played in 2 environments, here are 3"):
        dataset(directory, 3).load_state_dict(first.state_dict())
    shutil.rmtree(directory / "trajectory_1")
    second = dataset(directory, 2, dataset_loops=-1)
    with pytest.raises(LookupError, match=r"1 trajectories are no longer in .*: 0/trajectory_1"):
        second.load_state_dict(first.state_dict())
    assert [row[0] for row in play(second, 1)[0]] == [0, 2]


def test_two_environments_play_all_three_trajectories_to_their_ends(record):
    directory = record({0: (0, 2), 1: (0, 7), 2: (0, 3)})
    data = dataset(directory, 2)
    rows = play(data)
    # env 0 plays 0 and 2 and repeats until env 1 has played 1 to its end
    assert [row[1][:2] for row in rows] == [(1, t) for t in range(7)]
    assert [row[0][:2] for row in rows[:5]] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]
    for env in (0, 1):
        for now, then in zip(rows[:-1], rows[1:], strict=True):
            assert now[env][2] or then[env][:2] == (now[env][0], now[env][1] + 1)
    assert data.repeats.all()


def test_more_environments_than_trajectories_share_them_with_a_warning(record):
    data = dataset(record({0: (0, 2), 1: (0, 3)}), 5)
    with pytest.warns(UserWarning, match="2 trajectories for 5 environments"):
        batch = data.get_batch()
    assert batch.observation[:, 0].tolist() == [0, 1, 0, 1, 0]


def test_a_reset_after_the_end_starts_from_the_beginning(record):
    data = dataset(record({0: (0, 3)}))
    assert len(play(data)) == 3
    with pytest.raises(StopIteration):
        data.get_batch()
    assert sum(1 for _ in data) == 3


def test_shuffling_changes_the_order_and_keeps_the_set(record):
    directory = record(dict.fromkeys(range(12), (0, 1)))
    plain = starts(play(dataset(directory)), 0)
    mixed = starts(play(dataset(directory, random_shuffle_traj_order=True, seed=1)), 0)
    assert plain != mixed
    assert sorted(plain) == sorted(mixed)
    assert mixed == starts(play(dataset(directory, random_shuffle_traj_order=True, seed=1)), 0)
    assert mixed != starts(play(dataset(directory, random_shuffle_traj_order=True, seed=2)), 0)
    for k in range(12):
        os.utime(directory / f"trajectory_{k}", (50 - k, 50 - k))
    assert mixed == starts(play(dataset(directory, random_shuffle_traj_order=True, seed=1)), 0)


def test_the_latest_are_the_last_changed(record):
    directory = record(dict.fromkeys(range(5), (0, 1)))
    for k, changed in enumerate((50, 10, 40, 20, 30)):
        os.utime(directory / f"trajectory_{k}", (changed, changed))
    assert starts(play(dataset(directory)), 0) == [1, 3, 4, 2, 0]
    assert starts(play(dataset(directory, keep_latest_n_trajs=2)), 0) == [2, 0]


def test_frames_begin_in_the_range_or_at_zero(record):
    directory = record({0: (0, 4, 20), 1: (0, 3)})
    firsts = {0: set(), 1: set()}
    data = dataset(directory, dataset_loops=-1, starting_frame_range=[3, 7], seed=0)
    for _ in range(40):
        k, t = data.get_batch().observation[0].int().tolist()
        firsts[k].add(t)
        data.refresh_handlers(torch.tensor([0]))
    assert firsts == {0: {3, 4, 5, 6}, 1: {0}}


def test_the_first_frame_is_marked_done_only_on_request(record):
    directory = record({0: (0, 3), 1: (0, 2)})
    assert [row[0][2] for row in play(dataset(directory))] == [0, 0, 1, 0, 1]
    assert [row[0][2] for row in play(dataset(directory, mark_first_frame_done=True))] == [1, 0, 1, 1, 1]
    late = dataset(record({0: (0, 9)}, name="c"), mark_first_frame_done=True, starting_frame_range=[4, 5])
    assert [row[0][1:3] for row in play(late)][:2] == [(4, 1), (5, 0)]


def test_resetting_some_environments_leaves_the_others_alone(record):
    data = dataset(record(dict.fromkeys(range(4), (0, 9))), 2, dataset_loops=-1)
    data.get_batch()
    data.reset([1])
    assert data.get_batch().observation.tolist() == [[0, 1], [2, 0]]


def test_every_loop_finds_new_trajectories(record, make_steps):
    directory = record({0: (0, 2)})
    data = dataset(directory, dataset_loops=-1)
    data.get_batch()
    with TrajectoryWriter(directory) as writer:
        writer.add(1, make_steps(1, 0, 5), 0)  # longer than any before
    seen = [data.get_batch().observation[0].int().tolist() for _ in range(8)]
    assert [1, 4] in seen


# ------------------------------------------------------------------ waiting
def test_no_trajectory_is_an_error_at_once_that_names_the_place(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere \(no such directory\)"):
        dataset(tmp_path / "nowhere").get_batch()
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".DS_Store").write_text("x")
    with pytest.raises(FileNotFoundError, match="no trajectory in .*empty"):
        dataset(tmp_path / "empty").get_batch()


def test_reset_waits_for_the_wanted_number_of_trajectories(record, make_steps, monkeypatch):
    directory = record({0: (0, 2)})

    def arrive(seconds):
        assert seconds == 5.0
        with TrajectoryWriter(directory) as writer:
            writer.add(1, make_steps(1, 0, 2), 0)

    monkeypatch.setattr("canter.storage.rollout_files.rollout_dataset.time.sleep", arrive)
    with pytest.warns(UserWarning, match="fewer than keep_latest_n_trajs=2.*waiting"):
        assert len(play(dataset(directory, keep_latest_n_trajs=2))) == 4


def test_waiting_ends_after_the_timeout(record):
    data = dataset(record({0: (0, 2)}), keep_latest_n_trajs=2, wait_interval_s=0.01, wait_timeout_s=0.02)
    with (
        pytest.warns(UserWarning, match="waiting"),
        pytest.raises(FileNotFoundError, match="fewer than keep_latest_n_trajs=2"),
    ):
        data.get_batch()


# ------------------------------------------------------------------ bad files
@pytest.fixture
def spoilt(record):
    """A hundred good files, of which one is then damaged, one cut short, one emptied and one replaced."""
    directory = record(dict.fromkeys(range(100), (0, 3)))
    paths = {k: next((directory / f"trajectory_{k}").iterdir()) for k in (10, 20, 30, 40)}
    content = bytearray(paths[10].read_bytes())
    content[-5] ^= 1
    paths[10].write_bytes(content)
    paths[20].write_bytes(paths[20].read_bytes()[:-10])
    paths[30].write_bytes(b"")
    paths[40].write_text("hello " * 50)
    return directory


def test_one_bad_file_stops_the_dataset_and_every_bad_file_is_named(spoilt):
    with pytest.raises(DatasetError) as caught:
        play(dataset(spoilt))
    text = str(caught.value)
    assert "4 of 100 files are bad" in text
    assert all(f"trajectory_{k}/" in text for k in (10, 20, 30, 40))


def test_a_fraction_of_bad_files_is_left_out_and_named(spoilt):
    data = dataset(spoilt, max_bad_fraction=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        rows = play(data)
    assert sorted(starts(rows, 0)) == [k for k in range(100) if k not in (10, 20, 30, 40)]
    text = "".join(str(w.message) for w in caught)
    assert all(f"trajectory_{k}/" in text for k in (10, 20, 30, 40))
    assert len(data.library.bad) == 4


def test_more_bad_files_than_allowed_are_too_many(spoilt):
    with pytest.warns(UserWarning, match="left out"), pytest.raises(DatasetError, match="4 of 100"):
        play(dataset(spoilt, max_bad_fraction=0.035))


def test_a_file_with_other_arrays_is_refused_with_the_difference(record, make_steps):
    directory = record({0: (0, 3)})
    with TrajectoryWriter(directory.parent / "other") as writer:
        arrays = make_steps(1, 0, 3)
        arrays["observations"] = np.zeros((3, 5), np.float32)
        writer.add(1, arrays, 0)
    with pytest.raises(DatasetError, match=r"observations is F32\[5\], not F32\[2\]"):
        dataset([directory, directory.parent / "other"]).get_batch()


def test_a_damaged_second_file_ends_the_trajectory_where_it_was_good(record):
    directory = record({0: (0, 3, 6), 1: (0, 2)})
    path = directory / "trajectory_0" / "traj_000003_000006.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="CRC-32"):
        rows = play(dataset(directory, max_bad_fraction=0.5))
    assert [row[0] for row in rows] == [(0, 0, 0, 0), (0, 1, 0, 0), (0, 2, 1, 1), (1, 0, 0, 0), (1, 1, 1, 0)]


def test_a_trajectory_removed_while_playing_is_left_out(record):
    directory = record({0: (0, 2), 1: (0, 2), 2: (0, 2)})
    data = dataset(directory)
    data.get_batch()
    shutil.rmtree(directory / "trajectory_1")
    with pytest.warns(UserWarning, match="has been removed"):
        assert [data.get_batch().observation[0, 0].item() for _ in range(3)] == [0, 2, 2]


def test_foreign_names_in_a_trajectory_are_bad_files(record):
    directory = record({0: (0, 2)})
    (directory / "trajectory_0" / "notes.txt").write_text("x")
    with pytest.raises(DatasetError, match=r"notes\.txt is no trajectory file"):
        dataset(directory).get_batch()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_envs": 0}, "num_envs"),
        ({"starting_frame_range": [2, 2]}, "starting_frame_range"),
        ({"max_bad_fraction": 1.5}, "max_bad_fraction"),
    ],
)
def test_arguments_out_of_range_are_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        dataset(tmp_path, **given)


class DictData(RolloutFileBase):
    """Serves a nested dict: step t of environment i is 100 * i + t."""

    def reset_all(self):
        self.t = 0

    def refresh_handlers(self, env_ids):
        pass

    def get_buffer(self, num_transitions_per_env=None):
        rows = () if num_transitions_per_env is None else (num_transitions_per_env,)
        shape = (*rows, self.num_envs)
        return {"obs": {"joints": torch.zeros(*shape, 2)}, "timeout": torch.zeros(shape, dtype=torch.bool)}

    def fill_transition(self, buffer, env_ids=None):
        buffer["obs"]["joints"][:] = (100.0 * self.all_env_ids + self.t).unsqueeze(-1)
        buffer["timeout"][:] = self.t == 1
        self.t += 1


def test_a_buffer_may_be_a_nested_dict():
    data = DictData("x", 2, "cpu")
    rows = data.get_batch(3)
    assert rows["obs"]["joints"][..., 1].tolist() == [[0.0, 100.0], [1.0, 101.0], [2.0, 102.0]]
    assert rows["timeout"].tolist() == [[False] * 2, [True] * 2, [False] * 2]
    batch, infos = data.get_transition_batch()
    assert batch["obs"]["joints"][:, 0].tolist() == [3.0, 103.0]
    assert infos["time_outs"] is batch["timeout"]
