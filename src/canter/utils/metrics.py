"""Metrics gathered on the device and read by the host once: means, episode statistics, extras, the finite guard."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from canter.utils.tree import Obs, tree_leaves

if TYPE_CHECKING:
    from canter.envs.vec_env import StepRecord

FRAMES = 2000
BUFFERS = ("rewbuffer", "lenbuffer", "rframebuffer")
COMPONENTS = "reward_components"
LEARNED_FROM = ("observations", "privileged_observations", "rewards")
# Entries of extras that hold observations, not measurements, even if their shape would allow a mean.
PAYLOADS = {"final_observation", "final_obs", "final_critic_obs", "final_info", "terminal_observation", "observations"}
ROWS_PER_FOLD = 64


class MeanMeter:
    """Averages named float scalars in place on the device, so that adding can be captured; `means` reads once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.total: Tensor | None = None  # the sums, and in the last place the number of sets

    @torch.no_grad()
    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add one set of scalars; every set has the same names."""
        first = next(iter(values.values()))
        row = torch.stack([*values.values(), torch.ones_like(first)])  # every small operation costs the same: one row
        if self.total is None:
            with torch.inference_mode(False):  # a rollout may create it, an update zeroes it
                self.total = torch.zeros(row.shape, device=row.device)
        self.names = list(values)
        self.total += row

    def reset(self) -> None:
        """Remove all sets."""
        if self.total is not None:
            self.total.zero_()

    def averages(self) -> dict[str, Tensor]:
        """Mean of every scalar on the device, and `count`, the number of sets."""
        if self.total is None:
            return {}
        count = self.total[-1]
        return dict(zip(self.names, (self.total[:-1] / count.clamp(min=1)).unbind(), strict=True)) | {"count": count}

    def take(self) -> dict[str, Tensor]:
        """Mean of every scalar on the device, without the count; starts anew."""
        averages = {name: value for name, value in self.averages().items() if name != "count"}
        self.reset()
        return averages

    def means(self) -> dict[str, float]:
        """Mean of every scalar, and `count`."""
        averages = self.averages()
        return dict(zip(averages, torch.stack(list(averages.values())).tolist(), strict=True)) if averages else {}


class StepStats:
    """Checks and counts the steps of a rollout on `device`; the entries `extra_log_keys` of their extras are logged."""

    def __init__(self, num_envs: int, num_steps: int, device: torch.device, extra_log_keys: Iterable[str]) -> None:
        self.tracker = EpisodeTracker(num_envs, num_steps, device)
        self.guard = FiniteGuard(device)
        self.extras = ScalarAverager()
        self.components = ComponentSums()
        self.keys = dict.fromkeys(extra_log_keys).keys()
        self.has_extras = False  # whether the environment's extras had anything to log
        self.first_step = 0  # vector steps of the run before those that `tracker` holds
        self.newest: dict[str, float] = {}  # metrics of the newest rollout
        self.check_first: Any = None  # called with the first record, once; it may raise

    def take(self, record: StepRecord) -> None:
        """Check and count one step. The algorithm writes its rewards, with `tracker.write`."""
        if self.check_first is not None:
            self.check_first(record)
            self.check_first = None
        if self.tracker.step == len(self.tracker.rows):  # a user's own loop, which reads no metrics
            self.rollout_metrics({})
        if self.guard.is_immediate:
            groups: dict[str, Any] = {"obs": record.obs, "reward": record.reward, "final_obs": record.final_obs}
            if record.critic_obs is not record.obs:
                groups |= {"critic_obs": record.critic_obs, "final_critic_obs": record.final_critic_obs}
            ended = None if record.final_obs is None else record.terminated | record.truncated
            self.guard.check(self.first_step + self.tracker.step, ended, **groups)
        self.tracker.step += 1
        extras = record.extras
        if any(extras.get("infos", ())) and (listed := listed_infos(extras["infos"], self.keys)):
            extras = {**listed, **extras}
        if not self.keys.isdisjoint(extras):
            scalars = flatten_extras(extras, self.keys)
            if scalars:
                self.has_extras = True
                self.extras.add(scalars)
            if COMPONENTS in self.keys and isinstance(extras.get(COMPONENTS), Mapping):
                self.components.add(extras[COMPONENTS], record.done, record.valid)

    def rollout_metrics(
        self, rollout: Mapping[str, Tensor], steps: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> dict[str, float]:
        """Metrics of the steps since the last call; NonFiniteError if `rollout`, (T, N, ...) by name, is not finite.

        `steps` are reward, done and valid (T, N); without them they are those in the rollout, or that the tracker has.
        """
        tracker = self.tracker
        if steps is None and "env_rewards" in rollout:
            done, rewards = (rollout[name][: tracker.step, :, 0] for name in ("dones", "env_rewards"))
            valid = rollout["valid"][: tracker.step, :, 0] if "valid" in rollout else torch.ones_like(done)
            steps = (rewards, done & valid, valid)
        rewards = tracker.rows[:, 0] if steps is None else steps[0]
        if not self.guard.is_immediate:
            data = {name: value for name, value in rollout.items() if name.startswith(LEARNED_FROM)}
            try:
                self.guard.read(self.first_step, {**data, "reward": rewards}, rollout.get("actions"))
            except NonFiniteError:
                tracker.rewind()  # such a rollout does not count
                raise
        self.newest = {"rollout/mean_reward": tracker.read() if steps is None else tracker.take(*steps)}
        if tracker.rewbuffer:
            self.newest["episode/mean_reward"] = sum(tracker.rewbuffer) / len(tracker.rewbuffer)
            self.newest["episode/mean_length"] = sum(tracker.lenbuffer) / len(tracker.lenbuffer)
        return dict(self.newest)

    def so_far(self) -> dict[str, float]:
        """The mean reward of the steps since the last read, or of those before it; empty before the first step."""
        reward, _, valid = self.tracker.rows[: self.tracker.step].unbind(1)
        return {"rollout/mean_reward": float((reward * valid).sum() / valid.sum())} if len(reward) else self.newest

    def clear_running(self) -> None:
        """Drop the unfinished episodes, because the environments were reset."""
        self.tracker.clear_running()
        self.components.running.clear()

    def state_dict(self) -> dict[str, Any]:
        """Statistics that outlive a rollout."""
        return {"tracker": self.tracker.state_dict(), "components": dict(self.components.running)}

    def load_state_dict(self, state: Mapping[str, Any], running: bool) -> None:
        """Continue from `state_dict`; with the unfinished episodes only if `running`."""
        self.tracker.load_state_dict(state["tracker"], running)
        self.components.running = dict(state["components"]) if running else {}


class EpisodeTracker:
    """Returns and lengths of episodes, which may span rollouts; rows on the device are copied once per rollout."""

    def __init__(self, num_envs: int, num_steps: int, device: torch.device | str) -> None:
        self.rows = torch.zeros(num_steps, 3, num_envs, device=device)  # reward, done, valid: copied together
        self.step = self.row = 0
        self.cursor = torch.zeros(1, dtype=torch.long, device=device)  # `row` on the device, for captured writes
        self.cur_reward_sum = np.zeros(num_envs)
        self.cur_episode_length = np.zeros(num_envs, dtype=np.int64)
        self.rewbuffer: deque[float] = deque(maxlen=100)
        self.lenbuffer: deque[float] = deque(maxlen=100)
        self.rframebuffer: deque[float] = deque(maxlen=FRAMES)
        self.num_episodes = 0

    def write(self, record: StepRecord) -> None:
        """Write a step to the row under the cursor: tensor code that may be captured; the caller counts `step`."""
        reward = record.reward
        done = record.terminated | record.truncated
        row = torch.stack([reward, done.to(reward.dtype), record.valid.to(reward.dtype)])
        self.rows.index_copy_(0, self.cursor, row.unsqueeze(0))
        self.cursor += 1

    def put(self, record: StepRecord) -> None:
        """Write a step as `write` does, on a CPU and outside recorded functions: faster than tensor operations."""
        row, terminated = self.rows.numpy()[self.row], record.terminated.numpy()
        row[0], row[1], row[2] = record.reward.numpy(), terminated | record.truncated.numpy(), record.valid.numpy()
        self.row += 1

    def read(self) -> float:
        """Add the rollout to the statistics; returns its mean reward per step."""
        return self.take(*self.rows[: self.step].unbind(1))

    def take(self, rewards: Tensor, done: Tensor, valid: Tensor) -> float:
        """Add (T, N) steps to the statistics, which are copied at once; returns the mean reward per step."""
        rows = torch.stack([rewards, done.to(rewards.dtype), valid.to(rewards.dtype)]).cpu().numpy()
        self.rewind()
        ends, counted = rows[1].astype(bool), rows[2].astype(bool)
        earned = np.where(counted, rows[0], 0.0)
        some_ended: list[bool] = np.logical_or.reduce(ends, axis=1).tolist()
        for reward, ended, counts, some in zip(earned, ends, counted, some_ended, strict=True):
            self.cur_reward_sum += reward
            self.cur_episode_length += counts
            if some:
                self.rewbuffer.extend(self.cur_reward_sum[ended].tolist())
                self.lenbuffer.extend(self.cur_episode_length[ended].tolist())
                self.num_episodes += int(ended.sum())
                self.cur_reward_sum[ended] = 0.0
                self.cur_episode_length[ended] = 0
        self.rframebuffer.extend(earned[counted & ~ends][-FRAMES:].tolist())
        return float(earned.sum(dtype=np.float64) / counted.sum()) if counted.any() else float("nan")

    def clear_running(self) -> None:
        """Drop the unfinished episodes, because the environments were reset."""
        self.cur_reward_sum[:] = 0.0
        self.cur_episode_length[:] = 0
        self.rewind()

    def rewind(self) -> None:
        """Drop the rows that were not read."""
        self.step = self.row = 0
        self.cursor.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Statistics that outlive a rollout, in plain containers."""
        running = {name: getattr(self, name).tolist() for name in ("cur_reward_sum", "cur_episode_length")}
        return running | {name: list(getattr(self, name)) for name in BUFFERS} | {"num_episodes": self.num_episodes}

    def load_state_dict(self, state: Mapping[str, Any], running: bool = True) -> None:
        """Continue from `state_dict`; with the unfinished episodes only if `running`."""
        self.rewind()
        if running:
            self.cur_reward_sum[:] = state["cur_reward_sum"]
            self.cur_episode_length[:] = state["cur_episode_length"]
        for name in BUFFERS:
            getattr(self, name).clear()
            getattr(self, name).extend(state[name])
        self.num_episodes = state["num_episodes"]


