"""Steps of N environments on their way to disk: kept in a buffer, cut at episode ends, written one file per piece."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.vec_env import StepRecord, VecEnv
from canter.modules.build import env_shapes, leaf_dtype
from canter.storage.rollout_storage import Field, RolloutStorage
from canter.utils.obs_layout import ObsLayout
from canter.utils.tree import tree_leaves
from canter.utils.utils import compress_normalized_image

CODECS = ("normalized_image",)


class DemonstrationStorage(RolloutStorage):
    """The part of a rollout that goes to disk: observations, actions, rewards, and how episodes ended."""

    def declare_fields(self) -> dict[str, Field]:
        """Observations, actions, rewards, dones, timeouts and which steps count."""
        kept = ("observations", "privileged_observations", "actions", "rewards", "dones")
        fields = {n: f for n, f in super().declare_fields().items() if n.partition(".")[0] in kept}
        flags = {name: Field((), None, name, torch.bool) for name in ("timeouts", "success", "valid")}
        return {**fields, **flags}

    @classmethod
    def for_env(cls, env: VecEnv, num_steps: int) -> DemonstrationStorage:
        """Room for so many steps of an environment, with actions as it takes them."""
        space = env.action_space
        is_box = isinstance(space, spaces.Box)
        shape = (env.num_actions,) if is_box else tuple(space.shape or ())
        obs_shape, critic_shape = env_shapes(env)
        dtype = leaf_dtype(space) if is_box else torch.long
        return cls(env.num_envs, num_steps, obs_shape, critic_shape, shape, env.device, action_dtype=dtype)


def recorded(obs: Any, critic_obs: Any, actions: Tensor, record: StepRecord) -> dict[str, Any]:
    """What a `DemonstrationStorage` keeps of a step: the observation acted on, the action, and what came of it."""
    success = record.extras.get("success", record.extras.get("is_success"))
    no = torch.zeros_like(record.truncated)
    return {
        "observations": obs,
        "critic_observations": critic_obs,
        "actions": actions,
        "rewards": record.reward,
        "dones": record.done,
        "timeouts": record.truncated,
        "success": no if success is None else torch.as_tensor(success, device=no.device).bool().reshape(no.shape),
        "valid": record.valid,
    }


class StepCutter:
    """Cuts the rows of a storage into pieces of trajectories, ready to be written.

    Args:
        segments: Parts of the flat observation, needed to keep some of them as images.
        images: Name of a part -> how it is kept; `{"camera": "normalized_image"}` keeps values in [0, 1] as bytes.
    """

    def __init__(self, segments: Mapping[str, Any] | None = None, images: Mapping[str, str] | None = None) -> None:
        self.images = dict(images or {})
        self.layout = ObsLayout(segments) if self.images and segments is not None else None
        if self.images and self.layout is None:
            raise ValueError("obs_disassemble_mapping needs an environment with obs_segments; this one has none")
        if self.layout is not None:
            self.layout.ordered(list(self.images))
        for name, codec in self.images.items():
            if codec not in CODECS:
                raise ValueError(f"obs_disassemble_mapping keeps {name!r} as {codec!r}; known are {', '.join(CODECS)}")
        self.host: dict[str, np.ndarray] = {}
        self.finals: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def note_final(self, step: int, done: Tensor, record: Any) -> None:
        """Keep the observations in which episodes ended, where the environment gives them."""
        given = {"final_observations": record.final_obs}
        if record.final_critic_obs is not record.final_obs:
            given["final_privileged_observations"] = record.final_critic_obs
        envs = done.nonzero().flatten()
        for name, tree in given.items():
            for leaf, value in tree_leaves(tree, name) if tree is not None else ():
                for env, row in zip(envs.tolist(), value[envs].cpu().numpy(), strict=True):
                    self.finals.setdefault((step, env), {})[leaf] = row[None]

    def take(self, storage: RolloutStorage) -> None:
        """Bring what was stored to the host."""
        self.host = {name: value[: storage.step].cpu().numpy() for name, value in storage.data.items()}

    def pieces(self, env: int) -> list[slice]:
        """The rows of an environment, cut after every episode's end and without leading rows that only reset."""
        ends = np.nonzero(self.host["dones"][:, env, 0])[0] + 1
        cuts = [0, *ends.tolist(), len(self.host["dones"])]
        return [slice(a, b) for a, b in itertools.pairwise(cuts) if self.host["valid"][a:b, env].any()]

    def arrays(self, env: int, rows: slice) -> dict[str, np.ndarray]:
        """One piece as it is written: (t, ...) by name, images as bytes."""
        valid = self.host["valid"][rows, env]
        skipped = ("success", "valid")
        whole = {name: value[rows, env][valid] for name, value in self.host.items() if name not in skipped}
        whole["dones"] = whole["dones"].astype(np.uint8)
        if self.layout is not None:
            flat = torch.from_numpy(whole.pop("observations"))
            for name, part in self.layout.split(flat).items():
                shaped = part.reshape(len(part), *self.layout.shapes[name])
                kept = compress_normalized_image(shaped) if name in self.images else shaped
                whole[f"obs_{name}"] = kept.numpy()
        return whole | self.finals.get((rows.stop - 1, env), {})

    def ending(self, env: int, rows: slice) -> str:
        """How the piece ended: "terminated", "truncated", or "" if the episode goes on."""
        last = rows.stop - 1
        if not self.host["dones"][last, env, 0]:
            return ""
        return "truncated" if self.host["timeouts"][last, env] else "terminated"

    def is_success(self, env: int, rows: slice) -> bool:
        """Whether the environment said so in the piece's last step."""
        return bool(self.host["success"][rows.stop - 1, env])


class Returns:
    """Returns and lengths of the episodes that were written, for the display."""

    def __init__(self, num_envs: int) -> None:
        self.running = np.zeros(num_envs)
        self.recent: deque[tuple[float, int]] = deque(maxlen=100)

    def note(self, env: int, rewards: np.ndarray, length: int, ended: bool) -> None:
        """Take a piece of an episode in; `length` is that of the episode so far."""
        self.running[env] += float(rewards.sum())
        if ended:
            self.recent.append((float(self.running[env]), length))
            self.running[env] = 0.0

    def metrics(self) -> dict[str, float]:
        """Means over the last hundred episodes; nothing before the first."""
        if not self.recent:
            return {}
        rewards, lengths = zip(*self.recent, strict=True)
        return {"episode/mean_reward": float(np.mean(rewards)), "episode/mean_length": float(np.mean(lengths))}
