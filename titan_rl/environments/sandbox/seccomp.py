"""The system calls that no program may make, as the kernel's filter takes them.

A program has no capabilities, and its namespaces hide what it could reach. So this is about ways to get either back,
and about parts of the kernel that such code has no use for.
"""

import errno
import tempfile
from functools import cache

from titan_rl.environments.sandbox.program import SandboxFailed

_NAMESPACES = "unshare setns pivot_root chroot mount umount2"
_MOUNTS = "open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr mknod mknodat quotactl swapon swapoff acct"
_OTHERS = "ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp migrate_pages move_pages mbind"
_KERNEL = "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register io_setup kexec_load"
_MODULES = "kexec_file_load init_module finit_module delete_module reboot syslog iopl ioperm personality vhangup"
_OUTLIVING = "memfd_create memfd_secret shmget msgget semget mq_open keyctl add_key request_key"
_FILES = "open_by_handle_at name_to_handle_at fanotify_init set_mempolicy"
_CLOCK = "settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname"
DENIED = " ".join((_NAMESPACES, _MOUNTS, _OTHERS, _KERNEL, _MODULES, _OUTLIVING, _FILES, _CLOCK)).split()
_ANY_NAMESPACE = 0x7E020080
"""The flags of ``clone`` that make one."""
_NEWER = range(453, 480)
"""System calls that are younger than libraries which know their names; libc does without. Some tell of the host's
mounts."""
_SHARED_BY_NOBODY = 0x21
"""``mmap`` of memory that is shared and no file's: let go of, it stays, and is counted as no process's."""
_AF_UNIX = 1
_OPTIMIZE, _AS_A_TREE = 8, 2
"""SCMP_FLTATR_CTL_OPTIMIZE: the kernel tries a filter on every system call there is when it takes it."""


@cache
def seccomp_filter() -> bytes:
    """Instructions of the filter. Errors: SandboxFailed without libseccomp."""
    try:
        import pyseccomp as seccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise SandboxFailed(f"libseccomp is not there ({error})") from None
    refuse = seccomp.ERRNO(errno.EPERM)
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in DENIED:
        rules.add_rule(refuse, name)
    for bit in (1 << place for place in range(32) if _ANY_NAMESPACE >> place & 1):
        rules.add_rule(refuse, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, bit, bit))
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")  # libc then takes clone, whose flags can be seen
    for number in _NEWER:
        rules.add_rule(seccomp.ERRNO(errno.ENOSYS), number)
    for name in ("socket", "socketpair"):
        rules.add_rule(refuse, name, seccomp.Arg(0, seccomp.NE, _AF_UNIX))
    rules.add_rule(refuse, "mmap", seccomp.Arg(3, seccomp.MASKED_EQ, _SHARED_BY_NOBODY, _SHARED_BY_NOBODY))
    rules.set_attr(_OPTIMIZE, _AS_A_TREE)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
