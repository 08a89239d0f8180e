"""Numbers gathered on the device and read by the host once: means of losses, episode statistics, the finite guard."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.utils.tree import Obs, tree_leaves

FRAMES = 2000


class MeanMeter:
    """Averages named float scalars on the device, in place, so that adding can be captured; `means` reads once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.total: Tensor | None = None  # the sums, and last how many there were

    @torch.no_grad()
    def add(self, values: Mapping[str, Tensor]) -> None:
        """Take one set of scalars; every set has the same names."""
        first = next(iter(values.values()))
        row = torch.stack([*values.values(), torch.ones_like(first)])  # every small operation costs the same: one row
        if self.total is None:
            with torch.inference_mode(False):  # a rollout may start it, an update empties it
                self.total = torch.zeros(row.shape, device=row.device)
        self.names = list(values)
        self.total += row

    def reset(self) -> None:
        """Start anew."""
        if self.total is not None:
            self.total.zero_()

    def averages(self) -> dict[str, Tensor]:
        """Mean of every scalar, still on the device; and `count`, how many there were."""
        if self.total is None:
            return {}
        count = self.total[-1]
        return dict(zip(self.names, (self.total[:-1] / count.clamp(min=1)).unbind(), strict=True)) | {"count": count}

    def means(self) -> dict[str, float]:
        """Mean of every scalar, and `count`."""
        averages = self.averages()
        return dict(zip(averages, torch.stack(list(averages.values())).tolist(), strict=True)) if averages else {}


