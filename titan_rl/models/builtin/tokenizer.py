"""The tiny model's character tokenizer."""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
_SPECIAL = ["<pad>", "<eos>", "<unk>"]


def character_vocabulary() -> dict[str, int]:
    """Tokens of ``character_tokenizer``."""
    return {token: index for index, token in enumerate([*_SPECIAL, *CHARACTERS])}


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer with one token for each printable ASCII character."""
    tokenizer = Tokenizer(models.WordLevel(character_vocabulary(), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
