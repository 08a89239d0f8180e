"""Documented methods that a user replaces, in a subclass or on the object: each is called, also by the runner."""

from collections import defaultdict

import pytest
import torch
from torch import nn

from canter.algorithms import APPO, PPO, TPPO
from canter.envs.torch_envs import PointRobot
from canter.modules import ActorCritic, ActorCriticRecurrent, StateAc
from canter.runners import OnPolicyRunner
from canter.storage import ActionLabelRollout, RolloutStorage

EXECUTIONS = pytest.mark.parametrize("execution", ["eager", "auto"])


def policy(cls=ActorCritic, **settings):
    torch.manual_seed(0)
    return cls(6, 9, 2, actor_hidden_dims=[8], critic_hidden_dims=[8], **settings)


def trained(cls, execution="eager", actor_critic=None, iterations=3, prepare=None, **settings):
    """The algorithm after a few iterations in a runner; its policy has moved."""
    alg = cls(actor_critic or policy(), seed=1, execution=execution, learning_rate=1e-2, **settings)
    before = [p.detach().clone() for p in alg.policy.parameters()]
    runner = OnPolicyRunner(PointRobot(4, seed=1, max_episode_length=6), alg, show_progress=False)
    if prepare is not None:
        prepare(alg)
    runner.learn(iterations)
    assert not all(torch.equal(a, b) for a, b in zip(before, alg.policy.parameters(), strict=True))
    return alg


class StyleReward(PPO):
    """Replaces every reward."""

    def process_env_step(self, rewards, dones, infos):
        infos["log"]["style"] = 7.0
        super().process_env_step(torch.full_like(rewards, 1000.0), dones, infos)


@EXECUTIONS
def test_a_reward_that_process_env_step_changes_is_learned_from_and_statistics_are_the_environments(execution):
    seen = []

    def note(alg):
        alg.trained_by.add_callback("post_rollout", lambda runner, metrics: seen.append(metrics["rollout/mean_reward"]))

    alg = trained(StyleReward, execution, timeout_bootstrap="none", prepare=note)
    assert (alg.storage.rewards == 1000.0).all()
    assert max(seen) < 10.0
    assert alg.trained_by.stats.extras.take()["extra/log/style"] == 7.0


def test_a_process_env_step_assigned_to_the_object_is_called_too():
    calls = []

    def assign(alg):
        store = alg.process_env_step
        alg.process_env_step = lambda *step: (calls.append(len(step)), store(*step))[1]

    trained(PPO, iterations=2, prepare=assign)
    assert calls == [3] * 2 * 24


def test_a_step_that_process_env_step_does_not_store_is_an_error():
    class Forgetful(PPO):
        def process_env_step(self, rewards, dones, infos):
            pass

    with pytest.raises(RuntimeError, match=r"Forgetful.process_env_step stored 0 steps.*super\(\).process_env_step"):
        trained(Forgetful)


class Documented(PPO):
    """Acting, storing and returns as the documents write them."""

    def act(self, obs, critic_obs):
        step, net = self.transition, self.actor_critic
        if net.is_recurrent:
            step.hidden_states = net.get_hidden_states()
        step.actions, step.values = net.act(obs).detach(), net.evaluate(critic_obs).detach()
        step.actions_log_prob = net.get_actions_log_prob(step.actions).detach()
        step.action_mean, step.action_sigma = net.action_mean.detach(), net.action_std.detach()
        step.observations, step.critic_observations = obs, critic_obs
        return step.actions

    def process_env_step(self, rewards, dones, infos):
        step = self.transition
        step.rewards, step.dones = rewards.clone(), dones
        if "time_outs" in infos:
            step.rewards += self.gamma * (step.values * infos["time_outs"].unsqueeze(1)).squeeze(1)
        self.storage.add_transitions(step)
        step.clear()
        self.actor_critic.reset(dones)

    def compute_returns(self, last_critic_obs):
        self.calls = getattr(self, "calls", 0) + 1
        self.storage.compute_returns(self.actor_critic.evaluate(last_critic_obs).detach(), self.gamma, self.lam)


