"""Seccomp filter of the system calls that programs may make; every other one fails with ENOSYS.

A program has no capabilities, and its namespaces hide what it could reach. What is left is what the kernel keeps for
all of a machine's processes, so a call is on the list if Python's library, the interpreter's start or libc needs it,
and it acts on the caller alone: its memory, its processes, its own file system, its clock. So these are not there:

- whatever makes, enters or changes a namespace, a mount, a user, or another process's memory and descriptors;
- objects with names, or that a program's end does not end: sockets but in pairs, descriptors sent through them (in a
  cycle they outlive their processes, with their names), System V's and POSIX's shared memory and queues, keys;
- what two programs can meet at, since both have the same library and /dev/null open: locks and leases on files, watches
  on files (inotify, fanotify, F_NOTIFY), counts of the whole machine (sysinfo), what is in its page cache (mincore,
  fadvise, cachestat, preadv2);
- memory that counts as no process's: pages in pipes (vmsplice, splice, tee, sendfile), larger pipes and buffers of
  sockets, files in memory, rings, memory that is shared and no file's, pages that are swapped out or merged on request;
- parts of the kernel that such code has no use for (bpf, perf, io_uring, userfaultfd, modules, clocks, scheduling).

- a wait on a futex that is not private to a process: the kernel finds its waiters by file and page, also those of a
  library, and a filter sees no pages. Such a wait is told that the value has changed, as one may be at any time, and so
  asks again; ``multiprocessing``'s semaphores pause in between (inside/semaphores.py). Nobody is there to be woken.

Left open: numbers that the kernel counts up for all (a pipe's or socket's inode, a mount's), how much of the host's
disk is free, what a user's pipes may hold together, and whatever takes time on the machine that both run on.
"""

import errno
import resource
import tempfile
from collections.abc import Iterable
from functools import cache
from typing import Any

from titan_rl.environments.sandbox.program import SandboxFailed

