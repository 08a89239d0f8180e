"""Capture on a GPU, and recording on a CPU, must be invisible for teachers and motion priors too."""

import warnings

import pytest
import torch
from device_waits import iterations_without_looks

from canter.envs.components import MotionFeatures, ObsComponents
from canter.envs.torch_envs.tasks import Pendulum, PointRobot
from canter.runners import AmpPolicyRunner, OnPolicyRunner

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
SIZES = {"actor_hidden_dims": [16], "critic_hidden_dims": [16]}
RECURRENT = {"rnn_type": "gru", "rnn_hidden_size": 16}
MOTION = [
    {},
    {"amp_replay_buffer_size": 2000},
    {"discriminator_optimizer": "shared"},
    {"discriminator_accuracy_limit": 0.5},
]
TAUGHT = [
    {},
    {"using_ppo": False, "buffer_dilation_ratio": 2.5},
    {"critic_warmup_iterations": 4, "hidden_state_resample_prob": 0.3},
]


def num_envs(device):
    return 6 if device == "cpu" else 64


def config(execution, policy, **algorithm):
    shared = {
        "num_learning_epochs": 1,
        "num_mini_batches": 3,
        "schedule": "adaptive",
        "empirical_normalization": True,
        "execution": execution,
        "precision": "fp32",
    }
    return {"num_steps_per_env": 6, "seed": 3, "policy": {**SIZES, **policy}, "algorithm": shared | algorithm}


def motion_runner(device, execution, recurrent, iterations=None, **algorithm):
    env = MotionFeatures(
        PointRobot(num_envs(device), device, 1, max_episode_length=11), ["true_velocity"], privileged=True
    )
    bank = torch.tensor([[0.8, 0.0, 0.8, 0.0]]) + 0.05 * torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    discriminator = {"input_dim": 4, "style_reward_coef": 1.0, "hidden_dims": [16], "task_reward_lerp": 0.3}
    policy = {"class_name": "AmpActorCritic", "amp_discriminator": discriminator}
    if recurrent:
        policy |= {"class_name": "AmpActorCriticRecurrent", **RECURRENT}
    settings = {"class_name": "APPO", "amp_motion_loader": bank, **algorithm}
    runner = AmpPolicyRunner(env, config(execution, policy, **settings), None, device, show_progress=False)
    runner.learn(iterations or (4 if device == "cpu" else 10))
    return runner


def taught_runner(device, execution, recurrent, iterations=None, **algorithm):
    env = ObsComponents(
        Pendulum(num_envs(device), device, 1, max_episode_length=11), {"angle": 2, "velocity": 1}, ["angle"]
    )
    teacher = {
        "class_name": "ActorCriticRecurrent",
        "num_actor_obs": 3,
        "num_critic_obs": 3,
        "num_actions": 1,
        **RECURRENT,
    }
    policy = {"class_name": "ActorCriticRecurrent", **RECURRENT} if recurrent else {"class_name": "ActorCritic"}
    settings = {"class_name": "TPPO", "teacher_policy": teacher, "teacher_act_prob": "linear", "update_times_scale": 8}
    torch.manual_seed(0)  # the teacher's weights are random
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the teacher has no teacher_ac_path")
        given = config(execution, policy, **settings, **algorithm)
        runner = OnPolicyRunner(env, given, None, device, show_progress=False)
    runner.learn(iterations or (4 if device == "cpu" else 10))
    return runner


def assert_same(captured, eager):
    assert captured.alg.executor.graphs
    assert not captured.alg.executor.eager_only
    for name, value in captured.alg.policy.state_dict().items():
        other = eager.alg.policy.state_dict()[name]
        assert torch.equal(value, other), f"{name} differs by {(value - other).abs().max()}"
    assert list(captured.rewbuffer) == list(eager.rewbuffer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("settings", MOTION)
def test_motion_priors_with_a_gradient_penalty_are_captured_and_equal_eager(device, recurrent, settings):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be (captured|recorded)")
        captured = motion_runner(device, "graph", recurrent, **settings)
    eager = motion_runner(device, "eager", recurrent, **settings)
    assert_same(captured, eager)
    assert torch.equal(captured.alg.motion_prior.accuracy, eager.alg.motion_prior.accuracy)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("settings", TAUGHT)
def test_teachers_are_captured_and_equal_eager(device, recurrent, settings):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be (captured|recorded)")
        captured = taught_runner(device, "graph", recurrent, **settings)
    eager = taught_runner(device, "eager", recurrent, **settings)
    assert_same(captured, eager)
    assert torch.equal(captured.alg.use_teacher_act_mask, eager.alg.use_teacher_act_mask)


@GPU
@pytest.mark.parametrize("make", [motion_runner, taught_runner])
def test_what_is_compiled_inside_learns_the_same_to_rounding(make):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be")
        compiled = make("cuda", "compile", False, 6, schedule="fixed")
    eager = make("cuda", "eager", False, 6, schedule="fixed")  # an adaptive rate jumps where a KL is a hair greater
    for x, y in zip(compiled.alg.policy.parameters(), eager.alg.policy.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0.05, atol=0.02)


@GPU
@pytest.mark.parametrize("make", [motion_runner, taught_runner])
def test_an_iteration_waits_for_the_device_at_most_six_times(make, monkeypatch):
    runner = make("cuda", "graph", False, 8)
    runner.log_interval = 0
    for waits in iterations_without_looks(runner, monkeypatch):
        assert len(waits) <= 6, "\n".join(waits)
