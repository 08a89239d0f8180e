"""Every example runs from start to end."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from canter.modules.build import POLICIES

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SMALL = {
    "own_environment": ["--num-envs", "16"],
    "sac_many_environments": ["--num-envs", "8", "--steps", "160"],
    "sweep": ["--trials", "2"],
}


@pytest.fixture(autouse=True)
def tables():
    before = dict(POLICIES)
    yield
    POLICIES.clear()
    POLICIES.update(before)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_from_start_to_end(example, tmp_path, monkeypatch, capsys):
    flags = ["--steps", "600", "--out", str(tmp_path), *SMALL.get(example.stem, [])]
    monkeypatch.setattr(sys, "argv", [example.name, *flags])
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(example), run_name="__main__")
    out = capsys.readouterr().out
    number = r"-?\d+(\.\d+)?(e-?\d+)?"
    assert re.search(number, out.splitlines()[-1] or out.splitlines()[-2])
    assert list(tmp_path.rglob("checkpoint_final.pt"))
    assert list(tmp_path.rglob("metrics.jsonl"))


def test_the_list_of_examples_is_complete():
    text = (EXAMPLES[0].parent / "README.md").read_text()
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\)", text, re.MULTILINE)
    assert sorted(listed) == [example.name for example in EXAMPLES]
