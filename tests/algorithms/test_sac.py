"""SAC and TD3: each loss changes only its own parameters, targets by hand, the temperature's fixed point, bandits."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from no_host_sync import NoHostSync
from torch import nn

from canter.algorithms import SAC, TD3, SACConfig, TD3Config
from canter.algorithms.actor_q import joint_limit_bounds
from canter.algorithms.off_policy import frozen
from canter.envs.torch_envs import CartPole, Pendulum, PointRobot
from canter.envs.torch_envs.base import TorchEnv
from canter.modules.actors import ContinuousActor
from canter.modules.q_networks import HeldNoise, ListedCritics, find_normalized_layers, normalize_weights
from canter.presets import profile_settings
from canter.storage.offline import Episode

SMALL = {"actor_hidden_dims": (8,), "critic_hidden_dims": (8,), "batch_size": 16, "learning_starts": 16}
SMALL |= {"buffer_size": 400, "device": "cpu", "seed": 1}
CLASSES = {"sac": (SAC, SACConfig), "td3": (TD3, TD3Config)}


def make(kind="sac", env=None, extra=None, **given):
    torch.manual_seed(0)
    cls, config = CLASSES[kind]
    return cls(env or PointRobot(4, seed=0), config(**{**SMALL, **given}), **(extra or {}))


def run(alg, steps, learn=False):
    obs, critic = alg.env.get_observations()
    for _ in range(steps):
        record = alg.env.step(alg.explore(obs, critic))
        alg.process_step(record)
        if learn and alg.can_learn:
            alg.train(1)
        obs, critic = record.obs, record.critic_obs
    return alg


def parts(alg):
    named = {"actor": alg.actor, "critics": alg.critics, "target": alg.target.module}
    if isinstance(alg, SAC):
        named["temperature"] = alg.temperature
    else:
        named["target_actor"] = alg.target_actor.module
    return {name: [p.detach().clone() for p in module.parameters()] for name, module in named.items()}


def actor_loss(alg, batch):
    return alg.actor_loss(batch, torch.randn(16, 2))[0] if isinstance(alg, SAC) else alg.actor_loss(batch)


def changed(before, after):
    return {n for n in before if any(not torch.equal(a, b) for a, b in zip(before[n], after[n], strict=True))}


@pytest.mark.parametrize("kind", ["sac", "td3"])
@pytest.mark.parametrize("num_atoms", [1, 11])
def test_each_loss_changes_only_its_own_parameters(kind, num_atoms):
    alg = run(make(kind, num_atoms=num_atoms), 10)
    drawn, noise = next(alg.batches(1)), torch.randn(16, 2)
    before = parts(alg)
    alg.optimizer_step("critic_optimizer", alg.critic_loss(drawn, noise)[0])
    assert changed(before, parts(alg)) == {"critics"}
    before = parts(alg)
    with frozen(alg.critics):
        loss = actor_loss(alg, drawn)
    alg.optimizer_step("actor_optimizer", loss)
    assert changed(before, parts(alg)) == {"actor"}
    before = parts(alg)
    if kind == "sac":
        alg.optimizer_step("alpha_optimizer", alg.alpha_loss(torch.tensor(0.3)))
        assert changed(before, parts(alg)) == {"temperature"}
        before = parts(alg)
    alg.update_targets()
    assert changed(before, parts(alg)) == ({"target"} if kind == "sac" else {"target", "target_actor"})


def test_the_actor_loss_computes_no_gradient_of_the_critics():
    alg = run(make(), 10)
    with frozen(alg.critics):
        loss, _ = alg.actor_loss(next(alg.batches(1)), torch.randn(16, 2))
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in alg.critics.parameters())
    assert any(p.grad is not None and p.grad.any() for p in alg.actor.parameters())
    assert all(p.requires_grad for p in alg.critics.parameters())


@pytest.mark.parametrize(
    ("kind", "reduction", "value"),
    [("sac", "min", 10 / 16), ("sac", "mean", 5.0), ("td3", "min", 7.5), ("td3", "mean", 5.0)],
)
def test_the_actor_maximises_the_smaller_the_first_or_the_mean_value(kind, reduction, value):
    alg = run(make(kind, critic_reduction=reduction), 10)
    first = torch.arange(16.0)
    alg.critics.forward = lambda obs, actions: torch.stack([first, 10 - first])
    batch, noise = next(alg.batches(1)), torch.randn(16, 2)
    loss = alg.actor_loss(batch, noise)[0] if kind == "sac" else alg.actor_loss(batch)
    entropy_part = 0.2 * alg.sample(batch.obs, noise)[1].mean().item() if kind == "sac" else 0.0
    assert loss.item() == pytest.approx(entropy_part - value, rel=1e-4)


@pytest.mark.parametrize("reduction", ["min", "mean"])
def test_the_critics_learn_the_soft_target(reduction):
    alg = run(make(critic_reduction=reduction), 10)
    drawn, noise = next(alg.batches(1))._replace(dones=torch.tensor([1.0, 0.0] * 8)), torch.randn(16, 2)
    with torch.no_grad():
        for p in alg.critics.parameters():  # away from their targets
            p.add_(0.1)
    _, stats = alg.critic_loss(drawn, noise)
    actions, log_prob = alg.sample(drawn.next_obs, noise)
    out = alg.target.module(drawn.next_critic_obs, actions)
    value = out.amin(0) if reduction == "min" else out
    soft = value - 0.2 * log_prob
    want = drawn.rewards + 0.99 * (1 - drawn.dones) * soft
    predicted = alg.critics(drawn.critic_obs, drawn.actions)
    assert stats["critic1_loss"].item() == pytest.approx(
        (predicted[0] - (want if want.dim() == 1 else want[0])).square().mean().item(), rel=1e-4
    )
    assert stats["td_target_mean"].item() == pytest.approx(want.mean().item(), rel=1e-4)


def test_the_temperature_falls_above_the_target_entropy_and_rises_below():
    alg = make()
    target = alg.default_target_entropy
    for log_prob, sign in ((-(target + 1.0), -1), (-(target - 1.0), 1)):
        before = alg.temperature.log_alpha.item()
        alg.optimizer_step("alpha_optimizer", alg.alpha_loss(torch.tensor(log_prob)))
        assert math.copysign(1, alg.temperature.log_alpha.item() - before) == sign


class Wide(PointRobot):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.action_space = spaces.Box(-4.0, 4.0, (2,))


def test_the_default_target_entropy_is_in_units_of_half_the_range():
    assert make().default_target_entropy == pytest.approx(-2.0)
    assert make(env=Wide(2)).default_target_entropy == pytest.approx(-2.0 + 2 * math.log(4.0))
    log_alpha = math.log(0.2)
    assert make().alpha_loss(torch.tensor(0.0)).item() == pytest.approx(-log_alpha * -2.0)
    assert make(target_entropy=-0.5).alpha_loss(torch.tensor(0.0)).item() == pytest.approx(-log_alpha * -0.5)


def test_the_target_entropy_can_be_that_of_a_noise():
    """Of two actions, each with half a range of 1 or 4: log(0.15) + log(2 pi e) / 2 = -0.4781815, plus log(4)."""
    log_alpha = math.log(0.2)
    assert make(target_std=0.15).alpha_loss(torch.tensor(0.0)).item() == pytest.approx(-log_alpha * 2 * -0.4781815)
    wide = make(env=Wide(2), target_std=0.15).alpha_loss(torch.tensor(0.0)).item()
    assert wide == pytest.approx(-log_alpha * 2 * (-0.4781815 + math.log(4.0)))
    alg = make()
    alg.target_std = 0.15
    assert alg.alpha_loss(torch.tensor(0.0)).item() == pytest.approx(-log_alpha * 2 * -0.4781815)


def test_learning_rates_fall_to_the_share_that_is_set():
    alg = make(schedule="linear", final_rate_share=0.2, actor_learning_rate=1e-3)
    alg.adjust_learning_rate(0.75)
    assert alg.optimizers["actor_optimizer"].lr.item() == pytest.approx(1e-3 * (0.2 + 0.25 * 0.8))
    alg.adjust_learning_rate(1.0)
    assert alg.optimizers["actor_optimizer"].lr.item() == pytest.approx(2e-4)
    alg.actor_learning_rate = 1e-2
    assert alg.optimizers["actor_optimizer"].lr.item() == pytest.approx(2e-3)


def test_noise_is_held_for_one_step_four_times_as_often_as_for_two():
    noise, generator = HeldNoise(4000, 2, 2, torch.device("cpu")), torch.Generator().manual_seed(0)
    first = noise.draw(generator)
    assert (noise.left == 0).float().mean() == pytest.approx(0.8, abs=0.02)
    held = noise.left == 1
    second = noise.draw(generator)
    assert torch.equal((first == second).all(1), held)
    assert (noise.left[held] == 0).all()
    assert second.std() == pytest.approx(1.0, abs=0.03)
    assert not (noise.draw(generator) == first).all(1).any()


@pytest.mark.parametrize("execution", ["eager", "auto"])
def test_held_noise_is_used_for_exploration_alone_and_resumed(execution):
    alg, other = (make(execution=execution, noise_repeats=50, learning_starts=0) for _ in range(2))
    obs, critic = torch.zeros(4, 6), torch.zeros(4, 9)
    steps = torch.stack([alg.explore(obs, critic) for _ in range(40)])
    repeated = (steps[1:] == steps[:-1]).all(-1).float().mean()
    assert 0.2 < repeated < 0.95
    left = alg.held_noise.left.clone()
    assert not torch.equal(alg.act(obs), alg.act(obs))
    assert alg.act(torch.zeros(7, 6)).shape == (7, 2)
    assert torch.equal(alg.held_noise.left, left)
    other.load_resume_state(alg.resume_state())
    assert all(torch.equal(alg.explore(obs, critic), other.explore(obs, critic)) for _ in range(20))


def test_a_reset_starts_networks_anew_and_keeps_the_replay():
    made = [run(make(execution=execution, reset_interval=6, gamma=0.9), 8) for execution in ("eager", "auto")]
    for alg in made:
        before = parts(alg)
        alg.train(5)
        assert any(value.any() for value in moments(alg))
        trained, stored = parts(alg), len(alg.replay)
        alg.train(1)
        assert changed(before, parts(alg)) == {"actor", "critics", "target"}
        assert changed(trained, parts(alg)) == {"actor", "critics", "target", "temperature"}
        assert alg.temperature.log_alpha.item() == pytest.approx(math.log(0.2))
        assert torch.equal(alg.critics.mlp[0].bias, torch.zeros_like(alg.critics.mlp[0].bias))
        for own, target in zip(alg.critics.parameters(), alg.target.module.parameters(), strict=True):
            assert torch.equal(own, target)
        assert not any(value.any() for value in moments(alg))
        assert len(alg.replay) == stored
        alg.train(3)
    for name, values in parts(made[0]).items():
        assert all(torch.equal(a, b) for a, b in zip(values, parts(made[1])[name], strict=True)), name


def moments(alg):
    return [v for o in alg.optimizers.values() for state in o.optimizer.state.values() for v in state.values()]


def test_exploration_noise_is_in_units_of_half_the_range_and_stays_in_bounds():
    torch.testing.assert_close(make("td3", Wide(4)).exploration_std(), torch.tensor([0.4, 0.4]))
    actions = make("td3", Wide(4), exploration_noise=1e6).act(torch.zeros(4, 6))
    assert (actions.abs() == 4.0).all()


def test_the_target_actor_proposes_the_next_actions():
    alg = run(make("td3"), 10)
    with torch.no_grad():
        for p in alg.actor.parameters():  # away from the target
            p.add_(0.5)
    drawn = next(alg.batches(1))
    actions = alg.next_actions(drawn, torch.zeros(16, 2))
    params = alg.target_actor.module.get_params(drawn.next_obs)
    assert torch.equal(actions, alg.policy.distribution.to_env(params["mu"]))


def test_the_actor_learns_every_policy_delay_steps():
    alg = run(make(policy_delay=3), 10)
    alg.train(2)
    assert alg.slow_meter.total is None
    alg.train(1)
    assert float(alg.slow_meter.total[-1]) == 1
    alg.train(16)
    assert float(alg.slow_meter.total[-1]) == (3 + 16) // 3
    assert float(alg.meter.total[-1]) == alg.num_updates == 19


# ---------------------------------------------------------------------- bandits
class Bandit(TorchEnv):
    """One step, one state, reward -(a - 0.3)^2."""

    def __init__(self, num_envs, seed=0):
        self.obs_space = self.critic_obs_space = spaces.Box(-1, 1, (1,))
        self.action_space = spaces.Box(-1, 1, (1,))
        super().__init__(num_envs, "cpu", seed, 10)

    def initial_state(self, n):
        return {"place": torch.zeros(n, 1)}

    def dynamics(self, state, action):
        return state, -(action[:, 0] - 0.3).square(), torch.ones(len(action), dtype=torch.bool)

    def observe(self, state):
        return state["place"].clone()


BANDIT = {"actor_learning_rate": 3e-3, "critic_learning_rate": 1e-2, "batch_size": 64, "learning_starts": 64}
BANDIT |= {"actor_hidden_dims": (16,), "critic_hidden_dims": (32,), "buffer_size": 4000}


@pytest.mark.parametrize(
    ("kind", "more"), [("sac", {}), ("td3", {}), ("sac", {"num_atoms": 21, "v_min": -2.0, "v_max": 0.5})]
)
def test_the_mean_action_approaches_the_best_action_of_a_bandit(kind, more):
    given = BANDIT | ({"auto_alpha": False, "init_alpha": 0.01} if kind == "sac" else {}) | more
    alg = run(make(kind, Bandit(8), **given), 500, learn=True)
    action = alg.act(torch.zeros(1, 1), deterministic=True).item()
    assert action == pytest.approx(0.3, abs=0.12)


def test_the_temperature_settles_where_the_entropy_is_at_its_target():
    # With reward -(a - c)^2 the soft-optimal policy is nearly normal, of variance alpha / 2.
    given = {**BANDIT, "actor_learning_rate": 1e-2, "alpha_learning_rate": 1e-2, "target_entropy": -0.5}
    alg = make("sac", Bandit(8), **given)
    run(alg, 600, learn=True)
    alg.report()
    run(alg, 200, learn=True)
    found = alg.report()
    assert found["train/entropy"] == pytest.approx(-0.5, abs=0.1)
    sigma = math.exp(-0.5 - 0.5 * math.log(2 * math.pi * math.e))
    assert found["train/alpha"] == pytest.approx(2 * sigma**2, rel=0.3)


# ---------------------------------------------------------------------- the rest
def test_critics_see_the_privileged_observation_and_the_actor_does_not():
    alg = run(make(), 10)
    drawn = next(alg.batches(1))
    assert drawn.obs.shape == (16, 6)
    assert drawn.critic_obs.shape == drawn.next_critic_obs.shape == (16, 9)
    assert torch.equal(drawn.critic_obs[:, :6], drawn.obs)


def test_statistics_are_updated_once_per_step_and_never_from_replay():
    alg = run(make(empirical_normalization=True), 10)
    assert int(alg.policy.obs_normalizer.count) == int(alg.policy.critic_obs_normalizer.count) == 40
    before = alg.policy.obs_normalizer.mean
    alg.train(3)
    assert torch.equal(before, alg.policy.obs_normalizer.mean)
    raw = alg.replay.draw(200, 1, 0.9, None).obs
    assert torch.allclose(alg.policy.obs_normalizer.normalize(raw).std(0), torch.ones(6), atol=0.6)


@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_exploration_and_random_actions_fill_the_bounds(kind):
    alg = make(kind, PointRobot(500), action_low=(-0.5, 1.0), action_high=(0.5, 3.0), learning_starts=0)
    random = alg.random_actions()
    for actions in (random, alg.explore(*alg.env.get_observations())):
        assert (actions >= torch.tensor([-0.5, 1.0])).all()
        assert (actions <= torch.tensor([0.5, 3.0])).all()
    assert random.amin(0).tolist() == pytest.approx([-0.5, 1.0], abs=0.05)
    assert random.amax(0).tolist() == pytest.approx([0.5, 3.0], abs=0.05)


def test_the_noise_on_td3s_target_actions_is_clipped():
    """An actor of zeros; a standard deviation of 0.2 and a bound of 0.5, in units of half the range, which is 3."""
    alg = run(make("td3", action_low=(-3.0, -3.0), action_high=(3.0, 3.0), target_noise_clip=0.5), 10)
    for parameter in alg.target_actor.module.parameters():
        torch.nn.init.zeros_(parameter)
    noise = torch.tensor([[10.0, -10.0], [1.0, -2.4]]).repeat(8, 1)
    actions = alg.next_actions(next(alg.batches(1)), noise)
    torch.testing.assert_close(actions[:2], torch.tensor([[1.5, -1.5], [0.6, -1.44]]))


def test_joint_limits_become_action_bounds():
    low, high = joint_limit_bounds([-1.0, -2.0], [1.0, 0.0], default=[0.5, -1.0], action_scale=[0.5, -0.25])
    assert low == (-3.0, -4.0)
    assert high == (1.0, 4.0)


class Own(ContinuousActor):
    """A user's own actor."""

    def __init__(self, obs_space, action_space, cfg=None):
        super().__init__(obs_space, action_space, cfg)
        self.net = torch.nn.Linear(obs_space.shape[0], 2)

    def get_action_dist(self, obs):
        mean = self.net(obs)
        return torch.distributions.Normal(mean, torch.full_like(mean, 0.3))


