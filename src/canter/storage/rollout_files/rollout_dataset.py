"""Trajectories from disk, served as if N environments were stepped; each environment plays one after the other."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.storage.rollout_files.base import RolloutFileBase
from canter.storage.rollout_files.catalog import Trajectory
from canter.storage.rollout_files.container import get_frame_range as frame_range
from canter.storage.rollout_files.library import TrajectoryLibrary
from canter.storage.rollout_files.pages import SERVED, Pages
from canter.storage.rollout_files.playlist import Playlist
from canter.utils.tree import tree_map
from canter.utils.utils import namedarraytuple

Transition = namedarraytuple(
    "Transition",
    "observation privileged_observation action reward done timeout next_observation next_privileged_observation",
)
OBS, CRITIC_OBS = SERVED[:2]


class RolloutDataset(RolloutFileBase):
    """Plays the trajectories of one or several directories in N environments at once.

    An environment that has played a trajectory to its end takes the next one that nobody has played; the others are not
    disturbed. With nothing left it repeats old ones (`repeats` says who does) until the others are done; then
    StopIteration ends the set.

    Args:
        data_dir: A directory that `TrajectoryWriter` made, or several.
        num_envs: N.
        dataset_loops: How often every trajectory is played; below 1 for ever. Every loop looks for new trajectories.
        random_shuffle_traj_order: Play in a random order, a new one in each loop.
        keep_latest_n_trajs: Use only the newest; waits until there are as many. 0 uses all.
        starting_frame_range: [low, high) of the frame a trajectory is begun at; 0 where it is shorter.
        device: Where batches go; a GPU if None and there is one.
        mark_first_frame_done: Mark the first frame served of a trajectory as done too.
        max_bad_fraction: Files that may be damaged, as a fraction; they are left out with a warning.
        wait_interval_s: Seconds between looks for more trajectories.
        wait_timeout_s: Give up waiting after this long; None waits for ever.
        seed: Of the order and the starting frames; None draws one.
    """

    Transition = Transition

    def __init__(
        self,
        data_dir: str | Path | Sequence[str | Path],
        num_envs: int,
        dataset_loops: int = 1,
        random_shuffle_traj_order: bool = False,
        keep_latest_n_trajs: int = 0,
        starting_frame_range: Sequence[int] = (0, 1),
        device: torch.device | str | None = None,
        *,
        mark_first_frame_done: bool = False,
        max_bad_fraction: float = 0.0,
        wait_interval_s: float = 5.0,
        wait_timeout_s: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(data_dir, num_envs, device)
        low, high = starting_frame_range
        if not 0 <= low < high:
            raise ValueError(f"starting_frame_range must be [low, high) with 0 <= low < high, got {[low, high]}")
        self.starting_frame_range = (int(low), int(high))
        self.mark_first_frame_done = mark_first_frame_done
        self.wait_interval_s, self.wait_timeout_s = wait_interval_s, wait_timeout_s
        several = isinstance(data_dir, (list, tuple))
        self.library = TrajectoryLibrary([Path(d) for d in (data_dir if several else [data_dir])], max_bad_fraction)  # pyright: ignore[reportArgumentType]
        self.rng = np.random.default_rng(seed)
        order = (dataset_loops, random_shuffle_traj_order, keep_latest_n_trajs)
        self.playlist = Playlist(self.library, *order, self.rng)
        self.num_played = 0
        self._playing: list[Trajectory | None] = [None] * num_envs
        self._chunk = np.zeros(num_envs, np.int64)  # which file of its trajectory an environment is in
        self._cursor = np.zeros(num_envs, np.int64)  # row in that file
        self._length = np.zeros(num_envs, np.int64)  # rows in that file
        self._is_first = np.zeros(num_envs, bool)
        self.repeats = np.zeros(num_envs, bool)
        self.pages = Pages(num_envs, self.device)
        self._buffers: dict[int | None, Any] = {}

    @property
    def metadata(self) -> dict[str, Any]:
        """The first metadata.json."""
        return self.library.metadata

    get_frame_range = staticmethod(frame_range)

    @property
    def num_dataset_looped(self) -> int:
        """How often everything was played."""
        return self.playlist.num_looped

    @property
    def unused_trajectory_idxs(self) -> list[int]:
        """What is left of this loop."""
        return self.playlist.unused

    def read_dataset_directory(self) -> bool:
        """Look for trajectories, oldest first; False if there are fewer than `keep_latest_n_trajs`."""
        return self.playlist.read()

    def assemble_obs_components(self, traj_data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`traj_data` with its `obs_<component>` arrays joined to `observations`, images as floats again."""
        return self.library.assemble(traj_data)

    # ------------------------------------------------------------------ which trajectory
    def reset_all(self) -> None:
        """Look for trajectories, waiting for as many as are wanted, and begin one in every environment."""
        self.playlist.begin(self.wait_interval_s, self.wait_timeout_s)
        if (found := len(self.playlist.trajectories)) < self.num_envs:
            warnings.warn(
                f"{found} trajectories for {self.num_envs} environments: some are played several times at once",
                stacklevel=3,
            )
        self.num_played = 0
        self.repeats[:] = False
        self.refresh_handlers(self.all_env_ids)

    def refresh_handlers(self, env_ids: Tensor) -> None:
        """Give environments the next trajectories."""
        for env in env_ids.tolist():
            self._refresh_traj_handler(env)

    def _refresh_traj_handler(self, env: int) -> None:
        """Begin the next trajectory; one whose file turns out to be damaged is passed over."""
        is_loaded = False
        while not is_loaded:
            self._playing[env] = trajectory = self.playlist.next()
            low, high = self.starting_frame_range
            frame = int(self.rng.integers(low, high)) if high > low + 1 else low
            frame = frame if frame < trajectory.length else 0
            chunk = next(i for i, (_, end) in enumerate(trajectory.ranges) if frame < end)
            is_loaded = self._load(env, chunk, frame - trajectory.ranges[chunk][0])
        self._is_first[env] = True
        self.repeats[env] = self.playlist.is_over

    # ------------------------------------------------------------------ which file
    def _maintain_handler(self, env: int) -> bool:
        """Go on to the next file of the trajectory, or to the next trajectory; whether it was the latter."""
        trajectory = self._playing[env]
        assert trajectory is not None
        following = int(self._chunk[env]) + 1
        if following < len(trajectory.chunks) and self._load(env, following, 0):
            return False
        self.num_played += 1
        self._refresh_traj_handler(env)
        return True

    def _load(self, env: int, chunk: int, cursor: int) -> bool:
        """Put a file of the environment's trajectory on its page; False if the file cannot be used."""
        trajectory = self._playing[env]
        assert trajectory is not None
        arrays = self.library.load(trajectory.chunks[chunk])
        if arrays is None:
            return False
        if not self.pages.data:
            self.pages.declare(arrays)
        self.pages.grow(self.library.longest_file)
        self.pages.put(env, arrays)
        self._chunk[env], self._cursor[env], self._length[env] = chunk, cursor, len(arrays["rewards"])
        return True

    # ------------------------------------------------------------------ batches
    def get_batch(self, num_transitions_per_env: int | None = None) -> Any:
        """The next transition of every environment, or the next k; StopIteration when everything was played."""
        if self._is_ready and self.repeats.all():
            raise StopIteration
        return super().get_batch(num_transitions_per_env)

    def get_transition_batch(self) -> tuple[Any, dict[str, Any]]:
        """One transition of every environment, and infos with `time_outs` and how far the dataset was played."""
        buffer, infos = super().get_transition_batch()
        return buffer, {**infos, "loops": self.num_dataset_looped, "trajectories": self.num_played}

    def get_buffer(self, num_transitions_per_env: int | None = None) -> Any:
        """The transition that every call with this number fills anew."""
        if not self._is_ready:
            self.reset()
        if num_transitions_per_env not in self._buffers:
            lead = (self.num_envs,) if num_transitions_per_env is None else (num_transitions_per_env, self.num_envs)
            obs, critic, *rest, next_obs, next_critic = (
                self.pages.zeros(name, lead) for name in (*SERVED, *SERVED[:2])
            )
            if CRITIC_OBS not in self.pages:
                critic, next_critic = obs, next_obs
            self._buffers[num_transitions_per_env] = Transition(obs, critic, *rest, next_obs, next_critic)
        return self._buffers[num_transitions_per_env]

    def fill_transitions(self, buffer: Any, num_transitions_per_env: int) -> None:
        """Fill fields (k, N, ...), as many steps at once as no environment reaches the end of its file."""
        step = 0
        while step < num_transitions_per_env:
            count = int(min(num_transitions_per_env - step, (self._length - self._cursor).min()))
            part = slice(step, step + count)
            self._fill(Transition(*(tree_map(lambda leaf, p=part: leaf[p], field) for field in buffer)), count, None)
            step += count

    def fill_transition(self, buffer: Any, env_ids: Tensor | None = None) -> None:
        """Write the row under the cursor of every environment, or of some, and what follows it; move on."""
        self._fill(Transition(*(tree_map(lambda leaf: leaf[None], field) for field in buffer)), 1, env_ids)

    def _fill(self, buffer: Any, count: int, env_ids: Tensor | None) -> None:
        """Fill fields (count, N, ...); only their last step may be the last of a file."""
        envs = np.arange(self.num_envs) if env_ids is None else env_ids.cpu().numpy()
        rows = self.pages.rows(envs, self._cursor[envs], count)
        for name, target in zip(SERVED, buffer, strict=False):
            if name in self.pages:
                self.pages.copy(name, target, rows, env_ids)
        if self.mark_first_frame_done:
            buffer.done[0].logical_or_(torch.from_numpy(self._is_first).to(self.device))
        self._is_first[envs] = False
        self._cursor[envs] += count - 1
        self._move_on(buffer, envs)
        rows = self.pages.rows(envs, self._cursor[envs], 1)
        self._fill_next(OBS, buffer.observation, buffer.next_observation, rows, env_ids)
        if CRITIC_OBS in self.pages:
            now, then = buffer.privileged_observation, buffer.next_privileged_observation
            self._fill_next(CRITIC_OBS, now, then, rows, env_ids)

    def _fill_next(self, name: str, now: Any, then: Any, rows: Tensor, env_ids: Tensor | None) -> None:
        tree_map(lambda a, b: b[:-1].copy_(a[1:]), now, then)
        self.pages.copy(name, tree_map(lambda leaf: leaf[-1:], then), rows, env_ids)

    def _move_on(self, buffer: Any, envs: np.ndarray) -> None:
        """Advance the cursors by one, and mark the last step where that ends a trajectory."""
        self._cursor[envs] += 1
        at_end = np.zeros(self.num_envs, bool)
        for env in envs[self._cursor[envs] >= self._length[envs]]:
            at_end[env] = self._maintain_handler(int(env))
        if at_end.any():
            ended = torch.from_numpy(at_end).to(self.device)
            buffer.timeout[-1].logical_or_(ended & ~buffer.done[-1])
            buffer.done[-1].logical_or_(ended)

    # ------------------------------------------------------------------ continuing
    def state_dict(self) -> dict[str, Any]:
        """Where every environment is, in plain containers; nothing before the first batch."""
        if not self._is_ready:
            return {}
        return {
            "playlist": self.playlist.state_dict(),
            "rng": json.dumps(self.rng.bit_generator.state),
            "playing": [self.library.name_of(trajectory) for trajectory in self._playing if trajectory is not None],
            "places": [self._chunk.tolist(), self._cursor.tolist()],
            "flags": [self._is_first.tolist(), self.repeats.tolist()],
            "num_played": self.num_played,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another dataset of these files was.

        LookupError if files are missing or it served another number of environments; then this one begins anew.
        """
        if not state:
            return
        if len(state["playing"]) != self.num_envs:
            raise LookupError(f"it was played in {len(state['playing'])} environments, here are {self.num_envs}")
        self._is_ready = False  # until all is read
        known = self.playlist.load_state_dict(state["playlist"])
        for env, (name, chunk, cursor) in enumerate(zip(state["playing"], *state["places"], strict=True)):
            self._playing[env] = known.get(name)
            if self._playing[env] is None or not self._load(env, chunk, cursor):
                raise LookupError(f"{name} can no longer be read")
        self._is_first[:], self.repeats[:] = state["flags"]
        self.rng.bit_generator.state = json.loads(state["rng"])
        self.num_played = int(state["num_played"])
        self._is_ready = True
