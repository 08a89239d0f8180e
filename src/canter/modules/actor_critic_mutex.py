"""Policies made of trained sub-policies, of which one acts at a time; loading them from their run directories."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from canter.compat.checkpoints import known_settings
from canter.modules.actor_critic import ActorCritic
from canter.modules.build import NETWORKS, POLICIES, build_pair, install_normalizers
from canter.modules.distributions import Gaussian, Params
from canter.modules.policy import Context, Policy
from canter.utils.checkpoint import check_compatible, find_checkpoints, load_checkpoint, newest_valid_checkpoint
from canter.utils.config import build, refuse_unknown, setting_names
from canter.utils.obs_layout import ObsLayout
from canter.utils.reading import read_json, read_yaml, refuse_imports

# Settings of a sub-policy that the mutex overrides.
GIVEN = ("num_actor_obs", "num_critic_obs", "num_actions", "obs_segments", "critic_obs_segments", "action_space")


class ActorCriticMutex(ActorCritic):
    """Loads sub-policies from run directories; a subclass chooses which of them acts.

    Args:
        num_actor_obs: Width of the observation, the same for every sub-policy.
        sub_policy_class_name: Class of the sub-policies; None takes the one in each run's configuration.
        sub_policy_paths: Run directories: config.yaml, or an st_rl config.json, and the newest model_<number>.pt.
        obs_segments: Names and shapes of the observation's parts, in order.
        critic_obs_segments: The same for the critic; the actor's if None.
        env_action_scale: Action scale of the environment, one number or one per action.
        action_space: Bounds for sub-policies that need some.
    """

    has_entropy = False
    replaced_settings = tuple(setting_names(ActorCritic) - set(GIVEN))
    """Settings of an `ActorCritic` that have no meaning here, since the networks are those of the sub-policies."""

    def __init__(
        self,
        num_actor_obs: int,
        num_critic_obs: int,
        num_actions: int,
        sub_policy_class_name: str | None = None,
        sub_policy_paths: Sequence[str | Path] = (),
        obs_segments: Mapping[str, Any] | None = None,
        critic_obs_segments: Mapping[str, Any] | None = None,
        env_action_scale: float | Sequence[float] = 0.5,
        *,
        action_space: Any = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), (name for name, value in unknown.items() if value is not None))
        Policy.__init__(self)  # without networks of its own
        self.num_actions, self.distribution = num_actions, Gaussian(num_actions)
        self.obs_layout = ObsLayout(obs_segments or {"obs": (num_actor_obs,)})
        self.critic_obs_layout = ObsLayout(critic_obs_segments or obs_segments or {"obs": (num_critic_obs,)})
        self.env_action_scale = nn.Buffer(self._scale(env_action_scale, "env_action_scale"))
        if not sub_policy_paths:
            warnings.warn(f"{type(self).__name__} has no sub_policy_paths: no sub-policy to choose", stacklevel=2)
        given = (num_actor_obs, num_critic_obs, num_actions, obs_segments, critic_obs_segments, action_space)
        shared: dict[str, Any] = dict(zip(GIVEN, given, strict=True))
        self.submodules: Any = nn.ModuleList()
        """The sub-policies, in the order of their paths."""
        self.sub_policy_paths = [Path(path) for path in sub_policy_paths]
        self.configs = [read_config(path) for path in self.sub_policy_paths]
        for i, (path, config) in enumerate(zip(self.sub_policy_paths, self.configs, strict=True)):
            self.submodules.append(load_sub_policy(path, config, sub_policy_class_name, shared))
            scale = self._setting(i, "control", "action_scale", env_action_scale)
            self.register_buffer(f"subpolicy_action_scale_{i}", self._scale(scale, f"control.action_scale of {path}"))
        self.is_recurrent = any(policy.is_recurrent for policy in self.submodules)

    def _scale(self, given: Any, name: str) -> Tensor:
        """A scalar or (A,) tensor."""
        scale = torch.as_tensor(given, dtype=torch.float32)
        if scale.shape not in ((), (self.num_actions,)) or not bool((scale != 0).all()):
            raise ValueError(f"{name} is {given} for {self.num_actions} actions; give one number except 0, or one each")
        return scale.clone()

    def _setting(self, i: int, section: str, name: str, default: Any) -> Any:
        """A setting of a sub-policy's environment; a config.yaml may leave it out, a config.json of st_rl may not."""
        path, config = self.sub_policy_paths[i], self.configs[i]
        values = config.get(section) or (config.get("run") or {}).get(section) or {}
        if name not in values and not (path / "config.yaml").is_file():
            raise KeyError(f"{path / 'config.json'} has no {section}.{name}")
        return values.get(name, default)

    def clip_std(self, min: Any = None, max: Any = None) -> None:  # noqa: A002 (documented names)
        """Do nothing: the noise of the sub-policies is not used."""

    def actor_params(self, obs: Any, ctx: Context) -> Params:
        """Refuse: a subclass chooses the sub-policy."""
        raise NotImplementedError(f"{type(self).__name__} chooses no sub-policy; use or extend ActorCriticFieldMutex")

    def critic_value(self, critic_obs: Any, ctx: Context) -> Tensor:
        """Refuse: the critics of the sub-policies were trained on different tasks."""
        raise NotImplementedError(f"{type(self).__name__} has no value; its sub-policies were trained separately")


