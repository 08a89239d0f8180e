"""Measured numbers in the documentation come from benchmarks/results."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "report.py"
PAGE = "docs/benchmarks.md"
TABLE = """\
<!-- table: runs.jsonl algo=ppo per task
| task | mean | each seed | of Reach |
| {task} | {mean eval .1f} | {each eval .1f} | {mean eval / task=Reach mean eval .0%} |
-->

| task | mean | each seed | of Reach |
|---|---|---|---|
| Reach | 3.0 | 2.0, 4.0 | 100 % |
| Push | 6.0 | 6.0 | 200 % |

<!-- end -->
"""


@pytest.fixture
def report(tmp_path, monkeypatch):
    """The script, with two tasks of PPO and one run of SAC as its results."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    module = importlib.import_module("report")
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


def figure(query, text):
    return f"It is <!-- figure: runs.jsonl {query} -->{text}<!-- end --> here."


def test_every_figure_of_the_documentation_has_its_source():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("algo=sac eval .1f", "9.2"),
        ("task=Reach mean eval .2f", "3.00"),
        ("task=Reach each eval .0f", "2, 4"),
        ("task=Reach iqm eval .1f", "3.0"),
        ("task=Reach interval eval .1f", "2.0, 4.0"),
        ("algo=ppo max eval .0f", "6"),
        ("algo=ppo min eval .0f", "2"),
        ("all task", "Reach, Push"),
        ("task=Reach,Push algo=sac seed", "1"),
        ("task=Reach rate .2M", "1.23 M"),
        ("task=Reach rate ,", "1,230,000"),
        ("task=Reach mean curve@99 .0f", "2"),
        ("task=Reach mean curve@100 .0f", "6"),
        ("algo=sac eval / task=Reach seed=2 eval .0%", "231 %"),
        ("algo=sac seconds .1f", "-"),
        ("task=Reach about", "2026-01-02 on a robot at commit abc1, abc2"),
    ],
)
def test_a_query_gives_the_number_of_its_lines(report, query, text):
    assert report.render(figure(query, "?")) == figure(query, text)
    assert report.problems(PAGE, figure(query, text)) == []


def test_a_table_has_one_row_per_group(report):
    assert report.problems(PAGE, TABLE) == []
    assert report.render(TABLE.replace("| Push | 6.0", "| Pull | 7.0")) == TABLE


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        (figure("algo=sac eval .1f", "9.3"), "differs from its source"),
        (TABLE.replace("| 3.0 |", "| 3.1 |"), "'| Reach | 3.1 | 2.0, 4.0 | 100 % |' should be"),
        (TABLE.replace("| Push | 6.0 | 6.0 | 200 % |\n", ""), "should be '| Push | 6.0 | 6.0 | 200 % |'"),
        (TABLE.replace("\n\n<!-- end", "\n| Slide | 8.0 | 8.0 | 267 % |\n\n<!-- end"), "differs from its source"),
    ],
)
def test_a_number_that_was_changed_by_hand_fails(report, page, sentence):
    (problem,) = report.problems(PAGE, page)
    assert problem.startswith(f"{PAGE}:1: ")
    assert sentence in problem


@pytest.mark.parametrize(
    "text",
    [
        "4.2x faster",
        "It reaches 4894.1.",
        "| Reach | 12 |",
        "up to -90",
        "after ten seconds",
        "about 3 %",
        "5,000 steps",
        "`1.7 times` as fast",
    ],
)
def test_a_number_without_a_source_fails(report, text):
    problems = report.problems(PAGE, f"# Title\n\n{text}\n")
    assert problems
    assert all(problem.startswith(f"{PAGE}:3: the number ") for problem in problems)


def test_a_number_typed_into_the_row_of_a_table_fails(report):
    page = report.render(TABLE.replace("| {task} |", "| {task} after 50k |"))
    (problem,) = report.problems(PAGE, page)
    assert "'50'" in problem or "50k" in problem


@pytest.mark.parametrize(
    "text",
    [
        "`4096` environments",
        "HalfCheetah-v5 on an H200",
        "bf16, float32, TD3",
        "1. first",
        "```bash\n--envs 64\n```",
        "[page](a1/2.md)",
        "three seeds",
    ],
)
def test_settings_in_code_font_and_names_are_no_measurements(report, text):
    assert report.problems(PAGE, text) == []


def test_other_pages_may_have_numbers_without_a_unit_of_measurement(report):
    assert report.problems("docs/cli.md", "The default is 8, and 0 for none; see rsl_rl 2.x.") == []
    assert report.problems("docs/cli.md", "It is 1.7 times as fast.")
    assert report.problems("docs/cli.md", "It uses 12% less.")
    assert report.problems("docs/cli.md", "It takes two to four minutes.")


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("task=Pull eval", "no line has task=['Pull']"),
        ("algo=sac score", "has no 'score'"),
        ("algo=ppo eval", "several values"),
        ("median eval", "functions are"),
        ("mean eval", "the same seed"),
        ("task=Push algo=ppo curve@50", "index out of range"),
        ("task=Push algo=sac mean seconds", "NoneType"),
    ],
)
def test_a_query_without_an_answer_names_what_is_missing(report, query, sentence):
    page = figure(query, "1")
    (problem,) = report.problems(PAGE, page)
    assert sentence in problem
    assert report.render(page) == page


def test_a_file_that_is_missing_is_named(report):
    (problem,) = report.problems(PAGE, figure("mean eval", "1").replace("runs", "walks"))
    assert "there is no benchmarks/results/walks.jsonl; there are ['runs.jsonl']" in problem


def test_a_figure_must_not_begin_a_line(report):
    (problem,) = report.problems(PAGE, "text\n" + figure("algo=sac eval .1f", "9.2")[6:])
    assert problem.startswith(f"{PAGE}:2: a figure must not begin a line")


def test_a_result_is_kept_with_its_command_but_not_with_paths(report, tmp_path, monkeypatch, capsys):
    out = tmp_path / "new.jsonl"
    monkeypatch.setattr(sys, "argv", ["/home/me/learning.py", "CartPole-v1", "--out", str(out), "--seeds", "1"])
    report.report({"eval": 1.0, "curve": [[0, 1]]}, out)
    (line,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert line["about"]["command"] == "benchmarks/learning.py CartPole-v1 --seeds 1"
    assert {"date", "machine", "versions", "commit"} <= set(line["about"])
    assert line["curve"] == [[0, 1]]
    assert "curve" not in capsys.readouterr().out


def test_the_scores_of_canter_tasks_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    module = importlib.import_module("report")
    assert module.SCORES.read_text() == module.scores_text(), "run python benchmarks/report.py --write"
    cartpole = [row for row in module.read("learning.jsonl") if row["task"] == "CartPole-v1" and row["policy"] == "mlp"]
    assert json.loads(module.SCORES.read_text())["ppo"]["CartPole-v1"]["seeds"] == len(cartpole)


def test_a_score_is_of_the_runs_nearest_to_the_length_of_the_preset(report, monkeypatch):
    rows = [
        {"task": "Pendulum-v1", "algo": "sac", "steps": n, "eval": e} for n, e in ((20_000, 1), (20_000, 3), (9, 7))
    ]
    rows.append({**rows[0], "profile": "strong", "eval": 50})
    monkeypatch.setattr(report, "read", lambda name: rows if name.startswith("off_policy") else [])
    assert report.scores() == {"sac": {"Pendulum-v1": {"return": 2.0, "seeds": 2, "steps": 20_000}}}
