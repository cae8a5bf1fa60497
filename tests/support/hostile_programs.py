"""Programs that try to earn a verdict by anything but the right values, to get out, to stay, or to take all there is.

They are handed in for a function ``solve(n)`` of which the right value is ``n * n + 7``, tested on numbers that they
are called with, or that they read from standard input. None of them knows the rule. Those that guess the right values
give them as another type, so that they are wrong as well.
"""

import os
from dataclasses import dataclass

from tree import TREE


@dataclass(frozen=True)
class Hostile:
    """``SECRET_FILE`` and ``HOST_PID`` in the source are the host's, and ``TREE_FOLDER`` is where this tree lies."""

    source: str
    only_runs: bool = False
    """It takes its whole deadline, so that one run is enough."""
    endings: tuple[str, ...] = ()
    """As it must end, if that is known: ``ok`` for one that is glad of each refusal."""


HOSTILE: dict[str, Hostile] = {}


def case(name: str, source: str, *, only_runs: bool = False, endings: tuple[str, ...] = ()) -> None:
    assert name not in HOSTILE
    HOSTILE[name] = Hostile(source.replace("TREE_FOLDER", str(TREE)), only_runs or bool(endings), endings)


_SYSTEM_CALLS = {  # on x86-64, and elsewhere
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "cachestat": (451, 451),
    "capset": (126, 91),
    "chroot": (161, 51),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "close_range": (436, 436),
    "exit": (60, 93),
    "fadvise64": (221, 223),
    "fanotify_init": (300, 262),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "futex": (202, 98),
    "init_module": (175, 105),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "listmount": (458, 458),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mincore": (27, 232),
    "mknodat": (259, 33),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pivot_root": (155, 41),
    "preadv2": (327, 286),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "seccomp": (317, 277),
    "semget": (64, 190),
    "sendfile": (40, 71),
    "sendmmsg": (307, 269),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "splice": (275, 76),
    "statmount": (457, 457),
    "swapon": (167, 224),
    "syncfs": (306, 267),
    "sysinfo": (99, 179),
    "syslog": (103, 116),
    "tee": (276, 77),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}
_HERE = {name: numbers[os.uname().machine != "x86_64"] for name, numbers in _SYSTEM_CALLS.items()}
_KERNEL = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    result = libc.syscall(ctypes.c_long({_HERE}[name]), *arguments)
    print(name, result, ctypes.get_errno())
    return result
"""
"""``call`` makes a system call, and goes on when it is refused."""
_TRY = """
def attempt(function, *arguments):
    try:
        got = function(*arguments)
        print(function, got)
        return got
    except BaseException as error:
        print(function, repr(error))
"""
"""``attempt`` says what came of a call, and goes on."""
_REFUSED = """
import sys
def refused(function, *arguments):
    try:
        got = function(*arguments)
    except OSError as error:
        return print(function, error)
    if got != -1: sys.exit(f"{function} {arguments} gave {got}")
"""
"""``refused`` ends the program with an error when a call is not."""
_READ = """
def read(path):
    try:
        with open(path, errors="replace") as file:
            print(path, file.read(4096))
    except OSError as error:
        print(path, error.strerror)
"""
_RUNNER = """
import sys
frame = sys._getframe()
while frame.f_back:
    frame = frame.f_back
    if "_called" in frame.f_globals:
        runner = frame.f_globals
"""
"""``runner`` has the names of what runs the program."""


# endless: at import, in the call, at exit and deletion, in other threads, in what waits

case("endless: loop", "while True: pass", only_runs=True)
case("endless: sleep in the call", "import time\ndef solve(n): time.sleep(1e6)", only_runs=True)
case("endless: at exit", "import atexit\n@atexit.register\ndef end():\n    while True: pass", only_runs=True)
case(
    "endless: at deletion",
    "class Held:\n    def __del__(self):\n        while True: pass\nheld = Held()\ndel held",
    only_runs=True,
)
case(
    "endless: thread",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,)).start()",
    only_runs=True,
)
case(
    "endless: in a signal's handler",
    """
import signal
def handle(*_):
    while True: pass
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
""",
    only_runs=True,
)
case(
    "endless: all signals ignored",
    """
import signal
for number in signal.valid_signals():
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
while True: pass
""",
    only_runs=True,
)
case(
    "endless: regular expression", "import re\ndef solve(n): return re.match('(a+)+$', 'a' * 60 + 'b')", only_runs=True
)
case("endless: integer", "def solve(n): return 9 ** 9 ** 9", only_runs=True)
case(
    "endless: integer as text",
    "import sys\nsys.set_int_max_str_digits(0)\ndef solve(n): return len(str(7 ** 3_000_000))",
    only_runs=True,
)
case("endless: generator", "import itertools\ndef solve(n): return sum(itertools.count())", only_runs=True)
case("endless: standard input", "import sys\nwhile True: sys.stdin.read()", only_runs=True)
case("endless: pipe", "import os\nhere, there = os.pipe()\nos.read(here, 1)", only_runs=True)
case(
    "endless: the runner's own socket",
    """
import os
for number in range(3, 64):
    try:
        while True: print(os.read(number, 100) or "", end="")
    except OSError: pass
""",
    only_runs=True,
)
case("endless: lock", "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()", only_runs=True)
case(
    "endless: two locks",
    """
import threading, time
one, other = threading.Lock(), threading.Lock()
def take(first, second):
    with first:
        time.sleep(0.05)
        with second: pass
threading.Thread(target=take, args=(one, other)).start()
threading.Thread(target=take, args=(other, one)).start()
""",
    only_runs=True,
)
case(
    "endless: it waits for a child that is stopped",
    """
import os, signal
if not os.fork():
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
os.wait()
""",
    only_runs=True,
)
case(
    "endless: type of which the name is asked for",
    """
class Endless(type):
    @property
    def __name__(self):
        while True: pass
class Value(metaclass=Endless): pass
def solve(n): return Value()
""",
    only_runs=True,
)
case(
    "endless: text of an error",
    """
class Loud(Exception):
    def __str__(self):
        while True: pass
def solve(n): raise Loud
""",
    only_runs=True,
)


# bombs: processes and threads

case("bomb: forks", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", only_runs=True)
case(
    "bomb: forks that end",
    """
import os, time
end = time.monotonic() + 0.3
while time.monotonic() < end:
    try:
        if not os.fork(): os._exit(0)
    except OSError: break
""",
)
case(
    "bomb: threads",
    """
import threading, time
try:
    while True: threading.Thread(target=time.sleep, args=(0.2,), daemon=True).start()
except RuntimeError as error: print(error)
""",
)
case(
    "bomb: processes that wait for each other",
    """
import subprocess, sys
kept = []
try:
    while True: kept.append(subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE))
except OSError as error: print(error, len(kept))
""",
)
case(
    "bomb: a pool of processes",
    """
import multiprocessing
def solve(n):
    with multiprocessing.Pool(64) as pool: return pool.map(abs, range(64))
""",
    only_runs=True,
)

# bombs: memory

case("bomb: list", "kept = []\nwhile True: kept.append(bytearray(1 << 20))")
case("bomb: bytes at once", "def solve(n): return len(bytearray(1 << 40))")
case("bomb: text", "text = 'x'\nwhile True: text += text")
case("bomb: shifted integer", "def solve(n): return 1 << (1 << 40)")
case(
    "bomb: mapped memory",
    """
import mmap
kept = []
while True:
    kept.append(mmap.mmap(-1, 1 << 22))
    kept[-1].write(b"x" * (1 << 22))
""",
)
case(
    "bomb: shared pages that are let go",
    """
import mmap, os
kept = []
os.fork(), os.fork(), os.fork()
try:
    for _ in range(60):
        kept.append(mmap.mmap(-1, 1 << 20))
        kept[-1].write(b"x" * (1 << 20))
        kept[-1].madvise(mmap.MADV_DONTNEED)
except (OSError, MemoryError) as error: print(error)
""",
)
case(
    "bomb: memory of children",
    """
import os, time
for _ in range(12):
    if not os.fork():
        kept = bytearray(os.urandom(1 << 20) * 60)
        time.sleep(1e6)
time.sleep(1e6)
""",
)
case(
    "bomb: socket buffers",
    """
import socket
kept = []
try:
    while True:
        kept.append(socket.socketpair())
        for end in kept[-1]:
            end.setblocking(False)
            try:
                while True: end.send(b"x" * 65536)
            except BlockingIOError: pass
except OSError as error: print(error, len(kept))
""",
)
case(
    "bomb: pipe buffers",
    """
import fcntl, os
kept = []
try:
    while True:
        here, there = os.pipe()
        kept.append(there)
        os.set_blocking(there, False)
        try: fcntl.fcntl(there, 1031, 1 << 20)
        except OSError: pass
        try:
            while True: os.write(there, b"x" * 65536)
        except BlockingIOError: pass
except OSError as error: print(error, len(kept))
""",
)
case("bomb: deep recursion", "import sys\nsys.setrecursionlimit(1 << 30)\ndef solve(n): return solve(n) + 1")
case(
    "bomb: recursion in C",
    "import sys\nsys.setrecursionlimit(1 << 30)\nkept = ()\nfor _ in range(10**6): kept = (kept,)\nprint(hash(kept))",
)
case("bomb: deep source", "eval('(' * 100000 + ')' * 100000)")
case("bomb: segmentation fault", "import ctypes\nctypes.string_at(0)")
case(
    "bomb: value nested deeply",
    "def solve(n):\n    kept = []\n    for _ in range(10**5): kept = [kept]\n    return kept",
)
case("bomb: value that holds itself", "def solve(n):\n    kept = []\n    kept.append(kept)\n    return kept")
case("bomb: wide value", "def solve(n): return [0] * 10**6")
case(
    "bomb: value that doubles with its depth",
    "def solve(n):\n    kept = []\n    for _ in range(40): kept = [kept, kept]\n    return kept",
    only_runs=True,
)
case("bomb: long text as a value", "def solve(n): return 'x' * (32 << 20)")
case(
    "bomb: what unpacks to far more",
    """
