"""Policies made of the model classes of rsl_rl 5.x: its CNNs, and classes derived from its models."""

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from canter.modules.actor_critic import ActorCritic


def model_class(name: str) -> Any:
    """A class of `rsl_rl.models` by name, or any class as "module:name"."""
    module, _, name = name.replace(":", ".").rpartition(".")
    try:
        found = importlib.import_module(module or "rsl_rl.models")
    except ImportError as error:
        way_out = "pip install rsl-rl-lib>=5" if not module or module.startswith("rsl_rl") else f"install {module}"
        raise ImportError(
            f"the model {name!r} is a class of {module or 'rsl_rl'}, which is missing: {way_out}"
        ) from error
    return getattr(found, name)


class GroupModel(nn.Module):
    """A model of rsl_rl on the observation groups `names`: a dict of them, or their vectors in one tensor."""

    def __init__(
        self, cfg: Mapping[str, Any], side: str, shapes: Mapping[str, Any], num_outputs: int, **more: Any
    ) -> None:
        super().__init__()
        self.names, self.shapes = list(shapes), {name: tuple(shape) for name, shape in shapes.items()}
        boxes: dict[str, spaces.Space] = {
            name: spaces.Box(-math.inf, math.inf, tuple(shape)) for name, shape in shapes.items()
        }
        self.widths = [math.prod(shape) for shape in shapes.values()]
        is_vector = all(len(shape) == 1 for shape in shapes.values())
        joined = spaces.Box(-math.inf, math.inf, (sum(self.widths),)) if is_vector else spaces.Dict(boxes)
        self.obs_space = joined if len(boxes) > 1 else boxes[self.names[0]]
        example = {name: torch.zeros(1, *shape) for name, shape in shapes.items()}
        options = {name: value for name, value in cfg.items() if name != "class_name" and value is not None}
        self.model: Any = model_class(cfg["class_name"])(
            example, {side: self.names}, side, num_outputs, **options, **more
        )
        if getattr(self.model, "is_recurrent", False):
            raise ValueError(
                f"{cfg['class_name']} is recurrent; use RNNModel, which canter runs as ActorCriticRecurrent"
            )

    def forward(self, obs: Any) -> Tensor:
        """(B, num_outputs)."""
        if isinstance(obs, Tensor):
            parts = obs.split(self.widths, -1) if len(self.names) > 1 else [obs]
            obs = dict(zip(self.names, parts, strict=True))
        return self.model(obs)


class RslRlModels(ActorCritic):
    """An actor and a critic of rsl_rl's own classes; canter normalises their observations and adds the noise.

    Args:
        actor_model: Class name and settings of the actor, as in rsl_rl's section `actor`.
        critic_model: The same for the critic.
        share_cnn_encoders: The critic uses the actor's image encoders.
    """

    takes_groups = True
    """Whether observations come as a dict of groups, not as one vector."""
    replaced_settings = (
        "actor_hidden_dims",
        "critic_hidden_dims",
        "activation",
        "actor_activation",
        "critic_activation",
        "mu_activation",
        "actor_layer_norm",
        "critic_layer_norm",
        "orthogonal_init",
    )
    """Settings of an `ActorCritic` that have no effect here, since the networks are rsl_rl's."""

    def __init__(
        self,
        num_actor_obs: int | None = None,
        num_critic_obs: int | None = None,
        num_actions: int = 0,
        *,
        actor_model: Mapping[str, Any],
        critic_model: Mapping[str, Any],
        share_cnn_encoders: bool = False,
        obs_segments: Mapping[str, Sequence[int]] | None = None,
        critic_obs_segments: Mapping[str, Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> None:
        obs = obs_segments or {"actor": (num_actor_obs,)}
        critic_obs = critic_obs_segments or ({"critic": (num_critic_obs,)} if num_critic_obs else obs)
        actor = GroupModel(actor_model, "actor", obs, num_actions)
        shared = {"cnns": actor.model.cnns} if share_cnn_encoders else {}
        critic = GroupModel(critic_model, "critic", critic_obs, 1, **shared)
        super().__init__(num_actions=num_actions, actor=actor, critic=critic, **kwargs)

    def import_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of an rsl_rl checkpoint under the names of this policy; its own stay as they are."""
        found: dict[str, Tensor] = {}
        sides = {"obs_normalizer": self.actor, "critic_obs_normalizer": self.critic}
        for name, value in weights.items():
            first, _, rest = name.partition(".")
            side: Any = sides.get(first)
            if first in ("actor", "critic") and not rest.startswith("model."):
                found[f"{first}.model.mlp.{rest}"] = value
            elif side is not None and not rest.startswith("leaves.") and isinstance(side.obs_space, spaces.Dict):
                # One normaliser of all vectors there, one for each group here.
                vectors = {group: shape[0] for group, shape in side.shapes.items() if len(shape) == 1}
                is_count = value.dim() == 0
                parts = [value] * len(vectors) if is_count else value.split(list(vectors.values()), -1)
                found |= {
                    f"{first}.leaves.obs/{group}.{rest}": part for group, part in zip(vectors, parts, strict=True)
                }
            else:
                found[name] = value
        return found
