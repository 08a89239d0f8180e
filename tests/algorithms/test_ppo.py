"""PPO: its losses by hand, its schedules, and what an update does."""

import math

import pytest
import torch

from canter.algorithms.algorithm import Terms
from canter.algorithms.ppo import PPO, PPOConfig
from canter.modules.actor_critic import ActorCritic
from canter.modules.actors import MLPActor, MLPCritic
from canter.modules.deterministic_policy import DeterministicPolicyMixin
from canter.modules.policy import PolicyOutput
from canter.storage.rollout_storage import MiniBatch


def hand_batch(ratios=(1.0,), advantages=None, values=None, old_values=None, returns=None, valid=None):
    """A minibatch and a policy output with exactly these ratios and values: unit Gaussian, action 0."""
    n = len(ratios)

    def column(x):
        return torch.tensor([0.0] * n if x is None else x).unsqueeze(-1)

    out = PolicyOutput({"mu": torch.zeros(n, 1), "sigma": torch.ones(n, 1)}, column(values), {}, {})
    log_prob = -0.5 * math.log(2 * math.pi)
    batch = MiniBatch(
        actions=torch.zeros(n, 1),
        advantages=column(advantages),
        values=column(old_values),
        returns=column(returns),
        old_actions_log_prob=log_prob - torch.tensor(ratios).log().unsqueeze(-1),
        old_params={"mu": torch.zeros(n, 1), "sigma": torch.ones(n, 1)},
        valid=valid,
    )
    return batch, out


def terms(batch, **settings):
    return PPO(ActorCritic(1, 1), **settings).loss_terms(*batch)


@pytest.mark.parametrize("name", ["schedule", "clip_schedule", "timeout_bootstrap"])
def test_an_unknown_choice_is_an_error_that_lists_the_known(name):
    with pytest.raises(ValueError, match=f"{name} must be one of .*, got 'cosine'"):
        PPO(ActorCritic(3, 2), **{name: "cosine"})


def test_a_config_object_gives_every_setting():
    cfg = PPOConfig(gamma=0.5, learning_rate=0.25, clip_param=0.1, seed=7)
    alg = PPO(ActorCritic(3, 2), cfg=cfg)
    assert (alg.gamma, float(alg.lr), alg.schedule, alg.seed) == (0.5, 0.25, "adaptive", 7)
    assert float(alg.clip) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="give gamma in cfg, not beside it"):
        PPO(ActorCritic(3, 2), cfg=cfg, gamma=0.9)


def test_a_device_given_as_such_beats_the_configs():
    assert PPO(ActorCritic(3, 2), cfg=PPOConfig(device="cuda:99"), device=torch.device("cpu")).device.type == "cpu"
    with pytest.raises(ValueError, match="'cuda:99' is not available"):
        PPO(ActorCritic(3, 2), cfg=PPOConfig(device="cuda:99"))


def test_a_ready_actor_and_critic_are_taken_as_they_are(noise_env):
    env = noise_env("mlp")
    actor, critic = MLPActor(env.obs_space, env.action_space), MLPCritic(env.critic_obs_space)
    alg = PPO(env=env, actor=actor, critic=critic)
    assert alg.policy.actor is actor
    assert alg.policy.critic is critic


def test_without_a_policy_the_error_names_what_is_missing():
    with pytest.raises(ValueError, match=r"PPO needs a policy.*actor_class and critic_class and env"):
        PPO()
    with pytest.raises(ValueError, match=r"or critic_class$"):
        PPO(env="Pendulum-v1", actor_class=MLPActor)


def test_learning_without_an_environment_says_so():
    with pytest.raises(ValueError, match="need an environment"):
        PPO(ActorCritic(3, 2)).learn(1)


