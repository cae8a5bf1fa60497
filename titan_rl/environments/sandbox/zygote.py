"""What runs inside bubblewrap: a warm Python that forks itself for each program, into namespaces of its own.

    zygote.py CONTROL FILTER keep|drop

It needs the standard library alone, and it never reads a program: those travel from the host to the fork that runs
them, on descriptors that only this fork has. So nothing of one program is in the memory that the next one inherits.

    host ──limits, 3 descriptors──▶ zygote ──fork──▶ program, init of its own namespaces
         ◀──how it ended───────────        ◀──wait status──

The program is the init of its process namespace: when it ends, or is killed, the kernel ends all that it started before
anyone hears of it.
"""

import array
import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types

_WARM = "bisect collections copy datetime decimal fractions functools heapq itertools math operator re statistics"
"""What programs import most is there before they start."""
_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x08000000 | 0x04000000
"""User, mount, process, IPC and host name. The network's is the box's, which has none: another for each program takes
as long as all the rest, and there nothing outlives a program, whom the filter lets open local sockets alone."""
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPSET, _CAPABILITY_VERSION_3 = {"x86_64": 126, "aarch64": 91}[os.uname().machine], 0x20080522
_NOBODY = 65534
_POLL_SECONDS = 0.02
_FIRST_LOOK_SECONDS = 0.05
_NICE = 5

_CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
_CLONE_CHILD_SETTID, _CLONE_CHILD_CLEARTID = 0x01000000, 0x00200000
_PR_GET_TID_ADDRESS = 40

libc = ctypes.CDLL(None, use_errno=True)
_locked = ctypes.PyDLL(None, use_errno=True)
"""Keeps the interpreter's lock: a fork must."""


def _address_of_tid():
    address = ctypes.c_void_p()
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_GET_TID_ADDRESS)")
    return address


_tid_arguments = (_address_of_tid(), None) if os.uname().machine == "x86_64" else (None, _address_of_tid())


class Filter(ctypes.Structure):
    """A seccomp program, as the kernel takes it."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def call(name, *arguments):
    """A function of libc. Errors: OSError."""
    result = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


# the program's side


def become_program(task, limits, seccomp):
    """In the fork: give up all that it could do harm with, then read the program and run it. Does not return."""
    try:
        _furnish(limits)
        _bound(limits)
        _give_up(seccomp)
        source, stdin, calls = _read_task(task)
    except BaseException as error:  # the box is at fault, not the program, which has not begun
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(_NOT_BEGUN)
    _run(source, stdin, calls, task)


_NOT_BEGUN = 126
"""An exit code that a program may have, too: "begun" on its task's socket tells the host that it began."""


