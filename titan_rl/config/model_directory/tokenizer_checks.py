"""What a directory's tokenizer can be refused for without transformers, which reads it later."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from titan_rl.config.io.bounded_files import TOKENIZER_BYTES, check_file
from titan_rl.config.model_directory.directory import read_object

_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",))
"""Each is enough for a tokenizer; transformers converts the others."""


def check_tokenizer(path: Path, vocab_size: Any, *, is_chat: bool) -> None:
    """``vocab_size``: the model's, if it is a number. ``is_chat``: a chat template is needed. Errors: ValueError."""
    settings = read_object(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    has_tiktoken = any(path.glob("*.tiktoken"))
    if not has_tiktoken and not any(all((path / name).exists() for name in names) for names in _FILES):
        raise ValueError("it holds no tokenizer: copy tokenizer.json into it")
    if (path / "tokenizer.json").exists():
        check_ids(_largest_id(path / "tokenizer.json"), vocab_size)
    if is_chat and not _has_chat_template(path, settings):
        raise ValueError(
            "task.style = 'chat' needs a chat template, and the model's tokenizer has none (of the name default): take "
            "an instruction-tuned model, set model.chat_template.file, or set task.style = 'compact'"
        )


def check_ids(largest: int, vocab_size: Any) -> None:
    """A vocabulary that is larger than the tokenizer is padding. Errors: ValueError for one that is smaller."""
    if isinstance(vocab_size, int) and largest >= vocab_size:
        raise ValueError(
            f"its tokenizer has tokens up to {largest}, and vocab_size = {vocab_size} in config.json: "
            f"copy the tokenizer that belongs to the model"
        )


def vocabulary(path: Path) -> dict[str, int] | None:
    """Tokens of a directory's tokenizer, without added ones; None if it has no tokenizer.json. Errors: ValueError."""
    file = path / "tokenizer.json"
    return _read(file).get_vocab(with_added_tokens=False) if file.is_file() else None


def _read(file: Path) -> Tokenizer:
    try:
        check_file(file, TOKENIZER_BYTES)
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower one
        raise ValueError(f"{file.name} cannot be read: {' '.join(str(error).split())}; copy it again") from None


def _largest_id(file: Path) -> int:
    """Special tokens that were added are left out: some models have one without a row, which no text becomes (Gemma 3
    one for images). The prompts are looked at later."""
    tokenizer = _read(file)
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = set(tokenizer.get_vocab(with_added_tokens=True).values()) - special
    if not ids:
        raise ValueError(f"{file.name} has no tokens: copy the tokenizer that belongs to the model")
    return max(ids)


def _has_chat_template(path: Path, settings: dict[str, Any]) -> bool:
    """One that transformers takes when it is asked for no other by name."""
    template = settings.get("chat_template")
    names = [entry.get("name") for entry in template if isinstance(entry, dict)] if isinstance(template, list) else []
    files = ("chat_template.jinja", "additional_chat_templates/default.jinja")
    return isinstance(template, str) or "default" in names or any((path / name).exists() for name in files)
