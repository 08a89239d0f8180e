"""Extensions of a user's own: hooks, settings, storage, optimizers, saving; and any set of them together."""

import dataclasses

import pytest
import torch
from torch import nn

from canter.algorithms import (
    PPO,
    REGISTRY,
    PPOConfig,
    register_algorithm,
)
from canter.algorithms.algorithm import Algorithm
from canter.algorithms.extension import Extension
from canter.algorithms.optim import GuardedOptimizer
from canter.algorithms.ppo import PPOSettings
from canter.compat.names import AlgorithmNames
from canter.envs.torch_envs import PointRobot
from canter.runners import OnPolicyRunner
from canter.storage import Field
from canter.utils.config import setting, settings


@settings
class SmoothSettings:
    """Settings of Smooth."""

    smooth_loss_coef: float = setting(0.5, low=0.0)
    """Weight of the squared change of the mean action."""


class Smooth(Extension):
    """Stores the action before this one and penalises changes."""

    name = "smooth"
    settings_class = SmoothSettings

    def fields(self):
        return {"previous_action": Field((2,))}

    def begin(self, storage):
        self.previous = torch.zeros(storage.num_envs, 2)

    def after_act(self, step, obs, critic_obs):
        step["previous_action"] = self.previous.clone()
        self.previous.copy_(step["actions"])

    def reset(self, ends):
        self.previous.masked_fill_(ends.unsqueeze(1), 0.0)

    def losses(self, terms, batch, out):
        change = out.mean - batch.previous_action
        terms.losses["smooth_loss"] = batch.mean(change.square().sum(-1))


class Forward(Extension):
    """A model of the next observation with an optimizer of its own, whose error is a bonus."""

    name = "forward_model"

    def attach(self, alg):
        super().attach(alg)
        self.model = nn.Linear(5, 5)
        self.optimizer = GuardedOptimizer(self.model, "Adam", 1e-2)

    def bonus(self, rollout):
        return 0.0 * rollout.privileged_observations.sum(-1) + 1.0

    def losses(self, terms, batch, out):
        terms.losses["forward_loss"] = batch.mean((self.model(batch.critic_obs) - batch.critic_obs).square().mean(-1))

    def checkpoint_parts(self):
        return {"forward_model_state_dict": self.model, "forward_optimizer_state_dict": self.optimizer}


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
@pytest.mark.parametrize("execution", ["eager", "auto"])
def test_a_stored_field_reaches_the_loss_at_its_step(make_policy, noise_env, collect, kind, execution, policy_output):
    env = noise_env(kind)
    alg = PPO(make_policy(kind), seed=1, extensions=[Smooth()], execution=execution)
    alg.prepare(env, 6)
    for iteration in range(4):
        collect(alg, env)
        ended, actions = alg.rollout.dones.squeeze(-1), alg.rollout.actions
        wanted = torch.where(ended[:-1, :, None], 0.0, actions[:-1])
        assert torch.equal(alg.rollout.previous_action[1:], wanted)
        (batch,) = alg.mini_batches()
        out = policy_output(alg, batch)
        by_hand = (out.mean - batch.previous_action).square().sum(-1).mean()
        torch.testing.assert_close(alg.compute_losses(batch).losses["smooth_loss"], by_hand)
        losses, _ = alg.update(iteration)
        assert losses["smooth_loss"] > 0


def test_its_loss_is_weighted_by_the_setting_of_its_name(make_policy, noise_env, collect):
    env, alg = noise_env(), PPO(make_policy(), seed=1, extensions=[Smooth(smooth_loss_coef=0.25)])
    alg.prepare(env, 6)
    collect(alg, env)
    (batch,) = alg.mini_batches()
    terms = alg.compute_losses(batch)
    rest = {name: loss for name, loss in terms.losses.items() if name != "smooth_loss"}
    total = alg.weighted_sum(rest) + 0.25 * terms.losses["smooth_loss"]
    torch.testing.assert_close(alg.weighted_sum(terms.losses), total)
    alg.smooth_loss_coef = 0.75
    assert alg.smooth.cfg.smooth_loss_coef == 0.75
    total = alg.weighted_sum(rest) + 0.75 * terms.losses["smooth_loss"]
    torch.testing.assert_close(alg.weighted_sum(terms.losses), total)
    with pytest.raises(ValueError, match="smooth_loss_coef must be a number of at least 0, got -1"):
        alg.smooth_loss_coef = -1.0


