"""Small pictures of torch-native environments; points are (x, y) in [-1, 1], y upwards."""

from __future__ import annotations

import numpy as np

BLACK, GREY, RED, GREEN, BLUE = (30, 30, 30), (170, 170, 170), (200, 60, 50), (60, 150, 80), (60, 90, 200)
Point = tuple[float, float]


def canvas(height: int, width: int) -> np.ndarray:
    """A white (H, W, 3) uint8 picture."""
    return np.full((height, width, 3), 255, np.uint8)


def _pixel(picture: np.ndarray, point: Point) -> tuple[float, float]:
    height, width = picture.shape[:2]
    return (1 - point[1]) / 2 * (height - 1), (1 + point[0]) / 2 * (width - 1)


def line(picture: np.ndarray, start: Point, end: Point, colour: tuple[int, int, int], thickness: float) -> None:
    """A straight stroke, `thickness` pixels wide."""
    a, b = np.array(_pixel(picture, start)), np.array(_pixel(picture, end))
    pixels = np.stack(np.meshgrid(*map(np.arange, picture.shape[:2]), indexing="ij"), -1)
    along = np.clip(((pixels - a) @ (b - a)) / max(((b - a) ** 2).sum(), 1e-9), 0, 1)
    distance = np.linalg.norm(pixels - (a + along[..., None] * (b - a)), axis=-1)
    picture[distance <= thickness / 2] = colour


def disc(picture: np.ndarray, centre: Point, radius: float, colour: tuple[int, int, int]) -> None:
    """A filled circle whose radius is a fraction of the picture's half width."""
    line(picture, centre, centre, colour, radius * picture.shape[1])


def arrow(picture: np.ndarray, start: Point, vector: Point, colour: tuple[int, int, int]) -> None:
    """A stroke from `start` along `vector`, with a dot at its head."""
    end = (start[0] + vector[0], start[1] + vector[1])
    line(picture, start, end, colour, 2)
    disc(picture, end, 0.03, colour)
