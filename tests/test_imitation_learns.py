"""Teachers teach, and style follows the clip: short learning runs, a minute or two each; run with `-m slow`."""

import pytest
import torch

from canter.envs.components import MotionFeatures, ObsComponents, windows
from canter.envs.torch_envs.tasks import Pendulum, PointRobot
from canter.runners import AmpPolicyRunner, OnPolicyRunner

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:task_reward_lerp is 0")]
PARTS = {"angle": 2, "velocity": 1}
NET = {"actor_hidden_dims": [64, 64], "critic_hidden_dims": [64, 64], "activation": "tanh", "orthogonal_init": True}
STEPS = {"num_steps_per_env": 64, "seed": 1, "log_interval": 0}
PENDULUM = {"gamma": 0.9, "learning_rate": 1e-3, "empirical_normalization": True, "normalize_rewards": True}


def style_velocity(velocity, **algorithm):
    """Mean velocity of a point robot whose only reward is the style of a clip that moves at `velocity`."""
    noise = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    bank = windows(torch.tensor([velocity]) + 0.05 * noise)
    env = MotionFeatures(PointRobot(64, seed=1), ["true_velocity"], privileged=True)
    discriminator = {"input_dim": 4, "style_reward_coef": 1.0, "hidden_dims": [64, 64]}
    policy = {
        "class_name": "AmpActorCritic",
        "actor_hidden_dims": [64, 64],
        "critic_hidden_dims": [64, 64],
        "init_noise_std": 0.5,
        "amp_discriminator": discriminator,
    }
    settings = {
        "class_name": "APPO",
        "num_learning_epochs": 4,
        "num_mini_batches": 4,
        "schedule": "adaptive",
        "gamma": 0.99,
        "empirical_normalization": True,
        "amp_motion_loader": bank,
        "discriminator_learning_rate": 5e-4,
        **algorithm,
    }
    cfg = {"num_steps_per_env": 24, "seed": 3, "log_interval": 0, "policy": policy, "algorithm": settings}
    runner = AmpPolicyRunner(env, cfg, None, "cpu", show_progress=False)
    runner.learn(60)
    act, (obs, _), seen = runner.get_inference_policy(), env.reset(), []
    for _ in range(150):
        record = env.step(act(obs))
        obs = record.obs
        seen.append(record.critic_obs[:, 6:8].mean(0))
    return torch.stack(seen[50:]).mean(0)


@pytest.mark.parametrize("velocity", [(0.8, 0.0), (-0.5, 0.5)])
def test_the_style_is_that_of_the_clip(velocity):
    assert (style_velocity(velocity) - torch.tensor(velocity)).norm() < 0.2


@pytest.mark.parametrize("separate", [False, True])
def test_two_normalisers_hide_the_speed_that_one_shows(separate):
    speed = style_velocity((2.0, 0.0), separate_amp_normalizers=separate)[0]
    assert (speed > 0.8 * 2.0) != separate


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A half-trained teacher that sees everything: its run directory and its return."""
    path = tmp_path_factory.mktemp("teacher")
    algorithm = {**PENDULUM, "num_learning_epochs": 10, "num_mini_batches": 16, "lam": 0.95}
    runner = OnPolicyRunner(
        Pendulum(32, seed=1),
        {**STEPS, "algorithm": algorithm, "policy": NET},
        path,
        "cpu",
        eval_env=Pendulum(20, seed=99),
        show_progress=False,
    )
    runner.learn(total_timesteps=150_000)
    return path, runner.eval(20)["eval/mean_reward"]


@pytest.mark.parametrize(
    "algorithm",
    [
        {"using_ppo": False, "teacher_act_prob": "linear", "update_times_scale": 10, "buffer_dilation_ratio": 4.0},
        {"teacher_act_prob": 0.0, "distillation_loss_coef": "linear", "update_times_scale": 30},
    ],
)
def test_a_student_without_velocities_comes_up_to_its_teacher(teacher, algorithm):
    path, wanted = teacher
    env, judge = (ObsComponents(Pendulum(n, seed=s), PARTS, ["angle"]) for n, s in ((32, 2), (20, 98)))
    policy = {**NET, "class_name": "ActorCriticRecurrent", "rnn_type": "gru", "rnn_hidden_size": 32}
    settings = {
        "class_name": "TPPO",
        "teacher_ac_path": str(path),
        "num_learning_epochs": 5,
        "num_mini_batches": 4,
        "distill_target": "mse_sum",
        "schedule": "linear",
    }
    cfg = {**STEPS, "max_iterations": 40, "algorithm": {**PENDULUM, **settings, **algorithm}, "policy": policy}
    runner = OnPolicyRunner(env, cfg, None, "cpu", eval_env=judge, show_progress=False)
    before = runner.eval(20)["eval/mean_reward"]
    runner.learn(40)
    after = runner.eval(20)["eval/mean_reward"]
    assert (after - before) / (wanted - before) > 0.8
