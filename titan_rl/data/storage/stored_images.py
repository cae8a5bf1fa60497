"""Images of recorded rollouts: PNG, which keeps the pixels as they are, and where their tokens stand."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from titan_rl.data.images import MOST_PIXELS, ImageProcessor, PlacedImage

IMAGES = pa.list_(pa.struct({"start": pa.int32(), "rows": pa.int32(), "columns": pa.int32(), "png": pa.binary()}))
_MOST_CELL = 256
"""Pixels of a token's side."""


def image_rows(images: Sequence[PlacedImage]) -> list[dict[str, Any]] | None:
    """Values of ``IMAGES``; None of no image."""
    return [
        {"start": image.start, "rows": image.grid[0], "columns": image.grid[1], "png": image.png} for image in images
    ] or None


def images_of(rows: list[dict[str, Any]] | None, num_tokens: int) -> tuple[PlacedImage, ...]:
    """Images of a rollout of so many tokens. Errors: ValueError for what is no such image."""
    images: list[PlacedImage] = []
    for row in rows or ():
        start, grid = row["start"], (row["rows"], row["columns"])
        end = images[-1].stop if images else 0
        if min(grid) < 1 or not end <= start <= start + grid[0] * grid[1] <= num_tokens:
            raise ValueError(f"an image at token {start} of {grid[0]} x {grid[1]}, of {num_tokens} tokens")
        images.append(PlacedImage(_pixels(row["png"], grid), grid, start))
    return tuple(images)


def _pixels(png: bytes, grid: tuple[int, int]) -> np.ndarray:
    from PIL import Image

    most = min(MOST_PIXELS, grid[0] * grid[1] * _MOST_CELL**2)
    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            if image.mode != "RGB" or image.width * image.height > most:
                raise ValueError(f"an image of {image.width} x {image.height} pixels in mode {image.mode}")
            return np.asarray(image)
    except ValueError:
        raise
    except Exception as error:  # made-up bytes may raise anything
        raise ValueError(f"an image that cannot be read: {error}") from None


def check_covered(
    tokens_T: np.ndarray, is_prompt_T: np.ndarray, images: Sequence[PlacedImage], processor: ImageProcessor | None
) -> None:
    """Check that all tokens of images in a prompt have one. Errors: ValueError."""
    if processor is None:
        return
    count = int(((tokens_T == processor.token) & is_prompt_T).sum())
    if count != (shown := sum(image.num_tokens for image in images)):
        raise ValueError(f"{count} tokens of images, and images of {shown}")


def check_images(tokens_T: np.ndarray, images: Sequence[PlacedImage], processor: ImageProcessor | None) -> None:
    """Check of a rollout's images against the model's form of them.

    Errors: ValueError for images elsewhere than their tokens, or of another form.
    """
    if processor is None:
        if images:
            raise ValueError(f"{len(images)} images, and the model sees none")
        return
    end = 0
    for image in images:
        if image.grid != processor.grid(image.pixels) or not end <= image.start <= image.stop <= len(tokens_T):
            raise ValueError(f"an image at token {image.start} of another form than the model's")
        if (tokens_T[image.start : image.stop] != processor.token).any():
            raise ValueError(f"an image at token {image.start}, where other tokens stand")
        end = image.stop
