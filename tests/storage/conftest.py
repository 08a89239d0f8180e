"""Directories of trajectories whose values identify trajectory and step."""

import os

import numpy as np
import pytest

from canter.storage.rollout_files.catalog import TrajectoryWriter


def steps(trajectory, start, end, terminated=False, timeouts=True, critic=True):
    """Step t of trajectory k shows (k, t), the critic (k, t, -t), acts 100 * k + t and is paid the same."""
    t = np.arange(start, end)
    k = np.full_like(t, trajectory)
    value = (100 * k + t).astype(np.float32)[:, None]
    dones = np.zeros((len(t), 1), np.uint8)
    dones[-1] = terminated
    arrays = {"observations": np.stack([k, t], 1).astype(np.float32), "actions": value, "rewards": value}
    if critic:
        arrays["privileged_observations"] = np.stack([k, t, -t], 1).astype(np.float32)
    if timeouts:
        arrays["timeouts"] = np.zeros(len(t), bool)
    return {**arrays, "dones": dones}


@pytest.fixture
def make_steps():
    return steps


@pytest.fixture
def record(tmp_path):
    """`record({k: (0, 4, 9)}, ended="terminated")`: trajectory k as files [0, 4) and [4, 9); gives the directory."""

    def make(trajectories, name="data", ended="terminated", metadata=None, **kind):
        with TrajectoryWriter(tmp_path / name, metadata) as writer:
            for k, cuts in trajectories.items():
                for start, end in zip(cuts[:-1], cuts[1:], strict=True):
                    last = ended if end == cuts[-1] else ""
                    writer.add(k, steps(k, start, end, last == "terminated", **kind), start, last)
        for age, k in enumerate(trajectories):
            os.utime(tmp_path / name / f"trajectory_{k}", (age, age))  # in the order given
        return tmp_path / name

    return make