class NonFiniteError(RuntimeError):
    """An environment returned NaN or infinity."""


class DivergedError(NonFiniteError):
    """The policy is NaN or infinite, so that the environment cannot be blamed."""


class FiniteGuard:
    """Detects NaN and infinity from an environment: on a CPU in every step, on other devices once per rollout."""

    def __init__(self, device: torch.device) -> None:
        self.is_immediate = device.type == "cpu"
        self.check_policy: Any = None  # called with the actions of the rollout, or None; raises if the policy is broken

    def check(self, total_steps: int, ended: Tensor | None = None, **groups: Obs | None) -> None:
        """Check the named observations of one step on a CPU; of `final_*` groups only the rows that `ended`."""
        if not self.is_immediate:
            return
        for group, tree in groups.items():
            if tree is None:
                continue
            for name, leaf in ((group, tree),) if isinstance(tree, Tensor) else tree_leaves(tree, group):
                if not leaf.is_floating_point():
                    continue
                total = leaf.item() if leaf.numel() == 1 else leaf.sum().item()
                if not math.isfinite(total):  # or the sum overflowed
                    self._raise_if_bad(name, leaf, total_steps, ended if group.startswith("final_") else None)

    def read(self, first_step: int, rollout: Mapping[str, Tensor], actions: Tensor | None = None) -> None:
        """Check (T, N, ...) tensors of a rollout whose steps were not checked; one host read."""
        floats = {name: value for name, value in rollout.items() if value.is_floating_point()}
        fine = torch.stack([torch.isfinite(value).all() for value in floats.values()]).tolist()
        for (name, value), is_fine in zip(floats.items(), fine, strict=True):
            if not is_fine:
                step = int((~torch.isfinite(value.flatten(1))).any(-1).nonzero()[0])
                # An observation is the result of the action in the row before it, a reward of the one in its own row.
                before = value.new_zeros(0) if actions is None else actions[: step + ("reward" in name)]
                self._raise_if_bad(name, value[step], first_step + step, actions=before)

    def _raise_if_bad(
        self, name: str, leaf: Tensor, step: int, rows: Tensor | None = None, actions: Tensor | None = None
    ) -> None:
        """Raise with the environments and features, unless every row (of `rows`) is finite after all."""
        bad = ~torch.isfinite(leaf.reshape(len(leaf), -1))
        if rows is not None:
            bad &= rows.view(-1, 1)
        if not bad.any():
            return
        if self.check_policy is not None:
            self.check_policy(actions)
        found = {"environments": bad.any(-1), "features": bad.any(0)} if leaf.dim() > 1 else {"environments": bad[:, 0]}
        numbers = {axis: flags.nonzero().flatten().tolist() for axis, flags in found.items()}
        more = {axis: f" and {len(n) - 8} more" if len(n) > 8 else "" for axis, n in numbers.items()}
        where = ", ".join(f"{axis} {', '.join(map(str, n[:8]))}{more[axis]}" for axis, n in numbers.items())
        effect = "the policy was not updated with it. Fix the environment, or clip the value before it is returned"
        raise NonFiniteError(f"the environment gave NaN or infinity in {name!r} ({where}) at step {step}; {effect}")


