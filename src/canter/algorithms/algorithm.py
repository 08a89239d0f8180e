"""What every algorithm has in common: saving, loading, modes, and the documented short cuts to a runner."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from canter.algorithms.foreign import import_state
from canter.algorithms.settings import CommonRunSettings
from canter.execution.executor import Executor
from canter.utils.checkpoint import check_compatible

# Part of a policy -> how to have none of it, and how to have it.
NORMALIZERS = {
    "obs_normalizer": ("empirical_normalization=False", "empirical_normalization=True"),
    "critic_obs_normalizer": ("empirical_normalization=False", "empirical_normalization=True"),
    "value_normalizer": ("value_normalization='off'", "value_normalization='running' or 'popart'"),
}


class Algorithm:
    """Settings plus loss terms; what is saved is the table `checkpoint_parts`."""

    device: Any
    executor: Executor
    generators: dict[str, torch.Generator]
    learning_rate: float
    current_learning_iteration: int

    def checkpoint_parts(self) -> dict[str, Any]:
        """Name in the checkpoint -> the object whose state it is. Extended by subclasses."""
        raise NotImplementedError

    def take_settings(self, cfg: Any) -> None:
        """The settings in `cfg` that are the algorithm's; one given to the constructor as well is an error."""
        shared = {f.name for f in dataclasses.fields(cfg)} - {f.name for f in dataclasses.fields(CommonRunSettings)}
        for f in (f for f in dataclasses.fields(self) if f.name in shared):  # pyright: ignore[reportArgumentType]
            if getattr(self, f.name) != f.default:
                raise ValueError(f"give {f.name} in cfg, not beside it")
            setattr(self, f.name, getattr(cfg, f.name))
        for name in ("seed", "device"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(cfg, name, None))

    def modules(self) -> list[nn.Module]:
        """Every network that has a training mode."""
        return [part for part in self.checkpoint_parts().values() if isinstance(part, nn.Module)]

    def train_mode(self) -> None:
        """Networks and normalisers learn."""
        for module in self.modules():
            module.train()

    def eval_mode(self) -> None:
        """Networks and normalisers stand still."""
        for module in self.modules():
            module.eval()

    def state_dict(self) -> dict[str, Any]:
        """The state of every part, and the learning rate."""
        state: dict[str, Any] = {name: part.state_dict() for name, part in self.checkpoint_parts().items()}
        return state | {"learning_rate": self.learning_rate}

    def load_state_dict(self, state: Mapping[str, Any], load_optimizer: bool = True) -> None:
        """Take over a saved state: all of it, or none and an error that names every difference."""
        parts = self.checkpoint_parts()
        state = import_state(state)
        if "lr_scheduler_state_dict" in state and "lr_scheduler_state_dict" not in parts:
            warnings.warn(
                "the checkpoint has a learning-rate scheduler, this algorithm has none: ignored", stacklevel=2
            )
        usable = {}
        for name, part in parts.items():
            is_optimizer = "optimizer" in name
            if is_optimizer and not load_optimizer:
                continue
            if name not in state:
                if name == "model_state_dict":
                    raise ValueError(f"the checkpoint has no model_state_dict; it has {', '.join(state)}")
                warnings.warn(f"the checkpoint has no {name}: it keeps its fresh state", stacklevel=2)
                continue
            self._check_part(name, part, state[name])
            usable[name] = part
        for name, part in usable.items():
            part.load_state_dict(state[name])
        self.executor.forget()  # graphs hold the moments that were replaced
        self._after_load(state, load_optimizer)

    def _check_part(self, name: str, part: Any, state: Mapping[str, Any]) -> None:
        if isinstance(part, nn.Module):
            owner = type(part).__name__
            for normalizer, setting in NORMALIZERS.items():
                ours = any(key.startswith(f"{normalizer}.") for key in part.state_dict())
                theirs = any(key.startswith(f"{normalizer}.") for key in state)
                if ours != theirs:
                    has = "has" if theirs else "lacks"
                    raise ValueError(
                        f"the checkpoint {has} statistics for {normalizer}, {owner} does the opposite: "
                        f"set {setting[theirs]}"
                    )
            check_compatible(part.state_dict(), state, owner)
        elif hasattr(part, "check_state"):
            part.check_state(state)

    def _after_load(self, state: Mapping[str, Any], load_optimizer: bool) -> None:
        """What else follows from a loaded state."""

    def resume_state(self) -> dict[str, Any]:
        """What exact continuation needs beyond the learned state."""
        return {"generators": {name: generator.get_state() for name, generator in self.generators.items()}}

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `resume_state` was taken."""
        for name, value in state["generators"].items():
            self.generators[name].set_state(value.cpu())

    # ------------------------------------------------------------------ short cuts to a runner
    env: Any = None
    _runner: Any = None

    def runner(self) -> Any:
        """A runner of this algorithm and its environment."""
        raise NotImplementedError

    def learn(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see the runner's `learn`."""
        return self.runner().learn(*args, **kwargs)

    def eval(self, num_episodes: int = 10) -> dict[str, float]:
        """Evaluate; see the runner's `eval`."""
        return self.runner().eval(num_episodes)

    def save(self, path: str) -> None:
        """Write a checkpoint."""
        self.runner().save(path)

    def load(self, path: str) -> Any:
        """Read a checkpoint."""
        return self.runner().load(path)
