"""Environments of the rsl_rl family and their relatives (the kinds are listed in rsl_answers.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.groups import Segments, checked_segments, group_names, join_groups, resolve_sets
from canter.envs.host import check_action_space, space_of
from canter.envs.records import EndWatch, step_record, warn_once
from canter.envs.rsl_answers import Groups, gather_groups, read_start, read_step
from canter.envs.tensors import take_obs
from canter.envs.vec_env import StepRecord, VecEnv, flat_size
from canter.envs.wrappers import Forwarding
from canter.utils.tree import Obs, tree_leaves


def attribute(env: Any, name: str, default: Any = None) -> Any:
    """`env.name`, looked for in the innermost environment too: Gymnasium's wrappers forward nothing."""
    inner = getattr(env, "unwrapped", env)
    return getattr(env, name, getattr(inner, name, default))


def is_batched(env: Any) -> bool:
    """Whether `env` looks like many environments of the rsl_rl kind."""
    if isinstance(env, type) or not callable(getattr(env, "step", None)):
        return False
    return hasattr(env, "get_observations") or (attribute(env, "num_envs") is not None and hasattr(env, "reset"))


class RslRlAdapter(Forwarding, VecEnv):
    """One environment of the rsl_rl family as a `VecEnv`; attributes it does not know come from the environment.

    Args:
        obs_groups: which groups the sets "actor" (or "policy") and "critic" consist of; several are concatenated.
        device: the learner's; the environment's own by default.
    """

    def __init__(
        self,
        env: Any,
        obs_groups: Mapping[str, Sequence[str]] | None = None,
        device: torch.device | str | None = None,
        seed: int | None = None,
    ) -> None:
        self.env = env
        self.num_envs = int(self._required("num_envs"))
        self.action_space = self._find_action_space()
        self.obs_groups = dict(obs_groups or {})
        self._fresh = bool(attribute(env, "returns_fresh_tensors", False))
        self._env_device = attribute(env, "device")
        limit = attribute(env, "max_episode_length")
        self.max_episode_length = None if limit is None else int(torch.as_tensor(limit).max())
        self._asks_privileged = hasattr(env, "get_privileged_observations")
        self._num_steps = 0
        self.kind = "tensor observations"
        """What the answers of the environment look like."""
        if seed is not None:
            self.seed(seed)
        self._target = None if device is None else torch.device(device)
        groups = self._take(*self._start())
        self.device = self._target or next(leaf.device for _, leaf in tree_leaves(groups))
        self._used, self._layout = self._find_layout(groups)
        self._current = self._select(groups)
        self._declare_spaces(groups)
        self._watch = EndWatch(self.device)
        self._is_new = True

    def _required(self, name: str) -> Any:
        value = attribute(self.env, name)
        if value is None:
            raise TypeError(f"{type(self.env).__name__} has no attribute {name!r}, which an environment must have")
        return value

    def _find_action_space(self) -> spaces.Space:
        for name in ("action_space_gym", "single_action_space", "action_space"):
            space = attribute(self.env, name)
            if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
                return check_action_space(space)
            if name == "single_action_space" and isinstance(space, spaces.Box):
                return space
        return spaces.Box(-np.inf, np.inf, (int(self._required("num_actions")),))

    def _start(self) -> tuple[Any, Any, Mapping[str, Any]]:
        """The first observation, by `reset` if there is one."""
        reset, get = (getattr(self.env, name, None) for name in ("reset", "get_observations"))
        answer = reset() if callable(reset) else None
        if answer is None:
            if not callable(get):
                raise TypeError(
                    f"{type(self.env).__name__} has neither a reset() nor a get_observations() that answers"
                )
            answer = get()
        if isinstance(answer, tuple) and isinstance(answer[-1], Mapping):
            self.kind = "2.x (observation and extras)"
        if isinstance(read_start(answer)[0], Mapping):
            self.kind = "3.x and later (observation groups)"
        return read_start(answer)

    def _take(self, obs: Any, privileged: Any, extras: Mapping[str, Any]) -> Groups:
        """The groups of one answer as tensors of the learner's own."""
        groups = gather_groups(obs, privileged, extras)
        if self._asks_privileged and (group_names(groups) or ("", None))[1] is None:
            privileged = self.env.get_privileged_observations()
            self._asks_privileged = privileged is not None
            groups = gather_groups(obs, privileged, extras)
        return take_obs(groups, self._target, copy=not self._fresh)  # type: ignore[return-value]

    def _find_layout(self, groups: Groups) -> tuple[list[str], dict[str, tuple[Any, ...]]]:
        """Names of the groups that matter, and what each of their leaves must look like ever after."""
        if not self.obs_groups and group_names(groups) is None:
            used = list(groups)
        else:
            actor, critic = resolve_sets(groups, self.obs_groups)
            used = list(dict.fromkeys(actor + critic))
        leaves = tree_leaves({name: groups[name] for name in used})
        return used, {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in leaves}

    def _check_layout(self, groups: Groups) -> None:
        seen = dict(tree_leaves({name: groups[name] for name in self._used if name in groups}))
        if len(seen) == len(self._layout):
            wrong = [n for n, leaf in seen.items() if self._layout.get(n) != (tuple(leaf.shape), leaf.dtype)]
        else:
            wrong = sorted(set(seen) ^ set(self._layout))
        if not wrong and list(seen) != list(self._layout):
            raise ValueError(
                f"observations came in another order at step {self._num_steps}: "
                f"expected {list(self._layout)}, got {list(seen)}"
            )
        if wrong:
            name = wrong[0]
            got = (tuple(seen[name].shape), seen[name].dtype) if name in seen else "nothing"
            raise ValueError(
                f"observation group {name!r} changed at step {self._num_steps}: "
                f"expected {self._layout.get(name, 'nothing')}, got {got}"
            )

    def _select(self, groups: Groups) -> tuple[Obs, Obs]:
        """The actor's and the critic's observation out of the groups."""
        if not self.obs_groups and group_names(groups) is None:
            return groups, groups
        actor, critic = resolve_sets(groups, self.obs_groups)
        obs = self._join(groups, actor)[0]
        return obs, obs if critic == actor else self._join(groups, critic)[0]

    @staticmethod
    def _join(groups: Groups, names: list[str]) -> tuple[Obs, Segments | None]:
        # ApexRL's actors are written for the dict under these names.
        if names in (["obs"], ["privileged_obs"], ["critic_obs"]):
            return groups[names[0]], None
        return join_groups(groups, names)

    def _split_final(self, final: Any) -> tuple[Any, Any]:
        if not isinstance(final, Mapping):
            return final, final
        missing = [name for name in self._used if name not in final]
        if not missing:
            return self._select(dict(final))
        found = group_names(final)
        return (final, final) if found is None else (final[found[0]], final[found[1] or found[0]])

    def _declare_spaces(self, groups: Groups) -> None:
        obs, critic_obs = self._current
        self.obs_space = space_of(obs)
        self.critic_obs_space = self.obs_space if critic_obs is obs else space_of(critic_obs)
        names = (
            ([], []) if group_names(groups) is None and not self.obs_groups else resolve_sets(groups, self.obs_groups)
        )
        for attr, owners, space, group in (
            ("obs_segments", ("obs_segments",), self.obs_space, names[0]),
            (
                "critic_obs_segments",
                ("critic_obs_segments", "privileged_obs_segments"),
                self.critic_obs_space,
                names[1],
            ),
        ):
            stated = next((s for s in (attribute(self.env, owner) for owner in owners) if s is not None), None)
            if stated is not None and isinstance(space, spaces.Box):
                setattr(self, attr, checked_segments(stated, flat_size(space), attr))
            elif group:
                setattr(self, attr, self._join(groups, group)[1])
        if self.critic_obs_segments is None and self.critic_obs_space is self.obs_space:
            self.critic_obs_segments = self.obs_segments

    def seed(self, seed: int) -> None:
        """Pass the seed on."""
        if not callable(getattr(self.env, "seed", None)):
            raise NotImplementedError(f"{type(self.env).__name__} has no seed()")
        self.env.seed(seed)
        self._is_new = False

    def reset(self) -> tuple[Obs, Obs]:
        """Start every episode anew; right after construction, unless seeded since, the episodes are new already."""
        if not self._is_new:
            if not callable(getattr(self.env, "reset", None)):
                warn_once(f"{type(self.env).__name__} has no reset(): its episodes go on")
                return self._current
            groups = self._take(*self._start())
            self._check_layout(groups)
            self._current = self._select(groups)
            self._num_steps, self._is_new = 0, True
        return self._current

    def get_observations(self) -> tuple[Obs, Obs]:
        """The current observation and the critic's; never asks the environment again, which might redraw noise."""
        return self._current

    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment."""
        answer = self.env.step(actions if self._env_device is None else actions.to(self._env_device))
        obs, privileged, rewards, dones, extras = read_step(answer)
        if self._num_steps == 0 and len(answer) != 4:
            self.kind = "batched Gymnasium" if "terminated" in extras else f"1.x ({len(answer)}-tuple)"
        self._num_steps += 1
        self._is_new = False
        groups = self._take(obs, privileged, extras)
        self._check_layout(groups)
        self._current = self._select(groups)
        if not self._fresh:
            extras = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in extras.items()}
        extras["observations"] = groups
        record = step_record(
            *self._current, rewards, dones, extras, device=self.device, split=self._split_final, copy=not self._fresh
        )
        if record.final_obs is not None:
            self.gives_final_obs = True
        elif self.gives_final_obs and self._watch(record.done):
            self.gives_final_obs = False
        return record

    def render(self) -> Any:
        """A picture of the first environment, if the environment renders arrays."""
        return self.env.render() if attribute(self.env, "render_mode") == "rgb_array" else None

    def close(self) -> None:
        """Close the environment, if it can be."""
        if callable(getattr(self.env, "close", None)):
            self.env.close()
