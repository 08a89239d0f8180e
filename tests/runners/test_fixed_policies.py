"""Runners around policies that cannot learn: they evaluate and play, and say why they do not train."""

import numpy as np
import pytest
import torch

from canter.algorithms import PPO, TPPO, Teacher
from canter.cli.__main__ import main
from canter.cli.errors import UserError
from canter.cli.runs import new_runner
from canter.envs import Course, PointRobot
from canter.modules import ActorCritic, DeterministicPolicyMixin
from canter.runners import OnPolicyRunner, TwoStageRunner
from canter.storage.rollout_files import TrajectoryWriter

pytestmark = pytest.mark.filterwarnings("ignore:.*leaves out settings", "ignore:obstacles .* have no sub-policy")
SMALL = {"actor_hidden_dims": [8], "critic_hidden_dims": [8]}


class Quiet(DeterministicPolicyMixin, ActorCritic):
    pass


@pytest.fixture(scope="module")
def skill(tmp_path_factory):
    """The run directory of a policy for the course."""
    path = tmp_path_factory.mktemp("skill")
    cfg = {"num_steps_per_env": 4, "policy": SMALL}
    runner = OnPolicyRunner(Course(4, max_episode_length=20), cfg, path, "cpu", show_progress=False)
    runner.learn(1)
    runner.close()
    return path


@pytest.fixture
def mutex(skill, tmp_path):
    env = Course(4, max_episode_length=20, seed=1)
    policy = {"class_name": "ActorCriticFieldMutex", "sub_policy_paths": [str(skill)] * 3, "env_action_scale": 1.0}
    info = {"task": "canter/Course", "num_envs": 4}
    cfg = {"num_steps_per_env": 4, "policy": policy}
    runner = OnPolicyRunner(env, cfg, tmp_path / "mutex", "cpu", run_info=info, show_progress=False)
    yield runner
    runner.close()


def test_a_runner_evaluates_a_mutex_policy_and_refuses_to_train_it(mutex):
    assert mutex.eval(4)["eval/mean_length"] == 20.0
    actions = mutex.get_inference_policy()(mutex.env.get_observations()[0])
    assert actions.shape == (4, 2)
    with pytest.raises(TypeError, match="ActorCriticFieldMutex cannot learn: it has no parameters to train"):
        mutex.learn(1)
    assert mutex.iteration == 0
    assert not list(mutex.save_dir.glob("*.pt"))


def test_commands_evaluate_and_play_a_saved_mutex_policy(mutex, tmp_path, capsys):
    mutex.write_config()
    mutex.save_checkpoint("model_0.pt")
    assert main(["eval", str(tmp_path / "mutex"), "--episodes", "2"]) == 0
    assert "mean reward" in capsys.readouterr().out
    assert main(["play", str(tmp_path / "mutex"), "--video", str(tmp_path / "play.gif"), "--seconds", "0.2"]) == 0
    assert (tmp_path / "play.gif").stat().st_size > 0


def test_a_new_run_of_a_policy_without_parameters_is_refused_and_leaves_no_directory(mutex, tmp_path):
    config = {**mutex.config(), "eval_episodes": 2, "device": "cpu"}
    with pytest.raises(UserError, match="ActorCriticFieldMutex cannot learn"):
        new_runner(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_deterministic_policy_is_evaluated_but_does_not_learn_from_rewards():
    env = PointRobot(4, max_episode_length=7)
    runner = OnPolicyRunner(env, PPO(Quiet(6, 9, 2, **SMALL)), show_progress=False)
    assert runner.eval(4)["eval/mean_length"] <= 7.0
    assert runner.get_inference_policy()(env.get_observations()[0]).shape == (4, 2)
    with pytest.raises(TypeError, match="Quiet cannot learn from rewards.*TPPO"):
        runner.learn(1)


def test_a_deterministic_policy_learns_from_a_teacher():
    torch.manual_seed(0)
    teacher = ActorCritic(9, 9, 2, **SMALL)
    policy = Quiet(6, 9, 2, **SMALL)
    alg = PPO(policy, extensions=[Teacher(policies=[teacher])], num_learning_epochs=8, learning_rate=1e-2)
    runner = OnPolicyRunner(PointRobot(8, max_episode_length=9), alg, log_interval=1, show_progress=False)
    history = runner.learn(12).history
    assert history[-1]["train/distillation_loss"] < 0.5 * history[0]["train/distillation_loss"]
    with pytest.warns(UserWarning, match="TPPO has no teacher"):
        alone = TPPO(Quiet(6, 9, 2, **SMALL))
    with pytest.raises(TypeError, match="Quiet cannot learn from rewards"):
        OnPolicyRunner(PointRobot(4), alone, show_progress=False).learn(1)


def test_a_deterministic_policy_clones_a_dataset_until_the_environments_turn(tmp_path):
    env = PointRobot(4, max_episode_length=7)
    with TrajectoryWriter(tmp_path) as writer:
        for k in range(4):
            shapes = {"observations": 6, "privileged_observations": 9, "actions": 2, "rewards": 1}
            steps = {name: np.full((9, width), 0.5, np.float32) for name, width in shapes.items()}
            writer.add(k, {**steps, "dones": np.zeros((9, 1), np.uint8)}, 0, "truncated")
    with pytest.warns(UserWarning, match="TPPO has no teacher"):
        alg = TPPO(Quiet(6, 9, 2, **SMALL), distill_target="mse_sum", learning_rate=1e-2)
    source = {"data_dir": str(tmp_path), "dataset_loops": -1}
    cfg = {"pretrain_dataset": source, "pretrain_iterations": 20, "log_interval": 1}
    runner = TwoStageRunner(env, alg, show_progress=False, **cfg)
    history = runner.learn(20).history
    assert history[-1]["train/distillation_loss"] < 0.3 * history[0]["train/distillation_loss"]
    with pytest.raises(TypeError, match="Quiet cannot learn from rewards"):
        runner.learn(1)
