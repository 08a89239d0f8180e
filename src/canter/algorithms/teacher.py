"""Teacher-guided learning: distillation, DAgger (Ross 2011), and fine-tuning of a distilled policy."""

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canter.algorithms.algorithm import Terms, chosen_weights
from canter.algorithms.extension import Extension
from canter.algorithms.ppo import PPOSettings
from canter.algorithms.schedules import GET_PROB_FUNC
from canter.compat.checkpoints import import_state
from canter.modules.build import POLICIES, install_normalizers
from canter.modules.policy import Hidden, Policy, PolicyOutput
from canter.storage.queue_rollout_storage import ActionLabelRollout
from canter.storage.rollout_storage import MiniBatch, RolloutStorage
from canter.utils.checkpoint import load_checkpoint, newest_valid_checkpoint
from canter.utils.config import build, check_settings, check_value, setting, settings, unknown_name
from canter.utils.reading import refuse_imports
from canter.utils.tree import Obs

TANH_EDGE = 1e-6  # logarithms and atanh end at 1


def _tanh(mean: Tensor, label: Tensor) -> Tensor:
    """Twice the binary cross-entropy of mean and label mapped from [-1, 1] to [0, 1], per action."""
    guess, wanted = (mean.clamp(TANH_EDGE - 1, 1 - TANH_EDGE) + 1.0) / 2.0, (label.clamp(-1.0, 1.0) + 1.0) / 2.0
    return 2.0 * F.binary_cross_entropy(guess, wanted, reduction="none")


# (..., A) mean and label -> (...,)
DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "real": lambda mean, label: torch.linalg.vector_norm(mean - label, dim=-1),
    "mse_sum": lambda mean, label: (mean - label).square().sum(-1),
    "mse": lambda mean, label: (mean - label).square().mean(-1),
    "huber": lambda mean, label: F.huber_loss(mean, label, reduction="none").mean(-1),
    "l1": lambda mean, label: (mean - label).abs().sum(-1),
    "tanh": lambda mean, label: _tanh(mean, label).mean(-1),
    "scaled_tanh": lambda mean, label: _tanh(mean, label).mean(-1) * (mean - label).abs().mean(-1),
}
TARGETS = (*DISTANCES, "max_log_prob")
UNFIT_SCHEDULERS = {
    "ReduceLROnPlateau": "it needs a metric at every step; assign alg.learning_rate in a callback",
    **dict.fromkeys(("ChainedScheduler", "SequentialLR"), "it is made of other schedulers; use one of them"),
}
TANH_TARGETS = ("tanh", "scaled_tanh")


def tanh_stats(mean: Tensor, label: Tensor) -> dict[str, Tensor]:
    """Distance (...,) of the actions, and of the values before tanh."""
    edge = 1 - TANH_EDGE
    before = torch.atanh(mean.clamp(-edge, edge)) - torch.atanh(label.clamp(-edge, edge))
    return {"l1distance": (mean - label).abs().sum(-1), "l1_before_tanh": before.abs().sum(-1)}


