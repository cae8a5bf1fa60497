"""Programs end as anywhere, within their limits; values come back with their types; a box that dies is replaced."""

import asyncio
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyseccomp
import pytest
from boxes import need_boxes

from titan_rl.config.load import ConfigError
from titan_rl.environments.sandbox import bubblewrap, pool, slot
from titan_rl.environments.sandbox.pool import Sandbox, check_sandbox
from titan_rl.environments.sandbox.program import Call, CallResult, Limits, Program, SandboxFailed
from titan_rl.environments.sandbox.slot import Slot
from titan_rl.environments.sandbox.values import decode, encode, same

THREAD = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()"
POOL = "import multiprocessing\nwith multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1]))"


SLACK = 20.0
"""Seconds: what a busy machine may take for what takes moments."""


@pytest.fixture(scope="module")
def box():
    need_boxes()
    one = Slot()
    yield one
    one.close()


@pytest.mark.parametrize(
    ("source", "ending", "exit_code", "stdout"),
    [
        ("print(6 * 7)", "ok", 0, "42\n"),
        ("import sys\nprint(sys.stdin.read().upper())", "ok", 0, "HALLÖ\n\n"),
        ("print(open(0, 'rb').read())", "ok", 0, "b'hall\\xc3\\xb6\\n'\n"),
        ("import os\nprint(input(), os.read(0, 9))", "ok", 0, "hallö b''\n"),
        ("import sys\nsys.exit(3)", "error", 3, ""),
        ("import sys\nsys.exit('no')", "error", 1, ""),
        ("print(1)\nraise ValueError", "error", 1, "1\n"),
        (THREAD, "ok", 0, "late\n"),
        ("import atexit\natexit.register(print, 'bye')", "ok", 0, "bye\n"),
        (POOL, "ok", 0, "[1]\n"),
        ("import asyncio\nprint(asyncio.run(asyncio.sleep(0, 5)))", "ok", 0, "5\n"),
        ("open('notes', 'w').write('x' * 1000)\nprint(len(open('notes').read()))", "ok", 0, "1000\n"),
        ("print('x' * 65535)", "ok", 0, "x" * 65535 + "\n"),
        ("print('x' * 65536)", "output", None, "x" * 65536),
        ("print('before', flush=True)\nwhile True: pass", "timeout", -9, "before\n"),
        ("x = bytearray(1 << 28)\nimport time\ntime.sleep(99)", "memory", -9, ""),
        ("def f(: pass", "error", 1, ""),
    ],
)  # fmt: skip
def test_a_program_ends_as_it_would_anywhere(box, source, ending, exit_code, stdout):
    start, seconds = time.monotonic(), 2.0 if ending == "timeout" else SLACK
    outcome = box.run(Program(source, "hallö\n", limits=Limits(seconds=seconds)))
    assert (outcome.ending, outcome.stdout) == (ending, stdout), outcome
    assert exit_code is None or outcome.exit_code == exit_code
    assert time.monotonic() - start < 2.0 + SLACK


def test_what_went_wrong_names_the_programs_own_lines(box):
    outcome = box.run(Program("def f():\n    return 1 / 0\nf()\n"))
    assert "inside" not in outcome.stderr and 'File "program.py", line 2, in f' in outcome.stderr


VALUES = [0, 10**400, -1, 1.5, float("inf"), True, None, "ä\x00", [], [1, (2, {3})], {"a": {1: frozenset({2})}}, ("x",)]


def test_values_go_in_and_come_back_as_they_are(box):
    outcome = box.run(Program("def f(x): return x", calls=tuple(Call("f", (value,)) for value in VALUES)))
    assert all(same(given.value, value) for given, value in zip(outcome.results, VALUES, strict=True))
    assert all(same(decode(encode(value)), value) for value in VALUES)


def test_a_function_that_gives_no_plain_value_says_so(box):
    calls = tuple(Call(name) for name in ("missing", "wrong", "made"))
    outcome = box.run(Program("def wrong(): return 1 / 0\nclass A(int): pass\ndef made(): return A(1)", calls=calls))
    assert [given.error.split(":")[0] for given in outcome.results] == [
        "AttributeError",
        "ZeroDivisionError",
        "TypeError",
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), ([1], (1,)), ({1}, {True}), ({1: "a"}, {True: "a"}), (math.nan, math.nan), ([1], [1, 2]),
     ({"a": 1}, {"a": 1.0}), ({1}, frozenset({1})), ("1", 1), (None, False), ([[1.0]], [[1]])],
)  # fmt: skip
def test_equal_is_not_the_same(one, other):
    assert not same(one, other) and not same(other, one)


