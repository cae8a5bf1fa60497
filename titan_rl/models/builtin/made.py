"""Models that a run makes itself, by the names that ``model.path`` has for them."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.config.model_directory.vision_checks import limited
from titan_rl.config.sections.role_sections import ImagesConfig
from titan_rl.config.sections.schema import MADE_MODELS
from titan_rl.data.images import UNLIMITED, ImageProcessor, image_processor, image_processor_of
from titan_rl.data.text.tokenizer import TextSettings, set_text
from titan_rl.models.builtin.tiny import make_tiny, tiny_config
from titan_rl.models.builtin.tiny_vision import IMAGE_FORM, make_tiny_vision, tiny_vision_config, vision_tokenizer
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.models.families.qwen2_5_vl import with_text_sizes
from titan_rl.models.families.registry import Family
from titan_rl.models.spec import read_hf_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

_, VISION = MADE_MODELS


def config_of(path: str, family: Family | None = None) -> "PreTrainedConfig":
    """Config of ``model.path``, of such a model or of a directory. Errors: as ``read_hf_config``."""
    if path not in MADE_MODELS:
        return read_hf_config(path, family)
    return with_text_sizes(tiny_vision_config()) if path == VISION else tiny_config()


def image_processor_at(path: str, images: ImagesConfig = UNLIMITED) -> ImageProcessor | None:
    """Image processor of ``model.path``, with a run's limits; None of a model that sees no images."""
    if path not in MADE_MODELS:
        return image_processor(path, images)
    if path != VISION:
        return None
    return image_processor_of(tiny_vision_config().to_dict(), limited(IMAGE_FORM, images))


def made_tokenizer(name: str, settings: TextSettings | None = None) -> "PreTrainedTokenizerFast":
    """Tokenizer with the run's text settings."""
    tokenizer = vision_tokenizer() if name == VISION else character_tokenizer()
    settings = settings or TextSettings()
    set_text(tokenizer, replace(settings, images=image_processor_at(name, settings.limits)))
    return tokenizer


def made_stops(name: str) -> list[int]:
    """Ids that end an answer."""
    end = made_tokenizer(name).eos_token_id
    assert isinstance(end, int), "it has one end"
    return [end]


def make_model(name: str, out: Path, seed: int) -> None:
    """Write a model to a directory."""
    (make_tiny_vision if name == VISION else make_tiny)(out, seed=seed)
