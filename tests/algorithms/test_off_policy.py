"""Off-policy algorithms: target networks, live settings and frozen networks, the same in every execution mode."""

import copy
import functools
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from no_host_sync import NoHostSync

from canter.algorithms import DQN, SAC, TD3, off_policy
from canter.algorithms.off_policy import TargetNetwork
from canter.algorithms.optim import GuardedOptimizer
from canter.envs.torch_envs import CartPole, PointRobot
from canter.envs.vec_env import StepRecord, VecEnv
from canter.envs.wrap import wrap_env
from canter.presets import profile_settings
from canter.storage import Field

SMALL = {"batch_size": 16, "learning_starts": 8, "buffer_size": 400}
SMALL_NETWORKS = {"actor_hidden_dims": (8,), "critic_hidden_dims": (8,)}
MAKERS = {
    "dqn": (DQN, CartPole, {"network_hidden_dims": (8,), "tau": 0.5, "target_update_interval": 2, "n_step": 3}),
    "per": (DQN, CartPole, {"network_hidden_dims": (8,), "prioritized_replay": True}),
    "sac": (SAC, PointRobot, {**SMALL_NETWORKS, "target_entropy": -1.0}),
    "td3": (TD3, PointRobot, {**SMALL_NETWORKS, "exploration_noise_max": 0.3}),
    "strong": (SAC, PointRobot, {**profile_settings("sac", "strong"), **SMALL_NETWORKS}),
}
LIVE_FLOATS = [
    ("dqn", "gamma", 0.5),
    ("dqn", "tau", 0.9),
    ("dqn", "learning_rate", 0.01),
    ("dqn", "max_grad_norm", 1e-3),
    ("dqn", "epsilon_end", 0.5),
    ("per", "priority_exponent", 0.1),
    ("per", "importance_exponent", 0.9),
    ("sac", "gamma", 0.5),
    ("sac", "tau", 0.9),
    ("sac", "target_entropy", 3.0),
    ("sac", "max_grad_norm", 1e-3),
    ("sac", "actor_learning_rate", 0.01),
    ("sac", "critic_learning_rate", 0.01),
    ("sac", "alpha_learning_rate", 0.01),
    ("strong", "gamma", 0.5),
    ("td3", "gamma", 0.5),
    ("td3", "tau", 0.9),
    ("td3", "target_noise", 1.0),
    ("td3", "target_noise_clip", 0.01),
    ("td3", "exploration_noise", 0.01),
    ("td3", "exploration_noise_max", 2.0),
]
LIVE_OTHERS = [
    ("dqn", "double_dqn", False),
    ("dqn", "action_gap_coef", 0.5),
    ("dqn", "n_step", 1),
    ("dqn", "batch_size", 8),
    ("dqn", "target_update_interval", 1),
    ("dqn", "epsilon_decay_steps", 1),
    ("dqn", "max_grad_norm", None),
    ("sac", "critic_reduction", "mean"),
    ("sac", "policy_delay", 2),
    ("sac", "target_entropy", None),
    ("td3", "policy_delay", 1),
    ("td3", "exploration_noise_max", None),
]


def make(kind, execution="auto", env=None, **given):
    torch.manual_seed(0)
    cls, env_class, own = MAKERS[kind]
    settings = {**SMALL, "epsilon_decay_steps": 40} if cls is DQN else SMALL
    env = env_class(4, seed=0, max_episode_length=9) if env is None else env
    return cls(env, device="cpu", seed=1, **{**settings, **own, "execution": execution, **given})


def run(alg, steps):
    """Step the environment and take a gradient step, `steps` times."""
    obs, critic_obs = alg.env.get_observations()
    for _ in range(steps):
        record = alg.env.step(alg.explore(obs, critic_obs))
        alg.process_step(record)
        if alg.can_learn:
            alg.train(1)
        obs, critic_obs = record.obs, record.critic_obs
    return alg


def changed_run(kind, execution, change, **given):
    """An algorithm after 24 steps, with `change(alg)` in the middle, and the recordings made before the change."""
    alg = run(make(kind, execution, **given), 16)
    known = set(alg.executor.graphs)
    change(alg)
    return run(alg, 8), known


