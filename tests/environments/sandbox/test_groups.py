"""A box's control group: where one can be had, found by trial; its bounds; and that none is left."""

import errno
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from boxes import need_boxes
from hostile_programs import HOSTILE

from titan_rl.controller.box_bounds import note_box_bounds
from titan_rl.environments.sandbox import groups, pool, slot
from titan_rl.environments.sandbox.groups import Group, candidates, sweep, try_out
from titan_rl.environments.sandbox.program import Limits, Outcome, Program
from titan_rl.environments.sandbox.slot import Slot

MIB = 1 << 20
V1 = "30 25 0:26 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2 = "31 25 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = V1 + V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
BOUND = "32 25 0:27 /docker/x /a\\040folder ro - cgroup2 cgroup rw\n"
TOP = "/sys/fs/cgroup"


@pytest.mark.parametrize(
    ("mounts", "membership", "found"),
    [
        (V2, "0::/user.slice/a.scope\n", [f"{TOP}/user.slice/a.scope", f"{TOP}/user.slice", TOP]),
        (V2, "0::/\n", [TOP]),
        (HYBRID, "4:memory:/x\n0::/b\n", [f"{TOP}/unified/b", f"{TOP}/unified"]),
        (V1, "4:memory:/x\n", []),
        (V1, "4:memory:/x\n0::/\n", []),
        (BOUND, "0::/docker/x/y\n", ["/a folder/y", "/a folder"]),
        (BOUND, "0::/docker/other\n", []),
        (V2, "0::/../other\n", []),
    ],
)  # fmt: skip
def test_it_is_looked_for_in_ones_own_group_and_those_above(mounts, membership, found):
    assert list(map(str, candidates(mounts, membership))) == found


class Kernel:
    """A folder in which files mean what they mean to the kernel's cgroup v2."""

    FILES = {
        "memory": {"memory.max": "max", "memory.swap.max": "max", "memory.current": str(20 * MIB),
                   "memory.events": "low 0\noom 0\noom_kill 0\n"},
        "pids": {"pids.max": "max", "pids.current": "3"},
    }  # fmt: skip

    def __init__(self, root: Path, monkeypatch, controllers: str):
        self.root, self.refused = root, {}
        self._make, self._unlink, self._write = Path.mkdir, Path.rmdir, groups._write
        self.mkdir(root, controllers)
        monkeypatch.setattr(Path, "mkdir", lambda path, **kwargs: self._mkdir(path, **kwargs))
        monkeypatch.setattr(Path, "rmdir", lambda path: self._rmdir(path))
        monkeypatch.setattr(groups, "_write", self.write)
        monkeypatch.setattr(groups, "_made", set())
        monkeypatch.setattr(groups, "_closed", set())

    def mkdir(self, path: Path, controllers: str, processes: str = "") -> Path:
        self._make(path)
        files = {"cgroup.controllers": controllers, "cgroup.subtree_control": "", "cgroup.kill": ""}
        files["cgroup.procs"] = processes
        for name in controllers.split():
            files |= self.FILES.get(name, {})
        for name, text in files.items():
            (path / name).write_text(text)
        return path

    def _mkdir(self, path: Path, **kwargs) -> None:
        if not path.is_relative_to(self.root):
            return self._make(path, **kwargs)
        if "mkdir" in self.refused:
            raise OSError(self.refused["mkdir"], os.strerror(self.refused["mkdir"]), str(path))
        self.mkdir(path, (path.parent / "cgroup.subtree_control").read_text())
        return None

    def _rmdir(self, path: Path) -> None:
        if not path.is_relative_to(self.root):
            return self._unlink(path)
        if self.processes(path) or any(each.is_dir() for each in path.iterdir()):
            raise OSError(errno.EBUSY, "Device or resource busy")
        shutil.rmtree(path)
        return None

    def processes(self, path: Path) -> str:
        """What has written itself there as 0 has ended by now."""
        return (path / "cgroup.procs").read_text().strip().removeprefix("0")

    def write(self, path: Path, text: str) -> None:
        if not path.is_relative_to(self.root):
            return self._write(path, text)
        if path.name == "cgroup.subtree_control":
            names = {name.removeprefix("+") for name in text.split()}
            if self.processes(path.parent):
                raise OSError(errno.EBUSY, "Device or resource busy")
            assert names <= set((path.parent / "cgroup.controllers").read_text().split())
            text = " ".join(sorted(names | set(path.read_text().split())))
        if path.name == "cgroup.kill" and "kill" not in self.refused:
            (path.parent / "cgroup.procs").write_text("")
        path.write_text("")
        return self._write(path, text)


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    return Kernel(tmp_path / "cgroup", monkeypatch, "cpu memory pids")


