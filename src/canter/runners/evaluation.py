"""Trained policies without their environment, the statistics of their episodes, and environments to judge them in."""

import contextlib
import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.vec_env import VecEnv, flat_size
from canter.envs.wrap import env_options, make_env, wrap_env
from canter.modules.policy import Hidden, Policy, batch_size
from canter.runners.run_log import StopTraining
from canter.utils.obs_layout import ObsLayout
from canter.utils.runtime import StopSignal, preserved_rng
from canter.utils.tree import nested, tree_leaves, tree_map

EVAL_ENVS = 10  # environments of an evaluation, at most


class InferencePolicy:
    """Actions of a trained policy for raw observations, without its environment; keeps its own recurrent state.

    Observations are arrays or tensors, one or a batch, a dict by part or one flat vector. Actions are of the same kind.
    A call gives what the `step` of a `VecEnv` takes, `predict` what the environment itself takes: within its bounds, in
    the shape and the whole numbers of its Box, with discrete actions that begin at its first number. Adapters of
    environments do that for a call.

    Args:
        policy: The trained policy; resetting it for some environments resets this state too.
        obs_space: Space of one observation; without it observations are batches in the form that the policy takes.
        segments: Names and shapes of the parts of a flat observation, which may then be given as a dict.
        action_bounds: Bounds to which actions are clipped, where no environment does it.
        info: Where the policy comes from: `config`, `environment`, `checkpoint`, `iteration`, `timesteps`.
        seed: Seed of sampled actions; drawn if None.
        action_space: Space of one action, with the number of the first discrete action.
        env_bounds: Bounds of the actions that `predict` returns, if not `action_bounds`.
    """

    def __init__(
        self,
        policy: Policy,
        obs_space: spaces.Space | None = None,
        segments: Mapping[str, Any] | None = None,
        action_bounds: Any = None,
        info: Mapping[str, Any] | None = None,
        seed: int | None = None,
        action_space: spaces.Space | None = None,
        env_bounds: Any = None,
    ) -> None:
        self.policy, self.obs_space, self.info = policy, obs_space, dict(info or {})
        first = next(policy.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.hidden: Hidden | None = None
        policy.followers.add(self)
        self.action_bounds = action_bounds
        self._bounds, self._env_bounds = (
            bounds and [torch.as_tensor(bound, device=self.device).flatten() for bound in bounds]
            for bounds in (action_bounds, env_bounds or action_bounds)
        )
        self._shape = self._whole_dtype = None  # of a Box, and of a Box of integers
        if isinstance(action_space, spaces.Box):
            self._shape = action_space.shape
            if np.issubdtype(action_space.dtype, np.integer):
                self._whole_dtype = getattr(torch, np.dtype(action_space.dtype).name)
        start = np.ravel(getattr(action_space, "start", 0))
        self._start = torch.as_tensor(start, device=self.device) if start.any() else None
        self.generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        shapes = {name: tuple(leaf.shape) for name, leaf in tree_leaves(obs_space)} if obs_space else {}
        self.parts = ObsLayout(shapes if segments is None or isinstance(obs_space, spaces.Dict) else segments)
        """Parts of one observation by name."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.policy.followers.add(self)  # which a copy of the policy lacks

    def __call__(self, obs: Any) -> Any:
        """Return the deterministic actions of one step, as the `step` of a `VecEnv` takes them."""
        return self._act(obs, deterministic=True, for_env=False)

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """Return the actions of one step, as the environment itself takes them; sampled if not `deterministic`."""
        return self._act(obs, deterministic, for_env=True)

    @torch.no_grad()
    def _act(self, obs: Any, deterministic: bool, for_env: bool) -> Any:
        """Actions of one step, for the environment itself or for its adapter."""
        obs = self.policy.without_groups(obs, "actor")
        is_array = not any(isinstance(leaf, Tensor) for _, leaf in tree_leaves(obs))
        batch, is_single = self._batched(tree_map(self._tensor, obs))
        if self.hidden is None or any(len(state) != batch_size(batch) for state in self.hidden.values()):
            self.hidden = self.policy.initial_hidden(batch_size(batch))
        if deterministic:
            actions, self.hidden = self.policy.infer(batch, self.hidden)
        else:
            params, self.hidden = self.policy.act_params(batch, self.hidden)
            sampled = self.policy.sample_action(params, self.generator or self.policy.generator)
            actions = self.policy.distribution.to_env(sampled)
        bounds = self._env_bounds if for_env else self._bounds
        actions = actions if bounds is None else actions.clamp(*bounds)
        if for_env and self._start is not None:
            actions = actions + self._start
        if for_env and self._shape is not None:
            actions = actions.reshape(len(actions), *self._shape)
        if for_env and self._whole_dtype is not None:
            actions = actions.round().to(self._whole_dtype)
        actions = actions[0] if is_single else actions
        return actions.numpy(force=True) if is_array else actions

    def reset(self, dones: Any = None) -> None:
        """Clear the recurrent state of environments whose episode ended; of all if None."""
        if dones is None or self.hidden is None:
            self.hidden = None
        else:
            ended = self._tensor(dones).bool().view(-1, 1, 1, 1)
            fitting = {name: state for name, state in self.hidden.items() if len(state) == len(ended)}
            self.hidden |= {name: state.masked_fill(ended.to(state.device), 0.0) for name, state in fitting.items()}

    def _tensor(self, leaf: Any) -> Tensor:
        """Bytes as they are, any other numbers in the precision of the policy."""
        if hasattr(leaf, "normalized_by"):
            raise ValueError("the observation was normalised already, which this policy does itself; give the raw one")
        if isinstance(leaf, np.ndarray) and not leaf.flags.writeable:
            leaf = leaf.copy()
        try:
            tensor = torch.as_tensor(leaf, device=self.device)
        except (TypeError, ValueError) as error:
            way_out = "flatten it: gymnasium.spaces.flatten(env.observation_space, obs)"
            raise TypeError(f"an observation is numbers, got {type(leaf).__name__} {leaf!r:.60}; {way_out}") from error
        return tensor if tensor.dtype == torch.uint8 else tensor.to(self.dtype)

    def _batched(self, obs: Any) -> tuple[Any, bool]:
        """A batch in the form that the policy takes, and whether a single observation was given."""
        if self.obs_space is None:
            return obs, False
        return self._batched_parts(obs) if isinstance(obs, Mapping) else self._batched_vector(obs)

    def _batched_parts(self, obs: Mapping[str, Any]) -> tuple[Any, bool]:
        """`_batched` of an observation that is given as a dict."""
        shapes, leaves = self.parts.shapes, dict(tree_leaves(obs))
        if "" in shapes:
            raise ValueError(f"one observation is an array of shape {shapes['']}, got parts {list(leaves)}")
        if leaves.keys() != shapes.keys():
            raise ValueError(f"the observation has the parts {list(leaves)}, expected {list(shapes)}")
        first = next(iter(shapes))
        is_single = self._is_single(leaves[first], shapes[first], first)
        if is_single:
            obs, leaves = tree_map(lambda leaf: leaf[None], obs), {n: leaf[None] for n, leaf in leaves.items()}
        for name, shape in shapes.items():
            self._is_single(leaves[name][0], shape, name)
        if isinstance(self.obs_space, spaces.Dict):
            return obs, is_single
        return torch.cat([leaves[name].flatten(1) for name in shapes], 1), is_single

    def _batched_vector(self, obs: Tensor) -> tuple[Any, bool]:
        """`_batched` of an observation that is given as one array."""
        if not isinstance(self.obs_space, spaces.Dict):
            is_single = self._is_single(obs, tuple(self.obs_space.shape or ()))  # pyright: ignore[reportOptionalMemberAccess]
            return (obs[None] if is_single else obs), is_single
        is_single = self._is_single(obs, (self.parts.width,))
        split = self.parts.split(obs[None] if is_single else obs).items()
        return nested({name: leaf.unflatten(-1, self.parts.shapes[name]) for name, leaf in split}), is_single

    def _is_single(self, leaf: Tensor, shape: tuple[int, ...], name: str = "observation") -> bool:
        """Whether a leaf is one observation of that shape; False for a batch, an error for anything else."""
        given = tuple(leaf.shape)
        if given != shape and given[1:] != shape:
            problem = f"the {name} has shape {given}; the policy wants {shape}, or {('N', *shape)}"
            is_smaller = len(shape) == 1 and leaf.numel() < shape[0]
            one_hot = "; Discrete observations are given one-hot, as gymnasium.spaces.flatten makes them"
            raise ValueError(problem + one_hot * is_smaller)
        return given == shape


def check_widths(policy: Any, env: VecEnv) -> None:
    """Raise if a policy for flat observations takes another number of values than the environment gives."""
    for name, kind in (("obs", "observation"), ("critic_obs", "critic's observation")):
        layout, space = getattr(policy, f"{name}_layout", None), getattr(env, f"{name}_space")
        if layout is not None and layout.width != flat_size(space):
            made = f"the {type(policy).__name__} was made for {layout.width}"
            raise ValueError(f"the {kind} of the environment has {flat_size(space)} values, but {made}")


def compare_spaces(env: VecEnv, eval_env: VecEnv) -> None:
    """Raise if a policy of the training environment cannot act in the evaluation environment; bounds may differ."""
    for kind in ("observation", "action"):
        name = "obs_space" if kind == "observation" else "action_space"
        own, other = getattr(env, name), getattr(eval_env, name)
        if space_form(own) != space_form(other):
            both = f"the {kind} space of eval_env is {other}, that of the training environment is {own}"
            raise ValueError(f"{both}; make both environments from the same task with the same wrappers")


def space_form(space: spaces.Space) -> dict[str, Any]:
    """The shape of every part of a space, and the number of its choices."""
    form = {}
    for name, leaf in tree_leaves(space):
        choices = getattr(leaf, "n", getattr(leaf, "nvec", None))
        form[name] = (leaf.shape, np.array(choices).tolist())
    return form


class EndlessEpisodesError(RuntimeError):
    """Episodes of an evaluation did not end."""


class Episodes(NamedTuple):
    """Complete episodes, in the order in which they ended."""

    returns: list[float]
    lengths: list[int]


@torch.inference_mode()
def run_episodes(
    act: Any, env: VecEnv, num_episodes: int, max_steps: int | None = None, on_step: Any = None
) -> Episodes:
    """Returns and lengths of `num_episodes` episodes after a reset; `on_step(env)` is called after every step.

    A signal that ends a training ends it by `StopTraining`.
    """
    if num_episodes < 1:
        raise ValueError(f"num_episodes must be at least 1, got {num_episodes}")
    # The episodes to count are fixed for each environment, so that short episodes are not over-represented.
    left = num_episodes // env.num_envs + (np.arange(env.num_envs) < num_episodes % env.num_envs)
    limit = max_steps or int(left.max()) * ((env.max_episode_length or 10_000) + 2)
    total, length = np.zeros(env.num_envs), np.zeros(env.num_envs, dtype=np.int64)
    found = Episodes([], [])
    act.reset()
    obs, _ = env.reset()
    for _ in range(limit):
        if StopSignal.requested_at is not None:
            raise StopTraining
        record = env.step(act(obs))
        obs, done, valid = record.obs, record.done.cpu().numpy(), record.valid.cpu().numpy()
        act.reset(record.done | ~record.valid)
        total += np.where(valid, record.reward.cpu().numpy(), 0.0)
        length += valid
        if on_step is not None:
            on_step(env)
        for i in np.nonzero(done)[0]:
            if left[i] > 0:
                found.returns.append(float(total[i]))
                found.lengths.append(int(length[i]))
                left[i] -= 1
        total[done], length[done] = 0.0, 0
        if not left.any():
            return found
    result = f"only {len(found.returns)} of {num_episodes} evaluation episodes ended within {limit} steps"
    way_out = "give the environment a time limit, by gymnasium.wrappers.TimeLimit for example, or more max_steps"
    raise EndlessEpisodesError(f"{result}; {way_out}")


def inference_policy(runner: Any, device: torch.device | str | None) -> InferencePolicy:
    """The policy of a runner, in evaluation mode; on another device it is a copy."""
    runner.alg.eval_mode()
    is_here = device is None or torch.device(device) == runner.device
    policy, env = runner.policy if is_here else copy.deepcopy(runner.policy).to(device), runner.env
    more = {"action_space": env.action_space, "env_bounds": env.action_bounds}
    return InferencePolicy(policy, env.obs_space, env.obs_segments, **more)


def evaluate_policy(policy: Any, env: Any, num_episodes: int, seed: int | None = None) -> dict[str, float]:
    """`eval/` metrics of a runner, of an `InferencePolicy`, or of the policy of a run, in new environments or `env`."""
    if env is None and hasattr(policy, "eval"):
        return policy.eval(num_episodes)
    if hasattr(policy, "get_inference_policy"):
        policy = policy.get_inference_policy()
    if not isinstance(policy, InferencePolicy):
        from canter.export.load import load  # which needs this module

        policy = load(policy)
    num_envs = max(1, min(EVAL_ENVS, num_episodes))
    if env is None:
        run = (policy.info.get("config") or {}).get("run") or {}
        if "task" not in run:
            raise ValueError("the policy does not say which task it was trained on; give env")
        env = make_env(run["task"], num_envs=num_envs, seed=seed, **env_options(run))
    elif isinstance(env, str):
        env = make_env(env, num_envs=num_envs, seed=seed)
    return summary(run_episodes(policy, wrap_env(env, seed=seed), num_episodes, None))


def summary(episodes: Episodes) -> dict[str, float]:
    """Mean, spread and extremes of the returns of episodes, and their mean length."""
    reductions = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    rewards = {f"eval/{name}_reward": float(reduce(episodes.returns)) for name, reduce in reductions.items()}
    return rewards | {"eval/mean_length": float(np.mean(episodes.lengths))}


def evaluate(runner: Any, num_episodes: int, max_steps: int | None) -> dict[str, float]:
    """`eval/` metrics of deterministic episodes of a runner, after which everything is as before.

    Without an `eval_env` they run in the training environment, whose state is restored, or which is reset.
    """
    env = runner.eval_env or runner.env
    state = env.get_state() if env is runner.env else None
    modes = [(module, module.training) for module in runner.alg.modules()]
    runner.alg.eval_mode()
    runner.num_evals += 1
    try:
        with preserved_rng():
            if env is not runner.env and env.get_state() is None:
                # Its random streams are in no checkpoint: every evaluation has another seed.
                seed = np.random.SeedSequence((abs(runner.eval_seed), runner.num_evals)).generate_state(1)[0]
                with contextlib.suppress(NotImplementedError):
                    env.seed(int(seed))
            episodes = run_episodes(InferencePolicy(runner.policy), env, num_episodes, max_steps)
        return summary(episodes)
    finally:
        for module, was_training in modes:
            module.train(was_training)
        if state is not None:
            env.set_state(state)
        elif env is runner.env:
            runner.restart_episodes()
