"""Demonstrations: the files hold the steps of the environment, each of them once."""

import gc
import inspect
import json
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.envs.torch_envs import PointRobot
from canter.modules.actor_critic import ActorCritic
from canter.runners.demonstration import DemonstrationSaver
from canter.storage.rollout_files import RolloutDataset, TrajectoryWriter, read_manifest, read_trajectory


class Player:
    """Acts 100 * env + t from an observation (env, t); sampling adds a half."""

    def __init__(self):
        self.seen, self.resets = [], []

    def _act(self, name, obs):
        self.seen.append((name, obs.shape[1]))
        return 100 * obs[:, :1] + obs[:, 1:2]

    def act(self, obs):
        return self._act("act", obs) + 0.5

    def act_inference(self, obs):
        return self._act("act_inference", obs)

    def reset(self, dones=None):
        self.resets.append(dones.tolist())


@pytest.fixture
def saver(counting, tmp_path):
    """`saver(lengths=..., **given)`: of a counting environment."""
    made = []

    def make(lengths=(2, 3, 5), ends="terminated", extras=None, directory="demos", env=None, **given):
        given = {"rollout_storage_length": 4, "min_timesteps": 1, "min_episodes": 1, "show_progress": False, **given}
        env = counting(lengths, ends, extras) if env is None else env
        made.append(DemonstrationSaver(env, given.pop("policy", Player()), tmp_path / directory, **given))
        return made[-1]

    yield make
    for one in made:
        one.close()


def trajectories(directory):
    return {p.name: read_trajectory(p) for p in sorted(directory.glob("trajectory_*"))}


def test_the_documented_signature_and_defaults():
    parameters = inspect.signature(DemonstrationSaver).parameters
    assert list(parameters)[:10] == [
        "env",
        "policy",
        "save_dir",
        "rollout_storage_length",
        "min_timesteps",
        "min_episodes",
        "success_traj_only",
        "use_critic_obs",
        "obs_disassemble_mapping",
        "demo_by_sample",
    ]
    assert [parameters[n].default for n in list(parameters)[3:10]] == [64, 1e6, 10000, False, False, None, False]


def test_the_layout_on_disk(saver, tmp_path):
    saver(min_timesteps=24, min_episodes=2).collect_and_save({"seed": 3})
    metadata = json.loads((tmp_path / "demos/metadata.json").read_text())
    assert metadata["total_timesteps"] == 24
    assert metadata["config"] == {"seed": 3}
    for name in ("env", "policy", "rollout_storage_length", "success_traj_only", "min_timesteps", "use_critic_obs"):
        assert name in metadata
    for folder in (tmp_path / "demos").glob("trajectory_*"):
        ranges = sorted(tuple(map(int, path.stem.split("_")[1:])) for path in folder.iterdir())
        assert ranges[0][0] == 0
        assert all(a[1] == b[0] for a, b in zip(ranges[:-1], ranges[1:], strict=True))
    assert len(read_manifest(tmp_path / "demos")) == len(list((tmp_path / "demos").rglob("*.safetensors")))


def test_stored_steps_equal_the_steps_of_the_environment(saver, tmp_path):
    saver(lengths=(2, 6), min_timesteps=24, min_episodes=1).collect_and_save()
    lengths = []
    for whole in trajectories(tmp_path / "demos").values():
        env, t = whole["observations"].T
        np.testing.assert_array_equal(t, np.arange(len(t)))
        np.testing.assert_array_equal(whole["actions"][:, 0], 100 * env + t)
        np.testing.assert_array_equal(whole["rewards"][:, 0], 100 * env + t + 1)
        length = (2, 6)[int(env[0])]
        np.testing.assert_array_equal(whole["dones"][:, 0], t == length - 1)
        assert not whole["timeouts"].any()
        lengths.append(len(t))
        if len(t) == length:  # the observation in which the episode ended
            np.testing.assert_array_equal(whole["final_observations"], [[env[0], length]])
    assert sorted(lengths) == [2] * 6 + [6, 6]


def test_the_dataset_returns_the_saved_steps(saver, tmp_path):
    saver(lengths=(3,), ends="truncated", min_timesteps=12, min_episodes=1).collect_and_save()
    data = RolloutDataset(tmp_path / "demos", 1, device="cpu")
    rows = [(b.observation[0, 1].item(), b.reward.item(), b.done.item(), b.timeout.item()) for b in data]
    assert rows[:3] == [(0, 1, False, False), (1, 2, False, False), (2, 3, True, True)]
    assert len(rows) == 12