@functools.cache
def unchanged_run(kind):
    return changed_run(kind, "eager", lambda alg: None)[0]


def contents(alg):
    """Every tensor that depends on the training, the stored actions included."""
    parts = [alg.policy, *(target.module for target in alg.targets)]
    parts += [alg.temperature] if isinstance(alg, SAC) else []
    return [tensor.clone() for part in parts for tensor in part.state_dict().values()] + [alg.replay.data["actions"]]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(contents(a), contents(b), strict=True))


# ---------------------------------------------------------------------- one environment
@pytest.mark.parametrize("kind", ["dqn", "sac", "td3"])
@pytest.mark.parametrize("normalizes", [False, True])
def test_a_single_environment_on_a_cpu_learns_as_several_do(kind, normalizes):
    """Its steps are stored by other code, which must store the same."""

    def learned(execution, is_numpy):
        env = MAKERS[kind][1](1, seed=0, max_episode_length=9)
        alg = make(kind, execution, env, empirical_normalization=normalizes)
        alg.prepare()
        assert alg.replay.is_numpy
        alg.replay.is_numpy = is_numpy
        return run(alg, 40)

    recorded, eager, by_tensors = learned("auto", True), learned("eager", True), learned("auto", False)
    names = {signature[0] for signature in recorded.executor.graphs}
    assert names == {"explore", "learn", *(["statistics"] if normalizes else [])}
    assert same(recorded, eager)
    assert same(recorded, by_tensors)
    assert all(torch.equal(recorded.replay.data[name], by_tensors.replay.data[name]) for name in recorded.replay.data)


def test_moments_of_a_frozen_past_never_become_denormal(monkeypatch):
    """A CPU computes many times slower with denormal numbers; a dead unit's moments would stay denormal."""
    monkeypatch.setattr(off_policy, "MOMENT_INTERVAL", 4)
    alg = run(make("dqn"), 12)
    moments = next(iter(alg.optimizers["optimizer"].optimizer.state.values()))["exp_avg"]
    moments[:3] = 1e-40
    alg.live.max_grad_norm.zero_()  # no gradients from here on
    alg.train(4)
    assert not ((moments != 0) & (moments.abs() < 1e-38)).any()


# ---------------------------------------------------------------------- live settings
@pytest.mark.parametrize(("kind", "name", "value"), LIVE_FLOATS)
def test_an_assigned_float_takes_effect_at_once_without_a_new_recording(kind, name, value):
    eager, _ = changed_run(kind, "eager", lambda alg: setattr(alg, name, value))
    recorded, known = changed_run(kind, "auto", lambda alg: setattr(alg, name, value))
    assert getattr(recorded, name) == getattr(recorded.cfg, name) == value
    assert same(eager, recorded)
    assert not same(eager, unchanged_run(kind))
    assert {"explore", "insert", "learn"} <= {signature[0] for signature in known}
    assert set(recorded.executor.graphs) == known
    assert not recorded.executor.eager_only


@pytest.mark.parametrize(("kind", "name", "value"), LIVE_OTHERS)
def test_any_other_assigned_setting_takes_effect_at_once(kind, name, value):
    given = {
        "max_grad_norm": {"max_grad_norm": 1e-3},
        "epsilon_decay_steps": {"epsilon_decay_steps": 1000},
        "double_dqn": {"learning_rate": 0.1, "target_update_interval": 50},  # so that the networks choose differently
        "action_gap_coef": {"learning_rate": 0.1},  # so that errors reach the quadratic part of the loss
    }.get(name, {})
    eager, _ = changed_run(kind, "eager", lambda alg: setattr(alg, name, value), **given)
    recorded, _ = changed_run(kind, "auto", lambda alg: setattr(alg, name, value), **given)
    assert same(eager, recorded)
    unchanged = changed_run(kind, "eager", lambda alg: None, **given)[0] if given else unchanged_run(kind)
    assert not same(eager, unchanged)


