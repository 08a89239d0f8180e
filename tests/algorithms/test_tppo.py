"""Learning from a teacher: who labels, who acts, what is imitated, and what is kept."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from canter.algorithms.ppo import PPO
from canter.algorithms.teacher import DISTANCES, TARGETS, tanh_stats
from canter.algorithms.tppo import TPPO, TPPOConfig
from canter.modules.actor_critic import ActorCritic
from canter.modules.normalizer import EmpiricalNormalization
from canter.runners import OnPolicyRunner
from canter.storage.queue_rollout_storage import ActionLabelRollout
from canter.storage.rollout_storage import MiniBatch
from canter.utils.checkpoint import load_checkpoint, save_checkpoint

TEACHER = {
    "class_name": "ActorCritic",
    "num_actor_obs": 5,
    "num_critic_obs": 5,
    "num_actions": 2,
    "actor_hidden_dims": [4],
    "critic_hidden_dims": [4],
}
ACTOR_TEACHER = {**TEACHER, "num_actor_obs": 3}
pytestmark = pytest.mark.filterwarnings("ignore:the teacher has no teacher_ac_path")


@pytest.fixture
def make_tppo(make_policy, noise_env):
    def make(kind="mlp", num_steps=6, env_cfg=None, algorithm=TPPO, policy=None, **settings):
        env = noise_env(kind, **(env_cfg or {}))
        settings = {"seed": 3, "teacher_policy": TEACHER, **settings}
        alg = algorithm(make_policy(kind) if policy is None else policy, **settings)
        alg.prepare(env, num_steps)
        return alg, env

    return make


def speak(alg, value):
    """Let the teacher say the same everywhere."""
    for policy in alg.teacher.policies:
        torch.nn.init.zeros_(policy.actor[-1].weight)
        torch.nn.init.constant_(policy.actor[-1].bias, value)


@pytest.mark.parametrize("where", ["inside", "beside"])
def test_the_teacher_has_the_weights_of_its_file_and_is_frozen(make_policy, make_tppo, tmp_path, where):
    torch.manual_seed(5)
    saved = ActorCritic(5, 5, 2, actor_hidden_dims=[4], critic_hidden_dims=[4])
    torch.save({"model_state_dict": saved.state_dict()}, tmp_path / "teacher.pt")
    path = str(tmp_path / "teacher.pt")
    given = {"teacher_policy": {**TEACHER, "teacher_ac_path": path}} if where == "inside" else {"teacher_ac_path": path}
    alg, _ = make_tppo(**given)
    (teacher,) = alg.teacher.policies
    for name, value in saved.state_dict().items():
        assert torch.equal(teacher.state_dict()[name], value), name
    assert not teacher.training
    assert not any(p.requires_grad for p in teacher.parameters())
    ids = {id(p) for p in teacher.parameters()}
    assert not ids & {id(p) for p in alg.optimizer.parameters}
    alg.train_mode()
    assert not teacher.training
    assert not any("teacher" in name for name in alg.state_dict())


def test_sizes_that_are_not_given_come_from_the_file(make_tppo, tmp_path):
    torch.save(
        {"model_state_dict": ActorCritic(5, 7, 2, actor_hidden_dims=[4], critic_hidden_dims=[4]).state_dict()},
        tmp_path / "teacher.pt",
    )
    small = {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}
    alg, _ = make_tppo(teacher_policy=small, teacher_ac_path=str(tmp_path / "teacher.pt"))
    assert alg.teacher.policies[0].critic[0].in_features == 7
    with pytest.raises(ValueError, match="is of another policy"):
        make_tppo(teacher_policy={}, teacher_ac_path=str(tmp_path / "teacher.pt"))
    with pytest.raises(ValueError, match="num_actor_obs is not known"):
        make_tppo(teacher_policy=small)


def test_a_run_directory_is_a_teacher(make_ppo, make_tppo, noise_env, tmp_path):
    cfg = {
        "num_steps_per_env": 4,
        "policy": {"actor_hidden_dims": [6], "critic_hidden_dims": [6]},
        "algorithm": {"empirical_normalization": True},
    }
    runner = OnPolicyRunner(noise_env("mlp"), cfg, tmp_path, "cpu", show_progress=False)
    runner.learn(2)
    alg, _ = make_tppo(teacher_policy=None, teacher_ac_path=str(tmp_path), label_action_with_critic_obs=False)
    (teacher,) = alg.teacher.policies
    assert torch.equal(teacher.obs_normalizer._mean, runner.policy.obs_normalizer._mean)
    assert teacher.obs_normalizer.count == 2 * 4 * 4
    x = torch.randn(4, 3)
    assert torch.equal(alg.teacher.label(x, alg.generators["teacher"]), runner.policy.act_inference(x))


@pytest.mark.filterwarnings("default:the teacher has no teacher_ac_path")
def test_a_missing_teacher_is_said(make_tppo):
    with pytest.warns(UserWarning, match="has no teacher_ac_path: its weights are random"):
        make_tppo()
    with pytest.warns(UserWarning, match="TPPO has no teacher: only datasets label"):
        alg, _ = make_tppo(teacher_policy=None)
    assert not alg.teacher.policies


@pytest.mark.parametrize("from_critic", [True, False])
@pytest.mark.parametrize("from_sample", [True, False])
def test_what_the_teacher_sees_and_whether_it_explores(make_tppo, collect, from_critic, from_sample):
    teacher = TEACHER if from_critic else ACTOR_TEACHER
    alg, env = make_tppo(
        teacher_policy=teacher,
        label_action_with_critic_obs=from_critic,
        action_labels_from_sample=from_sample,
        teacher_act_prob=0.0,
    )
    collect(alg, env)
    seen = alg.rollout.privileged_observations if from_critic else alg.rollout.observations
    modes = alg.teacher.policies[0].act_params(seen.flatten(0, 1))[0]["mu"].view_as(alg.rollout.action_labels)
    off = (alg.rollout.action_labels - modes).abs()
    assert (off > 1e-3).all() if from_sample else (off < 1e-6).all()


@pytest.mark.parametrize("prob", [0.0, 1.0])
def test_the_teacher_acts_with_its_probability(make_tppo, collect, prob):
    alg, env = make_tppo(teacher_act_prob=prob)
    speak(alg, 0.7)
    given = []
    step = env.step
    env.step = lambda actions: (given.append(actions.clone()), step(actions))[1]
    collect(alg, env)
    assert (alg.rollout.action_labels == 0.7).all()
    assert ((torch.stack(given) == 0.7).all()) == (prob == 1.0)
    assert torch.equal(alg.rollout.actions, torch.stack(given))
    assert (alg.rollout.teacher_acted == (prob == 1.0)).all()


def test_who_acts_is_drawn_at_the_start_and_again_only_when_an_episode_ends(make_tppo, collect):
    alg, env = make_tppo(teacher_act_prob=0.5, num_steps=40, env_cfg={"num_envs": 64, "end_prob": 0.2})
    assert 10 < alg.use_teacher_act_mask.sum() < 54
    collect(alg, env)
    acted, dones = alg.rollout.teacher_acted.squeeze(-1), alg.rollout.dones.squeeze(-1)
    changed = acted[1:] != acted[:-1]
    assert not (changed & ~dones[:-1]).any()
    assert 0.35 < changed[dones[:-1]].float().mean() < 0.65


def test_the_probability_follows_its_schedule(make_tppo, collect):
    alg, env = make_tppo(teacher_act_prob="linear", update_times_scale=4)
    seen = []
    for iteration in range(6):
        collect(alg, env)
        seen.append(alg.update(iteration)[1]["teacher_act_prob"])
    assert seen == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("invalid", [False, True])
def test_the_teacher_forgets_episodes_that_ended(make_tppo, collect, invalid):
    teacher = {**TEACHER, "class_name": "ActorCriticRecurrent", "rnn_hidden_size": 4}
    alg, env = make_tppo(
        teacher_policy=teacher, env_cfg={"num_envs": 12, "end_prob": 0.3, "has_invalid_steps": invalid}
    )
    collect(alg, env)
    ended = alg.rollout.dones[-1].squeeze(-1)
    assert ended.any()
    assert not ended.all()
    assert torch.equal((alg.teacher.hidden[0]["memory_a"].flatten(1) == 0).all(1), ended)
    (policy,) = alg.teacher.policies
    hidden = policy.initial_hidden(12)
    for t in range(6):
        params, hidden = policy.act_params(alg.rollout.privileged_observations[t], hidden)
        torch.testing.assert_close(alg.rollout.action_labels[t], params["mu"])
        hidden = {n: s.masked_fill(alg.rollout.dones[t].view(-1, 1, 1, 1), 0.0) for n, s in hidden.items()}


def test_the_teacher_begins_anew_after_an_evaluation_that_reset_the_environments(make_tppo, noise_env, tmp_path):
    teacher = {**TEACHER, "class_name": "ActorCriticRecurrent", "rnn_hidden_size": 4}
    alg, env = make_tppo(teacher_policy=teacher, teacher_act_prob=0.0, num_steps=3, env_cfg={"end_prob": 0.05})
    runner = OnPolicyRunner(env, alg, tmp_path, show_progress=False)
    runner.learn(1)
    assert alg.teacher.hidden[0]["memory_a"].abs().sum() > 0
    alg.teacher.teacher_prob.fill_(1.0)
    runner.eval(1, max_steps=10_000)
    assert alg.teacher.hidden[0]["memory_a"].abs().sum() == 0
    assert alg.use_teacher_act_mask.all()
    again, env = make_tppo(teacher_policy=teacher, num_steps=3)
    OnPolicyRunner(env, again, show_progress=False).load(tmp_path / "model_1.pt")  # of running episodes
    assert again.teacher.hidden[0]["memory_a"].abs().sum() == 0


def test_a_teacher_continues_with_another_number_of_environments(make_tppo):
    teacher = {**TEACHER, "class_name": "ActorCriticRecurrent", "rnn_hidden_size": 4}
    alg, other = (make_tppo(teacher_policy=teacher, env_cfg={"num_envs": n})[0] for n in (4, 6))
    alg.teacher.teacher_prob.fill_(0.25)
    other.load_resume_state(alg.resume_state())
    assert float(other.teacher.teacher_prob) == 0.25
    assert len(other.use_teacher_act_mask) == len(other.teacher.hidden[0]["memory_a"]) == 6


def test_a_run_without_a_teacher_continues_one_that_had_one(make_ppo, make_tppo):
    alg, other = make_tppo()[0], make_ppo()[0]
    alg.generators["action"].manual_seed(11)
    other.load_resume_state(alg.resume_state())
    assert torch.equal(other.generators["action"].get_state(), alg.generators["action"].get_state())


def test_a_state_without_a_teacher_is_refused_in_words(make_ppo, make_tppo):
    with pytest.raises(ValueError, match="no memory of a teacher"):
        make_tppo()[0].load_resume_state(make_ppo()[0].resume_state())


def test_an_executed_teacher_action_has_its_own_log_probability(make_tppo, collect):
    alg, env = make_tppo(teacher_act_prob=0.5, env_cfg={"num_envs": 16})
    collect(alg, env)
    params = {"mu": alg.rollout.mu, "sigma": alg.rollout.sigma}
    wanted = alg.policy.distribution.log_prob(params, alg.rollout.actions)
    torch.testing.assert_close(alg.rollout.actions_log_prob.squeeze(-1), wanted)
    assert alg.rollout.teacher_acted.any()
    assert not alg.rollout.teacher_acted.all()


@pytest.mark.parametrize("per_batch", [False, True])
def test_steps_of_the_teacher_do_not_count_among_those_of_the_student(make_tppo, collect, per_batch):
    """The surrogate's gradient is that of the student's steps alone, scaled by their share."""
    alg, env = make_tppo(teacher_act_prob=0.5, env_cfg={"num_envs": 16}, normalize_advantage_per_mini_batch=per_batch)
    speak(alg, 50.0)
    collect(alg, env)
    batch = next(alg.mini_batches())
    out = alg.policy(batch.obs, batch.critic_obs)
    own = ~batch.teacher_acted.squeeze(-1)
    assert own.any()
    assert not own.all()
    advantages = batch.advantages.squeeze(-1)
    if per_batch:
        kept = advantages[own]
        advantages = torch.where(own, (advantages - kept.mean()) / kept.std(), 0.0)
    log_prob = alg.policy.distribution.log_prob(out.params, batch.actions)
    wanted = torch.autograd.grad(
        (-advantages * log_prob)[own].sum() / len(own), alg.policy.actor[-1].bias, retain_graph=True
    )
    got = torch.autograd.grad(alg.compute_losses(batch).losses["surrogate_loss"], alg.policy.actor[-1].bias)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-6)


def test_steps_that_only_reset_are_no_steps_of_the_student(make_tppo):
    alg, _ = make_tppo()
    acted, valid = torch.tensor([[True], [False], [False]]), torch.tensor([True, True, False])
    batch = MiniBatch(teacher_acted=acted, valid=valid)
    alg.teacher.before_forward(batch)
    assert batch.learned.tolist() == [False, True, False]


def test_steps_of_the_teacher_do_not_move_the_surrogate(make_tppo, collect):
    gradients = {}
    for far in (0.0, 1000.0):
        alg, env = make_tppo(teacher_act_prob=1.0, distillation_loss_coef=0.0)
        speak(alg, far)
        collect(alg, env)
        terms = alg.compute_losses(next(alg.mini_batches()))
        gradients[far] = torch.autograd.grad(terms.losses["surrogate_loss"], list(alg.policy.actor.parameters()))
        assert terms.losses["surrogate_loss"] == 0.0
        assert all((g == 0).all() for g in gradients[far])
    alg, env = make_tppo(teacher_act_prob=1.0, exclude_teacher_steps_from_surrogate=False)
    collect(alg, env)
    surrogate = alg.compute_losses(next(alg.mini_batches())).losses["surrogate_loss"]
    assert any((g != 0).any() for g in torch.autograd.grad(surrogate, list(alg.policy.actor.parameters())))


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_pure_imitation_has_imitation_losses_alone_and_no_returns(make_tppo, collect, kind):
    alg, env = make_tppo(kind, using_ppo=False, schedule="adaptive", target_kl=0.1)
    collect(alg, env)
    assert (alg.rollout.returns == 0).all()
    critic = [p.detach().clone() for p in alg.policy.critic.parameters()]
    losses, _ = alg.update(0)
    assert losses.keys() == {"distillation_loss", "total_loss"}
    assert all(torch.equal(p, q) for p, q in zip(critic, alg.policy.critic.parameters(), strict=True))


@pytest.mark.parametrize(
    ("target", "distance"), [("real", 5.0), ("mse_sum", 25.0), ("mse", 12.5), ("huber", 3.0), ("l1", 7.0)]
)
def test_distances_by_hand(target, distance):
    mean, label = torch.tensor([[4.0, 5.0]]), torch.tensor([[1.0, 1.0]])
    assert DISTANCES[target](mean, label).tolist() == [distance]


def test_tanh_distances_by_hand():
    mean, label = torch.tensor([[0.5, 0.0]]), torch.tensor([[0.0, 1.0]])
    first = -(0.5 * math.log(0.75) + 0.5 * math.log(0.25))
    bce = 2 * (first - math.log(0.5)) / 2
    assert DISTANCES["tanh"](mean, label).item() == pytest.approx(bce, rel=1e-5)
    assert DISTANCES["scaled_tanh"](mean, label).item() == pytest.approx(bce * 1.5 / 2, rel=1e-5)
    stats = tanh_stats(mean, torch.tensor([[0.0, 0.9]]))
    assert stats["l1distance"].item() == pytest.approx(1.4)
    assert stats["l1_before_tanh"].item() == pytest.approx(math.atanh(0.5) + math.atanh(0.9), rel=1e-4)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_draws_the_student_to_the_teacher(make_policy, make_tppo, collect, target):
    policy = make_policy("mlp", mu_activation="tanh")
    alg, env = make_tppo(
        policy=policy, using_ppo=False, distill_target=target, num_learning_epochs=20, learning_rate=0.01
    )
    speak(alg, 0.5)
    for iteration in range(4):
        collect(alg, env)
        alg.update(iteration)
    assert (alg.policy.act_inference(torch.randn(50, 3)) - 0.5).abs().mean() < 0.1


def test_bad_targets_are_refused(make_tppo):
    with pytest.raises(ValueError, match="distill_target must be one of real, mse_sum"):
        make_tppo(distill_target="rael")
    with pytest.raises(ValueError, match="needs a policy with mu_activation='tanh'"):
        make_tppo(distill_target="tanh")
    with pytest.raises(ValueError, match="use 'max_log_prob'"):
        make_tppo("discrete", teacher_policy=None)


def test_discrete_actions_are_imitated_by_likelihood(make_tppo, collect, make_policy):
    teacher = {"class_name": "ActorCritic", "num_actor_obs": 5, "num_critic_obs": 5, "actor_hidden_dims": [4]}
    alg, env = make_tppo(
        "discrete",
        teacher_policy=teacher,
        distill_target="max_log_prob",
        using_ppo=False,
        learning_rate=0.02,
        num_learning_epochs=20,
    )
    (policy,) = alg.teacher.policies
    torch.nn.init.zeros_(policy.actor[-1].weight)
    with torch.no_grad():
        policy.actor[-1].bias.copy_(torch.tensor([0.0, 0.0, 5.0, 0.0]))
    for iteration in range(3):
        collect(alg, env)
        alg.update(iteration)
    assert (alg.rollout.action_labels == 2).all()
    assert (alg.policy.act_inference(torch.randn(20, 3)) == 2).all()


def test_the_weight_of_the_distance_follows_its_schedule(make_tppo, collect):
    alg, env = make_tppo(distillation_loss_coef="linear", update_times_scale=4)
    seen = []
    for iteration in range(5):
        collect(alg, env)
        alg.update(iteration)
        seen.append(float(alg.loss_weights["distillation_loss"]))
    assert seen == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert float(make_tppo(distillation_loss_coef=3.0)[0].loss_weights["distillation_loss"]) == 3.0


def encoder_policy(**more):
    from canter.modules.encoder_actor_critic import EncoderActorCritic

    segments = {"scan": (2,), "rest": (1,)}
    return EncoderActorCritic(
        3,
        5,
        2,
        obs_segments=segments,
        critic_obs_segments={"scan": (2,), "rest": (3,)},
        encoder_component_names=["scan"],
        encoder_output_size=4,
        actor_hidden_dims=[4],
        critic_hidden_dims=[4],
        **more,
    )


def test_latents_are_distilled(make_tppo, collect):
    teacher = {
        "class_name": "EncoderActorCritic",
        "num_actor_obs": 5,
        "num_critic_obs": 5,
        "num_actions": 2,
        "obs_segments": {"map": (2,), "rest": (3,)},
        "encoder_component_names": ["map"],
        "encoder_output_size": 4,
    }
    alg, env = make_tppo(
        policy=encoder_policy(),
        teacher_policy=teacher,
        distill_latent_coef=0.5,
        distill_latent_obs_component_mapping={"scan": "map"},
    )
    collect(alg, env)
    terms = alg.compute_losses(next(alg.mini_batches()))
    assert alg.loss_weights["distill_latent_scan"] == 0.5
    loss = terms.losses["distill_latent_scan"]
    batch = next(alg.mini_batches())
    (guide,) = alg.teacher.policies
    wanted = (
        alg.policy.get_encoder_latent(batch.obs, "scan") - guide.get_encoder_latent(batch.critic_obs, "map")
    ).norm(dim=-1)
    torch.testing.assert_close(loss, wanted.mean())
    grads = torch.autograd.grad(loss, list(alg.policy.parameters()), allow_unused=True)
    touched = {n.split(".")[0] for (n, _), g in zip(alg.policy.named_parameters(), grads, strict=True) if g is not None}
    assert touched == {"encoders"}


def summing_encoder(policy, mean, std):
    """Four outputs, each the sum of a component's two values, of observations with these statistics."""
    policy.encoders[0] = torch.nn.Linear(2, 4)
    torch.nn.init.ones_(policy.encoders[0].weight)
    torch.nn.init.zeros_(policy.encoders[0].bias)
    width = policy.obs_layout.width
    policy.obs_normalizer = EmpiricalNormalization([width], eps=0.0)
    policy.obs_normalizer._mean.fill_(mean)
    policy.obs_normalizer._std.fill_(std)


