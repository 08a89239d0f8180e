"""Reporting to a hyper-parameter search: a real Optuna study, and handles in the style of Ray."""

import math

import optuna
import pytest

from canter.runners import TrialPruned
from canter.runners.trials import pruned_exception, report_trial

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Handle:
    """Optuna's interface, recorded."""

    def __init__(self, prune_at=None):
        self.reports, self.attributes, self.prune_at = [], {}, prune_at

    def report(self, value, step):
        self.reports.append((value, step))

    def set_user_attr(self, name, value):
        self.attributes[name] = value

    def should_prune(self):
        return self.prune_at is not None and self.reports[-1][1] >= self.prune_at


def test_every_iteration_is_reported_after_its_evaluation(make_runner):  # row L25
    runner, trial = make_runner(), Handle()
    seen = []
    runner.add_callback("post_iteration", lambda r, s: seen.append((r.metrics_velrmsd, r.iteration)))
    runner.learn(3, trial=trial)
    assert trial.reports == seen
    assert [type(value) for value, _ in trial.reports] == [float] * 3
    assert [step for _, step in trial.reports] == [1, 2, 3]
    assert trial.attributes == {"CoT": runner.metrics_CoT}


def test_a_pruned_trial_saves_closes_and_raises(make_runner, tmp_path):  # row L26
    runner = make_runner(log_dir=tmp_path)
    with pytest.raises(optuna.TrialPruned, match="iteration 2"):
        runner.learn(5, trial=Handle(prune_at=2))
    assert runner.iteration == 2
    assert (tmp_path / "model_2.pt").exists()
    assert not (tmp_path / "crash").exists()
    assert runner.writer is None


def test_a_real_study_prunes_and_finishes(make_runner):  # rows L25, L26
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=-1e3, upper=1e3))

    def objective(trial):
        rate = trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)
        runner = make_runner(trial_metric="mean_reward", algorithm={"learning_rate": rate})
        if trial.number == 1:  # a run that is worth nothing
            runner.add_callback("post_rollout", lambda r, s: s.update({"episode/mean_reward": -1e6}))
        runner.learn(4, trial=trial)
        return sum(runner.rewbuffer)

    study.optimize(objective, n_trials=3)
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "PRUNED", "COMPLETE"]
    # episodes of 7 steps: none has ended after the first 4, so iteration 1 has nothing to report
    assert sorted(study.trials[0].intermediate_values) == [2, 3, 4]
    assert sorted(study.trials[1].intermediate_values) == [1]


def test_callables_and_report_handles_are_told_everything(make_runner):  # 7.9
    told, means = [], []
    runner = make_runner()
    runner.add_callback("post_iteration", lambda r, s: means.append(s.get("episode/mean_reward")))
    runner.learn(2, trial=told.append)

    class RayStyle:
        def report(self, metrics):
            told.append(metrics)

    runner.learn(1, trial=RayStyle())
    assert [entry["iteration"] for entry in told] == [1, 2, 3]
    assert all(set(entry) == {"velrmsd", "CoT", "mean_reward", "iteration"} for entry in told)
    assert math.isnan(told[0]["mean_reward"])
    assert [entry["mean_reward"] for entry in told[1:]] == means[1:]


@pytest.mark.parametrize(("metric", "expected"), [("velrmsd", 0.3), ("CoT", 0.7), ("mean_reward", 5.0)])
def test_the_metric_can_be_chosen(metric, expected):  # 7.9
    trial = Handle()
    values = {"velrmsd": 0.3, "CoT": 0.7, "mean_reward": 5.0}
    assert report_trial(trial, metric, values, 4) is False
    report_trial(trial, lambda v: v["CoT"] + v["velrmsd"], values, 5)
    assert trial.reports == [(expected, 4), (1.0, 5)]


def test_a_metric_the_environment_does_not_give_is_an_error_with_a_way_out(make_runner, counting):  # 7.9
    with pytest.raises(ValueError, match=r"gives no 'velrmsd'.*trial_metric='mean_reward'"):
        make_runner(counting()).learn(1, trial=Handle())
    with pytest.raises(ValueError, match=r"trial_metric must be one of velrmsd, CoT, mean_reward.*'return'"):
        make_runner(trial_metric="return").learn(1, trial=Handle())


def test_mean_reward_waits_for_the_first_episode(make_runner, counting):
    runner, trial = make_runner(counting((6, 6)), trial_metric="mean_reward", num_steps_per_env=4), Handle()
    runner.learn(2, trial=trial)
    assert trial.reports == [((21 + 621) / 2, 2)]
    assert trial.attributes == {}  # no CoT here


def test_without_optuna_the_exception_is_ours(monkeypatch):  # 7.9, F68
    import sys

    monkeypatch.setitem(sys.modules, "optuna", None)
    assert type(pruned_exception("x")) is TrialPruned
