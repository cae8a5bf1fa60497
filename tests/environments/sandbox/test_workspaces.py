"""Workspaces: commands one after the other in a file system of layers, forked, bounded, and gone at the end."""

import asyncio
import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pyarrow as pa
import pytest
from boxes import own_images

from titan_rl.config.load import ConfigError
from titan_rl.environments.sandbox.workspace.command import (
    LIMITS,
    MOST_COMMAND_BYTES,
    Command,
    CommandResult,
    WorkspaceLimits,
)
from titan_rl.environments.sandbox.workspace.images import (
    Image,
    image_of_archive,
    image_of_files,
    image_of_folder,
    image_of_layout,
    image_store,
)
from titan_rl.environments.sandbox.workspace.server import BoxWorkspace, WorkspaceServer

FILES = {"a.txt": b"first\n", "pkg/b.txt": b"second\n", "run.sh": b"#!/bin/sh\necho ran\n"}
SHELL = Path("/bin/dash").resolve()


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory):
    with own_images(tmp_path_factory):
        yield


def with_workspace(
    check: Callable[[BoxWorkspace], Awaitable[None]],
    image: Image | None = None,
    limits: WorkspaceLimits = LIMITS,
    port: int | None = None,
) -> None:
    async def run() -> None:
        server = WorkspaceServer()
        try:
            await check(await server.open(image or image_of_files(FILES), limits, port))
        finally:
            await server.close()

    asyncio.run(run())


async def output_of(workspace: BoxWorkspace, line: str, **settings) -> str:
    result = await workspace.run(Command(line, **settings))
    assert result.ending == "ok", result.output
    return result.output


def test_commands_change_the_files_that_the_next_one_sees():
    async def check(workspace: BoxWorkspace) -> None:
        assert await output_of(workspace, "pwd; ls; ./run.sh; cat pkg/b.txt") == (
            "/workspace\na.txt\npkg\nrun.sh\nran\nsecond\n"
        )
        await output_of(workspace, "echo third >> a.txt; rm -r pkg; mkdir pkg; echo new > pkg/c.txt")
        assert await output_of(workspace, "cat a.txt; ls pkg") == "first\nthird\nc.txt\n"
        assert await output_of(workspace, 'cat; echo "$WHO" >&2', stdin=b"in\0\n", environment={"WHO": "me"}) == (
            "in\0\nme\n"
        )
        assert await output_of(workspace, "pwd; cat <(echo both)", folder="/tmp") == "/tmp\nboth\n"
        assert await output_of(
            workspace, "python3 -c 'print(6 * 7)'; git init -q . && git add -A && git status -s"
        ) == ("42\nA  a.txt\nA  pkg/c.txt\nA  run.sh\n")

    with_workspace(check)


@pytest.mark.parametrize(
    ("line", "ending", "exit_code"),
    [("exit 7", "error", 7), ("kill -TERM $$", "error", 143), ("no_such_program", "error", 127)],
)
def test_how_a_command_ended(line, ending, exit_code):
    async def check(workspace: BoxWorkspace) -> None:
        result = await workspace.run(Command(line))
        assert (result.ending, result.exit_code) == (ending, exit_code)

    with_workspace(check)


def test_forks_begin_alike_and_change_apart():
    async def check(workspace: BoxWorkspace) -> None:
        await output_of(workspace, "rm -r pkg; mkdir pkg; echo base > base.txt")
        first, second = await workspace.fork(), await workspace.fork()
        await output_of(first, "echo one > base.txt; touch one")
        await output_of(workspace, "echo parent > base.txt; rm a.txt")
        third = await first.fork()
        await workspace.close()
        assert await output_of(second, "cat base.txt a.txt; ls pkg") == "base\nfirst\n"
        await output_of(first, "rm one")
        await first.close()
        assert await output_of(third, "cat base.txt; ls") == "one\na.txt\nbase.txt\none\npkg\nrun.sh\n"

    with_workspace(check)


