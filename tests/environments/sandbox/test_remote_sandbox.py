"""Programs at a server: as in a box here, and whatever goes wrong on the way is SandboxFailed, never a wrong answer."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
from aiohttp import web
from fake_fusion import LIMITS, FakeFusion, asked, ran
from fake_servers import serving

from titan_rl.cli import main
from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.controller.preflight.recorded_config import load_recorded
from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.environments.registry import make_task
from titan_rl.environments.sandbox import pool, remote
from titan_rl.environments.sandbox.program import Call, Limits, Program, SandboxFailed
from titan_rl.environments.sandbox.program_report import as_task
from titan_rl.environments.sandbox.remote import RemoteSandbox, check_server, remote_config
from titan_rl.environments.sandbox.values import same
from titan_rl.environments.scoring.scorer import Scorer
from titan_rl.environments.tasks.code.code_tests import FunctionTest, StreamTest, run_tests
from titan_rl.records.run_directory.rundir import RunDir

PROGRAM = Program("print(6 * 7)", limits=LIMITS)
VALUES = [0, 10**400, 1.5, float("inf"), True, None, "ä\x00", [1, (2, {3})], {"a": {1: frozenset({2})}}]
FILES = "import tempfile, os\nwith tempfile.TemporaryFile('w+') as f: print(f.write('abc'))"
KILL_PARENT = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"
WRITE_TO_PARENT = "import os\nopen(f'/proc/{os.getppid()}/fd/1', 'w').write('{}')"
CHILDREN = "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(b'x') * (60 << 20)\ntime.sleep(9)"
ALONE = """
import ctypes, os, threading, time
def hold():
    time.sleep(0.3)
    x = bytearray(b"x") * (300 << 20)
    time.sleep(9)
threading.Thread(target=hold).start()
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""
"""Its first thread is gone."""
LEAVE = "import subprocess\nprint(subprocess.Popen(['sleep', '60'], start_new_session=False).pid)"


@pytest.mark.parametrize(
    ("source", "ending", "exit_code", "stdout"),
    [
        ("print(6 * 7)", "ok", 0, "42\n"),
        ("import sys\nprint(sys.stdin.read().upper())", "ok", 0, "HALLÖ\n\n"),
        ("import os\nprint(input(), os.read(0, 9))", "ok", 0, "hallö b''\n"),
        ("import sys\nsys.exit(3)", "error", 3, ""),
        ("print(1)\nraise ValueError", "error", 1, "1\n"),
        ("import os\nos.abort()", "error", -6, ""),
        (FILES, "ok", 0, "3\n"),
        ("print('x' * 65535)", "ok", 0, "x" * 65535 + "\n"),
        ("print('x' * 65536)", "output", None, "x" * 65536),
        ("while True: print('x' * 1000)", "output", -9, None),
        ("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", "output", -9, ""),
        ("print('before', flush=True)\nwhile True: pass", "timeout", -9, "before\n"),
        ("x = bytearray(1 << 30)", "error", 1, ""),
        ("x = bytearray(b'x') * (300 << 20)\nimport time\ntime.sleep(9)", "memory", -9, ""),
        (CHILDREN, "memory", -9, ""),
        (ALONE, "memory", -9, ""),
        ("def f(: pass", "error", 1, ""),
        ("import os\nos._exit(0)", "ok", 0, ""),
    ],
)  # fmt: skip
def test_a_program_ends_as_it_does_in_a_box(source, ending, exit_code, stdout):
    start = time.monotonic()
    outcome = ran(source, "hallö\n")
    assert outcome.ending == ending, outcome
    assert stdout is None or outcome.stdout == stdout
    assert exit_code is None or outcome.exit_code == exit_code
    assert time.monotonic() - start < LIMITS.seconds + 3


def test_values_go_there_and_come_back_as_they_are():
    program = Program("print('noise')\ndef f(x): return x", calls=tuple(Call("f", (value,)) for value in VALUES))
    outcome = asked(FakeFusion(), lambda sandbox: sandbox.run(program))
    assert all(same(given.value, value) for given, value in zip(outcome.results, VALUES, strict=True))
    assert outcome.stdout == "noise\n"


