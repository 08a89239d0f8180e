"""Left-right symmetry: the policy also learns from the mirror image of every step.

A mirror is a signed permutation: `mirrored[i] = signs[i] * vector[permutation[i]]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from canter.algorithms.algorithm import Terms
from canter.algorithms.extension import Extension
from canter.modules.distributions import Beta, Categorical, Gaussian, MultiCategorical, Params, SquashedGaussian
from canter.modules.policy import Carried, PolicyOutput
from canter.storage.rollout_storage import MiniBatch, RolloutStorage
from canter.utils.config import check_settings, setting, settings
from canter.utils.obs_layout import ObsLayout
from canter.utils.tree import Obs

PREFIX = "mirrored_"
AVERAGED = ("surrogate_loss", "value_loss")


@settings
class SymmetrySettings:
    """The setting that switches symmetry on."""

    symmetry_cfg: dict[str, Any] | None = setting(None, fixed=True)
    """Learn from mirror images too: mirrors of `obs`, `critic_obs` and `actions`, `augment`, `mirror_loss_coef`."""


@settings
class SymmetryConfig:
    """Mirrors of observations and actions, and how they are used."""

    obs: Any
    """Mirror of every component of the actor's observation, by name."""
    actions: Any
    """Mirror of the action."""
    critic_obs: Any = None
    """The same for the critic; None where both see the same components."""
    augment: bool = True
    """Learn from the mirror image of every step too."""
    mirror_loss_coef: float = setting(0.0, low=0.0)
    """Weight of the difference between the action for a mirrored observation and the mirrored action."""


class _Twin(Carried):
    """The state of a memory that sees the mirror images."""

    def __init__(self, memory: Carried) -> None:
        self.memory, self.state_shape = memory, memory.state_shape

    def zero_state(self, num_envs: int) -> Tensor:
        """Zeros, as the memory begins."""
        return self.memory.zero_state(num_envs)


class Symmetry(Extension):
    """Averages PPO's losses with those of mirrored minibatches, and adds a loss of asymmetry."""

    name = "symmetry"
    settings_class = SymmetrySettings
    switch = "symmetry_cfg"

    def attach(self, alg: Any) -> None:
        """Build the mirrors for the policy's observations and actions."""
        super().attach(alg)
        policy, device = alg.policy, alg.device
        self.mirrors = cfg = SymmetryConfig(**self.cfg.symmetry_cfg)
        layout, critic_layout = layouts(policy)
        if cfg.critic_obs is None and critic_layout.shapes != layout.shapes:
            seen = list(critic_layout.shapes)
            raise ValueError(f"the critic sees {seen}; give symmetry_cfg critic_obs mirrors for them")
        if not cfg.augment and not cfg.mirror_loss_coef:
            raise ValueError("symmetry_cfg neither augments nor has a mirror_loss_coef; leave it out, or set one")
        self.obs = observation_mirror(layout, cfg.obs, "obs").to(device)
        critic = cfg.obs if cfg.critic_obs is None else cfg.critic_obs
        self.critic_obs = observation_mirror(critic_layout, critic, "critic_obs").to(device)
        self.actions = ActionMirror(policy.distribution, cfg.actions, device)
        memories = {name: memory for name, memory in policy.memories.items() if name not in policy.carried}
        self.twins = {name: PREFIX + name for name in memories}
        policy.carried |= {PREFIX + name: _Twin(memory) for name, memory in memories.items()}
        alg.loss_weights["mirror_loss"] = cfg.mirror_loss_coef

    def after_act(self, step: dict[str, Any], obs: Obs, critic_obs: Obs) -> None:
        """Advance the memories that see the mirror images."""
        if self.twins:
            own = {name: step["hidden"][twin] for name, twin in self.twins.items()}
            out = self.alg.forward(self.obs(obs), self.critic_obs(critic_obs), own, None, step["random_masks"])  # pyright: ignore[reportArgumentType]
            step["next_hidden"] = step["next_hidden"] | {twin: out.hidden[name] for name, twin in self.twins.items()}

    def mirrored(self, batch: MiniBatch) -> MiniBatch:
        """The minibatch as the mirrored robot would have recorded it."""
        images = {
            "obs": self.obs(batch.obs),  # pyright: ignore[reportArgumentType]
            "critic_obs": self.critic_obs(batch.critic_obs),  # pyright: ignore[reportArgumentType]
            "actions": self.actions.actions(batch.actions),
            "old_params": self.actions.params(batch.old_params),
            "hidden": {name: batch.hidden[twin] for name, twin in self.twins.items()},
        }
        return MiniBatch(**{**vars(batch), **images})

    def losses(self, terms: Terms, batch: MiniBatch, out: PolicyOutput) -> None:
        """Average PPO's losses with those of the mirror image; statistics stay those of the original."""
        image = self.mirrored(batch)
        with self.alg.executor.autocast():
            seen = self.alg.policy(image.obs, image.critic_obs, image.hidden, image.trajectories, image.random_masks)
        if self.mirrors.augment and self.alg.uses_rewards:
            others = self.alg.ppo_terms(image, seen).losses
            terms.losses.update({name: 0.5 * (terms.losses[name] + others[name]) for name in AVERAGED})
        # The original is the target: it is where the policy was.
        target = self.actions.params({name: p.detach() for name, p in out.params.items()})
        difference = self.actions.difference(self.alg.policy.distribution, target, seen.params)
        terms.losses["mirror_loss"] = batch.mean(difference)

    def end_update(self, rollout: RolloutStorage) -> None:
        """Take the mirror images into the normalisers, so that normalising one gives the mirror image."""
        if self.alg.cfg.empirical_normalization:
            obs, critic_obs = self.alg.newest_observations()
            self.alg.policy.update_normalizers(self.obs(obs), self.critic_obs(critic_obs), rollout.newest_valid)


