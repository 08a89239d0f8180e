"""Six events in their order, the arguments of callbacks, and the effect of their exceptions."""

import pytest

from canter.algorithms.ppo import PPO
from canter.runners import RUNNERS, OffPolicyRunner, OnPolicyRunner, StopTraining
from canter.runners.run_log import EVENTS, Callbacks
from canter.runners.runner import Runner
from canter.utils.logging import read_rows

ORDER = ["pre_iteration", "pre_rollout", "post_rollout", "pre_update", "post_update", "post_iteration"]


def test_the_six_events_come_in_order_with_their_arguments(make_runner):
    runner, seen = make_runner(), []
    for event in reversed(ORDER):
        runner.add_callback(event, lambda *args, event=event: seen.append((event, *args)))
    runner.learn(2)
    assert [entry[0] for entry in seen] == ORDER * 2
    assert set(ORDER) == set(EVENTS)
    for event, given, *stats in seen:
        assert given is runner
        assert len(stats) == (1 if event.startswith("post_") else 0)


@pytest.mark.parametrize("event", ["post_rollout", "post_update", "post_iteration"])
def test_metrics_added_by_a_callback_are_logged(make_runner, tmp_path, event):
    runner = make_runner(log_dir=tmp_path)
    runner.add_callback(event, lambda r, stats: stats.update({"mine/height": 10.0 + r.iteration}))
    history = runner.learn(2).history
    logged = [row["mine/height"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert logged == [row["mine/height"] for row in history] == ([11, 12] if event == "post_iteration" else [10, 11])


def test_an_iteration_is_logged_even_if_a_callback_ends_the_training(make_runner, tmp_path):
    runner = make_runner(log_dir=tmp_path)

    def stop(runner, stats):
        raise StopTraining

    runner.add_callback("post_iteration", stop)
    runner.learn(3)
    assert len(list(read_rows(tmp_path / "metrics.jsonl"))) == 1


def test_a_callback_that_cannot_be_called_is_refused_at_once(make_runner):
    with pytest.raises(TypeError, match="the callback of post_iteration must be a function such as lambda .*, got 3"):
        make_runner().add_callback("post_iteration", 3)


def test_an_unknown_event_is_answered_with_the_known_ones(make_runner):
    with pytest.raises(ValueError, match=r"unknown event 'post_step'; events are .*post_rollout"):
        make_runner().add_callback("post_step", print)


def test_the_order_of_an_iteration_is_collect_update_rate_evaluate_log_save(make_runner, monkeypatch, tmp_path):
    runner, seen = make_runner(log_dir=tmp_path, save_interval=1, eval_interval=1, eval_episodes=1), []
    for target, name in (
        (runner.alg, "compute_returns"),
        (runner.alg, "update"),
        (runner.alg, "adjust_learning_rate"),
        (runner, "evaluation"),
        (runner, "eval"),
        (runner, "log"),
        (runner.checkpoints, "save_periodic"),
        (runner.checkpoints, "save_final"),
    ):
        original = getattr(target, name)
        monkeypatch.setattr(target, name, lambda *a, f=original, n=name, **k: (seen.append(n), f(*a, **k))[1])
    runner.learn(1)
    assert seen[0] == "adjust_learning_rate"  # a resumed run continues its schedule
    assert seen[1:-1] == [
        "compute_returns",
        "update",
        "adjust_learning_rate",
        "evaluation",
        "eval",
        "log",
        "save_periodic",
    ]
    assert seen[-1] == "save_final"


def test_a_linear_rate_reaches_zero_with_the_run(make_runner):
    runner = make_runner(algorithm={"schedule": "linear", "learning_rate": 0.4, "clip_schedule": "linear"})
    rates = []
    runner.add_callback("pre_update", lambda r: rates.append((float(r.alg.lr), float(r.alg.clip))))
    result = runner.learn(4)
    assert [rate for rate, _ in rates] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert [clip for _, clip in rates] == pytest.approx([0.2, 0.15, 0.1, 0.05])
    assert float(runner.alg.lr) == 0.0
    assert [row["train/learning_rate"] for row in result.history] == pytest.approx([0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize("event", EVENTS)
def test_stop_training_ends_cleanly_with_a_final_checkpoint_and_can_go_on(make_runner, event, tmp_path):
    runner = make_runner(log_dir=tmp_path)

    def stop(runner, *stats):
        if runner.iteration >= 1:
            raise StopTraining

    runner.add_callback(event, stop)
    result = runner.learn(5)
    assert runner.iteration == 1
    assert len(result.history) == 1
    assert (tmp_path / "model_1.pt").exists()
    assert (tmp_path / "checkpoint_final.pt").exists()
    assert not (tmp_path / "crash").exists()
    runner.callbacks.by_event[event].clear()
    runner.learn(2)
    assert runner.iteration == 3


def test_stop_training_stops_even_where_errors_are_only_warnings(make_runner):
    runner = make_runner(callback_errors="warn")

    def stop(runner):
        raise StopTraining

    runner.add_callback("pre_iteration", stop)
    runner.learn(3)
    assert runner.iteration == 0


def test_an_exception_in_a_callback_comes_out_with_its_own_traceback(make_runner, tmp_path):
    runner = make_runner(log_dir=tmp_path)

    def user_function(runner, stats):
        raise LookupError("mine")

    runner.add_callback("post_update", user_function)
    with pytest.raises(LookupError, match="mine") as caught:
        runner.learn(2)
    assert caught.traceback[-1].name == "user_function"
    assert (tmp_path / "crash" / "model_0.pt").exists()
    assert not (tmp_path / "model_0.pt").exists()


def test_callback_errors_can_be_warnings(make_runner):
    runner, seen = make_runner(callback_errors="warn"), []

    def broken(runner):
        raise LookupError("mine")

    runner.add_callback("pre_rollout", broken)
    runner.add_callback("pre_rollout", lambda r: seen.append(1))
    with pytest.warns(UserWarning, match=r"pre_rollout callback .*broken.* failed: LookupError"):
        runner.learn(2)
    assert seen == [1, 1]


def test_callbacks_stand_alone():
    callbacks, seen = Callbacks(), []
    callbacks.add("pre_update", seen.append)
    callbacks.fire("pre_update", "runner")
    callbacks.fire("post_update", "runner", {})
    assert seen == ["runner"]


def test_the_loop_is_written_once():
    assert "learn" not in vars(PPO)
    assert "learn" in vars(Runner)
    assert "_one_iteration" in vars(Runner)
    assert not [cls for cls in (OnPolicyRunner, OffPolicyRunner, *RUNNERS.values()) if "_one_iteration" in vars(cls)]
