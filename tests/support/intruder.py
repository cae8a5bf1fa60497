"""``python intruder.py USER [FOLDER ...]``: what a user of a host (a number) gets of a run there, one thing a line.

Everything is tried: files in the folders that all may use, the memory, files and environment of processes, and every
Unix socket. The folders are the installation's own, which may lie in one that all may use and hold nothing of a run.
"""

import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def files(installed: list[Path]) -> Iterator[str]:
    for root in ("/tmp", "/dev/shm"):
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if Path(folder, name) not in installed]
            for path in (Path(folder, name) for name in names if name != ".booted"):
                with suppress(OSError):
                    if stat.S_ISREG(path.lstat().st_mode):
                        path.open("rb").close()
                        yield f"file {path}"


def processes() -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid() or int(process.name) == 1:
            continue
        for name in ("environ", "mem", "fd", "map_files"):
            with suppress(OSError):
                path = process / name
                list(path.iterdir()) if path.is_dir() else path.open("rb").close()
                yield f"{name} of process {process.name}"


def sockets() -> Iterator[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    for path in {line.split()[7] for line in lines if len(line.split()) > 7}:
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as trying:
                trying.settimeout(2)
                trying.connect("\0" + path[1:] if path.startswith("@") else path)
                yield f"socket {path}"


if __name__ == "__main__":
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
    for thing in (*files(list(map(Path, sys.argv[2:]))), *processes(), *sockets()):
        print(thing)