def test_what_a_command_started_ends_with_it():
    async def check(workspace: BoxWorkspace) -> None:
        mark = f"sleep 98{id(workspace) % 1000:03d}"
        await output_of(workspace, f"setsid nohup {mark} >/dev/null 2>&1 & ({mark} &) ; true")
        assert await output_of(workspace, "set -- /proc/[0-9]*; echo $#") == "2\n", "an init and the shell"
        running = subprocess.run(["pgrep", "-f", mark], capture_output=True, text=True).stdout.split()
        assert not [pid for pid in running if "pgrep" not in Path(f"/proc/{pid}/cmdline").read_text()]

    with_workspace(check)


def test_time_memory_disk_and_output_are_bounded():
    limits = WorkspaceLimits(memory=64 << 20, disk=4 << 20, files=200, output=1000)

    async def ended(workspace: BoxWorkspace, line: str, seconds: float = 20.0) -> CommandResult:
        return await workspace.run(Command(line, seconds=seconds))

    async def check(workspace: BoxWorkspace) -> None:
        late = await ended(workspace, "trap '' TERM; echo begun; sleep 100 & sleep 100", 0.5)
        assert (late.ending, late.output) == ("timeout", "begun\n")
        large = await ended(workspace, "python3 -c 'x = [bytearray(1 << 20) for _ in range(2000)]'")
        assert large.ending in ("memory", "error")
        full = await ended(workspace, "head -c 8000000 /dev/urandom > big")
        assert "No space left" in full.output
        many = await ended(workspace, "for i in $(seq 400); do : > f$i; done")
        assert "No space left" in many.output
        long = await ended(workspace, "seq 100000")
        assert long.ending == "ok"
        assert long.output.startswith("1\n2\n")
        assert long.output.endswith("99999\n100000\n")
        assert len(long.raw_output) == 1000
        assert f"[{long.num_dropped} bytes are left out here]" in long.output
        assert (await ended(workspace, "echo still here")).output == "still here\n"

    with_workspace(check, limits=limits)


def test_a_line_that_no_shell_can_be_given_is_refused_and_nothing_is_lost():
    async def check(workspace: BoxWorkspace) -> None:
        for line in ("echo \0", "#" * (MOST_COMMAND_BYTES + 1)):
            with pytest.raises(ValueError, match="a command has"):
                await workspace.run(Command(line))
        assert await output_of(workspace, "#" * (MOST_COMMAND_BYTES - 10) + "\necho yes") == "yes\n"

    with_workspace(check)


def test_a_port_of_its_loopback_is_answered_by_the_host():
    async def check(workspace: BoxWorkspace) -> None:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello " + await reader.readline())
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(greet, sock=workspace.listener):
            talk = "exec 3<>/dev/tcp/127.0.0.1/8123; echo you >&3; cat <&3"
            assert await output_of(workspace, talk) == "hello you\n"
            refused = await workspace.run(Command("exec 3<>/dev/tcp/127.0.0.1/8124"))
            assert "Connection refused" in refused.output

    with_workspace(check, port=8123)


def test_a_folder_is_an_image_by_what_is_in_it(tmp_path):
    folder = tmp_path / "repository"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "x.py").write_text("print('x')\n")
    (folder / "link").symlink_to("src/x.py")
    image = image_of_folder(folder)
    assert image_of_folder(folder) == image
    (folder / "src" / "x.py").write_text("print('y')\n")
    assert image_of_folder(folder) != image

    async def check(workspace: BoxWorkspace) -> None:
        assert await output_of(workspace, "python3 link") == "x\n"

    with_workspace(check, image)


# whole file systems


def small_system() -> dict[str, bytes]:
    """Files of the smallest file system with a shell, by their paths."""
    libraries = [word for word in subprocess.check_output(["ldd", SHELL], text=True).split() if word.startswith("/")]
    return {"bin/sh": SHELL.read_bytes()} | {path[1:]: Path(path).read_bytes() for path in libraries}


