"""Base class of environments written as tensor code: time limits, resets, seeds and exact state."""

from abc import abstractmethod
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.records import fill_extras
from canter.envs.vec_env import Device, StepRecord, VecEnv
from canter.utils.tree import Obs, tree_leaves, tree_map, tree_where

State = dict[str, Tensor]
NEVER = 2**62


class TorchEnv(VecEnv):
    """N environments as a dict of (N, ...) tensors on any device; no step waits for the host, so it can be captured.

    A subclass states its spaces, as class attributes or before it calls this constructor. Random numbers come from
    `self.generator`, which a CUDA graph must register before it captures `step`.
    """

    capturable = True
    max_episode_length = 1000
    kept_on_reset: tuple[str, ...] = ()
    """Names in the state that a reset does not change."""

    def __init__(
        self, num_envs: int, device: Device = "cpu", seed: int | None = None, max_episode_length: int | None = None
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        self.num_envs, self.device = num_envs, torch.device(device)
        if max_episode_length is not None:
            self.max_episode_length = max_episode_length
        self.generator = torch.Generator(self.device)
        self.generator.seed() if seed is None else self.generator.manual_seed(seed)
        self._state = self.initial_state(num_envs)
        self._episode_length = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._valid = torch.ones(num_envs, dtype=torch.bool, device=self.device)
        buffers = {value.untyped_storage().data_ptr(): name for name, value in self._state.items()}
        for _, leaf in tree_leaves(dict(enumerate(self._observe(self._state)))):
            name = buffers.get(leaf.untyped_storage().data_ptr())
            if name is not None:
                which = f"its state {name!r} itself, which later steps overwrite"
                raise TypeError(f"{type(self).__name__}.observe returns {which}; return a clone")

    @abstractmethod
    def initial_state(self, n: int) -> State:
        """Return the states in which `n` episodes begin."""

    @abstractmethod
    def dynamics(self, state: State, action: Tensor) -> tuple[State, Tensor, Tensor]:
        """Return the next state, the reward (N,) and whether it is terminal (N,), without writing to the arguments."""

    @abstractmethod
    def observe(self, state: State) -> Obs | tuple[Obs, Obs]:
        """Return the observation, and the critic's if it has its own, in new tensors that depend on the state alone."""

    def uniform(self, n: int, width: int, low: float, high: float) -> Tensor:
        """(n, width) uniform numbers between `low` and `high` from the environment's own generator."""
        return torch.rand(n, width, generator=self.generator, device=self.device) * (high - low) + low

    def normal(self, n: int, width: int) -> Tensor:
        """(n, width) standard normal numbers from the environment's own generator."""
        return torch.randn(n, width, generator=self.generator, device=self.device)

    @property
    def episode_length_buf(self) -> Tensor:
        """(N,) steps taken in each running episode; assigning to it moves the time limits."""
        return self._episode_length

    @episode_length_buf.setter
    def episode_length_buf(self, value: Tensor) -> None:
        self._episode_length.copy_(value)

    def seed(self, seed: int) -> None:
        """Make the episodes from the next `reset` on repeatable."""
        self.generator.manual_seed(seed)

    @torch.no_grad()
    def reset(self) -> tuple[Obs, Obs]:
        """Start a new episode in every environment."""
        for name, value in self.initial_state(self.num_envs).items():
            self._state[name].copy_(value)
        self._episode_length.zero_()
        return self.get_observations()

    @torch.no_grad()
    def get_observations(self) -> tuple[Obs, Obs]:
        """Return the current observation and the critic's."""
        return self._observe(self._state)

    @torch.no_grad()
    def step(self, actions: Tensor) -> StepRecord:
        """Advance every environment once and restart those whose episode ended."""
        shape = (self.num_envs, *(self.action_space.shape or ()))
        if actions.shape != shape and actions.shape != (*shape, 1):
            raise ValueError(f"actions have shape {tuple(actions.shape)}; {type(self).__name__} wants {shape}")
        dtype = torch.float32 if isinstance(self.action_space, spaces.Box) else torch.int64
        state, reward, terminated = self.dynamics(self._state, actions.to(self.device, dtype).reshape(shape))
        length = self._episode_length + 1
        truncated = (length >= (self.max_episode_length or NEVER)) & ~terminated
        done = terminated | truncated
        finals = self._observe(state)
        initial = {**self.initial_state(self.num_envs), **{name: state[name] for name in self.kept_on_reset}}
        # In place: a replayed graph reads the tensors that its last replay wrote.
        for name, value in tree_leaves(tree_where(done, initial, state)):
            self._state[name].copy_(value)
        self._episode_length.copy_(length.masked_fill(done, 0))
        current = self._observe(self._state)
        return fill_extras(StepRecord(*current, reward, terminated, truncated, *finals, self._valid, {}))

    def get_state(self) -> dict[str, Any]:
        """Return copies of the state, the episode lengths and the generator state."""
        state = {"state": self._state, "episode_length": self._episode_length}
        return {**tree_map(torch.clone, state), "generator": self.generator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue exactly where `get_state` was called."""
        for name, buffer in self._state.items():
            buffer.copy_(state["state"][name])
        self._episode_length.copy_(state["episode_length"])
        self.generator.set_state(state["generator"].cpu())

    def _observe(self, state: State) -> tuple[Obs, Obs]:
        obs = self.observe(state)
        return obs if isinstance(obs, tuple) else (obs, obs)
