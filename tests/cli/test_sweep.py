"""`canter sweep`: the study's bookkeeping with runs that are only imitated, and real runs in real processes."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optuna
import pytest
import yaml

from canter.cli import sweep as sweep_module
from canter.cli.__main__ import main
from canter.cli.errors import NUMERIC, UserError
from canter.cli.options import parse_train
from canter.cli.run_process import TrainingRun
from canter.cli.sweep import Plan, Worker, counting, open_study, parse_sweep, thinned
from canter.cli.sweep_report import best_preset

COMPLETE, PRUNED, FAIL = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED, optuna.trial.TrialState.FAIL
TINY = ["--num-envs", "4", "--num-steps-per-env", "16", "--num-learning-epochs", "1", "--total-timesteps", "256"]
TINY += ["--execution", "eager", "--final-episodes", "2", "--eval-episodes", "2"]


SCORE, OPEN_STORAGE = Plan.score, sweep_module.open_storage


class Memory(optuna.storages.InMemoryStorage):
    """A storage that several workers of a test share."""

    def record_heartbeat(self, trial_id):
        pass


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class ImitatedPool:
    """Runs whose metrics and exit codes the test sets by the number of their trial."""

    def __init__(self, jobs, device=None):
        self.jobs, self.active = jobs, []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.stop(*self.active)

    def add(self, *runs):
        self.active += runs

    def has_room(self):
        return len(self.active) < self.jobs

    def stop(self, *runs):
        for run in runs:
            run.exit_code = 143 if run.exit_code is None else run.exit_code
        self.active = [run for run in self.active if run not in runs]

    def poll(self):
        pass


@pytest.fixture
def make_worker(tmp_path, monkeypatch):
    """A worker of a study with imitated runs, in the storage of the test; each call is another process."""
    clock = Clock()
    memory = Memory()
    monkeypatch.setattr(sweep_module, "open_storage", lambda plan: memory)
    monkeypatch.setattr(sweep_module, "time", clock)
    monkeypatch.setattr(Plan, "score", lambda self, run: run.rows[-1]["eval/mean_reward"])
    monkeypatch.chdir(tmp_path)

    def make(*flags, jobs=1):
        args = ["Pendulum-v1", "--space", "learning_rate=log:1e-4..1e-2", "gamma=0.9,0.95", *flags]
        plan = parse_sweep([*args, "--sampler", "random"])
        worker = Worker(plan, open_study(plan))
        worker.pool, worker.clock = ImitatedPool(jobs), clock
        worker.messages = []
        worker.table = type("Table", (), {"message": worker.messages.append, "show": lambda self, *rows: None})()
        return worker

    return make


def step(worker, seconds=3.0):
    worker.clock.now += seconds
    return worker.step()


def finish(worker, value=1.0, code=0):
    """End the runs of the worker's trials with an evaluation."""
    for active in worker.mine:
        for run in active.runs:
            run.rows.append({"step": 200_000, "eval/mean_reward": value})
            run.exit_code = code
        worker.pool.active = []


def states(worker):
    return [trial.state for trial in worker.study.get_trials()]


def test_the_first_trial_has_the_settings_of_the_preset(make_worker):
    worker = make_worker("--trials", "2")
    step(worker)
    assert worker.study.trials[0].params == {"learning_rate": 1e-3, "gamma": 0.9}
    (run,) = worker.mine[0].runs
    assert run.path.name == "sweep-trial0000-seed1"
    _, config = parse_train(run.args[1:])
    assert (config["algorithm"]["learning_rate"], config["algorithm"]["gamma"], config["seed"]) == (1e-3, 0.9, 1)


def test_a_study_ends_with_as_many_trials_as_asked_and_grows_when_more_are_asked(make_worker):
    worker = make_worker("--trials", "2", jobs=2)
    assert not step(worker)
    assert len(worker.mine) == 2
    finish(worker, 5.0)
    assert step(worker)
    assert states(worker) == [COMPLETE, COMPLETE]
    assert worker.study.trials[1].value == 5.0
    longer = make_worker("--trials", "3", jobs=2)
    assert not step(longer)
    assert [active.trial.number for active in longer.mine] == [2]