def test_a_user_defined_actor_is_squashed_and_trained():
    alg = run(make(extra={"actor_class": Own}), 10)
    before = alg.actor.net.weight.clone()
    alg.train(1)
    assert not torch.equal(before, alg.actor.net.weight)
    assert alg.act(100 * torch.ones(3, 6)).abs().max() <= 1.0


@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_bad_actions_are_refused(kind):
    name = kind.upper()
    with pytest.raises(ValueError, match=f"{name} needs a Box of actions, got Discrete"):
        make(kind, CartPole(2))

    class Endless(PointRobot):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.action_space = spaces.Box(-np.inf, np.inf, (2,))

    with pytest.raises(ValueError, match=r"these are infinite.*set action_low"):
        make(kind, Endless(2))
    assert make(kind, Endless(2), action_low=-1.0, action_high=2.0).action_space.high.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_exploring_and_learning_never_wait_for_the_device(kind):
    alg = run(make(kind, empirical_normalization=True, n_step=2, num_atoms=5, execution="eager"), 10)
    alg.train(4)
    obs, critic = alg.env.get_observations()
    with NoHostSync():
        for _ in range(2):
            record = alg.env.step(alg.explore(obs, critic))
            alg.process_step(record)
            alg.train(4)
            obs, critic = record.obs, record.critic_obs


