"""The actor-critic with a memory before each MLP."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from canter.modules.actor_critic import ActorCritic
from canter.modules.memory import ActorCriticHiddenState, Memory
from canter.modules.policy import Context, Hidden


class ActorCriticRecurrent(ActorCritic):
    """LSTM or GRU, then MLP, separately for actor and critic.

    Args:
        rnn_type: "lstm" or "gru".
        rnn_hidden_size: Width of the memories.
        rnn_num_layers: Layers of the memories.
    """

    is_recurrent = True

    def __init__(
        self, *args: Any, rnn_type: str = "lstm", rnn_hidden_size: int = 256, rnn_num_layers: int = 1, **kwargs: Any
    ) -> None:
        self.rnn_type, self.rnn_hidden_size, self.rnn_num_layers = rnn_type, rnn_hidden_size, rnn_num_layers
        super().__init__(*args, **kwargs)
        self.memory_a, self.memory_c = (self.new_memory(width) for width in self.memory_inputs)
        self.nested_memories: list[tuple[str, Any]] = []
        """Memories of the stages before the actor, and the class that pairs their state with the actor's."""

    def new_memory(self, input_size: int) -> Memory:
        """A memory with the policy's RNN settings."""
        return Memory(input_size, self.rnn_type, self.rnn_num_layers, self.rnn_hidden_size)

    def feature_widths(self, num_actor_obs: int, num_critic_obs: int) -> tuple[int, int]:
        """Both MLPs get a memory's output; the memories get the features of the stages before them."""
        self.memory_inputs = super().feature_widths(num_actor_obs, num_critic_obs)
        return self.rnn_hidden_size, self.rnn_hidden_size

    def actor_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """The output of the actor's memory."""
        return ctx.remember("memory_a", self.memory_a, super().actor_features(obs, ctx))

    def critic_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """The output of the critic's memory."""
        return ctx.remember("memory_c", self.memory_c, super().critic_features(obs, ctx))

    def get_hidden_states(self) -> Any:
        """ActorCriticHiddenState(actor, critic); every stage with a memory pairs its state with the actor's."""
        actor = self.memory_a.hidden_states
        for name, pair in self.nested_memories:
            actor = pair(getattr(self, name).hidden_states, actor)
        return ActorCriticHiddenState(actor, self.memory_c.hidden_states)

    def unpack_hidden(self, hidden_states: Any, branch: str) -> Hidden:
        """The states of the branch's memories, given alone or inside ActorCriticHiddenState."""
        if isinstance(hidden_states, ActorCriticHiddenState):
            hidden_states = getattr(hidden_states, branch)
        if branch == "critic":
            return {"memory_c": self.memory_c.pack(hidden_states)}
        unpacked: Hidden = {}
        for name, pair in reversed(self.nested_memories):
            if not isinstance(hidden_states, pair):
                raise ValueError(f"the hidden state must be the {pair.__name__} of get_hidden_states()")
            unpacked[name] = getattr(self, name).pack(hidden_states.get(0))
            hidden_states = hidden_states.get(1)
        return unpacked | {"memory_a": self.memory_a.pack(hidden_states)}
