"""Action distributions as stateless functions of named parameter tensors.

Parameters are plain tensors, so storage can keep them and a captured graph can overwrite them. The formulas are written
out because `torch.distributions` launches many small kernels. Half-precision parameters are converted to float32.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Generator, Tensor, nn, promote_types
from torch import distributions as td

from canter.execution.torch_private import sample_dirichlet

Params = dict[str, Tensor]
Bounds = np.ndarray | Sequence[float]

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
SMALLEST_STD = 1e-15  # a std that reached 0 gives NaN log-probabilities from then on
LOWEST = torch.finfo(torch.float32).min  # floor of log-probabilities: 0 * LOWEST is 0, where 0 * -inf would be NaN
EDGE = torch.finfo(torch.float32).eps  # a Beta density has no limit at 0 and 1, and 1 - u must not round to them


class ActionDistribution(ABC):
    """A family of action distributions; every method takes the parameters as an argument."""

    action_shape: tuple[int, ...]
    action_dtype: torch.dtype
    param_shapes: dict[str, tuple[int, ...]]
    """Parameter name -> shape of one action's parameter."""

    @abstractmethod
    def sample(self, params: Params, generator: Generator | None = None) -> Tensor:
        """Draw one action per row of the parameters, without gradient."""

    @abstractmethod
    def mode(self, params: Params) -> Tensor:
        """The action of a policy that does not explore."""

    @abstractmethod
    def log_prob(self, params: Params, actions: Tensor) -> Tensor:
        """Log-probability of whole actions, (...,)."""

    @abstractmethod
    def entropy(self, params: Params) -> Tensor:
        """Entropy in nats, (...,)."""

    @abstractmethod
    def kl(self, old: Params, new: Params) -> Tensor:
        """Exact KL(old || new), (...,)."""

    def to_env(self, actions: Tensor) -> Tensor:
        """The input of `VecEnv.step` for an action: flat, and counted from 0 if discrete; by default the action."""
        return actions

    @abstractmethod
    def torch_distribution(self, params: Params) -> td.Distribution:
        """The equivalent `torch.distributions` object, without argument validation."""


class Gaussian(ActionDistribution):
    """Independent normal actions with parameters `mu` and `sigma`; a `sigma` of shape (A,) serves every row."""

    action_dtype = torch.float32

    def __init__(self, num_actions: int) -> None:
        self.num_actions = num_actions
        self.action_shape = (num_actions,)
        self.param_shapes = {"mu": (num_actions,), "sigma": (num_actions,)}

    def rsample(self, params: Params, generator: Generator | None = None) -> Tensor:
        """Draw actions that carry the gradient of the parameters."""
        mu, sigma = params["mu"], params["sigma"]
        dtype = promote_types(mu.dtype, torch.float32)
        return mu + sigma * torch.randn(mu.shape, generator=generator, device=mu.device, dtype=dtype)

    @torch.no_grad()
    def sample(self, params: Params, generator: Generator | None = None) -> Tensor:
        """Draw one action per row of the parameters, without gradient."""
        return self.rsample(params, generator)

    def mode(self, params: Params) -> Tensor:
        """The mean."""
        return params["mu"].to(promote_types(params["mu"].dtype, torch.float32))

    def log_prob(self, params: Params, actions: Tensor) -> Tensor:
        """Log-density summed over the action's dimensions, (...,)."""
        mu, sigma = params["mu"], params["sigma"].to(promote_types(params["sigma"].dtype, torch.float32))
        if actions.shape[-1:] != mu.shape[-1:]:
            check_width(actions, mu)
        return (-0.5 * ((actions - mu) / sigma).square() - sigma.log()).sum(-1) - self.num_actions * HALF_LOG_TWO_PI

    def entropy(self, params: Params) -> Tensor:
        """Entropy in nats, (...,)."""
        sigma = params["sigma"].to(promote_types(params["sigma"].dtype, torch.float32))
        return (sigma.log().sum(-1) + self.num_actions * (0.5 + HALF_LOG_TWO_PI)).expand(params["mu"].shape[:-1])

    def kl(self, old: Params, new: Params) -> Tensor:
        """Exact KL(old || new), (...,)."""
        dtype = promote_types(new["sigma"].dtype, torch.float32)
        sigma = new["sigma"].to(dtype)
        ratio = old["sigma"] / sigma  # equal parameters give exactly 0 in this form
        step = (old["mu"].to(dtype) - new["mu"]) / sigma
        return (0.5 * (ratio.square() + step.square() - 1.0) - ratio.log()).sum(-1)

    def torch_distribution(self, params: Params) -> td.Distribution:
        """`Normal`, whose log-probabilities are per dimension."""
        mu = self.mode(params)
        return td.Normal(mu, params["sigma"].to(mu.dtype), validate_args=False)


