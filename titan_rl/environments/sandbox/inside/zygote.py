"""Zygote inside bubblewrap: a warm Python that forks itself for each program, into new namespaces.

    zygote.py CONTROL FILTER keep|drop

It needs the standard library and its neighbours alone, and it never reads a program: those travel from the host to
the fork that runs them, on descriptors that only this fork has. So nothing of one program is in the memory that the
next one inherits.

    host ──limits, 3 descriptors──▶ zygote ──fork──▶ program, init of its own namespaces
         ◀──how it ended───────────        ◀──wait status──

The program is the init of its process namespace: when it ends, or is killed, the kernel ends all that it started before
anyone hears of it.
"""

import array
import contextlib
import gc
import importlib
import itertools
import json
import math
import os
import select
import signal
import socket
import sys
import time

import kernel
import running
import semaphores

_WARM = "bisect collections copy datetime decimal fractions functools heapq itertools math operator re statistics"
"""What programs import most is there before they start."""
_NOBODY = 65534
_MOST_DESCRIPTORS = 4
"""Of a message."""
_POLL_SECONDS = 0.02
_MOST_MAPPINGS = 16384
"""Of a program with all that it starts: each is some 200 bytes of the kernel's, and takes long to undo."""
_MEMORY = ("VmRSS:", "VmSwap:", "VmPTE:")
_BUFFER, _FEW_DESCRIPTORS = 212992, 8
"""Bytes that a socket holds at most, by the kernel's default, and are no process's; of so few it does not matter."""
_FIRST_LOOK_SECONDS = 0.05
_LOOKS_TO_MAPPINGS = 4
"""Their text takes longer than all else that is looked at."""
_NICE = max(5, os.getpriority(os.PRIO_PROCESS, 0))
"""Of what runs longer; never below that of the run itself, which may have been started with ``nice``."""
_MOST_NICE, _STEP = 19, 1.25
"""From one value to the next a thread weighs so much less (the kernel's sched_prio_to_weight)."""


class Box:
    """Runner of one program at a time."""

    def __init__(self, control: socket.socket, seccomp: kernel.Filter, uid: int):
        self.control, self.seccomp, self.uid = control, seccomp, uid
        self.ours = _processes()

    def serve(self) -> None:
        """Run programs until the host closes the socket."""
        while True:
            message, descriptors = receive(self.control)
            if not message:
                return
            if message == b"kill":  # of one that has just ended
                continue
            self.control.send(json.dumps(self.answer(json.loads(message), descriptors)).encode())

    def answer(self, limits: dict, descriptors: list[int]) -> dict:
        """How a program ended. With it everything ended that it had started, since it is its namespace's init."""
        start = time.monotonic()
        pid = self.fork()
        if not pid:
            self.become(descriptors, limits)
        for number in descriptors:
            os.close(number)
        watch = os.pidfd_open(pid)
        try:
            why, memory = self._watch(pid, watch, limits["memory"])
        finally:
            os.close(watch)
        _, status, usage = os.wait4(pid, 0)
        memory = max(memory, usage.ru_maxrss << 10)
        exit_code = os.waitstatus_to_exitcode(status)
        return {"exit": exit_code, "why": why, "seconds": time.monotonic() - start, "memory": memory}

    def fork(self) -> int:
        """Fork what runs a program; 0 in it."""
        return kernel.fork_into_namespaces()

    def become(self, descriptors: list[int], limits: dict) -> None:
        """In the fork; does not return."""
        try:
            os.setsid()  # signals and priorities of its process group would reach the zygote
            task, stdout, stderr = descriptors
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            map_user(self.uid, self.uid)
            go_first()
            kernel.close_all_but(task)
            running.become_program(socket.socket(fileno=task), limits, self.seccomp)
        finally:
            os._exit(running.NOT_BEGUN)

    def _watch(self, pid: int, watch: int, most: int) -> tuple[str, int]:
        """Until it has ended: why it was killed, if it was, and the largest memory that was seen."""
        poll = select.poll()
        poll.register(watch, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        why, largest, pause, looks = "", 0, _FIRST_LOOK_SECONDS, itertools.count()
        while True:
            ready = dict(poll.poll(pause * 1000))
            if watch in ready:
                return why, largest
            if self.control.fileno() in ready:
                if not self.control.recv(16):
                    os._exit(0)  # the host is gone, and what runs here goes with this process
                why = why or "killed"
            else:
                pause = _POLL_SECONDS
                pids = _processes() - self.ours
                memory = look_after(pids)
                largest = max(largest, memory)
                if largest > most or (not next(looks) % _LOOKS_TO_MAPPINGS and have_many_mappings(pids)):
                    why = why or "memory"
            if why:
                os.kill(pid, signal.SIGKILL)


def map_user(inside: int, outside: int) -> None:
    """Map the one user and group of this process's new namespace."""
    same = f"{inside} {outside} 1".encode()
    for name, text in (("setgroups", b"deny"), ("uid_map", same), ("gid_map", same)):
        _write_own(name, text)


def go_first() -> None:
    """Where the machine's memory is out, this process ends before anything else does."""
    _write_own("oom_score_adj", b"1000")


def _write_own(name: str, text: bytes) -> None:
    number = os.open(f"/proc/self/{name}", os.O_WRONLY)
    os.write(number, text)
    os.close(number)


def _processes() -> set[int]:
    """In this box."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def look_after(pids: set[int]) -> int:
    """Memory of all these processes in bytes; lowers their priority to that of one thread together."""
    memory, threads = 0, {pid: _threads(pid) for pid in pids}
    nice = _nice(sum(_runs(pid, thread) for pid in pids for thread in threads[pid]))
    for pid in pids:
        for thread in threads[pid]:
            with contextlib.suppress(OSError):  # it has just ended
                # an unprivileged box may not make a thread less nice than it is
                os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))
        # of those that have ended, as the first one may have before the others, nothing is said
        for thread in threads[pid]:
            with contextlib.suppress(OSError):
                if resident := _memory(f"/proc/{pid}/task/{thread}"):
                    memory += resident + _buffers(f"/proc/{pid}/task/{thread}")
                    break
    return memory


def have_many_mappings(pids: set[int]) -> bool:
    remaining = _MOST_MAPPINGS
    for pid in pids:
        for thread in _threads(pid):
            with contextlib.suppress(OSError):
                if count := _mappings(f"/proc/{pid}/task/{thread}", remaining):  # none: it has ended
                    remaining -= count
                    break
    return remaining < 0


def _nice(running: int) -> int:
    """With which so many threads weigh as much as one that has ``_NICE``."""
    return min(_MOST_NICE, _NICE + math.ceil(math.log(max(running, 1), _STEP)))


def _runs(pid: int, thread: int) -> bool:
    """Or waits for a core."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat", "rb", buffering=0) as file:
        return file.read().rpartition(b") ")[2][:1] == b"R"
    return False


