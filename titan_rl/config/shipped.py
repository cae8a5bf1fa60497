"""The TOMLs that come with the package, by name: ``titan-rl train quickstart`` works in any folder."""

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "configs"
"""A link to the tree's configs/; a folder of its own in a wheel."""


LISTED = "a name such as quickstart (`titan-rl train --help` lists them)"


def shipped() -> dict[str, Path]:
    """Shipped TOMLs, name to file."""
    return {path.stem: path for path in sorted(FOLDER.rglob("*.toml"))}


def subject(file: Path) -> str:
    """Subject of a shipped TOML: its first comment."""
    return file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def find_config(name: str | Path) -> Path:
    """The file of that path, or else the shipped one of that name. There may be neither."""
    return Path(name) if os.path.isfile(name) else shipped().get(str(name), Path(name))
