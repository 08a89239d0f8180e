"""Smoothness, gradient penalty, constraints and several critics: the arithmetic, and recorded as eager."""

import copy
import math

import pytest
import torch

from canter.algorithms import PPO
from canter.envs.vec_env import StepRecord
from canter.storage.rollout_storage import gae

ALL = {"temporal_coef": 1.0, "spatial_coef": 1.0, "policy_coef": 1.0, "value_coef": 1.0, "rate_coef": 1.0}
LIMITS = {"limits": {"action": 0.5, "action_rate": 0.1}, "warmup_iterations": 2}
GROUPS = {"groups": {"task": ["speed"], "rest": ["rest"]}, "weights": {"task": 2.0, "rest": 1.0}, "hidden_dims": (8,)}
EXTENSIONS = {
    "smoothness": {"smoothness_cfg": ALL},
    "gradient_penalty": {"gradient_penalty_coef": 0.1},
    "constraints": {"constraints_cfg": LIMITS},
    "critic_groups": {"critic_groups_cfg": GROUPS},
}


def with_terms(env):
    """The environment with a reward component and a cost, both computed from its random reward."""
    step = env.step

    def more(actions):
        record: StepRecord = step(actions)
        extras = {"reward_components": {"speed": 2.0 * record.reward}, "costs": {"heat": record.reward}}
        return record._replace(extras=extras)

    env.step = more
    return env


def weights(alg):
    return torch.cat([p.detach().flatten() for p in alg.policy.parameters()])


KINDS = dict.fromkeys(EXTENSIONS, ("mlp", "lstm", "beta", "dict"))
KINDS |= {"gradient_penalty": ("mlp", "beta", "dict"), "critic_groups": ("mlp", "lstm", "beta")}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in KINDS.items() for kind in kinds])
def test_recorded_is_eager_and_each_changes_what_is_learned(make_policy, noise_env, collect, name, kind):
    def run(execution, settings):
        env, alg = with_terms(noise_env(kind)), PPO(make_policy(kind), seed=1, execution=execution, **settings)
        alg.prepare(env, 6)
        for iteration in range(5):
            collect(alg, env)
            alg.update(iteration)
        assert not alg.executor.eager_only
        return weights(alg)

    eager, recorded = (run(execution, EXTENSIONS[name]) for execution in ("eager", "auto"))
    assert torch.equal(eager, recorded)
    assert not torch.equal(eager, run("eager", {}))


def linear_policy(make_policy):
    """A policy whose mean action is (2 x_0, -x_1) and whose value is the sum of the critic's observation."""
    policy = make_policy(actor_hidden_dims=[], critic_hidden_dims=[])
    with torch.no_grad():
        for layer in (policy.actor[0], policy.critic[0]):
            layer.weight.zero_()
            layer.bias.zero_()
        policy.actor[0].weight[0, 0], policy.actor[0].weight[1, 1] = 2.0, -1.0
        policy.critic[0].weight.fill_(1.0)
    return policy


def filled(alg, env, collect):
    """The whole rollout of one environment as a minibatch, in the order of time."""
    alg.prepare(env, 4)
    collect(alg, env)
    for extension in alg.extensions.values():
        extension.begin_update(0)
    return alg.rollout.take(torch.arange(4))


def test_smoothness_compares_the_actions_of_neighbours_in_an_episode(make_policy, noise_env, collect):
    cfg = {**ALL, "rate_limit": 1.0, "spatial_std": 1e-9}
    alg = PPO(linear_policy(make_policy), seed=1, smoothness_cfg=cfg)
    env = noise_env(num_envs=1, end_prob=0.0)
    batch = filled(alg, env, collect)
    obs = torch.zeros(4, batch.obs.shape[1])
    obs[:, :2] = torch.tensor([[0.0, 0.0], [2.0, 3.0], [2.0, 3.0], [0.0, 9.0]])
    alg.rollout.data["observations"][:, 0].copy_(obs)
    alg.rollout.data["privileged_observations"].zero_()
    alg.rollout.data["privileged_observations"][1, 0, 0] = 2.0
    alg.rollout.data["dones"].zero_()
    alg.rollout.data["dones"][2] = True  # so that the last change belongs to no episode
    alg.smoothness.begin_update(0)
    batch = alg.rollout.take(torch.arange(4))
    assert batch.next_step.flatten().tolist() == [1, 2, 2, 3]
    losses = alg.compute_losses(batch).losses
    # Actions are (0, 0), (4, -3), (4, -3): one change, of norm 5; beyond the limit of 1 it is (3, -2).
    assert losses["caps_temporal_loss"].item() == pytest.approx(5 / 4)
    assert losses["action_rate_loss"].item() == pytest.approx((9 + 4) / 4)
    assert losses["caps_spatial_loss"].item() == pytest.approx(0.0, abs=1e-6)
    # The same share u of the way for policy and value, whose changes are 25 u² and (2 u)² at step 0.
    share = math.sqrt(losses["l2c2_policy_loss"].item() * 4 / 25)
    assert 0 < share < 1
    second = losses["l2c2_value_loss"].item() * 4 / 4 - share**2  # step 1 comes back from 2 to 0 by a share of its own
    assert 0 < second < 1


