"""Distributions over discrete actions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch import distributions as td

from canter.modules.action_distribution import ActionDistribution, Params, at_least_float32


class Categorical(ActionDistribution):
    """One choice out of `n`, with parameter `logits`; a logit of -inf forbids a choice."""

    action_dtype = torch.int64

    def __init__(self, n: int) -> None:
        self.action_shape: tuple[int, ...] = ()
        self.param_shapes = {"logits": (n,)}

    def _logits(self, params: Params) -> Tensor:
        return at_least_float32(params["logits"])

    def _log_probs(self, params: Params) -> Tensor:
        # A finite floor instead of -inf: 0 * floor is 0, where 0 * -inf would be NaN.
        return F.log_softmax(self._logits(params), dim=-1).clamp_min(torch.finfo(torch.float32).min)

    def _over_choices(self, values: Tensor) -> Tensor:
        """Sum of one value per choice over the last dimension."""
        return values.sum(-1)

    @torch.no_grad()
    def sample(self, params: Params, generator: Generator | None = None) -> Tensor:
        """Draw one choice per row (Gumbel-max)."""
        logits = self._logits(params)
        clock = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        clock = clock.exponential_(generator=generator).clamp_min(1e-30)
        return (logits - clock.log()).argmax(-1)

    def mode(self, params: Params) -> Tensor:
        """The likeliest choice."""
        return self._logits(params).argmax(-1)

    def log_prob(self, params: Params, actions: Tensor) -> Tensor:
        """Log-probability of the choices, (...,)."""
        return self._log_probs(params).gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: Params) -> Tensor:
        """Entropy in nats, (...,)."""
        log_probs = self._log_probs(params)
        return -self._over_choices(log_probs.exp() * log_probs)

    def kl(self, old: Params, new: Params) -> Tensor:
        """Exact KL(old || new), (...,)."""
        log_old, log_new = self._log_probs(old), self._log_probs(new)
        return self._over_choices(log_old.exp() * (log_old - log_new))

    def to_env(self, actions: Tensor) -> Tensor:
        """The choice itself, counted from 0."""
        return actions

    def torch_distribution(self, params: Params) -> td.Distribution:
        """`torch.distributions.Categorical`."""
        return td.Categorical(logits=self._logits(params), validate_args=False)


class MultiCategorical(Categorical):
    """Several independent choices at once; `logits` holds those of every choice one after the other."""

    def __init__(self, nvec: Sequence[int]) -> None:
        self.nvec = [int(n) for n in nvec]
        super().__init__(sum(self.nvec))
        self.action_shape = (len(self.nvec),)

    def _logits(self, params: Params) -> Tensor:
        """(..., sum nvec) -> (..., choices, widest), where -inf fills the narrower choices."""
        widest = max(self.nvec)
        parts = at_least_float32(params["logits"]).split(self.nvec, dim=-1)
        return torch.stack([F.pad(part, (0, widest - part.shape[-1]), value=-math.inf) for part in parts], dim=-2)

    def _over_choices(self, values: Tensor) -> Tensor:
        return values.sum((-2, -1))

    def log_prob(self, params: Params, actions: Tensor) -> Tensor:
        """Log-probability of all choices together, (...,)."""
        return super().log_prob(params, actions).sum(-1)

    def torch_distribution(self, params: Params) -> td.Distribution:
        """An `Independent` over `Categorical`, so that its log-probability is the action's."""
        return td.Independent(td.Categorical(logits=self._logits(params), validate_args=False), 1, validate_args=False)
