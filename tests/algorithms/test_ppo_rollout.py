"""Collecting: what a transition holds, what a cut-off episode is worth, when statistics move."""

import warnings

import pytest
import torch
from torch import nn

from canter.algorithms.ppo import PPO
from canter.envs import records
from canter.envs.vec_env import StepRecord
from canter.modules.actor_critic import ActorCritic
from canter.modules.normalizer import EmpiricalNormalization


@pytest.fixture(autouse=True)
def forget_other_environments(monkeypatch):
    """What the records module has noted of environments so far belongs to the process."""
    monkeypatch.setattr(records, "_disagreements", {})


class FirstColumn(nn.Module):
    """A critic whose value is the first column of its observation."""

    def forward(self, x):
        return x[..., :1]


def value_reader(num_envs=1, **settings):
    """A PPO whose critic says obs[0], ready for one-dimensional observations."""
    policy = ActorCritic(1, 1, 1, actor_hidden_dims=(), critic_hidden_dims=())
    policy.critic = FirstColumn()
    alg = PPO(policy, gamma=0.9, **settings)
    alg.init_obs_norm(1, 1)
    alg.init_storage(num_envs, 3, [1], [1], [1])
    return alg


def stored_reward(alg, infos, obs=2.0, reward=1.0, done=True):
    alg.act(torch.full((1, 1), obs), torch.full((1, 1), obs))
    reset_obs = torch.full((1, 1), 1000.0)  # the first of the next episode: its value must appear nowhere
    alg.process_env_step(torch.tensor([reward]), torch.tensor([done]), infos, reset_obs, reset_obs)
    alg.compute_returns(torch.zeros(1, 1))
    alg.rollout.clear()
    return float(alg.rollout.rewards[0])


FLAG = torch.tensor([True])


def test_without_a_final_observation_the_state_before_the_step_stands_for_it_and_a_warning_says_so():
    alg = value_reader()
    for _ in range(3):
        assert stored_reward(alg, {"time_outs": FLAG}) == pytest.approx(1.0 + 0.9 * 2.0)
    alg.rollout.step = 1  # the rows are still there
    with pytest.warns(UserWarning, match=r"no final observation.*extras\['final_obs'\]"):
        alg.update(0)
    stored_reward(alg, {"time_outs": FLAG})
    alg.rollout.step = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        alg.update(1)


def test_a_step_that_ends_nothing_keeps_its_reward():
    infos = {"truncated": ~FLAG, "final_observation": torch.full((1, 1), float("nan"))}
    assert stored_reward(value_reader(), infos, done=False) == 1.0


def test_the_critics_final_observation_is_the_critics():
    alg = value_reader()
    final = {"obs": torch.full((1, 1), 5.0), "critic_obs": torch.full((1, 1), 7.0)}
    alg.act(torch.ones(1, 1), torch.ones(1, 1))
    record = StepRecord(
        torch.ones(1, 1), torch.ones(1, 1), torch.ones(1), ~FLAG, FLAG, final["obs"], final["critic_obs"], FLAG, {}
    )
    alg.process_step(record)
    alg.compute_returns(torch.ones(1, 1))
    assert float(alg.rollout.rewards[0]) == pytest.approx(1.0 + 0.9 * 7.0)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_the_state_stored_is_the_one_before_acting(make_ppo, kind):
    alg, env = make_ppo(kind, end_prob=0.0)
    obs, critic_obs = env.get_observations()
    before = []
    for _ in range(3):
        before.append({name: state.clone() for name, state in alg.policy.hidden(4).items()})
        alg.act(obs, critic_obs)
        alg.process_step(env.step(None))
    for step, state in enumerate(before):
        for name in ("memory_a", "memory_c"):
            assert torch.equal(alg.rollout.data[f"hidden.{name}"][step], state[name])
    assert (before[0]["memory_a"] == 0).all()
    assert (before[1]["memory_a"] != 0).any()


