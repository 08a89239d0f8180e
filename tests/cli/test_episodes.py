"""What `canter eval` prints of a simulator: its log of episodes, under commands, over checkpoints."""

import json
from types import SimpleNamespace

import pytest
import torch

from canter.cli.__main__ import main
from canter.cli.episodes import EpisodeLog, one_command
from canter.envs import PointRobot


class Logging(PointRobot):
    """Logs, at the ends of episodes, a reward term that is the number of the step, and reasons of termination."""

    def step(self, actions):
        record = super().step(actions)
        ended = int(record.done.sum())
        log = {"Episode_Reward/upright": torch.tensor(2.0 * ended), "Episode_Termination/fell": ended, "text": "x"}
        return record._replace(extras={**record.extras, "log": log})


def test_terms_are_means_over_episodes_and_terminations_are_shares():
    env = EpisodeLog(Logging(3))
    env.reset()
    ends = 0
    for _ in range(450):
        ends += int(env.step(torch.zeros(3, 2)).done.sum())
    found = env.summary()
    assert found["Episode_Termination/fell"] == 1.0
    assert found["Episode_Reward/upright"] == pytest.approx(6.0)  # the three end together: 2 * 3 every time
    assert "text" not in found
    assert ends == env.episodes["Episode_Termination/fell"] == 6


def with_command(env):
    ranges = SimpleNamespace(lin_vel_x=(-1, 1), lin_vel_y=(-1, 1), ang_vel_z=(-1, 1))
    cfg = SimpleNamespace(ranges=ranges, heading_command=True, rel_standing_envs=0.1)
    term = SimpleNamespace(cfg=cfg)
    manager = SimpleNamespace(active_terms=["twist"], get_term=lambda name: term)
    env.env = SimpleNamespace(command_manager=manager, curriculum_manager="curriculum")
    return env, cfg


def test_one_command_is_given_to_every_robot_and_taken_back():
    env, cfg = with_command(PointRobot(2))
    with one_command(env, (0.5, 0.0, -0.2)):
        assert cfg.ranges.lin_vel_x == (0.5, 0.5)
        assert cfg.ranges.ang_vel_z == (-0.2, -0.2)
        assert (cfg.heading_command, cfg.rel_standing_envs) == (False, 0.0)
        assert env.env.curriculum_manager != "curriculum"
    assert (cfg.ranges.lin_vel_x, cfg.heading_command, cfg.rel_standing_envs) == ((-1, 1), True, 0.1)
    assert env.env.curriculum_manager == "curriculum"
    with pytest.raises(ValueError, match="forward, sideways and turning"), one_command(env, (1.0,)):
        pass
    with pytest.raises(ValueError, match="no command of velocities"), one_command(PointRobot(2), (1.0, 0.0, 0.0)):
        pass


def test_every_checkpoint_of_a_run_is_evaluated_side_by_side(trained, capsys):
    assert main(["eval", str(trained), "--episodes", "2", "--every-checkpoint", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = rows if isinstance(rows, list) else [rows]
    assert [row["checkpoint"] for row in rows] == sorted(path.name for path in trained.glob("model_*.pt"))
    assert main(["eval", str(trained), "--episodes", "2", "--commands", "1,0,0"]) == 2
    assert "no command of velocities" in capsys.readouterr().err