def test_tests_are_judged_here_and_what_they_expect_never_travels():
    tests = [FunctionTest(Call("f", (2,)), 7654321), FunctionTest(Call("f", (3,)), 27), StreamTest("4\n", "8675309\n")]
    fake = FakeFusion()
    verdicts = asked(fake, lambda sandbox: run_tests(sandbox, "def f(x): return x ** 3", tests, LIMITS))
    assert verdicts == [False, True, False] and len(fake.bodies) == 2
    assert not any(secret in json.dumps(fake.bodies) for secret in ("7654321", "8675309"))


def test_what_a_program_leaves_in_its_session_is_ended():
    outcome = ran(LEAVE)
    time.sleep(0.1)
    done = subprocess.run(["kill", "-0", outcome.stdout.strip()], capture_output=True)
    state = subprocess.run(["ps", "-o", "stat=", "-p", outcome.stdout.strip()], capture_output=True, text=True)
    assert done.returncode or state.stdout.startswith("Z")


@pytest.mark.parametrize("source", [KILL_PARENT, WRITE_TO_PARENT])
def test_a_program_that_spoils_its_report_has_no_verdict(source):
    with pytest.raises(SandboxFailed, match="no report"):
        ran(source)


def text(said, status=200):
    async def answer(request):
        return web.Response(text=said, status=status)

    return answer


def finished(stdout):
    return text(json.dumps({"status": "Success", "run_result": {"status": "Finished", "stdout": stdout}}))


async def hang(request):
    await asyncio.sleep(60)


async def cut(request):
    request.transport.abort()


async def half(request):
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"status": "Success"')
    request.transport.close()
    return response


async def trickle(request):
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(600):
        await response.write(b" ")
        await asyncio.sleep(0.1)
    return response


async def flood(request):
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(40):
        await response.write(b"x" * (1 << 20))
    return response


async def elsewhere(request):
    raise web.HTTPFound("http://127.0.0.1:9/run_code")


REPORT = dict(nonce="0" * 32, why="", exit=0, seconds=0.1, memory=1, received=["YmVndW4K", "NDIK", ""])
WRONG = {
    "hang": (hang, "did not answer within"),
    "cut": (cut, "RemoteProtocolError|ReadError"),
    "half": (half, "RemoteProtocolError|ReadError"),
    "trickle": (trickle, "did not answer within"),
    "flood": (flood, "more than 16 MiB"),
    "redirect": (elsewhere, "redirects are not followed"),
    "500": (text("oops", 500), "answered 500: oops"),
    "503": (text("busy", 503), "answered 503"),
    "404": (text("no such thing", 404), "answered 404"),
    "422": (text('{"detail": "field required"}', 422), "answered 422"),
    "page": (text("<html>"), "no JSON"),
    "nothing": (text(""), "no JSON"),
    "list": (text("[]"), "no JSON object"),
    "deep": (text("[" * 100_000), "no JSON"),
    "no result": (text('{"status": "SandboxError", "message": "no room"}'), "no report.*no room"),
    "null": (text('{"status": "Success", "run_result": null}'), "no report"),
    "another program's": (finished(json.dumps(REPORT)), "no report"),
    "plain output": (finished("42\n"), "no report"),
    "deep report": (finished("[" * 100_000), "no report"),
}
WAITING = ("hang", "trickle")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.waits if name in WAITING else ()) for name in WRONG]
)
def test_what_is_no_report_is_no_answer(name, monkeypatch):
    answer, said = WRONG[name]
    monkeypatch.setattr(remote, "_PAUSE_SECONDS", 0.01)
    fake, start = FakeFusion(*[answer] * 3), time.monotonic()
    with pytest.raises(SandboxFailed, match=said) as caught:
        asked(fake, lambda sandbox: sandbox.run(Program("", limits=Limits(seconds=0.1))), patience=2.0)
    assert len(fake.bodies) == 3 and "\n" not in str(caught.value)
    assert time.monotonic() - start < 3 * 2.1 + 2


