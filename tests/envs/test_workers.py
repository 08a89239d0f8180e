"""Environments in worker processes: the results of one process, and workers that raise, die or hang are named."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.envs.gymnasium import GymVecEnv
from canter.envs.workers import WorkerError, WorkerVecEnv
from canter.envs.wrap import make_env, wrap_env


class Fragile(gymnasium.Env):
    """Counts its steps; misbehaves in step `at` if the marker file does not exist yet."""

    observation_space = spaces.Dict(
        {"count": spaces.Box(-np.inf, np.inf, (1,)), "image": spaces.Box(0, 255, (2,), np.uint8)}
    )
    action_space = spaces.Box(-1.0, 1.0, (2,))

    def __init__(self, number=0, mode="fine", at=3, marker=None):
        self.number, self.mode, self.at, self.marker, self.count = number, mode, at, marker, 0

    def observe(self):
        return {
            "count": np.array([100.0 * self.number + self.count], np.float32),
            "image": np.full(2, self.count, np.uint8),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        if self.mode != "fine" and self.count == self.at and not (self.marker and Path(self.marker).exists()):
            if self.marker:
                Path(self.marker).touch()
            if self.mode == "raise":
                raise RuntimeError("joint limit of knee_2")
            if self.mode == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            while self.mode == "hang":
                time.sleep(0.1)
        return self.observe(), float(action[0]), False, self.count == 5, {"count": self.count}


def make_envs(num_workers=2, mode="fine", num_envs=4, marker=None, **options):
    """Environment 2 misbehaves; of two workers it is in worker 1."""
    fns = [functools.partial(Fragile, n, mode if n == 2 else "fine", marker=marker) for n in range(num_envs)]
    return WorkerVecEnv(fns, num_workers, **options)


@pytest.fixture
def envs():
    made = []

    def make(*args, **kwargs):
        made.append(make_envs(*args, **kwargs))
        return made[-1]

    yield make
    for env in made:
        env.close()
        assert all(process.exitcode is not None for process in env.processes)


def test_workers_give_what_one_process_gives(envs):
    alone, apart = (
        make_env("CartPole-v1", num_envs=5, seed=3),
        make_env("CartPole-v1", num_envs=5, seed=3, num_workers=2),
    )
    try:
        assert torch.equal(alone.reset()[0], apart.reset()[0])
        generator, ends = torch.Generator().manual_seed(0), 0
        for _ in range(60):
            actions = torch.randint(2, (5,), generator=generator)
            a, b = alone.step(actions), apart.step(actions)
            for name in ("obs", "reward", "terminated", "truncated", "valid"):
                assert torch.equal(getattr(a, name), getattr(b, name))
            if a.final_obs is not None:
                ends += 1
                assert torch.equal(a.final_obs[a.done], b.final_obs[b.done])
        assert ends
    finally:
        apart.close()


def test_nested_observations_actions_and_infos_reach_the_right_environment(envs):
    env = envs(num_workers=2)
    obs, _ = env.reset()
    assert obs["count"].flatten().tolist() == [0.0, 100.0, 200.0, 300.0]
    for step in range(1, 6):
        record = env.step(torch.tensor([[0.1 * n, 0.0] for n in range(4)]))
    assert record.truncated.all()
    assert record.reward.tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert record.final_obs["count"].flatten().tolist() == [5.0, 105.0, 205.0, 305.0]
    assert record.final_obs["image"].dtype == torch.uint8
    assert record.obs["count"].flatten().tolist() == [0.0, 100.0, 200.0, 300.0]
    assert [info["count"] for info in record.extras["infos"]] == [step] * 4
    assert isinstance(env, GymVecEnv)


def test_a_record_is_not_written_to_again(envs):
    env = envs()
    env.reset()
    first = env.step(torch.zeros(4, 2))
    kept = first.obs["count"].clone()
    env.step(torch.zeros(4, 2))
    assert torch.equal(first.obs["count"], kept)


def run_until_step_3(env):
    env.reset()
    for _ in range(3):
        env.step(torch.zeros(4, 2))


def test_an_error_in_a_worker_is_shown_with_its_traceback_and_index(envs):
    with pytest.raises(WorkerError, match=r"worker 1 raised an error:[\s\S]*limit of knee_2[\s\S]* 2 to 3"):
        run_until_step_3(envs(mode="raise"))


def test_a_killed_worker_is_named_with_its_index_and_signal_at_once(envs):
    env, begin = envs(mode="die"), time.monotonic()
    with pytest.raises(WorkerError, match=r"environment worker 1 \(process \d+\) was killed by signal 9.*2 to 3"):
        run_until_step_3(env)
    assert time.monotonic() - begin < 20  # most of it starts the workers


def test_a_hung_worker_is_named_with_its_stack_after_the_time_limit(envs):
    with pytest.raises(WorkerError, match=r"worker 1 hangs: no answer for \d+ s.*2 to 3; it is at:[\s\S]*test_work"):
        run_until_step_3(envs(mode="hang", timeout=1.0))


@pytest.mark.parametrize("mode", ["raise", "die", "hang"])
def test_a_restarted_worker_begins_new_episodes_and_its_failed_step_is_not_valid(envs, tmp_path, mode, capsys):
    env = envs(mode=mode, marker=str(tmp_path / "failed"), timeout=1.0 if mode == "hang" else 300.0, restart=True)
    assert env.has_invalid_steps
    env.reset()
    for _ in range(3):
        record = env.step(torch.ones(4, 2))
    assert record.valid.tolist() == [True, True, False, False]
    assert record.reward.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert record.obs["count"].flatten().tolist() == [3.0, 103.0, 200.0, 300.0]
    record = env.step(torch.ones(4, 2))
    assert record.valid.all()
    assert record.obs["count"].flatten().tolist() == [4.0, 104.0, 201.0, 301.0]
    assert env.num_restarts == 1
    assert "environment worker 1" in capsys.readouterr().out


def test_a_worker_that_fails_again_at_once_is_an_error(envs):
    env = envs(mode="raise", restart=True)
    env._env_fns[2] = broken  # it can no longer be made
    with pytest.raises(WorkerError, match="no licence"):
        run_until_step_3(env)


def broken():
    raise RuntimeError("no licence")


def test_workers_end_when_the_process_that_started_them_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal\nfrom canter.envs.wrap import make_env\n"
        "if __name__ == '__main__':\n"
        "    env = make_env('CartPole-v1', num_envs=2, num_workers=2)\n    env.reset()\n"
        "    print(*(p.pid for p in env.processes), flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    numbers = [int(word) for word in done.stdout.split()]
    assert len(numbers) == 2
    end = time.monotonic() + 5
    while any(is_running(number) for number in numbers):
        assert time.monotonic() < end, "a worker is still there"
        time.sleep(0.05)


def is_running(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_more_workers_than_cores_are_a_warning(envs, monkeypatch):
    monkeypatch.setattr("canter.envs.workers.usable_cores", lambda: 1)
    with pytest.warns(UserWarning, match="2 workers share 1 cores; 1 would be as fast"):
        made = envs()
    assert made._context.get_start_method() in ("forkserver", "spawn")  # a plain fork hangs in CUDA of this process


def test_the_number_of_workers_is_checked():
    with pytest.raises(ValueError, match="num_workers must be from 1 to the 4 environments, got 5"):
        make_envs(num_workers=5)
    with pytest.raises(ValueError, match="'canter/CartPole' is no Gymnasium id"):
        make_env("canter/CartPole", num_envs=2, num_workers=2)


def test_a_killed_worker_of_gymnasium_is_named_too():
    fns = [functools.partial(Fragile, n, "die" if n == 1 else "fine", at=1) for n in range(2)]
    env = wrap_env(gymnasium.vector.AsyncVectorEnv(fns))
    with pytest.raises(WorkerError, match=r"environment worker 1 \(process \d+\) was killed by signal 9"):
        env.step(torch.zeros(2, 2))
    env.close()