def test_the_mean_of_the_seeds_counts_and_is_reported_where_all_have_it(make_worker):
    worker = make_worker("--trials", "1", "--seeds", "2", "--seed", "7", jobs=2)
    step(worker)
    one, two = worker.mine[0].runs
    assert (one.path.name, two.path.name) == ("sweep-trial0000-seed7", "sweep-trial0000-seed8")
    one.rows += [{"step": 20_000, "eval/mean_reward": 1.0}, {"step": 40_000, "eval/mean_reward": 2.0}]
    two.rows += [{"step": 20_000, "eval/mean_reward": 3.0}]
    step(worker)
    assert worker.study.trials[0].intermediate_values == {20_000: 2.0}
    one.rows.append({"step": 200_000, "eval/mean_reward": 10.0})
    two.rows.append({"step": 200_000, "eval/mean_reward": 20.0})
    one.exit_code = two.exit_code = 0
    worker.pool.active = []
    assert step(worker)
    assert worker.study.best_value == 15.0
    assert worker.study.trials[0].user_attrs["scores"] == [10.0, 20.0]


def test_two_processes_that_ask_for_the_last_trial_do_not_make_one_too_many(make_worker, monkeypatch):
    first, second = make_worker("--trials", "1"), make_worker("--trials", "1")
    ask = type(second.study).ask

    def ask_late(study, *args):
        monkeypatch.setattr(type(study), "ask", ask)
        assert first.start_trial()  # between the other's look at the trials and its question
        return ask(study, *args)

    monkeypatch.setattr(type(second.study), "ask", ask_late)
    assert not second.start_trial()
    assert [trial.user_attrs.get("surplus") for trial in second.study.get_trials()] == [None, True]
    finish(first)
    assert step(first)
    assert step(second)
    assert len(counting(first.study.get_trials())) == 1


def test_the_trial_of_a_silent_process_is_tried_again_by_another_and_lost_to_itself(make_worker, monkeypatch):
    monkeypatch.setattr(sweep_module, "open_storage", OPEN_STORAGE)
    silent, other = (make_worker("--trials", "1", "--stale-after", "1") for _ in range(2))
    step(silent)
    (run,) = silent.mine[0].runs
    assert not step(other)
    assert other.mine == []
    time.sleep(3)  # seconds of the database, whose clock counts
    step(other)
    assert [trial.state.name for trial in silent.study.get_trials()] == ["FAIL", "RUNNING"]
    assert other.study.get_trials()[1].params == silent.study.get_trials()[0].params
    assert other.study.get_trials()[1].user_attrs["retry_of"] == 0
    finish(silent)
    step(silent)
    assert silent.mine == []
    assert "given to another process" in silent.messages[-1]
    finish(other)
    assert step(other)
    assert len(counting(other.study.get_trials())) == 1


def test_a_trial_that_kills_its_process_every_time_is_given_up(make_worker):
    worker = make_worker("--trials", "1")
    for _ in range(3):
        step(worker)
        finish(worker, code=-signal.SIGKILL)
        done = step(worker)
    assert done
    assert states(worker) == [FAIL] * 3
    assert "killed by signal 9; given up" in worker.messages[-1]


def test_an_interrupted_process_leaves_its_trials_to_the_next_one(make_worker, monkeypatch):
    worker = make_worker("--trials", "1")
    monkeypatch.setattr(sweep_module, "RunPool", ImitatedPool)

    def step_and_stop(self):
        self.start_trial()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Worker, "step", step_and_stop)
    assert worker.run() == signal.SIGINT
    trials = worker.study.get_trials()
    assert [trial.state.name for trial in trials] == ["FAIL", "WAITING"]
    assert trials[1].user_attrs == {"retry_of": 0, "attempts": 0}


def test_diverged_settings_count_as_bad_ones_and_failed_ones_do_not(make_worker):
    worker = make_worker("--trials", "2", jobs=2)
    step(worker)
    one, two = worker.mine
    one.runs[0].exit_code, two.runs[0].exit_code = NUMERIC, 2
    worker.pool.active = []
    assert step(worker)
    assert states(worker) == [PRUNED, FAIL]
    assert "exit code 5" in worker.study.trials[0].user_attrs["error"]


def test_a_score_that_is_no_number_is_a_bad_trial(make_worker):
    worker = make_worker("--trials", "1")
    step(worker)
    finish(worker, float("nan"))
    assert step(worker)
    assert states(worker) == [PRUNED]


def test_three_failures_at_the_start_end_the_sweep_with_the_error_of_a_run(make_worker):
    worker = make_worker("--trials", "9")
    for _ in range(3):
        step(worker)
        finish(worker, code=2)
    with pytest.raises(UserError, match="the first 3 trials failed; see .*exit code 2: it printed nothing"):
        step(worker)