class EpisodeTracker:
    """Returns and lengths of episodes, from (T, N) rows kept on the device and copied once per rollout.

    An episode may span rollouts; steps that only reset an environment do not count.
    """

    def __init__(self, num_envs: int, num_steps: int, device: torch.device | str) -> None:
        self.rows = torch.zeros(num_steps, 3, num_envs, device=device)  # reward, done, valid: copied together
        self.step = 0
        self.cursor = torch.zeros(1, dtype=torch.long, device=device)
        self.cur_reward_sum = np.zeros(num_envs)
        self.cur_episode_length = np.zeros(num_envs, dtype=np.int64)
        self.rewbuffer: deque[float] = deque(maxlen=100)
        self.lenbuffer: deque[float] = deque(maxlen=100)
        self.rframebuffer: deque[float] = deque(maxlen=FRAMES)
        self.num_episodes = 0

    def add(self, reward: Tensor, done: Tensor, valid: Tensor) -> None:
        """Keep one step of N environments."""
        self.write(reward, done, valid)
        self.step += 1

    def write(self, reward: Tensor, done: Tensor, valid: Tensor) -> None:
        """Write the row under the cursor and move it on: tensor code alone, the caller counts `step`."""
        row = torch.stack([reward, done.to(reward.dtype), valid.to(reward.dtype)])
        self.rows.index_copy_(0, self.cursor, row.unsqueeze(0))
        self.cursor += 1

    @property
    def rewards(self) -> Tensor:
        """(T, N) of the rollout under way."""
        return self.rows[:, 0]

    def read(self) -> float:
        """Take the rollout into the statistics; return its mean reward per step."""
        rows = self.rows[: self.step].cpu().numpy()
        self.rewind()
        rewards, done, valid = rows[:, 0], rows[:, 1].astype(bool), rows[:, 2].astype(bool)
        if not valid.all():
            rewards = np.where(valid, rewards, 0.0)
        some_ended: list[bool] = np.logical_or.reduce(done, axis=1).tolist()
        for reward, ended, counts, some in zip(rewards, done, valid, some_ended, strict=True):
            self.cur_reward_sum += reward
            self.cur_episode_length += counts
            if some:
                self.rewbuffer.extend(self.cur_reward_sum[ended].tolist())
                self.lenbuffer.extend(self.cur_episode_length[ended].tolist())
                self.num_episodes += int(ended.sum())
                self.cur_reward_sum[ended] = 0.0
                self.cur_episode_length[ended] = 0
        self._keep_frames(rewards, valid & ~done)
        return float(rewards.sum(dtype=np.float64) / valid.sum()) if valid.any() else float("nan")

    def _keep_frames(self, rewards: np.ndarray, running: np.ndarray) -> None:
        """Rewards of the newest steps that did not end an episode; later rows first, as many as the buffer holds."""
        newest: list[np.ndarray] = []
        found = 0
        for reward, counts in zip(rewards[::-1], running[::-1], strict=True):
            newest.insert(0, reward[counts])
            found += len(newest[0])
            if found >= FRAMES:
                break
        if newest:
            self.rframebuffer.extend(np.concatenate(newest)[-FRAMES:].tolist())

    def clear_running(self) -> None:
        """Forget the episodes under way, because the environments were reset."""
        self.cur_reward_sum[:] = 0.0
        self.cur_episode_length[:] = 0
        self.rewind()

    def rewind(self) -> None:
        """Start the next rollout."""
        self.step = 0
        self.cursor.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Everything that outlives a rollout, in plain containers."""
        return {
            "cur_reward_sum": self.cur_reward_sum.tolist(),
            "cur_episode_length": self.cur_episode_length.tolist(),
            "rewbuffer": list(self.rewbuffer),
            "lenbuffer": list(self.lenbuffer),
            "rframebuffer": list(self.rframebuffer),
            "num_episodes": self.num_episodes,
        }

    def load_state_dict(self, state: Mapping[str, Any], running: bool = True) -> None:
        """Continue from `state_dict`; without the episodes under way unless `running`."""
        self.rewind()
        if running:
            self.cur_reward_sum[:] = state["cur_reward_sum"]
            self.cur_episode_length[:] = state["cur_episode_length"]
        for name in ("rewbuffer", "lenbuffer", "rframebuffer"):
            getattr(self, name).clear()
            getattr(self, name).extend(state[name])
        self.num_episodes = state["num_episodes"]


class ComponentSums:
    """Named parts of the reward, summed over each episode on the device; `take` reads their means per episode."""

    def __init__(self) -> None:
        self.running: dict[str, Tensor] = {}
        """(N,) sums over the episodes under way."""
        self._ended: dict[str, Tensor] = {}  # (2,) sum over the episodes that ended, and their number

    def add(self, parts: Mapping[str, Any], done: Tensor, valid: Tensor) -> None:
        """Take one step; a part that is not one number per environment is passed over."""
        for name, part in parts.items():
            if isinstance(part, (Tensor, np.ndarray)) and part.shape == done.shape:
                value = torch.as_tensor(part, dtype=torch.float32, device=done.device)
                total = torch.where(valid, value, 0.0) + self.running.get(name, 0.0)
                ended = torch.stack([torch.where(done, total, 0.0).sum(), done.sum()])
                self._ended[name] = ended + self._ended.get(name, 0.0)
                self.running[name] = total.masked_fill(done, 0.0)

    def take(self) -> dict[str, float]:
        """Means over the episodes that ended since the last call; nothing where none did."""
        ended, self._ended = self._ended, {}
        table = torch.stack(list(ended.values())).tolist() if ended else []
        return {name: total / count for name, (total, count) in zip(ended, table, strict=True) if count}


class NonFiniteError(RuntimeError):
    """An environment gave NaN or infinity."""


class FiniteGuard:
    """Finds NaN and infinity in what an environment gives, before it can reach the statistics or the weights.

    On a CPU every step is checked at once, by one sum per tensor: it is finite only if every term is. Elsewhere the
    whole rollout is looked at once, before anything learns from it.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_immediate = device.type == "cpu"

    def check(self, total_steps: int, **groups: Obs | None) -> None:
        """Look at one step's named groups, where that costs no waiting."""
        if not self.is_immediate:
            return
        for group, tree in groups.items():
            for name, leaf in tree_leaves(tree, group):
                if leaf is None or not leaf.is_floating_point():
                    continue
                if not math.isfinite(leaf.sum()):
                    raise_if_bad(name, leaf, total_steps)

    def read(self, first_step: int, rollout: Mapping[str, Tensor]) -> None:
        """Look at (T, N, ...) tensors of a rollout, where its steps were not looked at; one host read."""
        floats = {name: value for name, value in rollout.items() if value.is_floating_point()}
        if self.is_immediate or not floats:
            return
        fine = torch.stack([torch.isfinite(value).all() for value in floats.values()]).tolist()
        for (name, value), is_fine in zip(floats.items(), fine, strict=True):
            if not is_fine:
                step = int((~torch.isfinite(value.flatten(1))).any(-1).nonzero()[0])
                raise_if_bad(name, value[step], first_step + step)


def raise_if_bad(name: str, leaf: Tensor, step: int) -> None:
    """Raise NonFiniteError naming environments and features, unless every value is finite (a sum may overflow)."""
    bad = ~torch.isfinite(leaf.reshape(len(leaf), -1))
    if bad.any():
        envs = bad.any(-1).nonzero().flatten().tolist()
        features = bad.any(0).nonzero().flatten().tolist() if leaf.dim() > 1 else None
        raise NonFiniteError(message(name, envs, features, step))


def message(name: str, envs: list[int], features: list[int] | None, step: int) -> str:
    """What went wrong, where, and the way out."""
    where = f"environments {short(envs)}" + (f", features {short(features)}" if features else "")
    return (
        f"the environment gave NaN or infinity in {name!r} ({where}) at step {step}; the policy was not updated with "
        "it. Fix the environment, or clip the value before it is returned"
    )


def short(numbers: list[int]) -> str:
    """At most eight numbers, then how many more."""
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def gpu_memory(device: torch.device) -> dict[str, float]:
    """GPU memory in GiB; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    sizes = {"allocated": torch.cuda.memory_allocated(device), "global_free_mem": free, "total": total}
    return {f"perf/gpu_{name}": size / 2**30 for name, size in sizes.items()}