@pytest.mark.parametrize("sees_critic_obs", [True, False])
def test_latents_are_of_observations_normalised_once(make_tppo, sees_critic_obs):
    """Values (3, 5) are 1, 2 to the student and 1/2, 1 to the teacher: sums 3 and 1.5, in each of four features."""
    width = 5 if sees_critic_obs else 3
    teacher = {
        "class_name": "EncoderActorCritic",
        "num_actor_obs": width,
        "num_critic_obs": width,
        "num_actions": 2,
        "obs_segments": {"map": (2,), "rest": (width - 2,)},
        "encoder_component_names": ["map"],
        "encoder_output_size": 4,
    }
    alg, env = make_tppo(
        policy=encoder_policy(),
        teacher_policy=teacher,
        distill_latent_target="l1",
        distill_latent_obs_component_mapping={"scan": "map"},
        label_action_with_critic_obs=sees_critic_obs,
    )
    summing_encoder(alg.policy, mean=1.0, std=2.0)
    summing_encoder(alg.teacher.policies[0], mean=1.0, std=4.0)
    obs, critic_obs = torch.tensor([[3.0, 5.0, 7.0]] * 4), torch.full((4, 5), 100.0)
    if sees_critic_obs:
        critic_obs[:, :2] = obs[:, :2]
    for _ in range(6):
        alg.act(obs, critic_obs)
        alg.process_step(env.step(None))
    losses = alg.compute_losses(next(alg.mini_batches())).losses
    assert float(losses["distill_latent_scan"].detach()) == pytest.approx(4 * (3.0 - 1.5))


