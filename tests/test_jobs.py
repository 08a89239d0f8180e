"""The lists of trainings in benchmarks/jobs.yaml, and which of their jobs are still to be run."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))

from jobs import command, is_done, main, read_jobs  # noqa: E402  # pyright: ignore[reportMissingImports]
from learning import override  # noqa: E402  # pyright: ignore[reportMissingImports]

from canter.presets import load_preset  # noqa: E402
from canter.runners.run_config import parse_train_cfg  # noqa: E402

LISTS = """
walk: [{tasks: [Hopper-v5, Ant-v5], algo: sac, profile: strong, seeds: [1, 2], steps: 1000}]
arms: [{tasks: [Ant-v5], seeds: [3], note: low, set: [algorithm.lam=0.9, algorithm.gamma=0.9]}]
"""


@pytest.fixture
def lists(tmp_path):
    path = tmp_path / "lists.yaml"
    path.write_text(LISTS)
    return path


def test_a_job_is_a_task_with_a_seed(lists):
    jobs = read_jobs(lists, ["walk", "arms"])
    want = [("Hopper-v5", 1), ("Hopper-v5", 2), ("Ant-v5", 1), ("Ant-v5", 2), ("Ant-v5", 3)]
    assert [(job["task"], job["seed"]) for job in jobs] == want
    args = Namespace(device="cuda", threads=2, out=Path("out.jsonl"))
    words = command(jobs[0], args, 1.5)[2:]
    assert words[:3] == ["Hopper-v5", "--seeds", "1"]
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    want = {"--algo": "sac", "--profile": "strong", "--steps": "1000", "--minutes": "1.5", "--device": "cuda"}
    assert want.items() <= flags.items()
    assert command(jobs[-1], args, None)[-3:] == ["--set", "algorithm.lam=0.9", "algorithm.gamma=0.9"]
    assert "--minutes" not in command(jobs[-1], args, None)


def test_a_job_is_done_when_its_line_is_written(lists):
    job = read_jobs(lists, ["walk"])[0]
    line = {"task": "Hopper-v5", "algo": "sac", "profile": "strong", "seed": 1, "steps": 1008, "policy": "mlp"}
    assert is_done(job, [line])
    others = [{"seed": 2}, {"profile": None}, {"note": "low"}, {"steps": 992}, {"steps": 3000}, {"algo": "td3"}]
    assert not any(is_done(job, [{**line, **other}]) for other in others)


def test_a_list_with_all_lines_runs_nothing(lists, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.jsonl"
    line = {"task": "Ant-v5", "algo": "ppo", "note": "low", "seed": 3, "steps": 5}
    out.write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(sys, "argv", ["jobs.py", "arms", "--file", str(lists), "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert "1 of 1 jobs are done already" in capsys.readouterr().out


def test_mistakes_in_a_list_are_named(lists):
    with pytest.raises(SystemExit, match="has no list 'run'; there are walk, arms"):
        read_jobs(lists, ["run"])
    lists.write_text("a: [{tasks: [Ant-v5], seeds: [1], step: 5}]\nb: [{tasks: [Ant-v5], seeds: [1], set: [x=1]}]")
    with pytest.raises(SystemExit, match=r"\['step'\] in"):
        read_jobs(lists, ["a"])
    with pytest.raises(SystemExit, match="needs a note"):
        read_jobs(lists, ["b"])


def test_every_published_job_has_valid_settings():
    import yaml

    path = FOLDER / "jobs.yaml"
    seen = set()
    for job in read_jobs(path, list(yaml.safe_load(path.read_text()))):
        cfg = load_preset(job.get("preset") or job["task"], job["algo"], job.get("profile"))
        override(cfg, job.get("set", []))
        known = {name: cfg[name] for name in ("algorithm", "policy") if name in cfg}
        parse_train_cfg(known)
        key = tuple(str(job.get(name)) for name in ("task", "algo", "preset", "profile", "note", "seed", "steps"))
        assert key not in seen, f"{key} is listed twice"
        seen.add(key)
