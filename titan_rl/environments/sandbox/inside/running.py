"""A program's side: it is shut in, read, and run; what its functions give goes back as JSON."""

import atexit
import json
import os
import resource
import sys
import threading
import traceback
import types

import kernel


def become_program(task, limits, seccomp):
    """In the fork: give up all that could do harm, then read the program and run it. Does not return."""
    try:
        _furnish(limits)
        _bound(limits)
        kernel.give_up(seccomp)
        source, stdin, calls = _read_task(task)
    except BaseException as error:  # the box is at fault, not the program, which has not begun
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(NOT_BEGUN)
    _run(source, stdin, calls, task)


NOT_BEGUN = 126
"""An exit code that a program may have, too: "begun" on its task's socket tells the host that it began."""


def _furnish(limits):
    """A file system of its own: /tmp, which is /dev/shm too, is empty and small, and there is no /proc."""
    kernel.mount_empty("/tmp", f"size={limits['disk']},nr_inodes={limits['files']},mode=700")
    kernel.mount_empty("/proc", "size=4k,nr_inodes=2,mode=555", is_writable=False)
    os.chdir("/tmp")


def _bound(limits):
    for name, value in (
        ("AS", limits["memory"] + (256 << 20)),  # of each process; the zygote looks after all together
        ("CPU", int(limits["seconds"]) + 2),
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
        _give_stdin(stdin)
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


def _give_stdin(text):
    """A file without a name, as programs also read descriptor 0 itself."""
    number = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    with open(number, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    os.lseek(number, 0, os.SEEK_SET)
    os.dup2(number, 0)
    os.close(number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115


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