def test_latents_are_distilled_from_the_students_observation_through_an_update(make_tppo, collect):
    teacher = {
        "class_name": "EncoderActorCritic",
        "num_actor_obs": 3,
        "num_critic_obs": 3,
        "num_actions": 2,
        "obs_segments": {"map": (2,), "rest": (1,)},
        "encoder_component_names": ["map"],
        "encoder_output_size": 4,
    }
    found = {}
    for execution in ("eager", "auto"):
        torch.manual_seed(0)
        alg, env = make_tppo(
            policy=encoder_policy(),
            teacher_policy=teacher,
            execution=execution,
            label_action_with_critic_obs=False,
            empirical_normalization=True,
            distill_latent_obs_component_mapping={"scan": "map"},
        )
        for iteration in range(3):
            collect(alg, env)
            losses, _ = alg.update(iteration)
        found[execution] = losses["distill_latent_scan"]
    assert found["eager"] == found["auto"] > 0.0


def test_latents_need_encoders(make_tppo):
    with pytest.raises(TypeError, match="the student ActorCritic has none"):
        make_tppo(distill_latent_obs_component_mapping={"scan": "map"})


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_the_ring_of_past_rollouts_grows(make_tppo, collect, kind):
    alg, env = make_tppo(kind, buffer_dilation_ratio=2.0, using_ppo=False, empirical_normalization=True)
    sizes = []
    for iteration in range(4):
        collect(alg, env)
        sizes.append(sum(batch.actions.shape[:-1].numel() for batch in alg.mini_batches()))
        alg.update(iteration)
    assert type(alg.rollout) is ActionLabelRollout
    assert alg.rollout.capacity == 12
    assert sizes == [24, 48, 48, 48]
    assert alg.policy.obs_normalizer.count == 4 * 24  # every step once