@pytest.mark.parametrize("kind", ["dqn", "sac", "td3"])
def test_a_learning_rate_assigned_to_a_parameter_group_takes_effect(kind):
    name = next(iter(make(kind).optimizers))

    def assign(alg):
        alg.optimizers[name].param_groups[0]["lr"] = 0.01

    eager, _ = changed_run(kind, "eager", assign)
    recorded, known = changed_run(kind, "auto", assign)
    assert same(eager, recorded)
    assert not same(eager, unchanged_run(kind))
    assert set(recorded.executor.graphs) == known


def test_a_change_of_the_config_object_takes_effect_with_the_next_report():
    def change(alg):
        alg.cfg.gamma = 0.5
        alg.report()

    assigned, _ = changed_run("sac", "auto", lambda alg: setattr(alg, "gamma", 0.5))
    assert same(assigned, changed_run("sac", "auto", change)[0])


def test_an_assigned_learning_rate_is_scaled_by_a_linear_schedule():
    alg = make("sac", schedule="linear")
    alg.adjust_learning_rate(0.75)
    alg.actor_learning_rate = 0.01
    assert float(alg.optimizers["actor_optimizer"].lr) == pytest.approx(0.0025)
    assert float(alg.optimizers["critic_optimizer"].lr) == pytest.approx(3e-4 / 4)
    alg.adjust_learning_rate(0.5)
    assert float(alg.optimizers["actor_optimizer"].lr) == pytest.approx(0.005)


def test_assigning_the_configured_learning_rate_replaces_the_one_of_a_checkpoint():
    saved = make("dqn", learning_rate=0.5).state_dict()
    alg = make("dqn", learning_rate=0.25)
    alg.load_state_dict(saved)
    assert float(alg.optimizers["optimizer"].lr) == saved["learning_rate"] == 0.5
    alg.report()
    assert float(alg.optimizers["optimizer"].lr) == 0.5
    alg.learning_rate = 0.25
    assert float(alg.optimizers["optimizer"].lr) == 0.25


def test_algorithms_with_several_learning_rates_refuse_a_single_one():
    alg = make("sac")
    assert alg.learning_rate == 3e-4
    with pytest.raises(AttributeError, match="SAC has no single learning_rate; assign actor_learning_rate or critic"):
        alg.learning_rate = 1e-3


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("dqn", "buffer_size", 500),
        ("dqn", "dueling", True),
        ("dqn", "network_hidden_dims", (16,)),
        ("dqn", "prioritized_replay", True),
        ("sac", "weight_decay", 0.1),
        ("sac", "num_atoms", 11),
        ("sac", "init_alpha", 1.0),
        ("sac", "auto_alpha", False),
        ("td3", "action_low", -2.0),
        ("td3", "execution", "eager"),
    ],
)
def test_a_setting_from_which_something_was_built_cannot_change(kind, name, value):
    alg = make(kind)
    owner = type(alg).__name__
    with pytest.raises(AttributeError, match=f"{owner} was built with {name}=.*; make a new {owner} to change it"):
        setattr(alg, name, value)
    assert getattr(alg, name) != value


@pytest.mark.parametrize("cls", [DQN, SAC, TD3])
def test_algorithms_are_at_most_three_classes_above_their_base(cls):
    assert len(cls.__mro__) <= 5


@pytest.mark.parametrize("kind", ["dqn", "per", "td3"])
def test_assigning_exploring_and_learning_never_wait_for_the_device(kind):
    alg = run(make(kind, "eager"), 10)
    obs, critic_obs = alg.env.get_observations()
    with NoHostSync():
        alg.gamma, alg.tau, alg.max_grad_norm = 0.9, 0.1, 1.0
        record = alg.env.step(alg.explore(obs, critic_obs))
        alg.process_step(record)
        alg.train(4)


