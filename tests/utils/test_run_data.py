"""The loader of runs that plots and reports share."""

import json

import numpy as np
import pytest
import yaml

from canter.utils.logging import Logger
from canter.utils.run_data import differing_settings, find_runs, group_runs, load_run, training_seconds


def make_run(path, seed=1, lr=1e-3, task="Pendulum-v1", values=(1.0, 2.0, 3.0), final=None, start=1000.0, **settings):
    """A run with an evaluation every 100 steps and 10 s."""
    path.mkdir(parents=True)
    rows = [{"eval/mean_reward": v, "step": 100 * i, "time": start + 10.0 * i} for i, v in enumerate(values, 1)]
    rows[0] |= {"time/collection": 3.0, "time/learning": 2.0}
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"algorithm": {"learning_rate": lr, **settings}, "seed": seed, "run": {"task": task, "video": seed == 1}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    (path / "machine.json").write_text(json.dumps({"processor": "abacus", "canter": "0.1"}))
    if final is not None:
        (path / "evaluation.json").write_text(json.dumps({"eval/mean_reward": final, "eval/std_reward": 0.5}))
    return path


def test_a_run_is_read_with_its_settings_evaluation_machine_and_clock(tmp_path):
    run = load_run(make_run(tmp_path / "a-seed1", final=9.0))
    assert run.series["eval/mean_reward"] == ([100, 200, 300], [1.0, 2.0, 3.0])
    assert (run.task, run.name, run.settings["algorithm.learning_rate"]) == ("Pendulum-v1", "a", 1e-3)
    assert run.machine["processor"] == "abacus"
    assert (run.steps, run.seconds) == ([100, 200, 300], [5.0, 15.0, 25.0])  # the first row ends 5 s of work


def test_the_score_is_the_final_evaluation_else_the_last_finite_value(tmp_path):
    with_evaluation = load_run(make_run(tmp_path / "a", final=9.0))
    without = load_run(make_run(tmp_path / "b", values=(1.0, 4.0, float("nan"))))
    assert with_evaluation.final_score("eval/mean_reward") == 9.0
    assert without.final_score("eval/mean_reward") == 4.0
    assert without.final_score("nope") is None


def test_pauses_of_a_resumed_run_are_no_training_time():
    times = np.array([0.0, 5, 10, 15, 5000, 5005])
    assert training_seconds(times) == [5, 10, 15, 20, 25]
    assert training_seconds(np.array([0.0, 500, 1000])) == [500, 1000]  # slow, but usual
    assert training_seconds(np.array([])) == []


def test_metrics_alone_and_damaged_files_are_enough(tmp_path):
    with Logger(None, tmp_path) as logger:
        logger.log_scalars({"a": 1.0}, 10)
    (tmp_path / "config.yaml").write_text("[: nonsense")
    (tmp_path / "evaluation.json").write_text("{")
    (tmp_path / "machine.json").write_text("[1]")
    run = load_run(tmp_path)
    assert (run.series["a"], run.settings, run.evaluation, run.machine) == (([10], [1.0]), {}, {}, {})
    assert load_run(tmp_path / "metrics.jsonl").path == tmp_path


@pytest.mark.parametrize("text", ['{"eval/mean_reward": NaN}', '{"eval/mean_reward": "high"}', "[]"])
def test_an_evaluation_that_is_no_number_is_left_out(tmp_path, text):
    path = make_run(tmp_path / "a")
    (path / "evaluation.json").write_text(text)
    assert load_run(path).final_score("eval/mean_reward") == 3.0


def test_the_evaluation_before_a_run_was_resumed_is_not_its_score(tmp_path):
    path = make_run(tmp_path / "a")
    (path / "evaluation.json").write_text('{"eval/mean_reward": 7.0, "step": 300}')
    assert load_run(path).final_score("eval/mean_reward") == 7.0
    (path / "evaluation.json").write_text('{"eval/mean_reward": 7.0, "step": 200}')
    assert load_run(path).final_score("eval/mean_reward") == 3.0


def test_runs_of_several_launches_are_one_group(tmp_path):
    runs = [make_run(tmp_path / f"a-seed{seed}", seed) for seed in (1, 2)]
    for run in runs:
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["run"] |= {"ranks": 2, "launch": run.name}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert list(group_runs([load_run(run) for run in runs])) == ["a"]


def test_runs_are_found_below_a_directory(tmp_path):
    paths = [make_run(tmp_path / "x" / name) for name in ("a", "b")]
    assert find_runs(tmp_path) == paths
    assert find_runs(paths[1]) == [paths[1]]
    with pytest.raises(FileNotFoundError, match="there is no run in"):
        find_runs(tmp_path / "nothing")


def test_groups_are_runs_that_differ_in_seed_task_and_logging_only(tmp_path):
    runs = [make_run(tmp_path / f"r{seed}-{lr}", seed, lr) for lr in (1e-3, 1e-2) for seed in (1, 2)]
    runs.append(make_run(tmp_path / "other", 3, 1e-2, task="Hopper-v5"))
    loaded = [load_run(path) for path in runs]
    assert differing_settings(loaded) == ["algorithm.learning_rate"]
    groups = group_runs(loaded)
    assert {label: [run.path.name for run in group] for label, group in groups.items()} == {
        "learning_rate=0.001": ["r1-0.001", "r2-0.001"],
        "learning_rate=0.01": ["r1-0.01", "r2-0.01", "other"],
    }


def test_groups_without_a_short_difference_have_the_names_of_their_runs(tmp_path):
    same = [load_run(make_run(tmp_path / f"mine-seed{seed}", seed)) for seed in (1, 2)]
    assert list(group_runs(same)) == ["mine"]
    many = load_run(make_run(tmp_path / "new-seed1", 1, 0.5, a=1, b=2, c=3))
    assert list(group_runs([*same, many])) == ["mine", "new"]
    near = load_run(make_run(tmp_path / "near-seed1", 1, 0.50000001, a=1, b=2, c=3))
    assert list(group_runs([many, near])) == ["new", "near"]  # their values look the same
    again = load_run(make_run(tmp_path / "x" / "new-seed1", 1, 0.5, a=1, b=2, c=4))
    assert list(group_runs([*same, many, again])) == ["group 1", "group 2", "group 3"]
