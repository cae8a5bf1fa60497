"""What programs have use for is there behind the filter: the library as it is elsewhere."""

import subprocess
import sys

import pytest
from boxes import need_boxes

from titan_rl.environments.sandbox.program import Limits, Program
from titan_rl.environments.sandbox.seccomp import seccomp_filter
from titan_rl.environments.sandbox.slot import Slot

HONEST = {
    "threads": """
import threading, queue
asked, answered = queue.Queue(), queue.Queue()
def work():
    while (n := asked.get()) is not None: answered.put(n * n)
threads = [threading.Thread(target=work) for _ in range(4)]
for each in threads: each.start()
for n in range(10): asked.put(n)
for each in threads: asked.put(None)
for each in threads: each.join(5)
assert sum(answered.get() for _ in range(10)) == 285
""",
    "pool of threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool: assert list(pool.map(abs, [-1, -2])) == [1, 2]
""",
    "pool of processes": """
from concurrent.futures import ProcessPoolExecutor
with ProcessPoolExecutor(2) as pool: assert list(pool.map(abs, [-1, -2])) == [1, 2]
""",
    "processes": """
import multiprocessing as m
def work(pipe, queue, lock, value):
    with lock: value.value += 1
    pipe.send("sent"), queue.put("put")
here, there = m.Pipe()
queue, lock, value, event = m.Queue(), m.Lock(), m.Value("i", 0), m.Event()
each = m.Process(target=work, args=(there, queue, lock, value))
each.start()
assert (here.recv(), queue.get(), each.join(), value.value) == ("sent", "put", None, 1)
array = m.Array("d", [1.5, 2.5])
assert sum(array) == 4.0 and not event.is_set()
with m.Pool(2) as pool: assert pool.map(abs, range(-50, 0)) == list(range(50, 0, -1))
""",
    "processes that wait for each other": """
import multiprocessing as m, time
def work(lock, begun, barrier, condition, done):
    with lock: begun.set(), time.sleep(0.3)
    barrier.wait(20)
    with condition: done.value += 1; condition.notify_all()
lock, begun, barrier, condition, done = m.Lock(), m.Event(), m.Barrier(3), m.Condition(), m.Value("i", 0)
each = [m.Process(target=work, args=(lock, begun, barrier, condition, done)) for _ in range(2)]
for process in each: process.start()
assert begun.wait(20) and not lock.acquire(block=False) and not lock.acquire(timeout=0.01)
with lock: pass
barrier.wait(20)
with condition: assert condition.wait_for(lambda: done.value == 2, timeout=20)
for process in each: process.join()
start, again, event = time.monotonic(), m.RLock(), m.Event()
with again, again: assert not event.wait(0.05) and time.monotonic() - start >= 0.05
try: again.release()
except AssertionError: pass
semaphore = m.BoundedSemaphore(2)
assert semaphore.acquire() and semaphore.acquire() and not semaphore.acquire(timeout=0.01)
""",
    "shared memory": """
from multiprocessing import shared_memory
held = shared_memory.SharedMemory(create=True, size=4096)
held.buf[0] = 7
assert held.buf[0] == 7
held.close(), held.unlink()
""",
    "fork and wait": """
import os, signal
here, there = os.pipe()
if not os.fork(): os.write(there, b"x"), os._exit(3)
assert os.read(here, 1) == b"x" and os.waitstatus_to_exitcode(os.wait()[1]) == 3
child = os.fork()
if not child: signal.pause()
os.kill(child, signal.SIGTERM)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
""",
    "subprocess": """
import subprocess, sys
line = [sys.executable, "-S", "-c", "import sys; print(sys.stdin.read().upper())"]
assert subprocess.run(line, input="a", capture_output=True, text=True, timeout=10).stdout == "A\\n"
assert subprocess.run([*line[:-1], "raise SystemExit(4)"], start_new_session=True).returncode == 4
""",
    "asyncio": """
import asyncio
async def main():
    queue, lock = asyncio.Queue(), asyncio.Lock()
    async with asyncio.timeout(5), lock: queue.put_nowait(await asyncio.to_thread(abs, -3))
    loop = asyncio.get_running_loop()
    loop.call_soon_threadsafe(queue.put_nowait, 4)
    return [await queue.get() for _ in range(2)], await asyncio.gather(*(asyncio.sleep(0.01, n) for n in range(3)))
assert asyncio.run(main()) == ([3, 4], [0, 1, 2])
""",
    "asyncio's processes and pairs": """
import asyncio, socket, sys
async def main():
    line = sys.executable, "-S", "-c", "print(5)"
    process = await asyncio.create_subprocess_exec(*line, stdout=asyncio.subprocess.PIPE)
    one, other = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=one)
    other.send(b"x\\n"), writer.write(b"y\\n")
    await writer.drain()
    return await process.communicate(), await reader.readline(), other.recv(9)