def test_a_final_state_is_valued_with_the_memory_of_its_own_episode(make_ppo):
    alg, env = make_ppo("lstm")
    obs, critic_obs = env.get_observations()
    alg.act(obs, critic_obs)
    hidden = {name: state.clone() for name, state in alg.policy.hidden(4).items()}
    final = torch.randn(4, 5)
    truncated = torch.tensor([True, False, True, False])
    record = env.step(None)._replace(
        reward=torch.zeros(4), terminated=~truncated & False, truncated=truncated, final_critic_obs=final
    )
    alg.process_step(record)
    alg.compute_returns(critic_obs)
    expected = alg.gamma * alg.policy.value(final, hidden)[0].squeeze(-1) * truncated
    torch.testing.assert_close(alg.rollout.rewards[0, :, 0], expected.detach())
    fresh = alg.gamma * alg.policy.value(final)[0].squeeze(-1) * truncated
    assert not torch.allclose(expected, fresh)


def test_without_a_storage_the_error_says_what_to_call():
    with pytest.raises(RuntimeError, match=r"PPO has no storage yet; call init_storage\(...\)"):
        PPO(ActorCritic(3, 2)).compute_returns(torch.ones(4, 3))


def first_inputs(layer):
    seen = []
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    return seen


def test_the_first_observation_is_normalised_too(make_ppo, collect):
    alg, env = make_ppo("mlp", empirical_normalization=True)
    collect(alg, env)
    alg.update(0)
    resumed, env = make_ppo("mlp", empirical_normalization=True)
    resumed.load_state_dict(alg.state_dict(), load_optimizer=False)
    actor, critic = first_inputs(resumed.policy.actor[0]), first_inputs(resumed.policy.critic[0])
    obs, critic_obs = env.get_observations()
    resumed.act(obs, critic_obs)
    norm = alg.obs_normalizer
    torch.testing.assert_close(actor[0], (obs - norm.mean) / (norm.std + norm.eps))
    torch.testing.assert_close(critic[0], alg.critic_obs_normalizer.normalize(critic_obs))
    assert not torch.allclose(actor[0], obs)
    assert torch.equal(resumed.transition.observations, obs)  # raw


@pytest.mark.parametrize("kind", ["mlp", "lstm", "dict"])
def test_statistics_move_once_per_iteration_by_the_rollouts_observations(make_ppo, collect, kind):
    alg, env = make_ppo(kind, num_learning_epochs=3, num_mini_batches=2, empirical_normalization=True)
    norms = [m for m in alg.policy.modules() if isinstance(m, EmpiricalNormalization)]
    collect(alg, env)
    assert all(norm.count == 0 for norm in norms)  # collecting moves nothing, final observations neither
    alg.update(0)
    assert all(norm.count == 24 for norm in norms)
    stored = alg.rollout.observations["base"]["vel"] if kind == "dict" else alg.rollout.observations
    rows = stored.flatten(0, 1).double()
    torch.testing.assert_close(norms[0].mean.double(), rows.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norms[0].std.double(), rows.std(0, unbiased=False), rtol=1e-5, atol=1e-5)


def test_statistics_stand_still_in_eval_mode(make_ppo, collect):
    alg, env = make_ppo("mlp", empirical_normalization=True, normalize_rewards=True)
    alg.eval_mode()
    collect(alg, env)
    alg.update(0)
    assert alg.obs_normalizer.count == alg.return_scaler.count == 0
    alg.train_mode()
    collect(alg, env)
    alg.update(1)
    assert alg.obs_normalizer.count == alg.return_scaler.count == 24


def test_scaled_rewards_are_divided_by_the_deviation_of_the_return(make_ppo):
    alg, env = make_ppo("mlp", normalize_rewards=True, gamma=0.5, timeout_bootstrap="none")
    env.end_prob = 0.0
    raw = []
    for _ in range(6):
        alg.act(*env.get_observations())
        record = env.step(None)
        raw.append(record.reward.double())
        alg.process_step(record)
    alg.compute_returns(env.get_observations()[1])
    returns, total = [], torch.zeros(4, dtype=torch.float64)
    for reward in raw:
        total = 0.5 * total + reward
        returns.append(total)
    expected = raw[-1] / torch.stack(returns).std(unbiased=False)
    torch.testing.assert_close(alg.rollout.rewards[5, :, 0].double(), expected, rtol=1e-4, atol=1e-5)


def test_the_seed_makes_exploration_and_batches_repeatable(make_ppo, collect, snapshot, differing):
    def run(seed):
        torch.manual_seed(seed + 100)  # the global generator must not matter
        alg, env = make_ppo("mlp", num_mini_batches=3, seed=seed, rnd_cfg={"weight": 0.1})
        torch.manual_seed(seed + 200)
        collect(alg, env)
        alg.update(0)
        return snapshot(alg)

    assert differing(run(3), run(3)) == []
    assert differing(run(3), run(4)) != []


