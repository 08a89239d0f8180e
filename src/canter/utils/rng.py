"""Random number generators: seed them together, and put their states into a checkpoint and back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Seed python's, numpy's and torch's global generators, on every device."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {seed}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # also seeds every CUDA device, now or when CUDA starts


def rng_state() -> dict[str, Any]:
    """The state of every global generator, in plain containers and tensors."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        # int64 because torch cannot store numpy's uint32 portably
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue every global generator from what `rng_state` returned; devices that are not here are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        for device, device_state in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(device_state.cpu(), device)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Whatever is drawn inside from the global generators, they go on as if it had not been."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def generator_state(generator: torch.Generator | np.random.Generator) -> Tensor | dict[str, Any]:
    """The state of one explicit generator, in plain containers and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return _to_plain(generator.bit_generator.state)


def set_generator_state(generator: torch.Generator | np.random.Generator, state: Tensor | dict[str, Any]) -> None:
    """Continue `generator` from what `generator_state` returned."""
    if isinstance(generator, torch.Generator):
        if not isinstance(state, Tensor):
            raise TypeError(f"a torch.Generator's state is a tensor, got {type(state).__name__}")
        generator.set_state(state.cpu())
        return
    if isinstance(state, Tensor):
        raise TypeError("a numpy Generator's state is a dict, got a tensor")
    generator.bit_generator.state = _from_plain(state)


def _to_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value if isinstance(value, str) else int(value)


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_plain(part) for key, part in value.items()}
    # uint64 holds the words of every bit generator; the setter narrows them where it needs to.
    return np.array(value, dtype=np.uint64) if isinstance(value, list) else value
