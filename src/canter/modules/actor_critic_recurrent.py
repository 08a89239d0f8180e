"""The actor-critic with a memory before each MLP, whose state is (N, S, L, H): S = 2 for an LSTM, 1 for a GRU."""

from typing import Any

import torch
from torch import Tensor, nn

from canter.compat.arguments import documented
from canter.modules.actor_critic import ActorCritic
from canter.modules.policy import Carried, Context, Hidden
from canter.storage.trajectories import Trajectories, trajectories_from_masks, unpad_trajectories
from canter.utils.utils import namedarraytuple

ActorCriticHiddenState = namedarraytuple("ActorCriticHiddenState", ["actor", "critic"])
LstmHiddenState = namedarraytuple("LstmHiddenState", ["hidden", "cell"])

RNNS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}


class Memory(Carried, nn.Module):
    """An LSTM or GRU with a pure `run` and a documented stateful `forward`."""

    def __init__(self, input_size: int, type: str = "lstm", num_layers: int = 1, hidden_size: int = 256) -> None:  # noqa: A002
        super().__init__()
        kind = type.lower()
        if kind not in RNNS:
            raise ValueError(f"rnn_type must be one of {', '.join(RNNS)}, got {type!r}")
        for name, size in (("rnn_hidden_size", hidden_size), ("rnn_num_layers", num_layers)):
            if int(size) < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
        self.rnn = RNNS[kind](int(input_size), int(hidden_size), int(num_layers))
        self.state_shape = (2 if kind == "lstm" else 1, int(num_layers), int(hidden_size))

    def zero_state(self, num_envs: int) -> Tensor:
        """(N, S, L, H) zeros."""
        return next(self.rnn.parameters()).new_zeros(num_envs, *self.state_shape)

    def run(self, x: Tensor, state: Tensor, trajectories: Trajectories | None = None) -> tuple[Tensor, Tensor]:
        """One step (N, D), or a sequence (T, N, D) cut into trajectories; the output has the layout of x."""
        if x.dim() == 2:
            out, new = self._sequence(x.unsqueeze(0), state)
            return out.squeeze(0), new
        if trajectories is None:
            return self._sequence(x, state)
        row, column, total = trajectories
        padded = x.new_zeros(len(x), total, x.shape[-1])  # (T, M, D)
        padded[row, column] = x
        out, new = self._sequence(padded, state)
        return out[row, column], new

    def _sequence(self, sequence: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state.movedim(0, 2).contiguous()
        if state.is_inference() and torch.is_grad_enabled():  # kept by a rollout, now in a pass that autograd records
            state = state.clone()
        parts = state.unbind(0)  # S tensors (L, N or M, H)
        memory = parts if len(parts) == 2 else parts[0]
        if sequence.device.type == "cpu" and torch.is_autocast_enabled("cpu"):  # not all have a bfloat16 kernel
            with torch.autocast("cpu", enabled=False):
                out, new = self.rnn(sequence.float(), memory)
        else:
            out, new = self.rnn(sequence, memory)
        return out, torch.stack(new if isinstance(new, tuple) else (new,)).movedim(2, 0)

    def forward(self, x: Tensor, masks: Tensor | None = None, hidden_states: Any = None) -> Tensor:
        """One step from the kept state; or, given `hidden_states`, a padded batch (T, M, D) without changing it."""
        if hidden_states is None:
            if self.state is None or len(self.state) != len(x):
                self.state = self.zero_state(len(x))
            out, self.state = self.run(x, self.state)
            return out
        state = self.pack(hidden_states)
        if masks is None:
            return self.run(x, state)[0]
        return self.run(unpad_trajectories(x, masks), state, trajectories_from_masks(masks))[0]

    @property
    def hidden_states(self) -> Any:
        """The kept state as documented: (L, N, H), or a pair of them for an LSTM; None before the first step."""
        return None if self.state is None else self.unpack(self.state)

    @hidden_states.setter
    def hidden_states(self, hidden_states: Any) -> None:
        self.state = None if hidden_states is None else self.pack(hidden_states)

    def unpack(self, state: Tensor) -> Any:
        """(N, S, L, H) -> (L, N, H), or LstmHiddenState of two."""
        parts = state.movedim(0, 2).unbind(0)
        return LstmHiddenState(*parts) if len(parts) == 2 else parts[0]

    def pack(self, hidden_states: Any) -> Tensor:
        """The inverse of `unpack`."""
        parts = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        return torch.stack(tuple(parts)).movedim(2, 0)


class ActorCriticRecurrent(ActorCritic):
    """LSTM or GRU, then MLP, separately for actor and critic.

    Args:
        rnn_type: "lstm" or "gru".
        rnn_hidden_size: Width of the memories.
        rnn_num_layers: Layers of the memories.
    """

    is_recurrent = True

    @documented(
        *("num_actor_obs", "num_critic_obs", "num_actions", "actor_hidden_dims", "critic_hidden_dims", "activation"),
        *("rnn_type", "rnn_hidden_size", "rnn_num_layers", "init_noise_std"),
    )
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
