"""The base class of policies: a pure core for algorithms (`forward`, `value`, `infer`), stateful calls for scripts."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from canter.compat.arguments import documented
from canter.compat.names import PolicyNames
from canter.envs.records import take_groups
from canter.modules.distributions import ActionDistribution, Params
from canter.modules.normalizer import NoNormalization, normalized
from canter.storage.trajectories import Trajectories, trajectories_from_masks, unpad_trajectories
from canter.utils.obs_layout import ObsLayout
from canter.utils.tree import Obs, tree_map

Hidden = dict[str, Tensor]

ACTOR_HOOKS = "actor_features, head_params or actor_params"
CRITIC_HOOKS = "critic_features, head_value or critic_value"
# Public call that a subclass must not override -> hooks to extend instead.
FINAL_CALLS = {
    **dict.fromkeys(("infer", "act_params", "act_inference"), ACTOR_HOOKS),
    **dict.fromkeys(("value", "evaluate"), CRITIC_HOOKS),
    **dict.fromkeys(("act", "sample"), f"{ACTOR_HOOKS}, or sample_action"),
    **dict.fromkeys(("forward", "evaluate_actions"), f"{ACTOR_HOOKS}, and for the value {CRITIC_HOOKS}"),
    "get_actions_log_prob": "log_prob of the policy's distribution",
    "reset": "reset of a Memory, or of a Carried state in self.carried",
}


class Carried(ABC):
    """State that a policy carries from step to step for each of N environments; an episode begins with zeros."""

    state: Tensor | None = None
    """(N, *state_shape), None before the first step."""
    state_shape: tuple[int, ...]
    """Three dimensions, like those of a memory."""

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: a state with a gradient cannot be, so it goes without."""
        return {**self.__dict__, "state": None if self.state is None else self.state.detach()}

    @abstractmethod
    def zero_state(self, num_envs: int) -> Tensor:
        """(N, *state_shape) zeros."""

    def reset(self, dones: Tensor | None = None) -> None:
        """Zero the state of environments whose episode ended; of all if None."""
        if self.state is None:
            return
        if dones is None:
            self.state = torch.zeros_like(self.state)
        else:  # bool first: an integer mask would index rows 0 and 1
            self.state = self.state.masked_fill(dones.bool().view(-1, 1, 1, 1), 0.0)


@dataclass
class Context:
    """Inputs of one pass besides the observation, and its results besides the action."""

    hidden: Hidden = field(default_factory=dict)
    """State by memory name, (N, S, L, H), replaced by the pass."""
    aux: dict[str, Tensor] = field(default_factory=dict)
    """Named intermediate results for a loss."""
    trajectories: Trajectories | None = None
    """How a (T, N) rollout splits into trajectories; None for a single step."""
    random_masks: Mapping[str, Tensor] = field(default_factory=dict)
    """(..., 1) masks drawn for `Policy.random_mask_probs`; empty in inference, where none are drawn."""

    def remember(self, name: str, memory: Any, x: Tensor) -> Tensor:
        """Run a memory from its state in `hidden`, which becomes the state after it."""
        out, self.hidden[name] = memory.run(x, self.hidden[name], self.trajectories)
        return out


class PolicyOutput(NamedTuple):
    """The result of one pass."""

    params: Params
    """Parameters of the action distribution: mu and sigma, or logits."""
    value: Tensor
    """(..., 1) value."""
    hidden: Hidden
    aux: dict[str, Tensor]

    @property
    def mean(self) -> Tensor:
        """Mean of a Gaussian policy."""
        return self.params["mu"]

    @property
    def std(self) -> Tensor:
        """Standard deviation of a Gaussian policy, one row per mean."""
        return self.params["sigma"].expand_as(self.params["mu"])


