"""DAgger as two live processes, a collector and a trainer, and kill -9 to either at any moment."""

import os
import random
import signal
import time
import warnings

import pytest

from canter.storage.rollout_files import read_chunk, read_manifest
from canter.utils.checkpoint import find_checkpoints, load_checkpoint, newest_valid_checkpoint

PATIENCE = 240.0
FLAGS = ["--num-envs", "2", "--num-steps-per-env", "8", "--iterations", "1000000", "--eval-episodes", "0"]
FLAGS += ["--keep-latest", "4", "--policy", "{actor_hidden_dims: [16], critic_hidden_dims: [4]}"]


class Pair:
    """A collector and a trainer, which know of each other but two directories."""

    def __init__(self, world, folder):
        self.world, self.data, self.run = world, folder / "data", folder / "run"
        (self.teacher,) = (world.run_of("PPO") / "disk" / "runs").glob("*/*/r-seed1")
        self.places = {role: folder / role for role in ("train", "collect")}
        self.processes = {}

    def start(self, role):
        self.places[role].mkdir(exist_ok=True)
        where = [str(self.teacher), "--run", str(self.run), "--data", str(self.data), "--role", role]
        (self.processes[role],) = self.world.begin(self.places[role], ["dagger", *where, *FLAGS], "PPO")

    def kill(self, role):
        os.kill(self.processes[role].pid, signal.SIGKILL)
        self.processes[role].join()

    def steps(self):
        """Acknowledged steps by file."""
        return {entry["file"]: entry["end"] - entry["start"] for entry in read_manifest(self.data)}

    def iteration(self):
        return max((number for number, _ in find_checkpoints(self.run)), default=0) if self.run.exists() else 0

    def said(self):
        return "".join(self.world.said(place) for place in self.places.values())

    def wait_for_progress(self, steps=0, iterations=0):
        first_steps, first_iteration, end = sum(self.steps().values()), self.iteration(), time.monotonic() + PATIENCE
        while sum(self.steps().values()) < first_steps + steps or self.iteration() < first_iteration + iterations:
            for role, process in self.processes.items():
                assert process.is_alive(), f"the {role}er ended by itself: {self.said()}"
            assert time.monotonic() < end, f"no {steps} steps and {iterations} iterations: {self.said()}"
            time.sleep(0.003)

    def check(self, steps, iteration):
        """Nothing that was acknowledged is lost, and no file that a reader could find is torn."""
        after = self.steps()
        assert steps.items() <= after.items()
        for name, number in after.items():
            assert len(read_chunk(self.data / name)["rewards"]) == number
        for path in self.data.glob("trajectory_*/traj_*"):
            read_chunk(path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # not even the newest is damaged
            assert load_checkpoint(newest_valid_checkpoint(self.run))["iter"] >= iteration


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_either_may_be_killed_and_both_resume(world, tmp_path, times):
    pair, rng = Pair(world, tmp_path), random.Random(times)
    for role in pair.places:
        pair.start(role)
    pair.wait_for_progress(steps=24, iterations=2)
    victims = [rng.choice(["train", "collect"]) for _ in range(times)] if times > 2 else ["train", "collect"]
    for victim in victims:
        pair.wait_for_progress(**({"iterations": 1} if victim == "train" else {"steps": 12}))
        time.sleep(rng.uniform(0.0, 0.05))
        steps, iteration = pair.steps(), pair.iteration()
        pair.kill(victim)
        pair.check(steps, iteration)
        pair.start(victim)
        pair.wait_for_progress(steps=12, iterations=1)
    for role in pair.places:
        pair.kill(role)
    assert "Traceback" not in pair.said()
    assert "SKIPPING" not in pair.said()
    assert sum(pair.steps().values()) >= times * 12
