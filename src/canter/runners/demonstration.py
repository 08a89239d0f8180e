"""Collecting demonstrations: a policy plays, and its trajectories go to disk."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.envs.vec_env import StepRecord
from canter.envs.wrap import wrap_env
from canter.runners.recorder import DemonstrationStorage, Returns, StepCutter, recorded
from canter.runners.run_config import plain
from canter.storage.rollout_files.catalog import TrajectoryWriter, trajectory_folders
from canter.utils.console import Console, table
from canter.utils.obs_layout import ObsLayout
from canter.utils.runtime import StopSignal
from canter.utils.tree import Obs


class DemonstrationSaver:
    """Plays a policy in an environment and saves every trajectory; continues what `save_dir` holds.

    Args:
        env: Anything `wrap_env` knows.
        policy: Has `act(obs)`, `act_inference(obs)` and `reset(dones)`.
        save_dir: Where trajectories go; one process at a time.
        rollout_storage_length: Steps between two writes, and the most that one file holds.
        min_timesteps: Collect at least this many steps,
        min_episodes: and at least this many episodes.
        success_traj_only: Keep only episodes that ended by a time limit or with `extras["success"]`.
        use_critic_obs: The policy sees the critic's observation.
        obs_disassemble_mapping: Parts of the observation to keep as images: `{"camera": "normalized_image"}`.
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
        self.metadata: dict[str, Any] = {
            "config": None,
            "env": type(env).__name__ if not isinstance(env, str) else env,
            "policy": type(policy).__name__,
            "rollout_storage_length": rollout_storage_length,
            "success_traj_only": success_traj_only,
            "min_timesteps": min_timesteps,
            "min_episodes": min_episodes,
            "use_critic_obs": use_critic_obs,
        }
        if self.obs_disassemble_mapping and self.env.obs_segments is not None:
            shapes = ObsLayout(self.env.obs_segments).shapes
            self.metadata |= {"obs_segments": plain(shapes), "obs_disassemble_mapping": self.obs_disassemble_mapping}
        self.obs: Obs | None = None
        self.critic_obs: Obs | None = None
        self.transition: dict[str, Any] = {}
        self.console: Console | None = None
        self._mark = (time.monotonic(), 0)
        self._totals = (0, 0)
        if hasattr(policy, "eval"):
            policy.eval()

    # ------------------------------------------------------------------ where steps go
    def init_traj_handlers(self) -> None:
        """Open `save_dir`, and a trajectory of its own for every environment after those that are there."""
        if self.writer is not None:
            return
        self.writer = TrajectoryWriter(self.save_dir, self.metadata)
        self.traj_idxs = np.array(self.writer.free_numbers(self.env.num_envs))
        self.dumped_traj_lengths = np.zeros(self.env.num_envs, np.int64)
        for number in self.traj_idxs:
            self.writer.folder(int(number)).mkdir(exist_ok=True)
        self._next_number = trajectory_folders(self.save_dir)[-1][0] + 1
        self.returns = Returns(self.env.num_envs)
        self._mark = (time.monotonic(), self.writer.num_steps)

    def init_storage_buffer(self) -> None:
        """Make room for `rollout_storage_length` steps."""
        self.storage = DemonstrationStorage.for_env(self.env, self.rollout_storage_length)

    # ------------------------------------------------------------------ one step
    def get_policy_actions(self) -> Tensor:
        """The policy's actions as the environment takes them."""
        return self._act(self.policy, self.critic_obs if self.use_critic_obs else self.obs, self.demo_by_sample)

    @staticmethod
    def _act(policy: Any, obs: Any, by_sample: bool) -> Tensor:
        if not by_sample:
            return policy.act_inference(obs)
        actions = policy.act(obs)
        return policy.distribution.to_env(actions) if hasattr(policy, "distribution") else actions

    @torch.no_grad()
    def get_transition(self) -> tuple[Tensor, Tensor, Tensor, dict[str, Any], Obs, Obs]:
        """Act and step: (actions, rewards, dones, infos, observations, critic observations)."""
        if self.obs is None:
            self.obs, self.critic_obs = self.env.reset()
        labels, executed = self.choose_actions()
        record = self.env.step(executed.clone())
        self.build_transition(labels, record)
        self.obs, self.critic_obs = record.obs, record.critic_obs
        return labels, record.reward, record.done | ~record.valid, record.extras, record.obs, record.critic_obs

    def choose_actions(self) -> tuple[Tensor, Tensor]:
        """The actions to record and those to execute."""
        actions = self.get_policy_actions()
        return actions, actions

    def build_transition(self, actions: Tensor, record: StepRecord) -> None:
        """What `add_transition` will store: the observation acted on, the action, and what came of it."""
        self.transition = {**recorded(self.obs, self.critic_obs, actions, record), "record": record}

    def add_transition(self, step_i: int, infos: Mapping[str, Any]) -> None:
        """Keep the step that `get_transition` made; a full buffer is saved first."""
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
        """One step of every environment into the buffer."""
        _, _, dones, infos, _, _ = self.get_transition()
        self.add_transition(step_i, infos)
        self.policy_reset(dones)

    def policy_reset(self, dones: Tensor) -> None:
        """Forget the past of episodes that ended, if any did."""
        if bool(dones.any()):
            self.policy.reset(dones)

    # ------------------------------------------------------------------ to disk
    def save_steps(self) -> None:
        """Write what the buffer holds, cut at episode ends, and acknowledge it."""
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
        self.returns.note(env_i, arrays["rewards"], int(self.dumped_traj_lengths[env_i]), bool(ended))

    def wrap_up_trajectory(self, env_i: int, step_slice: slice) -> dict[str, np.ndarray]:
        """One piece as arrays (t, ...) by name."""
        return self.cutter.arrays(env_i, step_slice)

    def update_traj_handler(self, env_i: int, step_slice: slice) -> None:
        """After an episode's end: keep or drop its trajectory, and begin another."""
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
        """Acknowledge what was written, and bring metadata.json up to date."""
        if self.writer is not None:
            self.writer.metadata |= self.metadata
            self.writer.flush()

    # ------------------------------------------------------------------ all of it
    @property
    def total_timesteps(self) -> int:
        """Steps on disk."""
        return self._totals[0] if self.writer is None else self.writer.num_steps

    @property
    def total_episodes(self) -> int:
        """Complete episodes on disk."""
        return self._totals[1] if self.writer is None else self.writer.num_episodes

    def check_stop(self) -> bool:
        """Whether there are enough steps and enough episodes."""
        return self.total_episodes >= self.min_episodes and self.total_timesteps >= self.min_timesteps

    def collect_and_save(self, config: Mapping[str, Any] | None = None) -> None:
        """Collect until there is enough, or a signal asks to stop; everything up to then is on disk."""
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

    def print_log(self) -> str:
        """Show how far the collection is; returns the same as text."""
        now, (then, before) = time.monotonic(), self._mark
        rate = (self.total_timesteps - before) / max(now - then, 1e-9)
        self._mark = (now, self.total_timesteps)
        done = (self.total_timesteps / max(self.min_timesteps, 1), self.total_episodes / max(self.min_episodes, 1))
        metrics = self.log_metrics()
        if self.console is not None:
            self.console.update(min(100, int(100 * min(done))), self.total_timesteps, metrics)
        facts = f"{self.total_timesteps} timesteps, {self.total_episodes} episodes, {rate:.0f} timesteps/s"
        return f"{facts}\n{table(metrics)}" if metrics else facts

    def log_metrics(self) -> dict[str, float]:
        """What the progress display shows besides the counts."""
        return self.returns.metrics() if self.writer is not None else {}

    def close(self) -> None:
        """Save what is left, finish the directory and let others have it; harmless when repeated."""
        try:
            if self.storage is not None and self.storage.step:
                self.save_steps()
        finally:
            writer, self.writer, self.storage = self.writer, None, None
            if writer is not None:
                self._totals = writer.num_steps, writer.num_episodes
                writer.close()

    def __enter__(self) -> DemonstrationSaver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # nobody is there to hear of it
            self.close()
