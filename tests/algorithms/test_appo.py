"""Adversarial motion priors: what is stored, what it is worth, what the discriminator learns, what is saved."""

import pytest
import torch

from canter.algorithms import Estimation, MotionPrior, Teacher
from canter.algorithms.algorithm import Terms
from canter.algorithms.appo import APPO, ATPPO
from canter.algorithms.ppo import PPO
from canter.modules import ActorCritic, ActorCriticRecurrent, AmpMixin, EstimatorMixin
from canter.modules.amp_discriminator import AmpActorCritic, AmpActorCriticRecurrent

FRAMES, WIDTH = 2, 3
DISCRIMINATOR = {"input_dim": 6, "style_reward_coef": 2.0, "hidden_dims": [8], "task_reward_lerp": 0.25}
KINDS = {"mlp": AmpActorCritic, "lstm": AmpActorCriticRecurrent}
D_LOSSES = {"discriminator_expert_loss", "discriminator_policy_loss", "discriminator_grad_pen_loss"}


def amp_env(noise_env, gives_final=False, gives_motion=True, ref=None, motion=None, **settings):
    """Noise with motion features: 100 * env + step in the first column, so that every row is known."""

    class AmpEnv(noise_env):
        t = 0

        def features(self, sign):
            number = 100.0 * torch.arange(self.num_envs) + self.t
            return sign * (number.view(-1, 1, 1) + 0.1 * torch.arange(6.0).view(1, FRAMES, WIDTH))

        def step(self, actions):
            record = super().step(actions)
            self.t += 1
            extras = {"observations": {"ref_obs": self.features(1.0) if ref is None else ref(self)}}
            if gives_motion:
                extras["ref_motion"] = (self.features(-1.0) if motion is None else motion(self)).flatten(1)
            if gives_final:
                extras["final_observation"] = {"obs": record.final_obs, "ref_obs": self.features(1.0) + 1000.0}
            return record._replace(extras=extras)

    return AmpEnv(**settings)


@pytest.fixture
def make_appo(noise_env):
    def make(kind="mlp", num_steps=6, env=None, algorithm=APPO, discriminator=None, env_cfg=None, **settings):
        torch.manual_seed(0)
        env = env or amp_env(noise_env, **(env_cfg or {}))
        sizes = {"actor_hidden_dims": (8,), "critic_hidden_dims": (8,)}
        sizes |= {"rnn_hidden_size": 8} if kind == "lstm" else {}
        policy = KINDS[kind](3, 5, 2, amp_discriminator={**DISCRIMINATOR, **(discriminator or {})}, **sizes)
        alg = algorithm(policy, **{"seed": 3, **settings})
        alg.prepare(env, num_steps)
        return alg, env

    return make


def separable(noise_env, **settings):
    def near(value):
        return lambda env: value + 0.1 * torch.randn(env.num_envs, 6, generator=env.generator)

    return amp_env(noise_env, ref=near(-1.0), motion=near(1.0), **settings)


def test_the_width_of_features_is_the_discriminators(make_appo):
    assert make_appo()[0].motion_prior.width == 6
    assert make_appo(amp_obs_dim=6)[0].motion_prior.width == 6
    with pytest.raises(ValueError, match="amp_obs_dim is 7, the discriminator's input is 6"):
        make_appo(amp_obs_dim=7)


def test_a_policy_without_a_discriminator_is_refused(make_policy):
    with pytest.raises(ValueError, match="APPO needs a policy with a discriminator, such as AmpActorCritic"):
        APPO(make_policy())


@pytest.mark.parametrize("log", [{}, {"log": {"mine": 1.0}}])
def test_style_and_task_reward_are_told_in_the_log(make_appo, log):
    alg, env = make_appo()
    alg.act(*env.get_observations())
    infos = {"observations": {"ref_obs": torch.zeros(4, 6)}, "ref_motion": torch.zeros(4, 6), **log}
    alg.process_env_step(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(4), infos)
    assert infos["log"]["Episode_Reward/task_reward"] == 2.5
    d = alg.policy.discriminator(torch.zeros(1, 6))
    style = 2.0 * (1 - 0.25 * (d - 1).square()).clamp(min=0)
    assert infos["log"]["Episode_Reward/style_reward"] == pytest.approx(style.item(), abs=1e-6)
    assert ("mine" in infos["log"]) == ("log" in log)


