"""Running statistics of returns, so that a critic can learn numbers of order one whatever the rewards are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from canter.modules.normalizer import EmpiricalNormalization

VALUE_NORMALIZATIONS = ("off", "running", "popart")


class ValueNormalizer(EmpiricalNormalization):
    """The critic says (value - mean) / std; `inverse` gives the value.

    Args:
        layer: The critic's last layer; if given, it is rescaled together with the statistics so that no value changes
            (PopArt, van Hasselt et al. 2016).
        memory: How many rollouts the statistics look back on; returns grow while a policy learns.
        eps: Added to the standard deviation.
    """

    def __init__(self, layer: nn.Linear | None = None, memory: int = 20, eps: float = 1e-4) -> None:
        super().__init__(1, eps)
        self.memory = memory
        self.preserved = () if layer is None else (layer,)  # in a tuple: it is the critic's, not a part of this module

    @property
    def scale(self) -> Tensor:
        """(1,) what a normalised value is multiplied by."""
        return self._std[0] + self.eps

    @torch.no_grad()
    def update(self, x: Tensor, valid: Tensor | None = None) -> None:
        """Learn from the returns (..., 1) of a rollout where `valid` (...) holds; nothing in eval mode."""
        if not self.training:
            return
        rows = torch.full_like(self.count, x.numel()) if valid is None else valid.sum()
        # A rollout weighs at least 1 / memory: what is counted from before is cut down to that.
        recent = torch.minimum(self.count, rows * (self.memory - 1))
        self.count.copy_(torch.where(rows > 0, recent, self.count))
        mean, scale = self.mean, self.scale
        super().update(x, valid)
        for layer in self.preserved:
            layer.bias.copy_((scale * layer.bias + mean - self.mean) / self.scale)
            layer.weight.mul_(scale / self.scale)


def value_layer(policy: nn.Module) -> nn.Linear:
    """The layer whose output is the value: the last one of `policy.critic`."""
    critic = getattr(policy, "critic", None)
    layers = [layer for layer in critic.modules() if isinstance(layer, nn.Linear)] if critic is not None else []
    if not layers or layers[-1].out_features != 1 or layers[-1].bias is None:
        raise ValueError(
            f"popart rescales the critic's last linear layer, of one output and with a bias; {type(policy).__name__} "
            "has none: use value_normalization='running'"
        )
    return layers[-1]


def install_value_normalizer(policy: nn.Module, kind: str) -> None:
    """Let the policy's critic speak in normalised values; one that does already keeps its statistics."""
    if kind == "off":
        return
    layer = value_layer(policy) if kind == "popart" else None
    fresh = ValueNormalizer(layer).to(next(policy.parameters()).device)
    if isinstance(policy.value_normalizer, ValueNormalizer):
        fresh.load_state_dict(policy.value_normalizer.state_dict())
    policy.value_normalizer = fresh
