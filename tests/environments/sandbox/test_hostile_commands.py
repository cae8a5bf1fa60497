"""No command leaves its workspace, outlives its end, or changes what another one or an evaluation sees."""

import asyncio
import gc
import io
import os
import re
import socket
import stat
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from boxes import need_boxes
from hostile_commands import BROKE, HOSTILE_COMMANDS, MOST_FILES, MOST_MEMORY, HostileCommand

from titan_rl.config.load import ConfigError
from titan_rl.environments.sandbox.bubblewrap import python_folder
from titan_rl.environments.sandbox.groups import cgroup_root
from titan_rl.environments.sandbox.program import SandboxFailed
from titan_rl.environments.sandbox.workspace.command import Command, CommandResult, WorkspaceLimits
from titan_rl.environments.sandbox.workspace.images import image_of_archive, image_of_files, image_store
from titan_rl.environments.sandbox.workspace.server import BoxWorkspace, WorkspaceServer

LIMITS = WorkspaceLimits(
    seconds=20.0, memory=MOST_MEMORY, disk=16 << 20, files=MOST_FILES, processes=32, output=16 << 10
)
"""A machine that is busy with something else takes long for what is no attack on its time."""
DEADLINE = 0.4
"""Seconds of what takes its whole time."""
SLACK = 20.0
OURS = re.compile(r" /(w|images|empty|host/proc)[/ ]|userxattr")
"""Mounts of workspaces; what others mount on this machine meanwhile is theirs."""
LISTENER = f"titan_rl_hidden_{os.getpid()}"
FILES = {"kept": b"kept\n", "solution.py": b"def solve(n):\n    return n * n + 7\n"}
HONEST = "python3 -B -c 'import solution; print(solution.solve(3))'; ls -lAR --full-time /workspace /tmp /root /etc"
EVALUATION = "python3 -c 'print(6 * 7)'; env | sort; ls -A / /tmp /root /etc /usr/local/bin /bin/bash"
"""It looks at what is no part of the workspace's folder."""
NEIGHBOUR = """
import os, socket, time
tcp = socket.create_server(("127.0.0.1", 7000))
named = socket.socket(socket.AF_UNIX)
named.bind("\\0titan_rl_other")
named.listen()
socket.create_connection(("127.0.0.1", 8000))
while True: time.sleep(1)
"""


@dataclass(frozen=True)
class Host:
    """What no command may see."""

    token: str
    file: Path
    port: int

    def fill(self, text: str, mark: str) -> str:
        names = {"SECRET_FILE": self.file, "HOST_PID": os.getpid(), "HOST_PORT": self.port, "LISTENER": LISTENER}
        for name, value in (names | {"PYTHON_FOLDER": python_folder(), "MARK": mark}).items():
            text = text.replace(name, str(value))
        return text


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> Iterator[Host]:
    """Secrets in the environment, in a file that all may read, and behind sockets."""
    need_boxes()
    token = f"token-{os.urandom(8).hex()}"
    file = tmp_path_factory.mktemp("secret") / "expected.json"
    file.write_text(token)
    with pytest.MonkeyPatch.context() as patch, socket.socket(socket.AF_UNIX) as named:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TITAN_RL_TOKEN", token)
        named.bind(f"\0{LISTENER}")
        named.listen()
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield Host(token, file, server.getsockname()[1])
    assert file.read_text() == token