@EXECUTIONS
@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_the_documented_rollout_trains(execution, kind):
    net = policy() if kind == "mlp" else policy(ActorCriticRecurrent, rnn_hidden_size=5)
    alg = trained(Documented, execution, net, timeout_bootstrap="none")
    assert alg.calls == 3
    assert alg.storage.returns.abs().sum() > 0
    if kind == "lstm":
        assert alg.storage.data["hidden.memory_a"][1].abs().sum() > 0


class DocumentedAct(PPO):
    """The documented `act` alone."""

    act = Documented.act


@EXECUTIONS
def test_an_act_of_ones_own_learns_what_process_step_stores(execution):
    alg = trained(DocumentedAct, execution)
    assert (alg.storage.data["truncated"].any()) or alg.storage.dones.any()


class StepByStep(OnPolicyRunner):
    """A runner with a step of its own."""

    def rollout_step(self, obs, critic_obs, **kwargs):
        return super().rollout_step(obs, critic_obs, **kwargs)


def test_a_runner_with_a_step_of_its_own_calls_the_replaced_methods_too():
    class Both(StyleReward, Documented):
        act = PPO.act

    alg = Both(policy(), seed=1, timeout_bootstrap="none")
    StepByStep(PointRobot(4, seed=1), alg, show_progress=False).learn(1)
    assert (alg.storage.rewards == 1000.0).all()
    assert alg.calls == 1


class DocumentedUpdate(PPO):
    """The documented loop over minibatches, with torch's way of taking a step."""

    def update(self, current_learning_iteration):
        losses, stats = defaultdict(float), defaultdict(float)
        for minibatch in self.storage.mini_batch_generator(self.num_mini_batches, self.num_learning_epochs):
            terms, _, more = self.compute_losses(minibatch)
            loss = sum(getattr(self, f"{name}_coef", 1.0) * term for name, term in terms.items())
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.actor_critic.parameters(), self.max_grad_norm)
            self.optimizer.step()
            for name, term in terms.items():
                losses[name] += float(term.detach()) / self.num_mini_batches
            stats.update({name: float(value) for name, value in more.items()})
        self.storage.clear()
        self.actor_critic.clip_std(min=self.clip_min_std)
        return losses, stats


