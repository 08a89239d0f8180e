import shutil

import pytest
import torch

from canter.cli.__main__ import main

# Small enough to finish in a moment, and independent of the preset.
TINY = ["--num-envs", "4", "--num-steps-per-env", "16", "--num-mini-batches", "2", "--num-learning-epochs", "1"]
TINY += ["--final-episodes", "2", "--eval-episodes", "2", "--no-video", "--execution", "eager"]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def train_in(folder, task="canter/CartPole", *flags, name="r", steps=256):
    """Train a tiny policy; gives the exit code and the run directory."""
    args = ["train", task, *TINY, "--name", name, "--runs-dir", str(folder / "runs"), "--total-timesteps", str(steps)]
    args += [] if "--eval-interval" in flags else ["--eval-interval", "1"]
    return main([*args, *flags]), folder / "runs" / task / f"{name}-seed1"


@pytest.fixture
def train_and_draw(tmp_path):
    """Train under tmp_path/runs."""
    return lambda *args, **kwargs: train_in(tmp_path, *args, **kwargs)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train under tmp_path/runs without plotting, which takes seconds."""
    monkeypatch.setattr("canter.cli.train.plot_runs", lambda runs, path, **kwargs: path)
    return lambda *args, **kwargs: train_in(tmp_path, *args, **kwargs)


@pytest.fixture(scope="session")
def one_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    code, run = train_in(folder)
    assert code == 0
    return folder, run


@pytest.fixture
def trained(one_run, tmp_path):
    """A copy of a trained run of canter/CartPole, four iterations of 64 steps."""
    folder, run = one_run
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path / run.relative_to(folder)
