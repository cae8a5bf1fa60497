"""Images of a prompt: decoded and resized once, and laid out for a vision tower from the same bytes everywhere.

A prompt's encoded images are read where its tokens are made. What then travels, is recorded and is trained on are the
resized pixels, so that generator and trainer see one image.

Dimensions: H x W pixels, N patches of D numbers, T tokens of a rollout.
"""

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_rl.config.model_directory.config_checks import VISION
from titan_rl.config.model_directory.directory import read_object
from titan_rl.config.model_directory.vision_checks import limited, read_image_form
from titan_rl.config.sections.role_sections import ImagesConfig

if TYPE_CHECKING:
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

FORMATS = ("PNG", "JPEG", "WEBP")
"""Encodings that are read."""
MOST_PIXELS = 1 << 26
"""Of an image before it is resized."""
_ASPECT = 200


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """Image of a prompt, and where its tokens stand."""

    pixels: np.ndarray
    """uint8 [H, W, 3], resized."""
    grid: tuple[int, int]
    """Rows and columns of its tokens."""
    start: int
    """Of its first token."""

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @cached_property
    def digest(self) -> str:
        """Of the pixels and their shape."""
        return hashlib.sha256(repr(self.pixels.shape).encode() + self.pixels.tobytes()).hexdigest()

    @cached_property
    def png(self) -> bytes:
        """The pixels, encoded without loss."""
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(self.pixels).save(file, "PNG")
        return file.getvalue()

    def moved(self, places: int) -> "PlacedImage":
        """The image with its tokens so many places further on."""
        return replace(self, start=self.start + places)


@dataclass(frozen=True)
class ImageProcessor:
    """A vision model's form of images."""

    form: Mapping[str, Any]
    """Settings of the image processor, as preprocessor_config.json has them."""
    token: int
    """Id of the token that stands for a part of an image."""
    around: tuple[int, int]
    """Ids of the tokens before and behind an image."""

    @cached_property
    def _processor(self) -> "Qwen2VLImageProcessorPil":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor = Qwen2VLImageProcessorPil.from_dict(dict(self.form))
        assert isinstance(processor, Qwen2VLImageProcessorPil), "unused settings are not asked for"
        return processor

    @property
    def cell(self) -> int:
        """Pixels of a token's side."""
        return self._processor.patch_size * self._processor.merge_size

    @property
    def most_tokens(self) -> int:
        """Of one image."""
        size = self._processor.size
        return int(size["longest_edge"]) // self.cell**2

    def decode(self, data: bytes) -> np.ndarray:
        """Encoded image as resized pixels, uint8 [H, W, 3].

        Errors: ValueError for what is no image of ``FORMATS``, or too large.
        """
        from PIL import Image, ImageOps, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise ValueError(f"has {image.width} x {image.height} pixels, and at most {MOST_PIXELS:,} are read")
                if image.mode.startswith(("I", "F")):
                    raise ValueError(f"has pixels of mode {image.mode}: give eight bits a color")
                upright = ImageOps.exif_transpose(image)  # as vLLM and datasets show it
                height, width = self._resized(upright.height, upright.width)
                pixels = _on_white(upright).resize((width, height), Image.Resampling.BICUBIC)
        except UnidentifiedImageError:
            raise ValueError(f"is no image of {', '.join(FORMATS)}") from None
        except ValueError:
            raise
        except Exception as error:  # made-up bytes may raise anything
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(f"cannot be read: {reason}") from None
        if width * height > self.most_tokens * self.cell**2:
            raise ValueError(f"would have more than {self.most_tokens} tokens, the most of max_pixels")
        return np.asarray(pixels)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        if max(height, width) > _ASPECT * min(height, width):
            raise ValueError(f"is {width} x {height} pixels: one side is more than {_ASPECT} times the other")
        size = self._processor.size
        return smart_resize(height, width, self.cell, int(size["shortest_edge"]), int(size["longest_edge"]))

    def grid(self, pixels: np.ndarray) -> tuple[int, int]:
        """Rows and columns of an image's tokens. Errors: ValueError for pixels that were not resized so."""
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise ValueError(f"has pixels {pixels.shape} of {pixels.dtype}, not [height, width, 3] of uint8")
        height, width, _ = pixels.shape
        if not height or not width or height % self.cell or width % self.cell:
            raise ValueError(f"has {width} x {height} pixels, and a token stands for {self.cell} x {self.cell}")
        return height // self.cell, width // self.cell

    def patches(self, images: Sequence[PlacedImage]) -> tuple[np.ndarray, np.ndarray]:
        """Inputs of the vision tower: float32 [N, D] of all images, and int64 [images, 3], frames, rows and columns of
        patches."""
        features = self._processor.preprocess([image.pixels for image in images], do_resize=False, return_tensors="np")
        return features["pixel_values"], features["image_grid_thw"]

    def behind_images(self, tokens_T: np.ndarray, count: int) -> np.ndarray:
        """Tokens of plain text behind so many images, of one token each."""
        before, behind = self.around
        return np.concatenate([np.tile([before, self.token, behind], count), tokens_T]).astype(np.int32)

    def expand(self, tokens_T: np.ndarray, images: Sequence[np.ndarray]) -> tuple[np.ndarray, list[PlacedImage]]:
        """Tokens with as many of each image's as it has, from one a piece, and the images in their places.

        Errors: ValueError where there are not as many as images.
        """
        marks = np.flatnonzero(tokens_T == self.token)
        if len(marks) != len(images):
            raise ValueError(f"has {len(images)} images, and the chat template writes {len(marks)}")
        grids = [self.grid(pixels) for pixels in images]
        counts = np.ones(len(tokens_T), np.int64)
        counts[marks] = [rows * columns for rows, columns in grids]
        starts = np.cumsum(counts)[marks] - counts[marks]
        placed = [PlacedImage(*each) for each in zip(images, grids, starts.tolist(), strict=True)]
        return np.repeat(tokens_T, counts), placed


