"""`check_env`: reports which adapter canter chose for an environment, the resulting bootstrap, and likely defects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from torch import Tensor

from canter.compat.batched_envs import ObsGroups, RslRlAdapter, read_step
from canter.envs.gymnasium_vector import GymVectorEnvAdapter
from canter.envs.records import FINAL_OBS_NAMES, split_names, stored_dtype
from canter.envs.vec_env import Device, StepRecord, VecEnv
from canter.envs.wrap import wrap_env
from canter.envs.wrappers import Forwarding
from canter.modules.conv2d import image_shape
from canter.utils.tree import tree_leaves, tree_map


@dataclass
class EnvReport:
    """Findings of `check_env`, printed as a table."""

    adapter: str
    contract: str
    num_envs: int
    device: str
    obs: str
    critic_obs: str
    networks: str
    """What each part of the observations is processed by, unless a policy is chosen."""
    actions: str
    autoreset: str
    final_obs: str = "unknown: no episode ended"
    bootstrap: str = "unknown: no episode ended"
    steps: int = 0
    notes: list[str] = field(default_factory=list)
    """Differences that canter converts."""
    problems: list[str] = field(default_factory=list)
    """Defects to repair."""

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def __str__(self) -> str:
        rows = {"adapter": self.adapter, "contract": self.contract, "environments": f"{self.num_envs} on {self.device}"}
        rows |= {"observation": self.obs, "critic observation": self.critic_obs, "networks": self.networks}
        rows |= {
            "actions": self.actions,
            "autoreset": self.autoreset,
            "final observation": self.final_obs,
            "bootstrap": self.bootstrap,
        }
        lines = [f"{name:<20}{text}" for name, text in rows.items()]
        lines += [f"note: {text}" for text in self.notes] + [f"PROBLEM: {text}" for text in self.problems]
        result = "no problem" if self.ok else f"{len(self.problems)} problem(s)"
        return "\n".join([*lines, f"{result} in {self.steps} steps"])


def check_env(
    env: Any, num_steps: int = 200, seed: int = 0, device: Device | None = None, obs_groups: ObsGroups | None = None
) -> EnvReport:
    """Step `env` with random actions and report how canter adapts it; resets it before and after."""
    wrapped: Any = wrap_env(env, device=device, obs_groups=obs_groups)
    inspection, recorder, limit = Inspection(wrapped), None, wrapped.max_episode_length or 0
    actions = batch_space(wrapped.action_space, wrapped.num_envs)
    actions.seed(seed)
    start = getattr(wrapped.action_space, "start", 0)  # policies number discrete actions from 0
    if isinstance(wrapped, (RslRlAdapter, GymVectorEnvAdapter)):
        recorder = wrapped.env = ResultRecorder(wrapped.env)
    try:
        wrapped.reset()
        for step in range(num_steps):
            # Halfway, move the episodes close to the time limit where the environment allows it.
            lengths = getattr(wrapped, "episode_length_buf", None) if step == num_steps // 2 else None
            if lengths is not None and limit > num_steps:
                wrapped.episode_length_buf = torch.full_like(lengths, limit - 3)  # type: ignore[attr-defined]
            action = torch.as_tensor(actions.sample() - start, device=wrapped.device)
            record = wrapped.step(action.float() if action.is_floating_point() else action)
            inspection.report.steps += 1
            if recorder is not None and recorder.results:
                inspection.check_results(recorder.results)
            inspection.check_record(record)
        wrapped.reset()
    except Exception as error:  # any error of the environment belongs in the report
        inspection.add(f"step {inspection.report.steps} raised {type(error).__name__}: {error}")
    finally:
        if recorder is not None:
            wrapped.env = recorder.env
    return inspection.conclude()


def describe(space: spaces.Space) -> str:
    """Shapes and dtypes of a space in a line."""
    if isinstance(space, Mapping):
        return ", ".join(f"{name} {leaf.shape} {leaf.dtype}" for name, leaf in tree_leaves(space))
    return f"{space.shape} {space.dtype}" if isinstance(space, spaces.Box) else str(space)


def describe_networks(space: spaces.Space) -> str:
    """The kind of network that each part of an observation gets by default."""
    leaves = tree_leaves(space, "" if isinstance(space, Mapping) else "obs")
    kinds = {name: "CNN" if image_shape(leaf.shape) else "MLP" for name, leaf in leaves}
    parts = [f"{kind} for {', '.join(n for n in kinds if kinds[n] == kind)}" for kind in dict.fromkeys(kinds.values())]
    return ", ".join(parts)


class ResultRecorder(Forwarding):
    """Forwards to an environment and keeps its last two step results, before an adapter converts them."""

    def __init__(self, env: Any) -> None:
        self.env, self.results = env, []

    def step(self, actions: Any) -> Any:
        """Step and keep the result."""
        result = self.env.step(actions)
        # Both stay alive: freed memory would be allocated again and look like a reused buffer.
        self.results = [*self.results[-1:], result]
        return result


class Inspection:
    """Collects findings from the steps of one environment."""

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        critic_obs = "the same" if env.critic_obs_space is env.obs_space else describe(env.critic_obs_space)
        networks = describe_networks(env.obs_space)
        if env.critic_obs_space is not env.obs_space:
            networks += f"; critic: {describe_networks(env.critic_obs_space)}"
        parts = (describe(env.obs_space), critic_obs, networks, str(env.action_space), env.autoreset)
        self.report = EnvReport(env.adapter, "", env.num_envs, str(env.device), *parts)
        self.kept: list[tuple[str, Tensor, Tensor]] = []
        self.final_names: set[str] = set()
        self.num_ended = self.num_truncated = 0
        raw_space = getattr(env, "raw_obs_space", {})
        unused = [*getattr(env, "unused_groups", ())]
        if isinstance(raw_space, spaces.Dict):
            seen = [name for names in split_names(tuple(raw_space.spaces)) for name in names]
            unused += [name for name in raw_space.spaces if name not in seen]
        if unused:
            self.add(f"{', '.join(unused)} of the observation is used by no network", problem=False)
        for name, leaf in tree_leaves(raw_space, "obs"):
            if leaf.dtype not in (np.float32, np.uint8):
                self.add(f"{name} is {leaf.dtype} and kept as float32", problem=False)

    def add(self, text: str, problem: bool = True) -> None:
        """Add a finding once."""
        findings = self.report.problems if problem else self.report.notes
        if text not in findings:
            findings.append(text)

    def check_results(self, results: Sequence[Any]) -> None:
        """Check the results of the environment itself, before they were adapted."""
        obs, privileged, rewards, dones, extras = read_step(results[-1])
        self.final_names |= {name for name in FINAL_OBS_NAMES if extras.get(name) is not None}
        groups = {"obs": obs, **({} if privileged is None else {"privileged_obs": privileged})}
        before = dict(tree_leaves({"obs": read_step(results[0])[0]})) if len(results) == 2 else {}
        arrays = [(name, leaf) for name, leaf in tree_leaves(groups) if isinstance(leaf, (Tensor, np.ndarray))]
        for name, leaf in arrays:
            tensor = torch.as_tensor(leaf)
            if stored_dtype(tensor.dtype) != tensor.dtype:
                self.add(f"{name} is {str(tensor.dtype)[6:]} and kept as float32", problem=False)
            if name in before and torch.as_tensor(before[name]).data_ptr() == tensor.data_ptr():
                promised = bool(getattr(self.env, "returns_fresh_tensors", False))
                rest = ", but the environment says returns_fresh_tensors" if promised else "; canter copies it"
                self.add(f"{name} is one buffer that every step overwrites{rest}", problem=promised)
        rewards, dones = torch.as_tensor(rewards), torch.as_tensor(dones)
        if rewards.dim() == 2:
            self.add(f"rewards have shape {tuple(rewards.shape)} and are taken as ({len(rewards)},)", problem=False)
        if dones.dtype != torch.bool:
            self.add(f"dones are {str(dones.dtype)[6:]} and taken as bool", problem=False)

    def check_record(self, record: StepRecord) -> None:
        """Check one record."""
        for name, leaf, copy in self.kept:
            if not torch.equal(leaf.nan_to_num(), copy.nan_to_num()):
                self.add(f"{name} of an earlier step was overwritten; return new tensors from step")
        parts = {"obs": record.obs, "critic_obs": record.critic_obs, "reward": record.reward}
        self.kept = [(name, leaf, leaf.clone()) for name, leaf in tree_leaves(parts)]
        ended = record.done
        if record.final_obs is not None:
            parts["final_obs"] = tree_map(lambda leaf: leaf[ended], record.final_obs)
        for name, leaf in tree_leaves(parts):
            if leaf.is_floating_point() and not torch.isfinite(leaf).all():
                rows = (~torch.isfinite(leaf)).reshape(len(leaf), -1).any(1).nonzero().flatten().tolist()
                self.add(f"{name} is not finite in environment(s) {rows[:8]}")
        for name in ("reward", "terminated", "truncated", "valid"):
            tensor, dtype = getattr(record, name), torch.float32 if name == "reward" else torch.bool
            want, got = f"({self.env.num_envs},) {dtype}", f"{tuple(tensor.shape)} {tensor.dtype}"
            if want != got:
                self.add(f"{name} must be {want}, got {got}")
        for name, space in (("obs", self.env.obs_space), ("critic_obs", self.env.critic_obs_space)):
            want = {n: (self.env.num_envs, *leaf.shape) for n, leaf in tree_leaves(space, name)}
            got = {n: tuple(leaf.shape) for n, leaf in tree_leaves(getattr(record, name), name)}
            if want != got:
                self.add(f"{name} has shapes {got}, its space says {want}")
        self.num_ended += int(ended.sum())
        self.num_truncated += int(record.truncated.sum())

    def conclude(self) -> EnvReport:
        """Report the contract, the source of final observations and the bootstrap."""
        report, env = self.report, self.env
        # Some adapters know the contract only after the first step.
        report.contract = env.contract or f"canter.envs.VecEnv ({type(env).__name__})"
        by_canter = env.autoreset != "same step"
        if by_canter:
            report.final_obs = "the observation of the step that ended the episode"
        elif self.num_ended:
            names = " and ".join(f"extras[{name!r}]" for name in sorted(self.final_names))
            report.final_obs = (names or "given in the record") if env.gives_final_obs else "none"
        if by_canter or (self.num_truncated and env.gives_final_obs):
            report.bootstrap = "time-outs continue with the value of the final observation"
        elif self.num_truncated:
            report.bootstrap = "time-outs continue with the value of the state before the last step (an approximation)"
            self.add("put the observation before the reset in extras['final_obs'] for an exact bootstrap", False)
        elif self.num_ended:
            report.bootstrap = "none so far: every end was terminal"
            self.add("no end was a time-out; if the task has a time limit, set extras['time_outs']", False)
        return report