def test_an_optimizer_of_its_own_steps_with_the_policys_and_is_saved(make_policy, noise_env, collect):
    env, alg = noise_env(), PPO(make_policy(), seed=1, extensions=[Forward()], timeout_bootstrap="none")
    alg.prepare(env, 6)
    before = alg.forward_model.model.weight.detach().clone()
    collect(alg, env)
    first, _ = alg.update(0)
    assert not torch.equal(before, alg.forward_model.model.weight)
    for iteration in range(1, 200):
        collect(alg, env)
        losses, _ = alg.update(iteration)
    assert losses["forward_loss"] < 0.2 * first["forward_loss"]
    other = PPO(make_policy(), seed=2, extensions=[Forward()])
    other.prepare(env, 6)
    other.load_state_dict(alg.state_dict())
    assert torch.equal(other.forward_model.model.weight, alg.forward_model.model.weight)


class SmoothPPO(PPO):
    """PPO with the extension as part of its class."""

    extension_classes = (Smooth,)


def test_settings_of_a_class_with_extensions_are_its_keywords(make_policy):
    alg = SmoothPPO(make_policy(), smooth_loss_coef=0.1, gamma=0.9)
    assert (alg.smooth_loss_coef, alg.gamma) == (0.1, 0.9)
    assert set(alg.extensions) == {"smooth"}
    alg = SmoothPPO(make_policy(), cfg=PPOConfig(gamma=0.8))
    assert (alg.smooth_loss_coef, alg.gamma) == (0.5, 0.8)
    with pytest.raises(TypeError, match="'smooth_loss_coef'"):
        SmoothPPO(make_policy(), smooth_coef=0.1)


def test_a_registered_algorithm_is_found_by_dicts_with_its_own_settings(tmp_path):
    @settings
    class SmoothConfig(SmoothSettings, PPOConfig):
        num_learning_epochs: int = 3

    register_algorithm("smoothppo", SmoothPPO, SmoothConfig)
    try:
        cfg = {"algorithm": {"class_name": "SmoothPPO", "smooth_loss_coef": 0.2}, "num_steps_per_env": 4, "seed": 1}
        cfg["policy"] = {"actor_hidden_dims": [8], "critic_hidden_dims": [8]}
        runner = OnPolicyRunner(PointRobot(4), cfg, log_dir=tmp_path, device="cpu", show_progress=False)
        runner.learn(2)
        assert (runner.alg.smooth_loss_coef, runner.alg.num_learning_epochs) == (0.2, 3)
        assert runner.config()["algorithm"]["smooth_loss_coef"] == 0.2
        runner.close()
    finally:
        del REGISTRY["smoothppo"]


@pytest.mark.parametrize("execution", ["eager", "auto"])
def test_compute_losses_may_return_any_three_dicts(make_policy, noise_env, collect, execution):
    class Mine(PPO):
        def compute_losses(self, minibatch):
            value = self.policy.value(minibatch.critic_obs)[0]
            return {"value_loss": (value - minibatch.returns).square().mean()}, {}, {"kl": torch.zeros(())}

    env, alg = noise_env(), Mine(make_policy(), seed=1, execution=execution)
    alg.prepare(env, 6)
    actor = alg.policy.actor[0].weight.detach().clone()
    for iteration in range(4):
        collect(alg, env)
        losses, _ = alg.update(iteration)
    assert losses["value_loss"] > 0
    assert torch.equal(actor, alg.policy.actor[0].weight)


