"""Folders of a run's owner alone, for what its processes listen at and leave lying; and their removal.

Nothing here needs Monarch: the reaper removes them when the controller no longer can.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_SOCKET_PATH_BYTES = 107
"""The kernel takes no longer path of a Unix socket."""
_OUR_BYTES = len("/titan_rl_12345678/") + 36
"""Of such a path below the temporary folder; vLLM names its sockets by a UUID."""


def temporary_folder() -> str:
    """TMPDIR, or /tmp if the paths of sockets in it would be too long."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) + _OUR_BYTES <= _SOCKET_PATH_BYTES else "/tmp"


def make_scratch() -> Path:
    """Create a private folder (mode 0700) with a unique name."""
    return Path(tempfile.mkdtemp(prefix="titan_rl_", dir=temporary_folder()))


def remove_scratch(folder: Path) -> None:
    """Remove a folder, and the shared memory that engines named after it."""
    for segment in _SHARED_MEMORY.glob(f"{folder.name}-*"):
        with suppress(OSError):  # its engine removed it meanwhile
            segment.unlink()
    shutil.rmtree(folder, ignore_errors=True)
