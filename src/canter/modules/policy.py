"""What every policy has: a pure core that writes nothing to itself, and a thin stateful shell around it.

Algorithms call the core (`forward`, `value`, `infer`); people and old scripts call the shell (`act`, `evaluate`, ...).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from canter.modules.distributions import ActionDistribution, Params
from canter.modules.memory import Carried, Memory
from canter.modules.normalizer import NoNormalization
from canter.storage.trajectories import Trajectories, trajectories_from_masks, unpad_trajectories
from canter.utils.tree import Obs, tree_map

Hidden = dict[str, Tensor]


@dataclass
class Context:
    """What one pass reads besides the observation, and what it leaves behind besides the action."""

    hidden: Hidden = field(default_factory=dict)
    """State by memory name, (N, S, L, H), replaced by the pass."""
    aux: dict[str, Tensor] = field(default_factory=dict)
    """Named intermediates that a loss may want."""
    trajectories: Trajectories | None = None
    """How a (T, N) rollout splits; None for a single step."""
    tosses: Mapping[str, Tensor] = field(default_factory=dict)
    """(..., 1) results of the policy's `coins`; a coin that is not here was not tossed, as in inference."""

    def remember(self, name: str, memory: Memory, x: Tensor) -> Tensor:
        """Run a memory from its given state and keep the new one."""
        out, self.hidden[name] = memory.run(x, self.hidden[name], self.trajectories)
        return out


class PolicyOutput(NamedTuple):
    """Everything one pass computes."""

    params: Params
    """Parameters of the action distribution: mu and sigma, or logits."""
    value: Tensor
    """(..., 1)."""
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


