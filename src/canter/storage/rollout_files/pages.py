"""The file each environment of a dataset is in, as one tensor per name: filling a batch is one gather per field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.utils.tree import nested, tree_leaves

SERVED = ("observations", "privileged_observations", "actions", "rewards", "dones", "timeouts")


class Pages:
    """(N, longest file, ...) by name; environment i reads row `cursor[i]` of page i."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.num_envs, self.device = num_envs, device
        self.data: dict[str, Tensor] = {}
        self.num_rows = 0

    def __contains__(self, name: str) -> bool:
        return any(key.partition(".")[0] == name for key in self.data)

    def declare(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take names, shapes and kinds from a first file."""
        for name, array in arrays.items():
            if name.partition(".")[0] in SERVED:
                kind = torch.from_numpy(array[:0])
                self.data[name] = kind.new_zeros((self.num_envs, 0, *array.shape[1:]), device=self.device)

    def grow(self, num_rows: int) -> None:
        """Make room for files of this length."""
        if num_rows > self.num_rows:
            for name, page in self.data.items():
                self.data[name] = page.new_zeros((self.num_envs, num_rows, *page.shape[2:]))
                self.data[name][:, : self.num_rows] = page
            self.num_rows = num_rows

    def put(self, env: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Turn an environment's page to another file."""
        for name, page in self.data.items():
            page[env, : len(arrays[name])].copy_(torch.from_numpy(arrays[name]))

    def zeros(self, name: str, lead: tuple[int, ...]) -> Any:
        """A tensor (*lead, ...) for the named array, or a nested dict of them."""
        parts = {n: p.new_zeros((*lead, *p.shape[2:])) for n, p in self.data.items() if n.partition(".")[0] == name}
        return parts[name] if name in parts else nested(parts, name)

    def rows(self, envs: np.ndarray, cursor: np.ndarray, count: int) -> Tensor:
        """Where `count` rows from the cursors on are, step by step, for `copy`."""
        first = envs * self.num_rows + cursor
        rows = first if count == 1 else (np.arange(count)[:, None] + first).reshape(-1)
        return torch.from_numpy(rows).to(self.device)

    def copy(self, name: str, target: Any, rows: Tensor, env_ids: Tensor | None) -> None:
        """Write rows of the named array into all of `target` (count, N, ...), or into the rows `env_ids` of a step."""
        for leaf, out in tree_leaves(target, name):
            page = self.data[leaf].flatten(0, 1)  # (N * num_rows, ...)
            if env_ids is None:
                torch.index_select(page, 0, rows, out=out.flatten(0, 1))
            else:
                out[0, env_ids.to(self.device)] = page[rows]
