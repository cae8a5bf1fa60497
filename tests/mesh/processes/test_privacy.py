"""Another user of the host cannot connect to a run, nor read its memory, its logs or its run directory.

One run, with a worker loop and Monarch's RDMA over TCP, is looked at by another user: a fork of the test that gives up
its rights. What it attempts succeeds for the owner, or it would prove nothing.
"""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import running
from another_user import as_another_user, needs_root, succeeds
from running import listening

from titan_rl.config.load import ConfigError
from titan_rl.mesh.resources.listeners import sockets
from titan_rl.mesh.resources.listeners.library_calls import LIBC, address_of, entries_of
from titan_rl.records.run_directory.events import read_events
from titan_rl.records.run_directory.rundir import RunDir


def connect(address: str) -> None:
    """``@name`` is an abstract socket."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(5)
        one.connect(address.replace("@", "\0", 1))


def read(path: Path) -> Callable[[], object]:
    return (lambda: os.listdir(path)) if path.is_dir() else (lambda: os.close(os.open(path, os.O_RDONLY)))


def write_into(folder: Path) -> None:
    (folder / "an order").touch()


# Monarch's sockets, without a run


def test_monarch_begins_with_no_socket_that_others_can_reach():
    """And takes the folder of those that it has with it."""
    program = """
import os
from titan_rl.mesh.resources.listeners.sockets import abstract_listeners, open_privately
folder = open_privately()
assert open_privately() is folder and oct(folder.stat().st_mode)[-3:] == "700"
assert any(path.is_socket() for path in folder.iterdir()) and abstract_listeners() == []
assert str(folder) not in os.environ.get("TMPDIR", "")
print(folder)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.splitlines()[-1]).exists()


def test_abstract_sockets_of_this_process_are_known():
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("\0titan_rl_test")
        assert "@titan_rl_test" not in sockets.abstract_listeners()
        one.listen()
        assert "@titan_rl_test" in sockets.abstract_listeners()


def test_monarchs_library_is_found_behind_a_link(tmp_path):
    """As in a virtual environment that is one. A run of this process may have taken the place of ``bind``."""
    import monarch._rust_bindings as monarchs

    (link := tmp_path / "library.so").symlink_to(monarchs.__file__)
    address = address_of(LIBC.listen)
    assert entries_of(str(link), address) == entries_of(monarchs.__file__, address) != []


def test_a_monarch_whose_sockets_cannot_be_moved_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(sockets, "entries_of", lambda library, function: [])
    with pytest.raises(RuntimeError, match="cannot be kept from other users"):
        sockets.keep_sockets_in(tmp_path)


@pytest.mark.parametrize(
    ("family", "path", "is_it"),
    [(socket.AF_UNIX, b"\0name", True), (socket.AF_UNIX, b"", True), (socket.AF_UNIX, b"/a", False)]
    + [(socket.AF_INET, b"\0\0\x7f\0\0\1", False)],
)
def test_which_addresses_are_abstract(family, path, is_it):
    assert sockets.is_abstract(int(family).to_bytes(2, sys.byteorder) + path) is is_it


# run directories


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_directory_is_its_owners_unless_the_owner_opens_it(tmp_path):
    (tmp_path / "run").mkdir()
    run_dir = RunDir(tmp_path / "run")
    run_dir.open({})
    run_dir.close()
    assert mode(run_dir.root) == 0o700
    run_dir.root.chmod(0o750)
    run_dir.open({})
    run_dir.close()
    assert mode(run_dir.root) == 0o750


def test_a_run_directory_that_cannot_be_closed_to_others_is_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(ConfigError, match="give another --run.dir"):
        RunDir(tmp_path / "run").open({})


# a run


@pytest.fixture(scope="module")
def run():
    """Its process, its directory (which others could reach by its path), all its processes, the scratch folders."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    root = place / "run"
    process = running.start(
        root, training__steps=5000, mesh__worker_loops=1, mesh__transport="rdma_tcp", recovery__standby="true"
    )
    try:
        while sum(event["kind"] == "standby_waits" for event in read_events(root)) < 3:
            assert process.poll() is None, running.output(root)[-3000:]
            time.sleep(0.1)
        running.wait_for_step(root, 2)  # from now on no process comes or goes
        pids = {process.pid} | running.descendants(process.pid)
        yield process, root, pids, running.scratch_folders(pids)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(place)


@pytest.mark.slow
def test_a_run_listens_where_nobody_else_can_connect(run):
    _, _, pids, folders = run
    addresses = listening(pids, "/proc/net/unix")
    assert len(addresses) >= 4, "the controller's, the worker loop's, their processes'"
    assert all(any(address.startswith(f"{folder}/") for folder in folders) for address in addresses), addresses
    assert all(mode(folder) == 0o700 for folder in folders)
    ports = {address for table in ("/proc/net/tcp", "/proc/net/tcp6") for address in listening(pids, table)}
    assert not ports, "nothing of a run on one host is left that takes connections of every user"


@needs_root
@pytest.mark.slow
def test_another_user_gets_nowhere(run):
    process, root, pids, folders = run
    attempts = {f"connect to {a}": (lambda a=a: connect(a)) for a in listening(pids, "/proc/net/unix")}
    attempts |= {f"read {path}": read(path) for path in [root, *root.rglob("*"), *folders]}
    for pid in pids:
        attempts |= {f"read {name} of {pid}": read(Path(f"/proc/{pid}/{name}")) for name in ("mem", "environ", "fd")}
    attempts |= {f"write into {folder}": (lambda folder=folder: write_into(folder)) for folder in folders}
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        if os.readlink(descriptor).rpartition("/")[2].startswith("monarch_log"):
            attempts["read Monarch's log"] = read(Path(os.readlink(descriptor)))
    assert len(attempts) > 50 and "read Monarch's log" in attempts
    assert as_another_user(attempts) == []
    assert set(attempts) == {name for name, attempt in attempts.items() if succeeds(attempt)}, "the owner can"


@pytest.mark.slow
def test_a_run_that_ends_well_leaves_nothing_and_nobody_died_in_it(run):
    process, root, pids, folders = run
    mapped = [line for pid in pids for line in shared_memory_of(pid)]
    assert not any("/dev/shm/sem." in line for line in mapped), "one that is killed would leave a semaphore's name"
    inodes = {int(line.split()[4]) for line in mapped}
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, running.output(root)[-3000:]
    assert running.gone(pids)
    assert not any(folder.exists() for folder in folders)
    assert inodes.isdisjoint(file.stat().st_ino for file in Path("/dev/shm").iterdir())
    kinds = [event["kind"] for event in read_events(root)]
    assert "died" not in kinds and kinds.count("stopped") >= 4, "a worker loop and three actors"
    assert "Traceback" not in running.output(root)


def shared_memory_of(pid: int) -> list[str]:
    """Lines of what a process has mapped of /dev/shm."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if " /dev/shm/" in line]
