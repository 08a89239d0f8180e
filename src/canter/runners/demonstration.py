"""Collecting demonstrations: a policy acts in an environment, and its trajectories are written to disk."""

from __future__ import annotations

import contextlib
import inspect
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

from canter.compat.saver_env import SaverEnv
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
        policy: Has `act(obs)`, `act_inference(obs)` and `reset(dones)`; one that takes `critic_obs` gets it too.
        save_dir: Directory of the trajectories; one process at a time.
        rollout_storage_length: Steps between two writes, and the maximum of one file.
        success_traj_only: Keep only episodes that ended by a time limit or with `extras["success"]`.
        use_critic_obs: Give the policy the critic's observation.
        obs_disassemble_mapping: Segments of the observation stored as images: `{"camera": "normalized_image"}`.
        demo_by_sample: Act with exploration noise.
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
        self.env, self.policy, self.save_dir = SaverEnv(wrap_env(env)), policy, Path(save_dir)
        if rollout_storage_length < 1:
            raise ValueError(f"rollout_storage_length must be at least 1, got {rollout_storage_length}")
        self.rollout_storage_length = rollout_storage_length
        self.min_timesteps, self.min_episodes = min_timesteps, min_episodes
        self.success_traj_only, self.use_critic_obs = success_traj_only, use_critic_obs
        self.obs_disassemble_mapping, self.demo_by_sample = dict(obs_disassemble_mapping or {}), demo_by_sample
        self.show_progress = show_progress
        env_name = env if isinstance(env, str) else type(env).__name__
        self.metadata: dict[str, Any] = {"config": None, "env": env_name, "policy": type(policy).__name__}
        self.metadata |= {name: getattr(self, name) for name in DESCRIBED}
        self.layout: ObsLayout | None = None  # set if segments of the observation are stored as images
        if self.obs_disassemble_mapping:
            if self.env.obs_segments is None:
                raise ValueError("obs_disassemble_mapping needs an environment with obs_segments; this one has none")
            self.layout = ObsLayout(self.env.obs_segments)
            self.layout.ordered(list(self.obs_disassemble_mapping))
            self.metadata["obs_segments"] = plain(self.layout.shapes)
            self.metadata["obs_disassemble_mapping"] = self.obs_disassemble_mapping
        for name, codec in self.obs_disassemble_mapping.items():
            if codec not in CODECS:
                raise ValueError(f"obs_disassemble_mapping has {codec!r} for {name!r}; codecs are {', '.join(CODECS)}")
        self.obs: Obs | None = None
        self.critic_obs: Obs | None = None
        self.transition: dict[str, Any] = {}
        self.host: dict[str, np.ndarray] = {}  # the steps to write, (t, N, ...) by field
        self.finals: dict[tuple[int, int], dict[str, np.ndarray]] = {}  # final observations by step and environment
        self.console: Console | None = None
        self.stopped_by: int | None = None
        """The signal that ended the last `collect_and_save`."""
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
        obs = self.critic_obs if self.use_critic_obs else self.obs
        return self._act(self.policy, obs, self.demo_by_sample, self.critic_obs)

    @staticmethod
    def _act(policy: Any, obs: Any, by_sample: bool, critic_obs: Any = None) -> Tensor:
        act = policy.act if by_sample else policy.act_inference
        takes_both = critic_obs is not None and "critic_obs" in inspect.signature(act).parameters
        actions = act(obs, critic_obs=critic_obs) if takes_both else act(obs)
        if not by_sample:
            return actions
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
        flags = torch.zeros_like(record.truncated)
        if success is not None:
            flags = torch.as_tensor(success, device=flags.device).bool().reshape(flags.shape)
        self.transition = {"observations": self.obs, "critic_observations": self.critic_obs, "actions": actions}
        self.transition |= {"rewards": record.reward, "dones": record.done, "timeouts": record.truncated}
        self.transition |= {"success": flags, "valid": record.valid, "record": record}

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
        leaves = [*tree_leaves(record.final_obs, "final_observations")]
        if record.final_critic_obs is not record.final_obs:
            leaves += tree_leaves(record.final_critic_obs, "final_privileged_observations")
        envs = record.done.nonzero().flatten()
        ended = {name: value[envs].cpu().numpy() for name, value in leaves if value is not None}
        for row, env_i in enumerate(envs.tolist()):
            self.finals[storage.step, env_i] = {name: value[row : row + 1] for name, value in ended.items()}
        storage.add(self.transition)
        self.transition = {}

    @torch.no_grad()
    def collect_step(self, step_i: int) -> None:
        """Step every environment once and store the step."""
        if self.obs is None:
            self.obs, self.critic_obs = self.env.reset()
        labels, _, dones, infos, obs, critic_obs = self.get_transition()
        if not self.transition:  # a `get_transition` that only acts and steps
            assert self.env.newest is not None
            self.build_transition(labels, self.env.newest)
            self.obs, self.critic_obs = obs, critic_obs
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
            self.host = {name: value[: self.storage.step].cpu().numpy() for name, value in self.storage.data.items()}
            done, valid = self.host["dones"][..., 0], self.host["valid"]
            for env_i in range(self.env.num_envs):
                cuts = [0, *(np.nonzero(done[:, env_i])[0] + 1).tolist(), len(done)]
                for start, stop in itertools.pairwise(cuts):
                    if valid[start:stop, env_i].any():
                        self.dump_to_file(env_i, slice(start, stop))
                        if done[stop - 1, env_i]:
                            self.update_traj_handler(env_i, slice(start, stop))
            self.storage.clear()
            self.finals.clear()
        self.dump_metadata()

    def dump_to_file(self, env_i: int, step_slice: slice) -> None:
        """Write one piece of an environment's trajectory."""
        assert self.writer is not None
        arrays, last = self.wrap_up_trajectory(env_i, step_slice), (step_slice.stop - 1, env_i)
        ending = "truncated" if self.host["timeouts"][last] else "terminated"
        ended = ending if self.host["dones"][last].any() else ""
        add = self.writer.add_pending if self.success_traj_only else self.writer.add
        add(int(self.traj_idxs[env_i]), arrays, int(self.dumped_traj_lengths[env_i]), ended)
        self.dumped_traj_lengths[env_i] += len(arrays["rewards"])
        self.running_returns[env_i] += float(arrays["rewards"].sum())
        if ended:
            self.recent_episodes.append((float(self.running_returns[env_i]), int(self.dumped_traj_lengths[env_i])))
            self.running_returns[env_i] = 0.0

    def wrap_up_trajectory(self, env_i: int, step_slice: slice) -> dict[str, np.ndarray]:
        """One piece as arrays (t, ...) by name, images as bytes."""
        valid = self.host["valid"][step_slice, env_i]
        kept = self.host.keys() - {"success", "valid"}
        arrays = {name: value[step_slice, env_i][valid] for name, value in self.host.items() if name in kept}
        arrays["dones"] = arrays["dones"].astype(np.uint8)
        if self.layout is not None:
            for name, part in self.layout.split(torch.from_numpy(arrays.pop("observations"))).items():
                shaped = part.reshape(len(part), *self.layout.shapes[name])
                is_image = name in self.obs_disassemble_mapping
                arrays[f"obs_{name}"] = (compress_normalized_image(shaped) if is_image else shaped).numpy()
        return arrays | self.finals.get((step_slice.stop - 1, env_i), {})

    def update_traj_handler(self, env_i: int, step_slice: slice) -> None:
        """After the end of an episode: keep or drop its trajectory, and begin another."""
        assert self.writer is not None
        last = (step_slice.stop - 1, env_i)
        is_kept = not self.success_traj_only or self.host["timeouts"][last] or self.host["success"][last]
        if self.success_traj_only:
            (self.writer.publish if is_kept else self.writer.discard)(int(self.traj_idxs[env_i]))
        self.dumped_traj_lengths[env_i] = 0
        if is_kept:  # otherwise the number is free again
            self.traj_idxs[env_i] = self._next_number
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
        self.console, self.stopped_by = None, stop.requested

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