@pytest.mark.parametrize("name", ["ref_obs", "ref_motion"])
def test_missing_features_are_named(make_appo, name):
    alg, env = make_appo()
    alg.act(*env.get_observations())
    infos = {"observations": {"ref_obs": torch.zeros(4, 6)}, "ref_motion": torch.zeros(4, 6)}
    infos = {"ref_motion": infos["ref_motion"]} if name == "ref_obs" else {"observations": infos["observations"]}
    with pytest.raises(KeyError, match=name):
        alg.process_env_step(torch.zeros(4), torch.zeros(4), infos)


def test_features_of_another_width_are_refused(make_appo):
    alg, env = make_appo()
    alg.act(*env.get_observations())
    infos = {"observations": {"ref_obs": torch.zeros(4, 2, 2)}, "ref_motion": torch.zeros(4, 6)}
    with pytest.raises(ValueError, match="is 4 wide, the discriminator's input 6"):
        alg.process_env_step(torch.zeros(4), torch.zeros(4), infos)


def constant_discriminator(alg, d):
    with torch.no_grad():
        alg.policy.discriminator.head.weight.zero_()
        alg.policy.discriminator.head.bias.fill_(d)


def test_the_stored_reward_is_the_blend_and_the_record_stays_raw(make_appo):
    alg, env = make_appo(env_cfg={"end_prob": 0.0})
    constant_discriminator(alg, 0.0)
    obs, given = env.get_observations(), []
    for _ in range(3):
        record = env.step(alg.act(*obs))
        alg.process_step(record)
        obs = record.obs, record.critic_obs
        given.append(record.reward)
    alg.compute_returns(record.critic_obs)
    torch.testing.assert_close(alg.rollout.rewards[:3, :, 0], 0.75 * 1.5 + 0.25 * torch.stack(given))
    assert torch.equal(alg.rollout.env_rewards[:3, :, 0], torch.stack(given))


def test_a_transition_across_a_reset_never_enters(make_appo, collect):
    alg, env = make_appo(env_cfg={"end_prob": 0.5}, timeout_bootstrap="none")
    constant_discriminator(alg, 1.0)
    collect(alg, env)
    dones = alg.rollout.dones
    assert dones.any()
    assert torch.equal(alg.rollout.ref_valid, ~dones)
    task_only = alg.rollout.rewards[dones]
    assert (alg.rollout.rewards[~dones].mean() - task_only.mean()).abs() > 0.7  # 0.75 * 2 of style
    counted = alg.compute_losses(next(alg.mini_batches())).stats["amp/policy_d"]
    alg.rollout.ref_obs.masked_fill_(dones, float("inf"))
    again = alg.compute_losses(next(alg.mini_batches())).stats["amp/policy_d"]
    assert counted == again == 1.0


def test_the_last_state_of_an_episode_is_used_where_it_is_known(make_appo, collect):
    alg, env = make_appo(env_cfg={"end_prob": 0.5, "gives_final": True})
    collect(alg, env)
    assert alg.rollout.ref_valid.all()
    t = torch.arange(1, 7).view(-1, 1) + 100.0 * torch.arange(4)
    torch.testing.assert_close(alg.rollout.ref_obs[..., 0], t + 1000.0 * alg.rollout.dones.squeeze(-1))


def test_steps_that_only_reset_are_left_out(make_appo, collect):
    alg, env = make_appo(env_cfg={"end_prob": 0.4, "has_invalid_steps": True, "gives_final": True})
    collect(alg, env)
    assert torch.equal(alg.rollout.ref_valid, alg.rollout.valid)
    assert not alg.rollout.valid.all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["own", "shared"])
