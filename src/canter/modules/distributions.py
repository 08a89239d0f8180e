"""Action distributions as stateless functions of named parameter tensors.

Parameters are plain tensors, so storage can keep them and a captured graph can overwrite them. The formulas are written
out because `torch.distributions` costs many small kernels. Half-precision parameters are raised to float32 first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Generator, Tensor
from torch import distributions as td

from canter.modules.action_distribution import (
    ActionDistribution,
    DeviceConstants,
    Params,
    at_least_float32,
    finite_bounds,
)
from canter.modules.beta import Beta
from canter.modules.categorical import Categorical, MultiCategorical

__all__ = [
    "BOX_DISTRIBUTIONS",
    "ActionDistribution",
    "Beta",
    "Categorical",
    "Gaussian",
    "MultiCategorical",
    "Params",
    "SquashedGaussian",
    "bounded_std",
    "distribution_for",
    "init_std",
]

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
SMALLEST_STD = 1e-15  # a std that reached 0 gives NaN log-probabilities from then on


class Gaussian(ActionDistribution):
    """Independent normal actions with parameters `mu` and `sigma`; a `sigma` of shape (A,) serves every row."""

    action_dtype = torch.float32

    def __init__(self, num_actions: int) -> None:
        self.num_actions = num_actions
        self.action_shape = (num_actions,)
        self.param_shapes = {"mu": (num_actions,), "sigma": (num_actions,)}

    def rsample(self, params: Params, generator: Generator | None = None) -> Tensor:
        """Draw actions that carry the gradient of the parameters."""
        mu, sigma = _mu_sigma(params)
        return mu + sigma * torch.randn(mu.shape, generator=generator, device=mu.device, dtype=mu.dtype)

    @torch.no_grad()
    def sample(self, params: Params, generator: Generator | None = None) -> Tensor:
        """Draw one action per row of the parameters, without gradient."""
        return self.rsample(params, generator)

    def mode(self, params: Params) -> Tensor:
        """The mean."""
        return _mu_sigma(params)[0]

    def log_prob(self, params: Params, actions: Tensor) -> Tensor:
        """Log-density summed over the action's dimensions, (...,)."""
        mu, sigma = _mu_sigma(params)
        return -(0.5 * ((actions - mu) / sigma).square() + sigma.log()).sum(-1) - self.num_actions * HALF_LOG_TWO_PI

    def entropy(self, params: Params) -> Tensor:
        """Entropy in nats, (...,)."""
        mu, sigma = _mu_sigma(params)
        return (sigma.log().sum(-1) + self.num_actions * (0.5 + HALF_LOG_TWO_PI)).expand(mu.shape[:-1])

    def kl(self, old: Params, new: Params) -> Tensor:
        """Exact KL(old || new), (...,)."""
        (mu_old, sigma_old), (mu_new, sigma_new) = _mu_sigma(old), _mu_sigma(new)
        ratio = sigma_old / sigma_new  # equal parameters give exactly 0 in this form
        step = (mu_old - mu_new) / sigma_new
        return (0.5 * (ratio.square() + step.square() - 1.0) - ratio.log()).sum(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        """The action itself; bounds are the environment's business."""
        return actions

    def torch_distribution(self, params: Params) -> td.Distribution:
        """`Normal`, whose log-probabilities are per dimension."""
        return td.Normal(*_mu_sigma(params), validate_args=False)


class SquashedGaussian(Gaussian):
    """A normal `u` pressed into bounds: the environment gets `tanh(u) * scale + bias`.

    Actions here are always the pre-squash `u`, which cannot be recovered from a saturated tanh. The entropy has no
    closed form: its correction `E[log |da/du|]` is integrated by Gauss-Hermite quadrature over 16 points, which has no
    sampling noise and is right to 0.004 nats per dimension up to `sigma` 2 (0.06 at 4).
    """

    def __init__(self, low: np.ndarray | Sequence[float], high: np.ndarray | Sequence[float]) -> None:
        low, high = finite_bounds(low, high, "squashing")
        super().__init__(low.size)
        self.low, self.high = low, high
        nodes, weights = np.polynomial.hermite_e.hermegauss(16)
        scale = (high - low) / 2
        host = {"low": low, "high": high, "scale": scale, "bias": (high + low) / 2, "log_scale": np.log(scale)}
        self._constants = DeviceConstants(host | {"nodes": nodes, "weights": weights / weights.sum()})

    def log_prob(self, params: Params, actions: Tensor) -> Tensor:
        """Log-density of the environment's action that `u` stands for, (...,)."""
        log_slope = _log_tanh_slope(actions) + self._constants(actions.device)["log_scale"]
        return super().log_prob(params, actions) - log_slope.sum(-1)

    def entropy(self, params: Params) -> Tensor:
        """Entropy of the environment's action in nats, by quadrature (...,)."""
        mu, sigma = _mu_sigma(params)
        fixed = self._constants(mu.device)
        points = mu.unsqueeze(-1) + sigma.unsqueeze(-1) * fixed["nodes"]  # (..., A, 16)
        # Not a matrix product, which TF32 and autocast would round.
        log_slope = (_log_tanh_slope(points) * fixed["weights"]).sum(-1) + fixed["log_scale"]
        return super().entropy(params) + log_slope.sum(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        """The bounded action."""
        fixed = self._constants(actions.device)
        bounded = torch.addcmul(fixed["bias"], torch.tanh(actions), fixed["scale"])
        return torch.clamp(bounded, fixed["low"], fixed["high"])  # rounding may step over a bound

    def torch_distribution(self, params: Params) -> td.Distribution:
        """The distribution of the environment's (bounded) action, not of `u`."""
        mu, sigma = _mu_sigma(params)
        fixed = self._constants(mu.device)
        squash = [td.TanhTransform(), td.AffineTransform(fixed["bias"], fixed["scale"])]
        return td.TransformedDistribution(td.Normal(mu, sigma, validate_args=False), squash, validate_args=False)


# What a Box can have by name.
BOX_DISTRIBUTIONS: dict[str, Callable[[spaces.Box], ActionDistribution]] = {
    "gaussian": lambda box: Gaussian(math.prod(box.shape)),
    "squashed": lambda box: SquashedGaussian(box.low, box.high),
    "beta": lambda box: Beta(box.low, box.high),
}


def distribution_for(action_space: spaces.Space, squash: bool = False, name: str | None = None) -> ActionDistribution:
    """The distribution for a Box, Discrete or MultiDiscrete action space.

    `name` chooses one of `BOX_DISTRIBUTIONS` for a Box; without it `squash` says whether actions are kept in bounds.
    """
    if name is not None and name not in BOX_DISTRIBUTIONS:
        raise ValueError(f"no action distribution {name!r}; a Box can have {', '.join(BOX_DISTRIBUTIONS)}")
    if name is not None and squash and name != "squashed":
        raise ValueError(f"squash_actions asks for 'squashed', action_distribution for {name!r}; give one of them")
    if isinstance(action_space, spaces.Box):
        return BOX_DISTRIBUTIONS[name or ("squashed" if squash else "gaussian")](action_space)
    if name is not None:
        raise ValueError(f"action_distribution={name!r} is for a Box; {action_space} is categorical by itself")
    if isinstance(action_space, spaces.Discrete):
        return Categorical(int(action_space.n))
    if isinstance(action_space, spaces.MultiDiscrete) and action_space.nvec.ndim == 1:
        return MultiCategorical(action_space.nvec.tolist())
    raise TypeError(f"no distribution for action space {action_space}; use a Box, a Discrete or a flat MultiDiscrete")


def init_std(num_actions: int, init_noise_std: float | Sequence[float] = 1.0) -> Tensor:
    """Initial standard deviations (A,) from one number or from one per action."""
    std = torch.as_tensor(init_noise_std, dtype=torch.float32)
    if std.dim() > 1 or (std.dim() == 1 and len(std) != num_actions):
        raise ValueError(f"init_noise_std is {init_noise_std} for {num_actions} actions; give one number or one each")
    if not bool((std > 0).all()):
        raise ValueError(f"init_noise_std must be positive, got {init_noise_std}")
    return std.expand(num_actions).clone()


def bounded_std(
    raw: Tensor,
    noise_std_type: str = "scalar",
    min_std: float | Tensor | None = None,
    max_std: float | Tensor | None = None,
) -> Tensor:
    """The standard deviation that the parameter `raw` (itself, or its logarithm) stands for, kept within bounds.

    The gradient is that of the unbounded value: a plain clamp has none beyond its bounds and would strand it.
    """
    if noise_std_type not in ("scalar", "log"):
        raise ValueError(f"noise_std_type is 'scalar' or 'log', got {noise_std_type!r}")
    free = raw.exp() if noise_std_type == "log" else raw
    held = free.detach().clamp_min(SMALLEST_STD if min_std is None else min_std)
    if max_std is not None:
        held = held.clamp_max(max_std)
    return held + (free - free.detach())


def _mu_sigma(params: Params) -> tuple[Tensor, Tensor]:
    return at_least_float32(params["mu"]), at_least_float32(params["sigma"])


def _log_tanh_slope(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2) without cancellation: -2 |u| + 2 log 2 far out, where the direct form is log(0)."""
    return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
