"""Workspaces in containers of podman and docker, where they are installed."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from waiting import eventually

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.environments.registry import make_task
from titan_rl.environments.sandbox.program import SandboxFailed
from titan_rl.environments.sandbox.workspace.command import Command, WorkspaceLimits, WorkspaceSpoiled
from titan_rl.environments.sandbox.workspace.containers import ContainerEngine, ContainerOptions, ContainerWorkspace

pytestmark = pytest.mark.waits
IMAGE = "localhost/small:1"
PROGRAMS = ("bash", "sh", "cat", "ls", "sed", "mkdir", "rm", "sleep", "seq", "touch", "grep", "head", "truncate")
LIMITS = WorkspaceLimits(seconds=20, output=4096, disk=64 << 20)
ENGINE = """
[engine]
runtime = "{runtime}"
cgroup_manager = "cgroupfs"
events_logger = "file"
exit_command_delay = 1
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
"""
STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n'


def lay_out(archive: Path) -> None:
    """File system of some of this machine's programs, with a repository."""
    files = {Path(shutil.which(name) or name).resolve() for name in PROGRAMS}
    for program in list(files):
        told = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        files |= {Path(word) for word in told.split() if word.startswith("/")}
    with tarfile.open(archive, "w", dereference=True) as image:
        for name in PROGRAMS:
            image.add(Path(shutil.which(name) or name).resolve(), f"bin/{name}")
        for file in files:
            image.add(file, str(file).lstrip("/"))
        with open(archive.with_suffix(".py"), "w") as repository:
            repository.write("def total(numbers):\n    return sum(numbers[1:])\n")
        image.add(archive.with_suffix(".py"), "testbed/sums.py")


