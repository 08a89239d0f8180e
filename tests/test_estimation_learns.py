"""A state estimator learns beside the policy what the actor is not shown. Half a minute each, so run with `-m slow`."""

import pytest
import torch

from canter.envs import ObsComponents, wrap_env
from canter.runners import OnPolicyRunner

pytestmark = pytest.mark.slow
RECURRENT = {"rnn_type": "lstm", "rnn_hidden_size": 32}
# arm -> what the actor sees, the policy
ARMS = {
    "window": (["angle_history"], {"class_name": "StateAc"}),
    "memory": (["angle"], {"class_name": "StateAcRecurrent", **RECURRENT}),
    "actors memory": (["angle"], {"class_name": "StateAcRecurrent", "use_actor_rnn": True, **RECURRENT}),
}


def make_env(seen, num_envs, seed):
    env = wrap_env("canter/Pendulum", num_envs=num_envs, seed=seed)
    history = {"angle": 4} if "angle_history" in seen else None
    return ObsComponents(env, {"angle": 2, "speed": 1}, seen, ["angle", "speed"], history)


@torch.no_grad()
def held_out_r2(policy, env, num_steps=150):
    policy.eval()
    policy.reset()
    obs, critic_obs = env.reset()
    errors, truths = [], []
    for _ in range(num_steps):
        actions = policy.act(obs)
        truths.append(critic_obs[:, 2:])
        errors.append(policy.get_estimated_state(denormalize=True) - truths[-1])
        record = env.step(policy.distribution.to_env(actions))
        policy.reset(record.done)
        obs, critic_obs = record.obs, record.critic_obs
    return float(1 - torch.cat(errors).square().mean() / torch.cat(truths).var())


@pytest.mark.parametrize("arm", ARMS)
def test_hidden_speeds_are_estimated_on_episodes_that_were_never_seen(arm):
    seen, policy = ARMS[arm]
    settings = {"estimator_target_components": ["speed"], "append_estimate": arm != "actors memory"}
    algorithm = {"class_name": "EstimatorPPO", "num_learning_epochs": 5, "num_mini_batches": 4, "gamma": 0.95}
    algorithm |= {"learning_rate": 1e-3, "empirical_normalization": True, "normalize_rewards": True}
    cfg = {
        "policy": policy | settings | {"actor_hidden_dims": [64], "critic_hidden_dims": [64]},
        "algorithm": algorithm,
    }
    runner = OnPolicyRunner(
        make_env(seen, 32, 1), cfg | {"num_steps_per_env": 40, "seed": 1}, device="cpu", show_progress=False
    )
    runner.learn(2)
    early = held_out_r2(runner.policy, make_env(seen, 16, 99))
    runner.policy.reset()
    runner.learn(40)
    late = held_out_r2(runner.policy, make_env(seen, 16, 99))
    assert early < late
    assert late > 0.9
