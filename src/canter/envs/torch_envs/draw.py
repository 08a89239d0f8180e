"""Small images of torch-native environments; points are (x, y) in [-1, 1], y upwards."""

from __future__ import annotations

import numpy as np

BLACK, GREY, RED, GREEN, BLUE = (30, 30, 30), (170, 170, 170), (200, 60, 50), (60, 150, 80), (60, 90, 200)
Point = tuple[float, float]


def canvas(height: int, width: int) -> np.ndarray:
    """A white (H, W, 3) uint8 image."""
    return np.full((height, width, 3), 255, np.uint8)


def line(image: np.ndarray, start: Point, end: Point, colour: tuple[int, int, int], thickness: float) -> None:
    """A straight stroke, `thickness` pixels wide."""
    size = np.array(image.shape[:2]) - 1
    a, b = (np.array([1 - y, 1 + x]) / 2 * size for x, y in (start, end))
    pixels = np.stack(np.meshgrid(*map(np.arange, image.shape[:2]), indexing="ij"), -1)
    along = np.clip(((pixels - a) @ (b - a)) / max(((b - a) ** 2).sum(), 1e-9), 0, 1)
    distance = np.linalg.norm(pixels - (a + along[..., None] * (b - a)), axis=-1)
    image[distance <= thickness / 2] = colour


def disc(image: np.ndarray, centre: Point, radius: float, colour: tuple[int, int, int]) -> None:
    """A filled circle whose radius is a fraction of the image's half width."""
    line(image, centre, centre, colour, radius * image.shape[1])


def arrow(image: np.ndarray, start: Point, vector: Point, colour: tuple[int, int, int]) -> None:
    """A stroke from `start` along `vector`, with a dot at its head."""
    end = (start[0] + vector[0], start[1] + vector[1])
    line(image, start, end, colour, 2)
    disc(image, end, 0.03, colour)
