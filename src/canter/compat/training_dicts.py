"""Training dicts of rsl_rl 1.x (legged_gym), 2.x, 3.x (Isaac Lab), 4.x and 5.x (mjlab) as canter's training dict.

`TABLE` translates the names. A key is applied, or it changes nothing that is learned and is listed in one line, or it
is an error that names it.
"""

import dataclasses
import importlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from canter.algorithms import REGISTRY
from canter.compat.spellings import TRANSLATED_MODULES
from canter.envs.records import warn_once
from canter.modules.build import POLICIES
from canter.utils.config import unknown_name
from canter.utils.obs_layout import ObsLayout

UNUSED = "unused"
NOISE = {"init_noise_std": "policy.init_noise_std", "noise_std_type": "policy.noise_std_type"}
RNN = {"rnn_type": "policy.rnn_type", "rnn_hidden_dim": "policy.rnn_hidden_size"}
RNN |= {"rnn_num_layers": "policy.rnn_num_layers"}

# Section of rsl_rl -> key -> place in canter's training dict. The sections top, algorithm and policy are canter's own
# too: names that are not listed stay as they are. Of the other sections every name is listed.
TABLE: dict[str, dict[str, str]] = {
    "top": {
        **dict.fromkeys(("class_name", "runner_class_name", "experiment_name", "run_name", "load_run"), UNUSED),
        **dict.fromkeys(("load_checkpoint", "checkpoint", "resume_path", "torch_compile_mode", "multi_gpu"), UNUSED),
        **dict.fromkeys(("check_for_nan", "init_member_classes", "init_at_random_ep_len"), UNUSED),
        **dict.fromkeys(("store_code_state", "neptune_project"), UNUSED),
        "empirical_normalization": "empirical_normalization",
        "logger": "logger_backend",
        "wandb_project": "logger_kwargs.wandb.project",
        "wandb_tags": "logger_kwargs.wandb.tags",
    },
    "algorithm": {
        **dict.fromkeys(("grad_reduce_bucket_mb", "init_member_classes"), UNUSED),
        "optimizer": "algorithm.optimizer_class_name",
        "share_cnn_encoders": "policy.share_cnn_encoders",
    },
    "policy": {
        "rnn_hidden_dim": "policy.rnn_hidden_size",
        "actor_obs_normalization": "algorithm.empirical_normalization",
        "critic_obs_normalization": "algorithm.critic_obs_normalization",
        "init_member_classes": UNUSED,
    },
    "actor": {
        "hidden_dims": "policy.actor_hidden_dims",
        "activation": "policy.actor_activation",
        "obs_normalization": "algorithm.empirical_normalization",
        "state_dependent_std": "policy.state_dependent_std",
        **NOISE,
        **RNN,
    },
    "critic": {
        "hidden_dims": "policy.critic_hidden_dims",
        "activation": "policy.critic_activation",
        "obs_normalization": "algorithm.critic_obs_normalization",
        **RNN,
    },
    "distribution_cfg": {
        "init_std": "policy.init_noise_std",
        "std_type": "policy.noise_std_type",
        "learn_std": "policy.learn_noise_std",
        "action_range": "policy.action_range",
    },
    "distillation": {  # the algorithm section of class_name: Distillation
        **dict.fromkeys(("grad_reduce_bucket_mb", "init_member_classes"), UNUSED),
        "num_learning_epochs": "algorithm.num_learning_epochs",
        "learning_rate": "algorithm.learning_rate",
        "max_grad_norm": "algorithm.max_grad_norm",
        "optimizer": "algorithm.optimizer_class_name",
        "precision": "algorithm.precision",
        "loss_type": "algorithm.distill_target",
        "gradient_length": "algorithm.gradient_length",
    },
}
TABLE["student"] = TABLE["actor"] | {"init_member_classes": UNUSED}
# The label is the teacher's mean; whether its observation is normalised is read from its checkpoint.
TABLE["teacher"] = TABLE["student"] | dict.fromkeys((*NOISE, "obs_normalization"), UNUSED)
# Defaults of PPO in rsl_rl 3.0 and later; those of 1.x and 2.x are canter's documented ones.
DEFAULTS: dict[str, Any] = {
    "num_learning_epochs": 5,
    "num_mini_batches": 4,
    "gamma": 0.99,
    "entropy_coef": 0.01,
    "schedule": "adaptive",
}
# Defaults of its Distillation; a norm that is left out, or 0, clips nothing.
DISTILLATION: dict[str, Any] = {"num_learning_epochs": 1, "learning_rate": 1e-3, "gradient_length": 15}
PER_SECOND = "weight_per_second"  # of RND, until the environment has said how long its step is
STD_RANGE = (1e-6, 1e6)  # of rsl_rl's Gaussian distributions
ACTIVATIONS = {"swish": "silu", "crelu": "CELU"}
WRITERS = {"WandbLogWriter": "wandb", "TensorboardLogWriter": "tensorboard"}
RSL_RL_MODELS = "RslRlModels"
POLICY_CLASSES = {"MLPModel": "ActorCritic", "RNNModel": "ActorCriticRecurrent"}


