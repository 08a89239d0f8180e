"""`canter collect`, `canter dagger` and `canter motion`, as a user types them."""

import json

import pytest
import torch
import yaml

from canter.cli.__main__ import main
from canter.runners.heartbeat import Heartbeat
from canter.storage.rollout_files import RolloutDataset


def test_collect_saves_trajectories_and_continues(trained, capsys):
    out = trained / "demos"
    args = ["collect", str(trained), "--out", str(out), "--num-envs", "4", "--file-steps", "16", "--episodes", "0"]
    assert main([*args, "--steps", "100"]) == 0
    metadata = json.loads((out / "metadata.json").read_text())
    assert metadata["env"] == "canter/CartPole"
    assert metadata["total_timesteps"] == 128  # whole buffers of 4 x 16
    assert "128 steps" in capsys.readouterr().out
    assert main([*args, "--steps", "200"]) == 0
    assert json.loads((out / "metadata.json").read_text())["total_timesteps"] == 256
    data = RolloutDataset(out, 2, device="cpu")
    batch = data.get_batch(5)
    assert batch.observation.shape == (5, 2, 4)
    assert set(batch.action.flatten().tolist()) <= {0, 1}


def test_collect_ends_after_the_episodes_that_are_asked_for(trained, capsys):
    args = ["collect", str(trained), "--out", str(trained / "demos"), "--num-envs", "2", "--file-steps", "8"]
    assert main([*args, "--episodes", "3"]) == 0
    steps, _, episodes = capsys.readouterr().out.splitlines()[-1].split()[:3]
    assert 3 <= int(episodes) < 10
    assert int(steps) < 10_000, "the default of --steps alone"


def test_collect_is_greedy_by_default(trained):
    from canter.cli.runs import find_checkpoint, load_policy, read_run

    out = trained / "demos"
    assert main(["collect", str(trained), "--steps", "64", "--num-envs", "2"]) == 0
    batch = RolloutDataset(trained / "demonstrations", 1, device="cpu").get_batch(5)
    policy = load_policy(read_run(trained), find_checkpoint(trained, None), 2, 0, "cpu").policy
    with torch.no_grad():
        assert torch.equal(policy.act_inference(batch.observation[:, 0]), batch.action[:, 0])
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--num-envs", "0"], "--num-envs must be at least 1"),
        (["--checkpoint", "model_77.pt"], "no checkpoint"),
        (["--images", "{camera: normalized_image}"], "obs_segments"),
    ],
)
def test_collect_refuses_in_one_line(trained, capsys, flags, text):
    assert main(["collect", str(trained), *flags]) == 2
    assert text in capsys.readouterr().err


# ------------------------------------------------------------------ motion
def test_motion_summarises_and_plots_a_clip(tmp_path, capsys):
    from canter.datasets import CLIPS

    picture = tmp_path / "clip.png"
    assert main(["motion", str(CLIPS / "quadruped_pace.npz"), "--plot", str(picture), "--fields", "joint_pos"]) == 0
    out = capsys.readouterr().out
    assert "41 frames at 50 Hz, 0.8 s" in out
    assert "joint_pos" in out
    assert "FR_hip" in out
    assert "not the derivative" not in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_motion_lists_a_directory_and_refuses_in_one_line(tmp_path, capsys):
    from canter.datasets import CLIPS

    assert main(["motion", str(CLIPS)]) == 0
    assert capsys.readouterr().out.count("frames at") == 5
    assert main(["motion", str(tmp_path / "none.txt")]) == 2
    (tmp_path / "bad.txt").write_text("{}")
    assert main(["motion", str(tmp_path / "bad.txt")]) == 2
    assert "bad.txt" in capsys.readouterr().err


def test_motion_finds_the_clips_that_come_with_canter_by_name(capsys):
    assert main(["motion", "quadruped_trot.txt"]) == 0
    assert main(["motion", "trot.txt"]) == 2
    assert "the clips that come with canter are biped_walk.csv, point_circle.txt" in capsys.readouterr().err


def test_motion_reports_velocities_that_are_not_derivatives(tmp_path, capsys):
    from canter.datasets import CLIPS
    from canter.datasets.motion_clip import read_clip, write_clip

    clip = read_clip(CLIPS / "quadruped_pace.npz")
    clip.frames[:, clip.where(["joint_vel"])] *= 2
    write_clip(tmp_path / "twice.npz", clip)
    assert main(["motion", str(tmp_path / "twice.npz")]) == 0
    assert "not the derivative" in capsys.readouterr().out


# ------------------------------------------------------------------ dagger
DAGGER = ["--num-envs", "2", "--num-steps-per-env", "8", "--algorithm"]
DAGGER += ["{num_mini_batches: 2}"]


