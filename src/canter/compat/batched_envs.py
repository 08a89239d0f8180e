"""Environments with the interface of rsl_rl, of its relatives and of ApexRL.

| kind               | get_observations()     | step(actions)                                             |
|--------------------|------------------------|-----------------------------------------------------------|
| rsl_rl 1.x         | tensor                 | obs, privileged or None, rewards, dones, infos            |
| AMP_for_hardware   | tensor                 | the same, ended env ids, terminal AMP states              |
| rsl_rl 2.x, st_rl  | (tensor, extras)       | obs, rewards, dones, extras with "observations"           |
| rsl_rl 3.x to 5.x  | TensorDict or dict     | groups, rewards, dones, extras                            |
| ApexRL             | tensor or mapping      | obs, rewards, dones, extras                               |
| batched Gymnasium  | (reset) obs, info      | obs, rewards, terminated, truncated, info                 |
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.compat.spellings import CRITIC_GROUPS, PLAYGROUND_PAIR
from canter.envs.records import (
    EndWatch,
    group_sets,
    join_groups,
    split_sets,
    step_record,
    to_obs,
    warn_once,
)
from canter.envs.vec_env import Device, StepRecord, VecEnv, flat_size
from canter.envs.wrappers import Forwarding, checked_layout
from canter.utils.config import nearest, unknown_name
from canter.utils.tree import Obs, tree_leaves

SETS = ("actor", "policy", "critic", "student", "teacher", "rnd_state")

Groups = dict[str, Any]
ObsGroups = Mapping[str, Sequence[str]]
Segments = dict[str, tuple[int, ...]]


def attribute(env: Any, name: str, default: Any = None) -> Any:
    """`env.name`, read from the innermost environment if `env` lacks it: Gymnasium's wrappers forward nothing."""
    return getattr(env, name, getattr(getattr(env, "unwrapped", env), name, default))


def is_batched(env: Any) -> bool:
    """Whether `env` has the attributes of a batch of environments of the rsl_rl kind."""
    if isinstance(env, type) or not callable(getattr(env, "step", None)):
        return False
    return hasattr(env, "get_observations") or (attribute(env, "num_envs") is not None and hasattr(env, "reset"))


def is_apexrl(env: Any) -> bool:
    """Whether `env` is batched and states its spaces as ApexRL does."""
    return is_batched(env) and any(hasattr(env, name) for name in ("observation_space_gym", "action_space_gym"))


