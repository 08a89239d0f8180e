"""Left-right symmetry: the policy also learns from the mirror image of every step."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces
from torch import Tensor

from canter.algorithms.algorithm import Terms
from canter.algorithms.extension import Extension
from canter.algorithms.mirrors import ActionMirror, observation_mirror
from canter.modules.memory import Carried
from canter.modules.policy import PolicyOutput
from canter.storage.rollout_storage import MiniBatch, RolloutStorage
from canter.utils.config import setting, settings
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
    mirror_loss_coef: float = 0.0
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

    def is_enabled(self) -> bool:
        """Whether `symmetry_cfg` is given."""
        return self.cfg.symmetry_cfg is not None

    def attach(self, alg: Any) -> None:
        """Build the mirrors for the policy's observations and actions."""
        super().attach(alg)
        policy, device = alg.policy, alg.device
        self.mirrors = cfg = SymmetryConfig(**self.cfg.symmetry_cfg)
        layout, critic_layout = layouts(policy)
        if cfg.critic_obs is None and critic_layout.shapes != layout.shapes:
            raise ValueError(
                f"the critic sees {list(critic_layout.shapes)}; give symmetry_cfg critic_obs mirrors for them"
            )
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

    def loss_terms(self, terms: Terms, batch: MiniBatch, out: PolicyOutput) -> None:
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
            valid = rollout.valid[rollout.newest].squeeze(-1) if rollout.has_invalid_steps else None
            self.alg.policy.update_normalizers(self.obs(obs), self.critic_obs(critic_obs), valid)


def layouts(policy: Any) -> tuple[ObsLayout, ObsLayout]:
    """Layouts of the actor's and the critic's observation; one component "obs" where the policy names none."""
    if hasattr(policy, "obs_layout"):
        return policy.obs_layout, policy.critic_obs_layout
    found = [getattr(part, "obs_space", None) for part in (policy.actor, policy.critic)]
    if not all(isinstance(space, spaces.Box) and len(space.shape) == 1 for space in found):
        raise ValueError(f"symmetry needs flat observations, which {type(policy).__name__} does not have")
    layout, critic_layout = (ObsLayout({"obs": space.shape}) for space in found)  # pyright: ignore[reportOptionalMemberAccess]
    return layout, critic_layout
