"""Processes by fork: as ``exec`` would have made them, tied to their clients, and independent of their server."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import conftest
import pytest
import running

from titan_rl.mesh.forking import fork_client, forking
from titan_rl.mesh.forking.forking import ForkServers
from titan_rl.mesh.processes.processes import MARK, process_state
from titan_rl.mesh.processes.processes import running as marked
from titan_rl.mesh.resources import cores as placement
from titan_rl.mesh.resources.imports import IMPORTS
from titan_rl.records.metrics import read_metrics

SERVER = """
import random, socket, sys, tempfile
import numpy, titan_rl.mesh.forking.fork_server as fork_server
tempfile.gettempdir()
asked = fork_server.ForkServer(socket.socket(fileno=int(sys.argv[1]))).run()
if asked is not None:
    fork_server.become(asked)
"""
PARENT = """
import os, socket, sys, tempfile
import huggingface_hub.constants, numpy, titan_rl.mesh.forking.fork_server as fork_server
tempfile.gettempdir()
fork_server.import_all, fork_server.sees_gpu = lambda kind: None, lambda: False
listener = socket.socket(fileno=int(sys.argv[1]))
others = [os.dup(0), *os.pipe()]
server = fork_server.serve_in_child("trainer", listener, True, {}, (others[0], 2), others)
listener.close()
print(server, flush=True)
os.read(0, 1)
os.close(others[0])
assert os.waitpid(server, 0)[1] in (0, 9)
"""
TELL = """
import json, numpy, os, random, sys, tempfile
offline = sys.modules.get("huggingface_hub.constants")
print(json.dumps({
    "offline": offline and offline.HF_HUB_OFFLINE,
    "argv": sys.argv[1:],
    "folder": os.getcwd(),
    "path": sys.path[0],
    "environment": dict(os.environ),
    "shown": open("/proc/self/environ").read().split("\\0"),
    "temporary": tempfile.gettempdir(),
    "cores": list(os.sched_getaffinity(0)),
    "niceness": os.nice(0),
    "parent": os.getppid(),
    "random": [random.random(), float(numpy.random.rand())],
    "descriptors": os.listdir("/proc/self/fd"),
}))
"""
END = """
import os, signal, sys
os.kill(os.getpid(), int(sys.argv[2])) if sys.argv[1] == "signal" else sys.exit(int(sys.argv[2]))
"""
STAY = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
print(os.getpid(), flush=True)
while True:
    pass
"""


@pytest.fixture(params=["a program", "a child"])
def server(request, tmp_path):
    """A server's id, and where it listens: a program of its own, or a child of one that has other descriptors and
    shows no mark. It has imported numpy, and asked for the temporary folder."""
    for name, text in {"tell": TELL, "end": END, "stay": STAY}.items():
        (tmp_path / f"{name}.py").write_text(text)
    path, is_child = tmp_path / "socket", request.param == "a child"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        number = listener.fileno()
        environment = {name: value for name, value in os.environ.items() if name not in (MARK, "HF_HUB_OFFLINE")}
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT if is_child else SERVER, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[number],
            env=environment if is_child else environment | {MARK: "0" * 32},
            text=True,
        )
    yield int(process.stdout.readline()) if is_child else process.pid, path
    process.stdin.close()
    process.stdout.close()
    assert process.wait(60) in (0, -signal.SIGKILL), "it ends with its standard input"


