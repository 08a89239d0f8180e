"""Recorded trajectories served as steps of N environments; each environment plays one trajectory after another."""

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.storage.rollout_files.base import RolloutFileBase
from canter.storage.rollout_files.catalog import Trajectory, TrajectoryLibrary
from canter.storage.rollout_files.container import get_frame_range as frame_range
from canter.utils.tree import nested, tree_leaves, tree_map
from canter.utils.utils import namedarraytuple

SERVED = ("observations", "privileged_observations", "actions", "rewards", "dones", "timeouts")
OBS, CRITIC_OBS = SERVED[:2]
NOTE_SECONDS = 10.0  # between two notes about waiting
Transition = namedarraytuple(
    "Transition",
    "observation privileged_observation action reward done timeout next_observation next_privileged_observation",
)


class RolloutDataset(RolloutFileBase):
    """Plays the trajectories of one or several directories in N environments at once.

    An environment at the end of its trajectory takes the next unplayed one; the others are not affected. With none
    left it repeats old ones, marked in `repeats`, until all environments do; then `get_batch` raises StopIteration.

    Args:
        data_dir: A directory that `TrajectoryWriter` made, or several.
        dataset_loops: How often every trajectory is played; below 1 for ever. Every loop looks for new trajectories.
        random_shuffle_traj_order: Play in a random order, a new one in each loop.
        keep_latest_n_trajs: Use only the newest; waits until there are as many. 0 uses all.
        starting_frame_range: [low, high) of the first frame of a trajectory; 0 if the trajectory is shorter.
        mark_first_frame_done: Mark the first frame served of a trajectory as done too.
        max_bad_fraction: Largest fraction of damaged files; they are left out with a warning.
        wait_interval_s: Seconds between searches for more trajectories.
        wait_timeout_s: Seconds until waiting is given up; None waits for ever.
        seed: Seed of the order and the starting frames; None draws one.
    """

    Transition = Transition
    get_frame_range = staticmethod(frame_range)

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
        self.dataset_loops, self.keep_latest_n_trajs = dataset_loops, keep_latest_n_trajs
        self.random_shuffle_traj_order, self.mark_first_frame_done = random_shuffle_traj_order, mark_first_frame_done
        self.wait_interval_s, self.wait_timeout_s = wait_interval_s, wait_timeout_s
        directories = [data_dir] if isinstance(data_dir, (str, Path)) else data_dir
        self.library = TrajectoryLibrary(list(map(Path, directories)), max_bad_fraction)
        self.rng = np.random.default_rng(seed)
        self.trajectories: list[Trajectory] = []
        self.unused_trajectory_idxs: list[int] = []  # left in this loop
        self.num_dataset_looped = self.num_played = 0
        self._playing: dict[int, Trajectory] = {}
        # Of each environment: the file of its trajectory that it is in, row in that file, rows in that file.
        self._chunk, self._cursor, self._length = np.zeros((3, num_envs), np.int64)
        self._is_first, self.repeats = np.zeros((2, num_envs), bool)
        self._pages: dict[str, Tensor] = {}  # the current files: (N, longest file, ...) by name
        self._buffers: dict[int | None, Any] = {}

    @property
    def metadata(self) -> dict[str, Any]:
        """The first metadata.json."""
        return self.library.metadata

    def assemble_obs_components(self, traj_data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`traj_data` with its `obs_<component>` arrays concatenated to `observations`, images as floats."""
        return self.library.assemble(traj_data)

    def read_dataset_directory(self) -> bool:
        """Look for trajectories, oldest first; False if there are fewer than `keep_latest_n_trajs`."""
        found = self.library.scan()
        if len(found) < self.keep_latest_n_trajs:
            return False
        self.trajectories = found[-self.keep_latest_n_trajs :]
        self._refill()
        return True

    def _refill(self) -> None:
        usable = [i for i, trajectory in enumerate(self.trajectories) if self.library.is_usable(trajectory)]
        if self.random_shuffle_traj_order:  # sorted by name first, so that a copy of the files is shuffled alike
            usable = self.rng.permutation(sorted(usable, key=lambda i: str(self.trajectories[i].path))).tolist()
        self.unused_trajectory_idxs = usable

    @property
    def _is_over(self) -> bool:
        return 0 < self.dataset_loops <= self.num_dataset_looped

    def reset_all(self) -> None:
        """Look for trajectories, wait until there are enough, and begin one in every environment."""
        started, has_warned, next_note = time.monotonic(), False, NOTE_SECONDS
        while not self.read_dataset_directory():
            waited = time.monotonic() - started
            text = f"fewer than keep_latest_n_trajs={self.keep_latest_n_trajs} trajectories in {self.library.where}"
            if self.wait_timeout_s is not None and waited >= self.wait_timeout_s:
                raise FileNotFoundError(f"{text} after {waited:.0f} s")
            if not has_warned:
                warnings.warn(f"{text}: waiting for more", stacklevel=3)
                has_warned = True
            if waited >= next_note:
                found = len(self.library.scan())
                print(f"waiting for {waited:.0f} s: {found} of {self.keep_latest_n_trajs} trajectories", flush=True)  # noqa: T201
                next_note += NOTE_SECONDS
            time.sleep(self.wait_interval_s)
        if not self.trajectories:
            raise FileNotFoundError(f"there is no trajectory in {self.library.where}")
        if (found := len(self.trajectories)) < self.num_envs:
            text = f"{found} trajectories for {self.num_envs} environments: some are played several times at once"
            warnings.warn(text, stacklevel=3)
        self.num_dataset_looped = self.num_played = 0
        self.repeats[:] = False
        self.refresh_handlers(self.all_env_ids)

    def refresh_handlers(self, env_ids: Tensor) -> None:
        """Give each environment the next unplayed trajectory that can be read; after the last loop, any again."""
        for env in env_ids.tolist():
            while not self._begin(env, self._next_trajectory()):
                continue  # with the next one: a file of this one is damaged
            self._is_first[env], self.repeats[env] = True, self._is_over

    def _next_trajectory(self) -> Trajectory:
        """The next unplayed trajectory; after the last one another loop begins, with the newest files."""
        if not self.unused_trajectory_idxs:
            self.num_dataset_looped += not self._is_over
            if self._is_over or not self.read_dataset_directory():
                self._refill()
        if not self.unused_trajectory_idxs:
            raise FileNotFoundError(f"there is no usable trajectory left in {self.library.where}")
        return self.trajectories[self.unused_trajectory_idxs.pop(0)]

    def _begin(self, env: int, trajectory: Trajectory) -> bool:
        """Play a trajectory in an environment from its starting frame; False if it cannot be read."""
        self._playing[env] = trajectory
        low, high = self.starting_frame_range
        frame = int(self.rng.integers(low, high)) if high > low + 1 else low
        frame = frame if frame < trajectory.ranges[-1][1] else 0
        chunk = next(i for i, (_, end) in enumerate(trajectory.ranges) if frame < end)
        return self._load(env, chunk, frame - trajectory.ranges[chunk][0])

    def _load(self, env: int, chunk: int, cursor: int) -> bool:
        """Load a file of the environment's trajectory; False if the file cannot be used."""
        arrays = self.library.load(self._playing[env].chunks[chunk])
        if arrays is None:
            return False
        for name, array in arrays.items():
            if name.partition(".")[0] in SERVED:
                rows, page = torch.from_numpy(array), self._pages.get(name)
                if page is None or page.shape[1] < self.library.longest_file:
                    shape = (self.num_envs, self.library.longest_file, *rows.shape[1:])
                    self._pages[name] = rows.new_zeros(shape, device=self.device)
                    if page is not None:
                        self._pages[name][:, : page.shape[1]] = page
                self._pages[name][env, : len(rows)].copy_(rows)
        self._chunk[env], self._cursor[env], self._length[env] = chunk, cursor, len(arrays["rewards"])
        return True

    def get_batch(self, num_transitions_per_env: int | None = None) -> Any:
        """The next transition of every environment, or the next k; StopIteration at the end of the last loop."""
        if self._is_ready and self.repeats.all():
            raise StopIteration
        return super().get_batch(num_transitions_per_env)

    def get_transition_batch(self) -> tuple[Any, dict[str, Any]]:
        """One transition of every environment, and infos with `time_outs`, `loops` and `trajectories` played."""
        buffer, infos = super().get_transition_batch()
        return buffer, {**infos, "loops": self.num_dataset_looped, "trajectories": self.num_played}

    def get_buffer(self, num_transitions_per_env: int | None = None) -> Any:
        """The tensors that every call with this number fills."""
        if not self._is_ready:
            self.reset()
        if num_transitions_per_env not in self._buffers:
            lead = (self.num_envs,) if num_transitions_per_env is None else (num_transitions_per_env, self.num_envs)
            fields = []
            for name in (*SERVED, OBS, CRITIC_OBS):
                pages = {n: page for n, page in self._pages.items() if n.partition(".")[0] == name}
                parts = {n: page.new_zeros((*lead, *page.shape[2:])) for n, page in pages.items()}
                fields.append(parts[name] if name in parts else nested(parts, name))
            if not any(name.startswith(CRITIC_OBS) for name in self._pages):
                fields[1], fields[-1] = fields[0], fields[-2]
            self._buffers[num_transitions_per_env] = Transition(*fields)
        return self._buffers[num_transitions_per_env]

    def fill_transitions(self, buffer: Any, num_transitions_per_env: int) -> None:
        """Fill fields (k, N, ...), up to the next end of a file at once."""
        step = 0
        while step < num_transitions_per_env:
            count = int(min(num_transitions_per_env - step, (self._length - self._cursor).min()))
            self.fill_transition(buffer, part=slice(step, step + count))
            step += count

    def fill_transition(self, buffer: Any, env_ids: Tensor | None = None, part: slice | None = None) -> None:
        """Write the next transition of all environments, or of some, and advance; with `part`, several steps."""
        count = 1 if part is None else part.stop - part.start  # only the last of them may be the last of a file
        buffer = Transition(*(tree_map(lambda leaf: leaf[part], field) for field in buffer))
        envs = np.arange(self.num_envs) if env_ids is None else env_ids.cpu().numpy()
        self._copy(dict(zip(SERVED, buffer, strict=False)), envs, count, env_ids)
        if self.mark_first_frame_done:
            buffer.done[0].logical_or_(torch.from_numpy(self._is_first).to(self.device))
        self._is_first[envs] = False
        self._cursor[envs] += count
        at_end = np.zeros(self.num_envs, bool)
        for env in envs[self._cursor[envs] >= self._length[envs]].tolist():
            following = int(self._chunk[env]) + 1
            if following >= len(self._playing[env].chunks) or not self._load(env, following, 0):
                self.num_played += 1
                self.refresh_handlers(self.all_env_ids[env : env + 1])
                at_end[env] = True
        if at_end.any():
            ended = torch.from_numpy(at_end).to(self.device)
            buffer.timeout[-1].logical_or_(ended & ~buffer.done[-1])
            buffer.done[-1].logical_or_(ended)
        now = {OBS: buffer.observation, CRITIC_OBS: buffer.privileged_observation}
        then = {OBS: buffer.next_observation, CRITIC_OBS: buffer.next_privileged_observation}
        tree_map(lambda a, b: b[:-1].copy_(a[1:]), now, then)
        self._copy(tree_map(lambda leaf: leaf[-1:], then), envs, 1, env_ids)

    def _copy(self, targets: Mapping[str, Any], envs: np.ndarray, count: int, env_ids: Tensor | None) -> None:
        """Copy the next `count` rows to all of `targets` (count, N, ...), or to the columns `env_ids` of one step."""
        first = envs * self._pages["rewards"].shape[1] + self._cursor[envs]
        rows = torch.from_numpy((np.arange(count)[:, None] + first).reshape(-1)).to(self.device)
        for name, out in tree_leaves(targets):
            if name in self._pages:  # without observations of its own, the critic's are the actor's
                page = self._pages[name].flatten(0, 1)  # (N * longest file, ...)
                if env_ids is None:
                    torch.index_select(page, 0, rows, out=out.flatten(0, 1))
                else:
                    out[0, env_ids.to(self.device)] = page[rows]

    def state_dict(self) -> dict[str, Any]:
        """The position of every environment, in plain containers; empty before the first batch."""
        if not self._is_ready:
            return {}
        names, unused = list(map(self.library.name_of, self.trajectories)), list(self.unused_trajectory_idxs)
        return {
            "playlist": {"trajectories": names, "unused": unused, "num_looped": self.num_dataset_looped},
            "rng": json.dumps(self.rng.bit_generator.state),
            "playing": [self.library.name_of(self._playing[env]) for env in range(self.num_envs)],
            "places": [self._chunk.tolist(), self._cursor.tolist()],
            "flags": [self._is_first.tolist(), self.repeats.tolist()],
            "num_played": self.num_played,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of another dataset of the same files.

        LookupError if files or environments differ; the dataset then starts from the beginning.
        """
        if not state:
            return
        if len(state["playing"]) != self.num_envs:
            raise LookupError(f"it was played in {len(state['playing'])} environments, here are {self.num_envs}")
        self._is_ready = False  # until everything is read
        played = state["playlist"]
        known = {self.library.name_of(trajectory): trajectory for trajectory in self.library.scan()}
        if missing := [name for name in played["trajectories"] if name not in known]:
            raise LookupError(f"{len(missing)} trajectories are no longer in {self.library.where}: {missing[0]}, ...")
        self.trajectories = [known[name] for name in played["trajectories"]]
        self.unused_trajectory_idxs, self.num_dataset_looped = list(played["unused"]), int(played["num_looped"])
        for env, (name, chunk, cursor) in enumerate(zip(state["playing"], *state["places"], strict=True)):
            if name in known:
                self._playing[env] = known[name]
            if name not in known or not self._load(env, chunk, cursor):
                raise LookupError(f"{name} can no longer be read")
        self._is_first[:], self.repeats[:] = state["flags"]
        self.rng.bit_generator.state = json.loads(state["rng"])
        self.num_played = int(state["num_played"])
        self._is_ready = True