def read_config(directory: Path) -> dict[str, Any]:
    """The configuration of a run: the config.yaml that our runs write beside a config.json, or st_rl's config.json."""
    for name, read in (("config.yaml", read_yaml), ("config.json", read_json)):
        if (directory / name).is_file():
            config = read(directory / name, root=directory)
            if not isinstance(config.get("policy"), dict):
                raise ValueError(f"{directory / name} has no section 'policy' with the settings of the policy")
            refuse_imports(config["policy"], directory / name, (), "train it with a policy that canter has by name")
            return config
    reason = "has neither config.yaml nor config.json" if directory.is_dir() else "is not a directory"
    raise FileNotFoundError(f"{directory} {reason}; give the run directory of the sub-policy")


def load_sub_policy(
    directory: Path, config: Mapping[str, Any], class_name: str | None, shared: Mapping[str, Any]
) -> Policy:
    """The policy of a run, frozen, from its newest complete model_<number>.pt or its only file called model*.pt."""
    own = {name: value for name, value in config["policy"].items() if name not in (*GIVEN, "class_name")}
    is_old = not (directory / "config.yaml").is_file()
    default = "build_pair" if "actor_class" in own else "ActorCritic"
    name = class_name or config["policy"].get("class_name") or default
    found = sorted(path for path in directory.glob("model*.pt") if path.is_file())
    if find_checkpoints(directory):
        found = [newest_valid_checkpoint(directory)]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ValueError(f"{directory} has several models, {names}, and no number says which is newest: keep one")
    if not found:
        raise FileNotFoundError(f"{directory} has no model: no file called model*.pt")
    weights = load_checkpoint(found[0], "cpu").get("model_state_dict")
    if not isinstance(weights, Mapping):
        raise ValueError(f"the model in {directory} has no model_state_dict")
    try:
        if is_old and name in POLICIES:
            own = known_settings(POLICIES[name], own, directory / "config.json")
        policy = pair_policy(own, shared) if name == "build_pair" else build(POLICIES, name, {**own, **shared})
        install_normalizers(policy, weights)
        check_compatible(policy.state_dict(), weights, name)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        kind = next(kind for kind in (KeyError, TypeError, ValueError, RuntimeError) if isinstance(error, kind))
        raise kind(f"the sub-policy in {directory} cannot be built: {error.args[0]}") from error
    policy.load_state_dict(dict(weights))
    return policy.requires_grad_(False).eval()


def pair_policy(own: Mapping[str, Any], shared: Mapping[str, Any]) -> Policy:
    """The policy of a run with `actor_class` and `critic_class`."""
    obs, critic_obs, actions = (Box(-np.inf, np.inf, (shared[name],)) for name in GIVEN[:3])
    classes = {name: NETWORKS[own[name]] for name in ("actor_class", "critic_class")}
    return build_pair(obs, critic_obs, shared["action_space"] or actions, **{**own, **classes})