@pytest.mark.parametrize(("num_atoms", "bound"), [(1, 4.0), (11, 5.0)])
def test_normalised_rewards_do_not_depend_on_their_unit(num_atoms, bound):
    """Rewards are stored as they are and scaled when they are sampled."""
    runs = {}
    for unit in (1.0, 1000.0):
        env = PointRobot(4, seed=0)
        given = {"num_atoms": num_atoms, "v_min": -5.0, "v_max": 50.0, "gamma": 0.9, "normalize_rewards": True}
        alg = make(env=env, **given)
        step = env.step
        env.step = lambda actions, step=step, unit=unit: (lambda r: r._replace(reward=r.reward * unit))(step(actions))
        run(alg, 30)
        raw = alg.replay.draw(64, 1, 0.9, torch.Generator().manual_seed(3))
        alg.generators["replay"].manual_seed(3)
        alg.batch_size = 64
        (batch,) = alg.batches(1)
        reach = alg.return_scaler.reach()
        torch.testing.assert_close(batch.rewards, raw.rewards * bound / reach)
        assert raw.rewards.abs().max() > 0.1 * unit
        runs[unit] = batch.rewards
        assert "return_scaler_state_dict" in alg.state_dict()
        again = make(**given)
        again.load_state_dict(alg.state_dict())
        assert torch.equal(again.return_scaler.reach(), reach)
    torch.testing.assert_close(runs[1.0], runs[1000.0])
    assert make().return_scaler is None