class ComponentSums:
    """Named components of the reward, summed over each episode on the device; `take` reads their means per episode."""

    def __init__(self) -> None:
        self.running: dict[str, Tensor] = {}  # (N,) sums over the unfinished episodes
        self._ended: dict[str, Tensor] = {}  # (2,) sum over the episodes that ended, and their number

    def add(self, parts: Mapping[str, Any], done: Tensor, valid: Tensor) -> None:
        """Add one step; a component that is not one number per environment is skipped."""
        for name, part in parts.items():
            if isinstance(part, (Tensor, np.ndarray)) and part.shape == done.shape:
                value = torch.as_tensor(part, dtype=torch.float32, device=done.device)
                total = torch.where(valid, value, 0.0) + self.running.get(name, 0.0)
                ended = torch.stack([torch.where(done, total, 0.0).sum(), done.sum()])
                self._ended[name] = ended + self._ended.get(name, 0.0)
                self.running[name] = total.masked_fill(done, 0.0)

    def take(self) -> dict[str, float]:
        """Means over the episodes that ended since the last call; empty if none did."""
        ended, self._ended = self._ended, {}
        table = torch.stack(list(ended.values())).tolist() if ended else []
        sums = zip(ended, table, strict=True)
        return {f"{COMPONENTS}/{name}": total / count for name, (total, count) in sums if count}