class Neighbours:
    """A server with two workspaces beside the hostile one: one at rest, and one in which a command runs on."""

    def __init__(self, token: str):
        self.token = token

    async def begin(self) -> None:
        self.server, self.image = WorkspaceServer(), image_of_files(FILES)
        self.at_rest = await self.server.open(self.image, LIMITS)
        self.honest, self.evaluation = await self.look(), await self.evaluated(await self.at_rest.fork())
        assert self.honest.startswith("16\n")
        assert self.evaluation.startswith("42\n")
        busy = await self.server.open(self.image, LIMITS, port=8000)
        command = Command("exec python3 -", NEIGHBOUR.encode(), {"TITAN_RL_TOKEN": self.token}, seconds=600.0)
        self.running = asyncio.create_task(busy.run(command))
        assert busy.listener is not None
        busy.listener.settimeout(SLACK)
        (await asyncio.to_thread(busy.listener.accept))[0].close()
        self.busy, self.before = busy, self.seen()
        gc.collect()  # what tests before this one have left is closed now, and not in the middle
        self.num_before = self.num_descriptors()

    async def end(self) -> None:
        assert not self.running.done(), self.running.result()
        await self.busy.close()
        with pytest.raises(SandboxFailed):
            await self.running
        await self.server.close()

    async def look(self) -> str:
        return (await self.at_rest.run(Command(HONEST))).output

    async def evaluated(self, workspace: BoxWorkspace) -> str:
        """What an evaluation of a workspace's folder has around it."""
        evaluated = await workspace.fork_folder()
        output = (await evaluated.run(Command(EVALUATION, folder="/"))).output
        await evaluated.close()
        return output

    def num_descriptors(self) -> int:
        """Of this process."""
        return len(os.listdir("/proc/self/fd"))

    def seen(self) -> dict[str, object]:
        """What is on the host before and after each command."""
        process = self.server._process
        assert process is not None
        groups = cgroup_root().folder
        return {
            "processes": {process.pid, *filter(lives, below(process.pid))},
            "mounts": [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if OURS.search(line)],
            "groups": sorted(groups.glob(f"titan_rl.*.{os.getpid()}.*")) if groups else [],
            "images": {path: (path.lstat().st_mode, path.lstat().st_mtime_ns) for path in image_store().rglob("*")},
        }


def below(pid: int) -> set[int]:
    found = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            found |= {int(child) for child in children.read_text().split()}
    return found.union(*map(below, found))


def lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


def left(mark: str) -> list[str]:
    """What is left of a command on the host, by its mark."""
    places = [
        "/",
        "/tmp",
        "/var/tmp",
        "/dev",
        "/dev/shm",
        "/etc",
        "/usr",
        "/usr/bin",
        "/usr/local/bin",
        "/root",
        sys.prefix,
    ]
    found = [
        f"{place}/{name}" for place in places if os.access(place, os.R_OK) for name in os.listdir(place) if mark in name
    ]
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with suppress(OSError):
                if mark.encode() in (process / name).read_bytes():
                    found.append(f"{process}/{name}")
    return found


@pytest.fixture(scope="module")
def neighbours(host) -> Iterator[tuple[asyncio.Runner, Neighbours]]:
    with asyncio.Runner() as runner:
        made = Neighbours(host.token)
        runner.run(made.begin())
        yield runner, made
        runner.run(made.end())


@pytest.mark.parametrize("name", HOSTILE_COMMANDS)
def test_it_gets_nothing_and_leaves_nothing(host, neighbours, name):
    runner, others = neighbours
    hostile: HostileCommand = HOSTILE_COMMANDS[name]
    mark = f"mark{os.urandom(8).hex()}"
    limit = DEADLINE if hostile.takes_all_time else LIMITS.seconds
    line, stdin = host.fill(hostile.line, mark), host.fill(hostile.stdin, mark).encode()
    command = Command(line, stdin, {"TITAN_RL_MARK": mark}, seconds=limit)

    async def attack() -> tuple[CommandResult, float]:
        workspace = await others.server.open(others.image, LIMITS)
        start = time.monotonic()
        result = await workspace.run(command)
        seconds = time.monotonic() - start
        assert await others.look() == others.honest, "another workspace has changed"
        forked = await workspace.fork()
        for each in (workspace, forked):
            assert (await each.run(Command("exit 5", folder="/"))).ending in ("error", "ok")
        assert await others.evaluated(workspace) == others.evaluation, "an evaluation has changed"
        for each in (workspace, forked):
            await each.close()
        return result, seconds

    result, seconds = runner.run(attack())
    assert result.ending in hostile.endings, result
    assert BROKE not in result.output, result.output
    assert host.token not in result.output, "it saw what it must not"
    assert seconds < limit + SLACK
    assert len(result.raw_output) <= LIMITS.output
    assert not others.running.done(), others.running.result()
    give_up = time.monotonic() + SLACK
    while (now := others.seen()) != others.before or left(mark) or others.num_descriptors() > others.num_before:
        assert time.monotonic() < give_up, {key: now[key] for key in now if now[key] != others.before[key]} or left(
            mark
        )
        time.sleep(0.02)  # the kernel may still be at the end of it