# ---------------------------------------------------------------------- frozen networks
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("sac", "actor"),
        ("sac", "critics"),
        ("sac", "temperature"),
        ("td3", "actor"),
        ("dqn", "q_network"),
        ("strong", "critics"),
    ],
)
def test_a_frozen_network_keeps_its_parameters_while_the_others_learn(kind, name):
    def freeze(alg):
        alg.before = contents(alg), [p.clone() for p in getattr(alg, name).parameters()]
        getattr(alg, name).requires_grad_(False)

    eager, _ = changed_run(kind, "eager", freeze)
    recorded, _ = changed_run(kind, "auto", freeze)
    assert same(eager, recorded)
    for alg in (eager, recorded):
        everything, own = alg.before
        assert all(torch.equal(a, b) for a, b in zip(own, getattr(alg, name).parameters(), strict=True))
        assert any(not torch.equal(a, b) for a, b in zip(everything[:-1], contents(alg)[:-1], strict=True))
        assert not any(p.requires_grad for p in getattr(alg, name).parameters())
        getattr(alg, name).requires_grad_(True)
        run(alg, 4)
        assert any(not torch.equal(a, b) for a, b in zip(own, getattr(alg, name).parameters(), strict=True))
    assert same(eager, recorded)


@pytest.mark.parametrize(("kind", "name"), [("sac", "actor"), ("td3", "critics"), ("dqn", "q_network")])
def test_replaced_memory_of_a_parameter_is_used_from_the_next_report_on(kind, name):
    def replace(alg):
        first = next(iter(getattr(alg, name).parameters()))
        first.data = torch.full_like(first, 0.25)
        alg.report()

    eager, _ = changed_run(kind, "eager", replace)
    recorded, known = changed_run(kind, "auto", replace)
    assert same(eager, recorded)
    assert not same(eager, unchanged_run(kind))
    assert "learn" in {signature[0] for signature in known}


def test_a_frozen_network_reports_a_gradient_of_zero():
    alg = run(make("sac"), 10)
    alg.actor.requires_grad_(False)
    alg.report()
    metrics = alg.update(3)
    assert metrics["train/actor_grad_norm"] == 0.0
    assert metrics["train/critic_grad_norm"] > 0.0
    assert metrics["train/nonfinite_updates"] == 0.0


@pytest.mark.parametrize("execution", ["eager", "auto"])
def test_statistics_stand_still_in_evaluation_mode(execution):
    alg = run(make("sac", execution, empirical_normalization=True), 10)
    count = int(alg.policy.obs_normalizer.count)
    alg.eval_mode()
    run(alg, 5)
    assert int(alg.policy.obs_normalizer.count) == count == 40
    alg.train_mode()
    run(alg, 5)
    assert int(alg.policy.obs_normalizer.count) == 60


# ---------------------------------------------------------------------- target networks
def test_a_target_copies_statistics_and_lerps_parameters():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    target = TargetNetwork(net, GuardedOptimizer(net, "Adam", 1e-3))
    before = copy.deepcopy(target.module.state_dict())
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    net(torch.randn(8, 3))
    target.update(torch.tensor(0.1))
    for name, now in target.module.state_dict().items():
        if "running" in name or "num_batches" in name:
            assert torch.equal(now, net.state_dict()[name]), name
        else:
            assert torch.allclose(now, before[name] + 0.1, atol=1e-6), name
    assert not any(p.requires_grad for p in target.module.parameters())
    target.update(torch.tensor(1.0))
    for name, now in target.module.state_dict().items():
        assert torch.equal(now, net.state_dict()[name]), name


def test_a_target_is_updated_with_several_parameter_groups():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    target = TargetNetwork(net, GuardedOptimizer(net, "Adam", 1e-3, {"1": {"lr": 1e-2}}))
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    target.update(torch.tensor(1.0))
    assert all(not p.any() for p in target.module.parameters())


