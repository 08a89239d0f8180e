"""Ranks that are killed, hang, fail or disagree: all end soon, with one message that names the rank, and resume."""

import os
import signal
import time

import torch

from canter.utils.checkpoint import newest_valid_checkpoint


def results(launcher, tmp_path, case, size=2):
    """What the ranks that came to their end returned, and all exit codes."""
    codes = launcher.wait(launcher.start(size, tmp_path, case))
    paths = [tmp_path / f"rank{rank}.pt" for rank in range(size)]
    return [torch.load(path) if path.exists() else None for path in paths], codes


def test_a_killed_rank_ends_the_others_at_once_and_the_run_continues(launcher, tmp_path):
    (first, second), codes = results(launcher, tmp_path, "killed")
    assert codes == [0, -9]
    assert second is None
    assert "rank 1 (process" in first["error"]
    assert "does not answer" in first["error"]
    assert first["is_reporter"]
    assert first["seconds"] < 15.0
    assert newest_valid_checkpoint(tmp_path / "run").name == "model_2.pt"
    assert not (tmp_path / "run" / "crash").exists()  # the state of a broken iteration
    (first, second), codes = results(launcher, tmp_path, "fine")
    assert first == second == {"iteration": 4}


def test_a_rank_that_hangs_is_named_after_the_time_limit(launcher, tmp_path):
    pids = launcher.start(2, tmp_path, "hangs")
    while not (tmp_path / "rank0.pt").exists():
        time.sleep(0.05)
    os.kill(pids[1], signal.SIGKILL)  # as torchrun does
    assert launcher.wait(pids) == [0, -9]
    first = torch.load(tmp_path / "rank0.pt")
    assert "rank 1 (process" in first["error"]
    assert "rank_timeout=2 s" in first["error"]
    assert 2.0 < first["seconds"] < 15.0


def test_a_rank_that_dies_while_others_wait_for_its_work_is_named(launcher, tmp_path):
    (first, _), codes = results(launcher, tmp_path, "killed_while_waited_for")
    assert codes == [0, -9]
    assert "rank 1 (process" in first


def test_an_error_of_one_rank_is_reported_to_the_others(launcher, tmp_path):
    (first, second), codes = results(launcher, tmp_path, "raises")
    assert codes == [0, 0]
    assert second["error"] == "RuntimeError: joint limit of the left knee"
    assert "failed: RuntimeError: joint limit of the left knee" in first["error"]
    assert "rank 1 (process" in first["error"]
    assert first["is_reporter"] is False  # rank 1 has said it
    assert first["seconds"] < 10.0
    assert [path.name for path in (tmp_path / "run" / "crash").iterdir()] == ["model_2.rank1.pt"]


def test_an_environment_of_one_rank_that_stops_the_training_ends_all_at_once_with_the_way_out(launcher, tmp_path):
    (first, second), codes = results(launcher, tmp_path, "stops")
    assert codes == [0, 0]
    assert second["error"].endswith("which several ranks cannot end together; raise it in a callback")
    assert "rank 1 (process" in first["error"]
    assert "raise it in a callback" in first["error"]
    assert first["seconds"] < 10.0
    assert newest_valid_checkpoint(tmp_path / "run").name == "model_2.pt"


def test_a_signal_to_one_rank_ends_all_after_the_same_iteration(launcher, tmp_path):
    _, codes = results(launcher, tmp_path, "signalled")
    assert codes == [143, 143]
    path = newest_valid_checkpoint(tmp_path / "run")
    assert path.name == "model_3.pt"
    assert path.with_name("model_3.rank1.pt").exists()


def test_a_callback_of_any_event_that_stops_one_rank_stops_all_after_the_same_iteration(launcher, tmp_path):
    ends = {"pre_iteration": 3, "post_iteration": 2, "pre_rollout": 3, "post_rollout": 3, "pre_update": 3}
    ends |= {"post_update": 3}
    assert launcher.run(2, tmp_path, "one_stops") == [list(ends.values())] * 2
    assert (tmp_path / "run" / "model_3.rank1.pt").exists()


def test_ranks_whose_networks_have_other_sizes_are_refused(launcher, tmp_path):
    for text in launcher.run(2, tmp_path, "other_networks"):
        assert "started differently: rank 1 differs from rank 0 in shape of model_state_dict.actor.0.weight" in text


def test_a_save_that_one_rank_calls_alone_is_an_error_that_says_so(launcher, tmp_path):
    for text in launcher.run(2, tmp_path, "saves_alone"):
        assert "runner.save" in text


def test_a_file_that_the_first_rank_cannot_write_stops_no_rank(launcher, tmp_path):
    (first, texts), (second, others) = launcher.run(2, tmp_path, "cannot_list")
    assert first == second == 4
    assert len(texts) == len(others) == 1
    assert newest_valid_checkpoint(tmp_path / "run").name == "model_4.pt"


def test_ranks_with_other_settings_are_refused(launcher, tmp_path):
    for text in launcher.run(2, tmp_path, "differs"):
        assert text == "the ranks were started differently: rank 1 differs from rank 0 in setting gamma"


def test_parameters_that_differ_by_one_bit_are_found_when_saving(launcher, tmp_path):
    for text in launcher.run(2, tmp_path, "drifts"):
        assert text.endswith("rank 1 differs from rank 0 in model_state_dict.actor.0.weight")
    assert not list(tmp_path.glob("model*.pt"))


def test_a_second_run_in_the_same_directory_is_refused(launcher, tmp_path):
    (first, second), _ = results(launcher, tmp_path, "locked")
    assert "RunLockedError" in first["error"]
    assert "failed: RunLockedError" in second["error"]


def test_a_rank_that_is_alone_says_what_is_missing(launcher, tmp_path):
    text, seconds = launcher.run(2, tmp_path, "alone")[0]
    assert "rank 0 of 2 did not find the others at 127.0.0.1" in text
    assert "torchrun" in text
    assert seconds < 10.0


def test_a_port_in_use_is_named(launcher, tmp_path):
    text = launcher.run(2, tmp_path, "port_in_use")[0]
    assert "MASTER_PORT" in text
    assert "EADDRINUSE" in text or "in use" in text