def test_a_trial_without_the_objective_fails_with_the_reason_and_the_others_go_on(make_worker, monkeypatch):
    monkeypatch.setattr(Plan, "score", SCORE)
    worker = make_worker("--trials", "4")
    for logged in ("eval/mean_reward", "train/kl", None, "eval/mean_reward"):
        step(worker)
        (run,) = worker.mine[0].runs
        if logged is not None:
            run.path.mkdir(parents=True)
            run.rows.append({"step": 200_000, logged: 2.0})
            (run.path / "metrics.jsonl").write_text(json.dumps(run.rows[0]) + "\n")
        run.exit_code, worker.pool.active = 0, []
    assert step(worker)
    assert states(worker) == [COMPLETE, FAIL, FAIL, COMPLETE]
    reason = "sweep-trial0001-seed1 ended without the metric 'eval/mean_reward'; it has train/kl"
    assert worker.study.trials[1].user_attrs["error"] == reason
    assert f"trial 1: failed with {reason}" in worker.messages
    assert "sweep-trial0002-seed1 does not exist" in worker.study.trials[2].user_attrs["error"]


def test_an_objective_that_no_run_has_ends_the_sweep_with_the_metrics_that_there_are(make_worker, monkeypatch):
    monkeypatch.setattr(Plan, "score", SCORE)
    worker = make_worker("--trials", "9", "--objective", "eval/mean_rewrd")
    for _ in range(3):
        step(worker)
        (run,) = worker.mine[0].runs
        run.path.mkdir(parents=True)
        run.rows.append({"step": 200_000, "eval/mean_reward": 2.0})
        (run.path / "metrics.jsonl").write_text(json.dumps(run.rows[0]) + "\n")
        run.exit_code, worker.pool.active = 0, []
    with pytest.raises(UserError, match="first 3 trials failed; .* without the metric .*; it has eval/mean_reward"):
        step(worker)


def test_bad_trials_are_pruned_and_their_runs_stopped(make_worker):
    worker = make_worker("--trials", "7", "--pruner-args", "{n_startup_trials: 1, n_warmup_steps: 0}")
    step(worker)
    worker.mine[0].runs[0].rows.append({"step": 20_000, "eval/mean_reward": 10.0})
    finish(worker, 10.0)
    step(worker)
    (run,) = worker.mine[0].runs
    run.rows.append({"step": 20_000, "eval/mean_reward": -10.0})
    step(worker)
    assert states(worker)[:2] == [COMPLETE, PRUNED]
    assert run.exit_code == 143
    assert worker.messages[-2] == "trial 1: pruned at step 20000 with -10"


def test_joining_with_other_flags_is_an_error_that_names_them(make_worker):
    make_worker()
    with pytest.raises(UserError, match="begun with flags '', not '--num-envs 4'"):
        make_worker("--num-envs", "4")
    with pytest.raises(UserError, match="begun with space .*gamma.*not .*lam"):
        make_worker("--space", "lam=0.9,0.95")
    with pytest.raises(UserError, match="begun with direction 'maximize', not 'minimize'"):
        make_worker("--direction", "minimize")


def test_runs_of_another_study_with_the_same_name_are_not_mixed_in(make_worker, tmp_path):
    (tmp_path / "runs/Pendulum-v1/sweep-trial0000-seed1").mkdir(parents=True)
    for _ in range(2):  # the refused study leaves nothing behind
        with pytest.raises(UserError, match="is of another study with this name; choose another --study"):
            make_worker()
    make_worker("--study", "other")


@pytest.mark.parametrize("url", ["nothing://host/x", "sqlite:////proc/none/study.db"])
def test_a_storage_that_cannot_be_opened_is_one_line(tmp_path, monkeypatch, capsys, url):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "Pendulum-v1", "--space", "gamma=0.9,0.95", "--storage", url]) == 2
    assert f"the --storage {url.partition(':')[0]}://... cannot be opened" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["schedule=fixed,fancy", "gamma=0.9..1.5", "lam=0.9,0.95,-1"])