class RslRlAdapter(Forwarding, VecEnv):
    """An environment of the rsl_rl or ApexRL kind as a `VecEnv`; unknown attributes are read from the environment.

    `obs_groups` are the groups of the sets "actor" (or "policy") and "critic"; several groups are concatenated.
    `device` is that of the learner, by default the environment's own.
    """

    def __init__(
        self, env: Any, device: Device | None = None, seed: int | None = None, obs_groups: ObsGroups | None = None
    ) -> None:
        if type(getattr(env, "unwrapped", env)).__module__.startswith("mani_skill."):
            raise TypeError("a bare ManiSkill environment does not reset itself; wrap it in ManiSkillVectorEnv first")
        self.env = env
        self.num_envs = int(self._required("num_envs"))
        self.action_space = self._find_action_space()
        limit = attribute(env, "clip_actions")
        if isinstance(limit, int | float) and not isinstance(limit, bool) and isinstance(self.action_space, spaces.Box):
            bound = np.full(self.action_space.shape, limit, np.float32)
            self.action_bounds = (-bound, bound)
        self._fresh = bool(attribute(env, "returns_fresh_tensors", False))
        self._env_device = attribute(env, "device")
        limit = attribute(env, "max_episode_length")
        self.max_episode_length = None if limit is None else int(torch.as_tensor(limit).max())
        self._calls_privileged, self._num_steps = hasattr(env, "get_privileged_observations"), 0
        self._set_contract("tensor observations")
        if seed is not None:
            self.seed(seed)
        self._target = None if device is None else torch.device(device)
        groups = self._start()
        self.device = self._target or next(leaf.device for _, leaf in tree_leaves(groups))
        self.sets: tuple[list[str], list[str]] | None = None
        """Group names of the actor's and the critic's observation; None where the groups are one dict observation."""
        if obs_groups or group_sets(groups) is not None:
            self.sets = resolve_sets(groups, obs_groups or {})
        self.group_shapes = {name: tuple(leaf.shape[1:]) for name, leaf in groups.items() if isinstance(leaf, Tensor)}
        self.unused_groups = [] if self.sets is None else [n for n in groups if n not in (*self.sets[0], *self.sets[1])]
        """Groups that no network sees."""
        if self.unused_groups and not obs_groups:
            way_out = "obs_groups={'actor': [...], 'critic': [...]} names those that are"
            warn_once(f"the observation groups {self.unused_groups} are used by no network; {way_out}")
        self._used = list(groups) if self.sets is None else list(dict.fromkeys(self.sets[0] + self.sets[1]))
        leaves = tree_leaves({name: groups[name] for name in self._used})
        self._layout = {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in leaves}
        for name, (shape, _) in self._layout.items():
            if len(shape) < 2 or shape[0] != self.num_envs:
                want = f"of {self.num_envs} environments it must be ({self.num_envs}, values)"
                raise ValueError(f"the observation {name!r} has the shape {shape}; {want}")
        self._current = obs, critic_obs = self._select(groups)
        self.obs_space = space_of(obs)
        self.critic_obs_space = self.obs_space if critic_obs is obs else space_of(critic_obs)
        self.obs_segments = self._segments(groups, 0, self.obs_space, "obs_segments")
        names = ("critic_obs_segments", "privileged_obs_segments", *(["obs_segments"] if critic_obs is obs else []))
        self.critic_obs_segments = self._segments(groups, 1, self.critic_obs_space, *names)
        self._watch = EndWatch(self.device)
        self._is_new = True

    def _set_contract(self, kind: str) -> None:
        self.contract = f"rsl_rl style, {kind}"

    def _required(self, name: str) -> Any:
        value = attribute(self.env, name)
        if value is None:
            raise TypeError(f"{type(self.env).__name__} has no attribute {name!r}, which an environment must have")
        return value

    def _find_action_space(self) -> spaces.Space:
        for name in ("action_space_gym", "single_action_space", "action_space"):
            space = attribute(self.env, name)
            is_single_box = name == "single_action_space" and isinstance(space, spaces.Box)
            if is_single_box or isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
                return space
        return spaces.Box(-np.inf, np.inf, (int(self._required("num_actions")),))

    def _start(self) -> Groups:
        """The groups of the first observation, by `reset` if there is one."""
        env = self.env
        calls = [getattr(env, name, None) for name in ("reset", "get_observations")]
        result = next((r for r in (call() for call in calls if callable(call)) if r is not None), None)
        if result is None:
            raise TypeError(
                f"{type(self.env).__name__} has neither a reset() nor a get_observations() that returns any"
            )
        obs, second = result[:2] if isinstance(result, tuple) and len(result) > 1 else (result, None)
        has_extras = isinstance(second, Mapping)
        if has_extras or isinstance(obs, Mapping):
            kind = "3.x and later (observation groups)" if isinstance(obs, Mapping) else "2.x (observation and extras)"
            self._set_contract(kind)
        return self._groups(obs, None, second) if has_extras else self._groups(obs, second, {})

    def _groups(self, obs: Any, privileged: Any, extras: Mapping[str, Any]) -> Groups:
        """Every observation of one result by its group's name, as tensors that the environment does not write to."""
        groups = gather_groups(obs, privileged, extras)
        if self._calls_privileged and not any(name in groups for name in (*CRITIC_GROUPS, PLAYGROUND_PAIR[1])):
            privileged = self.env.get_privileged_observations()
            self._calls_privileged = privileged is not None
            groups = gather_groups(obs, privileged, extras)
        return to_obs(groups, self._target, copy=not self._fresh)  # type: ignore[return-value]

    def _check_layout(self, groups: Groups) -> None:
        leaves = tree_leaves({name: groups[name] for name in self._used if name in groups})
        layout, step = {n: (tuple(leaf.shape), leaf.dtype) for n, leaf in leaves}, f"step {self._num_steps}"
        for name in sorted({**layout, **self._layout}):
            want, got = (part.get(name, "nothing") for part in (self._layout, layout))
            if want != got:
                raise ValueError(f"observation group {name!r} changed at {step}: expected {want}, got {got}")
        want, got = list(self._layout), list(layout)
        if want != got:
            raise ValueError(f"observations came in another order at {step}: expected {want}, got {got}")

    def _select(self, groups: Groups) -> tuple[Obs, Obs]:
        """The actor's and the critic's observation from the groups."""
        if self.sets is None:
            return groups, groups
        actor, critic = self.sets
        obs = join_groups(groups, actor)[0]
        return obs, obs if critic == actor else join_groups(groups, critic)[0]

    def _split_final(self, final: Any) -> tuple[Any, Any]:
        is_whole = isinstance(final, Mapping) and all(name in final for name in self._used)
        return self._select(dict(final)) if is_whole else split_sets(final)

    def _segments(self, groups: Groups, index: int, space: spaces.Space, *names: str) -> Segments | None:
        """Segments that the environment states under one of `names`, or those of the concatenated groups."""
        stated = next((s for s in (attribute(self.env, name) for name in names) if s is not None), None)
        if stated is not None and isinstance(space, spaces.Box):
            return checked_layout(stated, flat_size(space), names[0]).shapes
        return None if self.sets is None else join_groups(groups, self.sets[index])[1]

    def seed(self, seed: int) -> None:
        """Seed the environment; without a `seed` of its own, the next `reset` still starts new episodes."""
        self._is_new = False
        if not callable(getattr(self.env, "seed", None)):
            raise NotImplementedError(f"{type(self.env).__name__} has no seed()")
        self.env.seed(seed)

    def reset(self) -> tuple[Obs, Obs]:
        """Start new episodes; right after construction, unless seeded since, the episodes are already new."""
        if not self._is_new:
            if not callable(getattr(self.env, "reset", None)):
                warn_once(f"{type(self.env).__name__} has no reset(): its episodes go on")
                return self._current
            groups = self._start()
            self._check_layout(groups)
            self._current = self._select(groups)
            self._num_steps, self._is_new = 0, True
        return self._current

    def get_observations(self) -> tuple[Obs, Obs]:
        """Return the last observation and the critic's; the environment is not called, it might redraw noise."""
        return self._current

    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment."""
        result = self._simulate(actions if self._env_device is None else actions.to(self._env_device))
        obs, privileged, rewards, dones, extras = read_step(result)
        if self._num_steps == 0 and len(result) != 4:
            kind = "batched Gymnasium" if "terminated" in extras else f"1.x ({len(result)}-tuple)"
            self._set_contract(kind)
        self._num_steps, self._is_new = self._num_steps + 1, False
        groups = self._groups(obs, privileged, extras)
        self._check_layout(groups)
        self._current = self._select(groups)
        if not self._fresh:
            extras = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in extras.items()}
        extras["observations"] = groups
        options: Any = {"device": self.device, "split": self._split_final, "copy": not self._fresh}
        record = step_record(*self._current, rewards, dones, extras, **options)
        if record.final_obs is not None or self.gives_final_obs:
            self.gives_final_obs = record.final_obs is not None or not self._watch(record.done)
        return record

    def _simulate(self, actions: Tensor) -> Any:
        """The result of the environment's step."""
        return self.env.step(actions)

    def get_counters(self) -> dict[str, Any]:
        """The steps that curricula of Isaac Lab and mjlab depend on."""
        count = attribute(self.env, "common_step_counter")
        return {} if count is None else {"common_step_counter": int(count)}

    def set_counters(self, counters: dict[str, Any]) -> None:
        """Continue curricula from a result of `get_counters`."""
        if "common_step_counter" in counters and attribute(self.env, "common_step_counter") is not None:
            getattr(self.env, "unwrapped", self.env).common_step_counter = int(counters["common_step_counter"])

    def render(self) -> Any:
        """Return an image of the first environment, if the environment renders arrays."""
        return self.env.render() if attribute(self.env, "render_mode") == "rgb_array" else None

    def close(self) -> None:
        """Close the environment, if it has a `close`."""
        if callable(getattr(self.env, "close", None)):
            self.env.close()