def archive_of(files: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    with io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for path, content in files.items():
                member = tarfile.TarInfo(path)
                member.size, member.mode = len(content), 0o755
                archive.addfile(member, io.BytesIO(content))
            for path, target in (links or {}).items():
                member = tarfile.TarInfo(path)
                member.type, member.linkname = tarfile.SYMTYPE, target
                archive.addfile(member)
        return buffer.getvalue()


def zstd(content: bytes) -> bytes:
    """In two frames, as some tools write it."""
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (content[:700], content[700:]))


def layout_of(folder: Path, layers: list[bytes], config: dict, compress=gzip.compress) -> Path:
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(content: bytes) -> dict:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    compressed = [blob(compress(layer)) for layer in layers]
    manifest = {"schemaVersion": 2, "config": blob(json.dumps({"config": config}).encode()), "layers": compressed}
    index = {"schemaVersion": 2, "manifests": [blob(json.dumps(manifest).encode())]}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def test_an_archive_is_a_whole_file_system(tmp_path):
    file = tmp_path / "system.tar"
    file.write_bytes(archive_of(small_system() | {"opt/note": b"mine\n"}, {"opt/link": "/opt/note"}))

    async def check(workspace: BoxWorkspace) -> None:
        assert (
            await output_of(workspace, "pwd; read x < /opt/link; echo $x; echo /usr/bin/*") == "/\nmine\n/usr/bin/*\n"
        )

    with_workspace(check, image_of_archive(file))


def test_an_oci_layout_is_its_layers_one_over_the_other(tmp_path):
    first = archive_of(small_system() | {"opt/kept": b"1", "opt/gone": b"1", "old/a": b"1", "old/b": b"1"})
    second = archive_of({"opt/.wh.gone": b"", "old/.wh..wh..opq": b"", "old/c": b"2"})
    config = {"Env": ["WHO=image", "PATH=/bin"], "WorkingDir": "/old"}

    async def check(workspace: BoxWorkspace) -> None:
        assert await output_of(workspace, "pwd; echo $WHO $PATH /opt/* *") == "/old\nimage /bin /opt/kept c\n"

    with_workspace(check, image_of_layout(layout_of(tmp_path / "layout", [first, second], config)))
    other = image_of_layout(layout_of(tmp_path / "zstd", [first, second], config, zstd))
    with_workspace(check, other)


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_a_layer_that_is_cut_off_is_one_line(tmp_path, compress):
    folder = layout_of(tmp_path, [archive_of({"a": b"1" * 9000})], {}, lambda layer: compress(layer)[:-30])
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        image_of_layout(folder)


@pytest.mark.parametrize(
    ("path", "links"),
    [("../../outside", {}), ("out/outside", {"out": "../../.."}), ("out/outside", {"out": "/", "x": "y"})],
)
def test_an_archive_writes_nothing_outside_of_its_tree(tmp_path, path, links):
    file = tmp_path / "bad.tar"
    with tarfile.open(file, "w") as archive:
        for name, target in links.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
        member = tarfile.TarInfo(path)
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    if links.get("out") == "/":  # the tree's own root, as it is for who runs there
        image = image_of_archive(file)
        assert (image_store() / image.digest / "outside").read_bytes() == b"x"
    else:
        with pytest.raises(ConfigError, match="cannot be unpacked"):
            image_of_archive(file)
    assert not list(tmp_path.rglob("outside"))
    assert not list(image_store().glob(".begun-*"))


def test_a_blob_that_is_not_what_its_digest_says_is_refused(tmp_path):
    folder = layout_of(tmp_path / "layout", [archive_of({"a": b"1"})], {})
    layer = max((folder / "blobs" / "sha256").iterdir(), key=lambda file: file.read_bytes()[:2] == b"\x1f\x8b")
    layer.write_bytes(gzip.compress(archive_of({"a": b"2"})))
    with pytest.raises(ConfigError, match="is not what its digest says"):
        image_of_layout(folder)
