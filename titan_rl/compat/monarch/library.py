"""Monarch's compiled library. Importing this does not load it."""

import sys

from titan_rl.compat.reach import MONARCH, Reach

_LIBRARY = "monarch._rust_bindings"
REACHES = (Reach(f"{_LIBRARY}:__file__", "keep its sockets from other users, and know whether it is loaded"),)


def is_loaded() -> bool:
    """Whether this process has loaded it, and with it what the environment said then."""
    return _LIBRARY in sys.modules


def library_file() -> str:
    """The file that it is loaded from, which this does. Errors: DependencyChanged."""
    MONARCH.require(REACHES)
    import monarch._rust_bindings as library

    return library.__file__