# ---------------------------------------------------------------------- time limits, and steps that only reset
class Constant(VecEnv):
    """Pays 1 in every step and is cut off every 5 steps; the observation is 1.

    Args:
        gives_final: Whether the observation before a reset is given, and the critic's.
        resets_in_next_step: The step after an end only resets: it shows 1000 and pays 1000.
    """

    def __init__(self, action_space, gives_final=(False, False), resets_in_next_step=False, has_critic_obs=False):
        self.num_envs, self.device, self.action_space = 4, torch.device("cpu"), action_space
        self.obs_space = self.critic_obs_space = spaces.Box(-np.inf, np.inf, (1,))
        if has_critic_obs:
            self.critic_obs_space = spaces.Box(-np.inf, np.inf, (2,))
        self.gives_final, self.has_invalid_steps = gives_final, resets_in_next_step
        self.t, self.has_ended = torch.zeros(4), torch.zeros(4, dtype=torch.bool)

    def _obs(self, value):
        obs = torch.full((4, 1), 1.0) if value is None else value
        return obs, obs if self.critic_obs_space is self.obs_space else obs.repeat(1, 2)

    def reset(self):
        self.t.zero_()
        return self._obs(None)

    get_observations = reset

    def step(self, actions):
        valid = ~self.has_ended
        self.t = self.t + valid
        truncated, terminated = (self.t >= 5) & valid, torch.zeros(4, dtype=torch.bool)
        self.t = self.t.masked_fill(truncated, 0.0)
        obs = self._obs(None)
        if self.has_invalid_steps:
            self.has_ended = truncated
            obs = self._obs(torch.where(truncated[:, None], 1000.0, 1.0))  # acted on by the step that only resets
        reward = torch.where(valid, 1.0, 1000.0)
        final, critic_final = self._obs(None)
        final = final if self.gives_final[0] else None
        critic_final = critic_final if self.gives_final[1] else None
        return StepRecord(*obs, reward, terminated, truncated, final, critic_final, valid, {})


CONSTANT = {"batch_size": 64, "learning_starts": 16, "buffer_size": 400, "gamma": 0.9, "max_grad_norm": None}
SMALL_DQN = {"network_hidden_dims": (8,), "learning_rate": 0.03, "target_update_interval": 5}
LINEAR_CRITICS = {"actor_hidden_dims": (), "critic_hidden_dims": (), "critic_learning_rate": 0.1, "tau": 0.3}
DISCRETE, BOX = spaces.Discrete(2), spaces.Box(-1.0, 1.0, (1,))


def learned_q(kind, env, execution="auto", num_steps=250, **given):
    """The value of the only state after training."""
    torch.manual_seed(0)
    own = SMALL_DQN if kind == "dqn" else LINEAR_CRITICS
    own = own | ({"auto_alpha": False, "init_alpha": 1e-9} if kind == "sac" else {})
    cls = {"dqn": DQN, "sac": SAC, "td3": TD3}[kind]
    alg = run(cls(env, device="cpu", seed=1, execution=execution, **{**CONSTANT, **own, **given}), num_steps)
    batch = next(alg.batches(1))
    taken = alg.q_network(batch.obs) if kind == "dqn" else alg.critics(batch.critic_obs, batch.actions)
    return float(taken.detach().mean()), alg


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("kind", ["dqn", "sac", "td3"])
def test_a_time_limit_does_not_lower_the_value_without_final_observations(kind, n_step):
    """Q = 1 / (1 - 0.9); a time limit that counts as an end gives less than 5."""
    value, alg = learned_q(kind, Constant(DISCRETE if kind == "dqn" else BOX), n_step=n_step)
    assert value == pytest.approx(10.0, abs=0.2)
    assert not alg.replay.data["dones"].any()
    with pytest.warns(UserWarning, match=r"no final observation.*extras\['final_obs'\]"):
        alg.report()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(alg, 10).report()  # said once


def test_a_time_limit_does_not_lower_the_value_without_the_critics_final_observation():
    env = Constant(BOX, gives_final=(True, False), has_critic_obs=True)
    value, alg = learned_q("td3", env)
    assert value == pytest.approx(10.0, abs=0.2)
    with pytest.warns(UserWarning, match="no final observation"):
        alg.report()


