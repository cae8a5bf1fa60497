"""What a vision model's directory says of images: the form in which its tower takes them."""

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from titan_rl.config.errors import ConfigError
from titan_rl.config.model_directory.directory import read_object
from titan_rl.config.sections.role_sections import ImagesConfig

_FILES = ("preprocessor_config.json", "processor_config.json")
_SAME = {
    "patch_size": ("patch_size", 14),
    "merge_size": ("spatial_merge_size", 2),
    "temporal_patch_size": ("temporal_patch_size", 2),
}
"""Names in the processor's file, in the tower's table of config.json, and what either is if it is left out."""
_SIZE = {"min_pixels": ("shortest_edge", 56 * 56), "max_pixels": ("longest_edge", 28 * 28 * 1280)}
"""Names of an image's limits in pixels, by themselves and in ``size``, and what they are if they are left out."""
_IDS = ("image_token_id", "vision_start_token_id", "vision_end_token_id")
_MOST_SIDE, _MOST_PIXELS = 1024, 1 << 26


def read_image_form(path: Path) -> dict[str, Any]:
    """The image processor's settings. Errors: ValueError if there are none."""
    return _read(path)[2]


def _read(path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The file with the image processor's settings, all that it holds, and these settings, which may be a part of it.
    Errors: ValueError."""
    for name in _FILES:
        if (path / name).is_file():
            values = read_object(path / name)
            form = values.get("image_processor", values) if name == _FILES[1] else values
            if isinstance(form, dict):
                return path / name, values, form
    raise ValueError(f"it holds no {_FILES[0]}, which says how images are laid out: copy the model's own")


def pixel_limits(form: Mapping[str, Any]) -> tuple[Any, Any]:
    """Fewest and most pixels of an image, by an image processor's settings."""
    size = form.get("size") or {}
    least, most = (
        form[name] if form.get(name) is not None else size.get(edge, default) for name, (edge, default) in _SIZE.items()
    )
    return least, most


def cell_of(form: Mapping[str, Any]) -> int:
    """Pixels of the side of a token's square."""
    return form.get("patch_size", 14) * form.get("merge_size", 2)


def limited(form: Mapping[str, Any], images: ImagesConfig) -> Mapping[str, Any]:
    """An image processor's settings with a run's limits."""
    if not (images.min_pixels or images.max_pixels):
        return form
    least, most = pixel_limits(form)
    edges = (edge for edge, _ in _SIZE.values())
    size = dict(zip(edges, (images.min_pixels or least, images.max_pixels or most), strict=True))
    return {key: value for key, value in form.items() if key not in _SIZE} | {"size": size}


def write_limits(model: Path, images: ImagesConfig) -> None:
    """Write a run's limits into a model directory, so that others show the model images as it learned them.

    Errors: ValueError; OSError."""
    if not (images.min_pixels or images.max_pixels):
        return
    file, values, form = _read(model)
    changed = dict(limited(form, images))
    whole = changed if form is values else values | {"image_processor": changed}
    file.write_text(json.dumps(whole, indent=2) + "\n")


def check_limits(images: ImagesConfig, form: Mapping[str, Any], room: int, reason: str) -> None:
    """Check a run's limits of an image's pixels.

    ``room``: tokens that a prompt may have, and ``reason`` why. Errors: ConfigError."""
    cell = cell_of(form)
    limits = dict(zip(_SIZE, pixel_limits(limited(form, images)), strict=True))
    for name, pixels in limits.items():
        if not getattr(images, name):
            continue
        setting, square = f"model.images.{name} = {pixels}", f"the {cell} x {cell} pixels of a token"
        if name == "max_pixels" and pixels < cell**2:
            raise ConfigError(f"{setting} is less than {square}: give {cell**2} or more")
        if pixels > _MOST_PIXELS:
            raise ConfigError(f"{setting}: give a number of pixels up to {_MOST_PIXELS:,}")
        if (tokens := pixels // cell**2) > room:
            raise ConfigError(
                f"{setting} are {tokens} tokens, of {square} each, and {reason} leaves {room} for prompts: give at "
                f"most {max(room, 1) * cell**2}"
            )
    least, most = limits.values()
    if least > most:
        names = (f"model.images.{name}" if getattr(images, name) else f"{name} of {_FILES[0]}" for name in _SIZE)
        low, high = names
        raise ConfigError(f"{low} = {least} is above {high} = {most}: give a smaller one, or a larger other")


def check_image_form(path: Path, config: dict[str, Any]) -> None:
    """Check of the image processor's settings against a vision model's config.json. Errors: ValueError."""
    form, tower = read_image_form(path), config["vision_config"]
    for ours, (theirs, default) in _SAME.items():
        value, other = form.get(ours, default), tower.get(theirs, default)
        if type(value) is not int or not 1 <= value <= _MOST_SIDE:
            raise ValueError(f"{ours} = {value!r} in {_FILES[0]}: give the number that the model was trained with")
        if other != value:
            raise ValueError(f"{ours} = {value} in {_FILES[0]}, and {theirs} = {other!r} in config.json: both are one")
    for name in ("image_mean", "image_std"):
        if (value := form.get(name)) is not None and not _is_color(value, above=0.0 if name == "image_std" else None):
            raise ValueError(f"{name} = {str(value)[:80]} in {_FILES[0]}: give three numbers")
    for name in ("do_rescale", "do_normalize"):
        if form.get(name, True) is not True:
            raise ValueError(f"{name} = {form[name]!r} in {_FILES[0]}: only true is supported")
    if (factor := form.get("rescale_factor", 1 / 255)) != 1 / 255:
        raise ValueError(f"rescale_factor = {str(factor)[:40]} in {_FILES[0]}: only 1 / 255 is supported")
    _check_size(form, cell_of(form))
    if tower.get("out_hidden_size", config.get("hidden_size")) != config.get("hidden_size"):
        raise ValueError("out_hidden_size of vision_config and hidden_size in config.json differ: copy the model's own")
    ids, size = [config.get(name) for name in _IDS], config.get("vocab_size")
    for name, number in zip(_IDS, ids, strict=True):
        if not (type(number) is int and 0 <= number < (size or 0)) or ids.count(number) > 1:
            raise ValueError(f"{name} = {number!r} in config.json: give a token of its own, below vocab_size = {size}")


def _is_color(value: Any, above: float | None) -> bool:
    is_list = isinstance(value, list) and len(value) == 3
    return is_list and all(
        type(each) in (int, float) and isfinite(each) and (above is None or each > above) for each in value
    )


def _check_size(form: dict[str, Any], cell: int) -> None:
    """``cell``: pixels of a token's side. Errors: ValueError for limits of an image's pixels that are none."""
    size = form.get("size") or {}
    if not isinstance(size, dict) or not set(size) <= {edge for edge, _ in _SIZE.values()}:
        raise ValueError(f"size = {str(size)[:80]} in {_FILES[0]}: give shortest_edge and longest_edge, in pixels")
    if size and len(size) < len(_SIZE):
        raise ValueError(f"size = {size} in {_FILES[0]}: give both shortest_edge and longest_edge, in pixels")
    limits = []
    for name, value in zip(_SIZE, pixel_limits(form), strict=True):
        if type(value) is not int or not 1 <= value <= _MOST_PIXELS:
            raise ValueError(f"{name} = {value!r} in {_FILES[0]}: give a number of pixels up to {_MOST_PIXELS:,}")
        limits.append(value)
    least, most = limits
    if least > most or most < cell**2:
        raise ValueError(
            f"min_pixels = {least} and max_pixels = {most} in {_FILES[0]}: the second must be no less than the first, "
            f"and than the {cell} x {cell} pixels of a token"
        )