class SquashedGaussian(Gaussian):
    """A normal `u` squashed into bounds: the environment gets `tanh(u) * scale + bias`.

    Actions here are always the pre-squash `u`, which cannot be recovered from a saturated tanh. The entropy has no
    closed form: its correction `E[log |da/du|]` is integrated by Gauss-Hermite quadrature over 16 points, which has no
    sampling noise and is exact to 0.004 nats per dimension up to `sigma` 2 (0.06 at 4).
    """

    def __init__(self, low: Bounds, high: Bounds) -> None:
        self.low, self.high = finite_bounds(low, high, "squashing")
        super().__init__(self.low.size)
        nodes, weights = np.polynomial.hermite_e.hermegauss(16)
        scale, bias = (self.high - self.low) / 2, (self.high + self.low) / 2
        self._constants = DeviceConstants(
            low=self.low,
            high=self.high,
            scale=scale,
            bias=bias,
            log_scale=np.log(scale),
            nodes=nodes,
            weights=weights / weights.sum(),
        )

    def log_prob(self, params: Params, actions: Tensor) -> Tensor:
        """Log-density of the environment's action `tanh(u) * scale + bias`, (...,)."""
        log_slope = _log_tanh_slope(actions) + self._constants(actions.device)["log_scale"]
        return super().log_prob(params, actions) - log_slope.sum(-1)

    def entropy(self, params: Params) -> Tensor:
        """Entropy of the environment's action in nats, by quadrature (...,)."""
        fixed = self._constants(params["mu"].device)
        points = params["mu"].unsqueeze(-1) + params["sigma"].unsqueeze(-1) * fixed["nodes"]  # (..., A, 16)
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
        normal = super().torch_distribution(params)
        fixed = self._constants(params["mu"].device)
        squash = [td.TanhTransform(), td.AffineTransform(fixed["bias"], fixed["scale"])]
        return td.TransformedDistribution(normal, squash, validate_args=False)


class Beta(ActionDistribution):
    """Independent Beta actions stretched over the bounds, with no probability outside them (Chou et al. 2017).

    Actions here are the share `u` in (0, 1); the environment gets `low + u * (high - low)`. With concentrations `alpha`
    and `beta` of at least 1, as `from_head` makes them, the density has one peak.
    """

    action_dtype = torch.float32

    def __init__(self, low: Bounds, high: Bounds) -> None:
        self.low, self.high = finite_bounds(low, high, "a Beta distribution")
        width = self.high - self.low
        self._constants = DeviceConstants(low=self.low, high=self.high, width=width, log_volume=np.log(width).sum())
        self.num_actions = self.low.size
        self.action_shape = (self.num_actions,)
        self.param_shapes = {"alpha": self.action_shape, "beta": self.action_shape}

    def from_head(self, head: Tensor) -> Params:
        """Concentrations from a network's output (..., 2 A); zeros give 1 + log 2 each, a broad symmetric peak."""
        head = head.to(promote_types(head.dtype, torch.float32))
        alpha, beta = (1.0 + F.softplus(head)).chunk(2, dim=-1)
        return {"alpha": alpha, "beta": beta}

    @torch.no_grad()
    def sample(self, params: Params, generator: Generator | None = None) -> Tensor:
        """Draw one action per row of the parameters, without gradient."""
        # Two gamma draws over their sum, in one kernel that uses the generator and never waits for the host.
        pair = sample_dirichlet(torch.stack(_concentrations(params), -1), generator)
        return pair[..., 0].clamp(EDGE, 1.0 - EDGE)

    def mode(self, params: Params) -> Tensor:
        """The mean, since a flat density has no peak."""
        alpha, beta = _concentrations(params)
        return alpha / (alpha + beta)

    def log_prob(self, params: Params, actions: Tensor) -> Tensor:
        """Log-density of the environment's action `low + u * (high - low)`, (...,)."""
        alpha, beta = _concentrations(params)
        check_width(actions, alpha)
        log_density = (alpha - 1) * actions.log() + (beta - 1) * torch.log1p(-actions) - _log_norm(alpha, beta)
        return log_density.sum(-1) - self._constants(actions.device)["log_volume"]

    def entropy(self, params: Params) -> Tensor:
        """Entropy of the environment's action in nats, (...,)."""
        alpha, beta = _concentrations(params)
        both = alpha + beta
        spread = (alpha - 1) * torch.digamma(alpha) + (beta - 1) * torch.digamma(beta) - (both - 2) * both.digamma()
        return (_log_norm(alpha, beta) - spread).sum(-1) + self._constants(alpha.device)["log_volume"]

    def kl(self, old: Params, new: Params) -> Tensor:
        """Exact KL(old || new), (...,)."""
        (alpha, beta), (alpha_new, beta_new) = _concentrations(old), _concentrations(new)
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
        alpha, beta = _concentrations(params)
        fixed = self._constants(alpha.device)
        stretch: list[td.Transform] = [td.AffineTransform(fixed["low"], fixed["width"])]
        return td.TransformedDistribution(td.Beta(alpha, beta, validate_args=False), stretch, validate_args=False)