import zlib
packed = zlib.compress(zlib.compress(bytes(64 << 20), 9), 9)
def solve(n): return len(zlib.decompress(zlib.decompress(packed)) * 16)
""",
)
case(
    "bomb: keys that all have one hash",
    "def solve(n): return {i * (2**61 - 1): 0 for i in range(800)}",
)

# bombs: files

case(
    "bomb: disk",
    """
for at in range(100):
    try:
        with open(f"/tmp/{at}", "wb") as file:
            while True: file.write(bytes(1 << 20))
    except OSError as error: print(error)
""",
)
case(
    "bomb: file names",
    """
import os
for folder in ("/tmp", "/dev/shm"):
    try:
        for at in range(10**6): os.mkdir(f"{folder}/{at}")
    except OSError as error: print(error)
""",
)
case(
    "bomb: deep folders",
    """
import os
try:
    while True:
        os.mkdir("x" * 200)
        os.chdir("x" * 200)
except OSError as error: print(error)
""",
)
case(
    "bomb: sparse file",
    """
import os
file = os.open("/tmp/sparse", os.O_RDWR | os.O_CREAT)
for size in (1 << 62, 1 << 40, 1 << 30, 1 << 24):
    try: os.ftruncate(file, size)
    except OSError as error: print(error)
try: os.posix_fallocate(file, 0, 1 << 40)
except OSError as error: print(error)
""",
)
case(
    "bomb: hard links",
    """
import os
open("/tmp/one", "w").close()
try:
    for at in range(10**6): os.link("/tmp/one", f"/tmp/{at}")
except OSError as error: print(error)
""",
)
case(
    "bomb: files that have no name",
    """
import tempfile
kept = []
try:
    while True:
        kept.append(tempfile.TemporaryFile(dir="/dev/shm"))
        kept[-1].write(bytes(1 << 20))
except OSError as error: print(error, len(kept))
""",
)
case(
    "bomb: shared memory",
    """
from multiprocessing import shared_memory
kept = []
try:
    while True:
        kept.append(shared_memory.SharedMemory(create=True, size=1 << 20))
        kept[-1].buf[:] = bytes(1 << 20)
except BaseException as error: print(error, len(kept))
""",
)
case(
    "bomb: shared memory of System V",
    _KERNEL + "for key in range(1000): call('shmget', key, ctypes.c_size_t(1 << 30), 0o1777)",
)
case(
    "bomb: memory files",
    _KERNEL
    + """
for at in range(40):
    number = call("memfd_create", b"x", 0)
    if number >= 0: os.write(number, bytes(16 << 20))
call("memfd_secret", 0)
""",
)
case(
    "bomb: descriptors",
    """
import os
try:
    while True: os.dup(1)
except OSError as error: print(error)
import resource
try: resource.setrlimit(resource.RLIMIT_NOFILE, (10**6, 10**6))
except (OSError, ValueError) as error: print(error)
""",
)
case(
    "bomb: descriptors in flight",
    """
import os, socket
one, other = socket.socketpair()
one.setblocking(False)
try:
    while True: socket.send_fds(one, [b"x"], [one.fileno(), other.fileno()] * 20)
except OSError as error: print(error)
for number in range(3, 64):
    try: socket.send_fds(socket.socket(fileno=os.dup(number)), [b"x"], [one.fileno(), 1, number])
    except OSError: pass
""",
)
case(
    "bomb: terminals",
    "import os\nkept = []\ntry:\n    while True: kept.append(os.openpty())\nexcept OSError as error: print(error)",
)

# bombs: output

case("bomb: output", "while True: print('x' * 1000)")
case("bomb: errors", "import sys\nwhile True: sys.stderr.write('x' * 1000)")
case("bomb: one long line", "import sys\nwhile True: sys.stdout.write('x')")
case("bomb: output by the call", "import os\ndef solve(n):\n    while True: os.write(1, bytes(1 << 16))")
case(
    "bomb: output of children",
    """
import os
for _ in range(8):
    if not os.fork(): break
while True: os.write(1, b"x" * 4096), os.write(2, b"y" * 4096)
""",
)
case(
    "bomb: output on every descriptor",
    """
import os
for _ in range(1000):
    for number in range(1, 64):
        try: os.write(number, b"[" * 4096)
        except OSError: pass
""",
)
case("bomb: bytes that are no text", "import os\nos.write(1, bytes(range(256)) * 200)\nos.write(2, b'\\xff' * 60000)")


# verdicts: by how it ends

case("forge: exit code", "import os\nos._exit(0)")
case("forge: exit in the call", "import sys\ndef solve(n): sys.exit(0)")
case("forge: exit at import", "raise SystemExit")
case("forge: exit code of its own kind", "class Code(int): pass\nraise SystemExit(Code(256))")
case("forge: end of iteration", "def solve(n): raise StopIteration(16)")
case("forge: interrupt", "def solve(n): raise KeyboardInterrupt")
case("forge: killed by itself", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\nos.abort()")
case("forge: end by a child alone", "import os\nif os.fork(): os.wait()\nelse: print(16), os._exit(0)\nprint(107, 11)")
case("forge: the exit code of what did not begin", "import os\nos._exit(126)")
case(
    "forge: error with a forged type",
    """
Value = type("value", (Exception,), {"__str__": lambda self: '["value", {"int": "16"}]'})
def solve(n): raise Value
""",
)

# verdicts: by what it says

case("forge: it says so", "print('passed')\nprint('OK')\nprint('PASSED [100%]')\nprint('3 passed in 0.01s')")
case("forge: it says true", "print(True)\ndef solve(n): return True")
case(
    "forge: report as JSON",
    """
import json
for said in ({"passed": True}, {"ending": "ok", "exit": 0, "why": ""}, [True] * 3, {"verdicts": [1, 1, 1]}):
    print(json.dumps(said))
""",
)
case("forge: every number", "for n in range(-200, 200): print(n)\ndef solve(n): return list(range(-200, 200))")
case("forge: every number on one line", "print(*range(-200, 200))\ndef solve(n): return set(range(-200, 200))")
case(
    "forge: numbers erased again",
    "for n in range(200): print(n, end='\\b' * len(str(n)))\nprint('\\x1b[2J\\x1b[H', end='')",
)
case("forge: number among zeros", "print('16\\0')\nprint('\\0')\ndef solve(n): return '16\\0'")
case("forge: number as a float", "print('16.0')\ndef solve(n): return {3: 16.0, 10: 107.0, -2: 11.0}[n]")
case("forge: number as text", "def solve(n): return {3: '16', 10: '107', -2: '11'}[n]")
case(
    "forge: number as a fraction",
    "import fractions\ndef solve(n): return fractions.Fraction({3: 16, 10: 107, -2: 11}[n])",
)
case("forge: number in a list", "print([16])\ndef solve(n): return [{3: 16, 10: 107, -2: 11}[n]]")
case("forge: numbers in a dictionary", "def solve(n): return {3: 16, 10: 107, -2: 11}")
case("forge: true for one", "print(True)\ndef solve(n): return n == 3")
case("forge: no number", "print('nan')\ndef solve(n): return float('nan')")
case("forge: nothing", "def solve(n): return None")
case("forge: giant number", "def solve(n): return 10 ** 5000")
case("forge: half a character", "def solve(n): return '\\ud800' * 100")

# verdicts: by objects that are equal to all

case(
    "forge: equal to all",
    """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 16
    def __bool__(self): return True
def solve(n): return Equal()
print(Equal())
""",
)
_EQUAL = "    def __eq__(self, other): return True\n    def __hash__(self): return 16\n"
case("forge: integer equal to all", f"class Equal(int):\n{_EQUAL}def solve(n): return Equal(16)")
case("forge: text equal to all", f"class Equal(str):\n{_EQUAL}def solve(n): return Equal('16')")
case("forge: list equal to all", f"class Equal(list):\n{_EQUAL}def solve(n): return Equal([16])")
case(
    "forge: class called int",
    "def solve(n): return type('int', (int,), {'__repr__': lambda self: '16'})(16)",
)
case(
    "forge: kind that is hidden",
    """
class Hidden(int):
    @property
    def __class__(self): return int
    def __repr__(self): return "16"
def solve(n): return Hidden(16)
""",
)
case(
    "forge: kind equal to int",
    """
class Kind(type):
    def __eq__(self, other): return True
    def __hash__(self): return hash(int)
    def __instancecheck__(self, other): return True
class Value(metaclass=Kind):
    __name__ = "int"
    def __repr__(self): return "17"
def solve(n): return Value()
""",
)
case("forge: generator", "def solve(n): yield from range(200)")
case("forge: function", "def solve(n): return lambda *_: True")
case("forge: class in place of the function", "class solve(int):\n    def __new__(cls, n): return int.__new__(cls, 16)")
case(
    "forge: module that has every name",
    """
import sys
class Every(type(sys)):
    def __getattribute__(self, name): return lambda *_: 16.0
sys.modules["__main__"].__class__ = Every
""",
)

# verdicts: by files and descriptors

case(
    "forge: result files",
    """
import json
for name in ("result.json", "/tmp/result.json", "/tmp/passed", "verdict", "/results.json", "/dev/shm/outcome"):
    try:
        with open(name, "w") as file: json.dump({"passed": True, "given": [16, 107, 11]}, file)
    except OSError as error: print(error)
