"""Random network distillation: what it rewards, what learns and what never does."""

import pytest
import torch

from canter.algorithms.optim import backward
from canter.algorithms.ppo import PPO
from canter.algorithms.rnd import RNDConfig, RNDModel

LINEAR = {"mode": "linear", "initial_step": 2, "final_step": 6, "final_value": 0.0}


def made(**settings):
    torch.manual_seed(0)
    dims = {"predictor_hidden_dims": (8,), "target_hidden_dims": (8,), "num_outputs": 4}
    return RNDModel(RNDConfig(**{"num_states": 3, "num_envs": 5, "weight": 2.0, **dims, **settings}))


def test_the_reward_is_the_weighted_distance_between_target_and_predictor():
    rnd, states = made(), torch.randn(5, 3)
    expected = 2.0 * (rnd.target(states) - rnd.predictor(states)).square().sum(-1).sqrt()
    reward = rnd.intrinsic_reward(states, torch.zeros(5, dtype=torch.bool))
    torch.testing.assert_close(reward, expected.detach())
    assert reward.shape == (5,)
    assert not reward.requires_grad


def trained(rnd, states):
    loss = rnd.loss(states)
    backward(loss, rnd.optimizer)
    rnd.optimizer.step(float("inf"))
    return float(loss.detach())


def test_the_predictor_learns_the_target_and_the_target_stays():
    rnd, states = made(learning_rate=0.01), torch.randn(64, 3)
    target = [p.clone() for p in rnd.target.parameters()]
    before = rnd.intrinsic_reward(states, torch.zeros(64, dtype=torch.bool)).mean()
    losses = [trained(rnd, states) for _ in range(100)]
    assert losses[-1] < 0.1 * losses[0]
    assert rnd.intrinsic_reward(states, torch.zeros(64, dtype=torch.bool)).mean() < 0.5 * before
    assert all(torch.equal(a, b) for a, b in zip(target, rnd.target.parameters(), strict=True))
    assert not any(p.requires_grad for p in rnd.target.parameters())