def listed_infos(infos: Mapping[str, Any] | Sequence[Mapping[str, Any]], keys: Iterable[str]) -> dict[str, Any]:
    """The listed entries of one info per environment, or of one for all, as `flatten_extras` takes them."""
    if isinstance(infos, Mapping):  # of a vector environment: arrays, each with a mask
        return {name: infos[name] for key in keys for name in (key, f"_{key}") if name in infos}
    given = {key: [info[key] for info in infos if key in info] for key in keys}
    return {key: _joined(values) for key, values in given.items() if values}


def _joined(values: Sequence[Any]) -> Any:
    """An array of the numbers in a list, or a dict of arrays from a list of dicts."""
    if isinstance(values[0], Mapping):
        rows = [row for row in values if isinstance(row, Mapping)]
        return {name: _joined([row[name] for row in rows if name in row]) for name in values[0]}
    return np.array([value for value in values if isinstance(value, (int, float, np.number, np.bool_))])


def flatten_extras(extras: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Tensor | float]:
    """The listed entries of `extras` as `extra/<key>/<sub>/...`, on their device; a value per environment is averaged.

    A name ending in `_max` or `_min` takes the extreme. Gymnasium's mask `_<name>` marks the environments that count.
    """
    listed = {name: extras[name] for key in keys for name in (key, f"_{key}") if name in extras}
    scalars = {tag: _to_scalar(value, tag, mask) for tag, value, mask in _entries(listed, "extra", None)}
    return {tag: scalar for tag, scalar in scalars.items() if scalar is not None}


def _entries(tree: Mapping[str, Any], tag: str, mask: Any) -> Iterator[tuple[str, Any, Any]]:
    """The name, value and mask of every leaf."""
    for key, value in tree.items():
        name, own_mask = str(key).strip("/"), tree.get(f"_{key}", mask)
        if (name.startswith("_") and name[1:] in tree) or name.rsplit("/", 1)[-1] in PAYLOADS:
            continue
        if isinstance(value, Mapping):
            yield from _entries(value, f"{tag}/{name}", own_mask)
        else:
            yield f"{tag}/{name}", value, own_mask