def test_every_random_stream_is_another_one(make_ppo):
    seeds = [generator.initial_seed() for generator in make_ppo()[0].generators.values()]
    assert len(set(seeds)) == len(seeds) == 2


def test_memories_and_generators_resume_exactly(make_ppo, collect):
    alg, env = make_ppo("lstm")
    collect(alg, env, steps=3)
    state = alg.resume_state()
    obs, critic_obs = env.get_observations()
    expected = alg.act(obs, critic_obs)
    other, _ = make_ppo("lstm", seed=99)
    other.load_state_dict(alg.state_dict())
    other.load_resume_state(state)
    assert torch.equal(other.act(obs, critic_obs), expected)


def test_steps_that_only_reset_do_not_count_in_the_scale_of_rewards(make_ppo, collect):
    alg, env = make_ppo("mlp", num_steps=8, end_prob=0.4, has_invalid_steps=True, normalize_rewards=True)
    collect(alg, env)
    assert not alg.rollout.valid.all()
    assert alg.return_scaler.count == alg.rollout.valid.sum()


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_an_episode_after_a_step_that_only_reset_begins_without_a_past(make_ppo, kind):
    """The reset step shows the memory the final observation again, which belongs to no episode."""
    alg, env = make_ppo(kind, has_invalid_steps=True)
    valid = torch.tensor([True, False, True, True])
    alg.act(*env.get_observations())
    record = env.step(None)
    alg.process_step(record._replace(terminated=~valid & False, truncated=~valid & False, valid=valid))
    for state in alg.policy.hidden(4).values():
        assert [bool((row == 0).all()) for row in state] == [False, True, False, False]
    assert alg.rollout.dones[0, :, 0].tolist() == [False, True, False, False]


@pytest.mark.parametrize("kind", ["mlp", "lstm", "discrete", "dict"])
def test_a_whole_rollout_at_once_is_the_steps_one_by_one(make_ppo, collect, snapshot, differing, kind):
    settings = {"num_mini_batches": 2, "empirical_normalization": True, "normalize_rewards": True}
    if kind != "dict":
        settings["rnd_cfg"] = {"weight": 0.5}
    stepped, env = make_ppo(kind, has_invalid_steps=True, **settings)
    whole, other_env = make_ppo(kind, has_invalid_steps=True, **settings)
    obs, critic_obs = other_env.get_observations()
    for iteration in range(2):
        collect(stepped, env)
        obs, critic_obs = whole.collect_whole(other_env, obs, critic_obs)
        for name, data in stepped.rollout.data.items():
            assert torch.equal(whole.rollout.data[name], data), name
        stepped.update(iteration)
        whole.update(iteration)
        assert differing(snapshot(stepped), snapshot(whole)) == []
    for name, state in stepped.policy.hidden(4).items():
        assert torch.equal(whole.policy.hidden(4)[name], state)
    assert (critic_obs is obs) == (kind == "dict")


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_policy_keeps_the_statistics_it_brings(make_ppo, collect, goes_on):
    alg, env = make_ppo("mlp", empirical_normalization=True)
    collect(alg, env)
    alg.update(0)
    mean = alg.obs_normalizer.mean
    tuned, env = make_ppo("mlp", policy=alg.policy, empirical_normalization=goes_on)
    assert tuned.obs_normalizer.count == 24
    assert torch.equal(tuned.obs_normalizer.mean, mean)
    collect(tuned, env)
    tuned.update(0)
    assert tuned.obs_normalizer.count == (48 if goes_on else 24)  # with normalisation off they stand still


def test_a_critics_statistics_are_kept_where_the_actor_has_none(make_ppo):
    alg, env = make_ppo("mlp")
    alg.policy.critic_obs_normalizer = EmpiricalNormalization([5])  # as beside an actor that sees an image
    alg.policy.critic_obs_normalizer.update(torch.randn(9, 5))
    alg.prepare(env, 6)
    assert alg.critic_obs_normalizer.count == 9


def test_a_loop_without_inference_mode_may_follow_one_with_it():
    infos = {"truncated": FLAG, "final_observation": torch.full((1, 1), 5.0)}
    with torch.inference_mode():
        stored_reward(value_reader(), infos)
    assert stored_reward(value_reader(), infos) == pytest.approx(5.5)