def _furnish(limits):
    """A file system of its own: /tmp, which is /dev/shm too, is empty and small, and there is no /proc."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    sizes = f"size={limits['disk']},nr_inodes={limits['files']},mode=700"
    call("mount", b"tmpfs", b"/tmp", b"tmpfs", flags, sizes.encode())
    call("mount", b"tmpfs", b"/proc", b"tmpfs", flags | _MS_RDONLY, b"size=4k,nr_inodes=2,mode=555")
    os.chdir("/tmp")


def _bound(limits):
    seconds = int(limits["seconds"]) + 2
    for name, value in (
        ("AS", limits["memory"] + (256 << 20)),  # of each process; the zygote looks after all together
        ("CPU", seconds),
        ("FSIZE", limits["disk"]),
        ("NOFILE", 40),  # buffers of sockets and pipes are nobody's memory
        ("NPROC", limits["processes"]),
        ("CORE", 0),
        ("MEMLOCK", 0),
        ("MSGQUEUE", 0),
        ("NICE", 0),
        ("RTPRIO", 0),
        ("SIGPENDING", 64),
        ("STACK", 64 << 20),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bounded, bounded))


def _give_up(seccomp):
    """All capabilities, all ways to get any, and the system calls of the filter."""
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    call("syscall", _CAPSET, ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    call("prctl", _PR_SET_SECCOMP, 2, ctypes.byref(seccomp), 0, 0)


def _read_task(task):
    """Source, standard input, calls: JSON, until the host shuts its side."""
    parts = []
    while part := task.recv(1 << 16):
        parts.append(part)
    given = json.loads(b"".join(parts))
    task.sendall(b"begun\n")
    return given["source"], given["stdin"], given["calls"]


def _run(source, stdin, calls, task):
    """As ``python program.py`` would; then the calls, if there are any, whose results go back as JSON."""
    code = 1
    try:
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode("utf-8", "surrogateescape")), encoding="utf-8")
        module = types.ModuleType("__main__")
        sys.modules["__main__"], sys.argv = module, ["program.py"]
        exec(compile(source, "program.py", "exec"), module.__dict__)
        if calls:
            task.sendall(json.dumps([_called(module, *each) for each in calls]).encode())
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException as error:
        traceback.print_exception(type(error), error, error.__traceback__.tb_next)  # without this file's own line
    for end in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        try:
            end()
        except BaseException:
            code = code or 1
    os._exit(code & 0xFF)


def _called(module, name, arguments):
    """What a function of the program gives, as ["value", encoded], or ["error", text]."""
    try:
        return ["value", _encoded(getattr(module, name)(*(_decoded(argument) for argument in arguments)))]
    except Exception as error:
        return ["error", f"{type(error).__name__}: {error}"[:500]]


def _encoded(value, depth=0):
    """JSON that tells types apart (values.py reads it). Errors: TypeError for what is no plain value."""
    kind = type(value)
    if depth > 50:
        raise TypeError("nested too deeply")
    if kind in (str, bool, type(None)):
        return value
    if kind in (int, float):
        return {kind.__name__: repr(value)}
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [_encoded(each, depth + 1) for each in value]}
    if kind is dict:
        return {"dict": [[_encoded(k, depth + 1), _encoded(v, depth + 1)] for k, v in value.items()]}
    raise TypeError(f"{kind.__name__} is no plain value")


def _decoded(value):
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    if kind in ("int", "float"):
        return {"int": int, "float": float}[kind](inner)
    if kind == "dict":
        return {_decoded(k): _decoded(v) for k, v in inner}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(_decoded, inner))


# the zygote's side


class Box:
    """One program at a time."""

    def __init__(self, control, seccomp, uid):
        self.control, self.seccomp, self.uid = control, seccomp, uid

    def serve(self):
        """Until the host hangs up."""
        while True:
            message, descriptors = receive(self.control)
            if not message:
                return
            if message == b"kill":  # of one that has just ended
                continue
            self.control.send(json.dumps(self._run(json.loads(message), descriptors)).encode())

    def _run(self, limits, descriptors):
        """How a program ended. With it everything ended that it had started, since it is its namespace's init."""
        start = time.monotonic()
        pid = fork_into_namespaces()
        if not pid:
            self._become(descriptors, limits)
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

    def _become(self, descriptors, limits):
        """In the fork; does not return."""
        try:
            os.setsid()  # signals and priorities of its process group would reach the zygote
            task, stdout, stderr = descriptors
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            same = f"{self.uid} {self.uid} 1".encode()
            for name, text in (("setgroups", b"deny"), ("uid_map", same), ("gid_map", same)):
                os.write(os.open(f"/proc/self/{name}", os.O_WRONLY), text)
            os.set_inheritable(task, False)
            os.closerange(3, task)
            os.closerange(task + 1, 256)
            become_program(socket.socket(fileno=task), limits, self.seccomp)
        finally:
            os._exit(_NOT_BEGUN)

    def _watch(self, pid, watch, most):
        """Until it has ended: why it was killed, if it was, and the largest memory that was seen."""
        poll = select.poll()
        poll.register(watch, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        why, largest, pause = "", 0, _FIRST_LOOK_SECONDS
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
                largest = max(largest, look_after(pid))
                if largest > most:
                    why = why or "memory"
            if why:
                os.kill(pid, signal.SIGKILL)


def fork_into_namespaces():
    """As ``os.fork``, but the child is init in new namespaces: one fork in place of two, which is half of a run's time.

    Of all that a fork's bookkeeping is for, this process, which has one thread, needs the thread id that glibc keeps at
    the address which it told the kernel, and another seed. The interpreter's own hooks touch half of the pages that a
    short program touches in all.
    """
    flags = _NEW_NAMESPACES | signal.SIGCHLD | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    pid = _locked.syscall(_CLONE, ctypes.c_ulong(flags), None, None, *_tid_arguments)
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"clone: {os.strerror(number)}")
    if not pid:
        random.seed()
    return pid


def look_after(pid):
    """Bytes in memory of a process and all below it. By now they take long, so they give way to those that do not."""
    total = 0
    try:
        with open(f"/proc/{pid}/statm") as file:
            total = int(file.read().split()[1]) * resource.getpagesize()
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), _NICE)
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                total += sum(look_after(int(child)) for child in file.read().split())
    except (FileNotFoundError, ProcessLookupError, IndexError):
        pass  # it has just ended
    return total


def receive(control):
    """A message, and the descriptors that came with it."""
    numbers = array.array("i")
    message, ancillary, _, _ = control.recvmsg(4096, socket.CMSG_SPACE(3 * numbers.itemsize))
    for _, _, data in ancillary:
        numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return message, list(numbers)


def main():
    control, filter_fd, drops = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "drop"
    with open(filter_fd, "rb") as file:
        instructions = file.read()
    if drops:  # bubblewrap was started by root: from here on nobody is
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    for name in _WARM.split():
        importlib.import_module(name)
    compile("", "", "exec")  # the first one makes the types of syntax trees, which takes longer than all the rest
    gc.collect()
    gc.freeze()
    seccomp = Filter(len(instructions) // 8, instructions)
    call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)  # which a change of user takes away, and /proc/self then is root's
    connection = socket.socket(fileno=control)
    connection.send(b"ready")
    Box(connection, seccomp, os.getuid()).serve()


if __name__ == "__main__":
    main()