class Categorical(ActionDistribution):
    """One choice out of `n`, with parameter `logits`; a logit of -inf forbids a choice."""

    action_dtype = torch.int64

    def __init__(self, n: int) -> None:
        self.action_shape: tuple[int, ...] = ()
        self.param_shapes = {"logits": (n,)}

    @torch.no_grad()
    def sample(self, params: Params, generator: Generator | None = None) -> Tensor:
        """Draw one choice per row (Gumbel-max)."""
        logits = params["logits"]
        noise = torch.empty(logits.shape, dtype=promote_types(logits.dtype, torch.float32), device=logits.device)
        return (logits - noise.exponential_(generator=generator).clamp_min(1e-30).log()).argmax(-1)

    def mode(self, params: Params) -> Tensor:
        """The likeliest choice."""
        return params["logits"].argmax(-1)

    def log_prob(self, params: Params, actions: Tensor) -> Tensor:
        """Log-probability of the choices, (...,)."""
        logits = params["logits"]
        log_probs = F.log_softmax(logits, -1, dtype=promote_types(logits.dtype, torch.float32)).clamp_min(LOWEST)
        return log_probs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: Params) -> Tensor:
        """Entropy in nats, (...,)."""
        logits = params["logits"]
        log_probs = F.log_softmax(logits, -1, dtype=promote_types(logits.dtype, torch.float32)).clamp_min(LOWEST)
        return -(log_probs.exp() * log_probs).sum(-1)

    def kl(self, old: Params, new: Params) -> Tensor:
        """Exact KL(old || new), (...,)."""
        dtype = promote_types(new["logits"].dtype, torch.float32)
        log_old = F.log_softmax(old["logits"], -1, dtype=dtype).clamp_min(LOWEST)
        log_new = F.log_softmax(new["logits"], -1, dtype=dtype).clamp_min(LOWEST)
        return (log_old.exp() * (log_old - log_new)).sum(-1)

    def torch_distribution(self, params: Params) -> td.Distribution:
        """`torch.distributions.Categorical`."""
        logits = params["logits"]
        return td.Categorical(logits=logits.to(promote_types(logits.dtype, torch.float32)), validate_args=False)


class MultiCategorical(Categorical):
    """Several independent choices at once; `logits` holds those of every choice one after the other."""

    def __init__(self, nvec: Sequence[int]) -> None:
        self.nvec = [int(n) for n in nvec]
        super().__init__(sum(self.nvec))
        self.action_shape = (len(self.nvec),)

    def _padded(self, params: Params) -> Params:
        """Logits (..., sum nvec) -> (..., choices, widest), where -inf fills the narrower choices."""
        widest, parts = max(self.nvec), params["logits"].split(self.nvec, dim=-1)
        rows = [F.pad(part, (0, widest - part.shape[-1]), value=-math.inf) for part in parts]
        return {"logits": torch.stack(rows, dim=-2)}

    def sample(self, params: Params, generator: Generator | None = None) -> Tensor:
        """Draw every choice of each row (Gumbel-max)."""
        return super().sample(self._padded(params), generator)

    def mode(self, params: Params) -> Tensor:
        """The likeliest choices."""
        return super().mode(self._padded(params))

    def log_prob(self, params: Params, actions: Tensor) -> Tensor:
        """Log-probability of all choices together, (...,)."""
        return super().log_prob(self._padded(params), actions).sum(-1)

    def entropy(self, params: Params) -> Tensor:
        """Entropy of all choices together in nats, (...,)."""
        return super().entropy(self._padded(params)).sum(-1)

    def kl(self, old: Params, new: Params) -> Tensor:
        """Exact KL(old || new), (...,)."""
        return super().kl(self._padded(old), self._padded(new)).sum(-1)

    def torch_distribution(self, params: Params) -> td.Distribution:
        """An `Independent` over `Categorical`, so that its log-probability is that of the whole action."""
        return td.Independent(super().torch_distribution(self._padded(params)), 1, validate_args=False)


# Distributions of a Box by name.
BOX_DISTRIBUTIONS: dict[str, Callable[[spaces.Box], ActionDistribution]] = {
    "gaussian": lambda box: Gaussian(math.prod(box.shape)),
    "squashed": lambda box: SquashedGaussian(box.low, box.high),
    "beta": lambda box: Beta(box.low, box.high),
}


