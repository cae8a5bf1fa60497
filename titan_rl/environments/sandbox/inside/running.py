"""Program's side of a box: confines itself, reads the program, and runs it."""

import json
import os
import socket

import kernel
import main_module


def become_program(task: socket.socket, limits: dict, seccomp: kernel.Filter) -> None:
    """Confine the fork, then read the program and run it. Does not return."""
    try:
        _furnish(limits)
        _bound(limits)
        kernel.give_up(seccomp)
        source, stdin, calls = _read_task(task)
    except BaseException as error:  # the box is at fault, not the program, which has not begun
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(NOT_BEGUN)
    main_module.run(source, stdin, calls, task)


NOT_BEGUN = 126
"""An exit code that a program may have, too: "begun" on its task's socket tells the host that it began."""


def _furnish(limits: dict) -> None:
    """A file system of its own: /tmp, which is /dev/shm too, is empty and small, and there is no /proc. No other one
    can be changed, times of devices included."""
    kernel.mount_empty("/tmp", f"size={limits['disk']},nr_inodes={limits['files']},mode=700")
    kernel.mount_empty("/proc", "size=4k,nr_inodes=2,mode=555", is_writable=False)
    for device in os.listdir("/dev"):
        if not os.path.islink(f"/dev/{device}"):
            kernel.mount_read_only(f"/dev/{device}")
    os.chdir("/tmp")


def _bound(limits: dict) -> None:
    main_module.bound(
        {
            "AS": limits["memory"] + (256 << 20),  # of each process; the zygote looks after all together
            "CPU": int(limits["seconds"]) + 2,
            "FSIZE": limits["disk"],
            "NOFILE": 40,  # buffers of sockets and pipes are nobody's memory
            "NPROC": limits["processes"],
            "CORE": 1,  # too small for a file, and unlike 0 it keeps out the program that a host may have for dumps
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
            "NICE": 0,
            "RTPRIO": 0,
            "SIGPENDING": 64,
            "STACK": 64 << 20,
        }
    )


def _read_task(task: socket.socket) -> tuple[str, str, list]:
    """Source, standard input, calls: JSON, until the host shuts its side."""
    parts = []
    while part := task.recv(1 << 16):
        parts.append(part)
    message = json.loads(b"".join(parts))
    task.sendall(b"begun\n")
    return message["source"], message["stdin"], message["calls"]