def test_a_value_that_no_run_takes_is_refused_before_the_first_trial(tmp_path, monkeypatch, capsys, word):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "Pendulum-v1", "--space", "num_mini_batches=2,4", word]) == 2
    assert f"{word.partition('=')[0]} must be" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_found_preset_has_the_environment_in_which_it_was_found(make_worker, tmp_path):
    worker = make_worker("--env-kwargs", "{g: 5.0}", "--wrappers", "[ClipReward: {min_reward: -1}]")
    preset = best_preset(worker.plan, {"learning_rate": 1e-4})
    (tmp_path / "best.yaml").write_text(yaml.safe_dump(preset))
    options, config = parse_train(["Pendulum-v1", "--config", str(tmp_path / "best.yaml")])
    assert options.environment.env_kwargs == {"g": 5.0}
    assert options.environment.wrappers == [{"ClipReward": {"min_reward": -1}}]
    assert config["algorithm"]["learning_rate"] == 1e-4


def test_samplers_and_pruners_have_short_names_and_a_grid_is_tried_once(make_worker):
    args = ["Pendulum-v1", "--space", "gamma=0.9,0.95", "schedule=fixed,linear", "--sampler", "grid"]
    plan = parse_sweep([*args, "--pruner", "successive-halving", "--study", "g"])
    assert plan.options.trials == 4
    study = open_study(plan)
    assert type(study.pruner).__name__ == "SuccessiveHalvingPruner"
    worker = make_worker()
    worker.plan, worker.study = plan, study
    for _ in range(9):
        done = step(worker)
        finish(worker)
    assert done
    assert len({tuple(trial.params.values()) for trial in study.get_trials()}) == 4
    with pytest.raises(ValueError, match="'tpe'"):
        open_study(parse_sweep([*args[:4], "--sampler", "tpee", "--study", "h"]))


def test_reports_are_thinned_and_finite():
    points = [(step, float(step)) for step in range(0, 100, 5)] + [(100, float("nan")), (200, 1.0)]
    assert [step for step, _ in thinned(points, 50)] == [0, 50, 200]


def test_names_and_lists_of_seeds_belong_to_the_sweep(tmp_path, capsys):
    space = ["--space", "gamma=0.9,0.95"]
    assert main(["sweep", "Pendulum-v1", *space, "--name", "x"]) == 2
    assert "use --study NAME" in capsys.readouterr().err
    assert main(["sweep"]) == 2
    assert main(["sweep", "Pendulum-v1"]) == 2
    assert "name the settings to search" in capsys.readouterr().err


