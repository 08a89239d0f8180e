"""Collecting demonstrations: a policy acts in an environment, and its trajectories are written to disk."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.vec_env import StepRecord
from canter.envs.wrap import wrap_env
from canter.modules.build import env_shapes, leaf_dtype
from canter.runners.run_config import plain
from canter.storage.rollout_files.catalog import TrajectoryWriter, trajectory_folders
from canter.storage.rollout_storage import Field, RolloutStorage
from canter.utils.console import Console, table
from canter.utils.obs_layout import ObsLayout
from canter.utils.runtime import StopSignal
from canter.utils.tree import Obs, tree_leaves
from canter.utils.utils import compress_normalized_image

CODECS = ("normalized_image",)
DESCRIBED = ("rollout_storage_length", "success_traj_only", "min_timesteps", "min_episodes", "use_critic_obs")


class DemonstrationSaver:
    """Runs a policy in an environment and saves every trajectory; continues the dataset in `save_dir`.

    Args:
        env: Any environment that `wrap_env` accepts.
        policy: Has `act(obs)`, `act_inference(obs)` and `reset(dones)`.
        save_dir: Directory of the trajectories; one process at a time.
        rollout_storage_length: Steps between two writes, and the maximum of one file.
        min_timesteps: Minimum number of steps to collect.
        min_episodes: Minimum number of episodes to collect.
        success_traj_only: Keep only episodes that ended by a time limit or with `extras["success"]`.
        use_critic_obs: Give the policy the critic's observation.
        obs_disassemble_mapping: Segments of the observation stored as images: `{"camera": "normalized_image"}`.
        demo_by_sample: Act with exploration noise.
        show_progress: Show progress on the console.
    """

    def __init__(
        self,
        env: Any,
        policy: Any,
        save_dir: str | Path,
        rollout_storage_length: int = 64,
        min_timesteps: float = 1e6,
        min_episodes: float = 10000,
        success_traj_only: bool = False,
        use_critic_obs: bool = False,
        obs_disassemble_mapping: Mapping[str, str] | None = None,
        demo_by_sample: bool = False,
        *,
        show_progress: bool = True,
    ) -> None:
        self.writer: TrajectoryWriter | None = None
        self.storage: DemonstrationStorage | None = None
        self.env, self.policy, self.save_dir = wrap_env(env), policy, Path(save_dir)
        if rollout_storage_length < 1:
            raise ValueError(f"rollout_storage_length must be at least 1, got {rollout_storage_length}")
        self.rollout_storage_length = rollout_storage_length
        self.min_timesteps, self.min_episodes = min_timesteps, min_episodes
        self.success_traj_only, self.use_critic_obs = success_traj_only, use_critic_obs
        self.obs_disassemble_mapping, self.demo_by_sample = dict(obs_disassemble_mapping or {}), demo_by_sample
        self.show_progress = show_progress
        self.cutter = StepCutter(self.env.obs_segments, self.obs_disassemble_mapping)
        env_name = env if isinstance(env, str) else type(env).__name__
        self.metadata: dict[str, Any] = {"config": None, "env": env_name, "policy": type(policy).__name__}
        self.metadata |= {name: getattr(self, name) for name in DESCRIBED}
        if self.cutter.layout is not None:
            shapes = plain(self.cutter.layout.shapes)
            self.metadata |= {"obs_segments": shapes, "obs_disassemble_mapping": self.obs_disassemble_mapping}
        self.obs: Obs | None = None
        self.critic_obs: Obs | None = None
        self.transition: dict[str, Any] = {}
        self.console: Console | None = None
        self.recent_episodes: deque[tuple[float, int]] = deque(maxlen=100)  # return and length
        self._mark = (time.monotonic(), 0)
        self.total_timesteps = self.total_episodes = 0  # steps and complete episodes on disk
        if hasattr(policy, "eval"):
            policy.eval()

    def init_traj_handlers(self) -> None:
        """Open `save_dir`, and a new trajectory for every environment."""
        if self.writer is not None:
            return
        self.writer = TrajectoryWriter(self.save_dir, self.metadata)
        self.traj_idxs = np.array(self.writer.free_numbers(self.env.num_envs))
        self.dumped_traj_lengths = np.zeros(self.env.num_envs, np.int64)
        for number in self.traj_idxs:
            self.writer.folder(int(number)).mkdir(exist_ok=True)
        self._next_number = trajectory_folders(self.save_dir)[-1][0] + 1
        self.running_returns = np.zeros(self.env.num_envs)
        self.total_timesteps, self.total_episodes = self.writer.num_steps, self.writer.num_episodes
        self._mark = (time.monotonic(), self.total_timesteps)

    def init_storage_buffer(self) -> None:
        """Allocate a buffer of `rollout_storage_length` steps, with actions in the environment's own form."""
        env, space = self.env, self.env.action_space
        is_box = isinstance(space, spaces.Box)
        shape, dtype = ((env.num_actions,), leaf_dtype(space)) if is_box else (tuple(space.shape or ()), torch.long)
        sizes = (env.num_envs, self.rollout_storage_length, *env_shapes(env), shape)
        self.storage = DemonstrationStorage(*sizes, env.device, action_dtype=dtype)

    def get_policy_actions(self) -> Tensor:
        """The policy's actions, in the form that the environment takes."""
        return self._act(self.policy, self.critic_obs if self.use_critic_obs else self.obs, self.demo_by_sample)

    @staticmethod
    def _act(policy: Any, obs: Any, by_sample: bool) -> Tensor:
        if not by_sample:
            return policy.act_inference(obs)
        actions = policy.act(obs)
        return policy.distribution.to_env(actions) if hasattr(policy, "distribution") else actions

    @torch.no_grad()
    def get_transition(self) -> tuple[Tensor, Tensor, Tensor, dict[str, Any], Obs, Obs]:
        """Act and step; returns (actions, rewards, dones, infos, observations, critic observations)."""
        if self.obs is None:
            self.obs, self.critic_obs = self.env.reset()
        labels, executed = self.choose_actions()
        record = self.env.step(executed.clone())
        self.build_transition(labels, record)
        self.obs, self.critic_obs = record.obs, record.critic_obs
        return labels, record.reward, record.done | ~record.valid, record.extras, record.obs, record.critic_obs

    def choose_actions(self) -> tuple[Tensor, Tensor]:
        """The actions to store and the actions to execute."""
        actions = self.get_policy_actions()
        return actions, actions

    def build_transition(self, actions: Tensor, record: StepRecord) -> None:
        """Prepare the step for `add_transition`: the observation before it, the action and its result."""
        success = record.extras.get("success", record.extras.get("is_success"))
        no = torch.zeros_like(record.truncated)
        self.transition = {
            "observations": self.obs,
            "critic_observations": self.critic_obs,
            "actions": actions,
            "rewards": record.reward,
            "dones": record.done,
            "timeouts": record.truncated,
            "success": no if success is None else torch.as_tensor(success, device=no.device).bool().reshape(no.shape),
            "valid": record.valid,
            "record": record,
        }

    def add_transition(self, step_i: int, infos: Mapping[str, Any]) -> None:
        """Store the step of `get_transition`; a full buffer is saved first."""
        if self.storage is None:
            self.init_storage_buffer()
        if not self.transition:
            raise RuntimeError("there is no step to add; call get_transition() first")
        storage = self.storage
        assert storage is not None
        if storage.step >= storage.num_transitions_per_env:
            self.save_steps()
        record: StepRecord = self.transition.pop("record")
        if bool(record.done.any()):
            self.cutter.note_final(storage.step, record.done, record)
        storage.add(self.transition)
        self.transition = {}

    @torch.no_grad()
    def collect_step(self, step_i: int) -> None:
        """Step every environment once and store the step."""
        _, _, dones, infos, _, _ = self.get_transition()
        self.add_transition(step_i, infos)
        self.policy_reset(dones)

    def policy_reset(self, dones: Tensor) -> None:
        """Reset the policy's memory where episodes ended."""
        if bool(dones.any()):
            self.policy.reset(dones)

    def save_steps(self) -> None:
        """Write the buffer to disk, cut at episode ends, and update the metadata."""
        self.init_traj_handlers()
        if self.storage is not None and self.storage.step:
            self.cutter.take(self.storage)
            for env_i in range(self.env.num_envs):
                for step_slice in self.cutter.pieces(env_i):
                    self.dump_to_file(env_i, step_slice)
                    if self.cutter.ending(env_i, step_slice):
                        self.update_traj_handler(env_i, step_slice)
            self.storage.clear()
            self.cutter.finals.clear()
        self.dump_metadata()

    def dump_to_file(self, env_i: int, step_slice: slice) -> None:
        """Write one piece of an environment's trajectory."""
        assert self.writer is not None
        arrays = self.wrap_up_trajectory(env_i, step_slice)
        ended = self.cutter.ending(env_i, step_slice)
        add = self.writer.add_pending if self.success_traj_only else self.writer.add
        add(int(self.traj_idxs[env_i]), arrays, int(self.dumped_traj_lengths[env_i]), ended)
        self.dumped_traj_lengths[env_i] += len(arrays["rewards"])
        self.running_returns[env_i] += float(arrays["rewards"].sum())
        if ended:
            self.recent_episodes.append((float(self.running_returns[env_i]), int(self.dumped_traj_lengths[env_i])))
            self.running_returns[env_i] = 0.0

    def wrap_up_trajectory(self, env_i: int, step_slice: slice) -> dict[str, np.ndarray]:
        """One piece as arrays (t, ...) by name."""
        return self.cutter.arrays(env_i, step_slice)

    def update_traj_handler(self, env_i: int, step_slice: slice) -> None:
        """After the end of an episode: keep or drop its trajectory, and begin another."""
        assert self.writer is not None
        number = int(self.traj_idxs[env_i])
        if self.success_traj_only:
            is_kept = self.cutter.ending(env_i, step_slice) == "truncated" or self.cutter.is_success(env_i, step_slice)
            (self.writer.publish if is_kept else self.writer.discard)(number)
            if not is_kept:
                self.dumped_traj_lengths[env_i] = 0
                return  # the number is free again
        self.traj_idxs[env_i] = self._next_number
        self.dumped_traj_lengths[env_i] = 0
        self._next_number += 1

    def dump_metadata(self) -> None:
        """Commit the written files and update metadata.json."""
        if self.writer is not None:
            self.writer.metadata |= self.metadata
            self.writer.flush()
            self.total_timesteps, self.total_episodes = self.writer.num_steps, self.writer.num_episodes

    def check_stop(self) -> bool:
        """Whether `min_timesteps` and `min_episodes` are reached."""
        return self.total_episodes >= self.min_episodes and self.total_timesteps >= self.min_timesteps

    def collect_and_save(self, config: Mapping[str, Any] | None = None) -> None:
        """Collect until `check_stop` or a stop signal; all steps are then on disk."""
        self.metadata["config"] = plain(config)
        self.init_traj_handlers()
        self.init_storage_buffer()
        title = f"{type(self).__name__} -> {self.save_dir}"
        with self, StopSignal() as stop, Console(100, title, self.show_progress, unit="percent") as self.console:
            while not self.check_stop() and stop.requested is None:
                for step_i in range(self.rollout_storage_length):
                    self.collect_step(step_i)
                self.save_steps()
                self.print_log()
        self.console = None

    def print_log(self) -> str:
        """Print the progress of the collection; returns the printed text."""
        now, (then, before) = time.monotonic(), self._mark
        rate = (self.total_timesteps - before) / max(now - then, 1e-9)
        self._mark = (now, self.total_timesteps)
        metrics = self.log_metrics()
        text = f"{self.total_timesteps} timesteps, {self.total_episodes} episodes, {rate:.0f} timesteps/s"
        text = f"{text}\n{table(metrics)}" if metrics else text
        if self.console is None:
            print(text)  # noqa: T201 (documented)
        else:  # within `collect_and_save` the progress display shows the metrics
            done = (self.total_timesteps / max(self.min_timesteps, 1), self.total_episodes / max(self.min_episodes, 1))
            self.console.update(min(100, int(100 * min(done))), self.total_timesteps, metrics)
        return text

    def log_metrics(self) -> dict[str, float]:
        """Mean return and length of the last written episodes; empty before the first."""
        if not self.recent_episodes:
            return {}
        rewards, lengths = zip(*self.recent_episodes, strict=True)
        return {"episode/mean_reward": float(np.mean(rewards)), "episode/mean_length": float(np.mean(lengths))}

    def close(self) -> None:
        """Save the remaining steps and release the directory; can be called again."""
        try:
            if self.storage is not None and self.storage.step:
                self.save_steps()
        finally:
            writer, self.writer, self.storage = self.writer, None, None
            if writer is not None:
                self.total_timesteps, self.total_episodes = writer.num_steps, writer.num_episodes
                writer.close()

    def __enter__(self) -> DemonstrationSaver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # an error in __del__ cannot be handled
            self.close()