def distribution_for(action_space: spaces.Space, squash: bool = False, name: str | None = None) -> ActionDistribution:
    """The distribution of an action space; for a Box by `name`, or if None "squashed" or "gaussian" by `squash`."""
    if name is not None and name not in BOX_DISTRIBUTIONS:
        raise ValueError(f"no action distribution {name!r}; a Box can have {', '.join(BOX_DISTRIBUTIONS)}")
    if name is not None and squash and name != "squashed":
        raise ValueError(f"squash_actions means 'squashed', but action_distribution is {name!r}; give one of them")
    if isinstance(action_space, spaces.Box):
        return BOX_DISTRIBUTIONS[name or ("squashed" if squash else "gaussian")](action_space)
    if name is not None:
        raise ValueError(f"action_distribution={name!r} is for a Box; {action_space} is always categorical")
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
    if not bool((std > 0).all() and std.isfinite().all()):
        raise ValueError(f"init_noise_std must be positive and finite, got {init_noise_std}")
    return std.expand(num_actions).clone()


def bounded_std(raw: Tensor, noise_std_type: str = "scalar", min_std: Any = None, max_std: Any = None) -> Tensor:
    """The standard deviation of the parameter `raw` (the std itself, or its logarithm), kept within bounds."""
    if noise_std_type not in ("scalar", "log"):
        raise ValueError(f"noise_std_type is 'scalar' or 'log', got {noise_std_type!r}")
    free = raw.exp() if noise_std_type == "log" else raw
    held = free.detach().clamp_min(SMALLEST_STD if min_std is None else min_std)
    if max_std is not None:
        held = held.clamp_max(max_std)
    # A plain clamp would have zero gradient outside its bounds.
    return held + (free - free.detach()) if torch.is_grad_enabled() else held


@torch.no_grad()
def clip_std_parameter(module: nn.Module, low: Any, high: Any) -> None:
    """Clamp a module's own parameter `std` or `log_std` in place to bounds of the standard deviation."""
    for name, raw in module.named_parameters(recurse=False):
        if name in ("std", "log_std"):
            for side, bound in (("min", low), ("max", high)):
                if isinstance(bound, (int, float)):  # a number stays a number, which costs no copy
                    raw.clamp_(**{side: math.log(max(bound, 1e-38)) if name == "log_std" else bound})
                elif bound is not None:
                    tensor = torch.as_tensor(bound, dtype=raw.dtype, device=raw.device)
                    raw.clamp_(**{side: tensor.log() if name == "log_std" else tensor})


class DeviceConstants:
    """Fixed numbers as float32 tensors, copied once to each device on which they are used."""

    def __init__(self, **values: np.ndarray) -> None:
        self._host = values
        self._on_device: dict[torch.device, dict[str, Tensor]] = {}

    def __call__(self, device: torch.device) -> dict[str, Tensor]:
        """Every constant by name."""
        if device not in self._on_device:
            with torch.inference_mode(False):  # a constant made by a rollout must serve a backward pass later
                made = {name: torch.as_tensor(v, dtype=torch.float32, device=device) for name, v in self._host.items()}
            self._on_device[device] = made
        return self._on_device[device]


def check_width(actions: Tensor, params: Tensor) -> None:
    """Raise unless actions have the width of their parameters (..., A): (N,) and (N, 1) would give a matrix."""
    if actions.shape[-1:] != params.shape[-1:]:
        raise ValueError(f"actions must have shape (..., {params.shape[-1]}), got {tuple(actions.shape)}")


def finite_bounds(low: Bounds, high: Bounds, owner: str) -> tuple[np.ndarray, np.ndarray]:
    """Flat float64 bounds; `owner` is named in the error if they are not finite."""
    bounds = np.stack([np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)]).reshape(2, -1)
    if not np.isfinite(bounds).all() or not (bounds[0] < bounds[1]).all():
        raise ValueError(f"{owner} needs finite bounds, low < high, got {low=!s}, {high=!s}; bound the action space")
    return bounds[0], bounds[1]


def _concentrations(params: Params) -> tuple[Tensor, Tensor]:
    """Alpha and beta, at least in float32."""
    dtype = promote_types(params["alpha"].dtype, torch.float32)
    return params["alpha"].to(dtype), params["beta"].to(dtype)


def _log_norm(alpha: Tensor, beta: Tensor) -> Tensor:
    """Logarithm of the Beta function B(alpha, beta), the normalising constant of the density."""
    return torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)


def _log_tanh_slope(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2) without cancellation: -2 |u| + 2 log 2 far out, where the direct form is log(0)."""
    return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