def test_a_second_collection_continues_the_first(saver, tmp_path):
    saver(lengths=(2, 3), min_timesteps=8, min_episodes=1).collect_and_save()
    first = trajectories(tmp_path / "demos")
    (tmp_path / "demos" / "trajectory_99").mkdir()  # an empty folder is used again
    second = saver(lengths=(2, 3), min_timesteps=16, min_episodes=1)
    second.init_traj_handlers()
    assert second.traj_idxs.tolist() == [99, 100]
    assert second.total_timesteps == 8
    second.collect_and_save()
    both = trajectories(tmp_path / "demos")
    assert json.loads((tmp_path / "demos/metadata.json").read_text())["total_timesteps"] == 16
    assert sum(len(whole["rewards"]) for whole in both.values()) == 16
    for name, whole in first.items():
        np.testing.assert_array_equal(whole["rewards"], both[name]["rewards"])


def test_only_successes_and_timeouts_are_kept_and_counted(saver, tmp_path):
    won = {"success": torch.tensor([False, True, False])}
    kept = saver(success_traj_only=True, extras=won, min_timesteps=12, min_episodes=3)
    kept.collect_and_save()
    found = trajectories(tmp_path / "demos")
    assert {int(whole["observations"][0, 0]) for whole in found.values()} == {1}
    assert all(len(whole["rewards"]) == 3 for whole in found.values())
    metadata = json.loads((tmp_path / "demos/metadata.json").read_text())
    assert metadata["total_timesteps"] == sum(len(whole["rewards"]) for whole in found.values())
    assert metadata["total_trajectories"] == metadata["total_episodes"] == len(found)
    assert metadata["total_timesteps"] == sum(e["end"] - e["start"] for e in read_manifest(tmp_path / "demos"))


def test_timeouts_are_successes(saver, tmp_path):
    saver(lengths=(2,), ends="truncated", success_traj_only=True, min_timesteps=6, directory="t").collect_and_save()
    assert len(trajectories(tmp_path / "t")) >= 3
    failing = saver(lengths=(2,), success_traj_only=True, directory="f")
    failing.init_traj_handlers()
    for step in range(8):
        failing.collect_step(step)
    failing.close()
    assert trajectories(tmp_path / "f") == {}


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("by_sample", [False, True])
def test_which_observation_and_which_actions(tmp_path, critic, by_sample):
    player = Player()
    player._act = lambda name, obs: (player.seen.append((name, obs.shape[1])), torch.zeros(len(obs), 2))[1]
    one = DemonstrationSaver(
        PointRobot(2), player, tmp_path, 4, use_critic_obs=critic, demo_by_sample=by_sample, show_progress=False
    )
    one.get_transition()
    assert player.seen == [("act" if by_sample else "act_inference", 9 if critic else 6)]


def test_sampled_actions_are_recorded_as_the_environment_got_them(counting, tmp_path):
    env = counting()
    env.action_space = spaces.Box(-1.0, 1.0, (1,))
    policy = ActorCritic(2, 2, 1, squash_actions=True, action_space=env.action_space, actor_hidden_dims=[4])
    given = []
    step = env.step
    env.step = lambda actions: (given.append(actions.clone()), step(actions))[1]
    with DemonstrationSaver(env, policy, tmp_path, 4, demo_by_sample=True, show_progress=False) as one:
        for i in range(2):
            one.collect_step(i)
    saved = trajectories(tmp_path)["trajectory_0"]["actions"]
    np.testing.assert_array_equal(saved, torch.stack(given)[:, 0].numpy())
    assert np.abs(saved).max() <= 1.0


def test_images_are_bytes_on_disk_and_floats_when_read(counting, tmp_path):
    env = counting((3,))
    env.obs_segments = {"camera": (1, 1), "t": (1,)}
    env._obs = lambda: torch.stack([env.t / 10, env.t], 1)
    with DemonstrationSaver(
        env, Player(), tmp_path, 3, obs_disassemble_mapping={"camera": "normalized_image"}, show_progress=False
    ) as one:
        for i in range(3):
            one.collect_step(i)
    raw = trajectories(tmp_path)["trajectory_0"]
    assert raw["obs_camera"].dtype == np.uint8
    assert raw["obs_camera"].shape == (3, 1, 1)
    assert raw["obs_t"].dtype == np.float32
    assert "observations" not in raw
    batch = RolloutDataset(tmp_path, 1, device="cpu").get_batch(3)
    assert torch.allclose(batch.observation[:, 0], torch.tensor([[0.0, 0], [0.1, 1], [0.2, 2]]), atol=0.5 / 255 + 1e-6)


@pytest.mark.parametrize(
    ("mapping", "error", "text"),
    [
        ({"camera": "jpeg"}, ValueError, "jpeg"),
        ({"nose": "normalized_image"}, KeyError, "nose"),
    ],
)
def test_images_that_cannot_be_kept_are_refused_at_once(counting, tmp_path, mapping, error, text):
    env = counting()
    env.obs_segments = {"camera": (1, 1), "t": (1,)}
    with pytest.raises(error, match=text):
        DemonstrationSaver(env, Player(), tmp_path, obs_disassemble_mapping=mapping)


