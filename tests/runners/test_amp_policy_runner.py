"""AmpPolicyRunner: the on-policy loop, with checks and metrics of motion."""

import warnings

import pytest
import torch

from canter.envs.components import MotionFeatures
from canter.envs.torch_envs.tasks import PointRobot
from canter.runners import RUNNERS, AmpPolicyRunner

POLICY = {
    "class_name": "AmpActorCritic",
    "actor_hidden_dims": [8],
    "critic_hidden_dims": [8],
    "amp_discriminator": {"input_dim": 4, "style_reward_coef": 1.0, "hidden_dims": [8], "task_reward_lerp": 0.5},
}
BANK = torch.randn(50, 4)


def env(num_envs=8):
    return MotionFeatures(PointRobot(num_envs, seed=1, max_episode_length=6), ["true_velocity"], privileged=True)


def config(**algorithm):
    given = {"class_name": "APPO", "amp_motion_loader": BANK, **algorithm}
    return {"num_steps_per_env": 4, "seed": 1, "policy": POLICY, "algorithm": given}


def test_it_trains_and_logs_style_and_task(tmp_path):
    runner = AmpPolicyRunner(env(), config(), tmp_path, "cpu", show_progress=False)
    history = runner.learn(3).history
    assert len(history) == 3
    wanted = {
        "Episode_Reward/style_reward",
        "Episode_Reward/task_reward",
        "amp/accuracy",
        "amp/expert_d",
        "amp/policy_d",
        "amp/saturation",
        "amp/updates",
        "train/discriminator_grad_pen_loss",
    }
    assert wanted <= history[-1].keys()
    assert 0.0 < history[-1]["Episode_Reward/style_reward"] <= 1.0
    assert "Episode_Reward/style_reward" in (tmp_path / "metrics.jsonl").read_text()
    assert RUNNERS["AmpPolicyRunner"] is AmpPolicyRunner


def test_an_environment_without_motion_is_refused_at_the_first_step():
    runner = AmpPolicyRunner(PointRobot(4, seed=1), config(), None, "cpu", show_progress=False)
    with pytest.raises(KeyError, match=r"ref_obs.*MotionFeatures"):
        runner.learn(1)
    runner = AmpPolicyRunner(env(), config(amp_motion_loader=None), None, "cpu", show_progress=False)
    with pytest.raises(KeyError, match=r"ref_motion.*amp_motion_loader"):
        runner.learn(1)


def test_plain_ppo_runs_with_a_warning():
    cfg = {"num_steps_per_env": 4, "policy": {"actor_hidden_dims": [8], "critic_hidden_dims": [8]}}
    with pytest.warns(UserWarning, match="PPO learns no style"):
        runner = AmpPolicyRunner(PointRobot(4, seed=1), cfg, None, "cpu", show_progress=False)
    runner.learn(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*learns no style")
        AmpPolicyRunner(env(), config(), None, "cpu", show_progress=False)


@pytest.mark.parametrize("size", [50, 1000])  # of which the first is overwritten when it is saved
def test_it_resumes_exactly_in_a_new_runner_and_in_its_own(tmp_path, size):
    def made(directory):
        return AmpPolicyRunner(env(), config(amp_replay_buffer_size=size), directory, "cpu", show_progress=False)

    whole, first, second = (made(tmp_path / name) for name in ("whole", "first", "second"))
    whole.learn(4)
    first.learn(2)
    replay = first.alg.motion_prior.replay
    assert 0 < replay.step < (size if size == 50 else replay.num_samples + 1)
    assert (replay.num_samples == size) == (size == 50)
    first.learn(1)
    for resumed in (second, first):
        resumed.load(tmp_path / "first" / "model_2.pt")
        resumed.learn(2)
        for (name, a), b in zip(whole.policy.state_dict().items(), resumed.policy.state_dict().values(), strict=True):
            assert torch.equal(a, b), name
