"""Files of a run directory: configuration, metrics under their documented names, the state of the code."""

import json
import subprocess
import sys
import types
import warnings
from collections import deque

import pytest
import torch
import yaml

from canter.algorithms import DQNConfig
from canter.envs.torch_envs import CartPole
from canter.runners import OffPolicyRunner
from canter.runners.run_config import parse_train_cfg
from canter.utils.logging import Backend
from canter.utils.logging.backends import BACKENDS

DOCUMENTED = {
    "train/policy_loss",
    "train/value_loss",
    "train/entropy_loss",
    "train/approx_kl",
    "train/clip_fraction",
    "train/learning_rate",
    "train/total_loss",
    "episode/mean_reward",
    "episode/mean_length",
    "rollout/mean_reward",
    "rollout/mean_value",
    "policy/mean_noise_std",
    "time/fps",
    "time/collection",
    "time/learning",
    "eval/velrmsd",
    "eval/CoT",
    "iteration",
}


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


class Recorder(Backend):
    """Keeps what it is given."""

    opened = []

    def __init__(self, log_dir, **settings):
        super().__init__(log_dir)
        self.settings, self.calls = settings, []
        Recorder.opened.append(self)

    def log_scalars(self, scalars, step):
        self.calls.append(("scalars", dict(scalars), step))

    def save_file(self, path):
        self.calls.append(("file", path.name, None))

    def save_model(self, path, it):
        self.calls.append(("model", path.name, it))

    def close(self):
        self.calls.append(("close", None, None))


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setitem(BACKENDS, "recorder", Recorder)
    monkeypatch.setitem(BACKENDS, "second", Recorder)
    monkeypatch.setattr(Recorder, "opened", [])
    return Recorder


def test_documented_names_are_logged_once_each_with_env_steps_as_axis(make_runner, tmp_path):
    runner = make_runner(log_dir=tmp_path)
    history = runner.learn(3).history
    logged = rows(tmp_path)
    assert [row["step"] for row in logged] == [16, 32, 48]
    assert [row["iteration"] for row in logged] == [1, 2, 3]
    assert set(logged[-1]) >= DOCUMENTED
    assert not [name for name in logged[-1] if name.startswith(("Loss/", "Train/", "Perf/", "Policy/"))]
    assert "episode/mean_reward" not in logged[0]  # no episode has ended after 4 of 7 steps
    assert logged[1]["episode/mean_length"] == 7
    assert logged[2]["train/value_loss"] == history[2]["train/value_loss"]
    assert not [name for name in logged[-1] if "gpu" in name]


def test_log_interval_is_respected(make_runner, tmp_path):
    runner = make_runner(log_dir=tmp_path, log_interval=2)
    assert len(runner.learn(5).history) == 2
    assert [row["iteration"] for row in rows(tmp_path)] == [2, 4]
    never = make_runner(log_interval=0)
    assert never.learn(2).history == []


def test_log_prints_and_returns_the_table_and_writes_the_metrics(make_runner, tmp_path, capsys):
    runner = make_runner(log_dir=tmp_path)
    runner.init_writer()
    text = runner.log(
        {"metrics": {"train/value_loss": 1.25, "train/learning_rate": 0.5, "time/fps": 1234.0}}, width=60, pad=30
    )
    assert capsys.readouterr().out == f"{text}\n"
    assert "train/value_loss: 1.25" in text
    assert "time/fps: 1,234" in text
    assert max(map(len, text.splitlines())) <= 60
    assert rows(tmp_path)[0]["train/value_loss"] == 1.25


