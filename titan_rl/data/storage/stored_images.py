"""Images of recorded rollouts: PNG, which keeps the pixels as they are, and where their tokens stand."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from titan_rl.data.images import MOST_PIXELS, ImageProcessor, PlacedImage

IMAGES = pa.list_(pa.struct({"start": pa.int32(), "rows": pa.int32(), "columns": pa.int32(), "png": pa.binary()}))


def image_rows(images: Sequence[PlacedImage]) -> list[dict[str, Any]] | None:
    """Values of ``IMAGES``; None of no image."""
    return [
        {"start": image.start, "rows": image.grid[0], "columns": image.grid[1], "png": image.png} for image in images
    ] or None


def images_of(rows: list[dict[str, Any]] | None) -> tuple[PlacedImage, ...]:
    """Errors: ValueError for what is no such image."""
    return tuple(PlacedImage(_pixels(row["png"]), (row["rows"], row["columns"]), row["start"]) for row in rows or ())


def _pixels(png: bytes) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            if image.mode != "RGB" or image.width * image.height > MOST_PIXELS:
                raise ValueError(f"an image of {image.width} x {image.height} pixels in mode {image.mode}")
            return np.asarray(image)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"an image that cannot be read: {error}") from None


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
