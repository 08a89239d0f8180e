"""Reports to a hyperparameter search: a real Optuna study, recorded trials, and callables in the style of Ray."""

import math
import warnings

import optuna
import pytest

from canter.runners import TrialPruned
from canter.runners.run_log import TrialReporter, pruned_exception

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Reports:
    """A trial that only has `report(value, step)`."""

    def __init__(self):
        self.reports = []

    def report(self, value, step):
        self.reports.append((value, step))


class Handle(Reports):
    """The interface of an Optuna trial."""

    def __init__(self, prune_at=None):
        super().__init__()
        self.attributes, self.prune_at = {}, prune_at

    def set_user_attr(self, name, value):
        self.attributes[name] = value

    def should_prune(self):
        return self.prune_at is not None and self.reports[-1][1] >= self.prune_at


def test_every_iteration_is_reported_after_its_evaluation(make_runner):
    runner, trial = make_runner(), Handle()
    seen = []
    runner.add_callback("post_iteration", lambda r, s: seen.append((r.metrics_velrmsd, r.iteration)))
    runner.learn(3, trial=trial)
    assert trial.reports == seen
    assert [type(value) for value, _ in trial.reports] == [float] * 3
    assert [step for _, step in trial.reports] == [1, 2, 3]
    assert trial.attributes == {"CoT": runner.metrics_CoT}


def test_a_pruned_trial_saves_closes_and_raises(make_runner, tmp_path):
    runner = make_runner(log_dir=tmp_path)
    with pytest.raises(optuna.TrialPruned, match="iteration 2"):
        runner.learn(5, trial=Handle(prune_at=2))
    assert runner.iteration == 2
    assert (tmp_path / "model_2.pt").exists()
    assert not (tmp_path / "crash").exists()
    assert runner.writer is None


def test_a_trial_without_should_prune_gets_values_and_is_never_pruned(make_runner):
    runner, trial = make_runner(), Reports()
    runner.learn(2, trial=trial)
    assert trial.reports == [(trial.reports[0][0], 1), (runner.metrics_velrmsd, 2)]


def test_a_real_study_prunes_and_finishes(make_runner):
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=-1e3, upper=1e3))

    def objective(trial):
        rate = trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)
        runner = make_runner(trial_metric="mean_reward", algorithm={"learning_rate": rate})
        if trial.number == 1:  # a run with a very low return
            runner.add_callback("post_rollout", lambda r, s: s.update({"episode/mean_reward": -1e6}))
        runner.learn(4, trial=trial)
        return sum(runner.rewbuffer)

    study.optimize(objective, n_trials=3)
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "PRUNED", "COMPLETE"]
    # episodes of 7 steps: none has ended after the first 4, so iteration 1 has nothing to report
    assert sorted(study.trials[0].intermediate_values) == [2, 3, 4]
    assert sorted(study.trials[1].intermediate_values) == [1]


def test_callables_and_handles_that_take_a_dict_get_all_metrics(make_runner):
    dicts, means = [], []
    runner = make_runner()
    runner.add_callback("post_iteration", lambda r, s: means.append(s.get("episode/mean_reward")))
    runner.learn(2, trial=dicts.append)

    class RayStyle:
        def report(self, metrics):
            dicts.append(metrics)

    runner.learn(1, trial=RayStyle())
    assert [entry["iteration"] for entry in dicts] == [1, 2, 3]
    assert all(entry.keys() >= {"velrmsd", "CoT", "mean_reward", "iteration", "train/value_loss"} for entry in dicts)
    assert math.isnan(dicts[0]["mean_reward"])
    assert [entry["mean_reward"] for entry in dicts[1:]] == means[1:]


def test_something_that_cannot_take_a_report_is_refused_before_the_first_step(make_runner, counting):
    env = counting()
    with pytest.raises(TypeError, match=r"trial must be callable or have report\(value, step\), got int"):
        make_runner(env).learn(1, trial=3)
    assert env.num_steps == 0


METRICS = {"episode/mean_reward": 5.0, "eval/mean_reward": 6.0, "train/value_loss": 7.0}


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("velrmsd", 0.3), ("CoT", 0.7), ("mean_reward", 5.0), (None, 0.3), *METRICS.items()],
)
def test_the_reported_metric_is_chosen_by_name_or_by_a_function(metric, expected):
    trial = Handle()
    assert TrialReporter(trial, metric, eval_interval=1).report(METRICS, 0.3, 0.7, 4) is False
    TrialReporter(trial, lambda v: v["CoT"] + v["velrmsd"]).report(METRICS, 0.3, 0.7, 5)
    assert trial.reports == [(expected, 4), (1.0, 5)]


def test_a_metric_that_is_never_available_is_an_error_or_a_warning(make_runner, counting):
    with pytest.raises(ValueError, match=r"gives no 'velrmsd'.*trial_metric='mean_reward'"):
        make_runner(counting(), trial_metric="velrmsd").learn(1, trial=Handle())
    with pytest.raises(ValueError, match=r"trial_metric must be one of velrmsd, CoT, mean_reward.*'return'"):
        make_runner(trial_metric="return")  # with or without a trial
    with pytest.raises(ValueError, match=r"'eval/mean_reward' needs eval_interval"):
        make_runner(trial_metric="eval/mean_reward").learn(1, trial=Handle())
    with pytest.raises(ValueError, match="no metric is named 'train/valu_loss'.*train/value_loss"):
        make_runner(trial_metric="train/valu_loss").learn(1, trial=Handle())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make_runner(trial_metric="train/value_loss").learn(1, trial=Handle())


def test_mean_reward_waits_for_the_first_episode(make_runner, counting):
    runner, trial = make_runner(counting((6, 6)), trial_metric="mean_reward", num_steps_per_env=4), Handle()
    runner.learn(2, trial=trial)
    assert trial.reports == [((21 + 621) / 2, 2)]
    assert trial.attributes == {}  # no CoT here


def test_without_optuna_the_exception_is_canters_own(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "optuna", None)
    assert type(pruned_exception("x")) is TrialPruned
