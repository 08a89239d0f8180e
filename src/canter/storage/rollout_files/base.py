"""Base class of datasets of recorded rollouts."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from canter.utils.runtime import resolve_device
from canter.utils.tree import tree_map


class RolloutFileBase(IterableDataset, ABC):
    """Serves recorded transitions of N environments.

    With a DataLoader use `num_workers=0`: the dataset is a stateful iterator, and every worker would serve all of it.
    `data_dir` is one directory or several; the batches are on `device`, a GPU if it is None and there is one.
    """

    def __init__(
        self, data_dir: str | Path | Sequence[str | Path], num_envs: int, device: torch.device | str | None = None
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        self.data_dir, self.num_envs, self.device = data_dir, num_envs, resolve_device(device)
        self.all_env_ids = torch.arange(num_envs)
        self._is_ready = False

    def reset(self, env_ids: Tensor | Sequence[int] | None = None) -> None:
        """Restart all environments, or give some of them another trajectory."""
        if env_ids is None or len(env_ids) == self.num_envs:
            self.reset_all()
            self._is_ready = True
        else:
            self.refresh_handlers(torch.as_tensor(env_ids))

    def get_batch(self, num_transitions_per_env: int | None = None) -> Any:
        """The next transition of every environment, fields (N, ...), or the next k, fields (k, N, ...).

        The tensors are reused by the next call. Raises StopIteration at the end of the data.
        """
        if not self._is_ready:
            self.reset()
        buffer = self.get_buffer(num_transitions_per_env)
        if num_transitions_per_env is None:
            self.fill_transition(buffer)
        else:
            self.fill_transitions(buffer, num_transitions_per_env)
        return buffer

    def get_transition_batch(self) -> tuple[Any, dict[str, Any]]:
        """One transition of every environment and its infos, like an environment step."""
        buffer = self.get_batch()
        timeout = buffer.get("timeout") if isinstance(buffer, Mapping) else getattr(buffer, "timeout", None)
        return buffer, {} if timeout is None else {"time_outs": timeout}

    def fill_transitions(self, buffer: Any, num_transitions_per_env: int) -> None:
        """Fill fields (k, N, ...), step by step."""
        for step in range(num_transitions_per_env):
            if hasattr(buffer, "_make"):
                part = buffer._make(None if field is None else field[step] for field in buffer)
            else:
                part = tree_map(itemgetter(step), buffer)
            self.fill_transition(part)

    def __iter__(self) -> Iterator[Any]:
        self.reset()
        return self

    def __next__(self) -> Any:
        return self.get_batch()

    @abstractmethod
    def reset_all(self) -> None:
        """Restart all environments."""

    @abstractmethod
    def refresh_handlers(self, env_ids: Tensor) -> None:
        """Give some environments another trajectory."""

    @abstractmethod
    def get_buffer(self, num_transitions_per_env: int | None = None) -> Any:
        """Tensors to fill: a (nested) dict, or a named tuple."""

    @abstractmethod
    def fill_transition(self, buffer: Any, env_ids: Tensor | None = None) -> None:
        """Write the next transition of all environments, or of some, and advance."""