_INOTIFY = "import ctypes, select, time\nlibc = ctypes.CDLL(None)\n"
MEETINGS = {
    "watches": (
        _INOTIFY + "while libc.inotify_init1(0) >= 0: pass",
        _INOTIFY + "print(libc.inotify_init1(0) >= 0)",
    ),
    "watch_of_a_device": (
        "import threading\ndef write():\n    while True: open('/dev/null', 'w').close()\n"
        "threading.Thread(target=write, daemon=True).start()",
        _INOTIFY + "number = libc.inotify_init1(0)\nlibc.inotify_add_watch(number, b'/dev/null', 0xFFF)\n"
        "print(number >= 0 and select.select([number], [], [], 0.2)[0] != [])",
    ),
    "lock_of_a_program": (
        "import fcntl\nheld = open('/usr/bin/env')\nfcntl.flock(held, fcntl.LOCK_EX)",
        "import fcntl\nfcntl.flock(open('/usr/bin/env'), fcntl.LOCK_EX | fcntl.LOCK_NB)",
    ),
    "lock_of_the_kernels_file": (
        "import fcntl\nheld = open('/proc/version')\nfcntl.flock(held, fcntl.LOCK_EX)",
        "import fcntl\nfcntl.flock(open('/proc/version'), fcntl.LOCK_EX | fcntl.LOCK_NB)",
    ),
    "name_of_a_socket": (
        "import socket\nheld = socket.socket(socket.AF_UNIX)\nheld.bind('\\0meeting')\nheld.listen()",
        "import socket\nsocket.socket(socket.AF_UNIX).bind('\\0meeting')",
    ),
    "shared_memory": (
        "from multiprocessing import shared_memory\nheld = shared_memory.SharedMemory('meeting', True, 4096)",
        "from multiprocessing import shared_memory\nshared_memory.SharedMemory('meeting', True, 4096).unlink()",
    ),
}
"""What holds something, and what finds it, where the two meet."""


@pytest.mark.parametrize("name", MEETINGS)
def test_two_workspaces_do_not_meet(neighbours, name):
    """The one that looks finds the same whether or not another one holds it."""
    runner, others = neighbours
    holder, finder = MEETINGS[name]
    begun = "\nimport socket, time\nsocket.create_connection(('127.0.0.1', 8000))\ntime.sleep(100)\n"

    async def found(workspace: BoxWorkspace) -> tuple[str, str]:
        result = await workspace.run(Command("exec python3 -", finder.encode()))
        return result.ending, result.output

    async def check() -> None:
        one, other = (
            await others.server.open(others.image, LIMITS, 8000),
            await others.server.open(others.image, LIMITS),
        )
        alone = await found(other)
        holding = asyncio.create_task(one.run(Command("exec python3 -", (holder + begun).encode())))
        assert one.listener is not None
        one.listener.settimeout(SLACK)
        (await asyncio.to_thread(one.listener.accept))[0].close()
        beside = await found(other)
        assert not holding.done(), holding.result()
        await one.close()
        with pytest.raises(SandboxFailed):
            await holding
        await other.close()
        assert beside == alone

    runner.run(check())