def test_dagger_in_two_roles_shares_two_directories(trained, capsys, recwarn):
    run, data = trained / "student", trained / "labels"
    where = [str(trained), "--run", str(run), "--data", str(data), *DAGGER]
    config = {"policy": {"class_name": "ActorCritic", "actor_hidden_dims": [4], "critic_hidden_dims": [4]}}
    run.mkdir()
    (run / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="untrained student"):
        assert main(["dagger", *where, "--role", "collect", "--max-steps", "256"]) == 0
    (run / "config.json").unlink()
    metadata = json.loads((data / "metadata.json").read_text())
    assert metadata["total_timesteps"] >= 256
    assert metadata["training_policy_logdir"] == "../student"
    assert main(["dagger", *where, "--role", "train", "--iterations", "3", "--eval-episodes", "2"]) == 0
    assert (run / "model_3.pt").exists()
    assert "return" in capsys.readouterr().out
    assert not any("leaves out settings" in str(w.message) for w in recwarn)  # its user writes no training dict
    assert main(["dagger", *where, "--role", "train", "--iterations", "5", "--eval-episodes", "0"]) == 0
    assert (run / "model_5.pt").exists()
    assert main(["eval", str(run), "--episodes", "2"]) == 0  # a run like any other


def test_dagger_honours_data_on_an_existing_run_and_keeps_paths_relative(trained, capsys, tmp_path):
    run = trained / "student"
    config = {"policy": {"class_name": "ActorCritic", "actor_hidden_dims": [4], "critic_hidden_dims": [4]}}
    run.mkdir()
    (run / "config.json").write_text(json.dumps(config))
    where = [str(trained), "--run", str(run), *DAGGER]
    with pytest.warns(UserWarning, match="untrained student"):
        assert main(["dagger", *where, "--role", "collect", "--max-steps", "256"]) == 0
    (run / "config.json").unlink()
    assert main(["dagger", *where, "--role", "train", "--iterations", "2", "--eval-episodes", "0"]) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["pretrain_dataset"]["data_dir"] == "data"
    moved = tmp_path / "moved"
    run.rename(moved)
    where[2] = str(moved)
    assert main(["dagger", *where, "--role", "train", "--iterations", "3", "--eval-episodes", "0"]) == 0
    (moved / "data").rename(tmp_path / "elsewhere")
    flags = ["--data", str(tmp_path / "elsewhere"), "--role", "train", "--iterations", "4", "--eval-episodes", "0"]
    assert main(["dagger", *where, *flags]) == 0
    assert (moved / "model_4.pt").is_file()
    config = yaml.safe_load((moved / "config.yaml").read_text())
    assert config["pretrain_dataset"]["data_dir"] == str(tmp_path / "elsewhere")


@pytest.fixture
def partner_leaves(monkeypatch):
    """The partner's file is there at the first two looks, and gone afterwards."""
    looks = []

    def look(self):
        looks.append(self.partner_path.exists())
        if len(looks) == 2:
            self.partner_path.unlink()
        return looks[-1]

    monkeypatch.setattr(Heartbeat, "has_partner", look)


def test_a_trainer_notices_that_its_collector_is_gone(trained, capsys, monkeypatch, partner_leaves):
    monkeypatch.setattr("canter.cli.distill.NOTE_SECONDS", 0.0)
    run = trained / "student"
    flags = [str(trained), "--run", str(run), *DAGGER, "--role", "train", "--iterations", "3", "--when-alone", "stop"]
    (run / "data").mkdir(parents=True)
    (run / "data" / ".collector-alive").touch()
    with pytest.warns(UserWarning, match="the collector is gone: no sign of it in .*data; this process stops"):
        assert main(["dagger", *flags]) == 2
    said = capsys.readouterr()
    assert "no collector writes to" in said.err
    assert "waiting for 2 trajectories in" in said.out
    assert not (run / ".trainer-alive").exists()


def test_a_collector_notices_that_its_trainer_is_gone(trained, partner_leaves):
    run = trained / "student"
    config = {"policy": {"class_name": "ActorCritic", "actor_hidden_dims": [4], "critic_hidden_dims": [4]}}
    run.mkdir()
    (run / "config.json").write_text(json.dumps(config))
    (run / ".trainer-alive").touch()
    flags = [str(trained), "--run", str(run), *DAGGER, "--role", "collect", "--when-alone", "stop"]
    with pytest.warns(UserWarning, match="the trainer is gone: no sign of it in .*student; this process stops"):
        assert main(["dagger", *flags]) == 0
    assert json.loads((run / "data" / "metadata.json").read_text())["total_timesteps"] > 0


@pytest.mark.slow
def test_dagger_starts_both_and_ends_both(trained, capsys):
    assert main(["dagger", str(trained), *DAGGER, "--iterations", "20", "--eval-episodes", "2"]) == 0
    run = trained / "dagger"
    assert (run / "model_20.pt").exists()
    assert json.loads((run / "data" / "metadata.json").read_text())["total_timesteps"] > 0
    assert "Traceback" not in (run / "collector.log").read_text()


def test_dagger_refuses_in_one_line(trained, tmp_path, capsys):
    assert main(["dagger", str(tmp_path / "none")]) == 2
    assert main(["dagger", str(trained), "--num-envs", "0"]) == 2
    assert "--num-envs must be at least 1" in capsys.readouterr().err