@pytest.mark.parametrize(
    "change",
    [{"why": "sleepy"}, {"why": []}, {"exit": "one"}, {"exit": None}, {"exit": 1e999}, {"seconds": {}},
     {"received": []}, {"received": ["!", "", ""]}, {"received": [1, 2, 3]}, {"received": ["", "", ""]}],
)  # fmt: skip
def test_a_report_is_whole_or_none(change, monkeypatch):
    monkeypatch.setattr(remote.secrets, "token_hex", lambda size: REPORT["nonce"])
    good = asked(FakeFusion(finished(json.dumps(REPORT))), lambda sandbox: sandbox.run_once(PROGRAM))
    assert (good.ending, good.stdout) == ("ok", "42\n")
    with pytest.raises(SandboxFailed):
        asked(FakeFusion(finished(json.dumps(REPORT | change))), lambda sandbox: sandbox.run_once(PROGRAM))


def test_a_server_that_fails_for_a_moment_is_asked_again():
    assert ran("print(6 * 7)", fake=FakeFusion(text("", 500), cut)).stdout == "42\n"


def test_a_server_without_a_python_is_nobodys_wrong_answer():
    with pytest.raises(SandboxFailed, match="no report"):
        ran("print(6 * 7)", fake=FakeFusion(python="/bin/false"))


def test_a_server_that_dies_in_mid_call():
    """Another process, killed while it runs a program: the caller is told, and nothing hangs."""
    script = (
        "import socket, time\ns = socket.create_server(('127.0.0.1', 0))\nprint(s.getsockname()[1], flush=True)\n"
        "c, _ = s.accept()\nc.recv(100)\nprint('asked', flush=True)\ntime.sleep(60)"
    )

    async def work(server, port):
        sandbox = RemoteSandbox(remote_config({"url": f"http://127.0.0.1:{port}"}))
        running = asyncio.create_task(sandbox.run(PROGRAM))
        assert await asyncio.to_thread(server.stdout.readline) == "asked\n" and not running.done()
        server.send_signal(signal.SIGKILL)
        with pytest.raises(SandboxFailed):
            await running

    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as server:
        start = time.monotonic()
        asyncio.run(work(server, int(server.stdout.readline())))
        assert time.monotonic() - start < 5


def test_only_so_many_are_there_at_once():
    class Counting(FakeFusion):
        now = most = 0

        def run(self, body):
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                return super().run(body)
            finally:
                self.now -= 1

    async def work(sandbox):
        return await asyncio.gather(*(sandbox.run(Program(f"print({n})")) for n in range(8)))

    fake = Counting()
    assert [outcome.stdout for outcome in asked(fake, work, at_once=2)] == [f"{n}\n" for n in range(8)]
    assert fake.most == 2


def test_the_token_travels_in_its_header_alone(monkeypatch):
    monkeypatch.setenv("FUSION_TOKEN", "s3cret")
    fake = FakeFusion()
    ran("", fake=fake, token_env="FUSION_TOKEN")
    assert fake.headers[0]["Authorization"] == "Bearer s3cret" and "s3cret" not in json.dumps(fake.bodies)
    monkeypatch.setenv("FUSION_TOKEN", "s3cret\n")
    with pytest.raises(ConfigError, match="no header") as caught:
        ran("", token_env="FUSION_TOKEN")
    assert "s3cret" not in str(caught.value)