def read_step(result: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Observation, privileged observation or None, rewards, dones and extras from a result of `step`."""
    result = tuple(result)
    if len(result) == 4:
        obs, rewards, dones, extras = result
        return obs, None, rewards, dones, dict(extras or {})
    if len(result) == 5 and result[1] is not None and torch.as_tensor(result[1]).dim() < 2:
        obs, rewards, terminated, truncated, extras = result
        flags = {"terminated": torch.as_tensor(terminated).bool(), "truncated": torch.as_tensor(truncated).bool()}
        return obs, None, rewards, flags["terminated"] | flags["truncated"], {**(extras or {}), **flags}
    if len(result) in (5, 7):
        obs, privileged, rewards, dones, extras, *amp = result
        more = dict(zip(("reset_env_ids", "terminal_amp_states"), amp, strict=False))
        return obs, privileged, rewards, dones, {**(extras or {}), **more}
    known = "(obs, privileged_obs, rewards, dones, infos) or (obs, rewards, terminated, truncated, info)"
    raise TypeError(f"step() returned {len(result)} values; it must return (obs, rewards, dones, extras), {known}")


def gather_groups(obs: Any, privileged: Any, extras: Mapping[str, Any]) -> Groups:
    """Every observation of one result by its group's name; a bare tensor is the group "policy"."""
    if isinstance(obs, Mapping):
        groups = dict(obs.items())
    else:
        groups = {**(extras.get("observations") or {}), "policy": obs}
        groups.pop("obs", None)
    if privileged is not None:
        groups["critic"] = privileged
    # Some environments return a tensor of width 0 in place of None.
    found = {n: g for n, g in groups.items() if g is not None and (isinstance(g, Mapping) or g.shape[1:2] != (0,))}
    if not found:
        raise ValueError(f"the environment gives no observation with any value in it, only {list(groups)}")
    return found


def resolve_sets(groups: Mapping[str, Any], obs_groups: ObsGroups) -> tuple[list[str], list[str]]:
    """Group names of the actor's and of the critic's observation, by the user's `obs_groups` table."""
    default_actor, default_critic = group_sets(groups) or ([], [])
    sets = {name: [value] if isinstance(value, str) else list(value) for name, value in obs_groups.items()}
    for name, members in sets.items():
        if name in SETS[:3] and not members:
            raise ValueError(f"obs_groups[{name!r}] is empty; name groups of {list(groups)}, or leave it out")
        if len(set(members)) < len(members):
            raise ValueError(f"obs_groups[{name!r}] names a group twice: {members}")
        if name not in SETS and nearest(name, SETS, cutoff=0.8):  # others may be those of another library
            raise ValueError(unknown_name("set", name, SETS, "obs_groups"))
    if "teacher" in sets:  # of a distillation, whose teacher is in the place of the critic
        for name, role in (("student", "actor"), ("teacher", "critic")):
            sets[role] = sets.get(name) or ([name] if name in groups else default_actor)
    actor = sets.get("actor") or sets.get("policy") or default_actor
    if not actor:
        problem = f"obs_groups names no 'actor' or 'policy' set and the groups {list(groups)} have neither"
        raise KeyError(f"{problem}; give obs_groups={{'actor': [...]}}")
    critic = sets.get("critic") or default_critic or actor
    unknown = [name for name in (*actor, *critic) if name not in groups]
    if unknown:
        raise KeyError(f"obs_groups names the group {unknown[0]!r}; the environment has {list(groups)}")
    return actor, critic


def space_of(obs: Obs) -> spaces.Space:
    """The space of one row of a batch of observations, with names in the same order."""
    if isinstance(obs, dict):
        return spaces.Dict([(name, space_of(part)) for name, part in obs.items()])
    bounds, dtype = ((0, 255), np.uint8) if obs.dtype == torch.uint8 else ((-np.inf, np.inf), np.float32)
    return spaces.Box(*bounds, tuple(obs.shape[1:]), dtype)