def test_the_surrogate_is_the_pessimistic_one():  # clip 0.2
    #   ratio 1.5, A +1: max(-1.5, -1.2) = -1.2     ratio 0.5, A -1: max(0.5, 0.8) = 0.8
    #   ratio 1.5, A -1: max(1.5, 1.2) = 1.5        ratio 0.5, A +1: max(-0.5, -0.8) = -0.5
    losses, inter_vars, stats = terms(hand_batch([1.5, 0.5, 1.5, 0.5], [1.0, -1.0, -1.0, 1.0]))
    assert losses["surrogate_loss"] == pytest.approx((-1.2 + 0.8 + 1.5 - 0.5) / 4)
    torch.testing.assert_close(inter_vars["ratio"], torch.tensor([1.5, 0.5, 1.5, 0.5]))
    torch.testing.assert_close(inter_vars["surrogate"], torch.tensor([-1.5, 0.5, 1.5, -0.5]))
    torch.testing.assert_close(inter_vars["surrogate_clipped"], torch.tensor([-1.2, 0.8, 1.2, -0.8]))
    assert stats["clip_fraction"] == 1.0
    expected = ((0.5 - math.log(1.5)) + (-0.5 - math.log(0.5))) / 2  # mean of r - 1 - log r
    assert stats["approx_kl"] == pytest.approx(expected)


def test_the_value_loss_is_the_mean_of_maxima():
    # first: V 1, old 0, R 0: clipped 0.2, max(1, 0.04) = 1; second: V 0, old 1, R 0: clipped 0.8, max(0, 0.64) = 0.64.
    # The max of the two means would be 0.5.
    batch = hand_batch([1.0, 1.0], values=[1.0, 0.0], old_values=[0.0, 1.0], returns=[0.0, 0.0])
    losses, inter_vars, _ = terms(batch)
    assert losses["value_loss"] == pytest.approx(0.82)
    torch.testing.assert_close(inter_vars["value_clipped"], torch.tensor([0.2, 0.8]))
    losses, inter_vars, _ = terms(batch, use_clipped_value_loss=False)
    assert losses["value_loss"] == pytest.approx(0.5)
    assert "value_clipped" not in inter_vars


def test_steps_that_only_reset_are_left_out_of_every_mean():
    valid = torch.tensor([True, False])
    batch = hand_batch([1.5, 1e30], [1.0, 7.0], [1.0, 9.0], [1.0, 0.0], [0.0, 5.0], valid)
    losses, _, stats = terms(batch)
    assert losses["surrogate_loss"] == pytest.approx(-1.2)
    assert losses["value_loss"] == pytest.approx(1.0)
    assert stats["approx_kl"] == pytest.approx(0.5 - math.log(1.5))
    assert stats["clip_fraction"] == 1.0


def test_a_ratio_that_overflows_in_a_step_that_only_reset_leaves_the_gradient_finite():
    batch, out = hand_batch([1.0, 1.0], [2.0, 7.0], valid=torch.tensor([True, False]))
    batch.actions.fill_(3.0)
    batch.old_actions_log_prob[0] -= (
        4.5  # the log-probability of an action three deviations from the mean: a ratio of 1
    )
    batch.old_actions_log_prob[1] = -1000.0
    out.params["mu"].requires_grad_()
    (gradient,) = torch.autograd.grad(terms((batch, out)).losses["surrogate_loss"], out.params["mu"])
    torch.testing.assert_close(gradient, torch.tensor([[-6.0], [0.0]]))  # -A r (a - mu)


def test_a_policy_without_noise_has_no_entropy_term():
    class Quiet(DeterministicPolicyMixin, ActorCritic):
        pass

    losses = PPO(Quiet(1, 1)).loss_terms(*hand_batch()).losses
    assert set(losses) == {"surrogate_loss", "value_loss"}


def test_the_kl_is_of_the_old_policy_from_the_new():
    batch, out = hand_batch()
    out.params["mu"], out.params["sigma"] = torch.tensor([[0.5]]), torch.tensor([[2.0]])
    kl = PPO(ActorCritic(1, 1), schedule="adaptive").loss_terms(batch, out).stats["kl"]
    normal = torch.distributions.Normal
    assert kl == pytest.approx(float(torch.distributions.kl_divergence(normal(0.0, 1.0), normal(0.5, 2.0))))


def test_advantages_can_be_normalised_in_each_minibatch(make_ppo, collect):
    surrogate = terms(hand_batch([1.0] * 3, [1.0, 2.0, 6.0]), normalize_advantage_per_mini_batch=True).inter_vars
    torch.testing.assert_close(-surrogate["surrogate"], torch.tensor([-2.0, -1.0, 3.0]) / 7**0.5)
    alg, env = make_ppo(normalize_advantage_per_mini_batch=True)
    collect(alg, env)
    torch.testing.assert_close(alg.rollout.advantages, alg.rollout.returns - alg.rollout.values)


