"""The environment contract of canter: N environments stepped together, one `StepRecord` per step."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from canter.utils.tree import Obs

Device = torch.device | str


class StepRecord(NamedTuple):
    """Result of one step of N environments. The receiver owns the tensors: no environment writes to them again."""

    obs: Obs
    """Observation to act on next; after an episode's end the first of the new episode (see `valid`)."""
    critic_obs: Obs
    """The critic's observation; the same object as `obs` where there is no privileged one."""
    reward: Tensor
    """(N,) float32, unscaled."""
    terminated: Tensor
    """(N,) bool: the episode ended in a true terminal state, whose future value is 0."""
    truncated: Tensor
    """(N,) bool: the episode was cut off, by a time limit for example. Never true where `terminated` is."""
    final_obs: Obs | None
    """(N, ...) observation before the reset, meaningful in rows that ended; None if no row ended or none is known."""
    final_critic_obs: Obs | None
    """The critic's side of `final_obs`; the same object where there is no privileged observation."""
    valid: Tensor
    """(N,) bool: false where this step only reset an environment and the action was ignored."""
    extras: dict[str, Any]
    """Everything else that the environment returned."""

    @property
    def done(self) -> Tensor:
        """(N,) bool: an episode ended here, terminated or truncated."""
        return self.terminated | self.truncated


class VecEnv(ABC):
    """N environments that step together and reset themselves.

    A subclass sets the attributes below in its constructor and implements `reset`, `get_observations` and `step`.
    """

    num_envs: int
    device: torch.device
    obs_space: spaces.Space
    """Space of one environment's observation."""
    critic_obs_space: spaces.Space
    """Space of the critic's observation; the same object as `obs_space` where there is no privileged one."""
    action_space: spaces.Space
    """Space of one environment's action: Box, Discrete or MultiDiscrete."""
    action_bounds: Any = None
    """Lower and upper bounds to which `step` clips continuous actions, as arrays; None if it does not."""
    max_episode_length: int | None = None
    obs_segments: Mapping[str, tuple[int, ...]] | None = None
    """Names and shapes of the parts of a flat observation, in order."""
    critic_obs_segments: Mapping[str, tuple[int, ...]] | None = None
    has_invalid_steps: bool = False
    """Whether `StepRecord.valid` is ever false."""
    gives_final_obs: bool = True
    """Whether `StepRecord.final_obs` is present whenever a row was truncated."""
    overlaps: bool = False
    """Whether a step has two halves, `send` and `recv`, between which the caller can do other work."""
    capturable: bool = False
    """Whether `step` is pure tensor code on fixed shapes that may be captured in a CUDA graph."""
    makes_new_records: bool = False
    """Whether later steps leave the tensors of a record as they are, so that it may be stored after them."""
    adapter: str = "none"
    """Name of the adapter through which `wrap_env` made this object."""
    contract: str = ""
    """Interface of the adapted environment, shown by `check_env`."""
    autoreset: str = "same step"
    """When an ended episode restarts, shown by `check_env`."""

    @abstractmethod
    def reset(self) -> tuple[Obs, Obs]:
        """Start a new episode in every environment; return the observation and the critic's."""

    @abstractmethod
    def get_observations(self) -> tuple[Obs, Obs]:
        """Return the current observation and the critic's without stepping; reset first if never reset."""

    @abstractmethod
    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment."""

    def send(self, actions: Tensor) -> None:
        """Begin a step, where `overlaps`."""
        raise NotImplementedError(f"{type(self).__name__} cannot split a step into send and recv")

    def recv(self) -> StepRecord:
        """Finish the step that `send` began, where `overlaps`."""
        raise NotImplementedError(f"{type(self).__name__} cannot split a step into send and recv")

    def seed(self, seed: int) -> None:
        """Make the episodes from the next `reset` on repeatable."""
        raise NotImplementedError(f"{type(self).__name__} cannot be seeded")

    def get_state(self) -> dict[str, Any] | None:
        """Return all that `set_state` needs to continue exactly here, in plain containers; None if unsupported."""
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a result of `get_state`."""
        raise NotImplementedError(f"{type(self).__name__} cannot restore its state")

    def get_counters(self) -> dict[str, Any]:
        """Return what outlives episodes, such as the steps that a curriculum depends on; saved with checkpoints."""
        return {}

    def set_counters(self, counters: dict[str, Any]) -> None:  # noqa: B027 - most environments have none
        """Continue from a result of `get_counters`."""

    def render(self) -> Any:
        """Return an image of the first environment as an (H, W, 3) uint8 array, or None."""
        return None

    def close(self) -> None:  # noqa: B027 - most environments hold no resources
        """Release the environment's resources."""

    @property
    def num_obs(self) -> int:
        """Width of a flat observation."""
        return flat_size(self.obs_space)

    @property
    def num_privileged_obs(self) -> int | None:
        """Width of the critic's flat observation, None if it is the actor's."""
        return None if self.critic_obs_space is self.obs_space else flat_size(self.critic_obs_space)

    @property
    def num_actions(self) -> int:
        """Width of a continuous action, or the number of logits of a discrete one."""
        is_discrete = isinstance(self.action_space, (spaces.Discrete, spaces.MultiDiscrete))
        return int(spaces.flatdim(self.action_space)) if is_discrete else flat_size(self.action_space)


def flat_size(space: spaces.Space) -> int:
    """Number of values in one sample of a Box or of a Dict of Boxes."""
    if isinstance(space, spaces.Dict):
        return sum(flat_size(part) for part in space.spaces.values())
    if isinstance(space, spaces.Box):
        return math.prod(space.shape)
    raise TypeError(f"a {type(space).__name__} space has no flat size; use a Box or a Dict of Boxes")
