"""What one program does, no other one can tell: in the same box behind it, or in another one beside it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from boxes import need_boxes

from titan_rl.environments.sandbox.program import Limits, Program
from titan_rl.environments.sandbox.slot import Slot

TRIES = 8
LIMITS = Limits(seconds=20.0)
_START = """
import fcntl, json, os, socket, struct, time
def attempt(function, *arguments):
    try: return function(*arguments)
    except Exception as error: return type(error).__name__
"""
_PAGE = """
import ctypes, platform, threading
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(None, ctypes.c_size_t(4096), 1, 2, os.open(json.__file__, os.O_RDONLY), ctypes.c_long(0))
word = ctypes.c_void_p(page), ctypes.c_uint32.from_address(page)
FUTEX, SET_TID_ADDRESS = {"x86_64": (202, 218)}.get(platform.machine(), (98, 96))
def speak(call):
    threading.Thread(target=lambda: [(call(), time.sleep(0.02)) for _ in range(150)], daemon=True).start()
"""
"""A page of the library's, as each program has it mapped, and ``speak``: for three seconds, beside the rest."""
_WAKE = "speak(lambda: libc.syscall(FUTEX, word[0], 1, 9, None, None, 0))"
_END = "speak(lambda: threading.Thread(target=lambda: libc.syscall(SET_TID_ADDRESS, word[0])).start())"
"""The kernel itself wakes one who waits where a thread wanted its end to be told."""
_WOKEN = """
limit = (ctypes.c_long * 2)(0, 300_000_000)
print(any(libc.syscall(FUTEX, word[0], operation, word[1], limit, None, 0) == 0 for operation in (0, 0)))
"""
BESIDE = {
    "futex in a page of the library": (_PAGE + _WAKE, _PAGE + _WOKEN),
    "end of a thread, told in a page of the library": (_PAGE + _END, _PAGE + _WOKEN),
    "priority of the user": (
        "attempt(os.setpriority, os.PRIO_USER, 0, 19)",
        "print(os.getpriority(os.PRIO_USER, 0) == 19)",
    ),
    "flock of the library": (
        "attempt(fcntl.flock, os.open(json.__file__, os.O_RDONLY), fcntl.LOCK_EX)",
        "print(attempt(fcntl.flock, os.open(json.__file__, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB))",
    ),
    "flock of a device": (
        "attempt(fcntl.flock, os.open('/dev/null', os.O_RDONLY), fcntl.LOCK_EX)",
        "print(attempt(fcntl.flock, os.open('/dev/null', os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB))",
    ),
    "lock of a part of a file": (
        "attempt(fcntl.lockf, os.open('/dev/null', os.O_RDWR), fcntl.LOCK_EX)",
        "print(attempt(fcntl.lockf, os.open('/dev/null', os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB))",
    ),
    "times of a device": (
        "attempt(os.utime, '/dev/null')",
        "print(os.stat('/dev/null').st_mtime_ns)",
    ),
    "events of files": (
        "for _ in range(150): json.__file__ and open(json.__file__).close(), time.sleep(0.02)",
        """
import ctypes
libc = ctypes.CDLL(None)
watch = libc.inotify_init1(os.O_NONBLOCK)
libc.inotify_add_watch(watch, json.__file__.encode(), 32)
time.sleep(0.3)
print(attempt(lambda: len(os.read(watch, 16))))
""",
    ),
}
"""What the one does before it waits, and what the other one looks at."""
LEAVE = r"""
one, other = socket.socketpair()
name = socket.socketpair()[0]
try:
    name = socket.socket(socket.AF_UNIX)
    name.bind("\0left"), name.listen()
    socket.send_fds(one, [b"x"], [one.fileno(), other.fileno(), name.fileno()])
    socket.send_fds(other, [b"x"], [one.fileno(), other.fileno(), name.fileno()])
except OSError: pass
os._exit(0)
"""
FIND = r"print(attempt(lambda: socket.socket(socket.AF_UNIX).connect('\0left')))"


@pytest.fixture(scope="module")
def boxes():
    need_boxes()
    both = Slot(), Slot()
    for each in both:
        each.start()  # a box ends with the thread that started it
    yield both
    for each in both:
        each.close()


@pytest.mark.parametrize("channel", BESIDE)
def test_not_beside_each_other(boxes, channel):
    speaks, hears = (_START + source for source in BESIDE[channel])
    first, second = boxes

    def heard():
        outcome = second.run(Program(hears, limits=LIMITS))
        assert outcome.ending == "ok", outcome
        return outcome.stdout

    before = heard()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(first.run, Program(f"{speaks}\ntime.sleep(3)", limits=LIMITS))
        found = [heard()]
        while not running.done():
            found.append(heard())
    assert running.result().ending == "ok" and set(found) == {before}


def test_not_one_after_the_other(boxes):
    box, _ = boxes
    alone = box.run(Program(_START + FIND, limits=LIMITS)).stdout
    for _ in range(TRIES):
        assert box.run(Program(_START + LEAVE, limits=LIMITS)).ending == "ok"
        assert box.run(Program(_START + FIND, limits=LIMITS)).stdout == alone