class Policy(PolicyNames, nn.Module):
    """An actor and a critic behind one interface. A subclass implements `actor_params` and `critic_value`."""

    is_recurrent: bool = False
    has_entropy: bool = True
    """Whether the policy samples its actions, so that an entropy bonus has an effect."""
    distribution: ActionDistribution
    obs_layout: ObsLayout
    """Names of the observation's parts; absent in policies whose networks take observations of any structure."""
    critic_obs_layout: ObsLayout

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = (base for base in cls.__mro__ if base not in Policy.__mro__)
        for name in (name for base in own for name in FINAL_CALLS if name in vars(base)):
            raise TypeError(f"{cls.__name__} overrides {name}(), which is final; extend {FINAL_CALLS[name]} instead")

    def __init__(self) -> None:
        super().__init__()
        self.obs_normalizer: Any = NoNormalization()
        self.critic_obs_normalizer: Any = NoNormalization()
        self.value_normalizer: Any = NoNormalization()
        """Converts the critic's output into values if the critic learns normalised returns."""
        self.carried: dict[str, Carried] = {}
        """State from step to step besides the memories."""
        self.obs_sets: tuple[list[str], list[str]] | None = None
        """Groups of the environment, by name, of which the actor's and the critic's observation are made."""
        self.generator: torch.Generator | None = None
        """Random numbers of the stateful calls; torch's default generator if None."""
        self.followers: Any = weakref.WeakSet()
        """Inference policies with a state of their own, which `reset(dones)` resets too."""
        self.random_mask_probs: dict[str, float] = {}
        """Probability by name of masks that are drawn while collecting and reused in learning."""
        self._params: Params | None = None
        self._aux: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: all but the last distribution and the inference policies of this policy."""
        return {**self.__dict__, "followers": None, "_params": None, "_aux": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "followers": weakref.WeakSet()})

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or convert parameters, buffers and the state of the memories, which is neither."""
        super()._apply(fn, recurse)
        for memory in self.memories.values():
            memory.state = None if memory.state is None else fn(memory.state)
        return self

    @abstractmethod
    def actor_params(self, obs: Any, ctx: Context) -> Params:
        """Parameters of the action distribution for normalised observations."""

    @abstractmethod
    def critic_value(self, critic_obs: Any, ctx: Context) -> Tensor:
        """(..., 1) value of normalised critic observations."""

    def sample_action(self, params: Params, generator: torch.Generator | None) -> Tensor:
        """The action taken while collecting."""
        return self.distribution.sample(params, generator)

    def draw_random_masks(self, obs: Obs, generator: torch.Generator | None) -> dict[str, Tensor]:
        """(N, 1) boolean masks of one collecting step, one for each of `random_mask_probs`."""
        if not self.random_mask_probs:
            return {}
        size, device = (batch_size(obs), 1), next(self.parameters()).device
        probs = self.random_mask_probs.items()
        return {name: torch.rand(size, generator=generator, device=device) < prob for name, prob in probs}

    @final
    def forward(
        self,
        obs: Obs,
        critic_obs: Obs | None = None,
        hidden: Mapping[str, Tensor] | None = None,
        trajectories: Trajectories | None = None,
        random_masks: Mapping[str, Tensor] | None = None,
    ) -> PolicyOutput:
        """Actor and critic in one pass; nothing is kept on the policy."""
        hidden = self.initial_hidden(batch_size(obs)) if hidden is None else dict(hidden)
        ctx = Context(hidden, {}, trajectories, random_masks or {})
        critic_obs = obs if critic_obs is None else critic_obs
        if getattr(obs, "normalized_by", None) is not self.obs_normalizer:
            obs = self.obs_normalizer.normalize(obs)
        if getattr(critic_obs, "normalized_by", None) is not self.critic_obs_normalizer:
            critic_obs = self.critic_obs_normalizer.normalize(critic_obs)
        params = self.actor_params(obs, ctx)
        value = self.critic_value(critic_obs, ctx).float()
        value = self.value_normalizer.inverse(value)
        # Half precision ends here: losses and sums use float32.
        return PolicyOutput({name: p.float() for name, p in params.items()}, value, ctx.hidden, ctx.aux)

    @final
    def infer(self, obs: Obs, hidden: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Hidden]:
        """The deterministic action in the environment's form, and the state after it."""
        params, hidden = self.act_params(obs, hidden)
        return self.distribution.to_env(self.distribution.mode(params)), hidden

    @final
    def act_params(self, obs: Obs, hidden: Mapping[str, Tensor] | None = None) -> tuple[Params, Hidden]:
        """The action distribution alone, without the critic, and the state after it."""
        ctx = Context(self.initial_hidden(batch_size(obs)) if hidden is None else dict(hidden))
        return self.actor_params(normalized(obs, self.obs_normalizer), ctx), ctx.hidden

    @final
    def value(
        self, critic_obs: Obs, hidden: Mapping[str, Tensor] | None = None, trajectories: Trajectories | None = None
    ) -> tuple[Tensor, Hidden]:
        """(..., 1) value and the state after it."""
        ctx = Context(self.initial_hidden(batch_size(critic_obs)) if hidden is None else dict(hidden), {}, trajectories)
        if getattr(critic_obs, "normalized_by", None) is not self.critic_obs_normalizer:
            critic_obs = self.critic_obs_normalizer.normalize(critic_obs)
        value = self.critic_value(critic_obs, ctx).float()
        return self.value_normalizer.inverse(value), ctx.hidden

    @property
    def memories(self) -> dict[str, Carried]:
        """The policy's recurrent memories and its other carried states by name."""
        own = {name: module for name, module in self.named_children() if isinstance(module, Carried)}
        return {**own, **self.carried}

    def initial_hidden(self, num_envs: int) -> Hidden:
        """Zero state for N environments."""
        return {name: memory.zero_state(num_envs) for name, memory in self.memories.items()}

    def hidden(self, num_envs: int) -> Hidden:
        """State of the stateful calls; zeros where a memory has not run, or ran on another number of environments."""
        return {
            name: memory.zero_state(num_envs) if memory.state is None or len(memory.state) != num_envs else memory.state
            for name, memory in self.memories.items()
        }

    def set_hidden(self, hidden: Mapping[str, Tensor | None]) -> None:
        """Continue from this state."""
        for name, memory in self.memories.items():
            memory.state = hidden.get(name, memory.state)

    @final
    def reset(self, dones: Tensor | None = None) -> None:
        """Zero the state of environments whose episode ended; of all if None."""
        for part in (*self.memories.values(), *(() if dones is None else self.followers)):
            part.reset(dones)

    @final
    @documented(observations="obs")
    def act(
        self,
        obs: Obs,
        masks: Any = None,
        hidden_states: Any = None,
        inference: bool = False,
        *,
        critic_obs: Obs | None = None,
    ) -> Tensor:
        """A sampled action before `to_env`; `get_actions_log_prob` and `entropy` then refer to this step.

        With `hidden_states`, obs is a padded (T, M, D) batch with its boolean masks; otherwise one step of N
        environments. With `inference` it is `act_inference(obs)`, a single step. `critic_obs`, which may also come
        second, is not observed.
        """
        if inference:
            if masks is not None or hidden_states is not None:
                raise ValueError("act(inference=True) is one step from the kept state; leave out masks, hidden_states")
            return self.act_inference(obs)
        if masks is not None and not (isinstance(masks, Tensor) and masks.dtype == torch.bool):
            if hidden_states is not None or critic_obs is not None:
                raise TypeError(f"masks must be a boolean tensor (T, M), got {type(masks).__name__}")
            masks = None  # the critic's observation
        random_masks = self.draw_random_masks(obs, self.generator) if hidden_states is None else {}
        self._params = self._run_branch("actor", obs, masks, hidden_states, random_masks)
        return self.sample_action(self._last(), self.generator)

    @final
    def sample(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """A sampled action and its log-probability."""
        actions = self.act(obs)
        return actions, self.get_actions_log_prob(actions)

    @final
    @documented(observations="obs")
    def act_inference(self, obs: Obs, critic_obs: Obs | None = None) -> Tensor:
        """The deterministic action, for which `critic_obs` is not observed; advances the memory."""
        self._params = self._run_branch("actor", obs, None, None)
        return self.distribution.to_env(self.action_mean)

    @final
    @documented(critic_observations="critic_obs")
    def evaluate(self, critic_obs: Obs, masks: Tensor | None = None, hidden_states: Any = None) -> Tensor:
        """(..., 1) value; advances the critic's memory while collecting."""
        value = self._run_branch("critic", critic_obs, masks, hidden_states)
        return self.value_normalizer.inverse(value)

    @final
    def evaluate_actions(self, obs: Obs, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability (B,), entropy (B,) and value (B, 1) of given actions."""
        out = self(obs)
        return self.distribution.log_prob(out.params, actions), self.distribution.entropy(out.params), out.value

    def _run_branch(
        self, branch: str, obs: Any, masks: Any, hidden_states: Any, random_masks: Any = None, core: Any = None
    ) -> Any:
        """Run one branch from the kept or a given state; `core` replaces its normalisation and its hooks."""
        obs = self.without_groups(obs, branch)
        kept = self.hidden(batch_size(obs)) if hidden_states is None else {}
        if hidden_states is None:
            ctx = Context(dict(kept), random_masks=random_masks or {})
        else:
            state = getattr(hidden_states, branch, hidden_states)  # of a minibatch: by memory name
            ctx = Context(dict(state) if isinstance(state, Mapping) else self.unpack_hidden(hidden_states, branch))
            if masks is not None:
                ctx.trajectories = trajectories_from_masks(masks)
                obs = tree_map(lambda leaf: unpad_trajectories(leaf, masks), obs)
        if core is not None:
            result = core(obs, ctx)
        elif branch == "actor":
            result = self.actor_params(normalized(obs, self.obs_normalizer), ctx)
        else:
            result = self.critic_value(normalized(obs, self.critic_obs_normalizer), ctx)
        if hidden_states is None:  # the memories of the other branch stay as they are
            self.set_hidden({name: state for name, state in ctx.hidden.items() if state is not kept[name]})
        if branch == "actor":
            self._aux = ctx.aux
        return result

    def unpack_hidden(self, hidden_states: Any, branch: str) -> Hidden:
        """The documented `hidden_states` of one branch ("actor" or "critic") as state by memory name."""
        return {}

    def without_groups(self, obs: Any, branch: str) -> Any:
        """What a branch ("actor" or "critic") observes of a mapping of groups; any other observation as it is."""
        names = () if self.obs_sets is None else self.obs_sets[branch == "critic"]
        has_groups = isinstance(obs, Mapping) and any(name in obs for name in names)
        return take_groups(obs, names) if has_groups else obs

    @final
    def get_actions_log_prob(self, actions: Tensor) -> Tensor:
        """Log-probability of actions under the last distribution."""
        return self.distribution.log_prob(self._last(), actions)

    @property
    def last_pass(self) -> tuple[Params | None, dict[str, Tensor]]:
        """Distribution parameters and by-products of the pass that the stateful properties refer to."""
        return self._params, self._aux

    @last_pass.setter
    def last_pass(self, params_and_aux: tuple[Params | None, dict[str, Tensor]]) -> None:
        self._params, self._aux = params_and_aux

    @property
    def action_mean(self) -> Tensor:
        """Mode of the last distribution: the mean of a Gaussian."""
        return self.distribution.mode(self._last())

    @property
    def action_std(self) -> Tensor:
        """Standard deviation of the last (Gaussian) distribution."""
        return self._last()["sigma"].expand_as(self._last()["mu"])

    @property
    def entropy(self) -> Tensor:
        """Entropy of the last distribution, summed over the action."""
        return self.distribution.entropy(self._last())

    def get_hidden_states(self) -> Any:
        """The state as the documented named tuple; None for feed-forward policies."""
        return None

    def clip_std(self, min: Any = None, max: Any = None) -> None:  # noqa: A002 (documented names)
        """Keep the noise parameter in range; does nothing for policies without one."""

    @torch.no_grad()
    def update_normalizers(self, obs: Obs, critic_obs: Obs, valid: Tensor | None = None) -> None:
        """Add the observations of a rollout to the statistics."""
        self.obs_normalizer.update(obs, valid)
        self.critic_obs_normalizer.update(critic_obs, valid)

    @property
    def obs_segments(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the actor observation's parts."""
        return self.obs_layout.shapes

    @property
    def critic_obs_segments(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the critic observation's parts."""
        return self.critic_obs_layout.shapes

    privileged_obs_segments = critic_obs_segments

    def _last(self) -> Params:
        if self._params is None:
            raise RuntimeError("the policy has not acted yet; call act() first")
        return self._params


def batch_size(obs: Any) -> int:
    """N of an observation."""
    while isinstance(obs, Mapping):
        obs = next(iter(obs.values()))
    return len(obs)
