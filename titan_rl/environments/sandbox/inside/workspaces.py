"""Workspaces inside bubblewrap: file systems of layers, in which commands run one after the other.

    workspaces.py CONTROL FILTER keep|drop

    host ──{number, layers, limits}──▶ Server ──fork──▶ Workspace, init of namespaces of its own
         ◀──its socket, its process──
         ──{seconds, memory} and descriptors─────────▶ Workspace ──fork──▶ a command, in a namespace of processes
         ◀──how it ended──────────────────────────────
         ──"fork"────────────────────────────────────▶ Workspace: what was written becomes a layer that nobody changes
         ◀──its layers────────────────────────────────

A workspace that is made of another's layers enters a copy of that one's mounts; the file systems in memory are shared,
and each is gone with the last workspace that has it.
"""

import array
import contextlib
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct

import kernel
import main_module
import mounts
import zygote

_WITH_USER = 0x10000000 | 0x00020000 | 0x20000000
"""Namespaces of user, mounts, processes: of the server."""
_OWN = 0x20000000 | 0x08000000 | 0x04000000 | 0x40000000
"""Processes, IPC, host name, network: of a workspace."""
_OF_COMMAND = _WITH_USER
"""Of its own user, too: the kernel counts each user's processes."""
_SET_FLAGS, _UP = 0x8914, 0x1
_BUFFER = 1 << 16
_FOLDER = "/w"
_NOT_FOUND = 127
"""As shells have it."""
_ROOT = 0


class Server:
    """Owner of all workspaces' processes."""

    def __init__(self, control: socket.socket, seccomp: kernel.Filter):
        self.control, self.seccomp = control, seccomp
        self.processes: dict[int, int] = {}
        """Descriptors of workspaces' processes, by number."""
        self.parents: dict[int, int | None] = {}
        """Of each whose layers are there still: the one that it was made of."""

    def serve(self) -> None:
        """Make workspaces until the host closes the socket."""
        while True:
            self._reap()
            message, _ = zygote.receive(self.control)
            if not message:
                return
            self._open(json.loads(message))

    def _open(self, request: dict) -> None:
        number, parent = request["number"], request["parent"]
        try:
            if parent is not None and parent not in self.processes:
                raise ProcessLookupError("the workspace that it is made of has ended")
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            return self._refuse(error)
        with ours, its:
            try:
                pid = kernel.fork_into_namespaces(_OWN)
                if not pid:
                    ours.close()
                    self._become_workspace(its, request)
                process = self.processes[number] = _watched(pid)
            except OSError as error:
                return self._refuse(error)
            self.parents[number] = parent
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [ours.fileno(), process]))]
            self.control.sendmsg([b"forked"], ancillary)

    def _refuse(self, error: OSError) -> None:
        """One workspace; the others go on."""
        self.control.send(json.dumps({"error": str(error)}).encode())

    def _become_workspace(self, control: socket.socket, request: dict) -> None:
        """In the fork; does not return."""
        try:
            self.control.close()
            parent = request.pop("parent")
            namespace = None if parent is None else self._mounts_of(parent)
            for number in self.processes.values():
                os.close(number)
            Workspace(control, self.seccomp, namespace, request).serve()
        except BaseException as error:
            with contextlib.suppress(OSError):
                control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        finally:
            os._exit(0)

    def _mounts_of(self, number: int) -> int:
        """Descriptor of a workspace's namespace of mounts."""
        with open(f"/proc/self/fdinfo/{self.processes[number]}") as file:
            pid = next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
        return os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)

    def _reap(self) -> None:
        for number, process in list(self.processes.items()):
            if select.select([process], [], [], 0)[0]:
                os.waitid(os.P_PIDFD, process, os.WEXITED)
                os.close(self.processes.pop(number))
        needed = set[int | None]()
        for number in self.processes:
            while number not in needed and number is not None:
                needed.add(number)
                number = self.parents[number]
        for number in self.parents.keys() - needed:
            del self.parents[number]
            shutil.rmtree(f"{_FOLDER}/{number}", ignore_errors=True)  # where nothing is mounted here