def test_log_accepts_the_locals_of_a_training_loop(make_runner, tmp_path, capsys):
    runner = make_runner(log_dir=tmp_path, num_steps_per_env=8)
    runner.init_writer()

    def loop(self, trial=None):
        obs, critic_obs = self.obs, self.critic_obs
        for _ in range(self.num_steps_per_env):
            obs, critic_obs, rewards, dones, infos = self.rollout_step(obs, critic_obs)
        self.alg.compute_returns(critic_obs)
        losses, stats = self.alg.update(self.current_learning_iteration)
        learn_time, rewbuffer = 0.25, self.rewbuffer
        self.stats.rollout_metrics(self.alg.rollout.data)
        self.evaluation()
        return losses, self.log(locals())

    losses, text = loop(runner)
    assert capsys.readouterr().out == f"{text}\n"
    row = rows(tmp_path)[0]
    assert row["train/policy_loss"] == losses["surrogate_loss"]
    assert row["train/learning_rate"] == runner.alg.learning_rate
    assert row["learn_time"] == 0.25
    assert row["eval/velrmsd"] == runner.metrics_velrmsd
    assert row["episode/mean_reward"] == sum(runner.rewbuffer) / len(runner.rewbuffer)
    assert "train/policy_loss" in text


def test_log_accepts_losses_alone(make_runner, capsys):
    losses = {"surrogate_loss": torch.tensor(0.5), "per_env": torch.zeros(2)}
    assert "0.5" in make_runner().log({"losses": losses})
    text = make_runner().log({"losses": {"surrogate_loss": 0.5}, "name": "x", "it": 3})
    assert "train/policy_loss: 0.5" in text
    assert "it:" not in text


def test_the_eta_of_a_resumed_run_counts_from_where_it_started(make_runner, monkeypatch):
    from canter.runners import run_log as module

    seen = []
    monkeypatch.setattr(module, "Console", lambda *args, path: seen.append(args) or pytest.fail("stop"))
    runner = make_runner()
    runner.iteration = 70
    with pytest.raises(pytest.fail.Exception):
        runner.learn(30)
    assert seen == [(100, "PPO", False, 70)]


def test_the_configuration_rebuilds_the_run(make_runner, tmp_path):
    runner = make_runner(log_dir=tmp_path, run_info={"task": "Robot"}, algorithm={"gamma": 0.9})
    runner.learn(1)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config["run"] == {"task": "Robot"}
    assert config["algorithm"]["gamma"] == 0.9
    assert parse_train_cfg(config).to_dict() == runner.plan.to_dict()
    assert json.loads((tmp_path / "config.json").read_text())["algorithm"]["gamma"] == 0.9
    runner.cfg.max_iterations = 9
    runner.write_config()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["max_iterations"] == 9


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio", "mlflow"])
def test_a_backend_is_chosen_by_name_with_its_project(make_runner, tmp_path, monkeypatch, name):
    started = []
    assert BACKENDS[name].__name__ == f"_{name.capitalize()}Backend"

    class Fake(Recorder):
        def __init__(self, log_dir, **settings):
            super().__init__(log_dir)
            started.append(settings)

    monkeypatch.setitem(BACKENDS, name, Fake)
    key = {"wandb_project": "legs"} if name == "wandb" else {"logger_kwargs": {name: {"project": "legs"}}}
    make_runner(log_dir=tmp_path, logger=name, **key).learn(1)
    assert started == [{"project": "legs"}]


