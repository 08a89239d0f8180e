"""In which order trajectories are played, how often, and from when on everything was."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from canter.storage.rollout_files.catalog import Trajectory
from canter.storage.rollout_files.library import TrajectoryLibrary


class Playlist:
    """Hands out trajectories, each once a loop; every loop looks for new ones.

    Args:
        library: Where they are.
        loops: How often each is played; below 1 for ever.
        is_shuffled: Hand them out in a random order, a new one in each loop.
        keep_latest: Use only so many of the newest; 0 uses all.
        rng: Of the order.
    """

    def __init__(
        self, library: TrajectoryLibrary, loops: int, is_shuffled: bool, keep_latest: int, rng: np.random.Generator
    ) -> None:
        self.library, self.loops, self.is_shuffled, self.keep_latest, self.rng = (
            library, loops, is_shuffled, keep_latest, rng,
        )  # fmt: skip
        self.trajectories: list[Trajectory] = []
        self.unused: list[int] = []
        self.num_looped = 0

    @property
    def is_over(self) -> bool:
        """Whether each was handed out as often as it is to be."""
        return 0 < self.loops <= self.num_looped

    def read(self) -> bool:
        """Look for trajectories, oldest first; False if there are fewer than `keep_latest`."""
        found = self.library.scan()
        if len(found) < self.keep_latest:
            return False
        self.trajectories = found[-self.keep_latest :]
        self._refill()
        return True

    def begin(self, wait_interval_s: float, wait_timeout_s: float | None) -> None:
        """Look for trajectories, waiting for as many as are wanted."""
        started, has_warned = time.monotonic(), False
        while not self.read():
            waited = time.monotonic() - started
            text = f"fewer than keep_latest_n_trajs={self.keep_latest} trajectories in {self.library.where}"
            if wait_timeout_s is not None and waited >= wait_timeout_s:
                raise FileNotFoundError(f"{text} after {waited:.0f} s")
            if not has_warned:
                warnings.warn(f"{text}: waiting for more", stacklevel=4)
                has_warned = True
            time.sleep(wait_interval_s)
        if not self.trajectories:
            raise FileNotFoundError(f"there is no trajectory in {self.library.where}")
        self.num_looped = 0

    def next(self) -> Trajectory:
        """The next one; when all were played often enough, one of them again."""
        if not self.unused:
            if not self.is_over:
                self.num_looped += 1
            if self.is_over or not self.read():
                self._refill()
            if not self.unused:
                raise FileNotFoundError(f"there is no usable trajectory left in {self.library.where}")
        return self.trajectories[self.unused.pop(0)]

    def state_dict(self) -> dict[str, Any]:
        """What is played in which order, by name, and how far."""
        names = [self.library.name_of(trajectory) for trajectory in self.trajectories]
        return {"trajectories": names, "unused": list(self.unused), "num_looped": self.num_looped}

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[str, Trajectory]:
        """Go on where another one was; all that is there by name. LookupError if a trajectory no longer is."""
        found = {self.library.name_of(trajectory): trajectory for trajectory in self.library.scan()}
        if missing := [name for name in state["trajectories"] if name not in found]:
            raise LookupError(f"{len(missing)} trajectories are no longer in {self.library.where}: {missing[0]}, ...")
        self.trajectories = [found[name] for name in state["trajectories"]]
        self.unused, self.num_looped = list(state["unused"]), int(state["num_looped"])
        return found

    def _refill(self) -> None:
        usable = [i for i, trajectory in enumerate(self.trajectories) if self.library.is_usable(trajectory)]
        if self.is_shuffled:  # from the names on, so that a copy with other times is shuffled alike
            usable = self.rng.permutation(sorted(usable, key=lambda i: str(self.trajectories[i].path))).tolist()
        self.unused = usable
