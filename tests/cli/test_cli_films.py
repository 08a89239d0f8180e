"""Films and histograms while a policy trains."""

import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import canter.cli.films
from canter.cli.films import Films
from canter.envs import PointRobot
from canter.runners import OnPolicyRunner, log_histograms

CFG = {"num_steps_per_env": 4, "policy": {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}}
CFG |= {"algorithm": {"num_learning_epochs": 1, "num_mini_batches": 1, "schedule": "fixed", "execution": "eager"}}
PLAY = """
import sys, time
from pathlib import Path
from canter.utils.films import Film
import numpy as np
video, checkpoint = (Path(sys.argv[sys.argv.index(flag) + 1]) for flag in ("--video", "--checkpoint"))
assert checkpoint.is_file()
with Film(video) as film:
    for shade in range(5):
        film.add(np.full((16, 16, 3), 50 * shade, np.uint8))
"""


@pytest.fixture
def runner(tmp_path):
    made = OnPolicyRunner(PointRobot(2), CFG, log_dir=tmp_path, device="cpu", show_progress=False)
    yield made
    made.close()


def events(path):
    found = EventAccumulator(str(path), size_guidance={"images": 0, "histograms": 0})
    return found.Reload()


def films_with(monkeypatch, code, run, interval):
    def command(run, film, modules, *flags):
        return [sys.executable, "-c", code, str(run), "--video", str(film), *flags]

    monkeypatch.setattr(canter.cli.films, "film_command", command)
    return Films(run, interval)


def test_films_are_made_beside_the_training_and_logged(runner, tmp_path, monkeypatch):
    films = films_with(monkeypatch, PLAY, tmp_path, interval=2)
    runner.add_callback("post_iteration", films)
    runner.add_callback("post_iteration", lambda *_: films.process and films.process.wait())
    runner.learn(5)
    films.finish(runner)
    assert sorted(path.name for path in (tmp_path / "films").iterdir()) == ["step_16.mp4", "step_32.mp4"]
    runner.flush()
    assert [image.step for image in events(tmp_path).Images("film")] == [16, 32]


def test_a_film_that_fails_is_one_warning_and_no_more_are_made(runner, tmp_path, monkeypatch):
    films = films_with(monkeypatch, "import sys; sys.exit('no screen')", tmp_path, interval=1)
    runner.add_callback("post_iteration", films)
    runner.add_callback("post_iteration", lambda *_: films.process and films.process.wait())
    with pytest.warns(UserWarning, match="the one at step 8 failed: no screen") as caught:
        runner.learn(4)
    assert len([warning for warning in caught if "failed" in str(warning.message)]) == 1
    assert list((tmp_path / "films").iterdir()) == []


def test_a_film_that_cannot_be_read_does_not_end_the_run(runner, tmp_path, monkeypatch):
    def read(path):
        raise OSError("ffmpeg version 99\nUnrecognized option 'fps_mode'")

    monkeypatch.setattr(canter.cli.films, "read_film", read)
    films = films_with(monkeypatch, PLAY, tmp_path, interval=1)
    runner.add_callback("post_iteration", films)
    runner.add_callback("post_iteration", lambda *_: films.process and films.process.wait())
    with pytest.warns(UserWarning, match="the one at step 8 failed: Unrecognized option 'fps_mode'"):
        runner.learn(4)
    assert runner.iteration == 4
    assert [path.name for path in (tmp_path / "films").iterdir()] == ["step_8.mp4"]


def test_the_policy_of_a_film_is_the_one_of_its_step(train, tmp_path, capsys):
    code, run = train("CartPole-v1", "--film-interval", "2", "--histogram-interval", "2")
    assert code == 0
    steps = [int(path.stem.partition("_")[2]) for path in (run / "films").glob("*.mp4")]
    assert steps
    assert not list((run / "films").glob("*.pt"))
    found = events(run)
    assert found.Tags()["images"] == ["film"]
    assert {"weights/actor.0.weight", "rollout/advantages", "rollout/actions"} <= set(found.Tags()["histograms"])


def test_histograms_show_parameters_actions_and_the_rollout(runner, tmp_path):
    log_histograms(runner)  # before the log is open: nothing to do
    runner.add_callback("post_iteration", lambda runner, stats: runner.is_due(2) and log_histograms(runner))
    runner.learn(3)
    runner.flush()
    found = events(tmp_path)
    names = {f"weights/{name}" for name, _ in runner.policy.named_parameters()}
    names |= {"rollout/advantages", "rollout/returns", "rollout/values", "rollout/actions"}
    assert set(found.Tags()["histograms"]) == names
    (event,) = found.Histograms("rollout/returns")
    assert (event.step, event.histogram_value.num) == (16, 8)