@pytest.mark.filterwarnings("default")
def test_old_steps_are_not_for_ppo(make_tppo):
    with pytest.warns(UserWarning, match="lets PPO learn from old policies"):
        make_tppo(buffer_dilation_ratio=2.0)


def test_the_learning_rate_scheduler_is_stepped_once_per_update_and_saved(make_tppo, collect):
    settings = {
        "lr_scheduler_class_name": "StepLR",
        "lr_scheduler": {"step_size": 1, "gamma": 0.5},
        "learning_rate": 0.25,
    }
    alg, env = make_tppo(**settings, num_learning_epochs=2)
    rates = []
    for iteration in range(3):
        collect(alg, env)
        alg.update(iteration)
        rates.append(alg.learning_rate)
    assert rates == [0.125, 0.0625, 0.03125]
    other, _ = make_tppo(**settings)
    other.load_state_dict(alg.state_dict())
    assert other.learning_rate == 0.03125
    collect(other, env)
    other.update(3)
    assert other.learning_rate == 0.015625
    with pytest.raises(ValueError, match="needs schedule='fixed'"):
        make_tppo(**settings, schedule="adaptive")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("MultiStepLR", {"milestones": [1, 3], "gamma": 0.5}),
        ("CosineAnnealingLR", {"T_max": 5}),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9, "cycle_momentum": False}),
    ],
)
@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop"])  # whose rates are a tensor, and numbers
def test_every_scheduler_gives_the_rates_of_torch_also_after_a_checkpoint(
    make_tppo, collect, tmp_path, name, options, optimizer
):
    settings = {"lr_scheduler_class_name": name, "lr_scheduler": options, "optimizer_class_name": optimizer}
    plain = getattr(torch.optim, optimizer)([torch.nn.Parameter(torch.zeros(1))], lr=0.25)
    scheduler = getattr(torch.optim.lr_scheduler, name)(plain, **options)
    alg, env = make_tppo(**settings, learning_rate=0.25)
    for iteration in range(5):
        collect(alg, env)
        alg.update(iteration)
        plain.step()
        scheduler.step()
        assert alg.learning_rate == pytest.approx(plain.param_groups[0]["lr"], rel=1e-5)
        save_checkpoint(tmp_path / "a.pt", alg.state_dict())
        alg, _ = make_tppo(**settings, learning_rate=0.25)
        alg.load_state_dict(load_checkpoint(tmp_path / "a.pt"))
        assert alg.learning_rate == pytest.approx(plain.param_groups[0]["lr"], rel=1e-5)