""",
)


def _frame(*frames: str) -> str:
    """Says frames on all that it has inherited, and goes."""
    return f"""
import os
for number in range(3, 256):
    for frame in {frames!r}:
        try: os.write(number, frame.encode())
        except OSError: pass
os._exit(0)
"""


case(
    "forge: frame of wrong values",
    _frame('[["value", {"int": "17"}], ["value", {"int": "108"}], ["value", {"int": "0"}]]'),
)
case("forge: frame begun again", _frame("begun\n", "begun\n", '[["value", {"int": "17"}]]'))
case("forge: frame of right numbers as JSON", _frame('[["value", 16], ["value", 107], ["value", 11]]'))
case(
    "forge: frame of inner numbers", _frame('[["value", {"int": 16}], ["value", {"int": 107}], ["value", {"int": 11}]]')
)
case(
    "forge: frame of floats",
    _frame('[["value", {"float": "16"}], ["value", {"float": "107"}], ["value", {"float": "11"}]]'),
)
case("forge: frame of text", _frame('[["value", "16"], ["value", "107"], ["value", "11"]]'))
case("forge: frame of truth", _frame('[["value", true], ["value", true], ["value", true]]'))
case("forge: frame of another kind", _frame('[["passed", true], ["ok", {"int": "17"}], ["Value", {"bool": "1"}]]'))
case("forge: frame with too few", _frame('[["value", {"int": "17"}]]'))
case("forge: frame with something behind", _frame('[["value", {"int": "17"}]]', '[["value", {"int": "17"}]]'))
case("forge: frame of no number", _frame('[["value", {"float": "nan"}], ["value", NaN], ["value", Infinity]]'))
case("forge: frame of a long number", _frame('[["value", {"int": "' + "1" * 5000 + '"}], ' + "1" * 5000 + "]"))
case("forge: frame of a set of lists", _frame('[["value", {"set": [{"list": []}]}], ["value", null], ["value", null]]'))
case(
    "forge: frame of a dictionary of none", _frame('[["value", {"dict": [1]}], ["value", {"dict": "a"}], ["value", 1]]')
)
case("forge: frame of half characters", _frame('[["value", "\\ud800"], ["value", "\\udfff"], ["error", "\\ud800"]]'))
case(
    "forge: frame nested deeply",
    """
import os
for number in range(3, 64):
    try: os.write(number, b"[" * 30000 + b"]" * 30000)
    except OSError: pass
os._exit(0)
""",
)
case(
    "forge: frame of values nested deeply",
    """
import os
for number in range(3, 64):
    try: os.write(number, b'[["value", ' + b'{"list": [' * 3000 + b"]}" * 3000 + b"]]")
    except OSError: pass
os._exit(0)
""",
)
case(
    "forge: frame of one hash",
    """
import json, os
keys = [[{"int": str(i * (2**61 - 1))}, None] for i in range(1500)]
for number in range(3, 64):
    try: os.write(number, json.dumps([["value", {"dict": keys}]] * 1 + [["value", None]] * 2).encode())
    except OSError: pass
os._exit(0)
""",
)
case(
    "forge: frame in another encoding",
    """
import os
frame = '[["value", {"int": "17"}], ["value", null], ["value", null]]'
for number in range(3, 64):
    for encoding in ("utf-16", "utf-32", "utf-7"):
        try: os.write(number, frame.encode(encoding) + b"\\xff\\xfe")
        except OSError: pass
os._exit(0)
""",
)
case(
    "forge: frame before the true one",
    """
import os
def solve(n):
    for number in range(3, 64):
        try: os.write(number, b'[["value", {"int": "17"}], ')
        except OSError: pass
    return [n]
""",
)
case(
    "forge: frames by a child that goes on",
    """
import os, time
if not os.fork():
    time.sleep(0.05)
    for number in range(3, 64):
        try: os.write(number, b'[["value", {"int": "17"}]]')
        except OSError: pass
    time.sleep(1e6)
""",
)
case(
    "forge: runner's socket shut",
    """
import os, socket
for number in range(3, 64):
    try: socket.socket(fileno=os.dup(number)).shutdown(socket.SHUT_RDWR)
    except OSError: pass
def solve(n): return 16.0
""",
)
case("forge: all descriptors closed", "import os\nos.closerange(0, 64)\ndef solve(n): return 16.0")
case(
    "forge: urgent bytes",
    """
import os, socket
for number in range(3, 64):
    try:
        there = socket.socket(fileno=os.dup(number))
        there.send(b"[", socket.MSG_OOB), there.send(b"[]", socket.MSG_OOB), there.send(b"]")
    except OSError: pass
def solve(n): return 16.0
""",
)
case(
    "forge: standard output in place of the socket",
    """
import os
for number in range(3, 64):
    try: os.fstat(number), os.dup2(1, number)
    except OSError: pass
def solve(n): return 17
""",
)
case(
    "forge: nothing on the socket, then a reset",
    """
import os, socket, struct
for number in range(3, 64):
    try: socket.socket(fileno=number).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError: pass
os.closerange(3, 64)
os._exit(0)
""",
)

# verdicts: by what judges or runs it

case(
    "forge: patched json",
    """
import json
json.dumps = lambda *_, **__: '[["value", 16], ["value", 107], ["value", 11]]'
json.loads = lambda *_, **__: True
json.JSONEncoder.encode = lambda *_: "true"
def solve(n): return 1
""",
)
case(
    "forge: patched builtins",
    """
import builtins
builtins.type = lambda *_: int
builtins.repr = lambda *_: "17"
builtins.len = lambda *_: 3
builtins.getattr = lambda *_: lambda *_: 16.0
builtins.isinstance = lambda *_: True
def solve(n): return object()
""",
)
case(
    "forge: patched modules",
    """
import sys
for name in ("titan_rl", "titan_rl.environments.code", "titan_rl.environments.sandbox.values", "pytest"):
    module = type(sys)(name)
    module.passed = module.same = lambda *_: True
    sys.modules[name] = module
def solve(n): return 16.0
""",
)
case(
    "forge: patched exit",
    """
import os, sys
end = os._exit
os._exit = lambda code: end(0)
sys.exit = lambda *_: end(0)
raise RuntimeError
""",
)
case(
    "forge: patched descriptor",
    """
import socket
send = socket.socket.sendall
socket.socket.sendall = lambda self, said, *_: send(self, b'[["value", true], ["value", 16], ["value", "11"]]')
def solve(n): return 1
""",
)
case(
    "forge: runner's encoding replaced",
    _RUNNER
    + """
runner["_encoded"] = lambda value, depth=0: {"int": "17"}
def solve(n): return object()
""",
)
case(
    "forge: runner's call replaced",
    _RUNNER
    + """
runner["_called"] = lambda *_: ["value", {"int": "17"}]
runner["json"] = None
""",
)
case(
    "forge: runner's process told to go on",
    _RUNNER
    + """
print(runner["main"], runner["Box"].serve, runner["sys"].argv)
try: runner["main"]()
except BaseException as error: print(repr(error))
try: runner["fork_into_namespaces"]()
except BaseException as error: print(repr(error))
""",
)
case(
    "forge: runner found among all objects",
    """
import gc, types
for thing in gc.get_objects():
    if isinstance(thing, types.FunctionType) and thing.__name__ in ("_called", "_encoded", "same", "passed"):
        thing.__code__ = (lambda *_: ["value", 16]).__code__
def solve(n): return 1
""",
)
case(
    "forge: runner's frame changed",
    """
import ctypes, sys
def solve(n):
    frame = sys._getframe(1)
    while frame:
        for name in frame.f_locals:
            if name in ("code", "calls", "arguments"): frame.f_locals[name] = []
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), 0)
        frame = frame.f_back
    return 16.0
""",
)
case(
    "forge: traced runner",
    """
import sys
def trace(frame, event, value):
    if event == "return": frame.f_locals["value"] = 16
    return trace
sys.settrace(trace)
sys._getframe(1).f_trace = trace
sys.setprofile(trace)
def solve(n): return 16.0
""",
)
case(
    "forge: numbers poked into memory",
    """
import ctypes
for n in range(-5, 200):
    ctypes.c_long.from_address(id(n) + 24).value = 17
def solve(n): return n
""",
)
case(
    "forge: type of a number poked into memory",
    """
import ctypes
def solve(n):
    value = 16.0
    ctypes.c_void_p.from_address(id(value) + 8).value = id(type("int", (float,), {}))
    return value
""",
)
case(
    "forge: slots of int poked into memory",
    """
import ctypes, gc
own = gc.get_referents(int.__dict__)[0]
own["__eq__"] = lambda *_: True
own["__repr__"] = lambda *_: "17"
ctypes.pythonapi.PyType_Modified(ctypes.py_object(int))
def solve(n): return 17
""",
)
case(
    "forge: at exit",
    """
import atexit, os, sys
atexit.register(os._exit, 0)
sys.excepthook = sys.unraisablehook = lambda *_: os._exit(0)
raise RuntimeError
""",
)
case(
    "forge: failing output",
    """
import sys
class Broken:
    def write(self, text): return 16
    def flush(self): raise SystemExit(0)
sys.stdout = sys.stderr = Broken()
def solve(n): raise RuntimeError
""",
)
case(
    "forge: threads that outlive the program",
    """
import threading, time, os
threading._shutdown = lambda: None
threading.Thread(target=lambda: (time.sleep(0.1), os.write(1, b"17"))).start()
""",
)
case(
    "forge: all frames searched for what is expected",
    """
import sys
def solve(n):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [(name, str(value)) for name, value in {**frame.f_globals, **frame.f_locals}.items()]
        frame = frame.f_back
    wanted = [value for name, value in seen if "expect" in name.lower() or "answer" in name.lower()]
    print(wanted)
    return int(wanted[0])
