"""Measured numbers in the documentation come from benchmarks/results."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def imported(monkeypatch):
    """`imported("docs/make_benchmarks")`: a script as a module."""

    def load(name):
        monkeypatch.syspath_prepend((ROOT / name).parent)
        return importlib.import_module(Path(name).name)

    return load


@pytest.fixture
def page(imported, tmp_path, monkeypatch):
    """The script of the page, with two tasks of PPO and one run of SAC as its results."""
    module = imported("docs/make_benchmarks")
    runs = [
        {"task": "Reach", "algo": "ppo", "seed": 1, "eval": 2.0, "rate": 1_230_000, "curve": [[0, 1], [100, 5]]},
        {"task": "Reach", "algo": "ppo", "seed": 2, "eval": 4.0, "rate": 1_230_000, "curve": [[0, 3], [100, 7]]},
        {"task": "Push", "algo": "ppo", "seed": 1, "eval": 6.0, "curve": []},
        {"task": "Push", "algo": "sac", "seed": 1, "eval": 9.25, "curve": [], "seconds": None},
    ]
    for run in runs:
        run["about"] = {"date": "2026-01-02", "machine": "a robot", "commit": f"abc{run['seed']}"}
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def test_the_page_of_benchmarks_is_that_of_the_results(imported):
    module = imported("docs/make_benchmarks")
    text = module.TEMPLATE.read_text(encoding="utf-8")
    assert module.PAGE.read_text(encoding="utf-8") == module.render(text), "run python docs/make_benchmarks.py"
    used = set(re.findall(r"\S+\.jsonl", text + (ROOT / "benchmarks/quotes.md").read_text(encoding="utf-8")))
    assert {path.name for path in module.RESULTS.iterdir()} <= used, "no page has these results"


def test_figures_that_other_pages_quote_are_those_of_the_results(imported):
    quotes = imported("docs/make_benchmarks").render((ROOT / "benchmarks/quotes.md").read_text(encoding="utf-8"))
    for section in quotes.split("\n## ")[1:]:
        name, _, pieces = section.partition("\n")
        text = (ROOT / name).read_text(encoding="utf-8")
        assert [piece for piece in pieces.strip().split("\n\n") if piece not in text] == [], name


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("algo=sac eval .1f", "9.2"),
        ("task=Reach mean eval .2f", "3.00"),
        ("task=Reach each eval .0f", "2, 4"),
        ("task=Reach iqm eval .1f", "3.0"),
        ("task=Reach interval eval .1f", "2.0, 4.0"),
        ("algo=ppo max eval .0f", "6"),
        ("all task", "Reach, Push"),
        ("task=Reach,Push algo=sac seed", "1"),
        ("task=Reach rate .2M", "1.23 M"),
        ("task=Reach mean curve@99 .0f", "2"),
        ("task=Reach mean curve@100 .0f", "6"),
        ("algo=sac eval / task=Reach seed=2 eval .0%", "231 %"),
        ("algo=sac seconds .1f", "-"),
        ("task=Reach about", "2026-01-02 on a robot at commit abc1, abc2"),
    ],
)
def test_a_query_gives_the_number_of_its_lines(page, query, text):
    assert page.render(f"It is {{{{runs.jsonl {query}}}}} here.") == f"It is {text} here."


def test_a_table_has_one_row_per_group(page):
    table = "| task | mean | of Reach |\n| {task} | {mean eval .1f} | {mean eval / task=Reach mean eval .0%} |"
    assert page.render(f"```table runs.jsonl algo=ppo per task\n{table}\n```").splitlines() == [
        "| task | mean | of Reach |",
        "|---|---|---|",
        "| Reach | 3.0 | 100 % |",
        "| Push | 6.0 | 200 % |",
    ]


@pytest.mark.parametrize("query", ["task=Pull eval", "algo=sac score", "algo=ppo eval", "median eval", "mean eval"])
def test_a_query_without_an_answer_is_an_error(page, query):
    with pytest.raises(LookupError):
        page.render(f"{{{{runs.jsonl {query}}}}}")


def test_a_result_is_kept_with_its_command_but_not_with_paths(imported, tmp_path, monkeypatch, capsys):
    out = tmp_path / "new.jsonl"
    monkeypatch.setattr(sys, "argv", ["/home/me/learning.py", "CartPole-v1", "--out", str(out), "--seeds", "1"])
    imported("benchmarks/report").report({"eval": 1.0, "curve": [[0, 1]]}, out)
    (line,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert line["about"]["command"] == "benchmarks/learning.py CartPole-v1 --seeds 1"
    assert {"date", "machine", "versions", "commit"} <= set(line["about"])
    assert line["curve"] == [[0, 1]]
    assert "curve" not in capsys.readouterr().out


def test_the_scores_of_canter_tasks_are_those_of_the_results(imported):
    module = imported("benchmarks/report")
    assert module.SCORES.read_text() == module.scores_text(), "run python benchmarks/report.py"
    cartpole = [row for row in module.read("learning.jsonl") if row["task"] == "CartPole-v1" and row["policy"] == "mlp"]
    assert json.loads(module.SCORES.read_text())["ppo"]["CartPole-v1"]["seeds"] == len(cartpole)


def test_a_score_is_of_the_runs_nearest_to_the_length_of_the_preset(imported, monkeypatch):
    report = imported("benchmarks/report")
    ends = ((20_000, 1), (20_000, 3), (9, 7))
    rows = [{"task": "Pendulum-v1", "algo": "sac", "steps": steps, "eval": score} for steps, score in ends]
    rows.append({**rows[0], "profile": "strong", "eval": 50})
    monkeypatch.setattr(report, "read", lambda name: rows if name.startswith("off_policy") else [])
    assert report.scores() == {"sac": {"Pendulum-v1": {"return": 2.0, "seeds": 2, "steps": 20_000}}}