@EXECUTIONS
@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_the_documented_update_is_ppos_own(execution, optimizer):
    """One minibatch of all steps: the order in which they are drawn does not matter."""
    settings = {"num_mini_batches": 1, "optimizer_class_name": optimizer, "execution": execution, "iterations": 2}
    ours, theirs = trained(PPO, **settings), trained(DocumentedUpdate, **settings)
    for a, b in zip(ours.policy.parameters(), theirs.policy.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


def test_a_scheduler_of_torch_steps_on_the_optimizer():
    alg = PPO(policy(), learning_rate=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(alg.optimizer, 0.5)
    alg.optimizer.zero_grad()
    alg.policy.value(torch.ones(3, 9))[0].mean().backward()
    alg.optimizer.step()
    schedule.step()
    alg.read_learning_rate()
    assert alg.learning_rate == pytest.approx(5e-3)


class ReadsThePass(PPO):
    """A loss on what the policy computed for the minibatch."""

    calm_loss_coef = 0.5

    def compute_losses(self, minibatch):
        losses, inter_vars, stats = super().compute_losses(minibatch)
        mean = self.actor_critic.action_mean
        assert mean.shape == minibatch.old_mu.shape
        losses["calm_loss"] = mean.square().mean()
        stats["spread"] = self.actor_critic.action_std.mean().detach() + 0.0 * self.actor_critic.entropy.mean().detach()
        return losses, inter_vars, stats


@EXECUTIONS
def test_after_compute_losses_the_policy_shows_the_minibatchs_pass(execution):
    alg = trained(ReadsThePass, execution, num_mini_batches=2, iterations=5)
    assert not alg.executor.eager_only
    plain = trained(PPO, execution, num_mini_batches=2, iterations=5)
    assert not torch.equal(alg.policy.actor[0].weight, plain.policy.actor[0].weight)
    assert alg.policy.last_pass[0] is None  # no pass is kept after the update


def test_the_total_loss_weighs_a_users_loss_by_the_attribute_of_its_name():
    alg = trained(ReadsThePass, iterations=1)
    assert alg.loss_weights["calm_loss"] == 0.5
    assert alg.weighted_sum({"calm_loss": torch.tensor(4.0)}) == 2.0


class ReadsTheEstimate(PPO):
    """The documented supervised loss of the estimator."""

    def compute_losses(self, minibatch):
        losses, inter_vars, stats = super().compute_losses(minibatch)
        guess = self.actor_critic.get_estimated_state()
        layout = self.actor_critic.critic_obs_layout
        target = layout.take(minibatch.critic_obs, self.actor_critic.estimator_target_components)
        losses["estimator_loss"] = nn.functional.mse_loss(guess, target, reduction="none").sum(-1).mean()
        return losses, inter_vars, stats


@EXECUTIONS
def test_the_estimate_of_the_pass_can_be_learned_from(execution):
    segments, critic = {"body": (4,), "goal": (2,)}, {"body": (4,), "goal": (2,), "push": (3,)}
    settings = {"estimator_obs_components": ["body"], "estimator_target_components": ["push"]}
    settings |= {"obs_segments": segments, "critic_obs_segments": critic, "estimator_kwargs": {"hidden_sizes": [8]}}
    net = policy(StateAc, **settings)
    before = {name: p.detach().clone() for name, p in net.state_estimator.named_parameters()}
    trained(ReadsTheEstimate, execution, net)
    assert all(not torch.equal(before[name], p) for name, p in net.state_estimator.named_parameters())


class OwnStorage(TPPO):
    """The documented storage of TPPO."""

    def init_storage(self, *args, **kwargs):
        self.made = self.storage = ActionLabelRollout(*args, **{**kwargs, "device": self.device})
        self.transition = ActionLabelRollout.Transition()


@EXECUTIONS
def test_a_storage_that_init_storage_makes_is_used(execution):
    with pytest.warns(UserWarning, match="no teacher"):
        alg = trained(OwnStorage, execution)
    assert alg.storage is alg.made


def test_a_documented_motion_prior_gives_its_rewards_in_the_log():
    assert APPO.process_env_step is not PPO.process_env_step  # canter's own: the runner keeps its fast way


class Counting(RolloutStorage):
    """Counts the documented calls."""

    added = taken = 0

    def add_transitions(self, transition):
        self.added += 1
        super().add_transitions(transition)

    def mini_batch_generator(self, *args, **kwargs):
        for batch in super().mini_batch_generator(*args, **kwargs):
            self.taken += 1
            yield batch


@EXECUTIONS
def test_methods_of_a_storage_are_called(execution):
    class WithCounting(PPO):
        def init_storage(self, *args, **kwargs):
            self.storage = Counting(*args, **kwargs)

    alg = trained(WithCounting, execution, num_mini_batches=2)
    assert (alg.storage.added, alg.storage.taken) == (3 * 24, 3 * 2)


def test_a_method_assigned_to_a_storage_is_called():
    calls = []

    def assign(alg):
        add, generate = alg.storage.add_transitions, alg.storage.mini_batch_generator
        alg.storage.add_transitions = lambda t: (calls.append("add"), add(t))[1]
        alg.storage.mini_batch_generator = lambda *args: (calls.append("take"), generate(*args))[1]

    trained(PPO, iterations=1, prepare=assign)
    assert calls == ["add"] * 24 + ["take"]


def test_init_obs_norm_is_called_by_prepare():
    class Own(PPO):
        def init_obs_norm(self, num_obs, num_critic_obs):
            self.widths = (num_obs.shape, num_critic_obs.shape)

    assert trained(Own).widths == ((6,), (9,))