def client(path: Path, module: str, *arguments: str, **environment: str) -> subprocess.Popen:
    """Of a priority, and on a core, that are its own."""
    command = ["nice", "-n", "3", "taskset", "-c", str(min(os.sched_getaffinity(0)))]
    command += [sys.executable, "-I", "-S", fork_client.__file__, str(path), sys.executable, "-m", module, *arguments]
    settings = dict(cwd=path.parent, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    return subprocess.Popen(command, **settings)


def told(path: Path, **environment: str) -> dict:
    process = client(path, "tell", "one", "two words", **environment)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(said)


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while process_state(pid) != "gone":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_it_is_what_exec_would_have_made(server, tmp_path):
    pid, path = server
    mark, temporary = "1234567890abcdef" * 2, tmp_path / "temporary"
    temporary.mkdir()
    forked = told(path, MARK=mark, TMPDIR=str(temporary), HF_HUB_OFFLINE="1", **{MARK: mark})
    by_exec = told(tmp_path / "nobody", TMPDIR=str(temporary), HF_HUB_OFFLINE="1", **{MARK: mark})
    assert forked["parent"] == pid and by_exec["parent"] != pid
    assert forked["offline"] in (None, True)
    for key in ("argv", "folder", "path", "temporary", "cores", "niceness"):
        assert forked[key] == by_exec[key], key
    assert forked["environment"] == by_exec["environment"] | {"MARK": mark}
    assert f"{MARK}={mark}" in forked["shown"], "which is how a run's processes are found"
    assert len(forked["descriptors"]) == len(by_exec["descriptors"]) + 1, "the pipe alone is the server's"


def servers_that_tell(folder: Path, at_once: str, gpu: str = "False") -> subprocess.Popen:
    """Of all kinds; they print the kind instead of importing. ``gpu``: whether they see one, which no child can use."""
    program = f"""if True:
        import socket, sys
        from titan_rl.mesh.forking import fork_server
        fork_server.import_shared, fork_server.sees_gpu = lambda: None, lambda: {gpu}
        fork_server._forks_can_use_gpu = lambda: False
        fork_server.import_all = lambda kind: print(kind, flush=True)
        kinds = dict(argument.split("=") for argument in sys.argv[1:])
        fork_server._serve({{kind: socket.socket(fileno=int(n)) for kind, n in kinds.items()}}, ["{at_once}"])
    """
    with ExitStack() as opened:
        listeners = {kind: opened.enter_context(forking._listen(folder / kind)).fileno() for kind in IMPORTS}
        return subprocess.Popen(
            [sys.executable, "-c", program, *(f"{kind}={number}" for kind, number in listeners.items())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=listeners.values(),
            text=True,
        )


def test_what_is_not_wanted_at_once_is_imported_when_it_is_first_asked_for(tmp_path):
    servers = servers_that_tell(tmp_path, "trainer")
    assert servers.stdout.readline() == "trainer\n"
    asyncio.run(forking.imports_done(tmp_path, "verifier"))
    assert servers.communicate(timeout=30)[0] == "verifier\n", "and nothing of a generator"
    assert servers.returncode == 0


def test_where_forks_cannot_use_the_gpu_processes_are_started(tmp_path):
    """At once: nobody waits for a server that has ended, though the others go on."""
    servers = servers_that_tell(tmp_path, "generator", gpu="True")
    assert servers.stdout.readline() == "generator\n"
    asyncio.run(asyncio.wait_for(forking.imports_done(tmp_path, "generator"), 10))
    begun = time.monotonic()
    program = [sys.executable, "-c", "print('started')"]
    command = [
        sys.executable,
        *forking.client_arguments(fork_client.__file__, str(tmp_path), "generator", *program[:1], program[1:]),
    ]
    assert subprocess.run(command, capture_output=True, text=True, timeout=30).stdout == "started\n"
    assert time.monotonic() - begun < 10 < fork_client.FORK_SECONDS
    assert "an import initialized CUDA" in servers.communicate(timeout=30)[1]


def test_a_server_that_hangs_is_asked_for_no_process(server, monkeypatch):
    """A client that waited for it longer than Monarch does would end the run."""
    pid, path = server
    monkeypatch.setattr(forking, "_IMPORT_SECONDS", 0.1)
    forks = ForkServers(path.parent, {}, None)
    assert asyncio.run(forks.ready("socket")), "there are none yet"
    forks._are_there = True
    os.kill(pid, signal.SIGSTOP)
    try:
        assert not asyncio.run(forks.ready("socket"))
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.setattr(forking, "_IMPORT_SECONDS", 30.0)
    assert not asyncio.run(forks.ready("socket")), "nor is it waited for once more"
    assert asyncio.run(forks.ready("nobody"))


def test_who_asks_whether_it_is_ready_gets_no_process(server):
    pid, path = server
    forks = ForkServers(path.parent, {}, None)
    forks._are_there = True
    asyncio.run(forks.ready("socket"))
    asyncio.run(forks.ready("nobody"))
    assert told(path)["parent"] == pid, "and it goes on"


EARLY = """
import json, os, sys
import numpy  # with threads of its own, which a check of a model's directory loads, too
from pathlib import Path
from titan_rl.config.sections.schema import Config
from titan_rl.mesh.forking import fork_server, forking

def note(kind="shared"):
    read = {name: os.environ.get(name) for name in ("GOMP_SPINCOUNT", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")}
    print(json.dumps([kind, os.getpid() == controller, *read.values()]), flush=True)

controller, taken_to = os.getpid(), sys.argv[1]
forking.import_shared = note
forking.import_all = fork_server.import_all = note
forking.sees_gpu = fork_server.sees_gpu = lambda: False
with forking.servers_started_early(Config(), ["trainer", "generator"]):
    [ahead] = forking._ahead
    if taken_to:
        forking.ForkServers(Path(taken_to), {}, taken_to).start()
        assert (Path(taken_to) / "trainer").is_socket() and not forking._ahead
    print(json.dumps([str(ahead._folder), ahead.processes]), flush=True)
    sys.stdin.read()
    assert os.environ.get("GOMP_SPINCOUNT") is None
    if sys.argv[2]:
        import shutil
        shutil.rmtree(taken_to)
    raise ZeroDivisionError
"""


@pytest.mark.parametrize(("is_taken", "is_removed"), [(False, False), (True, False), (True, True)])
def test_servers_that_were_begun_ahead_are_taken_over_and_end_with_the_block(is_taken, is_removed, tmp_path):
    """What the controller needs, too, it imports, with the environment of a server, before it forks that server."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            EARLY,
            str(tmp_path) if is_taken else "",
            "as a doctor's folder is" if is_removed else "",
        ],
        **dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True),
        env={name: value for name, value in os.environ.items() if name not in (forking.FORK_SERVERS, "GOMP_SPINCOUNT")},
    )
    said = []
    while not said or not isinstance(said[-1][1], list):
        said.append(json.loads(process.stdout.readline()))
    [folder, servers] = said.pop()
    assert len(servers) == 3 and all(process_state(pid) != "gone" for pid in servers)
    if is_taken:
        asyncio.run(asyncio.wait_for(forking.imports_done(tmp_path, "trainer"), 30))
        asyncio.run(asyncio.wait_for(forking.imports_done(tmp_path, "generator"), 30))
    _, error = process.communicate(timeout=60)
    assert error.rstrip().endswith("ZeroDivisionError"), error
    assert all(map(gone, servers)) and not Path(folder).exists()
    here = [["shared", True, "20000", None], ["trainer", True, "20000", "256"]]
    assert [each for each in said if each[1]] == here
    if is_taken and not is_removed:  # a server does its kind's imports once more, which is nothing where they are done
        by_servers = map(json.loads, (tmp_path / "fork_servers.txt").read_text().splitlines())
        assert sorted(by_servers) == [["generator", False, "20000", None], ["trainer", False, "20000", "256"]]


def test_servers_of_a_killed_process_leave_no_folder():
    environment = {name: value for name, value in os.environ.items() if name != forking.FORK_SERVERS}
    streams = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    command = [sys.executable, "-c", EARLY, "", ""]
    with subprocess.Popen(command, env=environment, text=True, **streams) as process:
        while not isinstance((said := json.loads(process.stdout.readline()))[1], list):
            pass
        [folder, servers] = said
        assert Path(folder).exists()
        process.kill()
    assert all(map(gone, servers)) and not Path(folder).exists()


def test_servers_are_begun_only_where_a_fork_is_whole():
    """What is imported starts no thread of its own here. Else a run's servers are processes of their own."""
    program = """if True:
        import threading, time
        from titan_rl.config.sections.schema import Config
        from titan_rl.mesh.forking import forking
        forking.EarlyServers.start = lambda self, kinds: None
        print(forking.is_alone(), end=" ")
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        with forking.servers_started_early(Config()):
            print(forking.is_alone(), forking._ahead)
    """
    environment = {name: value for name, value in os.environ.items() if name != forking.FORK_SERVERS}
    assert subprocess.check_output([sys.executable, "-c", program], text=True, env=environment) == "True False []\n"


def test_no_two_have_the_same_randomness(server):
    _, path = server
    first, second = told(path)["random"], told(path)["random"]
    assert first[0] != second[0] and first[1] != second[1]


@pytest.mark.parametrize(("how", "number", "code"), [("code", 0, 0), ("code", 3, 3), ("signal", signal.SIGKILL, 137)])
def test_the_client_ends_as_the_process_did(server, how, number, code):
    _, path = server
    assert client(path, "end", how, str(int(number))).wait(30) == code


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_process_dies_with_its_client_whatever_it_does(server, is_stopped):
    _, path = server
    process = client(path, "stay")
    pid = int(process.stdout.readline())
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    assert gone(pid)


def test_the_client_dies_with_its_parent(server, tmp_path):
    _, path = server
    run_it = "import subprocess, sys; subprocess.run([sys.executable, '-I', '-S', *sys.argv[1:]])"
    command = [sys.executable, "-c", run_it, fork_client.__file__, str(path), sys.executable, "-m", "stay"]
    parent = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    assert gone(pid)


def test_a_server_that_dies_takes_nobody_with_it(server):
    pid, path = server
    one = client(path, "stay")
    forked = int(one.stdout.readline())
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    time.sleep(0.2)
    assert process_state(forked) != "gone" and one.poll() is None
    assert told(path)["argv"] == ["one", "two words"], "and who asks for another becomes it"
    os.kill(forked, signal.SIGKILL)
    assert one.wait(60) == 1


def test_what_libraries_read_when_they_are_imported_is_there_then():
    """Whether vLLM compiles, say. The number of threads is set after the fork."""
    threads = placement.Threads(2, 2)
    for kind, environment in {
        "trainer": placement.trainer_environment(threads),
        "generator": placement.generator_environment(threads, on_cpu=True),
        "verifier": placement.verifier_environment(),
    }.items():
        at_import = placement.fork_environment() | placement.import_environment(kind, on_cpu=True)
        assert environment.items() - at_import.items() <= {("OMP_NUM_THREADS", environment["OMP_NUM_THREADS"])}, kind


@pytest.mark.slow
def test_engines_do_without_what_they_never_use(tmp_path):
    """And who asks for vLLM's server all the same gets it. By the tests' own fork servers, whose imports are done."""
    (tmp_path / "look.py").write_text("""if True:
        import sys
        from vllm.renderers.registry import RENDERER_REGISTRY
        renderer = RENDERER_REGISTRY.load_renderer_cls("hf").__name__
        names = "openai", "torchtitan", "vllm.parser", "vllm.v1.engine.core"
        print(renderer, *(name for name in names if name in sys.modules))
        import vllm.entrypoints.mcp.tool_server, vllm.parser.engine.adapters
        print(len(vars(vllm.entrypoints.mcp.tool_server.ToolServer)) > 3, vllm.parser.engine.adapters.__file__ != "")
    """)
    folder, command = os.environ[forking.FORK_SERVERS], (sys.executable, ["-m", "look"])
    arguments = forking.client_arguments(fork_client.__file__, folder, "generator", *command)
    said = subprocess.check_output([sys.executable, *arguments], cwd=tmp_path, text=True, timeout=120)
    assert said.splitlines() == ["TokenRenderer vllm.v1.engine.core", "True True"]


@pytest.mark.slow
def test_a_run_has_its_own_and_can_do_without(tmp_path, monkeypatch):
    """A generator is made by fork; when its servers have died, others are started anew."""
    for name in set(os.environ) - set(conftest.ENVIRONMENT):  # the tests' own servers, and what vLLM sets
        monkeypatch.delenv(name)
    root = tmp_path / "run"
    process = running.start(root, training__steps=5000)
    try:
        running.wait_for_step(root, 2)
        children = running.descendants(process.pid)
        forked = {pid for pid in children if "titan_rl.train" in running.command_line(pid)}
        first = actors_of(root)
        assert set(first.values()) - {first["scorer 0"]} < forked, "all actors were forked"
        marks = {mark for pid in children if (mark := running.mark_of(pid))}
        assert len(marks) == 1, "servers that were begun before the run have none, and its actors have its own"
        second = replaced(root, first)
        assert "titan_rl.train" in running.command_line(second["generator 0"])
        for pid in forked - set(first.values()):
            os.kill(pid, signal.SIGKILL)
        third = replaced(root, second)
        assert "bootstrap_main" in running.command_line(third["generator 0"])
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130, running.output(root)[-3000:]
    assert running.output(root).count("generator 0 died: its groups are sampled elsewhere") == 2
    assert running.gone(children) and not any(marked({MARK: mark}) for mark in marks)


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_does_what_is_due_at_exit_and_takes_nothing_apart(code):
    """As triton's binding library would have it, which prints forty lines then."""
    program = f"""
import atexit, gc, threading, time
from titan_rl.mesh.forking.fork_server import leave

class Held:
    def __del__(self):
        print("taken apart")

held, cycle = Held(), Held()
cycle.itself = cycle
del cycle
atexit.register(print, "due")
atexit.register(lambda: gc.collect())
threading.Thread(target=lambda: (time.sleep(0.1), print("ended", end=" "))).start()
leave({code})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "ended due\n", "")


def actors_of(root: Path) -> dict[str, int]:
    """Process ids of a run's actors, by name."""
    return {name: int(pid) for pid, name in json.loads((root / "pids.json").read_text()).items()}


def replaced(root: Path, actors: dict[str, int]) -> dict[str, int]:
    """Actors of a run after its generator was killed and two steps more were done."""
    os.kill(actors["generator 0"], signal.SIGKILL)
    last = max(record["step"] for record in read_metrics(root) if "reward" in record)
    running.wait_for_step(root, 2 + last)
    now = actors_of(root)
    assert now["generator 0"] != actors["generator 0"]
    return now


def test_what_a_command_checks_first_imports_nothing_that_starts_threads():
    """Monarch does: a process that is forked behind its import waits for threads that it has not."""
    program = "import sys, titan_rl.controller.preflight.checks; print('monarch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


def test_settings_of_malloc_hold_after_a_fork():
    """Blocks of the heap, however large, and none given back. A fork has read no environment."""
    program = """if True:
        import ctypes, os
        from titan_rl.mesh.forking.fork_server import _set_malloc
        from titan_rl.mesh.resources.cores import trainer_environment, Threads
        os.environ |= trainer_environment(Threads(1, 1))
        _set_malloc()
        libc = ctypes.CDLL(None)
        libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        libc.free.argtypes = [ctypes.c_void_p]
        span = lambda: next(line.split()[0] for line in open("/proc/self/maps") if "[heap]" in line)
        before = span()
        block = libc.malloc(3 << 30)
        during = span()
        libc.free(block)
        print(before != during == span())
    """
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    assert subprocess.check_output([sys.executable, "-c", program], text=True, env=environment) == "True\n"
