"""Checkpoints of earlier versions load, act as they did and learn on."""

import math
from pathlib import Path

import old_runs
import pytest
import torch

FILES = sorted((Path(__file__).parent / "checkpoints").glob("*.pt"))


def test_there_is_a_file_of_every_case():
    assert {file.stem for file in FILES} == old_runs.CASES.keys()


@pytest.mark.filterwarnings("ignore:the teacher has no teacher_ac_path")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_checkpoint_of_an_earlier_version_acts_the_same_and_learns_on(file):
    runner = old_runs.make_runner(file.stem)
    infos = runner.load(file)
    torch.testing.assert_close(old_runs.outputs(runner), torch.tensor(infos["actions"]))
    before, steps = runner.iteration, runner.tot_timesteps
    old_runs.learn(runner)
    assert before > 0
    assert runner.tot_timesteps > steps
    assert all(torch.isfinite(p).all() for p in runner.policy.parameters())
    assert math.isfinite(runner.alg.learning_rate)