@dataclass
class Engine:
    """Engine under test, asked by its own command."""

    options: ContainerOptions

    def ask(self, *arguments: str) -> str:
        return subprocess.run(
            [*self.options.command, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    def answers(self) -> bool:
        return subprocess.run([*self.options.command, "info"], capture_output=True).returncode == 0

    def with_workspace(self, check: Callable[[ContainerWorkspace], Awaitable[None]]) -> None:
        async def run() -> None:
            engine = ContainerEngine(self.options)
            try:
                await check(await engine.open(IMAGE, "", LIMITS))
            finally:
                await engine.close()

        asyncio.run(run())
        assert self.ask("ps", "-aq") == "" == self.ask("images", "-aq", "--filter=label=titan_rl")


@contextmanager
def podman_of(folder: Path) -> Iterator[ContainerOptions]:
    """Podman with a store of its own."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    with pytest.MonkeyPatch.context() as patch:
        (folder / "engine").write_text(ENGINE.format(runtime=next(filter(shutil.which, ("runc", "crun")), "runc")))
        (folder / "storage").write_text(STORAGE.format(folder=folder))
        patch.setenv("CONTAINERS_CONF", str(folder / "engine"))
        patch.setenv("CONTAINERS_STORAGE_CONF", str(folder / "storage"))
        yield ContainerOptions()
    subprocess.run(["umount", str(folder / "store/overlay")], check=False)  # mounted on itself by podman


@contextmanager
def served(*command: str, log: Path) -> Iterator[None]:
    with open(log, "wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            yield
        finally:
            server.terminate()


@contextmanager
def podman_at_url(folder: Path) -> Iterator[ContainerOptions]:
    url = f"unix://{folder}/podman.sock"
    with podman_of(folder), served("podman", "system", "service", "--time=0", url, log=folder / "log"):
        yield ContainerOptions(url=url)


@contextmanager
def docker_at_url(folder: Path) -> Iterator[ContainerOptions]:
    """Docker by a daemon with a store of its own."""
    if shutil.which("dockerd") is None or shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    url = f"unix://{folder}/docker.sock"
    roots = [f"--{name}={folder}/{name}" for name in ("data-root", "exec-root", "pidfile")]
    with served("dockerd", f"--host={url}", *roots, "--bridge=none", "--iptables=false", log=folder / "log"):
        yield ContainerOptions(program="docker", url=url)


@pytest.fixture(scope="module", params=[podman_of, podman_at_url, docker_at_url], ids=lambda engine: engine.__name__)
def engine(request) -> Iterator[Engine]:
    with TemporaryDirectory() as name, request.param(folder := Path(name)) as options:
        asked = Engine(options)
        asyncio.run(eventually(asked.answers, "it answers", 60))
        lay_out(folder / "image.tar")
        asked.ask("import", "--change=WORKDIR /testbed", str(folder / "image.tar"), IMAGE)
        yield asked


async def output_of(workspace: ContainerWorkspace, line: str) -> str:
    return (await workspace.run(Command(line))).output


def test_commands_run_one_after_the_other(engine):
    async def check(workspace: ContainerWorkspace) -> None:
        assert await output_of(workspace, "pwd; ls; echo 1 > made; (sleep 60 &) ") == "/testbed\nsums.py\n"
        assert await output_of(workspace, "cat made; cat /proc/[0-9]*/comm | sed '/^sleep$/!d'") == "1\n"
        command = Command('cat; echo "$A" >&2; exit 3', stdin=b"in\n", environment={"A": "b c"}, folder="/bin")
        result = await workspace.run(command)
        assert (result.ending, result.exit_code, result.output) == ("error", 3, "in\nb c\n")
        assert (await workspace.run(Command("seq 9999"))).num_dropped > 0
        assert await output_of(workspace, "ls /sys/class/net") == "lo\n"
        late = await workspace.run(Command("sleep 60", seconds=1))
        assert (late.ending, late.exit_code) == ("timeout", 137)
        assert await output_of(workspace, "cat made") == "1\n"

    engine.with_workspace(check)


def test_forks_begin_with_what_is_there_and_do_not_meet(engine):
    async def check(workspace: ContainerWorkspace) -> None:
        await output_of(workspace, "echo 1 > made; echo 1 > /outside")
        one, two = [await workspace.fork() for _ in range(2)]
        await output_of(one, "echo 2 > made")
        assert await output_of(two, "cat made /outside") == "1\n1\n"
        await output_of(one, "rm /bin/cat; echo 'echo forged' > /bin/cat")
        folder = await one.fork_folder()
        assert await output_of(folder, "cat made sums.py /outside") != "forged\n"
        assert (await output_of(folder, "cat made; ls")).splitlines() == ["2", "made", "sums.py"]
        assert "1" in await output_of(folder, "cat /outside"), "as it was when the fork began"

    engine.with_workspace(check)


def test_an_image_that_is_not_there_is_one_line(engine):
    images = ContainerEngine(engine.options)
    images.check_images([IMAGE])
    with pytest.raises(ConfigError, match=r"lacks an image: .*localhost/other:1"):
        images.check_images([IMAGE, "localhost/other:1"])
    for name in ("--privileged", "docker-archive:/etc/passwd", "dir:/etc", "a\0", "\ud800"):
        with pytest.raises(ConfigError, match="is no name of an image"):
            images.check_images([name])


def test_a_command_that_is_in_the_way_of_its_end_ends(engine):
    """Its pipes full, its processes exhausted, its watcher killed, its caller gone, its folder removed."""

    async def check(workspace: ContainerWorkspace) -> None:
        await workspace.run(Command("head -c 400000 /dev/zero > /proc/1/fd/2"))
        await workspace.run(
            Command("(exec >/dev/null 2>&1 </dev/null; while :; do echo >> /alive; sleep 0.1; done) & kill -9 $PPID")
        )
        await output_of(workspace, "rm -f /alive; sleep 0.5")
        assert "No such file" in await output_of(workspace, "cat /alive")
        bomb = Command("trap '' TERM; for i in $(seq 200); do sleep 99 & done; sleep 99", seconds=2)
        other = await workspace.fork()
        with suppress(WorkspaceSpoiled):  # where not even what ends it finds a process
            assert (await other.run(bomb)).ending == "timeout"
            assert await output_of(other, "echo on") == "on\n"
        cancelled = await workspace.fork()
        begun = asyncio.ensure_future(cancelled.run(Command("sleep 60")))
        await asyncio.sleep(0.1)
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun
        with pytest.raises(SandboxFailed, match="was closed"):
            await cancelled.run(Command("true"))
        await output_of(workspace, "truncate -s 1G big || seq 99999999 > big")
        with pytest.raises(WorkspaceSpoiled, match="is larger than"):
            await workspace.fork_folder()
        await output_of(workspace, "cd /; rm -rf /testbed")
        assert await output_of(await workspace.fork_folder(), "pwd; ls") == "/testbed\n"

    engine.with_workspace(check)


KILLED = f"""
import asyncio, os, signal, sys
from titan_rl.environments.sandbox.workspace.command import WorkspaceLimits
from titan_rl.environments.sandbox.workspace.containers import ContainerEngine, ContainerOptions
async def main():
    await ContainerEngine(ContainerOptions(program=sys.argv[1], url=sys.argv[2])).open("{IMAGE}", "", WorkspaceLimits())
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_containers_end_with_the_process_that_began_them(engine):
    place = [engine.options.program, engine.options.url]
    killed = subprocess.run([sys.executable, "-c", KILLED, *place], capture_output=True, text=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    asyncio.run(eventually(lambda: engine.ask("ps", "-aq") == "", "it is gone", 60))


def test_an_issue_is_resolved_in_a_container(engine, tmp_path):
    row = {"workspace": IMAGE, "FAIL_TO_PASS": ["sum(numbers)"], "test_command": "cat sums.py | grep -q"}
    rows = [row | {"problem_statement": f"{number}"} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"file": "rows.jsonl", "protocol": "line", "container": asdict(engine.options)}

    async def check() -> None:
        task = make_task(TaskConfig(name="swe", style="chat", options=options), [str(tmp_path)])
        try:
            prompt = task.prompt("train", 1, 0)
            for command, reward in (("sed -i 's/numbers.1:./numbers/' sums.py", 1.0), ("echo forged > sums.py", 0.0)):
                environment = task.environment(prompt)
                await environment.step(command)
                assert (await environment.step("submit")).reward == reward
                await environment.close()
        finally:
            await task.close()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"program": "nerdctl"}, "podman"),
        ({"program": "docker"}, "there is no docker here"),
    ],
)
def test_options_are_checked(monkeypatch, tmp_path, options, message):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=message):
        make_task(
            TaskConfig(name="swe", style="chat", options={"file": "x.jsonl", "container": options}), [str(tmp_path)]
        )