def test_a_scheduler_begins_anew_where_the_optimizer_is_not_loaded(make_tppo, collect):
    settings = {"lr_scheduler_class_name": "CosineAnnealingLR", "lr_scheduler": {"T_max": 4}, "learning_rate": 0.25}
    alg, env = make_tppo(**settings)
    rates = []
    for iteration in range(2):
        collect(alg, env)
        alg.update(iteration)
        rates.append(alg.learning_rate)
    other, env = make_tppo(**settings)
    other.load_state_dict(alg.state_dict(), load_optimizer=False)
    assert other.learning_rate == 0.25
    collect(other, env)
    other.update(2)
    assert other.learning_rate == pytest.approx(rates[0])


def test_schedulers_that_do_not_exist_or_need_more_are_refused(make_tppo):
    with pytest.raises(ValueError, match="'StepLR'"):
        make_tppo(lr_scheduler_class_name="StpLR")
    with pytest.raises(ValueError, match=r"'ReduceLROnPlateau' cannot be used: .*assign alg\.learning_rate"):
        make_tppo(lr_scheduler_class_name="ReduceLROnPlateau")


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_memories_are_resampled(make_tppo, collect, kind):
    alg, env = make_tppo(kind, hidden_state_resample_prob=1.0)
    collect(alg, env)
    hidden = {name: torch.full((5, 2 if kind == "lstm" else 1, 1, 8), 7.0) for name in ("memory_a", "memory_c")}
    fresh = alg.teacher.resampled(hidden)
    for name, state in fresh.items():
        assert state.shape == hidden[name].shape
        assert (state.abs() <= 1.0).all()
        assert state.std() > 0.4
    alg.update(0)
    alg.hidden_state_resample_prob = 0.5
    hidden = {name: torch.full((400, 1, 1, 8), 7.0) for name in ("memory_a", "memory_c")}
    kept = [(state == 7.0).all(-1).flatten() for state in alg.teacher.resampled(hidden).values()]
    assert torch.equal(*kept)
    assert 0.4 < kept[0].float().mean() < 0.6


