"""Kernel interfaces outside of the standard library: namespaces, mounts, capabilities, filters."""

import ctypes
import os
import random
import signal

_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x08000000 | 0x04000000
"""User, mount, process, IPC and host name. The network's is the box's, which has none: another for each program takes
as long as all the rest, and there nothing outlives a program, whom the filter lets have pairs of sockets alone."""
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_SET_THP_DISABLE = 4, 22, 38, 41
_CLOSE_RANGE, _LAST_DESCRIPTOR = 436, 0xFFFFFFFF
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_PR_CAPBSET_DROP, _PR_SET_SECUREBITS, _MOST_CAPABILITIES = 24, 28, 64
_NO_ROOT = 0x1 | 0x2 | 0x4 | 0x8
"""NOROOT and NO_SETUID_FIXUP, both locked."""
_CAPSET, _CAPABILITY_VERSION_3 = {"x86_64": 126, "aarch64": 91}[os.uname().machine], 0x20080522
_CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
_CLONE_CHILD_SETTID, _CLONE_CHILD_CLEARTID = 0x01000000, 0x00200000
_PR_GET_TID_ADDRESS = 40

_libc = ctypes.CDLL(None, use_errno=True)
_locked = ctypes.PyDLL(None, use_errno=True)
"""Keeps the interpreter's lock: a fork must."""


def _address_of_tid() -> ctypes.c_void_p:
    address = ctypes.c_void_p()
    if _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_GET_TID_ADDRESS)")
    return address


_tid_arguments = (_address_of_tid(), None) if os.uname().machine == "x86_64" else (None, _address_of_tid())


class Filter(ctypes.Structure):
    """Seccomp program in the kernel's layout."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def call(name: str, *arguments: object) -> int:
    """Call a function of libc. Errors: OSError."""
    result = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def fork_into_namespaces(flags: int = _NEW_NAMESPACES) -> int:
    """Fork a child that is init in new namespaces, otherwise as ``os.fork``.

    ``flags``: of the namespaces; a new one of processes is among them. Of all that a fork's bookkeeping is for, this
    process, which has one thread, needs the thread id that glibc keeps at the address which it told the kernel, and
    another seed. The interpreter's own hooks touch half of the pages that a short program touches in all.
    """
    flags |= signal.SIGCHLD | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    pid = _locked.syscall(_CLONE, ctypes.c_ulong(flags), None, None, *_tid_arguments)
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"clone: {os.strerror(number)}")
    if not pid:
        random.seed()
    return pid


def lose_root() -> None:
    """Let a program that runs as root have no capability for it."""
    for capability in range(_MOST_CAPABILITIES):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    call("prctl", _PR_SET_SECUREBITS, _NO_ROOT, 0, 0, 0)


def give_up(seccomp: Filter) -> None:
    """Drop all capabilities, and install the seccomp filter."""
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    call("syscall", _CAPSET, ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    call("prctl", _PR_SET_SECCOMP, 2, ctypes.byref(seccomp), 0, 0)


def mount_empty(place: str, options: str, *, is_writable: bool = True) -> None:
    """Mount an empty file system in memory."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | (0 if is_writable else _MS_RDONLY)
    call("mount", b"tmpfs", place.encode(), b"tmpfs", flags, options.encode())


def mount_read_only(device: str) -> None:
    """Remount a device read-only: its times cannot be set, and reads and writes of it still work."""
    flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NOEXEC
    call("mount", None, device.encode(), None, flags, None)


def close_all_but(descriptor: int) -> None:
    """Close all descriptors but this one and 0 to 2, whatever the limit on their number."""
    for first, last in ((3, descriptor - 1), (descriptor + 1, _LAST_DESCRIPTOR)):
        if first <= last:
            call("syscall", _CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(last), 0)


def have_small_pages() -> None:
    """Disable transparent huge pages for this process and its forks.

    Of a huge page that is mapped no more in part, all is kept, and a part is counted.
    """
    call("prctl", _PR_SET_THP_DISABLE, 1, 0, 0, 0)


def be_hidden() -> None:
    """Keep this process's memory and descriptors from others of its user."""
    call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def stay_visible() -> None:
    """Keep /proc/self writable after a change of user, for user maps."""
    call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)