def test_spatial_noise_has_its_standard_deviation(make_policy, noise_env, collect):
    alg = PPO(linear_policy(make_policy), seed=1, smoothness_cfg={"spatial_coef": 1.0, "spatial_std": 0.5})
    alg.prepare(noise_env(num_envs=500), 4)
    collect(alg, noise_env(num_envs=500))
    alg.smoothness.begin_update(0)
    changes = [alg.compute_losses(alg.rollout.take(torch.arange(2000))).losses["caps_spatial_loss"] for _ in range(5)]
    draws = torch.randn(200_000, 2, generator=torch.Generator().manual_seed(1)) * torch.tensor([2.0, -1.0]) * 0.5
    assert torch.stack(changes).mean().item() == pytest.approx(draws.norm(dim=1).mean().item(), rel=0.03)


def test_the_next_action_of_a_memory_is_the_one_it_takes_in_order(make_policy, noise_env, collect, policy_output):
    alg = PPO(make_policy("lstm"), seed=1, smoothness_cfg={"temporal_coef": 1.0})
    env = noise_env("lstm")
    alg.prepare(env, 6)
    collect(alg, env)
    alg.smoothness.begin_update(0)
    (batch,) = alg.mini_batches()
    mean, ended = policy_output(alg, batch).mean, alg.rollout.dones.squeeze(-1)
    assert ended.any()
    order = batch.next_step[0].squeeze(-1) % 4  # environments are shuffled
    by_hand = torch.where(ended[:-1, order], 0.0, (mean[1:] - mean[:-1]).norm(dim=-1)).sum() / mean[..., 0].numel()
    torch.testing.assert_close(alg.compute_losses(batch).losses["caps_temporal_loss"], by_hand)


def test_gradient_penalty_is_the_squared_slope_of_the_log_probability(make_policy, noise_env, collect):
    alg = PPO(linear_policy(make_policy), seed=1, gradient_penalty_coef=0.5)
    batch = filled(alg, noise_env(num_envs=1), collect)
    terms = alg.compute_losses(batch)
    # log pi = -(a - W x)² / (2 sigma²): its slope is W^T (a - W x) / sigma².
    out = alg.policy(batch.obs, batch.critic_obs)
    pull = (batch.actions - out.mean) / out.std.square()
    by_hand = ((2.0 * pull[:, 0]) ** 2 + pull[:, 1] ** 2).mean()
    torch.testing.assert_close(terms.losses["gradient_penalty"], by_hand)
    rest = {name: loss for name, loss in terms.losses.items() if name != "gradient_penalty"}
    torch.testing.assert_close(alg.weighted_sum(terms.losses), alg.weighted_sum(rest) + 0.5 * by_hand)


def test_constraints_scale_rewards_and_discounts_by_the_violation(make_policy, noise_env, collect):
    cfg = {"limits": {"heat": 1.0, "action": 100.0}, "probability": {"heat": 0.5, "action": 1.0}}
    alg = PPO(make_policy(), seed=1, constraints_cfg=cfg, gamma=0.5, lam=1.0)
    env = with_terms(noise_env(num_envs=1, end_prob=0.0))
    alg.prepare(env, 3)
    alg.rollout.data["violations"][:, 0, 0] = torch.tensor([2.0, 0.0, 1.0])
    alg.rollout.step = 3
    rewards = torch.tensor([[4.0], [-3.0], [8.0]])
    kept = alg.constraints.reward(rewards, alg.rollout)
    assert alg.constraints.largest.tolist() == [2.0, 0.0]
    assert alg.rollout.ends.flatten().tolist() == [0.5, 0.0, 0.25]  # 0.5 of 2 / 2, of 0 and of 1 / 2
    assert kept.flatten().tolist() == [2.0, 0.0, 6.0]
    values, last = torch.zeros(3, 1, 1), torch.tensor([[16.0]])
    # 6 + 0.5 * 0.75 * 16 = 12, then half of it is 6, then 2 + 0.5 * 0.5 * 6
    assert gae(kept.unsqueeze(-1), values, alg.rollout.ends, last, 0.5, 1.0).flatten().tolist() == [3.5, 6.0, 12.0]
    alg.constraints.reward(rewards, alg.rollout)
    assert alg.constraints.largest[0].item() == pytest.approx(2.0)
    alg.constraints.begin_update(0)
    assert alg.constraints.ramp.item() == 1.0


def test_the_rate_of_an_action_begins_anew_with_an_episode(make_policy, noise_env, collect):
    alg = PPO(make_policy(), seed=1, constraints_cfg={"limits": {"action_rate": 0.0, "heat": 0.0}})
    env = with_terms(noise_env())
    alg.prepare(env, 6)
    collect(alg, env)
    actions, ended = alg.rollout.actions, alg.rollout.dones.squeeze(-1)
    change = (actions[1:] - actions[:-1]).abs().amax(-1)
    found = alg.rollout.data["violations"]
    torch.testing.assert_close(found[1:, :, 0], torch.where(ended[:-1], 0.0, change))
    assert torch.equal(found[0, :, 0], torch.zeros(4))
    assert torch.equal(found[..., 1], alg.rollout.data["env_rewards"].squeeze(-1).clamp(min=0))


