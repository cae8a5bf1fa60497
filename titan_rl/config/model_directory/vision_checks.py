"""What a vision model's directory says of images: the form in which its tower takes them."""

from math import isfinite
from pathlib import Path
from typing import Any

from titan_rl.config.model_directory.directory import read_object

_FILES = ("preprocessor_config.json", "processor_config.json")
_SAME = {"patch_size": "patch_size", "merge_size": "spatial_merge_size", "temporal_patch_size": "temporal_patch_size"}
"""Names in the processor's file, and in the tower's table of config.json."""
_MOST_SIDE, _MOST_PIXELS = 1024, 1 << 26


def read_image_form(path: Path) -> dict[str, Any]:
    """The image processor's settings. Errors: ValueError if there are none."""
    for name in _FILES:
        if (path / name).is_file():
            values = read_object(path / name)
            values = values.get("image_processor", values) if name == _FILES[1] else values
            if isinstance(values, dict):
                return values
    raise ValueError(f"it holds no {_FILES[0]}, which says how images are laid out: copy the model's own")


def check_image_form(path: Path, config: dict[str, Any]) -> None:
    """Check of the image processor's settings against a vision model's config.json. Errors: ValueError."""
    form, tower = read_image_form(path), config["vision_config"]
    for ours, theirs in _SAME.items():
        value = form.get(ours, tower.get(theirs))
        if type(value) is not int or not 1 <= value <= _MOST_SIDE:
            raise ValueError(f"{ours} = {value!r} in {_FILES[0]}: give the number that the model was trained with")
        if theirs in tower and tower[theirs] != value:
            raise ValueError(
                f"{ours} = {value} in {_FILES[0]}, and {theirs} = {tower[theirs]!r} in config.json: both are one"
            )
    for name in ("image_mean", "image_std"):
        if (value := form.get(name)) is not None and not _is_color(value, above=0.0 if name == "image_std" else None):
            raise ValueError(f"{name} = {str(value)[:80]} in {_FILES[0]}: give three numbers")
    _check_size(form)
    for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id"):
        size = config.get("vocab_size")
        if not (type(number := config.get(name)) is int and 0 <= number < (size or 0)):
            raise ValueError(f"{name} = {number!r} in config.json is no token of its vocab_size = {size}")


def _is_color(value: Any, above: float | None) -> bool:
    is_list = isinstance(value, list) and len(value) == 3
    return is_list and all(
        type(each) in (int, float) and isfinite(each) and (above is None or each > above) for each in value
    )


def _check_size(form: dict[str, Any]) -> None:
    """Errors: ValueError for limits of an image's pixels that are none."""
    size = form["size"] if isinstance(form.get("size"), dict) else {}
    edges = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    limits = {name: size.get(edge, form.get(name)) for name, edge in edges.items()}
    for name, value in limits.items():
        if value is not None and (type(value) is not int or not 1 <= value <= _MOST_PIXELS):
            raise ValueError(f"{name} = {value!r} in {_FILES[0]}: give a number of pixels up to {_MOST_PIXELS:,}")
    least, most = limits.values()
    if least is not None and most is not None and least > most:
        raise ValueError(f"min_pixels = {least} is more than max_pixels = {most} in {_FILES[0]}: swap them")