# Ray listens on every network of the machine: the process gets one of its own with nothing but the loopback device.
OWN_NETWORK = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def canter(*args, cwd, prefix=()):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "canter.cli", *args],
        cwd=cwd,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_a_sweep_leaves_a_preset_that_trains_a_page_and_its_trials(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = ["sweep", "canter/CartPole", "--space", "learning_rate=log:1e-4..1e-2", "num_mini_batches=1,2"]
    assert main([*args, "--trials", "2", "--jobs", "2", *TINY]) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs/canter/CartPole/sweep"
    trials = json.loads((folder / "trials.json").read_text())
    assert [trial["state"] for trial in trials] == ["complete", "complete"]
    best = max(trials, key=lambda trial: trial["value"])
    assert best["value"] == pytest.approx(
        json.loads((tmp_path / best["runs"][0] / "evaluation.json").read_text())["eval/mean_reward"]
    )
    preset = folder / "best.yaml"
    assert f"canter train canter/CartPole --config runs/canter/CartPole/sweep/{preset.name}" in out
    _, config = parse_train(["canter/CartPole", "--config", str(preset)])
    _, used = parse_train(["canter/CartPole", *TINY, *[f"--{k}={v}" for k, v in best["params"].items()]])
    assert config["algorithm"] == used["algorithm"]
    assert config["policy"] == used["policy"]
    assert config["num_steps_per_env"] == 16
    page = (folder / "report.html").read_text()
    assert page.count("<svg") >= 2
    assert "Slices" in page
    assert "mathdefault" not in page  # numbers on a logarithmic axis are text


@pytest.mark.slow
def test_a_killed_process_costs_the_study_nothing(tmp_path):
    args = ["sweep", "canter/CartPole", "--space", "learning_rate=log:1e-4..1e-2", "--trials", "4", "--jobs", "1"]
    flags = [*TINY[:-6], "--total-timesteps", "20000", "--final-episodes", "2", "--stale-after", "6"]
    workers = [canter(*args, *flags, cwd=tmp_path) for _ in range(2)]
    folder = tmp_path / "runs/canter/CartPole"
    deadline = time.monotonic() + 120
    while len(list(folder.glob("sweep-trial*/metrics.jsonl"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    workers[0].kill()
    out, _ = workers[1].communicate(timeout=400)
    workers[0].communicate(timeout=60)
    assert workers[1].returncode == 0, out
    trials = json.loads((folder / "sweep/trials.json").read_text())
    assert len(trials) == 4
    assert {trial["state"] for trial in trials} <= {"complete", "pruned"}
    assert sum("retry_of" in trial for trial in trials) == 1


@pytest.mark.slow
def test_ray_runs_the_same_space(tmp_path):
    pytest.importorskip("ray")
    if not shutil.which("unshare") or subprocess.run([*OWN_NETWORK, "true"], capture_output=True).returncode:
        pytest.skip("needs a network namespace: Ray would listen beyond the loopback device")
    args = ["sweep", "canter/CartPole", "--space", "learning_rate=log:1e-4..1e-2", "num_mini_batches=1,2", "--engine"]
    process = canter(
        *args, "ray", "--trials", "2", "--pruner", "nop", "--jobs", "2", *TINY, cwd=tmp_path, prefix=OWN_NETWORK
    )
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out
    trials = json.loads((tmp_path / "runs/canter/CartPole/sweep/trials.json").read_text())
    assert [trial["state"] for trial in trials] == ["complete", "complete"]
    assert trials[0]["params"] == {"learning_rate": 1e-3, "num_mini_batches": 1}  # the preset's
    assert (tmp_path / trials[0]["runs"][0] / "evaluation.json").is_file()
    assert (tmp_path / "runs/canter/CartPole/sweep/best.yaml").is_file()


# A cluster on the loopback device: all of its processes end with the command that it is started for.
RAY_CLUSTER = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
START_RAY = """
ip link set lo up && "$RAY" start --head --node-ip-address 127.0.0.1 --port 6390 --num-cpus 2 \\
    --include-dashboard false --disable-usage-stats --temp-dir "$RAY_FILES" && "$@"
"""


@pytest.mark.slow
def test_ray_runs_the_same_space_on_a_cluster_that_was_started_before(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    if not shutil.which("unshare") or subprocess.run([*RAY_CLUSTER, "true"], capture_output=True).returncode:
        pytest.skip("needs network and process namespaces: Ray would listen beyond the loopback device")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # of this cluster alone, for its head and the sweep
    monkeypatch.setenv("RAY", str(Path(sys.executable).parent / "ray"))
    args = ["sweep", "canter/CartPole", "--space", "learning_rate=log:1e-4..1e-2", "num_mini_batches=1,2"]
    ray = ["--engine", "ray", "--address", "127.0.0.1:6390", "--trials", "2", "--pruner", "nop", "--jobs", "2"]
    with tempfile.TemporaryDirectory() as files:  # short, for the names of its sockets
        monkeypatch.setenv("RAY_FILES", files)
        process = canter(*args, *ray, *TINY, cwd=tmp_path, prefix=[*RAY_CLUSTER, START_RAY, "sh"])
        out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out
    assert "Connecting to existing Ray cluster at address: 127.0.0.1:6390" in out
    trials = json.loads((tmp_path / "runs/canter/CartPole/sweep/trials.json").read_text())
    assert [trial["state"] for trial in trials] == ["complete", "complete"]
    assert (tmp_path / trials[0]["runs"][0] / "evaluation.json").is_file()


@pytest.mark.slow
def test_ray_connects_to_the_address_and_does_not_size_a_cluster_that_exists(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    from canter.cli.sweep_ray import run_ray

    asked = []

    def init(**settings):
        asked.append(settings)
        raise ConnectionError("stop here")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.chdir(tmp_path)
    args = ["Pendulum-v1", "--space", "gamma=0.9,0.95", "--engine", "ray", "--jobs", "3"]
    for address in (["--address", "10.0.0.1:6379"], []):
        with pytest.raises(ConnectionError):
            run_ray(parse_sweep([*args, *address]))
    assert (asked[0]["address"], asked[1]["address"]) == ("10.0.0.1:6379", "local")
    assert "num_cpus" not in asked[0]
    assert asked[1]["num_cpus"] == 3


def test_metrics_are_read_line_by_line_while_a_run_writes_them(tmp_path):
    run = TrainingRun(tmp_path, [])
    run._read()
    file = (tmp_path / "metrics.jsonl").open("a")
    file.write('{"step": 1, "a": 2.0}\n{"step": 2, "a"')
    file.flush()
    run._read()
    assert run.values("a") == [(1, 2.0)]
    file.write(": 3.0}\n")
    file.close()
    run._read()
    assert run.values("a") == [(1, 2.0), (2, 3.0)]
    assert run.step == 2