def test_a_missing_backend_is_an_install_hint_before_the_first_step(make_runner, counting, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    env = counting()
    runner = make_runner(env, log_dir=tmp_path, logger="wandb")
    with pytest.raises(ImportError, match=r"canter\[wandb\]"):
        runner.learn(1)
    assert env.num_steps == 0


def test_in_a_list_a_missing_backend_is_skipped(make_runner, tmp_path, monkeypatch, recorder):
    monkeypatch.setitem(sys.modules, "wandb", None)
    runner = make_runner(log_dir=tmp_path, logger=["wandb", "recorder", "second"])
    with pytest.warns(UserWarning, match=r"skipping.*canter\[wandb\]"):
        runner.learn(2)
    first, second = ([call for call in opened.calls if call[0] == "scalars"] for opened in recorder.opened)
    assert first == second
    assert [step for _, _, step in first] == [16, 32]


def test_steps_never_decrease_within_a_run(make_runner, tmp_path, recorder):
    runner = make_runner(log_dir=tmp_path, logger="recorder", save_interval=1)
    runner.learn(3)
    runner.load_checkpoint("model_1.pt")
    runner.learn(1)
    steps = [step for kind, _, step in recorder.opened[0].calls if kind == "scalars"]
    assert steps == sorted(steps)


def test_models_and_code_state_are_uploaded(make_runner, tmp_path, recorder):
    runner = make_runner(log_dir=tmp_path / "run", logger="recorder", save_interval=1, git_diff=False)
    runner.add_git_repo_to_log(str(repository(tmp_path / "robot")))
    runner.learn(2)
    calls = recorder.opened[0].calls
    assert ("model", "model_1.pt", 1) in calls
    assert [name for kind, name, _ in calls if kind == "file"].count("robot.diff") == 1


def test_the_text_of_a_diff_is_never_uploaded(make_runner, tmp_path, monkeypatch, recorder):
    uploaded = {}
    monkeypatch.setattr(recorder, "save_file", lambda self, path: uploaded.update({path.name: path.read_text()}))
    runner = make_runner(log_dir=tmp_path / "run", logger="recorder", git_diff=True)
    runner.add_git_repo_to_log(str(repository(tmp_path / "robot")))
    runner.learn(1)
    assert "+weight = 2" in (tmp_path / "run" / "git" / "robot.diff").read_text()
    assert "robot.diff" not in uploaded
    assert "commit: " in uploaded["robot.status"]
    assert "reward.py" in uploaded["robot.status"]
    assert not [text for text in uploaded.values() if "weight" in text or "git diff" in text]


def repository(path):
    """A git repository with one uncommitted change; the file that changed."""
    path.mkdir()
    file = path / "reward.py"
    file.write_text("weight = 1\n")
    git = ["git", "-C", str(path), "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    file.write_text("weight = 2\n")
    return file


def test_the_state_of_the_code_is_stored_once(make_runner, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("canter.runners.run_log.store_code_state", lambda *args: calls.append(args) or [])
    runner = make_runner(log_dir=tmp_path)
    runner.learn(2)
    runner.learn(1)
    assert len(calls) == 1


@pytest.mark.parametrize("with_diff", [True, False])
def test_the_state_of_the_code_is_stored_at_the_first_iteration(make_runner, tmp_path, with_diff):
    runner = make_runner(log_dir=tmp_path / "run", git_diff=with_diff)
    runner.add_git_repo_to_log(str(repository(tmp_path / "robot")))
    runner.learn(1)
    text = (tmp_path / "run" / "git" / "robot.diff").read_text()
    assert "reward.py" in text
    assert ("+weight = 2" in text) == with_diff


def test_a_broken_backend_never_stops_a_run(make_runner, tmp_path, recorder, monkeypatch):
    def broken(self, scalars, step):
        raise OSError("no space")

    monkeypatch.setattr(recorder, "log_scalars", broken)
    runner = make_runner(log_dir=tmp_path, logger="recorder")
    with pytest.warns(UserWarning, match=r"'recorder' failed; training goes on: OSError: no space"):
        runner.learn(7)
    assert runner.iteration == 7
    assert len(rows(tmp_path)) == 7
    assert runner.writer.failures["recorder"] < 7  # after five in a row it is left alone for a while


def test_a_frozen_or_backward_clock_gives_finite_rates(make_runner, monkeypatch, tmp_path):
    for clock in (lambda: 100.0, iter(range(10_000, 0, -1)).__next__):
        monkeypatch.setattr("time.perf_counter", lambda clock=clock: float(clock()))
        monkeypatch.setattr("time.time", lambda: 1.0)
        monkeypatch.setattr("time.monotonic", lambda: 5.0)
        runner = make_runner(log_dir=tmp_path / str(id(clock)))
        runner.show_progress = True
        history = runner.learn(2).history
        assert all(0 < row["time/fps"] < float("inf") for row in history)


def test_a_resumed_run_drops_entries_logged_after_its_checkpoint(make_runner, tmp_path):
    killed = make_runner(log_dir=tmp_path, save_interval=2)
    killed.learn(5)
    (tmp_path / "model_5.pt").unlink()
    killed.close()
    resumed = make_runner(log_dir=tmp_path)
    resumed.load_checkpoint("model_4.pt")
    assert len(rows(tmp_path)) == 5  # only loading changes nothing
    resumed.learn(2)
    assert [row["iteration"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    fresh = make_runner(log_dir=tmp_path / "other")
    fresh.load(tmp_path / "model_4.pt")
    fresh.learn(1)
    assert [row["iteration"] for row in rows(tmp_path / "other")] == [5]


def test_a_deleted_directory_is_made_again(make_runner, tmp_path):
    import shutil

    runner = make_runner(log_dir=tmp_path / "run", save_interval=1)
    runner.add_callback("pre_iteration", lambda r: shutil.rmtree(tmp_path / "run") if r.iteration == 1 else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner.learn(3)
    assert (tmp_path / "run" / "model_3.pt").exists()
    assert [row["iteration"] for row in rows(tmp_path / "run")] == [2, 3]


def test_an_unknown_backend_is_answered_with_the_known_ones(make_runner, tmp_path):
    with pytest.raises(ValueError, match=r"'tensorbord'.*tensorboard"):
        make_runner(log_dir=tmp_path, logger="tensorbord").learn(1)


def test_a_fake_module_is_enough_for_wandb(make_runner, tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda data, step=None: calls.append((dict(data), step)),
        finish=lambda *a, **k: calls.append(("finish", None)),
        config=types.SimpleNamespace(update=lambda *a, **k: None),
        save=lambda *a, **k: None,
        define_metric=lambda *a, **k: None,
    )
    fake = types.ModuleType("wandb")
    fake.init = lambda **kwargs: calls.append(("init", kwargs)) or run
    fake.Settings = lambda **kwargs: kwargs
    monkeypatch.setitem(sys.modules, "wandb", fake)
    make_runner(log_dir=tmp_path, logger="wandb", wandb_project="legs").learn(2)
    assert calls[0][0] == "init"
    assert calls[0][1]["project"] == "legs"
    steps = [step for data, step in calls if isinstance(data, dict)]
    assert steps == [16, 32]


# ------------------------------------------------------------------ memory of long runs
def count_entries(value, seen):
    """Entries of every list, dict, set and unbounded deque that can be reached, tensors left out."""
    if id(value) in seen or isinstance(value, torch.Tensor | type | str):
        return 0
    seen.add(id(value))
    parts, own = [], 0
    if isinstance(value, dict):
        parts, own = list(value.values()), len(value)
    elif isinstance(value, list | tuple | set | deque):
        parts, own = list(value), 0 if getattr(value, "maxlen", None) is not None else len(value)
    if getattr(type(value), "__module__", "").startswith("canter."):
        parts += list(vars(value).values()) if hasattr(value, "__dict__") else []
    return own + sum(count_entries(part, seen) for part in parts)


@pytest.mark.parametrize(("kind", "log_interval"), [("ppo", 0), ("ppo", 8), ("dqn", 1)])
def test_nothing_in_memory_grows_with_the_iterations(make_runner, tmp_path, kind, log_interval):
    reports = []
    extras = {"log": {"height": 1.0}, "reward_components": {"alive": torch.ones(4)}}

    class Chatty(CartPole):
        def step(self, actions):
            record = super().step(actions)
            return record._replace(extras={**record.extras, **extras})

    env, eval_env = Chatty(4, max_episode_length=3), CartPole(2, max_episode_length=3)
    options = {"log_dir": tmp_path, "eval_env": eval_env, "log_interval": log_interval, "eval_interval": 20}
    if kind == "ppo":
        runner = make_runner(env, **options, save_interval=10, keep_checkpoints=2)
    else:
        cfg = DQNConfig(
            device="cpu",
            seed=1,
            batch_size=8,
            learning_starts=8,
            buffer_size=100,
            save_interval=40,
            keep_checkpoints=2,
            network_hidden_dims=(8,),
            eval_episodes=2,
        )
        runner = OffPolicyRunner(env, cfg, **options, show_progress=False)
    sizes = []

    def count(runner, stats):
        if runner.iteration in (64, 128):  # rows of extras are summed every 64 steps
            sizes.append(count_entries(runner, {id(reports), id(sizes)}))

    runner.add_callback("post_iteration", count)
    runner.learn(num_learning_iterations=128, trial=lambda metrics: reports.append(metrics))
    assert len(sizes) == 2
    assert sizes[0] == sizes[1]
    runner.close()