def made_in(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir() if each.name.startswith("titan_rl")]


def test_a_trial_leaves_nothing(kernel):
    try_out(kernel.root)
    assert (kernel.root / "cgroup.subtree_control").read_text() == "memory pids" and not made_in(kernel.root)
    assert not groups._made and not groups._closed


def test_a_group_with_processes_is_left_as_it_is_and_the_one_above_is_tried(kernel, monkeypatch):
    (kernel.root / "cgroup.subtree_control").write_text("cpu memory pids")
    own = kernel.mkdir(kernel.root / "own", "cpu memory pids", processes="1\n2\n")
    monkeypatch.setattr(groups, "candidates", lambda mounts, membership: [own, kernel.root])
    with pytest.raises(OSError, match="has processes of its own"):
        try_out(own)
    found = groups.place.__wrapped__()
    assert found.folder == kernel.root and str(found).startswith("the kernel (cgroup v2 at ")
    assert (own / "cgroup.procs").read_text() == "1\n2\n"


@pytest.mark.parametrize(
    ("number", "said"), [(errno.EROFS, "Read-only file system"), (errno.EACCES, "Permission denied")]
)
def test_a_group_that_cannot_be_made_is_why_there_is_none(kernel, monkeypatch, number, said):
    kernel.refused["mkdir"] = number
    monkeypatch.setattr(groups, "candidates", lambda mounts, membership: [kernel.root])
    found = groups.place.__wrapped__()
    assert found.folder is None and found.why_not == f"{kernel.root}: {said}"
    assert str(found).startswith("a watcher alone")


def test_what_has_not_the_controllers_is_none(tmp_path, monkeypatch):
    """As on a host that has them in cgroup v1 still."""
    kernel = Kernel(tmp_path / "cgroup", monkeypatch, "hugetlb pids")
    with pytest.raises(OSError, match="it has no controller of memory"):
        try_out(kernel.root)


def test_a_process_that_cannot_be_put_in_is_why_there_is_none(kernel):
    (kernel.root / "cgroup.subtree_control").write_text("memory pids")
    before = kernel.mkdir
    kernel.mkdir = lambda path, controllers: (
        shutil.rmtree(before(path, controllers) / "cgroup.procs", True)
        or (
            (path / "cgroup.procs").unlink(),
            (path / "cgroup.procs").mkdir(),
        )
    )
    with pytest.raises(OSError, match="cgroup.procs|cannot"):
        try_out(kernel.root)