_DESCRIPTORS = (
    "read write readv writev pread64 pwrite64 preadv pwritev lseek close dup dup2 dup3 pipe pipe2 "
    "poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait "
    "eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime signalfd signalfd4"
)
_FILES = (
    "open openat creat stat fstat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat "
    "getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 "
    "link linkat symlink symlinkat chmod fchmod fchmodat chown fchown lchown fchownat umask "
    "utime utimes utimensat futimesat truncate ftruncate fallocate fsync fdatasync statfs fstatfs"
)
"""Its own file system is the one that can be written to, times included (running.py)."""
_MEMORY = "brk munmap mprotect mremap msync"
_PROCESSES = (
    "fork vfork execve execveat exit exit_group wait4 waitid kill tkill tgkill pidfd_open pidfd_send_signal "
    "getpid getppid gettid getpgrp getpgid setpgid getsid setsid getuid geteuid getgid getegid getresuid getresgid "
    "getgroups capget getrusage times getrlimit getpriority setpriority uname getcpu "
    "sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min "
    "sched_rr_get_interval set_tid_address set_robust_list get_robust_list rseq arch_prctl getrandom"
)
_SIGNALS = (
    "rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait rt_sigqueueinfo "
    "rt_tgsigqueueinfo sigaltstack pause restart_syscall"
)
_TIME = (
    "time gettimeofday clock_gettime clock_getres nanosleep clock_nanosleep alarm getitimer setitimer "
    "timer_create timer_settime timer_gettime timer_getoverrun timer_delete"
)
_SOCKETS = "sendto recvfrom recvmsg shutdown getsockname getpeername"
"""Of pairs. Not sendmsg: what goes with a message is in memory, where no filter looks."""
ALLOWED = " ".join((_DESCRIPTORS, _FILES, _MEMORY, _PROCESSES, _SIGNALS, _TIME, _SOCKETS)).split()
_ALLOWED_WITH = {
    # duplicates, flags, the size of a pipe
    "fcntl": (1, (0, 1, 2, 3, 4, 1030, 1032)),
    # whether it is a terminal (TCGETS, TCGETS2) and how wide, what can be read, non-blocking, close on exec
    "ioctl": (1, (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    # the end with its parent, its name, and questions
    "prctl": (0, (1, 2, 3, 15, 16, 23, 39, 42)),
    # not to swap out (20, 21), merge (12), make holes in files (9), or ask for huge pages at once (25)
    "madvise": (2, (0, 1, 2, 3, 4, 8, 10, 11, 14, 15, 16, 17, 18, 19)),
    # type, error, protocol, family, sizes of buffers: not the descriptor of the process at the other end
    "getsockopt": (2, (3, 4, 7, 8, 38, 39)),
    "socketpair": (0, (1,)),  # AF_UNIX
    "close_range": (2, (0, 4)),  # CLOSE_RANGE_CLOEXEC; not with descriptors of one thread alone
    # not of core dumps, which the host may have a program for
    "prlimit64": (1, tuple(kind for kind in range(16) if kind != resource.RLIMIT_CORE)),
    "setrlimit": (0, tuple(kind for kind in range(16) if kind != resource.RLIMIT_CORE)),
}
"""By one argument: which, and its values. All its 64 bits are compared, and the kernel looks at 32."""
_LOCKS = (5, 6, 7, 36, 37, 38)
"""Of ``fcntl``: F_GETLK, F_SETLK, F_SETLKW, and the same for open files."""
_ATTRIBUTES = "getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr setxattr lsetxattr fsetxattr"
_ANY_NAMESPACE = 0x7E020080
"""The flags of ``clone`` that make one."""
_THREAD, _FILES_SHARED = 0x10000, 0x400
"""A thread has its process's descriptors, which are counted once."""
_SHARED, _OF_NO_FILE, _HUGE = 0x01, 0x20, 0x40000
"""``mmap`` of memory that is both of the first: let go of, it stays, and is counted as no process's. Nor are pages of
the third kind counted, which the host may have set aside."""
_PRIVATE = 128
"""FUTEX_PRIVATE_FLAG: of one process's threads."""
_WAITS, _WAKES = (0, 9, 0x100, 0x109), (1, 10)
"""FUTEX_WAIT, FUTEX_WAIT_BITSET, each with FUTEX_CLOCK_REALTIME as well; FUTEX_WAKE, FUTEX_WAKE_BITSET."""
_OF_WORKSPACES = "flock futex mknod mknodat getsockopt bind listen accept accept4 connect sendmsg sendmmsg recvmmsg"
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: not AF_VSOCK, behind which a virtual machine's host is."""
_SOCKET_LEVEL, _PROTOCOL_LEVELS = 1, (0, 6, 41)
"""SOL_SOCKET; IP, TCP and IPv6."""
_SOCKET_OPTIONS = (2, 6, 9, 10, 13, 15, 16, 20, 21)
"""Addresses used again, broadcasts, keep-alive, urgent data, lingering, credentials, timeouts: no sizes of buffers."""
_OPTIMIZE, _AS_A_TREE = 8, 2
"""SCMP_FLTATR_CTL_OPTIMIZE: the kernel tries a filter on every system call there is when it takes it."""


@cache
def seccomp_filter() -> bytes:
    """Instructions of the filter of programs, for the kernel. Errors: SandboxFailed without libseccomp."""
    rules = _Rules()
    rules.allow_common()
    rules.allow_where("futex", 1, _PRIVATE, _PRIVATE)
    for operations, error_number in ((_WAITS, errno.EAGAIN), (_WAKES, 0)):
        rules.refuse_where("futex", 1, operations, error_number)
    # as on a file system that has none
    rules.refuse_where("fcntl", 1, _LOCKS, errno.ENOLCK)
    rules.refuse("flock", errno.ENOLCK)
    return rules.instructions()


@cache
def workspace_filter() -> bytes:
    """Instructions of the filter of a workspace's commands. Errors: SandboxFailed without libseccomp.

    Its files and its network are its own, so that it has locks and sockets."""
    rules = _Rules()
    rules.allow_common()
    for name in _OF_WORKSPACES.split():
        rules.allow(name)
    rules.allow_values("fcntl", 1, _LOCKS)
    rules.allow_values("socket", 0, _FAMILIES)
    rules.allow_values("setsockopt", 1, _PROTOCOL_LEVELS)
    rules.allow_pairs("setsockopt", (1, _SOCKET_LEVEL), (2, _SOCKET_OPTIONS))
    return rules.instructions()


class _Rules:
    """Rules of a filter by which every other call fails with ENOSYS. Errors: SandboxFailed without libseccomp."""

    def __init__(self) -> None:
        try:
            import pyseccomp
        except (ImportError, OSError, RuntimeError) as error:
            raise SandboxFailed(f"libseccomp is not there ({error})") from None
        self._seccomp = pyseccomp
        # where a call is not there libc and Python take an older one: clone, whose flags can be seen, for clone3
        self._rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))

    def allow_common(self) -> None:
        """What acts on the caller alone."""
        for name in ALLOWED:
            self.allow(name)
        for name, (argument, values) in _ALLOWED_WITH.items():
            self.allow_values(name, argument, values)
        for flags in (0, _FILES_SHARED, _THREAD | _FILES_SHARED):
            self.allow_where("clone", 0, _ANY_NAMESPACE | _THREAD | _FILES_SHARED, flags)
        for flags in (0, _SHARED, _OF_NO_FILE):
            self.allow_where("mmap", 3, _SHARED | _OF_NO_FILE | _HUGE, flags)
        for name in _ATTRIBUTES.split():
            self.refuse(name, errno.ENOTSUP)

    def allow(self, name: str) -> None:
        self._rules.add_rule(self._seccomp.ALLOW, name)

    def allow_values(self, name: str, argument: int, values: Iterable[int]) -> None:
        for value in values:
            self._rules.add_rule(self._seccomp.ALLOW, name, self._equals(argument, value))

    def allow_pairs(self, name: str, first: tuple[int, int], second: tuple[int, Iterable[int]]) -> None:
        """Where an argument has a value and another one has one of several."""
        argument, values = second
        for value in values:
            both = self._equals(*first), self._equals(argument, value)
            self._rules.add_rule(self._seccomp.ALLOW, name, *both)

    def allow_where(self, name: str, argument: int, mask: int, value: int) -> None:
        """Where the bits of a mask are so."""
        masked = self._seccomp.Arg(argument, self._seccomp.MASKED_EQ, mask, value)
        self._rules.add_rule(self._seccomp.ALLOW, name, masked)

    def refuse(self, name: str, error_number: int) -> None:
        self._rules.add_rule(self._seccomp.ERRNO(error_number), name)

    def refuse_where(self, name: str, argument: int, values: Iterable[int], error_number: int) -> None:
        for value in values:
            self._rules.add_rule(self._seccomp.ERRNO(error_number), name, self._equals(argument, value))

    def _equals(self, argument: int, value: int) -> Any:
        return self._seccomp.Arg(argument, self._seccomp.EQ, value)

    def instructions(self) -> bytes:
        self._rules.set_attr(_OPTIMIZE, _AS_A_TREE)
        with tempfile.TemporaryFile() as file:
            self._rules.export_bpf(file)
            file.seek(0)
            return file.read()