""",
)


# theft: of tests, of what the host knows

case("theft: secret file", "print(open('SECRET_FILE').read())\ndef solve(n): return open('SECRET_FILE').read()")
case(
    "theft: folders of the secret file",
    _TRY
    + """
import os
folder = "SECRET_FILE"
while folder != "/":
    folder = os.path.dirname(folder)
    attempt(os.listdir, folder), attempt(os.stat, folder)
""",
)
case("theft: environment", "import os\nprint(dict(os.environ), os.environb, os.getenv('TITAN_RL_TOKEN'))")
case(
    "theft: environment in memory",
    """
import ctypes
at = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
while at[0]:
    print(at[0])
    at = ctypes.cast(ctypes.addressof(at.contents) + 8, ctypes.POINTER(ctypes.c_char_p))
""",
)
case(
    "theft: environment of the box's first arguments",
    """
import ctypes
start = ctypes.c_char_p.in_dll(ctypes.CDLL(None), "program_invocation_name")
at = ctypes.cast(start, ctypes.c_void_p).value & ~4095
print(ctypes.string_at(at, 4096))
""",
)
case(
    "theft: environment of other processes",
    _READ
    + """
for pid in ("self", "1", "2", "3", "HOST_PID", "thread-self"):
    for name in ("environ", "cmdline", "maps", "mem", "stat", "status", "mountinfo", "cgroup", "net/unix"):
        read(f"/proc/{pid}/{name}")
""",
)
case("theft: arguments", "import sys\nprint(sys.argv, sys.orig_argv, sys.flags, sys.path, sys.executable)")
case("theft: environment of a child", "import subprocess\nprint(subprocess.run(['/usr/bin/env'], capture_output=True))")
case(
    "theft: whole file system",
    """
import os
for folder, folders, files in os.walk("/"):
    if folder.startswith(("/usr", "/python", "/lib")): folders.clear()
    print(folder, folders[:50], files[:50])
""",
)
case(
    "theft: likely folders",
    _TRY
    + """
import os
homes = ("/root", "/home", "/tmp", "TREE_FOLDER/..", "TREE_FOLDER")
for folder in (*homes, "/var", "/etc", "/mnt", "/run", "/sys", "/opt"):
    attempt(os.listdir, folder)
""",
)
case(
    "theft: likely files",
    _READ
    + """
for path in ("/etc/passwd", "/etc/shadow", "/etc/hosts", "/root/.bash_history", "/root/.ssh/id_rsa", "/proc/1/environ",
             "/tests.json", "/tmp/tests.json", "expected.json", "/sys/kernel/notes", "/proc/kcore", "/proc/keys"):
    read(path)
""",
)
case(
    "theft: way up from where it is",
    _READ
    + """
for up in range(12):
    read("../" * up + "SECRET_FILE"), read("/proc/self/root" + "/.." * up + "SECRET_FILE")
""",
)
case(
    "theft: names of descriptors",
    _TRY
    + """
import os
for number in range(64):
    for folder in ("/proc/self/fd", "/dev/fd", "/proc/1/fd"): attempt(os.readlink, f"{folder}/{number}")
""",
)
case(
    "theft: folders behind descriptors",
    """
import os
for number in range(256):
    for path in ("SECRET_FILE"[1:], "..", "../../..", "."):
        try: print(number, path, os.listdir(os.open(path, os.O_RDONLY, dir_fd=number)))
        except OSError: pass
""",
)
case(
    "theft: rest of what was sent",
    """
import os, socket
for number in range(3, 256):
    try:
        there = socket.socket(fileno=os.dup(number))
        there.setblocking(False)
        print(number, there, there.getsockname(), there.getpeername())
        print(there.recvmsg(1 << 16, 4096, socket.MSG_PEEK), there.recv(1 << 16))
    except OSError: pass
""",
)
case(
    "theft: descriptors asked for",
    """
import os, socket
for number in range(3, 64):
    try:
        there = socket.socket(fileno=os.dup(number))
        there.setblocking(False)
        there.send(b"kill"), there.send(b'{"seconds": 100}'), there.send(b"\\n")
        print(socket.recv_fds(there, 4096, 16))
    except OSError: pass
os._exit(0)
""",
)
case(
    "escape: process at the other end of the socket",
    """
import os, signal, socket, struct
for number in range(3, 16):
    try:
        there = socket.socket(fileno=os.dup(number))
        pid, user, group = struct.unpack("iii", there.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        print(pid, user, group, flush=True)
        watch = there.getsockopt(socket.SOL_SOCKET, 77)
        for number in (0, signal.SIGTERM): print(signal.pidfd_send_signal(watch, number))
    except OSError: pass
""",
)
case(
    "theft: memory through frames",
    """
import sys
frame = sys._getframe()
while frame:
    print(frame.f_code.co_filename, sorted(frame.f_locals), {k: repr(v)[:200] for k, v in frame.f_locals.items()})
    frame = frame.f_back
def solve(n): print(sys._getframe(1).f_locals)
""",
)
case(
    "theft: memory through all objects",
    """
import gc
gc.unfreeze()
for thing in gc.get_objects():
    if isinstance(thing, dict):
        for key, value in list(thing.items()):
            if isinstance(value, str) and ("expected" in str(key) or "token" in value): print(key, value[:300])
""",
)
case(
    "theft: freed memory",
    """
import ctypes
kept = [ctypes.create_string_buffer(1 << 16) for _ in range(10)]
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for size in (64, 256, 1024, 4096, 65536):
    for _ in range(50):
        found = ctypes.string_at(libc.malloc(size), size)
        if b"oken-" in found or b"expected" in found: print(found)
""",
)
case(
    "theft: memory as a file",
    """
for path in ("/proc/self/mem", "/proc/1/mem", "/proc/HOST_PID/mem", "/dev/mem", "/dev/kmem", "/dev/port"):
    try:
        with open(path, "r+b", buffering=0) as file: print(file.seek(id(path)), file.read(100))
    except OSError as error: print(error)
""",
)
case(
    "theft: memory of a neighbour",
    _KERNEL
    + """
buffer = ctypes.create_string_buffer(4096)
pair = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 4096)
other = (ctypes.c_size_t * 2)(id(call), 4096)
for pid in (os.getppid(), os.getpid(), 1, 2, 3, HOST_PID):
    call("process_vm_readv", pid, pair, 1, other, 1, 0), call("process_vm_writev", pid, pair, 1, other, 1, 0)
    print(buffer.raw.strip(b"\\0"))
""",
)
case(
    "theft: the sandbox's own source",
    _READ
    + """
import sys
for path in ("/zygote.py", "program.py", "/zygote.pyc", "/__pycache__"): read(path)
print(sys.modules)
""",
)
case(
    "theft: the sandbox's own module",
    """
import importlib.util, sys
sys.path += ["/", "TREE_FOLDER", "/python/lib/python3/site-packages"]
for name in ("zygote", "titan_rl", "test_hostile_programs", "conftest", "hostile_programs", "pytest"):
    try: print(importlib.import_module(name).__dict__)
    except BaseException as error: print(repr(error))
""",
)
case(
    "theft: kernel's messages and keys",
    _KERNEL
    + _READ
    + """
buffer = ctypes.create_string_buffer(1 << 16)
call("syslog", 3, buffer, 1 << 16), call("keyctl", 0, -3, 1), call("keyctl", 11, -3, buffer, 1 << 16)
call("request_key", b"user", b"token", 0, -3)
print(buffer.raw.strip(b"\\0"))
for path in ("/dev/kmsg", "/proc/kmsg", "/proc/keys", "/proc/sys/kernel/hostname", "/sys/class/net"): read(path)
""",
)
case(
    "theft: names of mounts",
    _KERNEL
    + """
buffer = (ctypes.c_uint64 * 512)()
ask = (ctypes.c_uint64 * 4)(24, ctypes.c_uint64(-1).value, 0, 0)
count = call("listmount", ask, buffer, 512, 0)
for at in range(max(count, 0)):
    text = ctypes.create_string_buffer(4096)
    call("statmount", (ctypes.c_uint64 * 4)(24, buffer[at], 0x7F, 0), text, 4096, 0)
    print(text.raw.replace(b"\\0", b" ").strip())
""",
)
case(
    "theft: users and names",
    _TRY
    + """
import getpass, os, platform, pwd, socket
for ask in (os.getlogin, pwd.getpwall, getpass.getuser, platform.uname, socket.gethostname, os.getgroups, os.getresuid):
    attempt(ask)
""",
)


# escapes: through the network and sockets

case(
    "escape: network",
    """
import socket
for family, where in ((socket.AF_INET, ("127.0.0.1", 80)), (socket.AF_INET6, ("::1", 80)), (2, ("1.1.1.1", 53))):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            there = socket.socket(family, kind)
            there.settimeout(0.05)
            print(there.connect(where), there.send(b"x"))
        except OSError as error: print(error)
""",
)
case(
    "escape: every family of sockets",
    """
import socket
for family in range(50):
    for kind in (1, 2, 3, 5):
        for make in (socket.socket, socket.socketpair):
            try: print(family, kind, make(family, kind))
            except OSError: pass
""",
)
case(
    "escape: family in the upper half",
    """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for family in ((2 << 32) + 1, (1 << 32) + 2, (1 << 63) + 16, -1):
    print(libc.syscall(ctypes.c_long(41), ctypes.c_ulong(family & (1 << 64) - 1), 1, 0), ctypes.get_errno())
""",
)
case(
    "escape: web",
    """
import urllib.request
for where in ("http://169.254.169.254/latest/meta-data/", "http://localhost/", "file://SECRET_FILE"):
    try: print(urllib.request.urlopen(where, timeout=0.05).read())
    except OSError as error: print(error)