@pytest.mark.parametrize(
    "said",
    [1, [1], {"int": 1}, {"int": "1", "float": "2"}, {"list": "ab"}, {"dict": [[1]]}, {"set": [{"list": []}]},
     {"int": "9" * 5000}, {"object": []}, {"dict": [[{"dict": []}, "a"]]}],
)  # fmt: skip
def test_what_no_function_could_have_given_is_refused(said):
    with pytest.raises(ValueError, match="no plain value"):
        decode(said)


def test_a_forged_frame_is_nothing(box):
    forge = (
        "import os\nfor n in range(3, 64):\n  try: os.write(n, b'[[\"value\", true]]' * 3)\n  except OSError: pass\n"
    )
    outcome = box.run(Program(forge + "def f(): return 1", calls=(Call("f"),)))
    assert outcome.results in (None, (CallResult(value=1),))


def test_programs_run_side_by_side_and_one_that_hangs_holds_one_box_alone():
    async def run():
        sandbox = Sandbox(3)
        try:
            hanging = asyncio.create_task(sandbox.run(Program("while True: pass", limits=Limits(seconds=3))))
            done = await asyncio.gather(*(sandbox.run(Program(f"print({n})")) for n in range(20)))
            assert not hanging.done() and [outcome.stdout for outcome in done] == [f"{n}\n" for n in range(20)]
            assert (await hanging).ending == "timeout"
        finally:
            await sandbox.close()

    asyncio.run(run())


def test_a_box_that_is_killed_is_replaced_and_its_program_is_run_again():
    async def run():
        sandbox = Sandbox(1)
        try:
            await sandbox.run(Program(""))
            slow = asyncio.create_task(sandbox.run(Program("import time\ntime.sleep(0.5)\nprint('done')")))
            await asyncio.sleep(0.2)
            os.kill(sandbox._slots[0]._process.pid, signal.SIGKILL)
            assert (await slow).stdout == "done\n"
        finally:
            await sandbox.close()

    asyncio.run(run())


NICE = max(5, os.getpriority(os.PRIO_PROCESS, 0))
SPIN = """
import os, sys, time
count, wanted = int(input()), int(input())
pids = []
for _ in range(count):
    pids.append(os.fork())
    while not pids[-1]: pass
def nices(): return {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids}
while min(nices()) < wanted: time.sleep(0.02)
print(max(nices()))
"""


@pytest.mark.parametrize(("count", "more"), [(1, 0), (8, 10)])
def test_however_many_processes_run_they_give_way_as_one_would(box, count, more):
    """A step of nice is a factor of 1.25, and 1.25 ** 10 is just more than 8."""
    wanted = min(19, NICE + more)
    outcome = box.run(Program(SPIN, f"{count}\n{wanted}\n", limits=Limits(seconds=SLACK)))
    # the first process itself may run at the time of a look
    assert outcome.ending == "ok" and wanted <= int(outcome.stdout) <= wanted + (4 if count == 1 else 1), outcome


AS_NOBODY = """
from titan_rl.environments.sandbox.program import Program
from titan_rl.environments.sandbox.slot import Slot
slot = Slot()
long = "import time; time.sleep(0.3); print('slept')"
alone = "import ctypes, os, threading, time; "
alone += "hold = lambda: (time.sleep(0.2), bytearray(b'x') * (300 << 20), time.sleep(9))"
alone += "; threading.Thread(target=hold).start()"
alone += "; ctypes.CDLL(None).syscall({'x86_64': 60}.get(os.uname().machine, 93))"
for source in ("import os; print(os.getuid(), os.listdir('/tmp'))", "import os\\nwhile True: os.fork()", long, alone):
    print(slot.run(Program(source)).ending, slot.run(Program(source)).stdout.strip())
slot.close()
"""


