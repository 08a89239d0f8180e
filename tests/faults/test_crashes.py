"""Errors during a run: saved state, messages, and the first error is never hidden."""

import subprocess
import sys
import threading

import pytest
import torch

from canter.envs.torch_envs import PointRobot
from canter.utils.checkpoint import find_checkpoints, load_checkpoint
from canter.utils.files import DiskFullError, RunLockedError


class Breaks(PointRobot):
    """Raises at a given step."""

    def __init__(self, *args, at, **kwargs):
        super().__init__(*args, **kwargs)
        self.left = at

    def step(self, actions):
        self.left -= 1
        if self.left == 0:
            self.hit_joint_limit()
        return super().step(actions)

    def hit_joint_limit(self):
        raise RuntimeError("joint limit of knee_2")


def test_an_error_in_the_environment_keeps_its_traceback_and_the_state(make_runner, tmp_path):
    runner = make_runner(Breaks(4, at=11), tmp_path, save_interval=1)
    with pytest.raises(RuntimeError, match="joint limit of knee_2") as caught:
        runner.learn(5)
    assert caught.traceback[-1].name == "hit_joint_limit"
    assert caught.value.__context__ is None
    assert [n for n, _ in find_checkpoints(tmp_path)] == [1, 2]
    assert not (tmp_path / "checkpoint_final.pt").exists()
    crash = load_checkpoint(tmp_path / "crash" / "model_2.pt")
    assert crash["iter"] == 2
    assert "joint limit" in crash["infos"]["error"]
    last = load_checkpoint(tmp_path / "model_2.pt")
    for name, value in last["model_state_dict"].items():
        assert torch.equal(value, crash["model_state_dict"][name])
    runner.learn(1)  # who catches it may go on
    assert runner.iteration == 3


class NoMemory(PointRobot):
    """Allocations fail in its third iteration of four steps."""

    error: type[Exception] = torch.OutOfMemoryError

    def step(self, actions):
        self.num_steps = getattr(self, "num_steps", 0) + 1
        if self.num_steps == 9:
            raise self.error("CUDA out of memory. Tried to allocate 20.00 GiB")
        return super().step(actions)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_names_the_settings_to_change_and_the_state_is_saved(make_runner, tmp_path, monkeypatch, error):
    monkeypatch.setattr(NoMemory, "error", error)
    runner = make_runner(NoMemory(4), tmp_path, save_interval=1)
    says = r"^cpu ran out of memory in iteration 3: [\d.,]+ .iB are free; lower num_envs \(now 4\), num_steps_per"
    with pytest.raises(error, match=says) as caught:
        runner.learn(5)
    assert "or raise num_mini_batches (now 2). The error was: CUDA out of memory. Tried" in str(caught.value)
    assert caught.value.__cause__.__traceback__ is not None
    assert load_checkpoint(tmp_path / "crash" / "model_2.pt")["iter"] == 2
    assert [n for n, _ in find_checkpoints(tmp_path)] == [1, 2]


def test_parameters_are_not_read_on_a_device_without_memory(make_runner, monkeypatch):
    runner = make_runner(NoMemory(4))
    monkeypatch.setattr(runner.health, "raise_if_diverged", lambda **options: pytest.fail("the parameters were read"))
    with pytest.raises(torch.OutOfMemoryError, match="ran out of memory in iteration 3"):
        runner.learn(3)


def test_an_error_in_reset_or_at_construction_comes_out_as_it_is(make_runner, tmp_path):
    class NoReset(PointRobot):
        def reset(self):
            raise OSError("simulator licence")

    with pytest.raises(OSError, match="simulator licence"):
        make_runner(NoReset(2), tmp_path, seed=1)


def test_a_failing_emergency_checkpoint_does_not_hide_the_error(make_runner, tmp_path, monkeypatch):
    runner = make_runner(Breaks(4, at=2), tmp_path)

    def full(path, state, root=None):
        raise DiskFullError("disk full")

    monkeypatch.setattr("canter.runners.checkpoints.save_checkpoint", full)
    with pytest.warns(UserWarning, match="no emergency checkpoint could be written: DiskFullError"):  # noqa: SIM117
        with pytest.raises(RuntimeError, match="joint limit"):
            runner.learn(2)


def test_an_error_in_a_loss_term_shows_the_users_frame(make_runner, tmp_path):
    runner = make_runner(PointRobot(4), tmp_path)

    def my_loss_term(batch, out):
        raise ArithmeticError("mine")

    runner.alg.loss_terms = my_loss_term
    with pytest.raises(ArithmeticError, match="mine") as caught:
        runner.learn(1)
    assert caught.traceback[-1].name == "my_loss_term"
    assert (tmp_path / "crash" / "model_0.pt").exists()


def test_a_directory_that_cannot_be_written_fails_before_the_first_step(make_runner, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file"):
        make_runner(Breaks(2, at=1), tmp_path / "file" / "run").learn(1)
    runner = make_runner(Breaks(2, at=1), tmp_path / "run")
    (tmp_path / "run").rmdir()
    (tmp_path / "run").write_text("x")
    with pytest.raises(OSError):
        runner.learn(1)


def test_two_runs_in_one_directory_are_refused_naming_the_first(make_runner, tmp_path):
    first, second = make_runner(PointRobot(2), tmp_path), make_runner(Breaks(2, at=1), tmp_path)
    inside = []

    def try_second(runner):
        with pytest.raises(RunLockedError, match=r"in use by pid \d+ on host"):
            second.learn(1)
        inside.append(True)

    first.add_callback("pre_update", try_second)
    first.learn(1)
    assert inside == [True]
    assert second.iteration == 0
    third = make_runner(PointRobot(2), tmp_path)
    third.learn(1)  # free again


def test_the_lock_is_free_after_an_error(make_runner, tmp_path):
    runner = make_runner(Breaks(2, at=1), tmp_path)
    with pytest.raises(RuntimeError, match="joint limit"):
        runner.learn(1)
    runner.learn(1)


def test_learning_in_another_thread_works_without_handlers(make_runner):
    runner, errors = make_runner(PointRobot(2)), []

    def work():
        try:
            runner.learn(2)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert runner.iteration == 2


@pytest.mark.slow
def test_checks_hold_without_assert_statements(tmp_path):
    script = (
        "from canter.algorithms import PPOConfig\n"
        "from canter.envs.torch_envs import PointRobot\n"
        "from canter.runners import OnPolicyRunner\n"
        "try:\n    PPOConfig(clip_param=0.0)\nexcept ValueError:\n    print('refused')\n"
        "nets = {'actor_hidden_dims': [4], 'critic_hidden_dims': [4]}\n"
        "OnPolicyRunner(PointRobot(2), {'policy': nets, 'device': 'cpu'}, 'run', show_progress=False).learn(1)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "refused" in done.stdout
    assert load_checkpoint(tmp_path / "run" / "checkpoint_final.pt")["iter"] == 1
