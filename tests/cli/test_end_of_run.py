"""What the end of a run and its later commands say: films, the better checkpoint, plugins, rounded steps."""

import textwrap

import numpy as np
import pytest

from canter.cli import train
from canter.cli.__main__ import main
from canter.cli.play import MAX_FRAMES, ShownFilm, film_length
from canter.utils.statistics import few_runs


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "pole_plugin.py").write_text(
        textwrap.dedent("""
            import gymnasium
            from canter.envs import register_env
            def make(task, num_envs, **options):
                return gymnasium.make_vec("CartPole-v1", num_envs)
            register_env("pole/plugged", make)
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CANTER_PLUGINS", "pole_plugin")


def test_a_run_remembers_its_plugins_and_its_next_commands_name_them(plugin, monkeypatch, capsys):
    flags = ["--total-timesteps", "512", "--final-episodes", "1", "--no-video", "--name", "x", "--threads", "1"]
    assert main(["train", "pole/plugged", *flags]) == 0
    run = "runs/pole/plugged/x-seed1"
    shown = capsys.readouterr().out
    assert f"eval {run}" not in shown
    for command in ("play", "export", "resume", "plot"):
        assert f"{command} {run}" in shown
    assert shown.count("--modules pole_plugin") == 3
    monkeypatch.delenv("CANTER_PLUGINS")
    assert main(["eval", run]) != 0
    assert "--modules pole_plugin" in capsys.readouterr().err
    assert main(["eval", run, "--modules", "pole_plugin", "--episodes", "1"]) == 0


def test_the_better_checkpoint_is_the_one_to_play(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--total-timesteps", "256", "--final-episodes", "1", "--no-video", "--name", "x", "--threads", "1"]
    real = train.write_json

    def lower(path, content):
        real(path, {**content, "eval/mean_reward": 1e6} if path.name == "best.json" else content)

    monkeypatch.setattr(train, "write_json", lower)
    assert main(["train", "CartPole-v1", "--eval-interval", "1", "--eval-episodes", "1", *flags]) == 0
    assert "play runs/CartPole-v1/x-seed1 --checkpoint best" in capsys.readouterr().out


def test_a_film_says_how_much_of_the_episode_it_lacks_and_why(tmp_path):
    made = ShownFilm(tmp_path / "x.mp4", 30, 1000)
    made.num_frames = 85
    assert film_length(made, is_cut=False, seconds=25.0) == "85 frames"
    made.began -= 26.0
    assert film_length(made, is_cut=True, seconds=25.0).startswith("85 of at most 1000 frames: rendering took more")
    assert "interrupted" in film_length(made, is_cut=True, seconds=np.inf)
    made.num_frames = made.most_frames = MAX_FRAMES
    assert f"{MAX_FRAMES} frames are the most" in film_length(made, is_cut=True, seconds=25.0)


@pytest.mark.parametrize(("count", "says"), [(2, "2 runs"), (3, ""), (10, "")])
def test_an_interval_of_two_runs_is_called_too_small(count, says):
    assert says in few_runs(count)
    assert bool(few_runs(count)) == bool(says)