def test_offline_steps_set_the_scale_of_rewards():
    alg = make(env=Pendulum(4, seed=0), normalize_rewards=True, gamma=0.9)
    alg.fill([Episode(np.zeros((41, 3)), np.zeros((40, 1)), np.full(40, 7.0), terminated=False)])
    torch.testing.assert_close(alg.return_scaler.reach().item(), 70.0, rtol=1e-4, atol=0.01)


@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_the_massive_profile_runs_and_learns(kind):
    settings = profile_settings(kind, "massive") | {"batch_size": 64, "buffer_steps_per_env": 16}
    cls, config = CLASSES[kind]
    alg = cls(PointRobot(16, seed=0), config(**settings, device="cpu", seed=1))
    run(alg, 6, learn=True)
    metrics = alg.update()
    assert all(math.isfinite(value) for value in metrics.values())
    assert alg.replay.num_rows == 17
    with pytest.raises(ValueError, match="has no profile 'giant'; there are classic, strong, massive"):
        profile_settings(kind, "giant")


@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_the_strong_profile_normalises_critics_and_not_the_actor(kind):
    cls, config = CLASSES[kind]
    given = profile_settings(kind, "strong") | {"batch_size": 16, "learning_starts": 0, "critic_hidden_dims": (24, 16)}
    alg = cls(PointRobot(4, seed=0), config(**given, device="cpu", seed=1))
    run(alg, 10, learn=True)
    assert all(math.isfinite(value) for value in alg.update().values())
    assert not any("Norm" in type(module).__name__ for module in alg.actor.modules())
    first, _, _, second, _, _, last = alg.critics.mlp
    inputs = first.weight.shape[1]
    for layer, size in (
        (first, min(inputs, 24)),
        (second, 16),
    ):  # orthogonal layers with a gain of sqrt(2) have this norm
        torch.testing.assert_close(layer.weight.norm(dim=(1, 2)), torch.full((2,), math.sqrt(2 * size)))
    assert (last.weight.norm(dim=(1, 2)) - 4.0).abs().min() > 1e-4  # nothing normalises what it puts out