def test_the_weight_of_the_discriminators_losses_is_a_weight(make_appo, collect, kind, optimizer):
    gradients = {}
    for coef in (1.0, 2.0, 0.0):
        alg, env = make_appo(kind, discriminator_loss_coef=coef, discriminator_optimizer=optimizer)
        collect(alg, env)
        terms = alg.compute_losses(next(alg.mini_batches()))
        assert (terms.losses.keys() >= D_LOSSES) == (coef != 0.0)
        assert not D_LOSSES & terms.losses.keys() or coef
        parameters = list(alg.policy.discriminator.parameters())
        total = alg.weighted_sum(terms.losses)
        gradients[coef] = torch.autograd.grad(total, parameters, allow_unused=True)
        before = [p.detach().clone() for p in parameters]
        losses, _ = alg.update(0)
        assert (losses.keys() >= D_LOSSES) == (coef != 0.0)
        assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True)) == (coef == 0.0)
    for one, two in zip(gradients[1.0], gradients[2.0], strict=True):
        torch.testing.assert_close(2.0 * one, two)
    assert all(g is None for g in gradients[0.0])


@pytest.mark.parametrize("loss_type", ["lsgan", "bce", "wgan"])
def test_the_discriminator_learns_to_tell_them_apart(make_appo, collect, noise_env, loss_type):
    cfg = {"loss_type": loss_type, "discriminator_grad_pen": 0.01}
    alg, env = make_appo(env=separable(noise_env), discriminator=cfg, discriminator_learning_rate=0.02)
    for iteration in range(50):
        collect(alg, env)
        _, stats = alg.update(iteration)
    assert stats["amp/expert_d"] > 0.5
    assert stats["amp/policy_d"] < stats["amp/expert_d"] - 0.5
    assert stats["amp/accuracy"] == 1.0


def test_statistics_are_taken_once_per_iteration_from_equal_shares(make_appo, collect, noise_env):
    alg, env = make_appo(env=separable(noise_env), num_learning_epochs=3)
    collect(alg, env)
    assert alg.ref_obs_normalizer.count == 0
    alg.update(0)
    used = alg.rollout.ref_valid.sum() + 24
    assert alg.ref_obs_normalizer.count == used
    assert alg.ref_obs_normalizer.mean.abs().max() < 0.35  # of -1 and 1
    alg.eval_mode()
    collect(alg, env)
    alg._update_normalizers()
    assert alg.ref_obs_normalizer.count == used


@pytest.mark.parametrize("separate", [False, True])
def test_the_discriminator_sees_normalised_features_of_policy_and_expert(make_appo, separate):
    """A mean of 2 and a scale of 4: 6 is 1 and -2 is -1; with separate statistics the expert's scale is 8."""
    alg, _ = make_appo(separate_amp_normalizers=separate)
    prior, seen = alg.motion_prior, []
    for normalizer, scale in ((prior.ref_motion_normalizer, 8.0), (prior.ref_obs_normalizer, 4.0)):
        normalizer._mean.fill_(2.0)
        normalizer._std.fill_(scale - normalizer.eps)
    losses = prior.discriminator.adversarial_losses
    prior.discriminator.adversarial_losses = lambda *args: seen.extend(args) or losses(*args)
    rows = {"ref_motion": torch.full((5, 6), 6.0), "ref_obs": torch.full((5, 6), -2.0)}
    rows |= {"ref_valid": torch.ones(5, dtype=torch.bool), "ref_motion_valid": torch.ones(5, dtype=torch.bool)}
    prior.add_adversarial_losses(Terms({}, rows, {}))
    expert, policy, *_ = seen
    torch.testing.assert_close(expert, torch.full((5, 6), 0.5 if separate else 1.0))
    torch.testing.assert_close(policy, torch.full((5, 6), -1.0))


def test_mimic_loss_is_a_number_without_a_gradient(make_appo, collect):
    results = {}
    for coef in (0.0, 3.0):
        if coef:
            with pytest.warns(UserWarning, match="mimic_loss has no gradient"):
                alg, env = make_appo(mimic_loss_coef=coef)
        else:
            alg, env = make_appo()
        collect(alg, env)
        terms = alg.compute_losses(next(alg.mini_batches()))
        results[coef] = terms, torch.autograd.grad(alg.weighted_sum(terms.losses), list(alg.policy.parameters()))
        batch = next(alg.mini_batches())
        rows = [alg.motion_prior.normalized(getattr(batch, name), "policy") for name in ("ref_obs", "ref_motion")]
        error = torch.linalg.vector_norm(rows[0] - rows[1], dim=-1)[batch.ref_valid.squeeze(-1)].mean()
        torch.testing.assert_close(terms.stats["mimic_error"], error)
    assert "mimic_loss" in results[3.0][0].losses
    assert "mimic_loss" not in results[0.0][0].losses
    for plain, mimic in zip(results[0.0][1], results[3.0][1], strict=True):
        assert torch.equal(plain, mimic)


