"""Unit quaternions (x, y, z, w): the few operations that motion clips need."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def slerp(start: Tensor, end: Tensor, blend: Tensor) -> Tensor:
    """The rotation at `blend` (..., 1) in [0, 1] on the short way from `start` to `end` (..., 4)."""
    dot = (start * end).sum(-1, keepdim=True)
    end = torch.where(dot < 0, -end, end)  # q and -q are one rotation; the nearer of the two is the short way
    dot = dot.abs().clamp(max=1.0)
    angle = torch.acos(dot)
    sine = torch.sin(angle)
    is_tiny = sine < 1e-6
    safe = torch.where(is_tiny, torch.ones_like(sine), sine)
    first = torch.where(is_tiny, 1 - blend, torch.sin((1 - blend) * angle) / safe)
    second = torch.where(is_tiny, blend, torch.sin(blend * angle) / safe)
    return torch.nn.functional.normalize(first * start + second * end, dim=-1)


def standardize(rotations: np.ndarray, what: str, tolerance: float = 1e-2) -> np.ndarray:
    """Unit quaternions (..., 4) with w >= 0; ValueError if the given ones are not nearly of length 1."""
    norms = np.linalg.norm(rotations, axis=-1, keepdims=True)
    if np.abs(norms - 1).max() > tolerance:
        worst = int(np.abs(norms - 1).reshape(len(rotations), -1).max(-1).argmax())
        raise ValueError(
            f"{what} of frame {worst} is no rotation: its length is {float(norms[worst].max()):.3f}, not 1"
        )
    unit = rotations / norms
    return np.where(unit[..., 3:] < 0, -unit, unit)


def conjugate(rotations: np.ndarray) -> np.ndarray:
    """The inverse rotations."""
    return rotations * np.array([-1.0, -1.0, -1.0, 1.0])


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The rotation b followed by a."""
    av, aw, bv, bw = a[..., :3], a[..., 3:], b[..., :3], b[..., 3:]
    vector = aw * bv + bw * av + np.cross(av, bv)
    return np.concatenate([vector, aw * bw - (av * bv).sum(-1, keepdims=True)], -1)


def rotate_back(rotations: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """World vectors as seen from the rotated frame."""
    zero = np.zeros((*vectors.shape[:-1], 1))
    pure = np.concatenate([vectors, zero], -1)
    return multiply(multiply(conjugate(rotations), pure), rotations)[..., :3]


def rotation_vector(rotations: np.ndarray) -> np.ndarray:
    """Axis times angle (rad), the angle at most pi."""
    signed = np.where(rotations[..., 3:] < 0, -rotations, rotations)
    length = np.linalg.norm(signed[..., :3], axis=-1, keepdims=True)
    angle = 2 * np.arctan2(length, signed[..., 3:])
    return signed[..., :3] * np.where(length < 1e-9, 2.0, angle / np.maximum(length, 1e-12))


def velocity_of(values: np.ndarray, dt: float) -> np.ndarray:
    """Derivative by central differences, one-sided at both ends."""
    return np.gradient(values, dt, axis=0)


def angular_velocity_of(rotations: np.ndarray, dt: float) -> np.ndarray:
    """World angular velocity (rad/s) by central differences, one-sided at both ends."""
    later, earlier = np.r_[1 : len(rotations), len(rotations) - 1], np.r_[0, 0 : len(rotations) - 1]
    spans = (later - earlier)[:, None] * dt
    return rotation_vector(multiply(rotations[later], conjugate(rotations[earlier]))) / spans
