"""Where a run directory can be, and whether what lies in one is its own. Nothing here opens or makes a file.

A run directory may come from somebody else. A link in it would have a run write, and a reader read, wherever it leads;
a pipe would have both wait for ever.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from titan_rl.config.load import ConfigError

_LONGEST_INSIDE = 120
"""Bytes of the longest path below a run directory."""


def check_place(root: Path, *, write: bool, what: str = "run directory") -> None:
    """Check of a run directory's place.

    ``what``: the kind of directory, for messages. Errors: ConfigError unless one is there and may be read, or, to
    ``write``, can be made there.
    """
    try:
        _check_spelling(root)
        place = _nearest(root)
        _check_length(root, place)
        if not place.is_dir():
            raise OSError(errno.ENOTDIR, f"{place} is not a folder")
        if place != root and root.is_symlink():
            raise OSError(errno.ENOENT, "it is a link that leads nowhere")
        if not _may(place, os.W_OK | os.X_OK if write else os.X_OK) or (place == root and not _may(place, os.R_OK)):
            raise OSError(errno.EACCES, f"there is no right to {'write' if write else 'read'} in {place}")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        action = "made or written to" if write else "read"
        raise ConfigError(
            f"{str(root)[:200]!r} cannot be a {what}: {why}; give a folder that can be {action}"
        ) from None


def _check_spelling(root: Path) -> None:
    """Errors: ValueError for a path that Parquet's reader cannot be given."""
    try:
        str(root.absolute()).encode()
    except UnicodeEncodeError:
        raise ValueError("its path is not UTF-8") from None


def _nearest(root: Path) -> Path:
    """It, or the nearest of the folders above it that is there. Errors: OSError; ValueError for a name with NUL."""
    for place in (root, *root.parents):
        try:
            place.stat()
        except FileNotFoundError:
            continue
        return place
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _check_length(root: Path, place: Path) -> None:
    longest = max((len(os.fsencode(part)) for part in root.parts), default=0)
    length = len(os.fsencode(root.absolute())) + _LONGEST_INSIDE
    if longest > os.pathconf(place, "PC_NAME_MAX") or length > os.pathconf(place, "PC_PATH_MAX"):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))


def _may(place: Path, mode: int) -> bool:
    return os.access(place, mode, effective_ids=os.access in os.supports_effective_ids)


def check_own(
    root: Path,
    files: Iterable[str],
    folders: Iterable[str],
    written: Iterable[str] = (),
    *,
    what: str = "run directory",
) -> None:
    """Check of a run directory for links out of it and for wrong kinds of files. Errors: ConfigError if one of these
    names in ``root``, or something below, is a link that leads out of ``root``, or of another kind than it should be.
    Other names are not looked at.

    ``written``: folders that others write and nobody here reads; of these only what lies in them directly, where the
    next of their folders will be, must not lead out. ``what``: the kind of directory, for messages.
    """
    home = root.resolve()
    for path, is_wanted in (*_named(root, files, folders), *_directly(root, written)):
        if path.is_symlink() and home not in Path(os.path.realpath(path)).parents:  # resolve() trips over a ring
            raise ConfigError(f"{path} is a link that leads out of the {what}: put there what it leads to")
        try:
            mode = path.stat().st_mode
        except OSError:  # it is not there, or no longer
            continue
        if not is_wanted(mode):
            kind = "folder" if is_wanted is stat.S_ISDIR else "file"
            raise ConfigError(f"{path} is no plain {kind}: move it away, or give another {what}")


def _named(root: Path, files: Iterable[str], folders: Iterable[str]) -> Iterator[tuple[Path, Callable[[int], bool]]]:
    """Each path, and what its mode must be."""
    yield from ((root / name, stat.S_ISREG) for name in files)
    for name in folders:
        yield root / name, stat.S_ISDIR
        for folder, inner, names in os.walk(root / name):
            yield from ((Path(folder, each), stat.S_ISDIR) for each in inner)
            yield from ((Path(folder, each), stat.S_ISREG) for each in names)


def _directly(root: Path, folders: Iterable[str]) -> Iterator[tuple[Path, Callable[[int], bool]]]:
    for name in folders:
        yield root / name, stat.S_ISDIR
        if (root / name).is_dir():
            yield from (
                (path, lambda mode: stat.S_ISREG(mode) or stat.S_ISDIR(mode)) for path in (root / name).iterdir()
            )


def check_no_modules(root: Path) -> None:
    """Check of a run directory for files that shadow Python modules.

    Errors: ConfigError if Python would take files of ``root`` for modules: every process that a run starts looks for
    them in the current folder first.
    """
    home, here = root.resolve(), Path.cwd()
    if home == here or home in here.parents:
        raise ConfigError(
            f"the current folder is in {home}, whose files would be taken for modules of Python: go to another folder"
        )
    if init := next(home.glob("__init__.*"), None) if home.parent == here else None:
        raise ConfigError(
            f"{init} makes a package of Python of {home}, which would be imported from the current folder: remove it"
        )
