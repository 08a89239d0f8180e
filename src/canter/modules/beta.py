"""The Beta distribution for actions with bounds: no probability is lost beyond them (Chou et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch import distributions as td

from canter.modules.action_distribution import (
    ActionDistribution,
    DeviceConstants,
    Params,
    at_least_float32,
    finite_bounds,
)

EDGE = torch.finfo(torch.float32).eps  # the log-density has no limit at 0 and 1, and 1 - u must not round to them


class Beta(ActionDistribution):
    """Independent Beta actions with concentrations `alpha` and `beta`, stretched over the bounds.

    Actions here are the share `u` in (0, 1); the environment gets `low + u * (high - low)`. With concentrations of at
    least 1, as `from_head` makes them, the density has one peak.
    """

    action_dtype = torch.float32

    def __init__(self, low: np.ndarray | Sequence[float], high: np.ndarray | Sequence[float]) -> None:
        self.low, self.high = finite_bounds(low, high, "a Beta distribution")
        width = self.high - self.low
        self._constants = DeviceConstants(
            {"low": self.low, "high": self.high, "width": width, "log_volume": np.log(width).sum()}
        )
        self.num_actions = self.low.size
        self.action_shape = (self.num_actions,)
        self.param_shapes = {"alpha": self.action_shape, "beta": self.action_shape}

    def from_head(self, head: Tensor) -> Params:
        """Concentrations from a network's output (..., 2 A); zeros give 1 + log 2 each, a broad symmetric peak."""
        alpha, beta = (1.0 + F.softplus(at_least_float32(head))).chunk(2, dim=-1)
        return {"alpha": alpha, "beta": beta}

    @torch.no_grad()
    def sample(self, params: Params, generator: Generator | None = None) -> Tensor:
        """Draw one action per row of the parameters, without gradient."""
        # Two gamma draws over their sum, in one kernel that draws from the generator and asks the host nothing.
        pair = torch._sample_dirichlet(torch.stack(_pair(params), -1), generator=generator)  # pyright: ignore[reportPrivateImportUsage]
        return pair[..., 0].clamp(EDGE, 1.0 - EDGE)

    def mode(self, params: Params) -> Tensor:
        """The mean: the peak of a flat density is nowhere."""
        alpha, beta = _pair(params)
        return alpha / (alpha + beta)

    def log_prob(self, params: Params, actions: Tensor) -> Tensor:
        """Log-density of the environment's action that `u` stands for, (...,)."""
        alpha, beta = _pair(params)
        log_density = (alpha - 1) * actions.log() + (beta - 1) * torch.log1p(-actions) - _log_norm(alpha, beta)
        return log_density.sum(-1) - self._constants(actions.device)["log_volume"]

    def entropy(self, params: Params) -> Tensor:
        """Entropy of the environment's action in nats, (...,)."""
        alpha, beta = _pair(params)
        both = alpha + beta
        spread = (alpha - 1) * torch.digamma(alpha) + (beta - 1) * torch.digamma(beta) - (both - 2) * both.digamma()
        return (_log_norm(alpha, beta) - spread).sum(-1) + self._constants(alpha.device)["log_volume"]

    def kl(self, old: Params, new: Params) -> Tensor:
        """Exact KL(old || new), (...,)."""
        (alpha, beta), (alpha_new, beta_new) = _pair(old), _pair(new)
        step_a, step_b = alpha - alpha_new, beta - beta_new
        expected = step_a * alpha.digamma() + step_b * beta.digamma() - (step_a + step_b) * (alpha + beta).digamma()
        return (_log_norm(alpha_new, beta_new) - _log_norm(alpha, beta) + expected).sum(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        """The bounded action."""
        fixed = self._constants(actions.device)
        stretched = torch.addcmul(fixed["low"], actions, fixed["width"])
        return torch.clamp(stretched, fixed["low"], fixed["high"])  # rounding may step over a bound

    def torch_distribution(self, params: Params) -> td.Distribution:
        """The distribution of the environment's (bounded) action, not of `u`."""
        alpha, beta = _pair(params)
        fixed = self._constants(alpha.device)
        stretch: list[td.Transform] = [td.AffineTransform(fixed["low"], fixed["width"])]
        return td.TransformedDistribution(td.Beta(alpha, beta, validate_args=False), stretch, validate_args=False)


def _pair(params: Params) -> tuple[Tensor, Tensor]:
    return at_least_float32(params["alpha"]), at_least_float32(params["beta"])


def _log_norm(alpha: Tensor, beta: Tensor) -> Tensor:
    """Logarithm of B(alpha, beta), the integral that the density is divided by."""
    return torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