@settings
class TeacherSettings:
    """Hyperparameters of learning from a teacher."""

    ppo: dict[str, Any] | None = setting(None, fixed=True)
    """Settings of PPO as one dict; one that is also given by itself is not taken from it."""
    teacher_policy_class_name: str = setting("ActorCritic", fixed=True)
    """Class of the teacher, where neither `teacher_policy` nor its checkpoint names one."""
    teacher_policy: dict[str, Any] | None = setting(None, fixed=True)
    """The teacher's settings; missing ones come from its checkpoint."""
    teacher_ac_path: str | None = setting(None, fixed=True)
    """The teacher's checkpoint, or its run directory."""
    teachers: tuple[dict[str, Any], ...] | None = setting(None, fixed=True)
    """Several teachers, each as `teacher_policy` with its `teacher_ac_path`; the observation selects one."""
    teacher_from_load: bool = setting(False, fixed=True)
    """The first checkpoint that is loaded is the teacher's; it is saved with the student."""
    teacher_id_component: str | None = setting(None, fixed=True)
    """Segment of the teachers' observation with the number of the selected one, or one column for each."""
    label_action_with_critic_obs: bool = True
    """The teacher sees the critic's observation; the student's if false."""
    action_labels_from_sample: bool = False
    """Labels are sampled from the teacher's distribution; its mode if false."""
    teacher_act_prob: Any = setting("exp", low=0.0, high=1.0, host=True)
    """Probability that the teacher acts in an episode: a number, linear, exp or tanh decay, or a function."""
    update_times_scale: float = setting(100, above=0.0, host=True)
    """Iterations over which schedules decay."""
    using_ppo: bool = True
    """Learn from rewards too; if false, this is DAgger, and an adaptive learning rate does not change."""
    exclude_teacher_steps_from_surrogate: bool = True
    """Leave steps in which the teacher acted out of the surrogate loss."""
    distillation_loss_coef: Any = setting(1.0, low=0.0, host=True)
    """Weight of the distance to the teacher: a number, the name of a decay, or a function."""
    distill_target: str = setting("real", choices=TARGETS)
    """The distance: real, mse_sum, mse, huber, l1, tanh, scaled_tanh or max_log_prob."""
    distill_latent_coef: float = setting(1.0, low=0.0)
    """Weight of the distance between encoder outputs."""
    distill_latent_target: str = setting("real", choices=tuple(DISTANCES))
    """That distance: real, mse_sum, mse, huber, l1, tanh or scaled_tanh."""
    distill_latent_obs_component_mapping: dict[str, str] | None = setting(None, fixed=True)
    """Component of the student -> component of the teacher, whose encoder outputs should be equal."""
    buffer_dilation_ratio: float = setting(1.0, low=1.0, fixed=True)
    """Steps kept to learn from, as a multiple of a rollout."""
    gradient_length: int | None = setting(None, low=1, fixed=True)
    """Steps through which gradients of a recurrent student flow; the whole rollout if None."""
    lr_scheduler_class_name: str | None = setting(None, fixed=True)
    """A class of torch.optim.lr_scheduler, stepped once per update."""
    lr_scheduler: dict[str, Any] | None = setting(
        None, fixed=True, unused_if={"lr_scheduler_class_name": operator.not_}
    )
    """Its settings."""
    hidden_state_resample_prob: float = setting(0.0, low=0.0, high=1.0)
    """Fraction of trajectories that are learned from a random memory, so that students recover from any."""
    critic_warmup_iterations: int = setting(0, low=0, host=True)
    """First iterations in which only the critic learns, for a policy that can act already."""


