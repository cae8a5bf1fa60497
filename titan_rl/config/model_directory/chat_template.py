"""A chat template in a file of its own: one that a user names, and that of an exported model."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from titan_rl.config.io.bounded_files import read_bytes

_BYTES = 1 << 20


def read_template(name: str, folders: Sequence[str]) -> str:
    """Source of a template, by the path of its file, a relative one in ``folders``, in turn. Errors: ValueError."""
    places = [Path(folder, name) for folder in folders or ["."]]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        where = " or ".join(dict.fromkeys(map(str, places)))
        raise ValueError(f"there is no file {where}: give the path of a Jinja file, such as chat_template.jinja")
    try:
        text = read_bytes(file, _BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{error.reason} in UTF-8: save it as UTF-8") from None
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from None
    if not text.strip() or "\0" in text:
        raise ValueError("it holds no template: give one that writes out messages, or leave the key out")
    return text


def write_template(model: Path, template: str) -> None:
    """Write a model directory's template in the place of all others that it has. Errors: OSError."""
    shutil.rmtree(model / "additional_chat_templates", ignore_errors=True)
    (model / "chat_template.jinja").write_text(template)