def test_mimic_reward_takes_the_distance_off(make_appo):
    alg, env = make_appo(mimic_reward_coef=0.1)
    constant_discriminator(alg, -1.0)
    alg.act(*env.get_observations())
    ref = torch.zeros(4, 6)
    ref[:, :2] = torch.tensor([3.0, 4.0])
    alg.process_env_step(
        torch.zeros(4), torch.zeros(4), {"observations": {"ref_obs": ref}, "ref_motion": torch.zeros(4, 6)}
    )
    alg.compute_returns(env.get_observations()[1])
    torch.testing.assert_close(alg.rollout.rewards[0], torch.full((4, 1), -0.1 * 5.0 / 1.01))


def test_a_weight_that_leaves_zero_takes_effect_and_eager_agrees(make_appo, collect):
    rewards = []
    for execution in ("eager", "auto"):
        alg, env = make_appo(execution=execution)
        for iteration in range(6):
            if iteration == 5:
                alg.mimic_reward_coef = 0.5
            collect(alg, env)
            rewards.append(alg.rollout.rewards.clone())
            alg.update(iteration)
    assert torch.equal(rewards[5], rewards[11])
    assert rewards[5].mean() < rewards[4].mean()


def test_dagger_needs_a_teacher(make_appo, collect):
    with pytest.raises(ValueError, match="dagger_loss_coef needs a teacher"):
        make_appo(dagger_loss_coef=1.0)
    teacher = {"class_name": "ActorCritic", "num_actor_obs": 5, "num_critic_obs": 5, "num_actions": 2}
    with pytest.warns(UserWarning, match="random"):
        alg, env = make_appo(algorithm=ATPPO, dagger_loss_coef=1.0, teacher_policy=teacher)
    collect(alg, env)
    batch = next(alg.mini_batches())
    out = alg.policy(batch.obs, batch.critic_obs)
    terms = alg.loss_terms(batch, out)
    torch.testing.assert_close(terms.losses["dagger_loss"], (out.mean - batch.action_labels).norm(dim=-1).mean())
    assert {"surrogate_loss", "distillation_loss", "dagger_loss"} <= terms.losses.keys()


def test_labels_beside_motion_come_from_the_teacher(make_appo, collect):
    teacher = {"class_name": "ActorCritic", "num_actor_obs": 5, "num_critic_obs": 5, "num_actions": 2}
    with pytest.warns(UserWarning, match="random"):
        alg, env = make_appo(algorithm=ATPPO, teacher_policy=teacher, teacher_act_prob=0.5, buffer_dilation_ratio=2.0)
    assert alg.rollout.target == 12  # the ratio reaches the storage
    (policy,) = alg.teacher.policies
    torch.nn.init.zeros_(policy.actor[-1].weight)
    torch.nn.init.constant_(policy.actor[-1].bias, 0.7)
    collect(alg, env)
    assert (alg.rollout.action_labels == 0.7).all()
    alg.update(0)
    collect(alg, env)
    alg.update(1)
    assert alg.rollout.capacity == 12


