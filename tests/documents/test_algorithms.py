"""The page "algorithms" of st_rl, section by section, except for method bodies pasted into a subclass."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from canter.algorithms import appo, estimator, tppo
from canter.algorithms.appo import APPO, ATPPO, APPOAlgoMixin
from canter.algorithms.estimator import EstimatorAlgoMixin, EstimatorPPO, EstimatorTPPO
from canter.algorithms.ppo import PPO
from canter.algorithms.tppo import TPPO
from canter.modules import ActorCritic, ActorCriticRecurrent, EmpiricalNormalization, StateAc, StateAcRecurrent
from canter.modules.amp_discriminator import AmpActorCritic
from canter.storage import RolloutStorage, split_and_pad_trajectories
from canter.storage.rollout_storage import ActionLabelRollout, AmpRolloutStorage
from canter.utils import unpad_trajectories
from canter.utils.utils import get_subobs_by_components

pytestmark = pytest.mark.filterwarnings("ignore:the teacher has no teacher_ac_path", "ignore:episodes were cut off")
N, T, OBS, CRITIC, ACTIONS = 3, 4, 4, 5, 2
SMALL = {"actor_hidden_dims": [8], "critic_hidden_dims": [8]}
TEACHER = {
    "class_name": "ActorCritic",
    "num_actor_obs": CRITIC,
    "num_critic_obs": CRITIC,
    "num_actions": ACTIONS,
    **SMALL,
}
SEGMENTS, CRITIC_SEGMENTS = {"pose": (4,)}, {"pose": (4,), "velocity": (1,)}
DISCRIMINATOR = {"input_dim": 6, "style_reward_coef": 2.0, "hidden_dims": [8], "task_reward_lerp": 0.25}


def policy_of(cls=ActorCritic, **settings):
    torch.manual_seed(0)
    return cls(OBS, CRITIC, ACTIONS, **SMALL, **settings)


def started(alg, **storage):
    alg.init_storage(N, T, [OBS], [CRITIC], [ACTIONS], **storage)
    return alg


def collect(alg, infos=None, dones=None):
    """One rollout with the documented calls; returns the rewards that were given."""
    torch.manual_seed(1)
    given = []
    for step in range(T):
        alg.act(torch.randn(N, OBS), torch.randn(N, CRITIC))
        rewards = torch.arange(N).float() + 10.0 * step
        given.append(rewards)
        done = torch.zeros(N, dtype=torch.bool) if dones is None else dones[step]
        alg.process_env_step(rewards, done, dict(infos(step) if infos else {}))
    alg.compute_returns(torch.randn(N, CRITIC))
    return torch.stack(given)


def minibatch(alg):
    """All steps in one minibatch, by the documented generator."""
    storage = alg.storage
    make = storage.reccurent_mini_batch_generator if alg.actor_critic.is_recurrent else storage.mini_batch_generator
    return next(iter(make(1, 1)))


# 1. ppo.py
def test_1_2_initialization_by_position_and_defaults():
    defaults = {f.name: f.default for f in dataclasses.fields(PPO.full_settings_class())}
    wanted = {
        "num_learning_epochs": 1,
        "num_mini_batches": 1,
        "clip_param": 0.2,
        "gamma": 0.998,
        "lam": 0.95,
        "value_loss_coef": 1.0,
        "entropy_coef": 0.0,
        "learning_rate": 1e-3,
        "max_grad_norm": 1.0,
        "use_clipped_value_loss": True,
        "clip_min_std": 1e-15,
        "optimizer_class_name": "Adam",
        "schedule": "fixed",
        "desired_kl": 0.01,
        "empirical_normalization": False,
    }
    assert {name: defaults[name] for name in wanted} == wanted
    given = (2, 3, 0.1, 0.9, 0.8, 0.5, 0.01, 1e-4, 0.7, False, 1e-3, "SGD", "adaptive", 0.02, "cpu", True)
    alg = PPO(policy_of(), *given)
    names = [name for name in wanted if name != "empirical_normalization"] + ["device", "empirical_normalization"]
    assert [str(v) if (n, v) == ("device", alg.device) else v for n in names for v in (getattr(alg, n),)] == list(given)
    assert isinstance(alg.actor_critic, ActorCritic)
    assert isinstance(TPPO(policy_of(), 2, teacher_policy=TEACHER), PPO)


def test_1_3_observation_normalization():
    alg = PPO(policy_of(), empirical_normalization=True)
    alg.init_obs_norm(OBS, CRITIC)
    assert isinstance(alg.obs_normalizer, EmpiricalNormalization)
    assert alg.critic_obs_normalizer.mean.shape == (CRITIC,)
    plain = PPO(policy_of())
    plain.init_obs_norm(OBS, CRITIC)  # documented to raise; on purpose it does not
    assert isinstance(plain.obs_normalizer, nn.Identity)


def test_1_3_normalised_observations_are_not_normalised_twice():
    alg = PPO(policy_of(), empirical_normalization=True)
    alg.init_obs_norm(OBS, CRITIC)
    alg.obs_normalizer.update(3.0 * torch.randn(50, OBS) + 7.0)
    alg.eval_mode()
    obs = 3.0 * torch.randn(N, OBS) + 7.0
    once = alg.actor_critic.act_inference(obs)
    torch.testing.assert_close(alg.actor_critic.act_inference(alg.obs_normalizer(obs)), once)
    critic_obs = torch.randn(N, CRITIC)
    value = alg.actor_critic.evaluate(critic_obs)
    torch.testing.assert_close(alg.actor_critic.evaluate(alg.critic_obs_normalizer(critic_obs)), value)
    started(alg)
    with pytest.raises(ValueError, match="normalised already"):
        alg.act(alg.obs_normalizer(obs), critic_obs)


def test_1_4_rollout_storage():
    alg = started(PPO(policy_of()))
    assert isinstance(alg.storage, RolloutStorage)
    assert isinstance(alg.transition, RolloutStorage.Transition)
    assert alg.storage.observations.shape == (T, N, OBS)
    assert alg.storage.privileged_observations.shape == (T, N, CRITIC)
    assert alg.storage.actions.shape == (T, N, ACTIONS)


@pytest.mark.parametrize("cls", [ActorCritic, ActorCriticRecurrent])
def test_1_5_act_fills_the_transition(cls):
    alg = started(PPO(policy_of(cls)))
    obs, critic_obs = torch.randn(N, OBS), torch.randn(N, CRITIC)
    actions = alg.act(obs, critic_obs)
    step = alg.transition
    torch.testing.assert_close(step.actions, actions)
    assert (step.values.shape, step.action_mean.shape) == ((N, 1), (N, ACTIONS))
    torch.testing.assert_close(step.action_sigma.expand(N, ACTIONS), torch.ones(N, ACTIONS))
    expected = torch.distributions.Normal(step.action_mean, step.action_sigma).log_prob(actions).sum(-1)
    torch.testing.assert_close(step.actions_log_prob.flatten(), expected)
    assert step.observations is obs
    assert step.critic_observations is critic_obs


def test_1_6_a_time_out_adds_the_discounted_value():
    alg = started(PPO(policy_of(), gamma=0.5))
    alg.act(torch.randn(N, OBS), torch.randn(N, CRITIC))
    values = alg.transition.values.squeeze(-1).clone()
    dones = torch.tensor([True, True, False])
    # Documented: where time_outs says so. On purpose only where the episode ended too.
    alg.process_env_step(torch.ones(N), dones, {"time_outs": torch.tensor([True, False, True])})
    for _ in range(T - 1):
        alg.act(torch.randn(N, OBS), torch.randn(N, CRITIC))
        alg.process_env_step(torch.ones(N), torch.zeros(N, dtype=torch.bool), {})
    alg.compute_returns(torch.zeros(N, CRITIC))
    stored = alg.storage.rewards[0].squeeze(-1)
    torch.testing.assert_close(stored, torch.tensor([1.0 + 0.5 * values[0], 1.0, 1.0]))


def test_1_7_returns_by_hand():
    alg = started(PPO(policy_of(), gamma=0.9, lam=0.8))
    rewards = collect(alg)
    data = alg.storage.data
    values = data["values"].squeeze(-1)
    torch.manual_seed(1)
    for _ in range(T):
        torch.randn(N, OBS), torch.randn(N, CRITIC)
    with torch.no_grad():
        last = alg.actor_critic.evaluate(alg.storage.privileged_observations[-1]) * 0
    following = torch.cat([values[1:], last.squeeze(-1)[None]])
    delta = (rewards + 0.9 * following - values)[:-1]  # of the steps that another one follows
    advantage = data["returns"].squeeze(-1) - values
    torch.testing.assert_close(advantage[:-1], delta + 0.9 * 0.8 * advantage[1:])


def test_1_8_update_returns_mean_losses_and_statistics():
    alg = started(PPO(policy_of(), num_learning_epochs=2, num_mini_batches=2))
    collect(alg)
    losses, stats = alg.update(7)
    assert {"surrogate_loss", "value_loss", "entropy", "total_loss"} <= losses.keys()
    assert isinstance(stats, dict)
    assert alg.current_learning_iteration == 7
    assert alg.storage.step == 0
    alg.actor_critic.clip_std(min=3.0)
    assert alg.actor_critic.noise_std().tolist() == [3.0, 3.0]


@pytest.mark.parametrize("is_clipped", [True, False])
def test_1_9_losses_by_the_documented_formulas(is_clipped):
    alg = started(PPO(policy_of(), use_clipped_value_loss=is_clipped, schedule="adaptive"))
    collect(alg)
    with torch.no_grad():
        for parameter in alg.actor_critic.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    batch = minibatch(alg)
    losses, inter_vars, stats = alg.compute_losses(batch)
    policy = alg.actor_critic
    policy.act(batch.obs)
    log_prob, value = policy.get_actions_log_prob(batch.actions), policy.evaluate(batch.critic_obs)
    ratio = torch.exp(log_prob - batch.old_actions_log_prob.squeeze())
    advantages = batch.advantages.squeeze()
    surrogate = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
    clipped = batch.values + (value - batch.values).clamp(-0.2, 0.2)
    errors = (value - batch.returns).square()
    expected = torch.max(errors, (clipped - batch.returns).square()) if is_clipped else errors
    torch.testing.assert_close(losses["surrogate_loss"], surrogate)
    torch.testing.assert_close(losses["value_loss"], expected.mean())
    torch.testing.assert_close(losses["entropy"], -policy.entropy.mean())
    torch.testing.assert_close(inter_vars["ratio"].flatten(), ratio)
    mu, sigma = policy.action_mean, policy.action_std
    kl = torch.log(sigma / batch.old_sigma + 1e-5) - 0.5
    kl = kl + (batch.old_sigma.square() + (batch.old_mu - mu).square()) / (2.0 * sigma.square())
    torch.testing.assert_close(inter_vars["kl"].flatten(), kl.sum(-1), rtol=1e-3, atol=1e-4)
    assert isinstance(stats, dict)


@pytest.mark.parametrize(("desired", "factor"), [(1e-9, 1 / 1.5), (1e9, 1.5)])
def test_1_9_the_adaptive_schedule(desired, factor):
    alg = started(PPO(policy_of(), schedule="adaptive", desired_kl=desired, num_learning_epochs=2))
    collect(alg)
    alg.update(0)
    # The first epoch has a KL of 0 or of rounding, the second one that of one step.
    assert alg.learning_rate == pytest.approx(1e-3 * factor, rel=0.51)
    assert (alg.learning_rate < 1e-3) == (factor < 1)


def test_1_10_state_dict_and_load_state_dict():
    alg = TPPO(policy_of(), teacher_policy=TEACHER, lr_scheduler_class_name="StepLR", lr_scheduler={"step_size": 2})
    assert alg.lr_scheduler.state_dict()["step_size"] == 2
    assert not hasattr(PPO(policy_of()), "lr_scheduler")
    state = alg.state_dict()
    assert {"model_state_dict", "optimizer_state_dict", "lr_scheduler_state_dict"} <= state.keys()
    with pytest.warns(UserWarning, match="learning-rate scheduler"):
        PPO(policy_of()).load_state_dict(state)
    old = {f"obs_normalizer.{name}": value for name, value in EmpiricalNormalization(OBS).state_dict().items()}
    fresh = PPO(policy_of(), empirical_normalization=True)
    fresh.init_obs_norm(OBS, CRITIC)
    state = fresh.state_dict()
    assert old.keys() <= state["model_state_dict"].keys()  # documented as obs_norm_state_dict, which is read too
    weights = {n: v for n, v in state["model_state_dict"].items() if "normalizer" not in n}
    statistics = EmpiricalNormalization(OBS)
    statistics.update(torch.full((4, OBS), 3.0))
    critics = EmpiricalNormalization(CRITIC)
    foreign = {"obs_norm_state_dict": statistics.state_dict(), "critic_obs_norm_state_dict": critics.state_dict()}
    fresh.load_state_dict({**state, "model_state_dict": weights, **foreign})
    assert fresh.obs_normalizer.mean.tolist() == [3.0] * OBS


# 2. appo.py
@pytest.mark.parametrize("module", [appo, tppo])
def test_2_get_prob_func(module):
    assert module.GET_PROB_FUNC(option="linear", iteration_scale=10)(4) == pytest.approx(0.6)
    assert module.GET_PROB_FUNC("linear", 10)(40) == 0.0
    assert module.GET_PROB_FUNC("exp", 10)(2) == pytest.approx(0.81)
    assert module.GET_PROB_FUNC("tanh", 10)(20) == pytest.approx(0.5 * (1 - math.tanh(1.0)))
    with pytest.raises(ValueError, match="unknown schedule 'cosine'"):  # documented: KeyError
        module.GET_PROB_FUNC("cosine", 10)


def amp_infos(step):
    windows = torch.arange(6.0).view(1, 2, 3).expand(N, 2, 3) + step
    return {"observations": {"ref_obs": windows}, "ref_motion": -windows.flatten(1), "log": {}}


@pytest.mark.parametrize(("cls", "more"), [(APPO, {}), (ATPPO, {"teacher_policy": TEACHER})])
def test_2_appo_and_atppo_learn_from_ref_obs_and_ref_motion(cls, more):
    policy = policy_of(AmpActorCritic, amp_discriminator=DISCRIMINATOR)
    settings = {"discriminator_loss_coef": 1.0, "mimic_loss_coef": 0.0, "amp_obs_dim": 6}
    alg = started(cls(policy, **settings, **more))
    assert isinstance(alg, APPOAlgoMixin)
    assert isinstance(alg, PPO)
    assert issubclass(ATPPO, TPPO)
    assert isinstance(alg.storage, AmpRolloutStorage)
    collect(alg, amp_infos)
    batch = minibatch(alg)
    assert batch.ref_obs.shape == batch.ref_motion.shape == (N * T, 6)
    assert batch.action_labels.shape == (N * T, ACTIONS)
    losses, _ = alg.update(0)
    # Documented as discriminator_grad_len_loss.
    names = {"discriminator_expert_loss", "discriminator_policy_loss", "discriminator_grad_pen_loss"}
    assert names <= losses.keys()


def test_2_the_discriminators_losses_by_the_documented_formulas():
    policy = policy_of(AmpActorCritic, amp_discriminator=DISCRIMINATOR)
    expert, mine = torch.randn(7, 6), torch.randn(7, 6)
    losses, _ = policy.discriminator.adversarial_losses(expert, mine)
    expert_d, policy_d = policy.discriminator(expert), policy.discriminator(mine)
    torch.testing.assert_close(losses["discriminator_expert_loss"], 0.5 * F.mse_loss(expert_d, torch.ones(7, 1)))
    torch.testing.assert_close(losses["discriminator_policy_loss"], 0.5 * F.mse_loss(policy_d, -torch.ones(7, 1)))
    torch.testing.assert_close(losses["discriminator_grad_pen_loss"], policy.discriminator.compute_grad_pen(expert))


def test_2_two_normalisers_hide_from_the_discriminator_where_the_policy_goes():
    """Why AMP with the documented two normalisers may go the wrong way: both see motion of mean 0 and spread 1."""
    noise = torch.randn(200, 6)
    ahead, backwards = 1.0 + 0.1 * noise, -1.0 + 0.1 * noise
    of_expert, of_policy, of_both = (EmpiricalNormalization(6, eps=0.0) for _ in range(3))
    torch.testing.assert_close(of_expert(ahead), of_policy(backwards), rtol=0, atol=1e-4)
    of_both.update(torch.cat([ahead, backwards]))
    of_both.eval()
    assert (of_both(ahead) - of_both(backwards)).min() > 1.0


# 3. tppo.py
def test_3_1_defaults():
    defaults = {f.name: f.default for f in dataclasses.fields(TPPO.full_settings_class())}
    wanted = {
        "ppo": None,
        "teacher_policy_class_name": "ActorCritic",
        "label_action_with_critic_obs": True,
        "teacher_act_prob": "exp",
        "update_times_scale": 100,
        "using_ppo": True,
        "distillation_loss_coef": 1.0,
        "distill_target": "real",
        "distill_latent_coef": 1.0,
        "distill_latent_target": "real",
        "distill_latent_obs_component_mapping": None,
        "buffer_dilation_ratio": 1.0,
        "lr_scheduler_class_name": None,
        "hidden_state_resample_prob": 0.0,
        "action_labels_from_sample": False,
    }
    assert {name: defaults[name] for name in wanted} == wanted


def test_3_2_to_3_5_the_teacher_labels_every_step(tmp_path):
    torch.manual_seed(4)
    saved = ActorCritic(CRITIC, CRITIC, ACTIONS, **SMALL)
    torch.save({"model_state_dict": saved.state_dict()}, tmp_path / "teacher.pt")
    teacher = {**TEACHER, "teacher_ac_path": str(tmp_path / "teacher.pt")}
    alg = started(TPPO(policy_of(), teacher_policy=teacher, teacher_act_prob=0.0))
    assert isinstance(alg.storage, ActionLabelRollout)
    assert not alg.teacher_actor_critic.training
    collect(alg)
    labels = saved.act_inference(alg.storage.privileged_observations.flatten(0, 1)).unflatten(0, (T, N))
    torch.testing.assert_close(alg.storage.action_labels, labels)
    assert alg.use_teacher_act_mask.shape == (N,)


@pytest.mark.parametrize(
    ("target", "distance"),
    [
        ("real", lambda d: d.norm(dim=-1)),
        ("mse_sum", lambda d: d.square().sum(-1)),
        ("l1", lambda d: d.norm(dim=-1, p=1)),
    ],
)
def test_3_6_distillation_loss(target, distance):
    alg = started(
        TPPO(policy_of(), teacher_policy=TEACHER, distill_target=target, using_ppo=False, teacher_act_prob=0.0)
    )
    collect(alg)
    batch = minibatch(alg)
    losses, _, _ = alg.compute_losses(batch)
    alg.actor_critic.act(batch.obs)
    expected = distance(alg.actor_critic.action_mean - batch.action_labels).mean()
    torch.testing.assert_close(losses["distillation_loss"], expected)
    assert "surrogate_loss" not in losses


# 4. estimator.py
@pytest.mark.parametrize(
    ("cls", "policy_class", "more"),
    [
        (EstimatorPPO, StateAc, {}),
        (EstimatorPPO, StateAcRecurrent, {}),
        (EstimatorTPPO, StateAc, {"teacher_policy": TEACHER}),
    ],
)
def test_4_estimation_loss(cls, policy_class, more):
    settings = {"estimator_target_components": ["velocity"], "obs_segments": SEGMENTS}
    policy = policy_of(policy_class, **settings, critic_obs_segments=CRITIC_SEGMENTS)
    alg = started(cls(policy, estimator_loss_func="l1_loss", estimator_loss_kwargs={}, **more))
    assert isinstance(alg, EstimatorAlgoMixin)
    assert estimator.EstimatorTPPO.__bases__ == (EstimatorAlgoMixin, TPPO)
    assert alg.estimator_loss_func == "l1_loss"
    assert list(policy.estimator_target_components) == ["velocity"]
    collect(alg)
    batch = minibatch(alg)
    losses, _, _ = alg.compute_losses(batch)
    target = get_subobs_by_components(
        batch.critic_obs, component_names=["velocity"], obs_segments=policy.privileged_obs_segments
    )
    out = policy(batch.obs, batch.critic_obs, batch.hidden, batch.trajectories)
    expected = F.l1_loss(out.aux["estimated_state"], target, reduction="none").sum(-1).mean()
    torch.testing.assert_close(losses["estimator_loss"], expected)


def test_4_unpad_trajectories_undoes_the_padding():
    steps = torch.arange(6.0).view(3, 2, 1)  # (T, N, 1)
    dones = torch.tensor([[False, True], [False, False], [False, False]])
    padded, masks = split_and_pad_trajectories(steps, dones)
    assert padded.shape == (3, 3, 1)
    assert masks.sum(0).tolist() == [3, 1, 2]
    torch.testing.assert_close(unpad_trajectories(padded, masks), steps)
