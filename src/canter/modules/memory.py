"""Recurrent memory: an LSTM or GRU whose state is one env-major tensor (N, S, L, H), S = 2 for an LSTM, 1 for a GRU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from canter.storage.trajectories import Trajectories, trajectories_from_masks, unpad_trajectories
from canter.utils.utils import namedarraytuple

ActorCriticHiddenState = namedarraytuple("ActorCriticHiddenState", ["actor", "critic"])
LstmHiddenState = namedarraytuple("LstmHiddenState", ["hidden", "cell"])

RNNS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}


class Carried(ABC):
    """State that a policy carries from step to step for each of N environments; an episode begins with zeros."""

    state: Tensor | None = None
    """(N, *state_shape), None before the first step."""
    state_shape: tuple[int, ...]
    """Three dimensions, like those of a memory."""

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


class Memory(Carried, nn.Module):
    """An LSTM or GRU with a pure `run` and a documented stateful `forward`."""

    def __init__(self, input_size: int, type: str = "lstm", num_layers: int = 1, hidden_size: int = 256) -> None:  # noqa: A002
        super().__init__()
        kind = type.lower()
        if kind not in RNNS:
            raise ValueError(f"rnn_type must be one of {', '.join(RNNS)}, got {type!r}")
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
        out, new = self.rnn(sequence, parts if len(parts) == 2 else parts[0])
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

    def unpack(self, state: Tensor) -> Any:
        """(N, S, L, H) -> (L, N, H), or LstmHiddenState of two."""
        parts = state.movedim(0, 2).unbind(0)
        return LstmHiddenState(*parts) if len(parts) == 2 else parts[0]

    def pack(self, hidden_states: Any) -> Tensor:
        """The inverse of `unpack`."""
        parts = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        return torch.stack(tuple(parts)).movedim(2, 0)