def test_it_stops_only_when_both_are_reached(saver):
    one = saver(min_timesteps=20, min_episodes=3)
    one.init_traj_handlers()
    for steps, episodes, stops in ((19, 3, False), (20, 2, False), (20, 3, True), (99, 99, True)):
        one.total_timesteps, one.total_episodes = steps, episodes
        assert one.check_stop() is stops


def test_the_policy_is_reset_only_where_episodes_ended(saver):
    one = saver(lengths=(2, 3))
    for i in range(4):
        one.collect_step(i)
    assert one.policy.resets == [[True, False], [False, True], [True, False]]


def test_closing_keeps_every_step_and_counts_it_once(saver, tmp_path):
    one = saver(lengths=(3, 9), rollout_storage_length=8)
    one.init_traj_handlers()
    for i in range(5):
        one.collect_step(i)
    one.close()
    before = (tmp_path / "demos/metadata.json").read_text()
    one.close()
    one.__del__()
    assert (tmp_path / "demos/metadata.json").read_text() == before
    found = trajectories(tmp_path / "demos")
    assert json.loads(before)["total_timesteps"] == sum(len(w["rewards"]) for w in found.values()) == 10
    assert all(any(folder.iterdir()) for folder in (tmp_path / "demos").glob("trajectory_*"))
    TrajectoryWriter(tmp_path / "demos").close()  # the lock is free


def test_a_saver_that_could_not_be_made_is_deleted_silently(counting, tmp_path):
    gc.collect()  # what other tests left is not its business
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="rollout_storage_length"):
            DemonstrationSaver(counting(), Player(), tmp_path, 0)
        gc.collect()


def test_critic_observations_are_saved_where_there_are_some(tmp_path):
    player = Player()
    player._act = lambda name, obs: torch.zeros(len(obs), 2)
    env = PointRobot(2, max_episode_length=3, seed=1)
    with DemonstrationSaver(env, player, tmp_path, 4, show_progress=False) as one:
        for i in range(4):
            one.collect_step(i)
    whole = trajectories(tmp_path)["trajectory_0"]
    assert whole["privileged_observations"].shape == (3, 9)
    assert whole["final_privileged_observations"].shape == (1, 9)
    np.testing.assert_array_equal(whole["privileged_observations"][:, :6], whole["observations"])


def test_steps_that_only_reset_are_not_saved(tmp_path):
    import gymnasium

    from canter.envs import wrap_env

    mode = gymnasium.vector.AutoresetMode.NEXT_STEP
    env = wrap_env(gymnasium.make_vec("CartPole-v1", 2, "sync", vector_kwargs={"autoreset_mode": mode}))
    assert env.has_invalid_steps

    class Left(Player):
        def act_inference(self, obs):
            return torch.zeros(len(obs), dtype=torch.long)

    with DemonstrationSaver(env, Left(), tmp_path, 16, show_progress=False) as one:
        for i in range(48):
            one.collect_step(i)
    whole = trajectories(tmp_path)
    ended = [w for w in whole.values() if w["dones"][-1, 0]]
    assert len(ended) >= 6
    for w in whole.values():
        assert not w["dones"][:-1].any()
        assert np.abs(w["observations"][0]).max() <= 0.05  # the first row is a first state
        assert (w["rewards"] == 1.0).all()
    assert whole["trajectory_0"]["actions"].dtype == np.int64


def test_methods_can_be_called_one_by_one(saver, tmp_path):
    one = saver(lengths=(2,))
    assert one.metadata["rollout_storage_length"] == 4
    with pytest.raises(RuntimeError, match=r"call get_transition\(\) first"):
        one.add_transition(0, {})
    for i in range(6):  # more than the buffer holds
        actions, rewards, dones, infos, obs, critic_obs = one.get_transition()
        one.add_transition(i, infos)
        assert torch.equal(rewards, obs[:, 1] + 2 * dones)
    one.close()
    assert sum(len(w["rewards"]) for w in trajectories(tmp_path / "demos").values()) == 6


def test_images_that_are_bytes_stay_bytes(tmp_path):
    from canter.envs.torch_envs import ImageReach

    env = ImageReach(3, seed=1)
    player = Player()
    player._act = lambda name, obs: torch.zeros(len(obs), 2)
    with DemonstrationSaver(env, player, tmp_path, 4, show_progress=False) as one:
        one.obs, one.critic_obs = env.reset()
        first = one.obs.clone()
        for i in range(4):
            one.collect_step(i)
    for k in range(3):
        saved = read_trajectory(tmp_path / f"trajectory_{k}")["observations"]
        assert saved.dtype == np.uint8
        np.testing.assert_array_equal(saved[0], first[k].numpy())