def layouts(policy: Any) -> tuple[ObsLayout, ObsLayout]:
    """Layouts of the actor's and the critic's observation; one component "obs" where the policy names none."""
    if hasattr(policy, "obs_layout"):
        return policy.obs_layout, policy.critic_obs_layout
    found = [getattr(part, "obs_space", None) for part in (policy.actor, policy.critic)]
    if not all(isinstance(space, spaces.Box) and len(space.shape) == 1 for space in found):
        raise ValueError(f"symmetry needs flat observations, which {type(policy).__name__} does not have")
    layout, critic_layout = (ObsLayout({"obs": space.shape}) for space in found)  # pyright: ignore[reportOptionalMemberAccess]
    return layout, critic_layout


class Mirror:
    """A signed permutation of a vector's entries that undoes itself."""

    def __init__(self, permutation: Sequence[int], signs: Sequence[float], what: str) -> None:
        n = len(permutation)
        if len(signs) != n or sorted(permutation) != list(range(n)):
            got = f"{permutation}, {signs}"
            raise ValueError(f"the mirror of {what} is no permutation of 0..{n - 1} with {n} signs: {got}")
        for i, j in enumerate(permutation):
            if signs[i] not in (1, -1):
                raise ValueError(f"the mirror of {what} has the sign {signs[i]!r} at {i}; signs are 1 and -1")
            if permutation[j] != i or signs[i] != signs[j]:
                images = f"{j} with sign {signs[i]}, whose image is entry {permutation[j]} with sign {signs[j]}"
                problem = f"applied twice, does not give entry {i} back: its image is entry {images}"
                raise ValueError(f"the mirror of {what}, {problem}")
        self.index, self.sign = torch.tensor([int(i) for i in permutation]), torch.tensor([float(s) for s in signs])

    def to(self, device: torch.device | str) -> Mirror:
        """The same on a device."""
        self.index, self.sign = self.index.to(device), self.sign.to(device)
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """(..., n) -> (..., n)."""
        if not isinstance(x, Tensor):
            raise TypeError(f"symmetry needs flat observations, got a {type(x).__name__}; flatten them first")
        return x.index_select(-1, self.index) * self.sign


def read_mirror(given: Any, size: int, what: str) -> tuple[list[int], list[float]]:
    """Permutation and signs of one vector: "same", a list of signs, or {permutation, signs}, either left out."""
    if given == "same":
        given = {}
    elif isinstance(given, Sequence) and not isinstance(given, str):
        given = {"signs": given}
    if not isinstance(given, Mapping):
        raise ValueError(f"the mirror of {what} is {given!r}; give 'same', a list of signs, or permutation and signs")
    parts = check_settings(f"the mirror of {what}", given, ("permutation", "signs"))
    permutation, signs = list(parts.get("permutation") or range(size)), list(parts.get("signs") or [1] * size)
    for name, values in (("permutation", permutation), ("signs", signs)):
        if len(values) != size:
            raise ValueError(f"the {name} of {what} has {len(values)} entries for {size} values: {values}")
    return permutation, [float(sign) for sign in signs]


