"""Script for a sandbox server (remote.py): forks a program, watches it, and prints a report.

``main_module`` is made of its text before this one is run. The report is one line of standard output, which the program
does not have: its own goes into a pipe that is read here, up to its limit. A program may do with this process what the
server's walls let it, and change nothing by it but what is said of itself: no expected value is here.
"""

import base64
import contextlib
import json
import math
import os
import resource
import select
import signal
import socket
import time

import main_module

_LOOK_SECONDS = 0.02
_WEIGH_SECONDS = 0.1
_KILL_SECONDS = 0.8
"""What takes longer to end is not waited for."""
_PIECE = 1 << 16
_NOT_BEGUN = 126
_BEGUN = b"begun\n"


def main(text: str) -> None:
    """Run one program and print the report. ``text``: JSON of nonce, limits, source, standard input and calls."""
    message = json.loads(text)
    (task, program_end), (stdout, out), (stderr, err) = socket.socketpair(), os.pipe(), os.pipe()
    start, pid = time.monotonic(), os.fork()
    if not pid:
        _become_program(message, program_end, out, err)
    for number in (program_end.detach(), out, err):
        os.close(number)
    received = {task.fileno(): b"", stdout: b"", stderr: b""}
    why, largest, status = _watch(pid, received, message["limits"])
    report = {
        "nonce": message["nonce"],
        "why": why,
        "exit": os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - start,
        "memory": largest,
        "received": [base64.b64encode(part).decode() for part in received.values()],
    }
    print(json.dumps(report), flush=True)
    os._exit(0)


def _become_program(message: dict, task: socket.socket, out: int, err: int) -> None:
    """In the fork; does not return."""
    try:
        os.setsid()  # so that it is ended with those that it starts
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.closerange(3, task.fileno())
        os.closerange(task.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        limits = message["limits"]
        names = {"AS": limits["memory"] + (256 << 20), "CPU": int(limits["seconds"]) + 2, "FSIZE": limits["disk"]}
        main_module.bound(names)
        with contextlib.suppress(OSError):  # where the server's own filter has the say
            main_module.bound({"CORE": 0})
        task.sendall(_BEGUN)
        main_module.run(message["source"], message["stdin"], message["calls"], task)
    finally:
        os._exit(_NOT_BEGUN)


def _watch(pid: int, received: dict, limits: dict) -> tuple:
    """Until it has ended, or was killed and takes long to end: why, the largest memory that was seen, its status."""
    poll, start, why = select.poll(), time.monotonic(), ""
    largest, next_look, given_up = 0, start + _WEIGH_SECONDS, math.inf
    for number in received:
        os.set_blocking(number, False)
        poll.register(number, select.POLLIN)
    while True:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            _kill(pid)  # what it left, while its number is nobody else's yet
            _read(poll, received, limits["output"], 0)
            _, status, usage = os.wait4(pid, 0)
            return why, max(largest, usage.ru_maxrss << 10), status
        if not _read(poll, received, limits["output"], _LOOK_SECONDS):
            why = why or "output"
        now = time.monotonic()
        if now > start + limits["seconds"]:
            why = why or "timeout"
        if now > next_look:
            largest, next_look = max(largest, _weight(pid)), now + _WEIGH_SECONDS
            why = why or ("memory" if largest > limits["memory"] else "")
        if why:
            _kill(pid)
            given_up = min(given_up, now + _KILL_SECONDS)
        if now > given_up:
            return why, largest, signal.SIGKILL


def _weight(session: int) -> int:
    """Bytes in memory of all that is in it: of what a server's own bound would end together with this script."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError, LookupError):
            with open(f"/proc/{name}/stat") as file:
                state = file.read().rpartition(")")[2].split()
            if int(state[3]) == session:
                total += max(map(_resident, os.listdir(f"/proc/{name}/task")), default=0)
    return total


def _resident(thread: str) -> int:
    """Bytes in memory of the process that a thread is of; none of one that has ended."""
    with contextlib.suppress(OSError, LookupError), open(f"/proc/{thread}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def _kill(pid: int) -> None:
    """And all that is in its session still. Who left that, the server ends."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _read(poll: "select.poll", received: dict, most: int, seconds: float) -> bool:
    """What there is by now; False when there is more than it may say."""
    for number, _ in poll.poll(1000 * seconds):
        try:
            while len(received[number]) <= most + len(_BEGUN):
                part = os.read(number, _PIECE)
                received[number] = (received[number] + part)[: most + len(_BEGUN) + 1]
                if not part:
                    poll.unregister(number)
                    break
        except BlockingIOError:
            pass
        except ConnectionResetError:
            poll.unregister(number)
    return max(map(len, received.values())) <= most + len(_BEGUN)