def test_it_needs_no_root():
    """As a user without rights whose processes are nice, with another Python and the sandbox's own files alone."""
    python = Path("/usr/bin/python3")
    if os.geteuid() != 0 or not python.exists():
        pytest.skip("only root can become another user here, and that user needs a Python of the system's")
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "titan_rl" / "environments" / "sandbox"
        shutil.copytree(
            Path(bubblewrap.__file__).parent, package, ignore=shutil.ignore_patterns("pool.py", "__pycache__")
        )
        shutil.copy(pyseccomp.__file__, folder)
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)
        nobody = dict(user=65534, group=65534, extra_groups=[], env={"PATH": "/usr/bin", "PYTHONPATH": folder})
        command = ["nice", "-n", "9", str(python), "-B", "-c", AS_NOBODY]
        done = subprocess.run(command, cwd=folder, **nobody, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["ok 65534 []", "error ", "ok slept", "memory "], done.stderr


def test_without_walls_nothing_is_run(monkeypatch):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    pool._check_boxes.cache_clear()
    with pytest.raises(ConfigError, match="bubblewrap is not installed; apt-get install bubblewrap") as caught:
        check_sandbox()
    assert "\n" not in str(caught.value)
    with pytest.raises(SandboxFailed, match="not installed"):
        Slot().run(Program("print(1)"))


def test_a_box_that_does_not_start_says_why(monkeypatch):
    monkeypatch.setattr(slot, "command", lambda *numbers: ["/bin/sh", "-c", "echo bwrap: no permission >&2"])
    with pytest.raises(SandboxFailed, match="bwrap: no permission"):
        Slot().start()


SLOW_END = """
import socket, sys
control, _ = map(int, sys.argv[1:])
host = socket.socket(fileno=control)
host.send(b"ready")
_, descriptors, *_ = socket.recv_fds(host, 4096, 3)
task = socket.socket(fileno=descriptors[0])
BEGUN
while host.recv(100): pass
"""
"""A box that is told of a program, and never of its end."""


def never_ending(begun: str):
    return lambda *numbers: [sys.executable, "-S", "-c", SLOW_END.replace("BEGUN", begun), *map(str, numbers)]


def test_an_end_that_takes_long_is_the_programs(monkeypatch):
    monkeypatch.setattr(slot, "command", never_ending("task.send(b'begun\\n')"))
    one = Slot()
    outcome = one.run(Program("", limits=Limits(seconds=2.0)))
    assert (outcome.ending, outcome.exit_code) == ("timeout", -signal.SIGKILL)
    assert one._process is None, "what still ends there would be the next program's"


def test_what_did_not_begin_did_not_take_too_long(monkeypatch):
    monkeypatch.setattr(slot, "command", never_ending(""))
    with pytest.raises(SandboxFailed, match="did not begin"):
        Slot().run(Program("", limits=Limits(seconds=0.1)))


@pytest.mark.parametrize(
    ("source", "endings"),
    [
        ("while True: pass", {"timeout"}),
        ("import time\nwhile True: time.sleep(9)", {"timeout"}),
        ("kept = []\nwhile True: kept.append(bytearray(1 << 20))", {"memory", "error"}),
        ("while True: print('x' * 1000)", {"output"}),
        ("import os\nwhile True: os.fork()", {"error", "memory"}),
        ("import os\nwhile True: os.open('/', 0)", {"error"}),
        ("n = 0\nwhile True: n += 1; open(f'file {n}', 'w')", {"error"}),
        ("file = open('file', 'wb')\nwhile True: file.write(bytes(1 << 20))", {"error"}),
        ("import threading\nevent = threading.Event()\nwhile True: threading.Thread(target=event.wait).start()",
         {"error", "timeout"}),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM), os.abort()", {"error"}),
        ("import os\nos.closerange(0, 40)\nos._exit(1)", {"error"}),
        ("import sys\nsys.setrecursionlimit(1 << 30)\ndef f(): return f()\nf()", {"error", "memory"}),
    ],
)  # fmt: skip
def test_what_it_takes_too_much_of_is_its_own(box, source, endings):
    """Never the box's: a wrong answer could choose not to count."""
    seconds = 1.0 if "timeout" in endings else SLACK
    outcome = box.run(Program(source, limits=Limits(seconds=seconds, memory=128 << 20)))
    assert outcome.ending in endings, outcome
