"""`canter export` and `canter play BUNDLE`, from a trained run to a report."""

import json
import shutil

import pytest

from canter.cli.__main__ import main
from canter.export.runtime import Policy

pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def one_bundle(one_run, tmp_path_factory):
    """The bundle of a trained run of canter/CartPole, with its run."""
    folder, run = one_run
    copy = tmp_path_factory.mktemp("exported") / "run"
    shutil.copytree(run, copy)
    assert main(["export", str(copy)]) == 0
    return copy, copy / "export" / "model_4"


def test_a_run_is_exported_beside_its_checkpoints_and_checked(one_bundle, capsys):
    _, bundle = one_bundle
    spec = Policy(bundle).spec
    assert spec["training"]["task"] == "canter/CartPole"
    assert spec["samples"]["source"] == "the training environment"
    assert main(["export", "--check", str(bundle)]) == 0
    text = capsys.readouterr().out
    assert all(f"policy.{kind}" in text for kind in ("onnx", "ts", "c"))
    assert "largest difference" in text


def test_a_changed_bundle_is_refused_by_check_and_by_play(one_bundle, tmp_path, capsys):
    bundle = shutil.copytree(one_bundle[1], tmp_path / "b")
    (bundle / "README.md").write_text("other")
    for command in (["export", "--check", str(bundle)], ["play", str(bundle)]):
        assert main(command) == 2
        assert "README.md was changed" in capsys.readouterr().err


def test_a_bundle_is_played_with_a_report(one_bundle, tmp_path, capsys):
    report = tmp_path / "report.json"
    args = ["play", str(one_bundle[1]), "--episodes", "3", "--delay", "1", "--noise", "0.01", "--report", str(report)]
    assert main(args) == 0
    found = json.loads(report.read_text())
    assert len(found["returns"]) == 3
    assert found["mean_return"] > 0
    out = capsys.readouterr().out
    assert "mean return" in out
    assert f"step median     {1e3 * found['step_median']:12.4g} ms\n" in out
    assert main(["play", str(one_bundle[1]), "--task", "Pendulum-v1"]) == 2
    assert "but the bundle wants" in capsys.readouterr().err
    assert main(["play", str(one_bundle[1]), "--push", "1"]) == 2
    assert "pushes need MuJoCo's data" in capsys.readouterr().err


def test_options_of_a_simulation_are_refused_for_a_run(one_bundle, capsys):
    assert main(["play", str(one_bundle[0]), "--delay", "1"]) == 2
    assert "is no bundle, and the options of simulations are for bundles" in capsys.readouterr().err


def test_every_checkpoint_is_exported_to_a_folder_of_its_own(one_bundle, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(one_bundle[0], run, ignore=shutil.ignore_patterns("export"))
    shutil.copy(run / "model_4.pt", run / "model_2.pt")
    args = ["--every-checkpoint", "--formats", "onnx", "--no-env-samples", "--out", str(tmp_path / "all")]
    assert main(["export", str(run), *args]) == 0
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["model_2", "model_4"]
    assert Policy(tmp_path / "all" / "model_2").spec["samples"]["source"] == "normaliser statistics"
    assert main(["export", str(run / "model_2.pt"), *args]) == 2
    assert "leave --checkpoint out" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nowhere"), "--every-checkpoint"]) == 2
    assert "there is no model_<number>.pt" in capsys.readouterr().err


def test_parity_is_logged_with_the_run_if_asked(one_bundle, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(one_bundle[0], run, ignore=shutil.ignore_patterns("export"))
    assert main(["export", str(run), "--formats", "onnx", "--no-env-samples", "--upload"]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["export/difference_onnx"] < 1e-6
    assert rows[-1]["step"] == 256


def test_a_task_that_cannot_be_made_leaves_drawn_samples(one_bundle, tmp_path, capsys, monkeypatch):
    from canter.cli.errors import UserError

    def fail(*args, **kwargs):
        raise UserError("no simulator here")

    monkeypatch.setattr("canter.cli.export.open_env", fail)
    assert main(["export", str(one_bundle[0]), "--formats", "onnx", "--out", str(tmp_path / "b")]) == 0
    assert "samples are drawn from statistics" in capsys.readouterr().out