@pytest.mark.parametrize(
    ("kl", "before", "after"),
    [
        (1.0, 1e-3, 1e-3 / 1.5),
        (0.0201, 1e-3, 1e-3 / 1.5),  # above twice the desired KL
        (0.0199, 1e-3, 1e-3),
        (0.0051, 1e-3, 1e-3),
        (0.0049, 1e-3, 1.5e-3),  # below half of it
        (1.0, 1.2e-5, 1e-5),
        (1e-4, 1e-3, 1.5e-3),
        (1e-4, 9e-3, 1e-2),
        (1.0, 3e-2, 2e-2),  # a rate outside of the bounds is not moved to the other one
        (1e-4, 2e-6, 3e-6),
        (0.01, 1e-3, 1e-3),
        (0.0, 1e-3, 1e-3),
        (math.nan, 1e-3, 1e-3),
    ],
)
def test_the_learning_rate_follows_the_kl(kl, before, after):
    alg = PPO(ActorCritic(1, 1), learning_rate=before, schedule="adaptive", desired_kl=0.01)
    alg.adapt_learning_rate(torch.tensor(kl))
    assert float(alg.lr) == pytest.approx(after)
    assert alg.optimizer.optimizer.param_groups[0]["lr"] is alg.lr


def test_the_learning_rate_is_changed_before_the_step_that_it_was_measured_for():
    """A gradient of 1 and a rate of 6e-3 that falls to 4e-3: the parameter moves by 4e-3."""
    alg = PPO(ActorCritic(1, 1), learning_rate=6e-3, schedule="adaptive", desired_kl=0.01, optimizer_class_name="SGD")
    bias = alg.policy.critic[-1].bias
    before = bias.detach().clone()
    alg.optimizer_step(Terms({}, {}, {"kl": torch.tensor(1.0)}), bias.sum())
    assert float(before - bias.detach()) == pytest.approx(4e-3, rel=1e-4)


def count_minibatches(alg):
    calls = []
    step = alg.optimizer_step
    alg.optimizer_step = lambda *loss: calls.append(step(*loss)) or calls[-1]
    return calls


def test_the_learning_rate_moves_once_per_minibatch(make_ppo, collect):
    alg, env = make_ppo(
        num_learning_epochs=2, num_mini_batches=3, schedule="adaptive", desired_kl=1e9, learning_rate=1e-5
    )
    collect(alg, env)
    moves = []
    adapt = alg.adapt_learning_rate
    alg.adapt_learning_rate = lambda kl: moves.append(float(kl)) or adapt(kl)
    alg.update(0)
    assert len(moves) == 6
    assert float(alg.lr) == pytest.approx(1e-5 * 1.5 ** sum(kl > 0 for kl in moves))
    assert alg.learning_rate == pytest.approx(float(alg.lr))


def test_linear_schedules_end_at_zero():
    alg = PPO(ActorCritic(1, 1), learning_rate=0.5, schedule="linear", clip_schedule="linear", clip_param=0.2)
    for progress, rate, clip in (
        (0.0, 0.5, 0.2),
        (0.25, 0.375, 0.15),
        (1.0, 0.0, 0.0),
        (1.5, 0.0, 0.0),
        (0.5, 0.25, 0.1),
    ):
        alg.adjust_learning_rate(progress)
        assert float(alg.lr) == alg.learning_rate == pytest.approx(rate)
        assert float(alg.clip) == pytest.approx(clip)
    losses = alg.loss_terms(*hand_batch([1.5], [1.0])).losses
    assert losses["surrogate_loss"] == pytest.approx(-1.1)  # the clip range in use is the scheduled one


@pytest.mark.parametrize(("target_kl", "minibatches"), [(None, 12), (1e9, 12), (1e-9, 3)])
def test_passes_stop_once_the_kl_exceeds_the_target(make_ppo, collect, target_kl, minibatches):
    alg, env = make_ppo(
        num_learning_epochs=4, num_mini_batches=3, learning_rate=0.01, target_kl=target_kl, execution="eager"
    )
    collect(alg, env)
    calls = count_minibatches(alg)
    losses, stats = alg.update(0)
    assert len(calls) == minibatches
    expected = sum(float(values["losses/value_loss"].detach()) for values in calls) / minibatches
    assert losses["value_loss"] == pytest.approx(expected, rel=1e-5)  # a mean over the minibatches there were
    assert stats["approx_kl"] > 0