""",
)
case(
    "escape: the host's abstract socket",
    r"""
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    there = socket.socket(socket.AF_UNIX, kind)
    there.settimeout(0.05)
    try:
        there.connect("\0titan_rl_hidden_tests")
        print("connected", there.recv(100))
    except OSError as error: print(error)
""",
)
case(
    "escape: abstract socket as the host",
    r"""
import socket
server = socket.socket(socket.AF_UNIX)
server.bind("\0titan_rl_hidden_tests")
server.listen()
server.settimeout(0.05)
try: print(server.accept()[0].recv(100))
except OSError as error: print(error)
""",
)
case(
    "escape: sockets with names",
    """
import os, socket
for path in ("/run/docker.sock", "/var/run/docker.sock", "/run/dbus/system_bus_socket", "/run/systemd/private",
             "/dev/log", "/tmp/.X11-unix/X0", "/run/containerd/containerd.sock"):
    try: socket.socket(socket.AF_UNIX).connect(path)
    except OSError as error: print(error)
""",
)
case(
    "escape: sockets below a socket",
    r"""
import array, fcntl, os, socket
there = socket.socket(socket.AF_UNIX)
for ask in (0x8905, 0x8910, 0x8912, 0x8913, 0x894C, 0x89E0, 0x8980, 0xB701):
    try: print(hex(ask), fcntl.ioctl(there, ask, bytearray(256)))
    except OSError as error: print(hex(ask), error)
""",
)

# escapes: to other processes

case(
    "escape: signals to the host",
    """
import os, signal
for pid in (HOST_PID, 1, 2, 3, -HOST_PID, -2):
    for number in (0, signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
        try: os.kill(pid, number)
        except OSError as error: print(pid, error)
""",
)
case(
    "escape: signals to all",
    """
import os, signal
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
    try: os.kill(-1, number)
    except OSError as error: print(error)
""",
)
case(
    "escape: end of the group that it was born into",
    """
import os, signal
os.kill(0, signal.SIGKILL)
""",
)
case(
    "escape: end of the group that it was born into, by a child",
    """
import os, signal
if not os.fork(): os.killpg(0, signal.SIGKILL)
os.wait()
""",
)
case(
    "escape: stop of the group that it was born into",
    """
import os, signal, time
os.kill(0, signal.SIGSTOP)
time.sleep(0.2)
""",
)
case(
    "escape: hangup of its session",
    _TRY
    + """
import os, signal
attempt(os.getsid, 0), attempt(os.getpgid, 0), attempt(os.getpgid, 1), attempt(os.getsid, HOST_PID)
attempt(os.setsid), attempt(os.setpgid, 0, 0), attempt(os.killpg, os.getpgrp(), signal.SIGHUP)
""",
)
case(
    "escape: descriptors of a process",
    _KERNEL
    + """
for pid in (1, 2, HOST_PID):
    watch = call("pidfd_open", pid, 0)
    for number in range(8): call("pidfd_getfd", watch, number, 0)
""",
)
case(
    "escape: traced process",
    _KERNEL
    + """
for request in (0, 16, 0x4206):
    for pid in (0, 1, 2, HOST_PID, os.getppid()): call("ptrace", request, pid, 0, 0)
call("kcmp", 1, HOST_PID, 2, 0, 0)
""",
)
case(
    "escape: traced child",
    _KERNEL
    + """
child = os.fork()
if not child:
    call("ptrace", 0, 0, 0, 0)
    os._exit(0)
call("ptrace", 16, child, 0, 0)
os.waitpid(child, 0)
""",
)
case(
    "escape: limits of a process",
    _TRY
    + """
import os, resource
for pid in (0, 1, 2, HOST_PID):
    for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_NOFILE):
        attempt(resource.prlimit, pid, kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
attempt(resource.setrlimit, resource.RLIMIT_FSIZE, (1 << 40, 1 << 40))
attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50)), attempt(os.nice, -20)
""",
)
case(
    "escape: process folder",
    _TRY
    + """
import os
for path in ("/proc/self/root", "/proc/1/root", "/proc/self/cwd", "/proc/HOST_PID/root", "/proc/self/exe"):
    attempt(os.listdir, path), attempt(os.chdir, path), attempt(os.readlink, path)
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/oom_score_adj", "/proc/self/uid_map"):
    attempt(open, path, "w")
""",
)

# escapes: through mounts and namespaces

case(
    "escape: mounts",
    _KERNEL
    + """
for what, where, kind, flags in (
    (b"proc", b"/proc", b"proc", 0), (b"none", b"/", None, 32 | 4096), (b"/", b"/tmp", None, 4096 | 16384),
    (b"tmpfs", b"/usr", b"tmpfs", 0), (b"/dev/sda1", b"/tmp", b"ext4", 0), (b"sysfs", b"/tmp", b"sysfs", 0),
    (b"none", b"/", None, 1 << 18), (b"cgroup2", b"/tmp", b"cgroup2", 0), (b"overlay", b"/usr", b"overlay", 0),
): call("mount", what, where, kind, flags, None)
""",
)
case(
    "escape: mounts taken away",
    _KERNEL
    + """
for where in (b"/proc", b"/tmp", b"/dev/shm", b"/dev", b"/usr", b"/"):
    for flags in (0, 1, 2, 8): call("umount2", where, flags)
print(os.listdir("/proc"), os.listdir("/tmp"))
""",
)
case(
    "escape: mounts of the newer kind",
    _KERNEL
    + """
for name in (b"proc", b"tmpfs", b"ext4"): call("fsmount", call("fsopen", name, 0), 0, 0)
for path in (b"/", b"/proc", b"/tmp"):
    tree = call("open_tree", -100, path, 1)
    call("move_mount", tree, b"", -100, b"/tmp", 4)
    call("mount_setattr", -100, path, 0, (ctypes.c_uint64 * 4)(0, 1), 32)
    call("open_tree_attr", -100, path, 1, (ctypes.c_uint64 * 4)(0, 1), 32)
""",
)
case(
    "escape: other roots",
    _KERNEL
    + """
for path in (b"/tmp", b"/proc", b"/dev", b"/"): call("chroot", path), call("pivot_root", path, path)
try: os.chroot("/tmp")
except OSError as error: print(error)
os.chdir("/")
for _ in range(20): os.chdir("..")
print(os.listdir("."))
""",
)
case(
    "escape: new namespaces",
    _KERNEL
    + """
for bit in range(32): call("unshare", ctypes.c_ulong(1 << bit))
call("unshare", ctypes.c_ulong(0x10000000 | 0x20000 | 0x20000000))
""",
)
case(
    "escape: clone into namespaces",
    _KERNEL
    + """
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000, 0x80, 0x7E020000):
    if not call("clone", ctypes.c_ulong(flag | 17), None, None, None, None): os._exit(0)
    if not call("clone", ctypes.c_ulong(flag | 17 | 1 << 40), None, None, None, None): os._exit(0)
""",
)
case(
    "escape: clone of the newer kind",
    _KERNEL
    + """
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x80, 0x200000000):
    ask = (ctypes.c_uint64 * 11)(flag, 0, 0, 0, 17)
    if not call("clone3", ask, ctypes.c_size_t(88)): os._exit(0)
""",
)
case(
    "escape: namespaces of others",
    _KERNEL
    + """
for kind in ("mnt", "pid", "net", "user", "ipc", "uts", "cgroup", "time"):
    for pid in ("self", 1, 2, HOST_PID):
        try: call("setns", os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY), 0)
        except OSError as error: print(error)
call("setns", call("pidfd_open", 1, 0), ctypes.c_ulong(0x7E020000))
""",
)

# escapes: through users, capabilities and the filter itself

case(
    "escape: other users",
    _TRY
    + """
import os
for user in (0, 1, 1000, 65533):
    attempt(os.setuid, user), attempt(os.setgid, user), attempt(os.setgroups, [user]), attempt(os.setreuid, user, user)
    attempt(os.setresuid, user, user, user), attempt(os.setresgid, user, user, user)
    attempt(os.initgroups, "root", user)
print(os.getresuid(), os.getresgid(), os.getgroups())
""",
)
case(
    "escape: programs of another user",
    _TRY
    + """
import os, subprocess
for folder in ("/usr/bin", "/usr/lib", "/bin", "/usr/lib/openssh", "/usr/lib/dbus-1.0", "/python/bin"):
    for name in (os.listdir(folder) if os.path.isdir(folder) else ()):
        path = f"{folder}/{name}"
        if os.path.exists(path) and os.stat(path).st_mode & 0o6000: attempt(subprocess.run, [path, "-h"])
attempt(subprocess.run, ["/usr/bin/su", "-c", "id"]), attempt(subprocess.run, ["sudo", "id"])
""",
)
case(
    "escape: capabilities",
    _KERNEL
    + """
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
call("capset", header, (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6))
for bit in range(41): libc.prctl(47, 2, bit, 0, 0), libc.prctl(24, bit, 0, 0, 0)
print(libc.prctl(28, 0x2F, 0, 0, 0), libc.prctl(8, 1, 0, 0, 0))
""",
)
case(
    "escape: attributes of the process",
    _KERNEL
    + """
for option, value in ((4, 1), (4, 0), (38, 0), (22, 0), (22, 1 << 20), (36, 1), (1, 9), (0x59616D61, -1)):
    print(option, libc.prctl(option, value, 0, 0, 0), ctypes.get_errno())
print(libc.prctl(39, 0, 0, 0, 0))
""",
)
case(
    "escape: another filter",
    _KERNEL
    + """