def test_no_proxy_is_asked_for_this_machine(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert ran("print(1)").stdout == "1\n"


ROWS = [{"prompt": str(n), "tests": {"fn_name": "f", "inputs": [[n]], "outputs": [n + 1]}} for n in range(4)]


@pytest.fixture
def problems(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def test_a_task_runs_its_programs_there_and_needs_no_walls_here(problems, monkeypatch):
    monkeypatch.setattr(pool, "_check_boxes", lambda: pytest.fail("no box is wanted"))
    fake = FakeFusion()
    with serving(fake.app) as port:
        options, server = {"file": str(problems), "held_out_share": 0.5}, {"url": f"http://127.0.0.1:{port}"}
        task = make_task(TaskConfig(name="code", options=options, sandbox=server))
        environment = task.environment(task.prompt("train", 1, 0))
        replies = [asyncio.run(environment.step(f"def f(n): return n + {n}")).reward for n in (1, 2)]
        check_server(server)
    assert replies == [1.0, 0.0]
    with pytest.raises(EnvironmentFailed, match="the sandbox: .*ConnectError"):
        asyncio.run(environment.step("def f(n): return n + 1"))
    pool.choose_sandbox({})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(url=""), "task.sandbox.url"),
        (dict(url="127.0.0.1:8080"), "task.sandbox.url"),
        (dict(url="ftp://host"), "give it as 'http://127.0.0.1:8080'"),
        (dict(url="http://me:secret@host"), "task.sandbox.token_env"),
        (dict(url="http://127.0.0.1:99999"), "Port"),
        (dict(url="http://127.0.0.1:9"), "programs cannot be run at task.sandbox.url"),
        (dict(url="http://a b"), "task.sandbox.url"),
        (dict(url="http://127.0.0.1:9", token_env="NO_SUCH"), "task.sandbox.token_env = 'NO_SUCH'"),
        (dict(url="http://127.0.0.1:9", patience=0.1), "task.sandbox.patience"),
        (dict(url="http://127.0.0.1:9", at_once=0), "task.sandbox.at_once"),
        (dict(url="http://127.0.0.1:9", proxy="x"), "unknown key task.sandbox.proxy"),
    ],
)
def test_what_is_no_server_is_told_before_anything_starts(problems, tmp_path, capsys, settings, said):
    given = [part for key, value in settings.items() for part in (f"--task.sandbox.{key}", str(value))]
    command = ["--run.dir", str(tmp_path / "run"), "--task.name", "code", "--task.options.file", str(problems)]
    assert main(["train", *command, "--task.options.held_out_share", "0.5", *given]) == 2
    err = capsys.readouterr().err.strip()
    assert said in err and "\n" not in err and "secret" not in err and not (tmp_path / "run").exists()
    pool.choose_sandbox({})


def test_a_server_that_a_record_names_is_given_no_secret(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"task": {"sandbox": {"url": "http://127.0.0.1:9", "token_env": "HOME"}}}))
    assert load_recorded(RunDir(tmp_path), path, []).task.sandbox == {"url": "http://127.0.0.1:9"}


def test_a_server_that_runs_nothing_right_is_refused(monkeypatch):
    with serving(FakeFusion(finished("42\n")).app) as port, pytest.raises(ConfigError, match="no report"):
        check_server({"url": f"http://127.0.0.1:{port}"})


def test_an_end_that_takes_long_is_the_programs():
    given = as_task(Program("import time\ntime.sleep(6)")) | {"nonce": "x", "limits": asdict(Limits(seconds=1.0))}
    script = f"{remote._script()}\n_kill = lambda pid: None\nmain({json.dumps(given)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    report = json.loads(done.stdout)
    assert (report["why"], report["exit"], report["nonce"]) == ("timeout", -signal.SIGKILL, "x"), done


def test_a_scorer_is_given_the_token_and_asks_nobody(problems, monkeypatch):
    monkeypatch.setenv("FUSION_TOKEN", "s3cret")
    server = {"url": "http://127.0.0.1:9", "token_env": "FUSION_TOKEN"}
    options = {"file": str(problems), "held_out_share": 0.5}
    config = TaskConfig(name="code", options=options, sandbox=server)
    prompt = make_task(config).prompt("train", 1, 0)

    async def scored():
        scorer = Scorer(config, [], 5.0, 2)
        await scorer.start()
        try:
            return await scorer.score(prompt, [["def f(n): return n + 1"]])
        finally:
            await scorer.close()

    [score], _ = asyncio.run(scored())
    assert score.status == "ok", score
    pool.choose_sandbox({})


def test_a_mixture_has_one_place_for_all_programs():
    options = {"gcd": {"sandbox": {"url": "http://127.0.0.1:9"}}, "lcm": {}}
    with pytest.raises(ConfigError, match="task.options.gcd.sandbox: all programs of a run go to one place"):
        make_task(TaskConfig(name="mixture", options=options))