def test_the_loss_is_the_mean_square_over_valid_states():
    rnd, states = made(), torch.randn(3, 3)
    error = (rnd.predictor(states) - rnd.target(states)).square().mean(-1).detach()
    assert float(rnd.loss(states, torch.tensor([True, False, True])).detach()) == pytest.approx(
        float((error[0] + error[2]) / 2)
    )


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (None, [2.0] * 8),
        ({"mode": "constant"}, [2.0] * 8),
        ({"mode": "step", "final_step": 3, "final_value": 0.5}, [2.0] * 3 + [0.5] * 5),
        (LINEAR, [2.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]),
    ],
)
def test_the_weight_follows_its_schedule_over_env_steps(schedule, expected):
    rnd = made(weight_schedule=schedule)
    weights = []
    for _ in range(8):
        weights.append(float(rnd.weight()))
        rnd.intrinsic_reward(torch.randn(5, 3), torch.zeros(5, dtype=torch.bool))
    assert weights == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"mode": "cosine"}, "mode must be one of .*, got 'cosine'"),
        ({"mode": "linear", "final_step": 5}, "a linear weight_schedule needs final_value"),
        ({"mode": "step"}, "a step weight_schedule needs final_step and final_value"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_at_once(schedule, message):
    with pytest.raises(ValueError, match=message):
        made(weight_schedule=schedule)
    with pytest.raises(TypeError, match="'final_step'"):
        made(weight_schedule={"mode": "step", "finl_step": 3})


def test_state_statistics_take_only_valid_states():
    rnd, states = made(state_normalization=True), torch.randn(5, 3)
    valid = torch.tensor([True, True, False, True, False])
    rnd.intrinsic_reward(states, torch.zeros(5, dtype=torch.bool), valid)
    assert rnd.state_normalizer.count == 3
    torch.testing.assert_close(rnd.state_normalizer.mean, states[valid].mean(0))


def test_normalised_rewards_are_scaled_by_their_return():
    rnd = made(reward_normalization=True)
    plain = made()
    states, done = torch.randn(5, 3), torch.zeros(5, dtype=torch.bool)
    raw = plain.intrinsic_reward(states, done) / 2.0
    torch.testing.assert_close(rnd.intrinsic_reward(states, done), 2.0 * raw / raw.std(unbiased=False))


def test_the_scale_of_rewards_is_learned_from_valid_steps_alone():
    """Two steps of two environments; in the second step the first environment only resets."""
    rnd = made(reward_normalization=True, num_envs=2)
    first, second, running = torch.randn(2, 3), torch.randn(2, 3), torch.zeros(2, dtype=torch.bool)
    novelty = [torch.linalg.vector_norm(rnd.target(s) - rnd.predictor(s), dim=-1).detach() for s in (first, second)]
    rnd.intrinsic_reward(first, torch.tensor([True, False]), torch.tensor([True, True]))
    rnd.intrinsic_reward(second, running, torch.tensor([False, True]))
    returns = torch.stack([novelty[0][0], novelty[0][1], 0.99 * novelty[0][1] + novelty[1][1]])
    assert rnd.reward_scaler.count == 3
    torch.testing.assert_close(rnd.reward_scaler.mean, returns.mean())
    torch.testing.assert_close(rnd.reward_scaler.var, returns.var(unbiased=False))
    torch.testing.assert_close(rnd.reward_scaler.returns, torch.stack([torch.zeros(()), returns[2]]))


def test_a_state_that_is_not_finite_leaves_the_predictor_alone():
    rnd = made()
    trained(rnd, torch.randn(4, 3))
    before = [p.detach().clone() for p in rnd.predictor.parameters()]
    trained(rnd, torch.full((4, 3), float("nan")))
    assert all(torch.equal(a, b) for a, b in zip(before, rnd.predictor.parameters(), strict=True))


def test_ppo_adds_the_reward_for_the_state_reached(make_ppo):
    alg, env = make_ppo("mlp", rnd_cfg={"weight": 3.0}, timeout_bootstrap="none", end_prob=0.4)
    obs, critic_obs = env.get_observations()
    expected = []
    for _ in range(3):
        alg.act(obs, critic_obs)
        record = env.step(None)
        reached = torch.where(record.done[:, None], record.final_critic_obs, record.critic_obs)
        novelty = torch.linalg.vector_norm(alg.rnd.model.target(reached) - alg.rnd.model.predictor(reached), dim=-1)
        alg.process_step(record)
        expected.append(record.reward + 3.0 * novelty.detach())
    alg.compute_returns(record.critic_obs)
    torch.testing.assert_close(alg.rollout.rewards[:3, :, 0], torch.stack(expected))
    assert alg.rnd.model.cfg.num_states == 5  # the critic's observation


def test_ppo_bootstraps_after_adding_the_reward(make_ppo):
    alg, env = make_ppo("mlp", rnd_cfg={"weight": 3.0}, gamma=0.5)
    alg.act(*env.get_observations())
    ended = torch.ones(4, dtype=torch.bool)
    record = env.step(None)._replace(truncated=ended, terminated=~ended)
    final = record.final_critic_obs
    novelty = torch.linalg.vector_norm(alg.rnd.model.target(final) - alg.rnd.model.predictor(final), dim=-1)
    alg.process_step(record)
    alg.compute_returns(record.critic_obs)
    expected = record.reward + 3.0 * novelty + 0.5 * alg.policy.value(final)[0].squeeze(-1)
    torch.testing.assert_close(alg.rollout.rewards[0, :, 0], expected.detach())


def test_an_update_trains_the_predictor_and_reports(make_ppo, collect):
    alg, env = make_ppo("mlp", num_learning_epochs=2, num_mini_batches=2, rnd_cfg={"weight": 0.5})
    before = [p.detach().clone() for p in alg.rnd.model.predictor.parameters()]
    collect(alg, env)
    losses, stats = alg.update(0)
    assert not any(torch.equal(a, b) for a, b in zip(before, alg.rnd.model.predictor.parameters(), strict=True))
    assert stats["rnd/weight"] == 0.5
    assert stats["rnd/mean_intrinsic_reward"] > 0
    assert losses["rnd_loss"] > 0
    rewards = []
    step = env.step
    env.step = lambda actions: rewards.append(step(actions)) or rewards[-1]
    collect(alg, env)
    _, stats = alg.update(1)
    assert alg.rnd.model.steps == 12
    mean = torch.stack([record.reward for record in rewards]).mean()
    assert stats["rnd/mean_extrinsic_reward"] == pytest.approx(float(mean), rel=1e-5)  # of this rollout alone


def test_its_state_is_saved_and_restored(make_ppo, collect, snapshot, differing):
    cfg = {"weight": 0.5, "state_normalization": True, "reward_normalization": True}
    alg, env = make_ppo("mlp", rnd_cfg=cfg)
    collect(alg, env)
    alg.update(0)
    state = alg.state_dict()
    assert {"rnd_state_dict", "rnd_optimizer_state_dict"} <= set(state)
    other, _ = make_ppo("mlp", rnd_cfg=cfg, seed=8)
    assert differing(snapshot(alg), snapshot(other))
    other.load_state_dict(state)
    assert differing(snapshot(alg), snapshot(other)) == []
    assert other.rnd.model.steps == 6


def test_a_setting_that_does_not_exist_is_refused(make_ppo):
    with pytest.raises(TypeError, match="'weight'"):
        make_ppo("mlp", rnd_cfg={"wieght": 1.0})


def test_observations_that_are_no_vector_are_refused(make_ppo):
    with pytest.raises(ValueError, match="one flat vector"):
        make_ppo("dict", rnd_cfg={"weight": 1.0})


def test_without_the_state_reached_there_is_nothing_to_reward(make_ppo):
    alg, env = make_ppo("mlp", rnd_cfg={"weight": 1.0})
    alg.act(*env.get_observations())
    with pytest.raises(ValueError, match="next_obs"):
        alg.process_env_step(torch.zeros(4), torch.zeros(4), {})


def test_its_weights_come_from_the_algorithms_seed_alone(make_policy, noise_env):
    def weights(seed, global_seed):
        alg = PPO(make_policy("mlp"), seed=seed, rnd_cfg={"weight": 1.0})
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        alg.prepare(noise_env("mlp"), 6)
        assert torch.equal(torch.get_rng_state(), before)
        return torch.cat([p.detach().flatten() for p in alg.rnd.model.parameters()])

    assert torch.equal(weights(3, 1), weights(3, 2))
    assert not torch.equal(weights(3, 1), weights(4, 1))