def observation_mirror(layout: ObsLayout, given: Any, what: str) -> Mirror:
    """The mirror of a flat observation from those of its components; each has one, so that none is forgotten.

    `{"pair": other}` says that the component's image is the component of that name, and the other way round.
    """
    if not isinstance(given, Mapping):
        components = list(layout.shapes)
        raise ValueError(f"{what} mirrors are given by component, got {given!r}; the components are {components}")
    unknown, missing = given.keys() - layout.shapes.keys(), layout.shapes.keys() - given.keys()
    if unknown or missing:
        problem = f"unknown {sorted(unknown)}" if unknown else f"missing {sorted(missing)}"
        raise ValueError(f"{what} has a mirror for each of {list(layout.shapes)}, 'same' where it has none: {problem}")
    entries = {name: dict(part) if isinstance(part, Mapping) else part for name, part in given.items()}
    sources = {name: part.pop("pair", name) if isinstance(part, dict) else name for name, part in entries.items()}
    permutation: list[int] = []
    signs: list[float] = []
    for name, size in layout.sizes.items():
        source = sources[name]
        if layout.sizes.get(source) != size:
            raise ValueError(f"{what} {name!r} of {size} values is paired with {source!r}, which is not of that size")
        if sources[source] != name:
            raise ValueError(f"{what} {name!r} is paired with {source!r}, but that is not paired with {name!r}")
        part, part_signs = read_mirror(entries[name], size, f"{what} {name!r}")
        permutation += [layout.slice(source).start + i for i in part]
        signs += part_signs
    return Mirror(permutation, signs, what)


class ActionMirror:
    """The mirror of actions and of the parameters of their distribution.

    Actions of a Beta distribution are shares in (0, 1) of the range; the other sign is the other end of the range.
    """

    def __init__(self, distribution: Any, given: Any, device: torch.device | str) -> None:
        if isinstance(distribution, MultiCategorical) or not isinstance(distribution, Gaussian | Beta | Categorical):
            raise ValueError(f"symmetry is for continuous and Discrete actions, not for {type(distribution).__name__}")
        size = next(iter(distribution.param_shapes.values()))[0]
        permutation, signs = read_mirror(given, size, "actions")
        self.mirror = Mirror(permutation, signs, "actions").to(device)
        if isinstance(distribution, Categorical) and set(signs) != {1}:
            raise ValueError(f"a choice has no sign; give actions a permutation alone, got signs {signs}")
        # A share of the range has an image only where the bounds are each other's mirror image.
        is_bounded = isinstance(distribution, SquashedGaussian | Beta)
        bounds = list(zip(distribution.low, distribution.high, strict=True)) if is_bounded else []
        for i, (low, high) in enumerate(bounds):
            image = bounds[permutation[i]] if signs[i] > 0 else tuple(-end for end in reversed(bounds[permutation[i]]))
            if (low, high) != image:
                theirs = f"[{image[0]}, {image[1]}]; make them equal"
                raise ValueError(f"the bounds of action {i} are [{low}, {high}], its mirror image's are {theirs}")
        self.flipped = self.mirror.sign < 0
        self.has_shares = isinstance(distribution, Beta)

    def actions(self, actions: Tensor) -> Tensor:
        """Mirror images of actions as the distribution sees them."""
        if not actions.is_floating_point():
            return self.mirror.index[actions]
        if not self.has_shares:
            return self.mirror(actions)
        moved = actions.index_select(-1, self.mirror.index)
        return torch.where(self.flipped, 1.0 - moved, moved)

    def params(self, params: Params) -> Params:
        """Parameters of the distribution of the mirrored action."""
        moved = {name: value.index_select(-1, self.mirror.index) for name, value in params.items()}
        if "mu" in moved:
            moved["mu"] = moved["mu"] * self.mirror.sign
        if self.has_shares:  # concentrations are exchanged where the sign changes
            alpha, beta = moved["alpha"], moved["beta"]
            moved = {"alpha": torch.where(self.flipped, beta, alpha), "beta": torch.where(self.flipped, alpha, beta)}
        return moved

    def difference(self, distribution: Any, target: Params, params: Params) -> Tensor:
        """(...,) how far parameters are from the mirrored ones: of means squared, of other distributions the KL."""
        if "mu" in params:
            return (params["mu"] - target["mu"]).square().sum(-1)
        return distribution.kl(target, params)