def test_advantages_of_groups_are_normalised_apart_and_weighted(make_policy, noise_env, collect):
    alg = PPO(make_policy(), seed=1, critic_groups_cfg=GROUPS, gamma=0.9, lam=0.8, timeout_bootstrap="none")
    env = with_terms(noise_env())
    alg.prepare(env, 6)
    collect(alg, env)
    data, total = alg.rollout.data, 0.0
    reward = data["env_rewards"]
    torch.testing.assert_close(data["group_rewards"], torch.cat([2.0 * reward, -reward], -1))
    with torch.no_grad():
        last = alg.critic_groups.values(env.get_observations()[1])
    for i, weight in enumerate((2.0, 1.0)):
        one = slice(i, i + 1)
        rows = [data[f"group_{name}"][..., one] for name in ("rewards", "values")]
        advantage = gae(*rows, data["dones"], last[:, one], 0.9, 0.8)
        torch.testing.assert_close(data["group_returns"][..., one], advantage + rows[1])
        total = total + weight * (advantage - advantage.mean()) / advantage.std()
    torch.testing.assert_close(data["advantages"], total, rtol=1e-4, atol=1e-5)


def test_a_group_learns_its_own_value(make_policy, noise_env, collect):
    cfg = {**GROUPS, "learning_rate": 1e-2}
    alg = PPO(make_policy(), seed=1, critic_groups_cfg=cfg, gamma=0.0, num_learning_epochs=20)
    env = noise_env()
    step = env.step
    env.step = lambda a: step(a)._replace(
        reward=torch.full((4,), 5.0), extras={"reward_components": {"speed": torch.full((4,), 3.0)}}
    )
    alg.prepare(env, 6)
    for iteration in range(30):
        collect(alg, env)
        alg.update(iteration)
    values = alg.critic_groups.values(torch.randn(500, 5) * 3.0 + 1.0).mean(0)
    torch.testing.assert_close(values, torch.tensor([3.0, 2.0]), rtol=0.1, atol=0.1)


def test_the_value_of_a_group_is_added_where_an_episode_was_cut_off(make_policy, noise_env, collect):
    alg = PPO(make_policy(), seed=1, critic_groups_cfg=GROUPS, gamma=0.5, lam=0.0)
    env = with_terms(noise_env(end_prob=0.5))
    alg.prepare(env, 6)
    collect(alg, env)
    data = alg.rollout.data
    cut, final = data["truncated"], data["group_final_values"]
    assert cut.any()
    wanted = data["group_rewards"] + 0.5 * final
    torch.testing.assert_close(data["group_returns"][cut.squeeze(-1)], wanted[cut.squeeze(-1)])


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("lstm", {"gradient_penalty_coef": 0.1}, "gradient_penalty_coef"),
        ("discrete", {"smoothness_cfg": ALL}, "smoothness_cfg"),
        ("mlp", {"smoothness_cfg": {"spatial_std": 0.1}}, "temporal_coef"),
        ("mlp", {"constraints_cfg": {"limits": {"heat": 1.0}, "probability": 2.0}}, "probability"),
        ("mlp", {"critic_groups_cfg": {**GROUPS, "weights": {"task": 1.0}}}, "weight"),
        ("dict", {"critic_groups_cfg": GROUPS}, "flat"),
    ],
)
def test_settings_that_cannot_work_are_refused(make_policy, noise_env, kind, settings, named):
    with pytest.raises(ValueError, match=named):
        PPO(make_policy(kind), **settings).prepare(noise_env(kind), 4)


@pytest.mark.parametrize("name", ["constraints", "critic_groups"])
def test_names_that_the_environment_does_not_give_are_named(make_policy, noise_env, collect, name):
    env, alg = noise_env(), PPO(make_policy(), constraints_cfg={"limits": {"heat": 1.0}})
    if name == "critic_groups":
        alg, missing = PPO(make_policy(), critic_groups_cfg=GROUPS), "speed"
    else:
        missing = "heat"
    alg.prepare(env, 4)
    with pytest.raises(KeyError, match=missing):
        collect(alg, env)


@pytest.mark.parametrize("name", ["constraints", "critic_groups"])
def test_a_loaded_run_continues_exactly(make_policy, noise_env, collect, name):
    def made():
        env, alg = with_terms(noise_env(end_prob=1.0)), PPO(make_policy(), seed=1, **EXTENSIONS[name])
        alg.prepare(env, 6)
        return env, alg

    env, alg = made()
    collect(alg, env)
    alg.update(0)
    other_env, other = made()
    other.load_state_dict(copy.deepcopy(alg.state_dict()))
    other.load_resume_state(alg.resume_state())
    other_env.generator.set_state(env.generator.get_state())
    other_env.current = env.current
    for each, its_env in ((alg, env), (other, other_env)):
        collect(each, its_env)
        each.update(1)
    assert torch.equal(weights(alg), weights(other))