class Policy(nn.Module):
    """An actor and a critic behind one interface. A subclass implements `actor_params` and `critic_value`."""

    is_recurrent: bool = False
    has_entropy: bool = True
    """Whether exploration noise is part of the policy, so that an entropy bonus means something."""
    distribution: ActionDistribution

    def __init__(self) -> None:
        super().__init__()
        self.obs_normalizer: nn.Module = NoNormalization()
        self.critic_obs_normalizer: nn.Module = NoNormalization()
        self.value_normalizer: nn.Module = NoNormalization()
        """Turns what the critic says into a value, where it learns normalised returns."""
        self.carried: dict[str, Carried] = {}
        """What is carried from step to step besides the memories."""
        self.generator: torch.Generator | None = None
        self.coins: dict[str, float] = {}
        """Probability by name of what is left to chance while collecting; learning sees the same results again."""
        self._params: Params | None = None
        self._aux: dict[str, Tensor] = {}

    @abstractmethod
    def actor_params(self, obs: Any, ctx: Context) -> Params:
        """Parameters of the action distribution for normalised observations."""

    @abstractmethod
    def critic_value(self, critic_obs: Any, ctx: Context) -> Tensor:
        """(..., 1) value of normalised critic observations."""

    def sample_action(self, params: Params, generator: torch.Generator | None) -> Tensor:
        """The action taken while collecting."""
        return self.distribution.sample(params, generator)

    def toss(self, obs: Obs, generator: torch.Generator | None) -> dict[str, Tensor]:
        """(N, 1) results of every coin for one collecting step."""
        if not self.coins:
            return {}
        device = next(self.parameters()).device
        size = (batch_size(obs), 1)
        return {name: torch.rand(size, generator=generator, device=device) < p for name, p in self.coins.items()}

    # ------------------------------------------------------------------ pure core
    @final
    def forward(
        self,
        obs: Obs,
        critic_obs: Obs | None = None,
        hidden: Mapping[str, Tensor] | None = None,
        trajectories: Trajectories | None = None,
        tosses: Mapping[str, Tensor] | None = None,
    ) -> PolicyOutput:
        """Actor and critic in one pass; nothing is kept on the policy."""
        if hidden is None:
            hidden = self.initial_hidden(batch_size(obs))
        ctx = Context(dict(hidden), {}, trajectories, tosses or {})
        params = self.actor_params(self.obs_normalizer.normalize(obs), ctx)  # pyright: ignore[reportCallIssue]
        seen = obs if critic_obs is None else critic_obs
        value = self._value_of(seen, ctx)
        # Half-precision products end here: what is compared and summed is float32.
        return PolicyOutput({name: p.float() for name, p in params.items()}, value, ctx.hidden, ctx.aux)

    @final
    def infer(self, obs: Obs, hidden: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Hidden]:
        """The deterministic action as the environment wants it, and the state after it."""
        params, hidden = self.act_params(obs, hidden)
        return self.distribution.to_env(self.distribution.mode(params)), hidden

    @final
    def act_params(self, obs: Obs, hidden: Mapping[str, Tensor] | None = None) -> tuple[Params, Hidden]:
        """The action distribution alone, without the critic, and the state after it."""
        ctx = Context(dict(self.initial_hidden(batch_size(obs)) if hidden is None else hidden))
        params = self.actor_params(self.obs_normalizer.normalize(obs), ctx)  # pyright: ignore[reportCallIssue]
        return params, ctx.hidden

    @final
    def value(
        self,
        critic_obs: Obs,
        hidden: Mapping[str, Tensor] | None = None,
        trajectories: Trajectories | None = None,
    ) -> tuple[Tensor, Hidden]:
        """(..., 1) value and the state after it."""
        ctx = Context(dict(self.initial_hidden(batch_size(critic_obs)) if hidden is None else hidden), {}, trajectories)
        return self._value_of(critic_obs, ctx), ctx.hidden

    def _value_of(self, critic_obs: Obs, ctx: Context) -> Tensor:
        value = self.critic_value(self.critic_obs_normalizer.normalize(critic_obs), ctx)  # pyright: ignore[reportCallIssue]
        return self.value_normalizer.inverse(value.float())  # pyright: ignore[reportCallIssue]

    # ------------------------------------------------------------------ memories
    @property
    def memories(self) -> dict[str, Carried]:
        """The policy's recurrent memories by name, and whatever else it carries."""
        own = {name: module for name, module in self.named_children() if isinstance(module, Memory)}
        return {**own, **self.carried}

    def initial_hidden(self, num_envs: int) -> Hidden:
        """Zero state for N environments."""
        return {name: memory.zero_state(num_envs) for name, memory in self.memories.items()}

    def hidden(self, num_envs: int) -> Hidden:
        """The state the shell is in; zeros at first, and whenever the number of environments changes."""
        if not self.is_recurrent and not self.carried:
            return {}
        for memory in self.memories.values():
            if memory.state is None or len(memory.state) != num_envs:
                memory.state = memory.zero_state(num_envs)
        return {name: memory.state for name, memory in self.memories.items() if memory.state is not None}

    def set_hidden(self, hidden: Mapping[str, Tensor | None]) -> None:
        """Continue from this state."""
        if not self.is_recurrent and not self.carried:
            return
        for name, memory in self.memories.items():
            if name in hidden:
                memory.state = hidden[name]

    @final
    def reset(self, dones: Tensor | None = None) -> None:
        """Zero the state of environments whose episode ended; of all if None."""
        for memory in self.memories.values():
            memory.reset(dones)

    # ------------------------------------------------------------------ documented stateful calls
    @final
    def act(self, obs: Obs, masks: Tensor | None = None, hidden_states: Any = None) -> Tensor:
        """A sampled action, as the distribution sees it; `get_actions_log_prob` and `entropy` then speak of this step.

        With `hidden_states`, obs is a padded (T, M, D) batch with its masks; otherwise one step of N environments.
        """
        tosses = self.toss(obs, self.generator) if hidden_states is None else {}
        self._params = self._shell("actor", obs, masks, hidden_states, tosses)
        return self.sample_action(self._last(), self.generator)

    @final
    def sample(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """A sampled action and its log-probability."""
        actions = self.act(obs)
        return actions, self.get_actions_log_prob(actions)

    @final
    def act_inference(self, obs: Obs) -> Tensor:
        """The deterministic action; advances the memory."""
        self._params = self._shell("actor", obs, None, None)
        return self.distribution.to_env(self.action_mean)

    @final
    def evaluate(self, critic_obs: Obs, masks: Tensor | None = None, hidden_states: Any = None) -> Tensor:
        """(..., 1) value; advances the critic's memory while collecting."""
        said = self._shell("critic", critic_obs, masks, hidden_states)
        return self.value_normalizer.inverse(said)  # pyright: ignore[reportCallIssue]

    @final
    def evaluate_actions(self, obs: Obs, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability (B,), entropy (B,) and value (B, 1) of given actions."""
        out = self(obs)
        return self.distribution.log_prob(out.params, actions), self.distribution.entropy(out.params), out.value

    def _shell(
        self, branch: str, obs: Any, masks: Any, hidden_states: Any, tosses: Any = None, core: Any = None
    ) -> Any:
        """One branch of the core, or a `core` that takes what is normalised already, on the kept or a given state."""
        is_actor = branch == "actor"
        normalizer: Any = self.obs_normalizer if is_actor else self.critic_obs_normalizer
        if core is not None:
            normalizer = NoNormalization()
        core = core or (self.actor_params if is_actor else self.critic_value)
        if hidden_states is None:
            ctx = Context(self.hidden(batch_size(obs)), tosses=tosses or {})
        else:
            ctx = Context(self.unpack_hidden(hidden_states, branch))
            if masks is not None:
                ctx.trajectories = trajectories_from_masks(masks)
                obs = tree_map(lambda leaf: unpad_trajectories(leaf, masks), obs)
        result = core(normalizer.normalize(obs), ctx)
        if hidden_states is None:
            self.set_hidden(ctx.hidden)
        if is_actor:
            self._aux = ctx.aux
        return result

    def unpack_hidden(self, hidden_states: Any, branch: str) -> Hidden:
        """The documented `hidden_states` of one branch ("actor" or "critic") as state by memory name."""
        return {}

    @final
    def get_actions_log_prob(self, actions: Tensor) -> Tensor:
        """Log-probability of actions under the last distribution."""
        return self.distribution.log_prob(self._last(), actions)

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
        """Keep the noise parameter in range; policies without one have nothing to do."""

    @torch.no_grad()
    def update_normalizers(self, obs: Obs, critic_obs: Obs, valid: Tensor | None = None) -> None:
        """Take a rollout's observations into the statistics."""
        self.obs_normalizer.update(obs, valid)  # pyright: ignore[reportCallIssue]
        self.critic_obs_normalizer.update(critic_obs, valid)  # pyright: ignore[reportCallIssue]

    def _last(self) -> Params:
        if self._params is None:
            raise RuntimeError("the policy has not acted yet; call act() first")
        return self._params


def batch_size(obs: Any) -> int:
    """N of an observation."""
    while isinstance(obs, Mapping):
        obs = next(iter(obs.values()))
    return len(obs)