class Allow(ctypes.Structure): _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_void_p)]
rules = (ctypes.c_uint64 * 1)(0x7FFF000000000006)
allow = Allow(1, ctypes.addressof(rules))
call("seccomp", 1, 0, ctypes.byref(allow)), call("seccomp", 1, 8, ctypes.byref(allow)), call("seccomp", 0, 0, None)
print(libc.prctl(22, 2, ctypes.byref(allow), 0, 0))
call("unshare", 0x10000000), call("mount", None, b"/", None, 32, None)
""",
)
case(
    "escape: system calls of the older kind",
    """
import ctypes, mmap, os
if os.uname().machine == "x86_64":
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(bytes.fromhex("53b814000000cd805bc3"))
    print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
""",
)
case(
    "escape: system calls with other numbers",
    """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for number in (165, 272, 101, 41, 39):
    if not os.fork():
        print(libc.syscall(ctypes.c_long(number | 0x40000000), 0, 0, 0), ctypes.get_errno(), flush=True)
        os._exit(0)
    print(os.wait())
""",
)
case(
    "escape: personality",
    _KERNEL + "for flag in (0x0040000, 0x0400000, 8, 0x8000000, 0xFFFFFFFF): call('personality', flag)",
)

# escapes: through parts of the kernel

case(
    "escape: programs for the kernel",
    _KERNEL
    + """
for command in range(40): call("bpf", command, (ctypes.c_uint64 * 16)(1, 4, 4, 1), 128)
call("perf_event_open", (ctypes.c_uint32 * 32)(1, 128), 0, -1, -1, 0)
""",
)
case(
    "escape: rings and faults",
    _KERNEL
    + """
call("io_uring_setup", 8, (ctypes.c_uint32 * 32)()), call("userfaultfd", 0), call("userfaultfd", 1)
call("fanotify_init", 0, 0), call("fanotify_init", 0x200, 0), call("io_setup", 1, ctypes.byref(ctypes.c_ulong(0)))
""",
)
case(
    "escape: modules and other kernels",
    _KERNEL
    + """
call("init_module", b"x", 1, b""), call("kexec_load", 0, 0, None, 0)
call("acct", b"/tmp/x"), call("swapon", b"/tmp/x", 0)
""",
)
case(
    "escape: keys",
    _KERNEL
    + """
call("add_key", b"user", b"left", b"x", 1, -4), call("keyctl", 1, b"left"), call("keyctl", 0, -4, 1)
call("keyctl", 8, 0, -4), call("request_key", b"user", b"left", None, -4)
""",
)
case(
    "escape: files by their handle",
    _KERNEL
    + """
handle = (ctypes.c_uint32 * 34)(128)
for path in (b"/", b"/usr", b"/tmp", b"/zygote.py"):
    call("name_to_handle_at", -100, path, handle, ctypes.byref(ctypes.c_int()), 0)
root = os.open("/", os.O_RDONLY)
for inode in (2, 64, 128, 256): call("open_by_handle_at", root, (ctypes.c_uint32 * 4)(8, 1, inode, 0), 0)
""",
)
case(
    "escape: host's name and clock",
    _KERNEL
    + """
import time
call("sethostname", b"left", 4), call("setdomainname", b"left", 4), call("settimeofday", None, None)
now = (ctypes.c_long * 2)(int(time.time()), 0)
call("clock_settime", 0, now), call("settimeofday", now, None), call("adjtimex", (ctypes.c_long * 26)(1))
""",
)

# escapes: through files and devices

case(
    "escape: links to the secret",
    _TRY
    + """
import os
attempt(os.symlink, "SECRET_FILE", "/tmp/way"), attempt(os.link, "SECRET_FILE", "/tmp/other")
attempt(os.symlink, "/proc/1/root/SECRET_FILE", "/tmp/third"), attempt(os.rename, "SECRET_FILE", "/tmp/fourth")
for name in ("way", "other", "third", "fourth"): attempt(lambda: open(f"/tmp/{name}").read())
attempt(lambda: open("SECRET_FILE", "w").write("x")), attempt(os.unlink, "SECRET_FILE")
attempt(os.chmod, "SECRET_FILE", 0), attempt(os.truncate, "SECRET_FILE", 0)
""",
)
case(
    "escape: devices",
    """
import os
for name in ("sda", "vda", "nvme0n1", "mem", "kmem", "kmsg", "port", "kvm", "fuse", "loop0", "tty1", "net/tun", "vsock",
             "nvidia0", "userfaultfd", "ptmx", "console", "tty", "core", "dri/card0", "uinput", "mapper/control"):
    for how in (os.O_RDONLY, os.O_WRONLY):
        try: print(name, os.read(os.open(f"/dev/{name}", how | os.O_NONBLOCK), 8))
        except OSError as error: print(name, error.strerror)
""",
)
case(
    "escape: devices of its own making",
    _KERNEL
    + _TRY
    + """
import stat
for major, minor in ((1, 1), (8, 0), (254, 0), (10, 232), (5, 1)):
    for kind in (stat.S_IFBLK, stat.S_IFCHR): attempt(os.mknod, f"/tmp/{major}", kind | 0o666, os.makedev(major, minor))
    call("mknodat", -100, b"/dev/shm/x", 0o60666, major << 8 | minor)
attempt(os.mkfifo, "/tmp/pipe")
""",
)
case(
    "escape: modes",
    _TRY
    + """
import os, shutil, sys
for path in ("/tmp", "/", "/usr", "/zygote.py", "/dev/null", "/dev/shm", "/proc", sys.executable):
    attempt(os.chmod, path, 0o7777), attempt(os.chown, path, 65534, 65534), attempt(os.utime, path, (0, 0))
attempt(shutil.copy, sys.executable, "/tmp/python"), attempt(os.chmod, "/tmp/python", 0o6777)
attempt(os.chown, "/tmp/python", 0, 0), attempt(os.setxattr, "/tmp/python", "security.capability", b"x")
attempt(os.execv, "/tmp/python", ["python", "-c", "print(1)"])
""",
)
case(
    "escape: what all programs read",
    _TRY
    + """
import ctypes, json, os, sys
for path in ("/usr/lib/x", "/zygote.py", json.__file__, os.__file__, sys.executable, "/python/x", "/lib64/x", "/x"):
    attempt(open, path, "a"), attempt(os.unlink, path), attempt(os.rename, path, "/tmp/x")
    attempt(os.truncate, path, 0), attempt(os.symlink, "/tmp", path), attempt(os.mkdir, path)
""",
)
case(
    "escape: what all programs read, mapped",
    """
import ctypes, json, mmap, os
file = os.open(json.__file__, os.O_RDONLY)
for how in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
    try:
        page = mmap.mmap(file, 0, how, mmap.PROT_READ | mmap.PROT_WRITE)
        page[:9] = b"left = 1\\n"
        page.flush()
    except (OSError, ValueError) as error: print(error)
libc = ctypes.CDLL(None, use_errno=True)
shared = mmap.mmap(file, 0, mmap.MAP_SHARED, mmap.PROT_READ)
""",
)
case(
    "escape: page of a pipe",
    """
import json, os
here, there = os.pipe()
os.write(there, b"x" * 65536), os.read(here, 65536)
try:
    os.splice(os.open(json.__file__, os.O_RDONLY), there, 1, offset_src=1)
    os.write(there, b"left = 1")
except OSError as error: print(error)
print(b"left = 1" in open(json.__file__, "rb").read(100))
""",
)
case(
    "escape: terminal",
    """
import array, fcntl, os, pty, termios
for number in (0, 1, 2):
    for ask in (termios.TIOCSTI, termios.TIOCSCTTY, termios.TIOCCONS, termios.TIOCGPGRP, 0x541C):
        try: print(fcntl.ioctl(number, ask, b"x"))
        except OSError as error: print(error.strerror)
try: print(os.open("/dev/tty", os.O_RDWR), os.open("/dev/console", os.O_RDWR))
except OSError as error: print(error)
""",
)
case(
    "escape: terminal of its own",
    """
import fcntl, os, termios
try:
    here, there = os.openpty()
    os.setsid()
    fcntl.ioctl(there, termios.TIOCSCTTY, 0)
    for letter in b"id\\n": fcntl.ioctl(there, termios.TIOCSTI, bytes([letter]))
    print(os.ttyname(there))
except OSError as error: print(error)
""",
)
case(
    "escape: other programs",
    _TRY
    + """
import os, subprocess, sys
attempt(os.system, "id; cat SECRET_FILE; ls -la / /root; mount; ps aux")
for line in (["/bin/sh", "-c", "cat SECRET_FILE"], ["bwrap", "--version"], ["nsenter", "-t1"]):
    attempt(subprocess.run, line)
attempt(lambda: print(subprocess.run([sys.executable, "-c", "print(open('SECRET_FILE').read())"], capture_output=True)))
""",
)
case(
    "escape: program loaded by the linker",
    """
import os, subprocess, sys
open("/tmp/left.so", "wb").write(b"\\x7fELF")
os.chmod("/tmp/left.so", 0o755)
for name in ("LD_PRELOAD", "LD_AUDIT"): os.environ[name] = "/tmp/left.so"
print(subprocess.run([sys.executable, "-S", "-c", "print(5)"], capture_output=True))
""",
)
case(
    "escape: pickle as a value",
    """
import os
class Run:
    def __reduce__(self): return os.system, ("cat SECRET_FILE",)
def solve(n): return Run()
""",
)
case(
    "escape: pickle on the socket",
    r"""
import os, pickle
class Run:
    def __reduce__(self): return os.system, ("echo left > SECRET_FILE",)
for number in range(3, 64):
    for said in (pickle.dumps(Run()), b'{"__class__": "os.system"}', b'!!python/object/apply:os.system ["id"]\n'):
        try: os.write(number, said)
        except OSError: pass