class DemonstrationStorage(RolloutStorage):
    """The fields of a rollout that are written to disk."""

    def declare_fields(self) -> dict[str, Field]:
        """Observations, actions, rewards, dones, and the flags `timeouts`, `success` and `valid`."""
        kept = ("observations", "privileged_observations", "actions", "rewards", "dones")
        fields = {n: f for n, f in super().declare_fields().items() if n.partition(".")[0] in kept}
        flags = {name: Field((), None, name, torch.bool) for name in ("timeouts", "success", "valid")}
        return {**fields, **flags}


class StepCutter:
    """Cuts the rows of a storage into pieces of trajectories, as they are written.

    Args:
        segments: Segments of the flat observation, needed to store some of them as images.
        images: Codec by segment name; `{"camera": "normalized_image"}` stores values in [0, 1] as bytes.
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
                raise ValueError(f"obs_disassemble_mapping has {codec!r} for {name!r}; codecs are {', '.join(CODECS)}")
        self.host: dict[str, np.ndarray] = {}
        self.finals: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def note_final(self, step: int, done: Tensor, record: Any) -> None:
        """Keep the final observations of ended episodes, if the environment gives them."""
        given = {"final_observations": record.final_obs}
        if record.final_critic_obs is not record.final_obs:
            given["final_privileged_observations"] = record.final_critic_obs
        envs = done.nonzero().flatten()
        for name, tree in given.items():
            for leaf, value in tree_leaves(tree, name) if tree is not None else ():
                for env, row in zip(envs.tolist(), value[envs].cpu().numpy(), strict=True):
                    self.finals.setdefault((step, env), {})[leaf] = row[None]

    def take(self, storage: RolloutStorage) -> None:
        """Copy the stored steps to the host."""
        self.host = {name: value[: storage.step].cpu().numpy() for name, value in storage.data.items()}

    def pieces(self, env: int) -> list[slice]:
        """Rows of an environment, cut after each end of an episode; pieces without a valid step are left out."""
        ends = np.nonzero(self.host["dones"][:, env, 0])[0] + 1
        cuts = [0, *ends.tolist(), len(self.host["dones"])]
        return [slice(a, b) for a, b in itertools.pairwise(cuts) if self.host["valid"][a:b, env].any()]

    def arrays(self, env: int, rows: slice) -> dict[str, np.ndarray]:
        """One piece as arrays (t, ...) by name, images as bytes."""
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
        """End of the piece: "terminated", "truncated", or "" if the episode continues."""
        last = rows.stop - 1
        if not self.host["dones"][last, env, 0]:
            return ""
        return "truncated" if self.host["timeouts"][last, env] else "terminated"

    def is_success(self, env: int, rows: slice) -> bool:
        """Whether the environment reported success in the last step of the piece."""
        return bool(self.host["success"][rows.stop - 1, env])