class Workspace(zygote.Box):
    """Runner of one command at a time, in a file system of its own."""

    def __init__(self, control: socket.socket, seccomp: kernel.Filter, namespace: int | None, request: dict):
        """``namespace``: of mounts, of the workspace that this one is made of. ``request``: number, layers, programs,
        disk, files, processes, and the port to listen at, if any."""
        mounts.have_own_mounts(namespace)
        mounts.mount_processes("/proc")
        if request["above"] is not None:
            mounts.leave(request["above"])
        self.layers = mounts.Layers(
            f"{_FOLDER}/{request['number']}",
            request["layers"],
            request["programs"],
            request["disk"],
            request["files"],
        )
        if request["folder"] is not None:
            self.layers.show_folder(request["folder"], request["folder_layers"])
        self.began_with = self.layers.lower
        self.max_processes = request["processes"]
        socket.sethostname("workspace")
        _have_loopback()
        _have_small_buffers()
        super().__init__(control, seccomp, _ROOT)
        self._be_ready(request["port"])

    def _be_ready(self, port: int | None) -> None:
        """``port``: at which the host answers; its listener goes with the message."""
        if port is None:
            self.control.send(b"{}")
            return
        with socket.create_server(("127.0.0.1", port)) as listener:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener.fileno()]))]
            self.control.sendmsg([b"{}"], ancillary)

    def answer(self, limits: dict, descriptors: list[int]) -> dict:
        if "fork" in limits:
            layers = self.layers.end() if limits["fork"] == "last" else self.layers.freeze()
            return {"layers": layers, "began_with": self.began_with, "above": self.layers.folder}
        return super().answer(limits, descriptors)

    def fork(self) -> int:
        return kernel.fork_into_namespaces(_OF_COMMAND)

    def become(self, descriptors: list[int], limits: dict) -> None:
        try:
            os.setsid()
            task, stdin, output = descriptors
            for descriptor, number in ((stdin, 0), (output, 1), (output, 2)):
                os.dup2(descriptor, number)
            zygote.map_user(_ROOT, _ROOT)
            zygote.go_first()
            kernel.close_all_but(task)
            mounts.mount_processes(f"{self.layers.root}/proc")
            mounts.enter(self.layers.root)
            self._bound(limits)
            command = json.loads(os.pread(task, os.fstat(task).st_size, 0))
            kernel.be_hidden()
            kernel.lose_root()
            kernel.give_up(self.seccomp)
            os.pwrite(task, BEGUN, 0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        _run(command)

    def _bound(self, limits: dict) -> None:
        main_module.bound(
            {
                "AS": limits["memory"] + (1 << 30),  # of each process; all together are looked after
                "CPU": int(limits["seconds"]) + 2,
                "NPROC": self.max_processes,
                "NOFILE": 256,
                "CORE": 1,  # as running.py has it
                "MEMLOCK": 0,
                "MSGQUEUE": 0,
                "NICE": 0,
                "RTPRIO": 0,
                "SIGPENDING": 256,
            }
        )


BEGUN = b"!"
"""In the place of the first byte of a command's description: whatever its exit code says, it was run."""


def _run(command: dict) -> None:
    """Run a command as a child of this process, which as an init ends all others with itself. Does not return.

    No signal from inside reaches an init that does not handle it."""
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # Python's own way with them is no command's
        signal.signal(number, signal.SIG_DFL)
    child = os.fork()
    if not child:
        try:
            os.chdir(command["folder"])
            os.execve(command["arguments"][0], command["arguments"], command["environment"])
        except OSError as error:
            os.write(2, f"{error}\n".encode())
        finally:
            os._exit(_NOT_FOUND)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _watched(pid: int) -> int:
    """Descriptor of a child, which ends where there is none. Errors: OSError."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _have_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))


def _have_small_buffers() -> None:
    """Connections hold no more than what zygote.py counts for their descriptors."""
    for name in ("rmem", "wmem"):
        with open(f"/proc/sys/net/ipv4/tcp_{name}", "w") as file:
            file.write(f"4096 {_BUFFER} {_BUFFER}")


def main() -> None:
    control, seccomp = zygote.begin()
    uid, most = os.getuid(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one descriptor for each workspace
    pid = kernel.fork_into_namespaces(_WITH_USER)
    if pid:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    zygote.map_user(_ROOT, uid)
    mounts.have_own_mounts(None)
    mounts.mount_processes("/proc")
    control.send(b"ready")
    Server(control, seccomp).serve()


if __name__ == "__main__":
    main()