def _on_white(image: "Image.Image") -> "Image.Image":
    """An image in RGB, with white behind what is transparent, as vLLM shows it."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    shown = image.convert("RGBA")
    behind = Image.new("RGBA", shown.size, "white")
    return Image.alpha_composite(behind, shown).convert("RGB")


UNLIMITED = ImagesConfig()
"""But by the model itself."""


def image_processor(path: str | Path, images: ImagesConfig = UNLIMITED) -> ImageProcessor | None:
    """Of a model directory, with a run's limits; None if the model sees no images, or is not there yet."""
    config = _config(path)
    if config.get("model_type") not in VISION:
        return None
    return image_processor_of(config, limited(read_image_form(Path(path)), images))


def sees_images(path: str | Path) -> bool:
    """Whether the model of a directory does."""
    return _config(path).get("model_type") in VISION


def _config(path: str | Path) -> dict[str, Any]:
    file = Path(path) / "config.json"
    return read_object(file) if file.is_file() else {}


def image_processor_of(config: Mapping[str, Any], form: Mapping[str, Any]) -> ImageProcessor:
    """By config.json and preprocessor_config.json."""
    around = config["vision_start_token_id"], config["vision_end_token_id"]
    return ImageProcessor(form, config["image_token_id"], around)


_LISTED = 8
"""Images of a prompt whose sizes are written out."""


def sizes_in_words(images: Sequence[PlacedImage]) -> str:
    """Sizes of images as the model sees them, for people: ``32 x 24 pixels (12 tokens), ...``."""
    sizes = [f"{i.pixels.shape[1]} x {i.pixels.shape[0]} pixels ({i.num_tokens} tokens)" for i in images[:_LISTED]]
    more = [f"{len(images) - _LISTED} more"] if len(images) > _LISTED else []
    return ", ".join(sizes + more)


def question_key(text: str, images: Sequence[bytes]) -> str:
    """What tells questions apart: the text, and what is shown beside it."""
    if not images:
        return text
    digests = (hashlib.sha256(image).hexdigest() for image in images)
    return " ".join([text, *digests])


def rope_positions(num_tokens: int, images: Sequence[PlacedImage]) -> np.ndarray:
    """Positions of a sample's tokens: int64 [T, 3], of time, row and column.

    Source: M-RoPE, Qwen2-VL, arXiv 2409.12191, section 2.1: text counts on behind the largest position of an image.
    """
    parts = list(_positions(num_tokens, images))
    return np.concatenate(parts) if parts else np.zeros((0, 3), np.int64)


def _positions(num_tokens: int, images: Sequence[PlacedImage]) -> Iterator[np.ndarray]:
    place = position = 0
    for image in images:
        yield _text(position, image.start - place)
        position += image.start - place
        rows, columns = image.grid
        row, column = np.divmod(np.arange(image.num_tokens), columns)
        yield position + np.stack([np.zeros_like(row), row, column], axis=1)
        place, position = image.stop, position + max(rows, columns)
    yield _text(position, num_tokens - place)


def _text(position: int, count: int) -> np.ndarray:
    return np.repeat(np.arange(position, position + count)[:, None], 3, axis=1)
