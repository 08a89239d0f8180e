"""Commands on runs, from training to playing, in this process."""

import json
import os
import re
import shutil
import signal
import sys

import gymnasium
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces

from canter.cli import COMMANDS
from canter.cli import train as train_module
from canter.cli.__main__ import main
from canter.cli.inspection import labels_of
from canter.cli.play import ShownFilm
from canter.cli.runs import known_tasks, load_policy, new_run_directory, read_run, safe_name, unknown_task
from canter.cli.train import program
from canter.envs.wrap import ENV_NAMES
from canter.presets import scores
from canter.utils.checkpoint import find_checkpoints, load_checkpoint, save_checkpoint
from canter.utils.files import DiskFullError, RunLock
from canter.utils.logging import read_rows


def steps_of(run):
    return [row["step"] for row in read_rows(run / "metrics.jsonl")]


def test_train_leaves_everything_in_the_run_directory(train_and_draw, capsys):
    code, run = train_and_draw("CartPole-v1")
    assert code == 0
    assert steps_of(run) == [64, 128, 192, 256]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["run"]["task"] == "CartPole-v1"
    assert (config["run"]["num_envs"], config["run"]["total_timesteps"], config["seed"]) == (4, 256, 1)
    assert load_checkpoint(run / "checkpoint_final.pt")["total_timesteps"] == 256
    assert json.loads((run / "evaluation.json").read_text())["episodes"] == 2
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    for name in ("", "curve.png", "checkpoint_final.pt"):
        assert str(run / name) in out


def test_commands_to_paste_have_the_folder_of_an_environment_that_is_not_active(tmp_path, monkeypatch):
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "canter").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    assert program("canter") == str(folder / "canter")
    monkeypatch.chdir(tmp_path)
    assert program("canter") == ".venv/bin/canter"  # after `make train`
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin")
    assert program("canter") == "canter"
    assert program("another") == "another"


def test_evaluation_is_periodic_and_its_best_policy_is_kept(train):
    _, run = train(steps=640)
    rewards = [row["eval/mean_reward"] for row in read_rows(run / "metrics.jsonl") if "eval/mean_reward" in row]
    assert len(rewards) == 10
    best = json.loads((run / "best.json").read_text())
    assert best["eval/mean_reward"] == max(rewards)
    assert load_checkpoint(run / "checkpoint_best.pt")["total_timesteps"] == best["step"]


def test_only_a_better_evaluation_replaces_the_best_one_also_after_a_resume(tmp_path):
    class Saver:
        tot_timesteps, saved = 128, ()

        def add_callback(self, event, fn):
            self.report = fn

        def save(self, path):
            self.saved = (*self.saved, path.name)

    (tmp_path / "best.json").write_text('{"eval/mean_reward": 10.0, "step": 64}')
    runner = Saver()
    train_module.keep_best(runner, tmp_path)
    for reward in (9.0, 10.0):
        runner.report(runner, {"eval/mean_reward": reward})
    assert runner.saved == ()
    runner.report(runner, {"eval/mean_reward": 11.0})
    runner.report(runner, {})
    assert runner.saved == ("checkpoint_best.pt",)
    assert json.loads((tmp_path / "best.json").read_text()) == {"eval/mean_reward": 11.0, "step": 128}


def test_no_periodic_evaluation_with_interval_0(train):
    _, run = train("canter/CartPole", "--eval-interval", "0")
    assert not any("eval/mean_reward" in row for row in read_rows(run / "metrics.jsonl"))


def test_max_iterations_overrides_the_steps(train):
    _, run = train("canter/CartPole", "--max-iterations", "2")
    assert steps_of(run) == [64, 128]


