"""What can be learnt about an environment by watching its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from canter.envs.final_obs import FINAL_OBS_NAMES
from canter.envs.gymnasium import GymVecEnv
from canter.envs.rsl_answers import read_step
from canter.envs.tensors import stored_dtype
from canter.envs.vec_env import StepRecord, VecEnv
from canter.envs.vector import GymVectorEnvAdapter
from canter.envs.wrappers import is_channels_last
from canter.utils.tree import tree_leaves, tree_map


@dataclass
class EnvReport:
    """What `check_env` found; `print` it."""

    contract: str
    num_envs: int
    device: str
    obs: str
    critic_obs: str
    actions: str
    autoreset: str
    final_obs: str = "unknown: no episode ended"
    bootstrap: str = "unknown: no episode ended"
    steps: int = 0
    notes: list[str] = field(default_factory=list)
    """Differences that canter takes care of."""
    problems: list[str] = field(default_factory=list)
    """Things to repair."""

    @property
    def ok(self) -> bool:
        """Whether nothing has to be repaired."""
        return not self.problems

    def __str__(self) -> str:
        rows = {
            "contract": self.contract,
            "environments": f"{self.num_envs} on {self.device}",
            "observation": self.obs,
            "critic observation": self.critic_obs,
            "actions": self.actions,
            "autoreset": self.autoreset,
            "final observation": self.final_obs,
            "bootstrap": self.bootstrap,
        }
        lines = [f"{name:<20}{text}" for name, text in rows.items()]
        lines += [f"note: {text}" for text in self.notes] + [f"PROBLEM: {text}" for text in self.problems]
        return "\n".join(
            [*lines, f"{'no problem' if self.ok else f'{len(self.problems)} problem(s)'} in {self.steps} steps"]
        )


class Inspection:
    """Collects what the steps of one environment show."""

    def __init__(self, env: VecEnv, report: EnvReport) -> None:
        self.env, self.report = env, report
        self.held: list[tuple[str, Tensor, Tensor]] = []
        self.final_names: set[str] = set()
        self.num_ended = self.num_truncated = 0

    def say(self, text: str, problem: bool = True) -> None:
        """Add a finding once."""
        found = self.report.problems if problem else self.report.notes
        if text not in found:
            found.append(text)

    def see_space(self, name: str, space: spaces.Space) -> None:
        """Look for conversions and image layouts."""
        for leaf_name, leaf in tree_leaves(space, name):
            if is_channels_last(leaf):
                self.say(f"image {leaf_name} {leaf.shape} has its channels last; wrap the environment in ChannelsFirst")

    def see_raw(self, answers: Sequence[Any]) -> None:
        """Look at what the environment itself returned, before it was adapted."""
        obs, privileged, rewards, dones, extras = read_step(answers[-1])
        self.final_names |= {name for name in FINAL_OBS_NAMES if extras.get(name) is not None}
        groups = {"obs": obs, **({} if privileged is None else {"privileged_obs": privileged})}
        arrays = [(name, leaf) for name, leaf in tree_leaves(groups) if isinstance(leaf, (Tensor, np.ndarray))]
        for name, leaf in arrays:
            dtype = torch.as_tensor(leaf).dtype
            if stored_dtype(dtype) != dtype:
                self.say(f"{name} is {str(dtype)[6:]} and kept as float32", problem=False)
        if torch.as_tensor(rewards).dim() == 2:
            self.say(
                f"rewards have shape {tuple(rewards.shape)} and are taken as ({self.env.num_envs},)", problem=False
            )
        if torch.as_tensor(dones).dtype != torch.bool:
            self.say(f"dones are {str(torch.as_tensor(dones).dtype)[6:]} and taken as bool", problem=False)
        if len(answers) == 2:
            before = dict(tree_leaves({"obs": read_step(answers[0])[0]}))
            for name, leaf in arrays:
                if name in before and torch.as_tensor(before[name]).data_ptr() == torch.as_tensor(leaf).data_ptr():
                    self.see_reuse(name)

    def see_reuse(self, name: str) -> None:
        """One buffer serves every step."""
        if getattr(self.env, "returns_fresh_tensors", False):
            self.say(f"{name} is one buffer that every step overwrites, but the environment says returns_fresh_tensors")
        else:
            self.say(f"{name} is one buffer that every step overwrites; canter copies it", problem=False)

    def see(self, record: StepRecord) -> None:
        """Look at one record."""
        for name, kept, copy in self.held:
            if not torch.equal(kept.nan_to_num(), copy.nan_to_num()):
                self.say(f"{name} of an earlier step was overwritten; return new tensors from step")
        parts = {"obs": record.obs, "critic_obs": record.critic_obs, "reward": record.reward}
        self.held = [(name, leaf, leaf.clone()) for name, leaf in tree_leaves(parts)]
        ended = record.done
        if record.final_obs is not None:
            parts["final_obs"] = tree_map(lambda leaf: leaf[ended], record.final_obs)
        for name, leaf in tree_leaves(parts):
            if leaf.is_floating_point() and not torch.isfinite(leaf).all():
                rows = (~torch.isfinite(leaf)).flatten(1).any(1) if leaf.dim() > 1 else ~torch.isfinite(leaf)
                self.say(f"{name} is not finite in environment(s) {rows.nonzero().flatten().tolist()[:8]}")
        for name in ("reward", "terminated", "truncated", "valid"):
            tensor, dtype = getattr(record, name), torch.float32 if name == "reward" else torch.bool
            if tensor.shape != (self.env.num_envs,) or tensor.dtype != dtype:
                got = f"{tuple(tensor.shape)} {tensor.dtype}"
                self.say(f"{name} must be ({self.env.num_envs},) {dtype}, got {got}")
        for name, space in (("obs", self.env.obs_space), ("critic_obs", self.env.critic_obs_space)):
            want = {n: (self.env.num_envs, *leaf.shape) for n, leaf in tree_leaves(space, name)}
            got = {n: tuple(leaf.shape) for n, leaf in tree_leaves(getattr(record, name), name)}
            if want != got:
                self.say(f"{name} has shapes {got}, its space says {want}")
        self.num_ended += int(ended.sum())
        self.num_truncated += int(record.truncated.sum())

    def conclude(self) -> None:
        """State the final observation's source and the bootstrap."""
        report, env = self.report, self.env
        by_canter = isinstance(env, GymVecEnv) or (
            isinstance(env, GymVectorEnvAdapter) and env.mode is not AutoresetMode.SAME_STEP
        )
        if by_canter:
            report.final_obs = "the observation of the step that ended the episode"
        elif self.num_ended:
            names = " and ".join(f"extras[{name!r}]" for name in sorted(self.final_names))
            report.final_obs = (names or "given in the record") if env.gives_final_obs else "none"
        if by_canter or (self.num_truncated and env.gives_final_obs):
            report.bootstrap = "time-outs continue with the value of the final observation"
        elif self.num_truncated:
            report.bootstrap = "time-outs continue with the value of the state before the last step (an approximation)"
            self.say(
                "put the observation before the reset in extras['final_obs'] for an exact bootstrap", problem=False
            )
        elif self.num_ended:
            report.bootstrap = "none so far: every end was terminal"
            self.say(
                "no end was a time-out; if the task has a time limit, say so in extras['time_outs']", problem=False
            )