@pytest.mark.parametrize("cls", [entry.agent_class for entry in REGISTRY.values()])
def test_no_algorithm_has_more_than_five_classes_in_its_order(cls):
    own = [base for base in cls.__mro__ if base not in (object, AlgorithmNames)]  # names of other libraries
    assert len(own) <= 5
    assert own[-1] is Algorithm


# ---------------------------------------------------------------------- live settings
# Every float that a loss, a return or a schedule reads, and another value for it.
FLOATS = {
    "gamma": 0.5,
    "lam": 0.3,
    "clip_param": 0.01,
    "value_loss_coef": 7.0,
    "entropy_coef": 0.7,
    "max_grad_norm": 0.05,
    "desired_kl": 1e-5,
    "clip_min_std": 1.1,
    "learning_rate": 3e-4,
}
OTHERS = {
    "use_clipped_value_loss": False,
    "normalize_advantage_per_mini_batch": True,
    "timeout_bootstrap": "none",
    "num_learning_epochs": 3,
    "num_mini_batches": 3,
    "schedule": "fixed",
    "clip_max_std": 0.5,
}


def run_with_change(make_ppo, collect, execution, name=None, value=None, iterations=5, change_at=3):
    alg, env = make_ppo(execution=execution, num_mini_batches=2, schedule="adaptive", num_learning_epochs=2)
    for iteration in range(iterations):
        if iteration == change_at and name is not None:
            setattr(alg, name, value)
        collect(alg, env)
        alg.update(iteration)
    return alg


def weights(alg):
    return torch.cat([p.detach().flatten() for p in alg.policy.parameters()])


@pytest.mark.parametrize("name", [*FLOATS, *OTHERS])
def test_a_changed_setting_takes_effect_and_eager_agrees(make_ppo, collect, name):
    value = (FLOATS | OTHERS)[name]
    eager = weights(run_with_change(make_ppo, collect, "eager", name, value))
    recorded = weights(run_with_change(make_ppo, collect, "auto", name, value))
    assert torch.equal(eager, recorded)
    assert not torch.equal(eager, weights(run_with_change(make_ppo, collect, "eager")))


@pytest.mark.parametrize("name", FLOATS)
def test_annealing_a_float_every_iteration_makes_no_new_recording(make_ppo, collect, name):
    alg, env = make_ppo(execution="auto", num_mini_batches=2, schedule="adaptive", entropy_coef=0.1)
    counts = []
    for iteration in range(9):
        setattr(alg, name, FLOATS[name] * (1 + 0.1 * iteration))
        collect(alg, env)
        alg.update(iteration)
        counts.append(len(alg.executor.graphs))
    assert counts[-1] == counts[-4] > 0
    assert not alg.executor.eager_only


def test_a_rate_assigned_to_a_group_with_a_rate_of_its_own_is_used(make_ppo, collect):
    for execution in ("eager", "auto"):
        alg, env = make_ppo(execution=execution, num_mini_batches=2, parameter_groups={"critic": {"lr": 1e-2}})
        for iteration in range(8):
            if iteration == 5:
                alg.optimizer.param_groups[0]["lr"] = 0.0
                graphs = dict(alg.executor.graphs)
            actor, critic = (part.weight.clone() for part in (alg.policy.actor[0], alg.policy.critic[0]))
            collect(alg, env)
            alg.update(iteration)
            assert torch.equal(critic, alg.policy.critic[0].weight) == (iteration >= 5)
            assert not torch.equal(actor, alg.policy.actor[0].weight)
        assert bool(graphs) == (execution == "auto")
        assert alg.executor.graphs == graphs  # a rate is a tensor, whose current value they read


def test_every_setting_is_live_fixed_or_read_by_the_host():
    known = {f.name: f for f in dataclasses.fields(PPOSettings)}
    fixed = {name for name, f in known.items() if f.metadata.get("fixed")}
    assert not fixed & (FLOATS.keys() | OTHERS.keys())
    unchecked = known.keys() - fixed - FLOATS.keys() - OTHERS.keys()
    assert unchecked == {"clip_schedule", "target_kl"}  # the host reads them anew in every update
