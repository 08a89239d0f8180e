"""From pixels alone: a dot is brought to a target that is only seen. A minute or two each, so run with `-m slow`."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent.parent / "benchmarks" / "visual.py"


@pytest.mark.parametrize(("policy", "steps", "score"), [("feed-forward", 60_000, -7.0), ("recurrent", 60_000, -8.0)])
def test_a_policy_learns_to_reach_what_it_sees(policy, steps, score, monkeypatch):
    """Standing still costs about 23; going straight there about 3."""
    monkeypatch.syspath_prepend(SCRIPT.parent)  # as for a script that is run
    spec = importlib.util.spec_from_file_location("visual", SCRIPT)
    visual = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(visual)
    torch.set_num_threads(1)
    result = visual.train("image-reach", policy, 1, steps, workers=False, device="cpu")
    assert result["curve"][0][2] < 2 * score
    assert result["eval"] > score