def test_normalising_weights_leaves_values_and_frozen_critics_as_they_are():
    alg = make(critic_layer_norm=True, normalize_weights=True, critic_hidden_dims=(24, 16))
    obs, actions = torch.randn(5, *alg.env.critic_obs_space.shape), torch.rand(5, 2)
    layers = alg.normalized_layers
    assert [type(layer).__name__ for layer in layers] == ["StackedLinear", "StackedLinear"]
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(3.0)
            layer.bias.normal_()
        values = alg.critics(obs, actions)
        alg.critics.requires_grad_(False)
        normalize_weights(layers)
        assert torch.equal(alg.critics(obs, actions), values)
        alg.critics.requires_grad_(True)
        normalize_weights(layers)
        torch.testing.assert_close(alg.critics(obs, actions), values, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(layers[1].weight.norm(dim=(1, 2)), torch.full((2,), math.sqrt(2 * 16)))


def test_weights_are_normalised_in_critics_of_any_class():
    critics = ListedCritics(nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1)) for _ in "ab")
    layers = find_normalized_layers(critics)
    assert layers == [critics.critics[0][0], critics.critics[1][0]]
    normalize_weights(layers)
    for layer in layers:
        torch.testing.assert_close(layer.weight.norm(), torch.tensor(math.sqrt(6.0)))


def test_normalised_weights_need_layer_norms():
    with pytest.raises(ValueError, match="normalize_weights needs critics with layer norms: set critic_layer_norm"):
        make(normalize_weights=True)
