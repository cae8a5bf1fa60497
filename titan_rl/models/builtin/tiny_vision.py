"""A vision model small enough to train from random weights on a laptop, of Qwen2.5-VL's shape."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig
from transformers.utils.logging import disable_progress_bar

from titan_rl.models.builtin.tokenizer import character_tokenizer

if TYPE_CHECKING:  # its imports take time, and whoever wants the config alone need not wait for them
    from transformers import Qwen2_5_VLForConditionalGeneration

_MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
IMAGE_FORM: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 128 * 128},
}
"""Of the image processor; sizes are pixels of the smallest and the largest image that is not resized."""


def vision_tokenizer() -> PreTrainedTokenizerFast:
    """Character tokenizer with the tokens around an image, and that of its parts."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*_MARKS]})
    return tokenizer


def tiny_vision_config(*, hidden_size: int = 128, num_layers: int = 4) -> Qwen2_5_VLConfig:
    tokenizer = vision_tokenizer()
    vocabulary = tokenizer.get_vocab()
    before, image, behind = (vocabulary[mark] for mark in _MARKS)
    pairs = hidden_size // 8  # of a head of four
    sections = [pairs - 2 * (pairs * 3 // 8), pairs * 3 // 8, pairs * 3 // 8]
    return Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        vision_config=dict(
            patch_size=IMAGE_FORM["patch_size"],
            temporal_patch_size=IMAGE_FORM["temporal_patch_size"],
            spatial_merge_size=IMAGE_FORM["merge_size"],
            depth=2,
            hidden_size=hidden_size // 2,
            intermediate_size=hidden_size,
            num_heads=4,
            window_size=16,
            fullatt_block_indexes=[1],
            out_hidden_size=hidden_size,
        ),
        vision_start_token_id=before,
        image_token_id=image,
        vision_end_token_id=behind,
        video_token_id=image,
        tie_word_embeddings=True,
    )


def make_tiny_vision(out: str | Path, *, seed: int, **settings: int) -> "Qwen2_5_VLForConditionalGeneration":
    """Write a randomly initialized model (1 M parameters by default) with a character tokenizer to ``out``; each token
    of an image stands for 8 x 8 pixels. ``settings`` are ``tiny_vision_config``'s."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    config = tiny_vision_config(**settings)
    disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(out)
    vision_tokenizer().save_pretrained(out)
    (Path(out) / "preprocessor_config.json").write_text(json.dumps(IMAGE_FORM, indent=2) + "\n")
    return model
