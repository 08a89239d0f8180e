"""Filling a replay buffer before learning: from trajectory files, a Minari dataset, episodes or single steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from canter.storage.replay import TransitionReplayBuffer
from canter.storage.rollout_files.catalog import TrajectoryLibrary
from canter.utils.tree import tree_leaves, tree_map

MINARI = "minari:"


class Episode(NamedTuple):
    """One episode, or what is known of it."""

    obs: Any
    """(L + 1, ...) array or nested dict of them, the last one where it ended."""
    actions: Any
    """(L, ...)."""
    rewards: Any
    """(L,)."""
    terminated: bool
    """Whether nothing follows; otherwise it was cut off, or goes on unseen."""
    critic_obs: Any = None

    @property
    def length(self) -> int:
        """L."""
        return len(self.rewards)


def fill_replay(replay: TransitionReplayBuffer, source: Any, max_steps: int | None = None) -> int:
    """Put the episodes of `source` into the buffer, to the environment that has the fewest steps; returns how many.

    Args:
        replay: Where to.
        source: Directories of trajectory files, "minari:<dataset id>", a Minari dataset, `Episode`s, or steps as dicts.
        max_steps: Stop after so many steps; by default when the buffer is full.
    """
    limit = min(replay.capacity, max_steps or replay.capacity)
    counts = replay.count.tolist()
    added = 0
    for episode in episodes_from(source):
        if episode.length == 0:
            continue
        kept = shortened(episode, min(limit - added, replay.num_rows - 2))
        env = counts.index(min(counts))
        put_episode(replay, env, kept)
        counts[env] += kept.length
        added += kept.length
        if added >= limit:
            break
    if not added:
        raise ValueError(f"there is no episode in {source!r} that could be learned from")
    return added


def episodes_from(source: Any) -> Iterator[Episode]:
    """The episodes of anything that `fill_replay` takes."""
    if isinstance(source, str) and source.startswith(MINARI):
        source = load_minari(source.removeprefix(MINARI))
    if isinstance(source, (str, Path)):
        source = [source]
    if hasattr(source, "iterate_episodes"):
        yield from map(minari_episode, source.iterate_episodes())
    elif isinstance(source, Sequence) and source and all(isinstance(part, (str, Path)) for part in source):
        library = TrajectoryLibrary([Path(part) for part in source])
        for trajectory in library.scan():
            chunks = [library.load(path) for path in trajectory.chunks]
            if all(chunk is not None for chunk in chunks):
                yield from file_episodes([chunk for chunk in chunks if chunk is not None])
    else:
        yield from from_items(source)


def load_minari(name: str) -> Any:
    """A Minari dataset by its id."""
    try:
        import minari  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            'Minari datasets need a package that is not installed: pip install "canter[minari]"'
        ) from error
    return minari.load_dataset(name)


def minari_episode(episode: Any) -> Episode:
    """An episode of Minari, whose observations are one more than its steps."""
    return Episode(
        episode.observations, episode.actions, np.asarray(episode.rewards), bool(np.asarray(episode.terminations)[-1])
    )


def file_episodes(chunks: Sequence[Mapping[str, np.ndarray]]) -> Iterator[Episode]:
    """The episodes in the files of one trajectory; steps whose next observation is not known are left out."""
    steps = ("observations", "privileged_observations", "actions", "rewards", "dones", "timeouts")
    whole = {name: np.concatenate([c[name] for c in chunks]) for name in steps if all(name in c for c in chunks)}
    finals: dict[int, Mapping[str, np.ndarray]] = {}
    end = 0
    for chunk in chunks:
        end += len(chunk["rewards"])
        if "final_observations" in chunk:
            finals[end - 1] = chunk
    cuts = [0, *(np.nonzero(whole["dones"])[0] + 1).tolist()]
    cuts += [len(whole["rewards"])] if cuts[-1] < len(whole["rewards"]) else []
    for first, last in itertools.pairwise(cuts):
        is_cut = bool(whole["timeouts"][last - 1]) or not whole["dones"][last - 1]
        final = finals.get(last - 1, {})
        obs, stop = continued(whole["observations"][first:last], final.get("final_observations"), is_cut)
        critic = whole.get("privileged_observations")
        if critic is not None:
            critic, _ = continued(critic[first:last], final.get("final_privileged_observations"), is_cut)
        yield Episode(
            obs, whole["actions"][first : first + stop], whole["rewards"][first : first + stop], not is_cut, critic
        )


def continued(obs: np.ndarray, final: np.ndarray | None, is_cut: bool) -> tuple[np.ndarray, int]:
    """Observations with the one they led to, and how many steps that leaves.

    After a true end any will do, since nothing is asked of it; without a known one a cut episode loses its last step.
    """
    if final is not None:
        return np.concatenate([obs, final.astype(obs.dtype)]), len(obs)
    return (obs, len(obs) - 1) if is_cut else (np.concatenate([obs, obs[-1:]]), len(obs))


def from_items(items: Iterable[Any]) -> Iterator[Episode]:
    """Episodes as they are, and steps gathered to episodes.

    A step is a dict with obs, action, reward, next_obs and terminated, and truncated where it was cut off.
    """
    steps: list[Mapping[str, Any]] = []
    for item in items:
        if isinstance(item, Episode):
            yield item
            continue
        missing = {"obs", "action", "reward", "next_obs", "terminated"} - set(item)
        if missing:
            raise ValueError(f"a step lacks {', '.join(sorted(missing))}; it has {', '.join(item)}")
        steps.append(item)
        if item["terminated"] or item.get("truncated"):
            yield joined(steps)
            steps = []
    if steps:
        yield joined(steps)


def joined(steps: Sequence[Mapping[str, Any]]) -> Episode:
    """One episode of steps that follow each other."""

    def stack(name: str, last: str) -> Any:
        rows = [*(step[name] for step in steps), steps[-1][last]]
        return tree_map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *rows)

    has_critic = "critic_obs" in steps[0]
    return Episode(
        stack("obs", "next_obs"),
        np.stack([np.asarray(step["action"]) for step in steps]),
        np.asarray([float(step["reward"]) for step in steps]),
        bool(steps[-1]["terminated"]),
        stack("critic_obs", "next_critic_obs") if has_critic else None,
    )


def shortened(episode: Episode, length: int) -> Episode:
    """The first `length` steps; what follows them is then unseen."""
    if episode.length <= length:
        return episode

    def head(tree: Any) -> Any:
        return None if tree is None else tree_map(lambda leaf: leaf[: length + 1], tree)

    return Episode(
        head(episode.obs), episode.actions[:length], episode.rewards[:length], False, head(episode.critic_obs)
    )


@torch.no_grad()
def put_episode(replay: TransitionReplayBuffer, env: int, episode: Episode) -> None:
    """Append an episode to one environment's ring."""

    def tensors(tree: Any, name: str) -> dict[str, torch.Tensor]:
        return {leaf: torch.as_tensor(np.asarray(value)) for leaf, value in tree_leaves(tree, name)}

    if replay.critic_obs_shape is not None and episode.critic_obs is None:
        raise ValueError("the critic has observations of its own, which this data does not hold")
    obs = tensors(episode.obs, "observations")
    if replay.critic_obs_shape is not None:
        obs |= tensors(episode.critic_obs, "critic_observations")
    for name, value in obs.items():
        if name not in replay.data or value.shape[1:] != replay.data[name].shape[1:]:
            known = {key: tuple(t.shape[1:]) for key, t in replay.data.items() if key.startswith(name.split(".")[0])}
            raise ValueError(f"the data has {name} of shape {tuple(value.shape[1:])}, the environment {known}")
    replay.append(env, obs, torch.as_tensor(np.asarray(episode.actions)), episode.rewards, episode.terminated)