class Teacher(Extension):
    """Frozen policies that label every step with their action and, with a falling probability, act themselves.

    Args:
        cfg: The algorithm's config, where its class names the extension.
        policies: Ready teachers, instead of those that the settings describe.
        **given: Settings.
    """

    name = "teacher"
    settings_class = TeacherSettings
    storage_class = ActionLabelRollout
    offered = ("teacher_actor_critic", "use_teacher_act_mask", "collect_transition_from_dataset", "lr_scheduler_object")

    def __init__(self, cfg: Any = None, *, policies: Sequence[Policy] = (), **given: Any) -> None:
        super().__init__(cfg, **given)
        self.policies = [policy.requires_grad_(False).eval() for policy in policies]
        self.hidden: list[dict[str, Tensor]] = []

    @classmethod
    def adjust_config(cls, cfg: Any) -> None:
        """Take the settings in `ppo` that were left at their defaults."""
        fields = cfg.__dataclass_fields__
        for name, value in check_settings("ppo", cfg.ppo or {}, PPOSettings.__dataclass_fields__).items():
            if getattr(cfg, name) == fields[name].default:
                setattr(cfg, name, check_value("ppo", fields[name], value))

    def attach(self, alg: Any) -> None:
        """Load the teachers, and check that the distances suit the policy."""
        super().attach(alg)
        self._check_target()
        cfg = self.cfg
        self.on_dataset = False
        """Whether the rollout consists of recorded steps."""
        self.is_warming_up = False
        """Whether only the critic learns."""
        self.storage_options = {
            "buffer_dilation_ratio": self.cfg.buffer_dilation_ratio,
            "max_length": self.cfg.gradient_length,
        }
        if cfg.using_ppo and cfg.buffer_dilation_ratio > 1.0:
            warnings.warn(
                "buffer_dilation_ratio > 1 lets PPO learn from old policies; it suits imitation", stacklevel=4
            )
        for purpose in ("teacher", "resample"):
            alg.new_generator(purpose)
        self.teacher_prob = alg.device_scalar(self.act_prob(0))
        self.use_teacher_act_mask = torch.zeros(0, dtype=torch.bool, device=alg.device)
        self.policies = self.policies or self._load_policies()
        layout: Any = "critic_obs_layout" if cfg.label_action_with_critic_obs else "obs_layout"
        component = cfg.teacher_id_component
        self.ids = None if component is None else getattr(alg.policy, layout).slice(component)
        self._set_weights(0)
        for _ in cfg.distill_latent_obs_component_mapping or {}:
            for owner, policy in (("student", alg.policy), *(("teacher", policy) for policy in self.policies[:1])):
                if not hasattr(policy, "get_encoder_latent"):
                    raise TypeError(f"latent distillation needs encoders; the {owner} {type(policy).__name__} has none")
        self.lr_scheduler_object = self._make_lr_scheduler()

    def _check_target(self) -> None:
        """Raise if the distance to the labels does not suit the policy's actions."""
        target, policy = self.cfg.distill_target, self.alg.policy
        if "mu" not in policy.distribution.param_shapes and target != "max_log_prob":
            raise ValueError(f"distill_target {target!r} is for Gaussian actions; use 'max_log_prob'")
        actor = getattr(policy, "actor", None)
        last = actor[-1] if isinstance(actor, torch.nn.Sequential) else None
        if target in TANH_TARGETS and not isinstance(last, torch.nn.Tanh):
            raise ValueError(f"distill_target {target!r} needs a policy with mu_activation='tanh'")

    def _make_lr_scheduler(self) -> Any:
        """The learning-rate scheduler that the settings name, or None."""
        if self.cfg.lr_scheduler_class_name is None:
            return None
        if self.alg.cfg.schedule not in ("fixed", "constant"):
            raise ValueError(f"lr_scheduler_class_name needs schedule='fixed', got {self.alg.cfg.schedule!r}")
        made = lr_scheduler_class(self.cfg.lr_scheduler_class_name)
        return made(self.alg.optimizer.optimizer, **(self.cfg.lr_scheduler or {}))

    def _load_policies(self) -> list[Policy]:
        cfg = self.cfg
        if cfg.teacher_from_load:
            return []
        given = cfg.teachers or (cfg.teacher_policy or ({} if cfg.teacher_ac_path else None),)
        if given[0] is None:
            warnings.warn(f"{type(self.alg).__name__} has no teacher: only datasets label its actions", stacklevel=5)
            return []
        if len(given) > 1 and cfg.teacher_id_component is None:
            raise ValueError(f"{len(given)} teachers need teacher_id_component, the segment that selects one of them")
        arguments = (cfg.teacher_ac_path, self.alg.policy, self.alg.device)
        return [build_teacher(cfg.teacher_policy_class_name, one, *arguments) for one in given if one is not None]

    def load(self, state: Mapping[str, Any], path: Path) -> bool:
        """Take the teacher of a student's checkpoint, or the policy of another one as the teacher: then true."""
        is_teacher = "teacher_state_dict" not in state
        state = state if is_teacher else {"model_state_dict": state["teacher_state_dict"]}
        cfg, student = self.cfg, self.alg.policy
        made = build_teacher(
            cfg.teacher_policy_class_name, cfg.teacher_policy or {}, path, student, self.alg.device, state
        )
        self.policies = [made]
        if self.alg.storage is not None:
            self.begin(self.alg.storage)
        self.alg.executor.forget()
        return is_teacher

    def _distillation_coef(self, iteration: int) -> float:
        return GET_PROB_FUNC(self.cfg.distillation_loss_coef, self.cfg.update_times_scale)(iteration)

    def _set_weights(self, iteration: int) -> None:
        """Set the weights of the losses for an iteration."""
        weights, cfg = self.alg.loss_weights, self.cfg
        weights["distillation_loss"] = self._distillation_coef(iteration)
        for student in cfg.distill_latent_obs_component_mapping or {}:
            weights[f"distill_latent_{student}"] = cfg.distill_latent_coef

    def begin(self, storage: RolloutStorage) -> None:
        """Allocate the teachers' memories, and draw the environments in which the teacher acts."""
        if self.policies:
            self.hidden = [policy.initial_hidden(storage.num_envs) for policy in self.policies]
            draws = torch.rand(storage.num_envs, generator=self.alg.generators["teacher"], device=self.alg.device)
            self.use_teacher_act_mask = draws < self.teacher_prob

    @property
    def teacher_actor_critic(self) -> Policy | None:
        """The first teacher."""
        return self.policies[0] if self.policies else None

    def label(self, obs: Obs, generator: torch.Generator) -> Tensor:
        """(N, ...) the teacher's action; its memory advances."""
        labels = []
        for policy, hidden in zip(self.policies, self.hidden, strict=True):
            params, after = policy.act_params(obs, hidden)
            for name, state in hidden.items():
                state.copy_(after[name])
            sampled = self.cfg.action_labels_from_sample
            labels.append(
                policy.distribution.sample(params, generator) if sampled else policy.distribution.mode(params)
            )
        if len(labels) == 1:
            return labels[0]
        return torch.stack(labels, 1)[torch.arange(len(labels[0]), device=labels[0].device), self.selected(obs)]

    def selected(self, obs: Any) -> Tensor:
        """(N,) number of the teacher for each environment."""
        columns = obs[:, self.ids]
        number = columns.argmax(1) if columns.shape[1] > 1 else columns[:, 0].round().long()
        return number.clamp(0, len(self.policies) - 1)

    def after_act(self, step: dict[str, Any], obs: Obs, critic_obs: Obs) -> None:
        """Label the step, and replace the actions of environments in which the teacher acts."""
        if not self.policies:
            step["action_labels"] = step["actions"]
            return
        seen = critic_obs if self.cfg.label_action_with_critic_obs else obs
        labels = self.label(seen, self.alg.generators["teacher"])
        mask, distribution = self.use_teacher_act_mask, self.alg.policy.distribution
        actions = torch.where(mask.view(-1, *[1] * (labels.dim() - 1)), labels, step["actions"])
        step["actions"], step["for_env"] = actions, distribution.to_env(actions)
        step["actions_log_prob"] = distribution.log_prob(step["params"], actions)
        step["action_labels"], step["teacher_acted"] = labels, mask.clone()

    def reset(self, ends: Tensor) -> None:
        """Zero the teachers' memories where an episode ended, and draw whether the teacher acts in the next one."""
        if not self.policies:
            return
        for hidden in self.hidden:
            for state in hidden.values():
                state.masked_fill_(ends.view(-1, 1, 1, 1), 0.0)
        mask = self.use_teacher_act_mask
        draws = torch.rand(mask.shape, generator=self.alg.generators["teacher"], device=self.alg.device)
        mask.copy_(torch.where(ends, draws < self.teacher_prob, mask))

    @torch.no_grad()
    def collect_transition_from_dataset(self, transition: Any, infos: dict[str, Any]) -> None:
        """Record a step of a dataset instead of one of the environment; its action is the label."""
        alg = self.alg
        obs, critic_obs = transition.observation, transition.privileged_observation
        alg.act(obs, obs if critic_obs is None else critic_obs)
        labels = transition.action.to(alg.device, alg.rollout.action_dtype)
        alg.transition.__dict__ = {**vars(alg.transition), "action_labels": labels}
        self.on_dataset = True
        alg.process_env_step(transition.reward.reshape(-1), transition.done.reshape(-1), infos)

    @property
    def uses_rewards(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether PPO's losses are part of the total; recorded steps have no actions of the policy."""
        return self.cfg.using_ppo and not self.on_dataset

    def begin_update(self, iteration: int) -> tuple[bool, bool]:
        """Set the schedules; the key is where the steps come from, and whether only the critic learns."""
        self.is_warming_up = iteration < self.cfg.critic_warmup_iterations
        self._set_weights(iteration)
        return (self.on_dataset, self.is_warming_up)

    def before_forward(self, batch: MiniBatch) -> None:
        """Replace some memories, and leave the teacher's steps out of the surrogate loss."""
        if self.cfg.hidden_state_resample_prob:
            batch.hidden = self.resampled(batch.hidden)
        if self.cfg.exclude_teacher_steps_from_surrogate and self.policies:
            own = ~batch.teacher_acted.squeeze(-1)  # pyright: ignore[reportAttributeAccessIssue]
            batch.learned = own if batch.valid is None else own & batch.valid

    def resampled(self, hidden: Hidden) -> Hidden:
        """(M, S, L, H) states, a fraction replaced by U(-1, 1); the same trajectories in every memory."""
        if not hidden:
            return hidden
        stream, some = self.alg.generators["resample"], next(iter(hidden.values()))
        draw = torch.rand(len(some), 1, 1, 1, generator=stream, device=some.device)
        chosen = draw < self.alg.live.hidden_state_resample_prob
        draws = {name: torch.rand(s.shape, generator=stream, device=s.device) * 2 - 1 for name, s in hidden.items()}
        return {name: torch.where(chosen, draws[name], state) for name, state in hidden.items()}

    def losses(self, terms: Terms, batch: MiniBatch, out: PolicyOutput) -> None:
        """Add the distance to the teacher; while the critic warms up, only the value loss is kept."""
        if self.is_warming_up and self.uses_rewards:
            for name in terms.losses.keys() - {"value_loss"}:
                del terms.losses[name]
        elif self.policies or self.on_dataset:
            self._add_distillation(terms, batch, out)
        elif not self.cfg.using_ppo:
            raise ValueError("there is nothing to learn from: no teacher, no dataset, and using_ppo is off")

    def _add_distillation(self, terms: Terms, batch: MiniBatch, out: PolicyOutput) -> None:
        labels, distribution = batch.action_labels, self.alg.policy.distribution  # pyright: ignore[reportAttributeAccessIssue]
        target = self.cfg.distill_target
        if target == "max_log_prob":
            distance = -distribution.log_prob(out.params, labels)
        else:
            mean = distribution.mode(out.params)
            distance = DISTANCES[target](mean, labels)
            if target in TANH_TARGETS:
                stats = tanh_stats(mean.detach(), labels)
                terms.stats.update({name: batch.mean(value) for name, value in stats.items()})
        terms.losses["distillation_loss"] = batch.mean(distance)
        seen = batch.critic_obs if self.cfg.label_action_with_critic_obs else batch.obs
        for student, teacher in (self.cfg.distill_latent_obs_component_mapping or {}).items():
            with torch.no_grad():
                wanted = self.policies[0].get_encoder_latent(seen, teacher)  # pyright: ignore[reportCallIssue]
            latent = self.alg.policy.get_encoder_latent(batch.obs, student)
            distance = DISTANCES[self.cfg.distill_latent_target](latent, wanted)
            terms.losses[f"distill_latent_{student}"] = batch.mean(distance)

    def metrics(self) -> dict[str, Tensor]:
        """Probability that the teacher acted."""
        return {"teacher_act_prob": self.teacher_prob.clone()}

    def act_prob(self, iteration: int) -> float:
        """Probability that the teacher acts in an iteration."""
        return GET_PROB_FUNC(self.cfg.teacher_act_prob, self.cfg.update_times_scale)(iteration)

    def end_update(self, rollout: RolloutStorage) -> None:
        """Step the learning-rate scheduler, and set the probability for the next rollout."""
        self.on_dataset = False
        if self.lr_scheduler_object is not None:
            self.lr_scheduler_object.step()
            self.alg.read_learning_rate()
        self.teacher_prob.fill_(self.act_prob(self.alg.current_learning_iteration + 1))

    def checkpoint_parts(self) -> dict[str, Any]:
        """The learning-rate scheduler, and a teacher that was loaded; others stay in their own checkpoints."""
        scheduler, has_loaded = self.lr_scheduler_object, self.cfg.teacher_from_load and self.policies
        parts = {} if scheduler is None else {"lr_scheduler_state_dict": scheduler}
        return parts | ({"teacher_state_dict": self.policies[0]} if has_loaded else {})

    def resume_state(self) -> dict[str, Any]:
        """The teachers' memories, and where the teacher acts."""
        memories = [{name: state.clone() for name, state in hidden.items()} for hidden in self.hidden]
        own = {"use_teacher_act_mask": self.use_teacher_act_mask.clone(), "teacher_prob": self.teacher_prob.clone()}
        return own | {"teacher": memories}

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from a `resume_state`; with other environments only the probability is the saved one."""
        if "teacher" not in state:
            raise ValueError("the checkpoint has no memory of a teacher")
        self.teacher_prob.copy_(state["teacher_prob"])
        if len(state["use_teacher_act_mask"]) != len(self.use_teacher_act_mask):
            return
        self.use_teacher_act_mask.copy_(state["use_teacher_act_mask"])
        for hidden, saved in zip(self.hidden, state["teacher"], strict=True):
            for name, value in hidden.items():
                value.copy_(saved[name])


def lr_scheduler_class(name: str) -> Any:
    """The class of torch.optim.lr_scheduler with this name."""
    if name in UNFIT_SCHEDULERS:
        raise ValueError(f"lr_scheduler_class_name={name!r} cannot be used: {UNFIT_SCHEDULERS[name]}")
    found = getattr(torch.optim.lr_scheduler, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.lr_scheduler.LRScheduler)):
        known = [other for other in vars(torch.optim.lr_scheduler) if other.endswith(("LR", "Restarts"))]
        raise ValueError(unknown_name("class", name, known, "torch.optim.lr_scheduler"))
    return found


def build_teacher(
    class_name: str,
    given: Mapping[str, Any],
    path: str | Path | None,
    student: Policy,
    device: torch.device,
    state: Mapping[str, Any] | None = None,
) -> Policy:
    """A frozen policy with the weights and normaliser of a checkpoint, or of the newest one of a run.

    Settings that `given` leaves out come from the configuration in the checkpoint, from its weights, and from the
    student. Of a `state` that was read already only the actor is loaded.
    """
    path = path or given.get("teacher_ac_path")
    file = newest_valid_checkpoint(Path(path)) if path and Path(path).is_dir() else path
    is_actor_enough = state is not None
    if state is None:
        state = {} if file is None else import_state(load_checkpoint(Path(file), "cpu"))
    weights = state.get("model_state_dict", {})
    saved = dict((state.get("config") or {}).get("policy") or {})
    refuse_imports({n: part for n, part in saved.items() if n not in given}, path, (), "give it in teacher_policy too")
    saved_name = saved.pop("class_name", None)
    name = given.get("class_name") or saved_name or class_name
    cfg = saved | {key: value for key, value in given.items() if key not in ("class_name", "teacher_ac_path")}
    for key, value in derived_settings(weights, student).items():
        if cfg.get(key) is None:
            cfg[key] = value
    if cfg.get("num_actor_obs") is None:
        raise ValueError("the teacher's num_actor_obs is not known: give it in teacher_policy, or teacher_ac_path")
    with torch.random.fork_rng(devices=[]):  # the student's weights must not depend on the teacher's
        teacher: Policy = build(POLICIES, name, cfg)
    if path is None:
        warnings.warn("the teacher has no teacher_ac_path: its weights are random", stacklevel=5)
    else:
        install_normalizers(teacher, weights)
        if is_actor_enough:
            actor = {name: value for name, value in weights.items() if name not in ("std", "log_std")}
            own = teacher.state_dict()
            noise = {name: own[name] for name in ("std", "log_std") if name in own}  # labels are means
            weights = chosen_weights(own, actor | noise, {"actor": True}, strict=True)
        try:
            teacher.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"the teacher's checkpoint {path} is of another policy: {error}") from error
    return teacher.to(device).requires_grad_(False).eval()


def derived_settings(weights: Mapping[str, Tensor], student: Policy) -> dict[str, Any]:
    """Settings derived from a checkpoint's weights, and those that teacher and student share."""
    widths = {}
    for key, first in (("num_actor_obs", "actor"), ("num_critic_obs", "critic")):
        names = (f"memory_{first[0]}.rnn.weight_ih_l0", f"{first}.0.weight")
        widths[key] = next((weights[name].shape[1] for name in names if name in weights), None)
    normalizer = weights.get("obs_normalizer._mean")
    if normalizer is not None:  # encoders come before the first weights, the normaliser before the encoders
        widths["num_actor_obs"] = normalizer.shape[-1]
    widths["num_critic_obs"] = widths["num_critic_obs"] or widths["num_actor_obs"]  # weights of an actor alone
    return {
        **widths,
        "num_actions": getattr(student, "num_actions", None),
        "action_space": getattr(student, "action_space", None),
    }