assert asyncio.run(main()) == ((b"5\\n", None), b"x\\n", b"y\\n")
""",
    "pairs of sockets": """
import selectors, socket
one, other = socket.socketpair()
one.settimeout(5), other.setblocking(False)
one.sendall(b"x" * 1000)
with selectors.DefaultSelector() as selector:
    selector.register(other, selectors.EVENT_READ)
    assert selector.select(5)
assert len(other.recv(2000)) == 1000 and one.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == 1
one.shutdown(socket.SHUT_WR)
assert other.recv(1) == b"" and one.getpeername() == ""
""",
    "files": """
import os, pathlib, shutil, tempfile
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "a" / "b.txt"
    path.parent.mkdir()
    path.write_text("text")
    shutil.copy2(path, path.with_suffix(".c")), shutil.copytree(path.parent, pathlib.Path(folder) / "d")
    shutil.move(path, path.with_name("e")), os.utime(path.with_name("e"), (1, 1)), os.chmod(path.with_name("e"), 0o600)
    path.with_name("f").symlink_to("e"), os.link(path.with_name("e"), path.with_name("g"))
    assert sorted(os.listdir(path.parent)) == ["b.c", "e", "f", "g"] and path.with_name("f").read_text() == "text"
    assert sorted(map(str, pathlib.Path(folder).rglob("*.txt")))[0].endswith("d/b.txt")
    with open(path, "w+") as file: file.write("long"), file.truncate(2), file.flush(), os.fsync(file.fileno())
    assert path.stat().st_size == 2 and shutil.disk_usage(folder).total > 0
with tempfile.NamedTemporaryFile("w+") as file, tempfile.TemporaryFile() as other: file.write("x"), other.write(b"x")
""",
    "archives": """
import gzip, bz2, io, lzma, tarfile, zipfile, zlib
for module in (gzip, bz2, lzma, zlib): assert module.decompress(module.compress(b"x" * 100)) == b"x" * 100
with zipfile.ZipFile("a.zip", "w") as file: file.writestr("b/c", "text")
with zipfile.ZipFile("a.zip") as file: file.extractall("out"), file.testzip()
with tarfile.open("a.tar.gz", "w:gz") as file: file.add("out")
with tarfile.open("a.tar.gz") as file: file.extractall("in")
assert open("in/out/b/c").read() == "text"
""",
    "mapped files and memory": """
import array, ctypes, mmap
pages = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
pages[5] = 1
pages.madvise(mmap.MADV_DONTNEED)
assert pages[5] == 0
with open("file", "w+b") as file:
    file.write(bytes(4096)), file.flush()
    with mmap.mmap(file.fileno(), 0) as page: page[:4] = b"text"; page.flush()
    assert file.seek(0) == 0 and file.read(4) == b"text"
assert sum(array.array("d", range(1000))) == 499500 and ctypes.sizeof((ctypes.c_double * 10)()) == 80
big = [bytearray(1 << 16) for _ in range(1000)]
del big
""",
    "databases": """
import sqlite3
with sqlite3.connect(":memory:") as base:
    base.execute("create table t (a, b)"), base.executemany("insert into t values (?, ?)", [(1, 2), (3, 4)])
    assert base.execute("select sum(a * b) from t").fetchone() == (14,)
import pickle, shelve
assert pickle.loads(pickle.dumps({1: (2, 3)})) == {1: (2, 3)}
with shelve.open("shelf", "c") as shelf: shelf["a"] = [1]
with shelve.open("shelf") as shelf: assert shelf["a"] == [1]
""",
    "times and signals": """
import datetime, signal, threading, time, timeit
heard = []
signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.01)
while not heard: time.sleep(0.01)
signal.alarm(0)
threading.Timer(0.01, heard.append, (2,)).start()
while len(heard) < 2: time.sleep(0.01)
assert time.monotonic() > 0 and time.process_time() > 0 and time.thread_time() > 0 and timeit.timeit() > 0
assert datetime.datetime.now().year > 2000 and time.localtime() and signal.getsignal(signal.SIGINT)
""",
    "chance and digests": """
import hashlib, hmac, os, random, secrets, uuid
assert len({random.random(), secrets.randbelow(1 << 60), uuid.uuid4().int, int.from_bytes(os.urandom(8), "big")}) == 4
assert hashlib.sha256(b"").hexdigest()[:4] == "e3b0" and len(hashlib.scrypt(b"a", salt=b"b", n=2, r=1, p=1)) == 64
hmac.new(b"a", b"b", "md5").digest()
""",
    "numbers": """