def test_the_kl_schedule_does_not_touch_the_discriminator(make_appo, collect):
    cfg = {"schedule": "adaptive", "learning_rate": 1e-3, "desired_kl": 1e-9, "num_learning_epochs": 2}
    alg, env = make_appo(**cfg, discriminator_learning_rate=2e-4)
    for iteration in range(3):
        collect(alg, env)
        alg.update(iteration)
    assert alg.learning_rate < 1e-3
    assert float(alg.motion_prior.own_optimizer.lr) == pytest.approx(2e-4)
    ours = {id(p) for p in alg.policy.discriminator.parameters()}
    assert not ours & {id(p) for p in alg.optimizer.parameters}
    assert ours == {id(p) for p in alg.motion_prior.own_optimizer.parameters}
    shared, _ = make_appo(discriminator_optimizer="shared")
    assert shared.motion_prior.own_optimizer is None
    assert {id(p) for p in shared.policy.discriminator.parameters()} <= {id(p) for p in shared.optimizer.parameters}
    with pytest.raises(ValueError, match="one of own, shared"):
        make_appo(discriminator_optimizer="both")


def test_its_gradients_have_a_norm_of_their_own(make_appo, collect):
    runs = {}
    for limit in (1e-9, 1.0):
        alg, env = make_appo(discriminator_max_grad_norm=limit, max_grad_norm=1.0, discriminator_weight_decay=0.0)
        collect(alg, env)
        alg.update(0)
        runs[limit] = [p.detach().clone() for p in alg.policy.parameters()]
    actor = sum("discriminator" not in name for name, _ in alg.policy.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(runs[1e-9][:actor], runs[1.0][:actor], strict=True))
    assert not torch.equal(runs[1e-9][actor], runs[1.0][actor])


def test_a_discriminator_that_is_too_good_is_updated_less_often(make_appo, collect, noise_env):
    cfg = {"discriminator_grad_pen": 0.0}
    shares = {}
    for limit in (0.9, 1.0):
        alg, env = make_appo(
            env=separable(noise_env),
            discriminator=cfg,
            discriminator_learning_rate=0.05,
            discriminator_accuracy_limit=limit,
            num_learning_epochs=8,
        )
        for iteration in range(30):
            collect(alg, env)
            _, stats = alg.update(iteration)
        shares[limit] = stats["amp/updates"]
        taken = alg.motion_prior.own_optimizer.state_dict()["state"][0]["step"].item()
        assert taken == 30 * 8 if limit == 1.0 else 30 * 8 * 0.25 < taken < 30 * 8 * 0.6
        assert stats["amp/accuracy"] == 1.0
    assert shares == {0.9: 0.25, 1.0: 1.0}


def test_expert_windows_come_from_a_bank_where_the_environment_has_none(make_appo, collect):
    bank = torch.arange(60.0).view(10, 6)
    alg, env = make_appo(env_cfg={"gives_motion": False}, amp_motion_loader=bank)
    collect(alg, env)
    drawn = alg.rollout.ref_motion
    assert set(drawn[..., 0].flatten().tolist()) <= set(bank[:, 0].tolist())
    assert len(drawn[..., 0].unique()) > 5
    torch.testing.assert_close(drawn - drawn[..., :1], torch.arange(6.0).expand_as(drawn))
    with pytest.raises(ValueError, match=r"expert windows have shape \(5, 4\), the discriminator wants \(M, 6\)"):
        make_appo(amp_motion_loader=torch.zeros(5, 4))


def test_a_loader_is_asked_for_windows_once(make_appo):
    class Loader:
        calls: list = []

        def expert_features(self, n, frames):
            self.calls.append((n, frames))
            return torch.zeros(n, 6)

    make_appo(amp_motion_loader=Loader(), amp_preload=50, amp_num_frames=2)
    assert Loader.calls == [(50, 2)]


@pytest.mark.parametrize("width", [6, 5])
def test_past_windows_are_mixed_with_fresh_ones(make_appo, collect, noise_env, width):
    def numbered(env):
        return torch.full((env.num_envs, width), float(env.t))

    env = amp_env(noise_env, ref=numbered, motion=numbered, end_prob=0.4)
    alg, _ = make_appo(env=env, discriminator={"input_dim": width}, amp_replay_buffer_size=30, execution="eager")
    seen = []
    alg.policy.discriminator.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    for iteration in range(4):
        collect(alg, env)
        valid = int(alg.rollout.ref_valid.sum())
        seen.clear()
        alg.update(iteration)
        assert [len(rows) for rows in seen] == [24, 48, 24]  # expert, policy with as many past ones, penalty
        assert 0 < alg.motion_prior.replay.num_samples <= 30
        assert valid < 24
    kept = torch.cat([alg.motion_prior.replay.states, alg.motion_prior.replay.next_states], 1)[:, :width]
    assert (kept == kept[:, :1]).all()
    assert kept[:, 0].min() >= 7  # the oldest were overwritten
    other, _ = make_appo(discriminator={"input_dim": width}, amp_replay_buffer_size=30)
    other.load_resume_state(alg.resume_state())
    assert torch.equal(other.motion_prior.replay.states.sort(0)[0], alg.motion_prior.replay.states.sort(0)[0])


