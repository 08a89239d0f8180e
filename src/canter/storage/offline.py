"""Filling a replay buffer with recorded data: trajectory files, a Minari dataset, episodes, or single steps."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from canter.storage.replay import TransitionReplayBuffer
from canter.storage.rollout_files.catalog import TrajectoryLibrary
from canter.utils.tree import tree_map

MINARI = "minari:"
STEP_KEYS = {"obs", "action", "reward", "next_obs", "terminated"}


class Episode(NamedTuple):
    """One episode, or a part of one."""

    obs: Any  # (L + 1, ...) array or nested dict of arrays; the last row is the final observation
    actions: Any  # (L, ...)
    rewards: Any  # (L,)
    terminated: bool  # it ends in a terminal state; otherwise it was truncated, or its continuation is unknown
    critic_obs: Any = None


def fill_replay(
    replay: TransitionReplayBuffer, source: Any, max_steps: int | None = None, action_bounds: Any = None
) -> int:
    """Add the episodes of `source`, each to the environment with the fewest steps; returns the number of steps.

    A source is a list of directories of trajectory files, "minari:<dataset id>", a Minari dataset, `Episode`s, or steps
    as dicts. At most `max_steps` steps are added, by default the capacity of the buffer. Actions are clipped to the
    `action_bounds` to which the environment clips those of a policy: recorded ones are what the policy chose.
    """
    limit = min(replay.capacity, max_steps or replay.capacity)
    counts, added = replay.count.tolist(), 0
    for episode in episodes_from(source):
        length = min(len(episode.rewards), limit - added, replay.num_rows - 2)
        env = counts.index(min(counts))
        if length:
            put_episode(replay, env, episode, length, action_bounds)
        counts[env] += length
        added += length
        if added >= limit:
            break
    if not added:
        raise ValueError(f"there is no episode in {source!r} that could be learned from")
    return added


def episodes_from(source: Any) -> Iterator[Episode]:
    """The episodes of any source that `fill_replay` takes."""
    if isinstance(source, str) and source.startswith(MINARI):
        source = import_minari_package().load_dataset(source.removeprefix(MINARI))
    if isinstance(source, (str, Path)):
        source = [source]
    if hasattr(source, "iterate_episodes"):
        for e in source.iterate_episodes():
            yield Episode(e.observations, e.actions, np.asarray(e.rewards), bool(np.asarray(e.terminations)[-1]))
    elif isinstance(source, Sequence) and source and all(isinstance(part, (str, Path)) for part in source):
        for part in source:
            if not Path(part).is_dir():
                raise FileNotFoundError(f"there is no directory {str(part)!r} of trajectory files")
        library = TrajectoryLibrary([Path(part) for part in source])
        for trajectory in library.scan():
            chunks = [chunk for path in trajectory.chunks if (chunk := library.load(path)) is not None]
            if len(chunks) == len(trajectory.chunks):
                yield from file_episodes(chunks)
    else:
        yield from from_items(source)


def import_minari_package() -> Any:
    """The optional package Minari."""
    try:
        import minari  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError('Minari datasets need Minari: pip install "canter[minari]"') from error
    return minari


def file_episodes(chunks: Sequence[Mapping[str, np.ndarray]]) -> Iterator[Episode]:
    """The episodes in the files of one trajectory, without steps whose next observation is unknown.

    After a terminal state the final observation has no effect, so any serves. A truncated episode without a known
    final observation loses its last step: its last observation is the final one.
    """
    steps = ("observations", "privileged_observations", "actions", "rewards", "dones", "timeouts")
    whole = {name: np.concatenate([c[name] for c in chunks]) for name in steps if all(name in c for c in chunks)}
    ends = itertools.accumulate(len(chunk["rewards"]) for chunk in chunks)
    finals = {end - 1: chunk for end, chunk in zip(ends, chunks, strict=True) if "final_observations" in chunk}
    cuts = [0, *(np.nonzero(whole["dones"])[0] + 1).tolist()]
    cuts += [len(whole["rewards"])] if cuts[-1] < len(whole["rewards"]) else []
    for first, last in itertools.pairwise(cuts):
        is_cut = bool(whole["timeouts"][last - 1]) or not whole["dones"][last - 1]
        obs = {name: whole[name][first:last] for name in steps[:2] if name in whole}
        for name, rows in obs.items():
            final = finals.get(last - 1, {}).get(f"final_{name}", rows[:0] if is_cut else rows[-1:])
            obs[name] = np.concatenate([rows, final.astype(rows.dtype)])
        used = slice(first, first + len(obs["observations"]) - 1)
        critic_obs = obs.get("privileged_observations")
        yield Episode(obs["observations"], whole["actions"][used], whole["rewards"][used], not is_cut, critic_obs)


def from_items(items: Iterable[Any]) -> Iterator[Episode]:
    """`Episode`s unchanged, and steps, dicts with `STEP_KEYS` and perhaps truncated, joined to episodes."""
    steps: list[Mapping[str, Any]] = []
    for item in items:
        if isinstance(item, Episode):
            yield item
            continue
        if missing := STEP_KEYS - set(item):
            raise ValueError(f"a step lacks {', '.join(sorted(missing))}; it has {', '.join(item)}")
        steps.append(item)
        if item["terminated"] or item.get("truncated"):
            yield joined(steps)
            steps = []
    if steps:
        yield joined(steps)


def joined(steps: Sequence[Mapping[str, Any]]) -> Episode:
    """One episode of consecutive steps."""

    def stack(name: str, last: str) -> Any:
        rows = [*(step[name] for step in steps), steps[-1][last]]
        return tree_map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *rows)

    actions = np.stack([np.asarray(step["action"]) for step in steps])
    rewards = np.asarray([float(step["reward"]) for step in steps])
    critic_obs = stack("critic_obs", "next_critic_obs") if "critic_obs" in steps[0] else None
    return Episode(stack("obs", "next_obs"), actions, rewards, bool(steps[-1]["terminated"]), critic_obs)


@torch.no_grad()
def put_episode(
    replay: TransitionReplayBuffer, env: int, episode: Episode, length: int, action_bounds: Any = None
) -> None:
    """Append the first `length` steps of an episode to the ring of one environment."""
    if replay.critic_obs_shape is not None and episode.critic_obs is None:
        raise ValueError("the critic has observations of its own, which this data does not hold")

    def rows(part: Any) -> Any:
        return tree_map(lambda leaf: torch.as_tensor(np.asarray(leaf)[: length + 1]), part)

    obs, critic_obs = rows(episode.obs), None if episode.critic_obs is None else rows(episode.critic_obs)
    for name, value in replay.named_leaves(obs, critic_obs).items():
        if name not in replay.data or value.shape[1:] != replay.data[name].shape[1:]:
            known = {key: tuple(t.shape[1:]) for key, t in replay.data.items() if key.startswith(name.split(".")[0])}
            raise ValueError(f"the data has {name} of shape {tuple(value.shape[1:])}, the environment {known}")
    actions, rewards = np.asarray(episode.actions)[:length], np.asarray(episode.rewards)[:length]
    if action_bounds is not None:
        actions = np.clip(actions.reshape(length, -1), *(np.ravel(bound) for bound in action_bounds))
    ended = torch.zeros(2, length, dtype=torch.bool)
    ended[int(not episode.terminated or length < len(episode.rewards)), -1] = True  # terminal, or cut off
    steps, last = itemgetter(slice(0, length)), itemgetter(slice(length, None))
    replay.add(
        tree_map(steps, obs),
        torch.as_tensor(actions),
        torch.as_tensor(rewards),
        tree_map(last, obs),
        ended[0],
        truncated=ended[1],
        critic_obs=None if critic_obs is None else tree_map(steps, critic_obs),
        next_critic_obs=None if critic_obs is None else tree_map(last, critic_obs),
        env=env,
    )
