"""Runs and checkpoints of rsl_rl and mjlab's own script, which name no task and have their settings elsewhere."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from canter.cli.__main__ import main
from canter.export.load import load
from canter.export.runtime import Policy
from canter.utils.checkpoint import load_checkpoint

FILES = Path(__file__).parents[1] / "compat" / "rsl_rl"


@pytest.fixture(params=["rsl_rl_5_mlp_normalized", "rsl_rl_5_gru", "rsl_rl_5_beta"])
def foreign(request, tmp_path):
    """The folder of a run of rsl_rl: model_1.pt and params/agent.yaml, in which tuples are Python's."""
    state = load_checkpoint(FILES / f"{request.param}.pt", "cpu")
    run = tmp_path / "run"
    (run / "params").mkdir(parents=True)
    shutil.copy(FILES / f"{request.param}.pt", run / "model_1.pt")
    cfg = state["infos"]["cfg"]
    text = yaml.safe_dump(cfg).replace("hidden_dims:", "hidden_dims: !!python/tuple", 1)
    (run / "params" / "agent.yaml").write_text(text)
    return run, state["infos"]


def test_a_run_of_rsl_rl_is_exported_with_its_training_dict(foreign, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    run, infos = foreign
    assert main(["export", str(run), "--out", str(tmp_path / "b"), "--formats", "onnx"]) == 0
    assert "policy.onnx" in capsys.readouterr().out
    acting = load(run / "model_1.pt")
    groups = infos["cfg"]["obs_groups"]["actor"]
    obs = torch.cat([infos["obs"][0][name] for name in groups], dim=1)[:1].numpy()
    expected = infos["actions"][0][:1].numpy()
    assert acting.predict(obs) == pytest.approx(expected, abs=1e-5)
    assert Policy(tmp_path / "b").predict(obs) == pytest.approx(expected, abs=1e-5)
    given = shutil.move(run / "params" / "agent.yaml", tmp_path / "agent.yaml")
    assert main(["export", str(run), "--out", str(tmp_path / "c"), "--formats", "onnx"]) != 0
    assert "--config FILE" in capsys.readouterr().err
    args = ["export", str(run / "model_1.pt"), "--out", str(tmp_path / "c"), "--formats", "onnx"]
    assert main([*args, "--config", str(given)]) == 0


def test_eval_and_play_of_another_programs_run_ask_for_the_task(foreign, capsys):
    run, _ = foreign
    for command in ("eval", "play"):
        assert main([command, str(run)]) == 2
        assert "names no task; give it: --task NAME" in capsys.readouterr().err
