"""Folders of this checkout."""

from pathlib import Path

TREE = Path(__file__).parents[2]
CONFIGS, EXAMPLES, PACKAGE, SCRIPTS = (TREE / name for name in ("configs", "examples", "titan_rl", "scripts"))
SUPPORT = Path(__file__).parent


def example(name: str) -> Path:
    """Its TOML."""
    return next(EXAMPLES.rglob(f"{name}.toml"))