@pytest.mark.filterwarnings("ignore:TPPO has no teacher")
def test_nested_settings_of_ppo_are_merged(make_policy):
    alg = TPPO(make_policy(), ppo={"gamma": 0.5, "lam": 0.7}, lam=0.9)
    assert (alg.gamma, alg.lam) == (0.5, 0.9)
    cfg = TPPOConfig(ppo={"gamma": 0.5, "num_learning_epochs": 7})
    alg = TPPO(make_policy(), cfg=cfg)
    assert (alg.gamma, alg.num_learning_epochs, cfg.gamma) == (0.5, 7, 0.99)
    with pytest.raises(TypeError, match="'gamma'"):
        TPPO(make_policy(), ppo={"gama": 0.5})


def test_the_teacher_uses_its_own_normaliser(make_tppo, tmp_path):
    saved = ActorCritic(5, 5, 2, actor_hidden_dims=[4], critic_hidden_dims=[4])
    norm = {
        "_mean": torch.full((1, 5), 10.0),
        "_var": torch.full((1, 5), 4.0),
        "_std": torch.full((1, 5), 2.0),
        "count": torch.tensor(9),
    }
    torch.save({"model_state_dict": saved.state_dict(), "obs_norm_state_dict": norm}, tmp_path / "teacher.pt")
    alg, _ = make_tppo(
        teacher_policy={**TEACHER, "teacher_ac_path": str(tmp_path / "teacher.pt")}, empirical_normalization=True
    )
    x = torch.randn(4, 5)
    wanted = saved.act_inference((x - 10.0) / 2.01)
    torch.testing.assert_close(alg.teacher.label(x, alg.generators["teacher"]), wanted)