@pytest.mark.parametrize("separate", [False, True])
def test_normaliser_and_optimizer_are_saved(make_appo, collect, snapshot, differing, separate):
    settings = {"separate_amp_normalizers": separate}
    alg, env = make_appo(**settings)
    collect(alg, env)
    alg.update(0)
    names = {"ref_obs_norm_state_dict", "ref_motion_norm_state_dict"} if separate else {"amp_norm_state_dict"}
    assert names | {"discriminator_optimizer_state_dict"} <= alg.state_dict().keys()
    other, _ = make_appo(**settings)
    other.load_state_dict(alg.state_dict())
    assert differing(snapshot(alg), snapshot(other)) == []
    assert other.ref_obs_normalizer.count > 0


def test_accuracy_and_step_count_of_the_discriminator_are_resumed(make_appo):
    alg, other = make_appo()[0], make_appo()[0]
    alg.motion_prior.accuracy.fill_(0.97)
    alg.motion_prior.count.fill_(3.0)
    other.load_resume_state(alg.resume_state())
    assert float(other.motion_prior.accuracy) == pytest.approx(0.97)
    assert float(other.motion_prior.count) == 3.0


@pytest.mark.parametrize("kind", KINDS)
def test_acting_and_learning_never_wait_for_the_device(make_appo, run_without_waiting, kind):
    alg, env = make_appo(kind, execution="eager", num_mini_batches=2, schedule="adaptive", mimic_reward_coef=0.1)
    run_without_waiting(alg, env)


class MixedPolicy(AmpMixin, EstimatorMixin, ActorCritic):
    """Estimates a part of the critic's observation, and has a discriminator."""


class MixedRecurrentPolicy(AmpMixin, EstimatorMixin, ActorCriticRecurrent):
    """The same with memories."""


class Everything(PPO):
    """PPO with every extension."""

    extension_classes = (Teacher, MotionPrior, Estimation)


@pytest.mark.filterwarnings("ignore:the teacher has no teacher_ac_path")
@pytest.mark.parametrize("policy_class", [MixedPolicy, MixedRecurrentPolicy])
def test_all_extensions_work_together_and_recorded_equals_eager(noise_env, collect, policy_class):
    segments = {"a": 1, "b": 2}
    sizes = {"actor_hidden_dims": (8,), "critic_hidden_dims": (8,), "obs_segments": segments}
    sizes |= {"rnn_hidden_size": 8} if policy_class is MixedRecurrentPolicy else {}
    mirrors = {"a": "same", "b": [1, -1]}
    settings = {
        "teacher_policy": {"class_name": "ActorCritic", "num_actor_obs": 5, "num_critic_obs": 5, "num_actions": 2},
        "rnd_cfg": {"weight": 0.1, "num_outputs": 4},
        "symmetry_cfg": {"obs": mirrors, "critic_obs": {**mirrors, "c": [1, -1]}, "actions": [1, -1]},
        "teacher_act_prob": 0.5,
        "num_mini_batches": 2,
        "empirical_normalization": True,
        "schedule": "adaptive",
    }
    results = []
    for execution in ("eager", "auto"):
        torch.manual_seed(0)
        policy = policy_class(
            3,
            5,
            2,
            amp_discriminator=DISCRIMINATOR,
            critic_obs_segments={**segments, "c": 2},
            estimator_target_components=["c"],
            **sizes,
        )
        env, alg = amp_env(noise_env), Everything(policy, seed=3, execution=execution, **settings)
        alg.prepare(env, 6)
        assert set(alg.extensions) == {"rnd", "symmetry", "teacher", "motion_prior", "estimation"}
        for iteration in range(5):
            collect(alg, env)
            losses, stats = alg.update(iteration)
        names = {"surrogate_loss", "value_loss", "rnd_loss", "mirror_loss", "distillation_loss", "estimator_loss"}
        assert names | {"discriminator_expert_loss", "total_loss"} <= losses.keys()
        assert stats["nonfinite_updates"] == 0
        results.append(torch.cat([p.detach().flatten() for p in alg.policy.parameters()]))
    assert torch.equal(*results)