def _to_scalar(value: Any, tag: str, mask: Any) -> Tensor | float | None:
    if isinstance(value, (bool, int, float)):
        return float(value)
    if isinstance(value, (np.ndarray, np.generic)):
        value = torch.from_numpy(np.asarray(value, np.float64)) if value.dtype.kind in "biuf" else None
    if not isinstance(value, Tensor) or value.is_complex() or value.dim() > 1 or value.numel() == 0:
        return None
    value = value.detach() if value.is_floating_point() else value.float()
    if value.dim() == 0:
        return value
    if isinstance(mask, (Tensor, np.ndarray)) and mask.shape == value.shape:
        value = torch.where(torch.as_tensor(mask, device=value.device).bool(), value, math.nan)
    if tag.endswith("_max"):
        return value.masked_fill(value.isnan(), -math.inf).amax()
    if tag.endswith("_min"):
        return value.masked_fill(value.isnan(), math.inf).amin()
    return value.nanmean() if mask is not None else value.mean()


class ScalarAverager:
    """Means, or extremes of names ending in `_max` or `_min`, of scalars gathered on their device, without NaN."""

    def __init__(self) -> None:
        # By device and names, which are nearly always the same from step to step.
        self._rows: dict[Any, list[Tensor]] = {}
        self._folded: dict[Any, Tensor] = {}

    def add(self, scalars: Mapping[str, Tensor | float]) -> None:
        """Add the values of one step; tensors are copied, so their owner may overwrite them."""
        groups: dict[torch.device | None, list[str]] = {}
        for name, value in scalars.items():
            groups.setdefault(value.device if isinstance(value, Tensor) else None, []).append(name)
        for device, names in groups.items():
            key = (device, tuple(names))
            dtype = torch.float32 if device is not None and device.type == "mps" else torch.float64
            rows = self._rows.setdefault(key, [])
            rows.append(torch.stack([torch.as_tensor(scalars[n], dtype=dtype).detach().reshape(()) for n in names]))
            if len(rows) >= ROWS_PER_FOLD:
                self._fold(key)

    def _fold(self, key: Any) -> None:
        rows = torch.stack(self._rows.pop(key))  # (R, K)
        missing = rows.isnan()
        total, count = rows.masked_fill(missing, 0.0).sum(0), (~missing).sum(0).to(rows.dtype)
        high, low = rows.masked_fill(missing, -math.inf).amax(0), rows.masked_fill(missing, math.inf).amin(0)
        folded = torch.stack([total, count, high, low])  # (4, K)
        self._folded[key] = _merge(self._folded[key], folded) if key in self._folded else folded

    def take(self) -> dict[str, float]:
        """The scalars gathered since the last call; names without any value are left out."""
        for key in list(self._rows):
            self._fold(key)
        folded, self._folded = self._folded, {}
        columns: dict[str, Tensor] = {}
        for device in dict.fromkeys(device for device, _ in folded):
            tables = {names: table for (at, names), table in folded.items() if at == device}
            on_host = torch.cat(list(tables.values()), dim=1).cpu().double()  # the one transfer
            for name, column in zip(itertools.chain(*tables), on_host.unbind(1), strict=True):
                columns[name] = _merge(columns[name], column) if name in columns else column
        values = {}
        for name, column in columns.items():
            total, count, high, low = column.tolist()
            value = {"_max": high, "_min": low}.get(name[-4:], total / max(count, 1.0))
            # A maximum or minimum over no environment arrives as its neutral element.
            if count and value != {"_max": -math.inf, "_min": math.inf}.get(name[-4:]):
                values[name] = value
        return values


def _merge(a: Tensor, b: Tensor) -> Tensor:
    """Combine two (4, ...) tables of sum, count, maximum and minimum."""
    return torch.stack([a[0] + b[0], a[1] + b[1], torch.maximum(a[2], b[2]), torch.minimum(a[3], b[3])])


def gpu_memory(device: torch.device) -> dict[str, float]:
    """GPU memory in GiB; empty on a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    sizes = {"allocated": torch.cuda.memory_allocated(device), "global_free_mem": free, "total": total}
    return {f"perf/gpu_{name}": size / 2**30 for name, size in sizes.items()}