def archive_of(file: Path, members: list[tuple[str, bytes, str]]) -> Path:
    """Archive of a name, a type and a link's target each."""
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, target, 0o777
            if "\0" in name:
                member.pax_headers = {"path": name}
            archive.addfile(member, io.BytesIO())
    return file


FILE, LINK, HARD, FOLDER, DEVICE = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE
ARCHIVES = {
    "whiteout_of_above": [("a", FILE, ""), (".wh...", FILE, "")],
    "whiteout_of_above_by_a_link": [("a", LINK, "/"), ("a/.wh...", FILE, "")],
    "whiteout_of_itself": [(".wh..", FILE, "")],
    "whiteout_of_nothing": [(".wh.", FILE, "")],
    "whiteout_by_a_link": [("a", LINK, "OUTSIDE"), ("a/.wh.kept", FILE, ""), ("a/.wh..wh..opq", FILE, "")],
    "folder_for_all_by_a_link": [("tmp", LINK, "OUTSIDE")],
    "file_for_all_by_a_link": [("tmp", LINK, "OUTSIDE/kept")],
    "link_that_leads_nowhere": [("tmp", LINK, "OUTSIDE/nothing"), ("etc", LINK, "nothing")],
    "file_for_a_folder": [("etc", FILE, "")],
    "folder_over_a_link": [("a", LINK, "OUTSIDE"), ("a", FOLDER, ""), ("a/b", FILE, "")],
    "file_over_a_link": [("a", LINK, "OUTSIDE/kept"), ("a", FILE, "")],
    "file_over_a_link_to_a_link": [("a", LINK, "OUTSIDE/kept"), ("b", HARD, "a"), ("b", FILE, "")],
    "below_a_link": [("a", LINK, "OUTSIDE"), ("a/new", FILE, "")],
    "below_two_links": [("a", LINK, "b/.."), ("b", LINK, "OUTSIDE"), ("a/OUTSIDE/new", FILE, "")],
    "below_a_link_that_climbs": [("d", FOLDER, ""), ("d/a", LINK, "../.."), ("d/a/new", FILE, "")],
    "hard_link_out": [("a", HARD, "OUTSIDE/kept"), ("a", FILE, "")],
    "hard_link_by_a_link": [("a", LINK, "OUTSIDE"), ("b", HARD, "a/kept"), ("b", FILE, "")],
    "devices": [("a", DEVICE, ""), ("dev", LINK, "/dev"), ("dev/new", DEVICE, "")],
    "deep": [("/".join("d" * 1100), FOLDER, "")],
    "name_with_a_nul": [("a\0b", FILE, "")],
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_changes_nothing_but_its_tree(monkeypatch, tmp_path, name):
    """Whether it is taken or refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    outside, store = tmp_path / "outside", image_store()
    outside.mkdir(mode=0o700)
    (outside / "kept").write_text("kept")
    (outside / "kept").chmod(0o600)
    image_of_files(FILES)
    members = [
        (path.replace("OUTSIDE", str(outside).strip("/")), kind, target.replace("OUTSIDE", str(outside)))
        for path, kind, target in ARCHIVES[name]
    ]
    before = (everything(outside), everything(store.parent))
    file = archive_of(tmp_path / "hostile.tar", members)
    made = None
    with suppress(ConfigError):
        made = store / image_of_archive(file).digest
    after = everything(store.parent)
    own = {path for path in after if made is not None and path.is_relative_to(made)}
    assert (everything(outside), {path: how for path, how in after.items() if path not in own}) == before


def everything(folder: Path) -> dict[Path, tuple[int, int]]:
    """Modes and sizes of all that is there."""
    found = [folder, *folder.rglob("*")]
    return {
        path: (info.st_mode, info.st_nlink * stat.S_ISREG(info.st_mode)) for path in found for info in [path.lstat()]
    }