def as_sections(cfg: Any) -> Any:
    """Nested dicts of a dict or dataclass; fields that Isaac Lab leaves at `MISSING` are left out."""
    if dataclasses.is_dataclass(cfg) and not isinstance(cfg, type):
        cfg = {f.name: getattr(cfg, f.name, dataclasses.MISSING) for f in dataclasses.fields(cfg)}
    if isinstance(cfg, Mapping):
        return {key: as_sections(value) for key, value in cfg.items() if value is not dataclasses.MISSING}
    return cfg


def translated(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """A training dict of any library as canter's; the keys that change nothing are listed in one warning."""
    return Translation(cfg).run()


class Translation:
    """Builds canter's training dict from the sections of one of rsl_rl's."""

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        top = as_sections(cfg)
        top |= top.pop("runner", None) or {}
        for name in ("policy", "algorithm"):
            if top.get(name) is not None and not isinstance(top[name], Mapping):
                example = f"{{'class_name': {top[name]!r}}}"
                raise TypeError(f"{name} must be a dict of settings, such as {example}, got {top[name]!r}")
        self.policy, self.algorithm = (dict(top.pop(name, None) or {}) for name in ("policy", "algorithm"))
        agents = {name: entry.agent_class for name, entry in REGISTRY.items()}
        for section, classes in ((self.policy, POLICIES), (self.algorithm, agents)):
            if section.get("class_name"):
                section["class_name"] = registered_name(section["class_name"], classes)
        names = ("actor", "critic", "student", "teacher")
        self.models = {name: top.pop(name) for name in names if isinstance(top.get(name), Mapping)}
        self.is_distillation = self.algorithm.get("class_name") == "Distillation"
        self.top, self.out = top, {"algorithm": {}, "policy": {}}
        self.unused: list[str] = []
        sets = top.get("obs_groups") or {}
        self.is_third = bool(self.models) or "policy" in sets
        self.is_third |= any(f"{name}_obs_normalization" in self.policy for name in ("actor", "critic"))
        """Whether the dict is of rsl_rl 3.0 or later."""
        self.is_rsl_rl = self.is_third or any(TABLE["top"].get(name) == UNUSED for name in top)
        if "policy" in sets and "actor" not in sets:  # so that the dict of a run is not taken for rsl_rl's once more
            top["obs_groups"] = {"actor" if name == "policy" else name: groups for name, groups in sets.items()}

    def run(self) -> dict[str, Any]:
        """The training dict; the unused keys are listed in one line."""
        kind = str(self.policy.get("class_name", "ActorCritic"))
        if self.is_distillation:
            self._distillation()
        elif kind.startswith("StudentTeacher"):
            raise ValueError(f"policy.class_name={kind!r} needs algorithm.class_name='Distillation'")
        else:
            if self.is_third:
                self.out["algorithm"] |= DEFAULTS
                # Without a setting for both, each network has its own, and rsl_rl's default is False.
                if "empirical_normalization" not in self.algorithm and self.top.get("empirical_normalization") is None:
                    self.out["algorithm"]["critic_obs_normalization"] = False
            if self.models:
                self._models()
            elif self.is_third:
                self._recurrent_or_not(self.policy, kind.endswith("Recurrent"))
            self._algorithm()
        self._logger()
        for section in ("policy", "algorithm", "top"):
            self._move(section, getattr(self, section))
        self._activations(self.out["policy"])
        self._noise()
        if self.unused:
            warn_once(f"not used here: {', '.join(self.unused)}")
        return self.out

    def _put(self, place: str, value: Any, source: str) -> None:
        *path, name = place.split(".")
        node = self.out
        for part in path:
            node = node.setdefault(part, {})
        if name in node and node[name] != value and place in RNN.values():
            both = f"{name} is {node[name]!r} in the actor and {value!r} in the critic"
            raise ValueError(f"{both}: the memories of ActorCriticRecurrent are alike; use one value ({source})")
        node[name] = value

    def _move(self, section: str, given: Mapping[str, Any]) -> None:
        is_own = section in ("top", "policy", "algorithm")
        prefix = {"top": "", "distillation": "algorithm."}.get(section, f"{section}.")
        for key, value in given.items():
            place, source = TABLE[section].get(key), prefix + key
            if place is None and is_own:
                place = source
            if place is None:
                if value is not None:
                    raise ValueError(
                        unknown_name("setting", source, [prefix + k for k in TABLE[section]], otherwise="leave it out")
                    )
            elif place == UNUSED:
                if value not in (None, "", {}, [], ()):
                    self.unused.append(source)
            elif key not in TABLE[section] or value not in (None, {}):  # Isaac Lab writes {} for a field left out
                self._put(place, value, source)

    def _recurrent_or_not(self, model: dict[str, Any], is_recurrent: bool) -> None:
        """Leave out the settings of a memory that is not there, which rsl_rl ignores too."""
        if not is_recurrent:
            for name in (*RNN, "rnn_hidden_size"):
                model.pop(name, None)

    def _models(self) -> None:
        """The sections actor and critic of rsl_rl 4.x and 5.x."""
        if set(self.models) != {"actor", "critic"}:
            names = " and ".join(repr(name) for name in self.models)
            raise ValueError(f"the training dict has a section {names} alone; give actor and critic")
        kinds = {name: class_path(model.pop("class_name", "MLPModel")) for name, model in self.models.items()}
        if kinds["actor"] != kinds["critic"] and "RNNModel" in kinds.values():
            both = f"actor.class_name={kinds['actor']!r} and critic.class_name={kinds['critic']!r}"
            raise ValueError(f"{both}: both must have a memory or none; use RNNModel for both")
        self.out["algorithm"]["clip_grads_separately"] = True
        actor, critic = self.models["actor"], self.models["critic"]
        if self.policy:  # Isaac Lab's section for rsl_rl 3.x, beside those that replace it
            self.unused.append("policy")
            self.policy = {}
        self._distribution(actor, "actor")
        if critic.pop("distribution_cfg", None) is not None or critic.pop("stochastic", None):
            raise ValueError("critic.distribution_cfg must be None: a critic has one value")
        for name in (*NOISE, "state_dependent_std"):  # of a critic rsl_rl 4.0 ignores them
            critic.pop(name, None)
        for name, model in self.models.items():
            self._recurrent_or_not(model, kinds[name] == "RNNModel")
        policy = self.out["policy"]
        is_mixed = kinds["actor"] != kinds["critic"]
        policy["class_name"] = RSL_RL_MODELS if is_mixed else POLICY_CLASSES.get(kinds["actor"], RSL_RL_MODELS)
        is_plain = not policy.get("state_dependent_std") and "action_distribution" not in policy
        if policy["class_name"] == RSL_RL_MODELS and not is_plain:
            raise ValueError(f"actor.class_name={kinds['actor']!r} needs distribution_cfg of GaussianDistribution")
        for name, model in self.models.items():
            if policy["class_name"] == RSL_RL_MODELS:
                own = {key: model.pop(key) for key in list(model) if key not in TABLE[name] or key in MODEL_KEYS}
                policy[f"{name}_model"] = {"class_name": kinds[name], **own}
            self._move(name, model)

    def _distribution(self, actor: dict[str, Any], owner: str) -> None:
        """The actor's distribution: of rsl_rl 5.x as a section, of 4.0 as settings of the model."""
        cfg, stochastic = actor.pop("distribution_cfg", None), actor.pop("stochastic", None)
        if cfg is None:
            if not stochastic:
                raise ValueError("actor.distribution_cfg is None, but PPO explores; give it {'class_name': ...}")
            return
        for name in (*NOISE, "state_dependent_std"):  # Isaac Lab keeps the names of 4.0 beside the section
            actor.pop(name, None)
        class_name = cfg.pop("class_name", "GaussianDistribution").rpartition(":")[2].rpartition(".")[2]
        if class_name == "BetaDistribution":
            self.out["policy"] |= {"action_distribution": "beta", "action_range": (-1.0, 1.0)}
        elif class_name in ("GaussianDistribution", "HeteroscedasticGaussianDistribution"):
            low, high = cfg.pop("std_range", STD_RANGE)
            self.out["algorithm"] |= {"clip_min_std": max(float(low), STD_RANGE[0]), "clip_max_std": float(high)}
            self.out["policy"]["state_dependent_std"] = class_name.startswith("Hetero")
        else:
            known = "GaussianDistribution, HeteroscedasticGaussianDistribution and BetaDistribution"
            raise ValueError(f"{owner}.distribution_cfg.class_name={class_name!r} is not known; there are {known}")
        self._move("distribution_cfg", cfg)

    def _noise(self) -> None:
        """The noise of rsl_rl's network output is clamped; canter's "scalar" passes it through softplus."""
        policy = self.out["policy"]
        if self.is_third and policy.get("state_dependent_std") and policy.get("noise_std_type", "scalar") == "scalar":
            policy["noise_std_type"] = "clamped"

    def _algorithm(self) -> None:
        algorithm = self.algorithm
        if algorithm.get("desired_kl", 0.0) is None:  # rsl_rl then leaves the learning rate alone
            algorithm |= {"schedule": "fixed"}
            del algorithm["desired_kl"]
        if algorithm.pop("use_mixed_precision", None):
            algorithm["precision"] = "bf16"
        if self.out["policy"].get("class_name") != RSL_RL_MODELS and algorithm.pop("share_cnn_encoders", None):
            raise ValueError("algorithm.share_cnn_encoders=True needs actor and critic of class CNNModel")
        symmetry = algorithm.get("symmetry_cfg")
        if symmetry and symmetry.get("data_augmentation_func", "") is None:
            way_out = "name the function, or leave symmetry_cfg out"
            raise ValueError(f"algorithm.symmetry_cfg.data_augmentation_func is None; {way_out}")
        rnd = algorithm.get("rnd_cfg")
        if rnd and self.is_rsl_rl and PER_SECOND not in rnd:
            renamed = {PER_SECOND if name == "weight" else name: value for name, value in rnd.items()}
            algorithm["rnd_cfg"] = {PER_SECOND: 0.0} | renamed
        is_used = symmetry and any(symmetry.get(flag) for flag in ("use_data_augmentation", "use_mirror_loss"))
        if symmetry and "data_augmentation_func" in symmetry and not is_used:
            self.unused.append("algorithm.symmetry_cfg")  # rsl_rl then only logs the asymmetry
            algorithm["symmetry_cfg"] = None

    def _distillation(self) -> None:
        """TPPO without PPO's losses; the teacher is in the place of the critic, and its weights are loaded later."""
        sections = self._student_and_teacher()
        teacher = Translation({})
        teacher.is_third = True
        for translation, owner in ((teacher, "teacher"), (self, "student")):
            translation._imitation_network(owner, sections[owner])
        teacher._activations(teacher.out["policy"])
        teacher._noise()
        self.unused += teacher.unused
        given = DISTILLATION | {name: value for name, value in self.algorithm.items() if name != "class_name"}
        steps, length, loss = self.top.get("num_steps_per_env", 24), given["gradient_length"], given.get("loss_type")
        if steps % length:
            divisor = max(count for count in range(1, min(steps, length) + 1) if steps % count == 0)
            problem = f"algorithm.gradient_length={length} does not divide num_steps_per_env={steps}"
            raise ValueError(f"{problem}, so rsl_rl learns nothing from the last steps; use {divisor}")
        if loss not in (None, "mse", "huber"):
            raise ValueError(f"algorithm.loss_type={loss!r} is not known; there are mse and huber")
        given |= {"loss_type": loss or "mse", "max_grad_norm": given.get("max_grad_norm") or math.inf}
        given |= {"precision": "bf16"} if given.pop("use_mixed_precision", None) else {}
        self._move("distillation", given)
        # rsl_rl adds up the losses of `gradient_length` steps before each step of the optimizer.
        self.out["algorithm"] |= {
            "class_name": "TPPO",
            "using_ppo": False,
            "teacher_from_load": True,
            "teacher_act_prob": 0.0,
            "teacher_policy": teacher.out["policy"],
            "num_mini_batches": steps // length,
            "schedule": "fixed",
            "distillation_loss_coef": float(length),
            "critic_obs_normalization": False,
            "timeout_bootstrap": "none",
        }
        sets = self.top.get("obs_groups") or {}
        student = sets.get("student") or sets.get("policy") or sets.get("actor") or []
        self.top["obs_groups"] = {"student": student, "teacher": sets.get("teacher") or []}
        self.algorithm = {}

    def _student_and_teacher(self) -> dict[str, dict[str, Any]]:
        """The sections student and teacher of rsl_rl 4.x and 5.x, made from the policy of 2.x and 3.x."""
        if self.models:
            if set(self.models) != {"student", "teacher"}:
                raise ValueError(f"Distillation needs the sections student and teacher, got {', '.join(self.models)}")
            self.unused += ["policy"] if self.policy else []
            self.policy = {}
            return self.models
        policy, self.policy = self.policy, {}
        kind = policy.pop("class_name", "StudentTeacher")
        if kind not in ("StudentTeacher", "StudentTeacherRecurrent"):
            known = "StudentTeacher and StudentTeacherRecurrent"
            raise ValueError(f"policy.class_name={kind!r} is no policy of Distillation; there are {known}")
        memories = {"student": kind.endswith("Recurrent")}
        memories["teacher"] = bool(policy.pop("teacher_recurrent", False)) and memories["student"]
        if "rnn_hidden_size" in policy:
            policy.setdefault("rnn_hidden_dim", policy.pop("rnn_hidden_size"))
        noise = {"init_noise_std": 0.1, "stochastic": True} | {n: policy.pop(n) for n in NOISE if n in policy}
        own = {owner: {n: policy.pop(n) for n in list(policy) if n.startswith(f"{owner}_")} for owner in memories}
        made = {}
        for owner, has_memory in memories.items():
            renamed = {name.removeprefix(f"{owner}_"): value for name, value in own[owner].items()}
            made[owner] = {**policy, "class_name": "RNNModel" if has_memory else "MLPModel", **renamed}
        return made | {"student": made["student"] | noise}

    def _imitation_network(self, owner: str, model: dict[str, Any]) -> None:
        """The policy of a student or a teacher; its critic is not used."""
        kind = class_path(model.pop("class_name", "MLPModel"))
        if kind not in POLICY_CLASSES:
            raise ValueError(f"{owner}.class_name={kind!r} cannot be distilled; use {' or '.join(POLICY_CLASSES)}")
        if model.get("distribution_cfg") is None and not model.get("stochastic"):
            model |= {"stochastic": True, "init_noise_std": STD_RANGE[0]}  # it acts by its mean
        self._distribution(model, owner)
        if "action_distribution" in self.out["policy"]:
            raise ValueError(
                f"{owner}.distribution_cfg: BetaDistribution cannot be distilled; use GaussianDistribution"
            )
        self._recurrent_or_not(model, kind == "RNNModel")
        self._move(owner, model)
        self.out["policy"] |= {"class_name": POLICY_CLASSES[kind], "critic_hidden_dims": []}

    def _logger(self) -> None:
        logger = self.top.get("logger")
        if isinstance(logger, Mapping):
            options = dict(logger)
            name = str(options.pop("class_name", "tensorboard"))
            self.top["logger"] = WRITERS.get(name, name)
            if "project_name" in options:
                self.top[f"{self.top['logger']}_project"] = options.pop("project_name")
            self.unused += [f"logger.{key}" for key in options]
        elif isinstance(logger, str):
            self.top["logger"] = logger.lower()
        if not self.top.get("wandb_tags"):
            self.top.pop("wandb_tags", None)

    def _activations(self, policy: dict[str, Any]) -> None:
        for name in ("activation", "actor_activation", "critic_activation"):
            if policy.get(name) == "swish" or (self.is_third and policy.get(name) == "crelu"):
                policy[name] = ACTIVATIONS[policy[name]]


MODEL_KEYS = ("hidden_dims", "activation", "cnn_cfg")
"""Settings that rsl_rl's own models get themselves."""


def class_path(given: Any) -> str:
    """The name of a class, given as a name or as the class; without its module if it is rsl_rl's or canter's own."""
    path = f"{given.__module__}:{given.__qualname__}" if isinstance(given, type) else str(given)
    return path.replace(":", ".").rpartition(".")[2] if path.startswith((*TRANSLATED_MODULES, "canter.")) else path


def registered_name(given: Any, classes: Mapping[str, type]) -> str:
    """The name under which a class, or a path to it, is registered; another path stays as it is."""
    path = class_path(given)
    paths = {f"{cls.__module__}.{cls.__qualname__}": name for name, cls in classes.items()}
    return paths.get(path.replace(":", "."), path)


def complete(plan: Any, env: Any) -> None:
    """Settle in the plan of a run what rsl_rl reads from the environment: widths, the step, mirror images."""
    for name, width in (("actor_hidden_dims", env.num_obs), ("critic_hidden_dims", env.num_privileged_obs)):
        dims = plan.policy.get(name)
        if isinstance(dims, (list, tuple)) and -1 in dims:
            if plan.policy["class_name"].endswith("Recurrent"):
                width = plan.policy.get("rnn_hidden_size", 256)
            plan.policy[name] = [width or env.num_obs if dim == -1 else dim for dim in dims]
    if PER_SECOND in (getattr(plan.cfg, "rnd_cfg", None) or {}):
        plan.cfg.rnd_cfg = complete_rnd(plan.cfg.rnd_cfg, plan.obs_groups or {}, env)
    symmetry = getattr(plan.cfg, "symmetry_cfg", None)
    if symmetry and "data_augmentation_func" in symmetry:
        plan.cfg.symmetry_cfg = mirrors_of(symmetry, env)


def complete_rnd(cfg: Mapping[str, Any], obs_groups: Mapping[str, Any], env: Any) -> dict[str, Any]:
    """RND settings with the weight of one step; rsl_rl's weight is per second."""
    critic = list((getattr(env, "sets", None) or ([], ["critic"]))[1])
    default = "rnd_state" if "rnd_state" in getattr(env, "group_shapes", ()) else "policy"
    states = list(obs_groups.get("rnd_state", [default] if obs_groups else critic))
    if states != critic:
        problem = f"obs_groups['rnd_state'] is {states}, but obs_groups['critic'] is {critic}"
        raise ValueError(f"{problem}: canter's RND sees the critic's observation; use the same groups for both")
    step = getattr(getattr(env, "unwrapped", env), "step_dt", None)
    if step is None:
        raise ValueError("algorithm.rnd_cfg: rsl_rl multiplies the weight by env.unwrapped.step_dt, which is missing")
    width = env.num_privileged_obs or env.num_obs
    made = {key: value for key, value in cfg.items() if key not in ("num_states", "obs_groups")}
    made["weight"] = float(made.pop(PER_SECOND)) * float(step)
    for name in ("predictor_hidden_dims", "target_hidden_dims"):
        if name in made:
            made[name] = tuple(width if dim == -1 else int(dim) for dim in made[name])
    return made


def mirrors_of(cfg: Mapping[str, Any], env: Any) -> dict[str, Any]:
    """Canter's mirrors from rsl_rl's `data_augmentation_func`, which is asked for the images of unit vectors."""
    from tensordict import TensorDict  # the function takes no other mapping

    function, owner = cfg["data_augmentation_func"], env.env
    if isinstance(function, str):
        module, _, name = function.replace(":", ".").rpartition(".")
        function = getattr(importlib.import_module(module), name)
    sizes = {name: math.prod(shape) for name, shape in env.group_shapes.items()}
    total = sum(sizes.values())
    parts = torch.eye(total + 1, total, device=env.device).split(list(sizes.values()), dim=1)  # the last row is zero
    groups = TensorDict(dict(zip(sizes, parts, strict=True)), batch_size=[total + 1])
    seen = function(env=owner, obs=groups, actions=None)[0]
    images = torch.cat([seen[name] for name in sizes], dim=1)
    moved = function(env=owner, obs=None, actions=torch.eye(env.num_actions + 1, env.num_actions, device=env.device))[1]
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    made: dict[str, Any] = {"actions": signed_permutation(moved, range(env.num_actions), "actions")}
    for name, names in zip(("obs", "critic_obs"), env.sets, strict=True):
        columns = [starts[group] + i for group in names for i in range(sizes[group])]
        layout = ObsLayout(getattr(env, f"{name}_segments") or {"obs": len(columns)})
        made[name] = {
            part: signed_permutation(images, columns[layout.slice(part)], f"{name} {part!r}") for part in layout.shapes
        }
    # rsl_rl averages the squares over the actions, canter adds them up.
    weight = float(cfg.get("mirror_loss_coeff", 0.0)) / env.num_actions if cfg.get("use_mirror_loss") else 0.0
    return {**made, "augment": bool(cfg.get("use_data_augmentation")), "mirror_loss_coef": weight}


def signed_permutation(images: torch.Tensor, columns: Sequence[int], what: str) -> dict[str, list[Any]]:
    """The mirror of a vector at `columns`, from the images of the unit vectors and of zero below their originals."""
    count = images.shape[1] + 1
    if len(images) != 2 * count:
        found = f"gives {len(images) // count - 1} images of every step"
        raise ValueError(f"symmetry_cfg.data_augmentation_func {found}; canter learns from one: let it give the mirror")
    matrix = images[count:-1, list(columns)]  # (every entry, columns)
    source = matrix.abs().argmax(0)
    permutation = [list(columns).index(i) if i in columns else -1 for i in source.tolist()]
    signs = matrix.gather(0, source[None])[0]
    expected = torch.zeros_like(matrix).scatter_(0, source[None], signs[None])
    is_plain = bool((signs.abs() == 1).all()) and torch.equal(matrix, expected) and not images[-1].any()
    if not is_plain or -1 in permutation:
        raise ValueError(
            f"symmetry_cfg.data_augmentation_func does not exchange and negate the entries of {what} alone; give "
            "canter's symmetry_cfg (obs, critic_obs and actions mirrors) instead"
        )
    return {"permutation": permutation, "signs": [int(sign) for sign in signs.tolist()]}