os._exit(0)
""",
)
case(
    "escape: text for the host's terminal",
    r"""
import sys
print("\x1b]0;left\x07\x1b[21t\x1bP$q\x1b\\ $(cat SECRET_FILE) `id` %(asctime)s {0.__class__} ${jndi:ldap://x}")
sys.stderr.write("\r\n\x1b[2K::set-output name=passed::true\n" + "\x00" * 10)
""",
)


# persistence: what the next program would find

case(
    "persist: files",
    _TRY
    + """
import os
for folder in ("/tmp", "/dev/shm", "/var/tmp", "/dev/mqueue", "/dev", "/run", "/usr/lib", "/proc", "/", "/dev/pts"):
    attempt(lambda: open(f"{folder}/left", "w").write("x")), attempt(os.mkdir, f"{folder}/left.d")
""",
)
case(
    "persist: full file systems",
    """
for path in ("/tmp/left", "/dev/shm/left"):
    try:
        with open(path, "wb") as file:
            while True: file.write(bytes(1 << 20))
    except OSError as error: print(error)
""",
)
case(
    "persist: folder that cannot be read",
    """
import os
os.makedirs("/tmp/left/inner")
open("/tmp/left/inner/file", "w").close()
os.chmod("/tmp/left/inner", 0), os.chmod("/tmp/left", 0), os.chmod("/tmp", 0)
""",
)
case(
    "persist: environment",
    _KERNEL
    + """
os.environ["LEFT"] = "1"
os.putenv("LEFT", "1")
libc.setenv(b"LEFT", b"1", 1)
""",
)
case(
    "persist: patched modules",
    """
import builtins, json, sys
builtins.left = json.left = sys.left = 1
json.dumps = json.loads = builtins.print = None
sys.modules["re"] = sys.modules["left"] = None
def solve(n): return 16.0
""",
)
case(
    "persist: modules of the library",
    """
import json, os, py_compile, sys
for folder in sys.path + [os.path.dirname(json.__file__)]:
    for name in ("sitecustomize.py", "usercustomize.py", "left.pth", "__pycache__/__init__.cpython-312.pyc", "json.py"):
        try: open(os.path.join(folder, name), "w").write("import builtins; builtins.left = 1")
        except OSError as error: print(error)
""",
)
case(
    "persist: working folder with modules",
    """
import os
for name in ("json", "builtins", "os", "sitecustomize", "re"):
    open(f"{name}.py", "w").write("import builtins; builtins.left = 1; left = 1")
os.chdir("/tmp")
""",
)
case(
    "persist: runner's memory",
    _RUNNER
    + """
import gc, os
runner["_furnish"] = runner["_bound"] = runner["_give_up"] = lambda *_: None
runner["Box"]._run = runner["tree_memory"] = lambda *_: 0
runner["kill"] = lambda *_: os.environ.update(LEFT="1")
print(gc.get_freeze_count())
""",
)
case(
    "persist: background process",
    """
import os, time
if not os.fork():
    os.setsid()
    if os.fork(): os._exit(0)
    os.chdir("/")
    for number in range(64):
        try: os.close(number)
        except OSError: pass
    time.sleep(1e6)
time.sleep(0.02)
""",
)
case(
    "persist: background process that holds the output",
    """
import os, time
if not os.fork():
    os.setsid()
    time.sleep(1e6)
print("gone")
""",
)
case(
    "persist: process of the interpreter",
    """
import subprocess, sys
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1e6)"], start_new_session=True)
""",
)
case("persist: child that returns from the call", "import os\ndef solve(n):\n    os.fork()\n    return 17")
case(
    "persist: stopped children",
    """
import os, signal, time
for _ in range(10):
    child = os.fork()
    if not child:
        time.sleep(1e6)
    os.kill(child, signal.SIGSTOP)
""",
)
case(
    "persist: children that ignore all",
    """
import os, signal, time
for _ in range(10):
    if not os.fork():
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        while True: time.sleep(1)
""",
)
case(
    "persist: dead children",
    """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
try:
    for _ in range(100):
        if not os.fork(): os._exit(0)
except OSError as error: print(error)
time.sleep(0.05)
""",
)
case(
    "persist: children that wait in a vfork",
    """
import ctypes, os, subprocess, sys, threading
def start(): subprocess.run([sys.executable, "-S", "-c", "import time; time.sleep(1e6)"])
for _ in range(4): threading.Thread(target=start, daemon=True).start()
""",
)
case(
    "persist: memory, semaphores and queues of System V",
    _KERNEL
    + """
for key in (0, 1, 4711): call("shmget", key, 4096, 0o1777), call("semget", key, 1, 0o1777), call("msgget", key, 0o1777)
call("mq_open", b"left", 0o102, 0o777, None)
""",
)
case(
    "persist: semaphores with names",
    """
import _multiprocessing, multiprocessing
try: print(_multiprocessing.SemLock(1, 1, 1, "/left", False))
except BaseException as error: print(error)
try: print(multiprocessing.Lock(), multiprocessing.Queue())
except BaseException as error: print(error)
""",
)
case(
    "persist: abstract sockets",
    r"""
import os, socket, time
kept = []
for name in ("\0left", "\0titan_rl_hidden_tests", "/tmp/left", "/dev/shm/left"):
    server = socket.socket(socket.AF_UNIX)
    try: server.bind(name), server.listen(100), print("bound")
    except OSError as error: print(error)
    kept.append(server)
if not os.fork(): os.setsid(), time.sleep(1e6)
""",
)
case(
    "persist: abstract socket of the run before",
    r"""
import os, socket, time
there = socket.socket(socket.AF_UNIX)
try:
    there.connect("\0left by the run before")
    print("found", there.recv(100))
except OSError as error: print(error)
there.close()
server = socket.socket(socket.AF_UNIX)
server.bind("\0left by the run before")
server.listen()
if not os.fork(): os.setsid(), time.sleep(1e6)
""",
)
case(
    "persist: tables of what is to be run",
    _TRY
    + """
for path in ("/etc/crontab", "/var/spool/cron/root", "/etc/cron.d/left", "/etc/ld.so.preload", "/root/.profile",
             "/etc/profile.d/left.sh", "/etc/systemd/system/left.service", "/root/.config/autostart/left", "/.bashrc"):
    attempt(lambda: open(path, "w").write("* * * * * root touch /tmp/left"))
attempt(__import__("subprocess").run, ["crontab", "-"]), attempt(__import__("subprocess").run, ["at", "now"])
""",
)
case(
    "persist: limits",
    """
import os, resource
for name in [name for name in dir(resource) if name.startswith("RLIMIT_")]:
    try: resource.setrlimit(getattr(resource, name), (1, 1))
    except (OSError, ValueError): pass
os.umask(0o777)
""",
)
case(
    "persist: priority of the group that it was born into",
    _KERNEL
    + """
for which, who in ((1, 0), (2, 0), (0, 0)):
    try: os.setpriority(which, who, 19)
    except OSError as error: print(error)
call("ioprio_set", 2, 0, 3 << 13), call("ioprio_set", 3, 0, 3 << 13)
print(libc.prctl(62, 1, 0, 2, 0))
""",
)
case(
    "persist: one core for all",
    """
import os
for pid in (0, 1, 2, 3):
    try: os.sched_setaffinity(pid, {0}), os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    except OSError as error: print(error)
""",
)
case(
    "persist: flags of shared descriptors",
    """
import fcntl, os, signal
for number in range(64):
    try:
        os.set_blocking(number, False), os.set_inheritable(number, True), os.lseek(number, 1 << 20, 0)
        fcntl.fcntl(number, fcntl.F_SETOWN, 1)
        fcntl.fcntl(number, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK | os.O_APPEND)
    except OSError: pass
""",
)
case(
    "persist: locked files",
    """
import fcntl, json, os, time
for path in (json.__file__, "/zygote.py", "/dev/null", "/usr/lib"):
    try: fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB), print("locked", path)
    except OSError as error: print(error)
if not os.fork(): time.sleep(1e6)
""",
)
case(
    "persist: descriptors left in a socket to the host",
    """
import os, socket
one, other = socket.socketpair()
socket.send_fds(one, [b"x"], [one.fileno(), other.fileno(), 1, 2])
for number in range(3, 64):
    try: socket.send_fds(socket.socket(fileno=os.dup(number)), [b"x"], [one.fileno(), os.open("/tmp", os.O_RDONLY)])
    except OSError: pass
os._exit(0)
""",
)


# memory that a watcher did not see, or that no process has

_ALONE = (
    _KERNEL
    + """
import threading, time
def leave(size):
    def hold():
        time.sleep(0.3)
        kept = bytearray(b"x") * size
        time.sleep(1e6)
    threading.Thread(target=hold).start()
    call("exit", 0)
"""
)
"""``leave`` ends the first thread alone; another one has that many bytes."""

case("memory: held when the first thread is gone", _ALONE + "leave(220 << 20)", endings=("memory",))
case(
    "memory: held by children whose first threads are gone",
    _ALONE + "for _ in range(4):\n    if not os.fork(): leave(60 << 20)\ntime.sleep(1e6)",
    endings=("memory",),
)
case(
    "memory: held by a child while threads come and go",
    """
import os, threading, time
if not os.fork():
    kept = bytearray(b"x") * (220 << 20)
    time.sleep(1e6)