def differing_env(noise_env, **settings):
    """An environment whose reference is 3 above the policy's motion; at an end the last reference is 5 above."""
    env = amp_env(noise_env, gives_final=True, motion=lambda env: env.features(1.0) + 3.0, **settings)
    step = env.step

    def with_last(actions):
        record = step(actions)
        final = record.extras["final_observation"]
        final["ref_motion"] = final["ref_obs"] + 5.0
        return record

    env.step = with_last
    return env


def test_differences_from_the_reference_of_the_same_step_are_told_from_zero(make_appo, collect, noise_env):
    alg, env = make_appo(env=differing_env(noise_env), motion_difference=True)
    collect(alg, env)
    ended = alg.rollout.dones.expand_as(alg.rollout.ref_obs)
    assert ended.any()
    torch.testing.assert_close(alg.rollout.ref_obs, torch.where(ended, 5.0, 3.0), atol=1e-3, rtol=0)
    assert not alg.rollout.ref_motion.any()
    assert alg.rollout.ref_valid.all()
    alg.update(0)
    mean = alg.motion_prior.ref_obs_normalizer.mean  # of the differences alone, without the zeros
    assert ((mean > 2.9) & (mean < 5.1)).all()


def test_without_the_last_reference_the_end_of_an_episode_is_left_out(make_appo, collect):
    alg, env = make_appo(motion_difference=True)
    collect(alg, env)
    assert torch.equal(alg.rollout.ref_valid, ~alg.rollout.dones)


def test_the_gradient_penalty_of_differences_is_on_the_policys(make_appo, collect, noise_env):
    alg, env = make_appo(env=differing_env(noise_env), motion_difference=True)
    collect(alg, env)
    (batch,) = alg.mini_batches()
    losses = alg.compute_losses(batch).losses
    normalized = alg.motion_prior.normalized(batch.ref_obs, "policy")
    torch.testing.assert_close(
        losses["discriminator_grad_pen_loss"], alg.policy.discriminator.compute_grad_pen(normalized)
    )


def test_small_differences_earn_more_once_the_discriminator_has_learned(make_appo, collect, noise_env):
    env = amp_env(
        noise_env,
        ref=lambda e: torch.randn(e.num_envs, 6, generator=e.generator),
        motion=lambda e: torch.zeros(e.num_envs, 6),
    )
    alg, env = make_appo(env=env, motion_difference=True, discriminator_learning_rate=1e-2, num_learning_epochs=5)
    for iteration in range(60):
        collect(alg, env)
        alg.update(iteration)
    features = torch.tensor([[0.0], [0.5], [3.0]]).expand(3, 6)
    style = alg.policy.discriminator.predict_style_reward(
        alg.motion_prior.normalized(features, "policy"), torch.zeros(3)
    )[0]
    assert style[0] > style[1] > style[2]


@pytest.mark.parametrize("settings", [{"amp_motion_loader": torch.zeros(5, 6)}, {"separate_amp_normalizers": True}])
def test_differences_need_the_reference_of_the_same_step_and_one_scale(make_appo, settings):
    with pytest.raises(ValueError, match="motion_difference"):
        make_appo(motion_difference=True, **settings)


def test_differences_recorded_are_eager(make_appo, collect, noise_env):
    def trained(execution):
        env = differing_env(noise_env)
        alg, env = make_appo(env=env, motion_difference=True, execution=execution)
        for iteration in range(5):
            collect(alg, env)
            alg.update(iteration)
        return torch.cat([p.detach().flatten() for p in alg.policy.parameters()])

    assert torch.equal(trained("eager"), trained("auto"))