def test_eval_prints_the_same_numbers_for_the_same_seed(trained, capsys):
    run = trained
    capsys.readouterr()
    assert main(["eval", str(run), "--episodes", "3", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["episodes"] == 3
    assert first["eval/min_reward"] <= first["eval/mean_reward"] <= first["eval/max_reward"]
    main(["eval", str(run), "--episodes", "3", "--json"])
    assert json.loads(capsys.readouterr().out) == first
    main(["eval", str(run), "--episodes", "3", "--checkpoint", "best"])
    assert "checkpoint_best.pt" in capsys.readouterr().out
    main(["eval", str(run / "checkpoint_best.pt"), "--episodes", "3"])  # not the newest of its directory
    assert "checkpoint_best.pt" in capsys.readouterr().out


def test_eval_leaves_the_run_directory_as_it_was(trained):
    run = trained
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    main(["eval", str(run), "--episodes", "1"])
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


@pytest.mark.parametrize("task", ["canter/CartPole", "CartPole-v1"])
def test_play_writes_a_video_with_one_frame_per_step(train, task, capsys, tmp_path):
    _, run = train(task)
    capsys.readouterr()
    video = tmp_path / "v.mp4"
    assert main(["play", str(run), "--video", str(video), "--seed", "3"]) == 0
    out = capsys.readouterr().out
    steps = int(float(out.rpartition("return")[2]))
    frames = imageio.mimread(video, memtest=False)
    assert len(frames) == steps
    assert frames[0].shape[2] == 3
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 50


def test_play_shows_the_episode_that_eval_measures_with_the_weights_of_the_run(trained, tmp_path, capsys):
    capsys.readouterr()
    for seed in ("3", "4"):
        main(["eval", str(trained), "--episodes", "1", "--seed", seed, "--json"])
        measured = json.loads(capsys.readouterr().out)["eval/mean_reward"]
        main(["play", str(trained), "--video", str(tmp_path / "v.gif"), "--seed", seed])
        assert float(capsys.readouterr().out.rpartition("return")[2]) == measured
    checkpoint = trained / "checkpoint_best.pt"
    runner = load_policy(read_run(trained), checkpoint, 1, seed=0, device=None)
    saved = load_checkpoint(checkpoint)["model_state_dict"]
    assert all(torch.equal(weights, saved[name]) for name, weights in runner.policy.state_dict().items())


def test_play_ends_a_video_that_takes_too_long(trained, tmp_path):
    run = trained
    main(["play", str(run), "--video", str(tmp_path / "v.gif"), "--seconds", "0.0001", "--episodes", "100"])
    assert 1 <= len(imageio.mimread(tmp_path / "v.gif")) < 100


def test_a_slow_film_says_how_far_it_is(trained, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("canter.cli.play.PROGRESS_S", 0.0)
    monkeypatch.setattr("canter.cli.play.MAX_FRAMES", 3)
    assert main(["play", str(trained), "--video", str(tmp_path / "p.mp4")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "frame" in line]
    assert re.fullmatch(r"  frame 1 of at most 3  [\d.]+ frames/s  \(Ctrl-C ends the film here\)", lines[0])
    assert re.fullmatch(r"  frame 2 of at most 3  [\d.]+ frames/s", lines[1])
    assert lines[3] == f"  video       {tmp_path / 'p.mp4'} (3 frames)"


def test_ctrl_c_ends_a_film_that_can_be_watched(trained, monkeypatch, capsys, tmp_path):
    def interrupt(film, frame):
        add(film, frame)
        if film.num_frames == 3:
            raise KeyboardInterrupt

    add = ShownFilm.add
    monkeypatch.setattr(ShownFilm, "add", interrupt)
    assert main(["play", str(trained), "--video", str(tmp_path / "p.mp4")]) == 0
    assert f"{tmp_path / 'p.mp4'} (3 frames)" in capsys.readouterr().out
    assert len(imageio.mimread(tmp_path / "p.mp4")) == 3


def test_a_rendering_error_is_one_line(train, monkeypatch, capsys, tmp_path):
    _, run = train("CartPole-v1")
    monkeypatch.setattr("canter.envs.gymnasium.GymVecEnv.render", lambda self: None)
    assert main(["play", str(run), "--video", str(tmp_path / "v.mp4")]) == 2
    assert capsys.readouterr().err == "canter: CartPole-v1 could not be rendered: the environment gives no pictures\n"


def test_a_missing_package_for_rendering_is_one_line(train, monkeypatch, capsys, tmp_path):
    _, run = train("CartPole-v1")

    def render(self):
        raise gymnasium.error.DependencyNotInstalled("pygame is not installed")

    monkeypatch.setattr("canter.envs.gymnasium.GymVecEnv.render", render)
    assert main(["play", str(run), "--video", str(tmp_path / "v.mp4")]) == 2
    assert capsys.readouterr().err == "canter: CartPole-v1 could not be rendered: pygame is not installed\n"


def test_resume_adds_steps_and_remembers_the_new_length(trained, capsys):
    run = trained
    assert main(["resume", str(run), "--total-timesteps", "128"]) == 0
    assert steps_of(run) == [64, 128, 192, 256, 320, 384]
    assert yaml.safe_load((run / "config.yaml").read_text())["run"]["total_timesteps"] == 384
    assert "from model_4.pt at step 256" in capsys.readouterr().out
    assert main(["resume", str(run)]) == 0
    assert "is complete at step 384; --total-timesteps STEPS trains on" in capsys.readouterr().out


def stop_at(monkeypatch, iteration, number):
    """Send this process a signal when a run has completed `iteration` iterations."""
    keep_best = train_module.keep_best

    def patched(runner, path):
        keep_best(runner, path)

        def send(runner, stats):
            if runner.iteration == iteration:
                os.kill(os.getpid(), number)

        runner.add_callback("post_iteration", send)

    monkeypatch.setattr(train_module, "keep_best", patched)


def test_an_interrupted_and_resumed_run_ends_like_an_uninterrupted_one(train, monkeypatch, capsys):
    _, whole = train(name="whole", steps=384)
    with monkeypatch.context() as patch:
        stop_at(patch, 2, signal.SIGINT)
        code, halves = train(name="halves", steps=384)
    assert code == 130
    assert f"canter resume {halves}" in capsys.readouterr().err
    assert steps_of(halves) == [64, 128]
    assert main(["resume", str(halves)]) == 0
    assert steps_of(halves) == steps_of(whole)
    one, two = (load_checkpoint(run / "checkpoint_final.pt") for run in (whole, halves))
    assert one["total_timesteps"] == two["total_timesteps"] == 384
    for name, weights in one["model_state_dict"].items():
        assert torch.equal(weights, two["model_state_dict"][name]), name


def test_sigterm_saves_and_ends_with_143(train, monkeypatch, capsys):
    stop_at(monkeypatch, 2, signal.SIGTERM)
    code, run = train()
    assert code == 143
    assert load_checkpoint(run / "checkpoint_final.pt")["total_timesteps"] == 128
    assert f"canter resume {run}" in capsys.readouterr().err


def test_resume_drops_what_was_logged_beyond_the_checkpoint(train):
    _, run = train("canter/CartPole", "--save-interval", "2")
    newest = find_checkpoints(run)[-1][1]
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.warns(UserWarning, match=r"SKIPPING the damaged checkpoint .*model_4.pt"):
        assert main(["resume", str(run)]) == 0
    assert steps_of(run) == [64, 128, 192, 256]


def test_seeds_train_one_run_each_and_are_plotted_together(train_and_draw, tmp_path):
    train_and_draw("canter/CartPole", "--seeds", "5", "6")
    runs = tmp_path / "runs/canter/CartPole"
    assert [yaml.safe_load((runs / f"r-seed{k}/config.yaml").read_text())["seed"] for k in (5, 6)] == [5, 6]
    assert (runs / "r-seeds.png").is_file()
    first, second = (load_checkpoint(runs / f"r-seed{k}/checkpoint_final.pt")["model_state_dict"] for k in (5, 6))
    assert not torch.equal(first["actor.0.weight"], second["actor.0.weight"])


def test_plot_takes_one_run_and_whole_folders(trained, tmp_path, capsys):
    run = trained
    shutil.copytree(run, run.with_name("r-seed2"))
    (run / "curve.png").unlink()
    assert main(["plot", str(run)]) == 0
    assert (run / "curve.png").is_file()
    out = tmp_path / "all.svg"
    assert main(["plot", str(tmp_path / "runs"), "--out", str(out), "--metrics", "train/value_loss"]) == 0
    assert "<svg" in out.read_text()
    assert labels_of([run, run.with_name("r-seed2")]) == ["CartPole r"] * 2


def test_runs_with_the_same_name_and_other_settings_are_no_seeds_of_one_curve(trained, tmp_path):
    run = trained
    other = tmp_path / "elsewhere" / "CartPole" / run.name
    shutil.copytree(run, other)
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("gamma: 0.98", "gamma: 0.5"))
    assert labels_of([run, other]) == ["CartPole r: gamma=0.98", "CartPole r: gamma=0.5"]


def test_plot_of_an_unknown_metric_lists_the_logged_ones(trained, capsys):
    run = trained
    assert main(["plot", str(run), "--metrics", "nope"]) == 2
    err = capsys.readouterr().err
    assert "'nope'" in err
    assert "train/value_loss" in err


# ---------------------------------------------------------------------- errors and their exit codes
def mistake(capsys, *args):
    capsys.readouterr()
    code = main(list(args))
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return code, err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train"], "canter tasks"),
        (["train", "CartPol-v1"], "'CartPole-v1'"),
        (["train", "canter/CartPoles"], "CartPole"),
        (["train", "nowhere/CartPole-v1"], "'nowhere/CartPole-v1'"),
        (["train", "ALE/Pong-v5"], "'ALE/Pong-v5'; `canter tasks` lists them; if a package"),
        (["train", "ALE/Pong-v5"], "name that in front: package:ALE/Pong-v5"),
        (["tasks", "zzz"], "no task has 'zzz' in its name; `canter tasks` lists"),
        (["train", "LunarLander-v1"], "LunarLander"),
        (["train", "HalfCheetah"], "'HalfCheetah-v5'"),
        (["train", "CartPole-v1", "--device", "cuda:99"], "'cuda:99' is not available"),
        (["train", "CartPole-v1", "--schedule", "linaer"], "schedule must be one of"),
        (["train", "CartPole-v1", "--algorithm", "pppo"], "'ppo'"),
        (["train", "CartPole-v1", "--optimizer-class-name", "Adm"], "'adam'"),
        (["train", "CartPole-v1", "--rnd-cfg", "{wight: 1}"], "'weight'"),
        (["train", "CartPole-v1", "--gae_lambda=0.9"], "--lam"),
        (["train", "CartPole-v1", "--num-envs", "0"], "--num-envs must be at least 1, got 0"),
        (["train", "CartPole-v1", "--total-timesteps", "0"], "--total-timesteps must be at least 1"),
        (["resume", "run", "--total-timesteps", "0"], "--total-timesteps must be at least 1, got 0"),
        (["resume", "run", "--total-timesteps", "-10"], "--total-timesteps must be at least 1, got -10"),
        (["resume", "run", "--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["train", "CartPole-v1", "--final-episodes", "-1"], "--final-episodes must be at least 0"),
        (["train", "CartPole-v1", "--film-interval", "-3"], "--film-interval must be at least 0"),
        (["train", "CartPole-v1", "--threads", "0"], "--threads must be at least 1"),
        (["train", "CartPole-v1", "--num-mini-batches", "0"], "num_mini_batches must be a whole number of at least 1"),
        (
            ["train", "CartPole-v1", "--logger-backend", "tensorbord"],
            "'tensorboard'",
        ),
        (["eval", "runs/nothing"], "there is no run directory runs/nothing"),
        (["resume", "."], "no config.yaml"),
        (["plot", "nothing"], "there is no run in nothing"),
        (["check-env", "CartPole-v9"], "CartPole"),
        (["trian"], "'train'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, err = mistake(capsys, *args)
    assert code == 2
    assert message in err
    assert err.startswith("canter: ")
    assert list(tmp_path.rglob("*seed*")) == [], "a run that never began leaves no directory"


def test_an_existing_run_is_not_overwritten(trained, train, capsys):
    run = trained
    code, _ = train()
    assert code == 2
    assert f"canter resume {run}" in capsys.readouterr().err


def test_a_missing_checkpoint_names_the_existing_ones(trained, capsys):
    run = trained
    code, err = mistake(capsys, "eval", str(run / "model_4.pt"), "--checkpoint", "best")
    assert code == 2
    assert "is a checkpoint already" in err
    code, err = mistake(capsys, "eval", str(run / "metrics.jsonl"))
    assert code == 2
    assert "metrics.jsonl is neither a run directory nor a checkpoint" in err
    code, err = mistake(capsys, "eval", str(run), "--checkpoint", "model_7.pt")
    assert code == 2
    assert "model_4.pt" in err


@pytest.mark.parametrize(("task", "extra"), [("HalfCheetah-v5", "mujoco"), ("LunarLander-v3", "box2d")])
def test_a_missing_extra_names_the_command_that_installs_it(task, extra, monkeypatch, capsys):
    def missing(*args, **kwargs):
        raise gymnasium.error.DependencyNotInstalled("not here")

    monkeypatch.setattr("canter.cli.runs.make_env", missing)
    code, err = mistake(capsys, "train", task)
    assert code == 2
    assert f'pip install "canter[{extra}]"' in err


def test_a_missing_logging_backend_is_an_error_before_the_training(train, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "trackio", None)
    code, _ = train("canter/CartPole", "--logger-backend", "trackio")
    assert code == 2
    assert 'pip install "canter[trackio]"' in capsys.readouterr().err
    assert list(tmp_path.rglob("*seed*")) == []


class Nan(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)
    count = 0

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.full(2, np.nan if self.count == 20 else 0.0, np.float32), 0.0, False, False, {}


def test_nan_in_an_observation_ends_with_5(train, capsys):
    gymnasium.register("canter-test/Nan-v0", Nan)
    try:
        code, _ = train("canter-test/Nan-v0", "--eval-interval", "0")
    finally:
        del gymnasium.registry["canter-test/Nan-v0"]
    assert code == 5
    assert "NaN" in capsys.readouterr().err


def test_a_run_in_use_ends_with_6_and_is_not_touched(trained, capsys):
    run = trained
    with RunLock(run):
        before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
        code, err = mistake(capsys, "resume", str(run), "--total-timesteps", "64")
        after = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert code == 6
    assert f"pid {os.getpid()}" in err
    assert after == before


def test_a_full_disk_ends_with_6(train, monkeypatch, capsys):
    def full(path, state, root=None):
        raise DiskFullError(f"disk full: {path}")

    monkeypatch.setattr("canter.runners.checkpoints.save_checkpoint", full)
    with pytest.warns(UserWarning, match="the best checkpoint was not kept: disk full"):
        code, _ = train()
    assert code == 6
    assert "disk full" in capsys.readouterr().err


def test_checkpoints_that_are_all_damaged_end_with_6(trained, capsys):
    run = trained
    for path in (*run.glob("model_*.pt"), run / "checkpoint_final.pt"):
        path.write_bytes(b"garbage")
    with pytest.warns(UserWarning, match="SKIPPING"):
        code, err = mistake(capsys, "eval", str(run))
    assert code == 6
    assert "model_4.pt" in err


def test_a_variable_of_the_environment_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("CANTER_TRACEBACK", "1")
    with pytest.raises(Exception, match="CartPol-v1"):
        main(["train", "CartPol-v1"])


# ---------------------------------------------------------------------- small commands and names
def test_tasks_lists_every_preset_and_finds_others(capsys):
    assert main(["tasks"]) == 0
    out = capsys.readouterr().out
    for task in ("CartPole-v1", "LunarLanderContinuous-v3", "HalfCheetah-v5", "canter/CartPole"):
        assert task in out
    assert "Blackjack-v1" not in out
    rows = {tuple(line.split()[:2]): line for line in out.splitlines() if line.startswith("  ")}
    for task, algorithm in (("CartPole-v1", "dqn"), ("Pendulum-v1", "sac"), ("Pendulum-v1", "td3")):
        assert (task, algorithm) in rows
    assert ("CartPole-v1", "appo") not in rows  # it has PPO's presets
    score = scores()["dqn"]["CartPole-v1"]
    text = f"{score['return']:g} (mean of {score['seeds']} seeds, {score['steps']:,} steps)"
    assert text in rows["CartPole-v1", "dqn"]
    assert "not measured" in rows["canter/Course", "ppo"]
    main(["tasks", "blackj"])
    out = capsys.readouterr().out
    assert "Blackjack-v1" in out
    assert "CartPole-v1" not in out


def test_a_registered_full_name_is_a_known_task_and_a_prefix_is_not(monkeypatch, capsys):
    for name in ("canter-test/reach", "canter-prefix"):
        monkeypatch.setitem(ENV_NAMES, name, lambda *args, **kwargs: None)
    assert "canter-test/reach" in known_tasks()
    assert not {"canter-prefix", "canter", "envpool"} & set(known_tasks())
    assert "'canter-test/reach'" in unknown_task("canter-test/raech")
    assert main(["tasks", "reach"]) == 0
    assert "canter-test/reach" in capsys.readouterr().out


def test_check_env_reports_and_its_exit_code_is_the_verdict(capsys):
    assert main(["check-env", "CartPole-v1", "--num-steps", "50"]) == 0
    assert "time-outs continue with the value of the final observation" in capsys.readouterr().out
    gymnasium.register("canter-test/Nan-v0", Nan)
    try:
        assert main(["check-env", "canter-test/Nan-v0", "--num-steps", "50"]) == 1
    finally:
        del gymnasium.registry["canter-test/Nan-v0"]


def test_the_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("train", "resume", "eval", "play", "plot", "tasks", "check-env"):
        assert f"  {command} " in out or f"  {command}:" in out


def test_the_descriptions_of_all_commands_begin_in_one_column(capsys):
    main(["--help"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len({line.index(command.help) for line, command in zip(rows, COMMANDS.values(), strict=True)}) == 1
    assert all(line[line.index(command.help) - 2 :].startswith("  ") for line, command in zip(rows, COMMANDS.values()))


def test_help_of_check_policy_is_its_own(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["check-policy", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: canter check-policy [-h] [OPTIONS] TASK\n")
    assert "which functions of a run are replayed" in text
    assert "Train a policy" not in text


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (["eval", "--epsiodes", "3", "runs"], "--episodes"),
        (["eval", "runs", "--epsiodes=3"], "--episodes"),
        (["plot", "--xyz", "runs"], "`canter plot --help`"),
        (
            ["sweep", "--lr", "3", "CartPole-v1"],
            "canter sweep TASK --lr",
        ),
    ],
)
def test_a_mistyped_flag_is_one_line_wherever_it_stands(args, answer, capsys):
    assert main(args) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert answer in line


def test_help_shows_optional_values_and_lists_without_nested_brackets(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "CartPole-v1", "--help"])
    text = capsys.readouterr().out
    assert "--policy.actor-hidden-dims INT..." in text
    assert "--target-kl FLOAT|None" in text
    assert "--clip-max-std FLOAT...|None" in text
    assert "{None}" not in text
    assert " [INT" not in text
    words = " ".join(text.replace("│", "").split())
    assert "Train one run with each of these seeds, one after the other. (default: none)" in words


@pytest.mark.parametrize("command", ["plot", "report"])
def test_help_shows_no_empty_default(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "(default: )" not in " ".join(capsys.readouterr().out.replace("│", "").split())


def test_help_of_a_command_lists_its_flags(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["help", "eval"])
    text = capsys.readouterr().out
    assert text.startswith("usage: canter eval [-h] [OPTIONS] RUN\n")
    assert "--episodes" in text


def test_run_directories_stay_below_the_runs_directory(tmp_path):
    path = new_run_directory(tmp_path, "../../etc/passwd", "../x", 3)
    assert path.resolve().is_relative_to(tmp_path)
    assert path.name == ".._x-seed3".lstrip(".")
    assert safe_name("a:b c/d") == "a_b_c_d"


def test_names_that_differ_outside_of_ascii_are_different_directories():
    names = ["lauf-ä", "lauf-ö", "实验", "試験", "🚀"]
    assert [safe_name(name) for name in names] == names
    assert safe_name("a\u0308") == safe_name("ä")  # some systems store it in two characters
    assert safe_name("a\u2028b\u00a0c\u202ed") == "a_b_c_d"  # line and word ends, and a change of direction


def test_two_unnamed_runs_in_one_second_get_two_directories(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    first = new_run_directory(tmp_path, "CartPole-v1", None, 1)
    first.mkdir(parents=True)
    assert first == tmp_path / "CartPole-v1/20260101-000000-seed1"
    assert new_run_directory(tmp_path, "CartPole-v1", None, 1).name == "20260101-000000-2-seed1"


def test_an_unknown_task_without_a_similar_one_points_to_the_list():
    assert "canter tasks" in unknown_task("qqqqqqqqqqqq")
    assert "canter tasks" in unknown_task("Foo-v1")  # Acrobot-v1 is near by its version alone
    assert "'HalfCheetah-v5'" in unknown_task("HalfCheeta-v1")


def test_tasks_that_gymnasium_has_removed_are_not_listed():
    assert {name for name in known_tasks() if name.startswith("Hopper-")} == {"Hopper-v4", "Hopper-v5"}


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again_with_the_same_command(train, capsys):
    _, path = train(steps=64)
    whole = (path / "metrics.jsonl").read_text().splitlines()
    for file in path.glob("*.pt"):
        file.unlink()
    assert train(steps=128) == (0, path)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]  # those of the lost run are gone
    assert len(whole) == 1
    assert main(["train", "canter/CartPole", "--runs-dir", str(path.parents[2]), "--name", "r"]) == 2
    assert "exists; choose another --name, or continue it with: canter resume" in capsys.readouterr().err


def test_a_run_that_was_killed_before_its_first_checkpoint_can_be_resumed(train, capsys):
    _, path = train(steps=128)
    for file in path.glob("*.pt"):
        file.unlink()
    assert main(["resume", str(path)]) == 0
    assert "ended before its first checkpoint: it begins again" in capsys.readouterr().out
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert (path / "checkpoint_final.pt").is_file()


def test_a_run_that_goes_on_is_not_begun_again(train, capsys):
    _, path = train(steps=64)
    for file in path.glob("*.pt"):
        file.unlink()
    with RunLock(path):
        before = (path / "config.yaml").stat().st_mtime_ns
        assert train(steps=64)[0] == 6
        assert (path / "config.yaml").stat().st_mtime_ns == before
    assert "is in use by pid" in capsys.readouterr().err


def test_evaluating_weights_that_are_not_finite_is_an_error(train, capsys):
    _, path = train(steps=64)
    checkpoint = path / "model_1.pt"
    state = load_checkpoint(checkpoint)
    state["model_state_dict"]["actor.0.weight"][0, 0] = float("nan")
    save_checkpoint(checkpoint, state)
    capsys.readouterr()
    assert main(["eval", str(path)]) == 5
    assert "model_1.pt holds a policy that diverged: 'actor.0.weight' has NaN values; choose" in capsys.readouterr().err


def test_an_evaluation_takes_no_more_steps_than_the_training_between_two_of_them(tmp_path):
    small = ["--num-envs", "4", "--num-steps-per-env", "16", "--num-mini-batches", "2", "--final-episodes", "0"]
    args = ["train", "canter/CartPole", *small, "--no-video", "--eval-episodes", "2", "--name", "r", "--runs-dir"]
    assert main([*args, str(tmp_path), "--total-timesteps", "256"]) == 0
    run = tmp_path / "canter" / "CartPole" / "r-seed1"
    assert not any("eval/mean_reward" in row for row in read_rows(run / "metrics.jsonl"))
    # Two episodes of at most 500 steps are those of 16 iterations of 4 * 16 steps.
    assert yaml.safe_load((run / "config.yaml").read_text())["eval_interval"] == 16