def _threads(pid: int) -> list[int]:
    try:
        return list(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return []


def _memory(thread: str) -> int:
    """Bytes of a thread's process, with its page tables and those that are swapped out."""
    with open(f"{thread}/status") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(_MEMORY))


def _buffers(thread: str) -> int:
    """Bytes that the pipes and sockets of a thread's process may hold."""
    return max(0, len(os.listdir(f"{thread}/fd")) - _FEW_DESCRIPTORS) * _BUFFER


def _mappings(thread: str, most: int) -> int:
    """Of a thread's process, counted as far as there are more than ``most``."""
    count = 0
    with open(f"{thread}/maps", "rb", buffering=0) as file:
        while count <= most and (part := file.read(1 << 16)):
            count += part.count(b"\n")
    return count


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a message with its descriptors."""
    numbers = array.array("i")
    space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * numbers.itemsize)
    message, ancillary, _, _ = control.recvmsg(4096, space, socket.MSG_CMSG_CLOEXEC)
    for _, _, data in ancillary:
        numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return message, list(numbers)


def begin() -> tuple[socket.socket, kernel.Filter]:
    """Begin a script that bubblewrap has started with CONTROL, FILTER and keep or drop."""
    control, filter_fd, drops = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "drop"
    with open(filter_fd, "rb") as file:
        instructions = file.read()
    if drops:  # bubblewrap was started by root: from here on nobody is
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    sys.path.remove(os.path.dirname(__file__))
    for name in _WARM.split():
        importlib.import_module(name)
    semaphores.install()
    compile("", "", "exec")  # the first one makes the types of syntax trees, which takes longer than all the rest
    gc.collect()
    gc.freeze()
    kernel.stay_visible()
    kernel.have_small_pages()
    kernel.close_all_but(control)
    os.set_inheritable(control, False)
    return socket.socket(fileno=control), kernel.Filter(len(instructions) // 8, instructions)


def main() -> None:
    connection, seccomp = begin()
    connection.send(b"ready")
    Box(connection, seccomp, os.getuid()).serve()


if __name__ == "__main__":
    main()