def test_a_groups_bounds_are_the_programs_beside_the_box(kernel):
    (kernel.root / "cgroup.subtree_control").write_text("memory pids")
    group = Group(kernel.root)
    group.bound(Limits(memory=100 * MIB, disk=16 * MIB, processes=16))
    read = {name: (group.folder / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")}
    assert read == {"memory.max": str(136 * MIB), "memory.swap.max": "0", "pids.max": "19"}
    (group.folder / "memory.current").write_text(str(90 * MIB))  # what a program has is none of the box's
    group.bound(Limits(memory=200 * MIB, disk=16 * MIB, processes=8))
    assert (group.folder / "memory.max").read_text() == str(236 * MIB)
    assert not group.has_ended_any()
    (group.folder / "memory.events").write_text("oom 5\noom_kill 2\n")
    assert group.has_ended_any() and not group.has_ended_any()
    group.close()
    assert not made_in(kernel.root)


def test_what_takes_long_to_end_is_removed_later(kernel):
    (kernel.root / "cgroup.subtree_control").write_text("memory pids")
    group = Group(kernel.root)
    (group.folder / "cgroup.procs").write_text("77\n")
    kernel.refused["kill"] = errno.EPERM
    group.close()
    assert group.folder.exists()
    (group.folder / "cgroup.procs").write_text("")
    other = Group(kernel.root)
    assert made_in(kernel.root) == [other.folder.name]
    groups._leave(os.getpid() + 1)  # a fork of this process ends
    assert made_in(kernel.root) == [other.folder.name]
    groups._leave(os.getpid())
    assert not made_in(kernel.root)


def test_groups_of_processes_that_are_gone_are_swept(kernel):
    (kernel.root / "cgroup.subtree_control").write_text("memory pids")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here, own = groups._namespace(), groups._start_of(os.getpid())
    assert own is not None
    kept = [f"titan_rl.{here}.{os.getpid()}.{own}.0", f"titan_rl.{here + 1}.{gone.pid}.1.0", "titan_rl.a", "other"]
    swept = [f"titan_rl.{here}.{gone.pid}.1.0", f"titan_rl.{here}.{os.getpid()}.{own + 1}.0"]
    for name in kept + swept:
        kernel.mkdir(kernel.root / name, "memory pids", processes="88\n")
    sweep(kernel.root)
    assert sorted(each.name for each in kernel.root.iterdir() if each.is_dir()) == sorted(kept)


def test_what_the_kernel_ends_had_too_much_memory(kernel, monkeypatch):
    """By a real box, which enters the folder as it would enter a group."""
    need_boxes()
    (kernel.root / "cgroup.subtree_control").write_text("memory pids")
    monkeypatch.setattr(slot, "new_group", lambda: Group(kernel.root))
    one = Slot()
    try:
        assert one.run(Program("print(1)")).ending == "ok"
        [name] = made_in(kernel.root)
        assert (kernel.root / name / "cgroup.procs").read_text() == "0\n"
        (kernel.root / name / "memory.events").write_text("oom 1\noom_kill 1\n")
        assert one.run(Program("print(2)")).ending == "memory"
        assert one.run(Program("print(3)")).ending == "ok"
    finally:
        one.close()
    assert not made_in(kernel.root)


def test_which_bounds_there_are_is_said_and_recorded_where_boxes_were_looked_for(monkeypatch):
    said, events = [], []
    monkeypatch.setattr(pool, "Slot", FakeSlot)
    monkeypatch.setattr(pool, "place", lambda: groups.Place(None, "no cgroup v2 is mounted here"))
    monkeypatch.setattr(pool, "_check_boxes", functools.cache(pool._check_boxes.__wrapped__))
    note_box_bounds(said.append, lambda kind, **fields: events.append((kind, fields)))
    assert not said and not events
    pool.check_sandbox()
    note_box_bounds(said.append, lambda kind, **fields: events.append((kind, fields)))
    bounds = "a watcher alone, every 20 ms (no control groups: no cgroup v2 is mounted here)"
    assert said == [f"on this machine, programs that the model writes are bounded by {bounds}"]
    assert events == [("sandbox", {"bounds": bounds})]


class FakeSlot(Slot):
    """Where no boxes can be had, too."""

    def run(self, program):
        return Outcome("ok", 0, "42\n", "", (), 0.0, 0)


# where this machine has them

BOUNDED = sorted(name for name in HOSTILE if name.startswith(("bomb: ", "memory: ")) and HOSTILE[name].endings)


@pytest.fixture(scope="module")
def box():
    need_boxes()
    if groups.place().folder is None:
        pytest.skip(groups.place().why_not)
    one = Slot()
    yield one
    one.close()
    assert not groups._made


@pytest.mark.parametrize("name", BOUNDED)
def test_the_same_cases_end_in_a_group(box, name):
    outcome = box.run(Program(HOSTILE[name].source, limits=Limits(seconds=20.0, memory=192 * MIB)))
    assert outcome.ending in HOSTILE[name].endings, outcome
    assert box.run(Program("print(1)")).stdout == "1\n"


def test_the_kernel_alone_ends_what_grows(box, monkeypatch):
    """The watcher is told of a bound that none of it reaches."""
    bound = Group.bound
    monkeypatch.setattr(Group, "bound", lambda self, limits: bound(self, Limits(memory=48 * MIB, processes=8)))
    wide = Limits(seconds=20.0, memory=1024 * MIB, processes=64)
    kept = "kept = []\nwhile True: kept.append(bytearray(b'x') * (1 << 20))"
    assert box.run(Program(kept, limits=wide)).ending == "memory"
    child = f"import os\nif not os.fork():\n    {kept}".replace("\nwhile", "\n    while") + "\nos.wait()"
    assert box.run(Program(child, limits=wide)).ending == "memory"
    forks = "import os, time\nfor n in range(40):\n    if not os.fork(): time.sleep(9)\nprint(n)"
    assert box.run(Program(forks, limits=wide)).ending == "error"
    assert box.run(Program("print(1)", limits=wide)).stdout == "1\n"