import cmath, decimal, fractions, itertools, math, statistics
assert sum(1 for p in range(2, 2000) if all(p % d for d in range(2, math.isqrt(p) + 1))) == 303
assert (3**20000).bit_length() == 31700 and 3 * fractions.Fraction(1, 3) == 1
decimal.getcontext().prec = 50
assert str(decimal.Decimal(2).sqrt())[:6] == "1.4142" and abs(cmath.exp(1j * math.pi) + 1) < 1e-9
a = [[(i * j) % 7 for j in range(60)] for i in range(60)]
assert sum(map(sum, [[sum(x * y for x, y in zip(row, column)) for column in zip(*a)] for row in a])) > 0
assert statistics.pstdev([1, 2, 3]) > 0 and len(list(itertools.permutations(range(6)))) == 720
""",
    "deep and wide": """
import functools, sys, threading
sys.setrecursionlimit(20000)
@functools.lru_cache(None)
def f(n): return n if n < 2 else (f(n - 1) + f(n - 2)) % 1000007
found = []
threading.stack_size(48 << 20)
thread = threading.Thread(target=lambda: found.append(f(9000)))
thread.start(), thread.join()
assert found
""",
    "what tells of itself": """
import getpass, locale, logging, os, platform, resource, sys, sysconfig, traceback, tracemalloc, warnings, gc, inspect
assert os.cpu_count() is None or os.cpu_count() > 0
assert len(os.sched_getaffinity(0)) > 0 and os.getpid() == 1 and os.getppid() == 0 and os.getcwd() == "/tmp"
assert platform.python_version() and os.uname().sysname == "Linux" and locale.getlocale() and not sys.stdout.isatty()
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0 and os.times().user >= 0 and os.getpgrp() >= 0
tracemalloc.start(), gc.collect(), logging.getLogger().error("said"), warnings.warn("said")
os.environ["A"] = "b"
assert os.getenv("A") == "b" and os.get_terminal_size is not None and os.umask(0o22) >= 0
import shutil
assert shutil.get_terminal_size().columns > 0 and shutil.which("no such program") is None
""",
    "the library's own tests": """
import doctest, unittest, io
class Test(unittest.TestCase):
    def test(self): self.assertEqual(1, 1)
result = unittest.TextTestRunner(stream=io.StringIO()).run(unittest.defaultTestLoader.loadTestsFromTestCase(Test))
assert result.wasSuccessful() and doctest.testmod().failed == 0
""",
    "text": """
import argparse, collections, configparser, csv, dataclasses, difflib, enum, html, io, json, re, string, textwrap
import tomllib, typing, unicodedata, urllib.parse, xml.etree.ElementTree as tree
assert re.findall(r"(\\w+)@", "a@b c@d") == ["a", "c"] and tree.fromstring("<a><b/></a>")[0].tag == "b"
assert list(csv.reader(io.StringIO("a,b")))[0] == ["a", "b"] and tomllib.loads("a = 1") == {"a": 1}
assert urllib.parse.urlparse("http://a/b").path == "/b" and unicodedata.normalize("NFD", "\\xe4") != "\\xe4"
""",
    "input and output": """
import fileinput, os, sys
assert sys.stdin.readline() == "1\\n" and input() == "2" and sys.stdin.read() == "3\\n"
print("a", file=sys.stderr), sys.stdout.write("b"), os.write(1, b""), os.writev(1, [b"c", b"d"])
sys.stdout.flush(), sys.stdout.reconfigure(line_buffering=True)
with open("/dev/null", "w") as nothing: print("x", file=nothing)
duplicate = os.dup(1)
os.dup2(duplicate, 9), os.close(duplicate), os.set_blocking(9, True), os.set_inheritable(9, True)
assert os.get_inheritable(9) and os.pread(0, 1, 0) == b"1"
""",
}


@pytest.fixture(scope="module")
def box():
    need_boxes()
    one = Slot()
    yield one
    one.close()


@pytest.mark.parametrize("name", HONEST)
def test_it_runs(box, name):
    outcome = box.run(Program(HONEST[name], "1\n2\n3\n", limits=Limits(seconds=60.0)))
    assert outcome.ending == "ok", outcome


NUMERIC = """
import ctypes, sys
import pyseccomp
instructions = sys.stdin.buffer.read()
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Filter(len(instructions) // 8, instructions)), 0, 0) == 0
import numpy
one = numpy.random.default_rng(0).normal(size=(300, 300))
assert numpy.allclose(one @ numpy.linalg.inv(one), numpy.eye(300), atol=1e-6)
assert numpy.fft.ifft(numpy.fft.fft(one)).shape == numpy.sort(one, axis=0).shape
import sympy
x = sympy.symbols("x")
assert sympy.integrate(2 * x, x) == x**2
print("done")
"""


def test_numeric_libraries_run_behind_the_filter():
    """They are in no box, and what they ask of the kernel is what programs of this kind do."""
    done = subprocess.run([sys.executable, "-c", NUMERIC], input=seccomp_filter(), capture_output=True, timeout=120)
    assert done.stdout == b"done\n", done.stderr.decode()[-2000:]