@pytest.mark.parametrize("width", [1, 2])
def test_the_observation_says_which_teacher_is_asked(make_policy, make_tppo, collect, width):
    segments = {"rest": (5 - width,), "terrain": (width,)}
    policy = make_policy("mlp", critic_obs_segments=segments, obs_segments={"rest": (3,)})
    alg, _ = make_tppo(policy=policy, teacher_policy=None, teachers=(TEACHER, TEACHER), teacher_id_component="terrain")
    for number, teacher in enumerate(alg.teacher.policies):
        torch.nn.init.zeros_(teacher.actor[-1].weight)
        torch.nn.init.constant_(teacher.actor[-1].bias, 10.0 + number)
    obs = torch.randn(4, 5)
    obs[:, -width:] = torch.tensor([[0.0, 1.0, 1.0, 0.0]]).T if width == 1 else torch.eye(2)[[0, 1, 1, 0]]
    labels = alg.teacher.label(obs, alg.generators["teacher"])
    assert labels.tolist() == [[10.0] * 2, [11.0] * 2, [11.0] * 2, [10.0] * 2]
    with pytest.raises(ValueError, match="2 teachers need teacher_id_component"):
        make_tppo(teacher_policy=None, teachers=(TEACHER, TEACHER))


def test_only_the_critic_learns_while_it_warms_up(make_tppo, collect):
    alg, env = make_tppo(critic_warmup_iterations=2, teacher_act_prob=0.0, schedule="adaptive")
    for iteration in range(4):
        before = {name: p.detach().clone() for name, p in alg.policy.named_parameters()}
        collect(alg, env)
        losses, _ = alg.update(iteration)
        moved = {name.split(".")[0] for name, p in alg.policy.named_parameters() if not torch.equal(p, before[name])}
        assert ("distillation_loss" in losses) == (iteration >= 2)
        assert moved == ({"critic"} if iteration < 2 else {"critic", "actor", "std"})


def dataset_step(num_envs, label=0.7):
    return SimpleNamespace(
        observation=torch.randn(num_envs, 3),
        privileged_observation=torch.randn(num_envs, 5),
        action=torch.full((num_envs, 2), label),
        reward=torch.zeros(num_envs, 1),
        done=torch.zeros(num_envs, 1),
    )


