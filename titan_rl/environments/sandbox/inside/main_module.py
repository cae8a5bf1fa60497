"""Runner of a program, as by ``python program.py``, with call results as JSON (values.py)."""

import atexit
import json
import os
import resource
import socket
import sys
import threading
import traceback
import types
from typing import Any


def bound(values: dict[str, int]) -> None:
    """Lower the kernel's limits, by name, for good."""
    for name, value in values.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bounded, bounded))


def run(source: str, stdin: str, calls: list, task: socket.socket) -> None:
    """Run a program and its calls, whose results go to the socket ``task``. Does not return."""
    code = 1
    try:
        _give_stdin(stdin)
        module = types.ModuleType("__main__")
        sys.modules["__main__"], sys.argv = module, ["program.py"]
        exec(compile(source, "program.py", "exec"), module.__dict__)
        if calls:
            task.sendall(json.dumps([_called(module, *call) for call in calls]).encode())
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException as error:
        place = error.__traceback__
        traceback.print_exception(type(error), error, place and place.tb_next)  # without this file's own line
    # as Python itself ends: both are private, and there is no public way to do it before os._exit
    as_python_ends = threading._shutdown, atexit._run_exitfuncs  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue]
    for end in (*as_python_ends, sys.stdout.flush, sys.stderr.flush):
        try:
            end()
        except BaseException:
            code = code or 1
    os._exit(code & 0xFF)


def _give_stdin(text: str) -> None:
    """A file without a name, as programs also read descriptor 0 itself."""
    try:
        number = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    except OSError:  # a server's file system that has no such files
        number = os.memfd_create("stdin")
    with open(number, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    os.lseek(number, 0, os.SEEK_SET)
    os.dup2(number, 0)
    os.close(number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115


def _called(module: types.ModuleType, name: str, arguments: list) -> list:
    """Result of a call: ["value", encoded], or ["error", text]."""
    try:
        return ["value", _encoded(getattr(module, name)(*(_decoded(argument) for argument in arguments)))]
    except Exception as error:
        return ["error", f"{type(error).__name__}: {error}"[:500]]


def _encoded(value: Any, depth: int = 0) -> Any:
    """JSON that tells types apart (values.py reads it). Errors: TypeError for what is no plain value."""
    kind = type(value)
    if depth > 50:
        raise TypeError("nested too deeply")
    if kind in (str, bool, type(None)):
        return value
    if kind in (int, float):
        return {kind.__name__: repr(value)}
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [_encoded(item, depth + 1) for item in value]}
    if kind is dict:
        return {"dict": [[_encoded(k, depth + 1), _encoded(v, depth + 1)] for k, v in value.items()]}
    raise TypeError(f"{kind.__name__} is no plain value")


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    if kind in ("int", "float"):
        return {"int": int, "float": float}[kind](inner)
    if kind == "dict":
        return {_decoded(k): _decoded(v) for k, v in inner}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(_decoded, inner))
