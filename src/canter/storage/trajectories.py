"""Splitting a (T, N) rollout at episode ends into M trajectories, each in a column of its own.

env a, dones . . . x . .   its steps go to columns 0 0 0 0 1 1, rows 0 1 2 3 0 1
env b, dones . x . . x .   its steps go to columns 2 2 3 3 3 4, rows 0 1 0 1 2 0
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Trajectories(NamedTuple):
    """Row and column of each step of a (T, N) rollout in a (T, M) block with one trajectory per column."""

    row: Tensor  # (T, N)
    column: Tensor  # (T, N)
    total: int  # M

    @property
    def masks(self) -> Tensor:
        """(T, M) mask of real steps."""
        masks = torch.zeros(len(self.row), self.total, dtype=torch.bool, device=self.row.device)
        masks[self.row, self.column] = True
        return masks


def episode_starts(dones: Tensor) -> Tensor:
    """(T, N) -> (T, N): true where a trajectory begins; row 0 always does."""
    starts = torch.ones_like(dones, dtype=torch.bool)
    starts[1:] = dones[:-1].bool()
    return starts


def trajectory_index(starts: Tensor) -> tuple[Tensor, Tensor]:
    """(T, N) starts -> (T, N) row and column of every step, columns in env-major order."""
    num_steps, num_envs = starts.shape
    column = starts.T.reshape(-1).cumsum(0).view(num_envs, num_steps).T - 1
    steps = torch.arange(num_steps, device=starts.device).unsqueeze(1)
    row = steps - torch.where(starts, steps, 0).cummax(0).values  # steps since the trajectory began
    return row, column


def split_and_pad_trajectories(x: Tensor, dones: Tensor) -> tuple[Tensor, Tensor]:
    """(T, N, ...) cut after every done -> zero-padded (T, M, ...) and the (T, M) mask of real steps."""
    starts = episode_starts(dones.reshape(dones.shape[:2]))
    split = Trajectories(*trajectory_index(starts), int(starts.sum()))
    padded = x.new_zeros(len(x), split.total, *x.shape[2:])
    padded[split.row, split.column] = x
    return padded, split.masks


def unpad_trajectories(padded: Tensor, masks: Tensor) -> Tensor:
    """Inverse of `split_and_pad_trajectories`; a block (T, N, ...), as in recurrent minibatches, is returned as is."""
    if padded.shape[1] != masks.shape[1]:
        return padded
    flat = padded.transpose(0, 1)[masks.transpose(0, 1)]  # every real step, env-major
    return flat.view(-1, len(padded), *padded.shape[2:]).transpose(0, 1)


def trajectories_from_masks(masks: Tensor) -> Trajectories:
    """The index of a (T, M) padding mask; empty columns may follow the trajectories."""
    lengths = masks.sum(0)
    num_steps = int(lengths.sum())
    starts = torch.zeros(num_steps + 1, dtype=torch.bool, device=masks.device)  # empty columns set the last one
    starts[lengths.cumsum(0) - lengths] = True
    row, column = trajectory_index(starts[:num_steps].view(-1, len(masks)).T)
    return Trajectories(row, column, masks.shape[1])


def start_positions(starts: Tensor, column: Tensor, total: int) -> Tensor:
    """(M,) flat (T * N) position of each trajectory's first step, without a host read."""
    slot = torch.where(starts, column, total).reshape(-1)  # steps inside a trajectory share one spare slot
    first = torch.zeros(total + 1, dtype=torch.long, device=starts.device)
    first.scatter_(0, slot, torch.arange(slot.numel(), device=starts.device))
    return first[:total]