while True:
    threads = [threading.Thread(target=int) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
""",
    endings=("memory",),
)
case(
    "memory: pages in pipes",
    _KERNEL
    + _REFUSED
    + """
import mmap
page = mmap.mmap(-1, 1 << 22, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
page.write(b"x" * (1 << 22))
here, there = os.pipe()
other, further = os.pipe()
os.write(there, b"x")
piece = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.c_char.from_buffer(page)), 4096)
library = os.open(os.__file__, os.O_RDONLY)
refused(call, "vmsplice", there, piece, ctypes.c_size_t(1), 0)
refused(call, "splice", library, None, there, None, ctypes.c_size_t(4096), 0)
refused(call, "tee", here, further, ctypes.c_size_t(1), 0)
refused(call, "sendfile", there, library, None, ctypes.c_size_t(4096))
""",
    endings=("ok",),
)
case(
    "memory: larger buffers of pipes and sockets",
    _REFUSED
    + """
import fcntl, os, socket
refused(fcntl.fcntl, os.pipe()[1], 1031, 1 << 20)
for each in socket.socketpair():
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF): refused(each.setsockopt, socket.SOL_SOCKET, option, 1 << 20)
""",
    endings=("ok",),
)
case(
    "memory: what waits in sockets",
    """
import os, socket, time
for _ in range(14):
    if not os.fork(): break
pairs = [socket.socketpair() for _ in range(17)]
for each in sum(pairs, ()):
    each.setblocking(False)
    try:
        while True: each.send(bytes(1 << 16))
    except BlockingIOError: pass
if os.getpid() == 1: time.sleep(0.5), print(open("/dev/null"), socket.socketpair())
time.sleep(1e6)
""",
    endings=("memory",),
)
case(
    "memory: threads with descriptors of their own",
    _KERNEL
    + _REFUSED
    + """
refused(call, "close_range", 100, 200, 2), refused(call, "unshare", 0x400)
stack = ctypes.create_string_buffer(1 << 16)
refused(call, "clone", ctypes.c_ulong(0x10900), ctypes.c_void_p(ctypes.addressof(stack) + (1 << 16)), None, None, None)
""",
    endings=("ok",),
)
case(
    "memory: swapped out, merged and given up on request",
    _REFUSED
    + """
import mmap
pages = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
pages.write(b"x" * (1 << 20))
for advice in (9, 12, 20, 21, 25): refused(pages.madvise, advice)
""",
    endings=("ok",),
)
case(
    "memory: what is left of huge pages",
    """
import ctypes, mmap, sys
libc = ctypes.CDLL(None)
libc.prctl(41, 0, 0, 0, 0)
pages = mmap.mmap(-1, 1 << 27, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
try: pages.madvise(14)
except OSError as error: print(error)
for at in range(0, 1 << 27, 1 << 21):
    pages[at] = 1
    pages.madvise(4, at + 4096, (1 << 21) - 4096)
sys.exit(libc.prctl(42, 0, 0, 0, 0) != 1)
""",
    endings=("ok",),
)
case(
    "memory: huge pages that the host has set aside",
    """
import mmap
for flags in (0x40000, 0x40000 | 21 << 26):
    try: mmap.mmap(-1, 1 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    except OSError as error:
        if error.errno == 12: raise SystemExit("it asked the host for them")
    else: raise SystemExit("it has them")
""",
    endings=("ok",),
)
_MAPPINGS = """
import ctypes, mmap, os, time
libc = ctypes.CDLL(None)
def fill(count):
    pages = mmap.mmap(-1, count * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for at in range(0, count, 2): libc.mprotect(ctypes.c_void_p(start + at * 4096), ctypes.c_size_t(4096), 1)
    time.sleep(1e6)
"""
"""``fill`` makes that many mappings, each beside one of another kind."""
case("memory: mappings", _MAPPINGS + "fill(60000)", endings=("memory",))
case(
    "memory: mappings of all its processes",
    _MAPPINGS + "for _ in range(14):\n    if not os.fork(): break\nfill(60000)",
    endings=("memory", "timeout"),
)


# talk: what another program could hear, beside it or after it

case(
    "talk: sockets in flight, and names",
    _KERNEL
    + _REFUSED
    + r"""
import socket
one, other = socket.socketpair()
refused(socket.send_fds, one, [b"x"], [one.fileno(), other.fileno()])
refused(call, "sendmmsg", one.fileno(), (ctypes.c_size_t * 8)(), 1, 0)
refused(one.setsockopt, socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
for name in ("\0left", "/tmp/left", ""):
    refused(one.bind, name)
    refused(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].bind, name)
refused(one.listen, 1)
refused(socket.socket, socket.AF_UNIX)
""",
    endings=("ok",),
)
case(
    "talk: locks and leases",
    _REFUSED
    + """
import fcntl, json, os, struct
for path in (json.__file__, "/dev/null", "/usr/lib", "/tmp/mine"):
    file = os.open(path, os.O_RDONLY if path != "/tmp/mine" else os.O_CREAT | os.O_RDWR)
    refused(fcntl.flock, file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    refused(fcntl.lockf, file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    for command in (5, 6, 36, 37): refused(fcntl.fcntl, file, command, struct.pack("hhqqii", 0, 0, 0, 0, 0, 0))
    for command, value in ((1024, 0), (1026, 0x80000001 - (1 << 32)), (1036, 1), (8, os.getpid()), (10, 9), (1033, 1)):
        refused(fcntl.fcntl, file, command, value)
""",
    endings=("ok",),
)
case(
    "talk: watches",
    _KERNEL + _REFUSED + "refused(call, 'inotify_init1', 0), refused(call, 'fanotify_init', 0x200, 0)",
    endings=("ok",),
)
case(
    "talk: times",
    _REFUSED
    + """
import json, os
for path in ("/dev/null", "/dev/random", "/dev/urandom", json.__file__, "/usr/lib", "/dev", "/"):
    refused(os.utime, path), refused(os.chmod, path, 0o666)
for path in ("/dev/null", "/dev/random", "/dev/urandom"): os.read(os.open(path, os.O_RDONLY), 8)
os.write(os.open("/dev/null", os.O_WRONLY), b"x")
""",
    endings=("ok",),
)
case(
    "talk: counts and caches of the machine",
    _KERNEL
    + _REFUSED
    + """
import json, mmap
file = os.open(json.__file__, os.O_RDONLY)
held, place = ctypes.create_string_buffer(4096), (ctypes.c_size_t * 2)(0, 4096)
into = (ctypes.c_size_t * 2)(ctypes.addressof(held), 100)
page = ctypes.c_size_t(ctypes.addressof(held) & ~4095)
refused(call, "sysinfo", held), refused(call, "cachestat", file, place, held, 0)
refused(call, "preadv2", file, into, ctypes.c_size_t(1), ctypes.c_size_t(0), ctypes.c_size_t(0), 8)
refused(call, "fadvise64", file, ctypes.c_size_t(0), ctypes.c_size_t(4096), 4), refused(call, "syncfs", file)
refused(call, "mincore", page, ctypes.c_size_t(4096), held)
""",
    endings=("ok",),
)
case(
    "talk: futexes in a page of the library",
    _KERNEL
    + _REFUSED
    + """
import json
libc.mmap.restype = ctypes.c_void_p
file = os.open(json.__file__, os.O_RDONLY)
for flags in (1, 2):
    page = libc.mmap(None, ctypes.c_size_t(4096), 1, flags, file, ctypes.c_long(0))
    word, value, limit = ctypes.c_void_p(page), ctypes.c_uint32.from_address(page), (ctypes.c_long * 2)(0, 1000)
    for operation in (0, 9, 0x100, 0x109, 2, 3, 4, 5, 6, 8, 11, 12, 13):
        refused(call, "futex", word, operation, value, limit, word, 1)
        if ctypes.get_errno() == 110: raise SystemExit("it waited")
    for operation in (1, 10):
        if call("futex", word, operation, 9, None, None, 1): raise SystemExit("it woke somebody")
""",
    endings=("ok",),
)
case(
    "talk: what the kernel tells of the machine",
    _KERNEL
    + _REFUSED
    + """
for path in ("loadavg", "stat", "meminfo", "uptime", "vmstat", "pressure/cpu", "pressure/memory", "locks", "net/unix",
             "self/mountinfo", "sys/kernel/ns_last_pid", "sys/kernel/random/boot_id", "sys/fs/file-nr"):
    refused(open, "/proc/" + path)
for path in ("/sys", "/sys/fs/cgroup", "/run", "/etc/hostname", "/dev/shm/x", "/dev/mqueue", "/dev/pts", "/dev/kmsg"):
    refused(os.stat, path)
refused(os.getloadavg)
if os.uname().nodename != "box": raise SystemExit(os.uname().nodename)
""",
    endings=("ok",),
)
case(
    "talk: times of what is read, and file systems of all",
    """
import json, os, sys
for path in ("/", "/proc", "/inside", json.__file__, sys.executable, "/usr/lib", "/dev", "/dev/null", "/dev/urandom"):
    if not os.statvfs(path).f_flag & os.ST_RDONLY: sys.exit(path)
    before = os.stat(path)
    if not os.path.isdir(path): open(path, "rb").read(8)
    elif os.access(path, os.R_OK): os.listdir(path)
    after = os.stat(path)
    if any(getattr(before, name) != getattr(after, name) for name in ("st_atime_ns", "st_mtime_ns", "st_ctime_ns")):
        sys.exit(path)
""",
    endings=("ok",),
)
case(
    "talk: cores, turns and priorities",
    _KERNEL
    + _REFUSED
    + """
refused(os.sched_setaffinity, 0, os.sched_getaffinity(0)), refused(os.sched_setscheduler, 0, 3, os.sched_param(0))
refused(os.sched_setparam, 0, os.sched_param(0)), refused(call, "ioprio_set", 1, 0, 3 << 13)
for which, who in ((os.PRIO_PROCESS, 0), (os.PRIO_USER, 0), (os.PRIO_PGRP, 0)): refused(os.setpriority, which, who, -20)
""",
    endings=("ok",),
)