@pytest.mark.parametrize("kind", ["dqn", "td3"])
def test_final_observations_are_stored_without_a_word(kind):
    env = Constant(DISCRETE if kind == "dqn" else BOX, gives_final=(True, True))
    value, alg = learned_q(kind, env)
    assert value == pytest.approx(10.0, abs=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        alg.report()


class Numbered(Constant):
    """Step t of an episode of 5 starts from the observation t and leads to t + 1."""

    def reset(self):
        super().reset()
        return self._obs(self.t[:, None])

    get_observations = reset

    def step(self, actions):
        before = self.t.clone()
        record = super().step(actions)
        finals = self._obs((before + 1)[:, None])
        finals = [final if gives else None for final, gives in zip(finals, self.gives_final, strict=True)]
        obs, critic_obs = self._obs(self.t[:, None])
        return record._replace(obs=obs, critic_obs=critic_obs, final_obs=finals[0], final_critic_obs=finals[1])


@pytest.mark.parametrize("execution", ["eager", "auto"])
@pytest.mark.parametrize(("gives_final", "last"), [(False, 4.0), (True, 5.0)])
def test_the_last_step_leads_to_its_final_observation_or_to_where_it_began(gives_final, last, execution):
    alg = run(make("dqn", execution, env=Numbered(DISCRETE, (gives_final, gives_final))), 21)
    for n_step in (1, 3):
        batch = alg.replay.draw(400, n_step, 0.5, None)
        length = torch.minimum(torch.tensor(float(n_step)), 5.0 - batch.obs[:, 0])
        whole = batch.discounts == 0.5**length  # the windows of the newest steps are shorter
        assert whole.float().mean() > 0.8
        after = batch.obs[:, 0] + length
        expected = torch.where(after == 5.0, last, after)
        assert torch.equal(batch.next_obs[whole, 0], expected[whole])
        assert not batch.dones.any()


class Counting(gymnasium.Env):
    """Step t of an episode of 5 starts from the observation t, leads to t + 1 and pays 2; then it is cut off."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,))
    action_space = BOX
    t = 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), 2.0, False, self.t == 5, {}


@pytest.mark.parametrize("execution", ["eager", "auto"])
@pytest.mark.parametrize("num_envs", [1, 2])  # stored by arrays, and by tensors
@pytest.mark.parametrize(
    ("mode", "after", "done"),
    [("auto", 5.0, 0.0), ("final_obs", 5.0, 0.0), ("current_value", 4.0, 0.0), ("none", 5.0, 1.0)],
)
def test_the_state_whose_value_follows_a_time_limit_can_be_chosen(mode, after, done, num_envs, execution):
    alg = run(make("td3", execution, wrap_env(Counting, num_envs=num_envs), timeout_bootstrap=mode), 25)
    last = alg.replay.draw(200, 1, 0.5, None)
    is_last = last.obs[:, 0] == 4.0
    assert is_last.any()
    assert (last.next_obs[is_last, 0] == after).all()
    assert torch.equal(last.dones, torch.where(is_last, done, 0.0))
    assert torch.equal(last.next_obs[~is_last], last.obs[~is_last] + 1.0)
    window = alg.replay.draw(200, 3, 0.5, None)  # from 3 on: 2 + 0.5 * 2, and what follows counts 0.25
    rows = (window.obs[:, 0] == 3.0) & (window.discounts == 0.25)
    assert rows.any()
    assert (window.rewards[rows] == 3.0).all()
    assert (window.next_obs[rows, 0] == after).all()
    assert (window.dones[rows] == done).all()


def test_the_bootstrap_of_time_limits_can_change_during_a_run():
    """Q is 2 / (1 - 0.5) = 4 with the value after the time limit, and less without: 2 in the last of two steps."""

    class Pair(Counting):
        def step(self, action):
            self.t += 1
            return np.full(1, self.t % 2, np.float32), 2.0, False, self.t == 2, {}

    given = {"gamma": 0.5, "critic_learning_rate": 0.03, "tau": 1.0, "target_noise": 0.0, "max_grad_norm": None}
    alg = run(make("td3", env=wrap_env(Pair, num_envs=1), buffer_size=64, **given), 300)
    state = torch.tensor([[1.0]])
    action = alg.act(state, deterministic=True)
    assert alg.critics(state, action).mean().item() == pytest.approx(4.0, abs=0.2)
    alg.timeout_bootstrap = "none"
    run(alg, 300)
    assert alg.critics(state, alg.act(state, deterministic=True)).mean().item() == pytest.approx(2.0, abs=0.2)


# ---------------------------------------------------------------------- what a user adds to SAC
class Frugal(SAC):
    """SAC with energies in the replay buffer, which its loss uses, exploration of its own, and a metric."""

    def declare_fields(self):
        return {"energy": Field((1,))}

    def record_fields(self, record):
        return {"energy": 10.0 * record.obs[:, :1]}

    def explore_step(self, obs):
        return super().explore_step(obs).clamp(-0.1, 0.1)

    def critic_loss(self, batch, noise):
        loss, stats = super().critic_loss(batch._replace(rewards=batch.rewards - batch.fields["energy"][:, 0]), noise)
        return loss, {**stats, "energy": batch.fields["energy"].mean()}


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_declared_fields_are_stored_with_their_step(num_envs, n_step):
    given = {**SMALL, **SMALL_NETWORKS, "n_step": n_step, "gradient_steps": 2}
    alg = run(Frugal(wrap_env(Counting, num_envs=num_envs), device="cpu", seed=1, **given), 20)
    batch = alg.replay.draw(200, n_step, 0.9, None)
    follows = torch.where(batch.obs == 4.0, 0.0, batch.obs + 1.0)  # the observation after the first step, and a reset
    assert torch.equal(batch.fields["energy"], 10.0 * follows)
    assert (alg.replay.data["actions"][alg.replay.data["holds_step"]][8 * num_envs :].abs() <= 0.1).all()
    first, second = alg.batches(2)
    assert first.fields["energy"].shape == second.fields["energy"].shape == (16, 1)
    assert alg.update()["train/energy"] >= 0.0


def test_a_step_without_a_declared_field_is_an_error():
    class Forgetful(Frugal):
        def record_fields(self, record):
            return {"enegry": record.obs}

    alg = Forgetful(wrap_env(Counting, num_envs=2), device="cpu", seed=1, **SMALL, **SMALL_NETWORKS)
    with pytest.raises(ValueError, match="enegry.*energy"):
        run(alg, 1)

    class Twice(Frugal):
        def declare_fields(self):
            return {"rewards": Field(())}

    with pytest.raises(ValueError, match="rewards"):
        run(Twice(wrap_env(Counting, num_envs=2), device="cpu", seed=1, **SMALL, **SMALL_NETWORKS), 1)


def test_no_gradient_steps_are_refused():
    with pytest.raises(ValueError, match="gradient_steps must not be 0"):
        make("sac", gradient_steps=0)
    alg = make("sac")
    with pytest.raises(ValueError, match="gradient_steps must not be 0"):
        alg.gradient_steps = 0
    alg.gradient_steps = -1


@pytest.mark.parametrize("execution", ["eager", "auto"])
@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_statistics_leave_out_steps_that_only_reset(kind, execution):
    """Of 12 steps, steps 6 and 12 only reset: they show 1000 and pay 1000."""
    env = Constant(BOX, resets_in_next_step=True, has_critic_obs=True)
    alg = run(make(kind, execution, env=env, empirical_normalization=True, normalize_rewards=True, gamma=0.5), 12)
    for normalizer in (alg.policy.obs_normalizer, alg.policy.critic_obs_normalizer):
        assert normalizer.count == 4 * 10
        assert (normalizer.mean == 1.0).all()
        assert (normalizer.std == 0.0).all()
    returns = torch.tensor([1.0, 1.5, 1.75, 1.875, 1.9375] * 2)
    assert alg.return_scaler.count == 4 * 10
    torch.testing.assert_close(alg.return_scaler.mean, returns.mean())
    torch.testing.assert_close(alg.return_scaler.var, returns.var(unbiased=False))
    assert (alg.return_scaler.returns == 0.0).all()
    assert len(alg.replay) == 4 * 10