@pytest.mark.filterwarnings("ignore:TPPO has no teacher")
@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_a_dataset_labels_and_its_steps_are_not_for_ppo(make_tppo, collect, kind):
    alg, env = make_tppo(kind, teacher_policy=None, schedule="adaptive", learning_rate=0.01, num_learning_epochs=10)
    for iteration in range(6):
        for _ in range(6):
            alg.collect_transition_from_dataset(dataset_step(4), {})
        assert (alg.rollout.action_labels == 0.7).all()
        alg.compute_returns(torch.randn(4, 5))
        losses, _ = alg.update(iteration)
        assert losses.keys() == {"distillation_loss", "total_loss"}
    assert losses["distillation_loss"] < 0.3
    collect(alg, env)
    losses, _ = alg.update(7)
    assert "surrogate_loss" in losses
    assert "distillation_loss" not in losses  # no teacher: its labels would be its own actions


@pytest.mark.filterwarnings("ignore:TPPO has no teacher")
def test_with_nothing_to_learn_from_it_says_so(make_tppo, collect):
    alg, env = make_tppo(teacher_policy=None, using_ppo=False)
    collect(alg, env)
    with pytest.raises(ValueError, match="nothing to learn from"):
        alg.update(0)


def test_ppo_takes_no_transitions_from_a_dataset():
    assert not hasattr(PPO, "collect_transition_from_dataset")


@pytest.mark.parametrize("kind", ["mlp", "lstm", "gru"])
def test_acting_and_learning_never_wait_for_the_device(make_tppo, run_without_waiting, kind):
    settings = {"teacher_act_prob": 0.5, "hidden_state_resample_prob": 0.5, "execution": "eager"}
    alg, env = make_tppo(kind, num_mini_batches=2, schedule="adaptive", **settings)
    run_without_waiting(alg, env)


@pytest.mark.parametrize("kind", ["mlp", "gru"])
def test_resuming_continues_exactly(make_tppo, collect, snapshot, differing, kind):
    teacher = {**TEACHER, "class_name": "ActorCriticRecurrent", "rnn_hidden_size": 4}
    settings = {"teacher_policy": teacher, "teacher_act_prob": "linear", "update_times_scale": 5}
    torch.manual_seed(1)
    alg, env = make_tppo(kind, **settings)
    collect(alg, env)
    alg.update(0)
    other, twin = make_tppo(kind, **settings)
    other.teacher.policies[0].load_state_dict(alg.teacher.policies[0].state_dict())
    other.load_state_dict(copy.deepcopy(alg.state_dict()))
    other.load_resume_state(copy.deepcopy(alg.resume_state()))
    twin.generator.set_state(env.generator.get_state())
    twin.current = env.current
    for pair in ((alg, env), (other, twin)):
        collect(*pair)
        pair[0].update(1)
    assert torch.equal(alg.rollout.teacher_acted, other.rollout.teacher_acted)
    for name, data in alg.rollout.data.items():
        assert torch.equal(data, other.rollout.data[name]), name
    assert differing(snapshot(alg), snapshot(other)) == []


def test_a_student_that_estimates_learns_both(make_tppo, collect):
    from canter.algorithms.estimator import EstimatorTPPO
    from canter.modules.state_estimator import StateAc

    segments = {"proprio": (2,), "velocity": (1,)}
    policy = StateAc(
        3,
        5,
        2,
        obs_segments=segments,
        critic_obs_segments={**segments, "rest": (2,)},
        estimator_obs_components=["proprio"],
        estimator_target_components=["velocity"],
        actor_hidden_dims=[4],
        critic_hidden_dims=[4],
    )
    alg, env = make_tppo(policy=policy, algorithm=EstimatorTPPO)
    collect(alg, env)
    losses, _ = alg.update(0)
    assert {"estimator_loss", "distillation_loss", "surrogate_loss"} <= losses.keys()


@pytest.mark.parametrize("schedule", ["linear", "exp", 0.5, lambda iteration: 0.9**iteration])
def test_a_changing_probability_leaves_recordings_as_they_are(noise_env, schedule):
    algorithm = {"class_name": "TPPO", "teacher_policy": TEACHER, "teacher_act_prob": schedule}
    cfg = {
        "num_steps_per_env": 4,
        "algorithm": algorithm,
        "policy": {"actor_hidden_dims": [6], "critic_hidden_dims": [6]},
    }
    runner = OnPolicyRunner(noise_env("mlp"), cfg, None, "cpu", show_progress=False)
    runner.learn(5)
    recordings = runner.alg.executor.recordings.copy()
    runner.learn(3)
    assert runner.alg.executor.recordings == recordings