def test_the_kl_that_stops_is_the_last_passs(make_ppo, collect):
    alg, env = make_ppo(num_learning_epochs=5, num_mini_batches=2, target_kl=0.04, execution="eager")
    collect(alg, env)
    kls = iter([0.01, 0.01, 0.04, 0.05, 0.0, 0.0])  # passes of mean 0.01, then 0.045: the mean of both is below 0.04
    descend = alg.optimizer_step
    alg.optimizer_step = lambda terms, total: descend(terms, total) | {"stats/approx_kl": torch.tensor(next(kls))}
    alg.update(0)
    assert len(list(kls)) == 2


def test_an_update_averages_and_clears_the_storage(make_ppo, collect):
    alg, env = make_ppo(
        num_learning_epochs=2, num_mini_batches=3, value_loss_coef=0.5, entropy_coef=0.1, execution="eager"
    )
    collect(alg, env)
    calls = count_minibatches(alg)
    losses, stats = alg.update(4)
    assert set(losses) == {"surrogate_loss", "value_loss", "entropy", "total_loss"}
    assert alg.rollout.step == 0
    assert alg.current_learning_iteration == 4
    assert len(calls) == 6
    total = losses["surrogate_loss"] + 0.5 * losses["value_loss"] + 0.1 * losses["entropy"]
    assert losses["total_loss"] == pytest.approx(total, rel=1e-5)
    assert losses["no such loss"] == stats["no such number"] == 0.0
    named = {"approx_kl", "clip_fraction", "grad_norm", "nonfinite_updates", "learning_rate", "rollout/mean_value"}
    assert named <= set(stats)
    assert stats["nonfinite_updates"] == 0
    assert stats["policy/mean_noise_std"] == 1.0
    collect(alg, env)
    losses, _ = alg.update(5)
    expected = sum(float(values["losses/value_loss"].detach()) for values in calls[6:]) / 6
    assert losses["value_loss"] == pytest.approx(expected, rel=1e-5)  # of this update alone


def test_a_weight_of_zero_leaves_its_part_alone(make_ppo, collect):
    alg, env = make_ppo(value_loss_coef=0.0)
    collect(alg, env)
    before = {name: p.detach().clone() for name, p in alg.policy.named_parameters()}
    alg.update(0)
    for name, p in alg.policy.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith("critic"), name


@pytest.mark.parametrize(
    ("name", "setting", "owner"),
    [
        ("value_loss", "value_loss_coef", "critic"),
        ("entropy", "entropy_coef", "std"),
        ("surrogate_loss", None, "actor"),
    ],
)
def test_each_loss_reaches_its_own_parameters_by_its_weight(make_ppo, collect, name, setting, owner):
    def gradient(weight):
        alg, env = make_ppo()
        collect(alg, env)
        (batch,) = alg.mini_batches()
        terms = alg.compute_losses(batch)
        alg.loss_weights.update(dict.fromkeys(terms.losses, 0.0) | {name: weight})
        alg.weighted_sum(terms.losses).backward()
        return {key: p.grad.clone() for key, p in alg.policy.named_parameters() if p.grad is not None and p.grad.any()}

    once, twice = gradient(1.0), gradient(2.0)
    owners = {key.partition(".")[0] for key in once}
    assert owners == ({"actor", "std"} if name == "surrogate_loss" else {owner})
    for key, grad in once.items():
        torch.testing.assert_close(twice[key], 2 * grad)
    if setting is not None:
        assert PPO(ActorCritic(1, 1), **{setting: 0.25}).loss_weights[name] == 0.25


def test_a_loss_weighs_its_entry_else_the_attribute_of_its_name_else_one(make_ppo):
    alg, _ = make_ppo(entropy_coef=0.25)
    losses = {"mimic_loss": torch.tensor(8.0), "entropy": torch.tensor(4.0)}
    assert alg.weighted_sum(losses) == 8.0 + 1.0
    alg.mimic_loss_coef = 0.5
    assert alg.weighted_sum(losses) == 4.0 + 1.0
    alg.loss_weights["mimic_loss"] = 2.0
    assert alg.weighted_sum(losses) == 16.0 + 1.0


