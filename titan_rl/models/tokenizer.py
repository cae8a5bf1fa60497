"""Tokens and text: which tokens end an answer, and the tiny model's character tokenizer."""

import json
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
_SPECIAL = ["<pad>", "<eos>", "<unk>"]


def stop_token_ids(model_path: Path) -> list[int]:
    """Ids that end an answer: the union of what the model's json files call ``eos_token_id``."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = model_path / name
        if file.is_file():
            value = json.loads(file.read_text()).get("eos_token_id")
            ids |= set(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(ids)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character."""
    words = {token: index for index, token in enumerate([*_SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