def test_gradients_are_clipped_before_the_step(make_ppo, collect):
    alg, env = make_ppo(max_grad_norm=0.01)
    collect(alg, env)
    norms = []
    step = alg.optimizer.optimizer.step

    def note():
        norms.append(torch.stack([p.grad.norm() for p in alg.policy.parameters()]).norm())
        step()

    alg.optimizer.optimizer.step = note
    _, stats = alg.update(0)
    assert float(norms[0]) == pytest.approx(0.01, rel=1e-3)
    assert stats["grad_norm"] > 0.1


@pytest.mark.parametrize("floor", [0.3, (0.3, 0.6)])
def test_the_noise_is_kept_above_its_floor_after_each_step(make_ppo, collect, floor):
    alg, env = make_ppo(clip_min_std=floor)
    collect(alg, env)
    with torch.no_grad():
        alg.policy.std.fill_(-1.0)
    alg.update(0)
    torch.testing.assert_close(alg.policy.std.detach(), torch.tensor(floor).expand(2))


def test_the_noise_is_kept_below_its_cap(make_ppo, collect):
    alg, env = make_ppo(clip_max_std=0.5)
    collect(alg, env)
    alg.update(0)
    assert alg.policy.std.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("kind", ["lstm", "lstm_discrete"])
def test_one_environment_per_recurrent_minibatch_keeps_its_axis(make_ppo, collect, kind):
    alg, env = make_ppo(kind, 2, 5, num_mini_batches=2)
    collect(alg, env)
    for batch in alg.mini_batches():
        losses, inter_vars, _ = alg.compute_losses(batch)
        assert all(x.shape == (5, 1) for x in inter_vars.values())
        assert all(loss.dim() == 0 for loss in losses.values())


def test_epochs_and_minibatches_deal_every_step_the_right_number_of_times(make_ppo, collect):
    alg, env = make_ppo(num_learning_epochs=3, num_mini_batches=5, execution="eager")
    collect(alg, env)
    alg.rollout.actions[..., 0] = torch.arange(24.0).view(6, 4)
    seen = []
    alg.learn_step = lambda index: seen.append(alg.rollout.take(index).actions[:, 0].long())
    alg.update(0)
    assert torch.cat(seen).bincount(minlength=24).tolist() == [3] * 24
    assert len({tuple(torch.cat(seen[i : i + 5]).tolist()) for i in (0, 5, 10)}) == 3


# ---------------------------------------------------------------------- from a training dict
def test_from_cfg_builds_policy_and_algorithm_for_an_environment():
    from canter.algorithms import APPO
    from canter.envs import MotionFeatures, PointRobot
    from canter.runners import AmpPolicyRunner

    discriminator = {"input_dim": 4, "style_reward_coef": 1.0, "hidden_dims": [8], "task_reward_lerp": 0.5}
    policy = {"class_name": "AmpActorCritic", "actor_hidden_dims": [8], "amp_discriminator": discriminator}
    cfg = {"num_steps_per_env": 4, "device": "cpu", "policy": policy, "algorithm": {"clip_param": 0.3}}
    cfg["algorithm"] |= {"amp_motion_loader": torch.randn(50, 4), "class_name": "PPO"}
    env = MotionFeatures(PointRobot(8, max_episode_length=6), ["true_velocity"], privileged=True)
    alg = APPO.from_cfg(cfg, env)
    assert type(alg) is APPO
    assert alg.clip_param == 0.3
    assert type(alg.policy).__name__ == "AmpActorCritic"
    assert alg.storage.num_transitions_per_env == 4
    runner = AmpPolicyRunner(env, alg, show_progress=False)
    assert runner.agent is alg
    runner.learn(1)


def test_from_cfg_takes_a_config_object_with_networks_and_a_class_that_is_not_registered(noise_env):
    from canter.algorithms.ppo import PPOConfig
    from canter.modules import MLPActor, MLPCritic

    class Mine(PPO):
        pass

    made = Mine.from_cfg(PPOConfig(gamma=0.9), noise_env(), "cpu", actor_class=MLPActor, critic_class=MLPCritic)
    assert (type(made), made.gamma) == (Mine, 0.9)
    assert Mine.from_cfg({"algorithm": {"gamma": 0.8}, "device": "cpu"}, noise_env()).gamma == 0.8
    with pytest.raises(TypeError, match="Mine has no setting 'gama'|PPO has no setting 'gama'"):
        Mine.from_cfg({"algorithm": {"gama": 0.8}}, noise_env())
    with pytest.raises(ValueError, match="actor_class"):
        Mine.from_cfg(PPOConfig(), noise_env(), "cpu")
