r"""Commands that try to get out of a workspace, to see another, to outlive their end, or to take all there is.

Each knows what it wants: ``broke`` says that it got it, and a test looks for that word. How it must end is known, too,
so that one with a mistake in it is found.
"""

import os
from dataclasses import dataclass

from hostile_programs import _HERE, _KERNEL
from tree import TREE


@dataclass(frozen=True)
class HostileCommand:
    """``SECRET_FILE``, ``PYTHON_FOLDER``, ``HOST_PID``, ``HOST_PORT``, ``LISTENER`` and ``MARK`` are the host's."""

    line: str
    stdin: str
    endings: tuple[str, ...]
    takes_all_time: bool
    """It is ended by its deadline."""


HOSTILE_COMMANDS: dict[str, HostileCommand] = {}
BROKE = "BROKE-OUT"
"""Nobody writes it in one piece."""
MOST_FILES, MOST_MEMORY = 5000, 128 << 20
"""Of a workspace's, for these."""
_SHELL = """
broke() { echo "BROKE""-OUT $*"; }
refused() { if "$@" 2>&1; then broke "$*"; fi; }
"""
"""``refused`` breaks out with a command that is not."""
_PYTHON = """
import ctypes, errno, os, signal, socket, struct, sys, time
def broke(*what): print("BROKE" + "-OUT", *what, flush=True)
def refused(function, *arguments):
    try:
        got = function(*arguments)
    except (OSError, ValueError, OverflowError) as error:
        return print(getattr(function, "__name__", function), error)
    if got != -1: broke(function, arguments, got)
def tried(function, *arguments):
    try:
        return function(*arguments)
    except OSError as error:
        print(getattr(function, "__name__", function), error)
"""

KERNEL = f"{_KERNEL}HERE = {_HERE}\n"


def shell(name: str, line: str, endings: tuple[str, ...] = ("ok",)) -> None:
    _case(name, _SHELL + line, "", endings)


def python(name: str, source: str, endings: tuple[str, ...] = ("ok",)) -> None:
    _case(name, "exec python3 -", _PYTHON + source, endings)


def _case(name: str, line: str, stdin: str, endings: tuple[str, ...]) -> None:
    assert name not in HOSTILE_COMMANDS
    line, stdin = (text.replace("TREE_FOLDER", str(TREE)) for text in (line, stdin))
    HOSTILE_COMMANDS[name] = HostileCommand(line, stdin, endings, "timeout" in endings and "ok" not in endings)


_ANY_END = ("ok", "error", "timeout", "memory")
_TOO_MUCH = ("memory", "error")
"""The watcher ends it, or the kernel refuses it some of it."""

# files of the host

shell(
    "secret_file",
    """
for place in "" /proc/self/root /proc/self/cwd /proc/1/root /../../../.. /host /oldroot /mnt; do
  cat "${place}SECRET_FILE" && broke $place
done
for place in /home /work /mnt /srv /opt /boot /media /oldroot TREE_FOLDER; do [ -e $place ] && broke $place; done
find / -name "$(basename SECRET_FILE)" 2>/dev/null | grep -q . && broke find
true
""",
)
shell(
    "passwords_and_keys",
    """
cat /etc/shadow /etc/gshadow /etc/sudoers ~/.ssh/* ~/.netrc ~/.cache/huggingface/token ~/.aws/* /run/secrets/* && broke
[ "$(ls -A ~ /run /var)" = "$(printf '/root:\\n\\n/run:\\n\\n/var:')" ] || broke "$(ls -A ~ /run /var)"
""",
)
shell(
    "environment_of_the_run",
    """
env; set; cat /proc/*/environ | tr '\\0' '\\n'; env | grep TITAN_RL_TOKEN && broke
grep -lz TITAN_RL /proc/[0-9]*/environ && broke
true
""",
)
shell(
    "images_and_layers",
    """
for place in /images /w /inside /empty /host /host/proc /newroot /.oldroot; do [ -e $place ] && broke $place; done
for layer in $(grep -oE '(upper|work|lower)dir=[^,]*' /proc/self/mountinfo | sed 's/.*=//; s/:/ /g'); do
  case $layer in /usr|PYTHON_FOLDER|/lib*|/bin|/sbin) ;; *) ls $layer 2>/dev/null && broke $layer ;; esac
done
true
""",
)
shell(
    "roots_and_folders_of_processes",
    """
for link in /proc/[0-9]*/root /proc/[0-9]*/cwd /proc/[0-9]*/task/*/root; do
  [ -e "$link/SECRET_FILE" ] && broke $link
  [ -e "$link/images" ] && broke $link
done
ls /proc/1/root/ /proc/1/cwd/ /proc/1/fd/ /proc/1/map_files/ && broke init
true
""",
)
python(
    "memory_of_processes",
    """
for name in "mem environ auxv maps smaps syscall stack pagemap io exe fd/0 fd/3 ns/mnt".split():
    for pid in "1", "2", "HOST_PID":
        if int(pid) == os.getpid() or int(pid) == os.getppid() != 1: continue
        refused(open, f"/proc/{pid}/{name}", "rb")
refused(open, "/proc/1/mem", "r+b")
for name in "oom_score_adj", "clear_refs", "comm", "timens_offsets", "uid_map", "coredump_filter", "loginuid":
    refused(open, f"/proc/1/{name}", "w")
""",
)
python(
    "kernel_settings",
    """
OWN = "msg_default msg_max msgsize_default msgsize_max queues_max auto_msgmni msgmax msgmnb msgmni sem shm_rmid_forced"
OWN += " shmall shmmax shmmni ns_last_pid pid_max"  # of namespaces of the command's, and the workspace's for queues
for folder, _, names in os.walk("/proc/sys"):
    for name in names:
        if name in OWN.split(): continue
        try:
            os.close(os.open(f"{folder}/{name}", os.O_WRONLY))
        except OSError:
            continue
        broke(folder, name)
for path in "sysrq-trigger kcore kmsg kallsyms kpageflags kpagecount timer_list mtrr irq/0/smp_affinity".split():
    refused(os.open, f"/proc/{path}", os.O_RDWR)
for name in "kcore kmsg kpageflags vmallocinfo slabinfo pagetypeinfo".split(): refused(open, f"/proc/{name}", "rb")
""",
)
shell(
    "core_dumps",
    """
refused dd of=/proc/sys/kernel/core_pattern <<< '|/workspace/evil %p'
refused dd of=/proc/sys/kernel/modprobe <<< /workspace/evil
refused dd of=/proc/sys/kernel/hotplug <<< /workspace/evil
ulimit -c unlimited && [ "$(ulimit -c)" != 0 ] && broke cores
sh -c 'kill -SEGV $$'
ls core* /tmp/core* 2>/dev/null && broke; true
""",
)
shell(
    "control_groups",
    """
[ -e /sys ] && broke /sys
grep -qv ':/$' /proc/self/cgroup && broke "$(cat /proc/self/cgroup)"
refused mkdir /sys/fs/cgroup/MARK; refused mount -t cgroup2 none /tmp; refused mount -t cgroup -o memory none /tmp
find / -xdev -name 'cgroup.procs' -o -name 'titan_rl.*' | grep . && broke; true
""",
)
shell(
    "links_out",
    """
ln -s SECRET_FILE a; ln -s /proc/1/root b; ln -s ../../../../../../../../../../.. c; ln -s /proc/self/root/../.. d
cat a b/SECRET_FILE c/SECRET_FILE d/SECRET_FILE && broke
ls c/images d/images b/images && broke
ln -s loop loop; cat loop; ln -s /proc/self/fd/9 e; cat e; true
""",
)
shell(
    "hard_links",
    """
for file in /usr/bin/env PYTHON_FOLDER/bin/python3 /dev/null /proc/self/exe /proc/self/fd/0 SECRET_FILE; do
  refused ln $file MARK; refused ln -L $file MARK
done
ln $BASH_SOURCE x 2>/dev/null; true
""",
)
python(
    "devices",
    """
import stat
for place in "/workspace", "/tmp", "/dev", "/root", "/etc", "/usr":
    for kind in stat.S_IFCHR, stat.S_IFBLK:
        for number in (0, 0), (1, 1), (1, 3), (1, 5), (5, 0), (5, 2), (8, 0), (10, 200), (10, 229), (254, 0):
            refused(os.mknod, f"{place}/MARK", kind | 0o666, os.makedev(*number))
for name in "mem kmem port kmsg kvm fuse tty ptmx zero full sda vda loop-control net/tun vsock".split():
    refused(os.open, f"/dev/{name}", os.O_RDWR)
""",
)
shell(
    "setuid_files",
    """
cp /usr/bin/env mine && chmod 6777 mine && chown root:root mine
./mine grep -E '^Cap(Inh|Prm|Eff|Bnd|Amb)' /proc/self/status | grep -v 0000000000000000 && broke
refused setcap all+ep mine
for tool in su sudo mount umount passwd newgrp chsh pkexec; do timeout 1 $tool -c 'cat SECRET_FILE' </dev/null; done
grep NoNewPrivs:.1 /proc/self/status || broke; grep Seccomp:.2 /proc/self/status || broke
""",
)
shell(
    "programs_of_the_host",
    """
for place in /usr /usr/bin /usr/lib PYTHON_FOLDER PYTHON_FOLDER/lib /dev; do
  refused touch $place/MARK; refused mkdir $place/MARK; refused ln -s /tmp $place/MARK; refused chmod 777 $place
  refused rmdir $place; refused chown 0:0 $place; refused touch -d 2001-01-01 $place
done
for file in /usr/bin/env /usr/bin/bash PYTHON_FOLDER/bin/python3; do
  refused dd if=/dev/null of=$file; refused chmod 777 $file; refused rm -f $file; refused truncate -s 0 $file
done
[ -x /usr/bin/bash ] && [ -x /usr/bin/env ] || broke
""",
)
python(
    "programs_by_memory",
    """
import mmap
import json
for path in "/usr/bin/env", "/proc/self/exe", sys.executable, json.__file__:
    refused(os.open, path, os.O_RDWR)
    number = os.open(path, os.O_RDONLY)
    refused(mmap.mmap, number, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    refused(os.open, f"/proc/self/fd/{number}", os.O_WRONLY)
    refused(os.write, number, b"x"); refused(os.ftruncate, number, 0); refused(os.fchmod, number, 0o777)
""",
)
python(
    "above_the_root",
    """
top = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
os.chdir("/")
for _ in range(50): os.chdir("..")
if not os.path.samestat(os.stat("."), os.stat("/")): broke(os.listdir("."))
os.mkdir("/tmp/below"); refused(os.chroot, "/tmp/below"); os.fchdir(top)
for _ in range(50): os.chdir("..")
if not os.path.samestat(os.stat("."), os.stat("/")): broke(os.listdir("."))
deep = os.open("/tmp/below", os.O_RDONLY); os.rename("/tmp/below", "/moved")
if os.stat("../../..", dir_fd=deep).st_ino != os.stat("/").st_ino: broke("moved")
""",
)

# mounts and namespaces

shell(
    "mounts",
    """
mkdir -p /tmp/a /tmp/b /tmp/c
for kind in proc sysfs tmpfs devtmpfs devpts cgroup2 mqueue securityfs debugfs tracefs bpf ramfs nfs 9p ext4; do
  refused mount -t $kind none /tmp/a
done
refused mount --bind / /tmp/a; refused mount --rbind /proc /tmp/a; refused mount --move /usr /tmp/a
refused mount -o remount,rw /usr; refused mount -o remount,bind,rw /usr; refused mount --make-rshared /
refused mount -t overlay none -o lowerdir=/,upperdir=/tmp/b,workdir=/tmp/c,userxattr /tmp/a
for place in / /usr PYTHON_FOLDER /dev /dev/null /proc; do
  refused umount $place; refused umount -l $place; refused umount -f $place
done
grep -c . /proc/self/mountinfo
""",
)
shell(
    "namespaces",
    """
for flags in -r -U -m -p -n -u -i -C -T "-rm" "-rmpf --mount-proc" "-Urnm"; do refused unshare $flags true; done
for kind in user mnt pid net uts ipc cgroup; do
  refused nsenter --$([ $kind = mnt ] && echo mount || echo $kind)=/proc/1/ns/$kind true
  refused nsenter --$([ $kind = mnt ] && echo mount || echo $kind)=/proc/self/ns/$kind true
done
refused bwrap --bind / / true; refused setpriv --reuid 1 true; refused chroot / true; refused pivot_root . .
""",
)
python(
    "namespaces_by_clone",
    KERNEL
    + """
for flag in 0x80, 0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000:
    for more in 0, 0x10000000, 0x10000000 | 0x20000:
        result = libc.syscall(HERE["clone"], ctypes.c_ulong(flag | more | signal.SIGCHLD), None, None, None, None)
        if result == 0: broke("clone", flag); os._exit(0)
        if result > 0: os.waitpid(result, 0)
        refused(call, "unshare", flag | more)
class Arguments(ctypes.Structure): _fields_ = [("words", ctypes.c_uint64 * 11)]
arguments = Arguments(); arguments.words[0] = 0x10020000; arguments.words[4] = signal.SIGCHLD
result = libc.syscall(HERE["clone3"], ctypes.byref(arguments), ctypes.c_ulong(88))
if result == 0: broke("clone3"); os._exit(0)
for name in os.listdir("/proc/self/ns"):
    refused(call, "setns", os.open(f"/proc/self/ns/{name}", os.O_RDONLY), 0)
""",
)
python(
    "new_calls_for_mounts",
    KERNEL
    + """
for tree in b"/", b"/usr", b"/proc", b"/dev/null":
    refused(call, "open_tree", -100, tree, 1); refused(call, "open_tree", -100, tree, 0x8001)
    refused(call, "mount_setattr", -100, tree, 0x8000, (ctypes.c_uint64 * 4)(0, 1, 0, 0), 32)
    refused(call, "open_tree_attr", -100, tree, 1, (ctypes.c_uint64 * 4)(0, 1, 0, 0), 32)
for kind in b"overlay", b"proc", b"tmpfs", b"ext4", b"9p", b"nfs": refused(call, "fsopen", kind, 0)
for number in os.open("/", os.O_RDONLY), os.open("/usr", os.O_PATH):
    refused(call, "fsmount", number, 0, 0); refused(call, "move_mount", number, b"", -100, b"/tmp", 4)
refused(call, "pivot_root", b"/", b"/tmp"); refused(call, "chroot", b"/tmp"); refused(call, "umount2", b"/usr", 2)
refused(call, "mount", b"/", b"/tmp", None, 4096, None)
handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 136); number = ctypes.c_int()
refused(call, "name_to_handle_at", -100, b"/usr", handle, ctypes.byref(number), 0)
refused(call, "open_by_handle_at", os.open("/", os.O_RDONLY), handle, 0)
for name in "listmount", "statmount": refused(call, name, handle, handle, 128, 0)
""",
)
python(
    "attributes_of_overlays",
    """
libc = ctypes.CDLL(None, use_errno=True)
os.mkdir("folder"); open("file", "w").close()
for name in "user", "trusted", "security", "system":
    for key in "opaque redirect metacopy origin whiteout upper protattr x".split():
        for path in "folder", "file", "/", "/usr", "/tmp":
            refused(os.setxattr, path, f"{name}.overlay.{key}", b"y")
refused(os.setxattr, "file", "security.capability", bytes.fromhex("0100000200000000000000000000000000000000"))
refused(libc.syscall, 463, -100, b"folder", 0, b"user.overlay.opaque", (ctypes.c_uint64 * 2)(), 16)
""",
)
python(
    "the_filter",
    KERNEL
    + """
refused(call, "seccomp", 1, 0, None); refused(call, "seccomp", 0, 0, None); refused(call, "personality", 0x20000)
names = "bpf perf_event_open userfaultfd io_uring_setup memfd_create memfd_secret keyctl add_key init_module kexec_load"
for name in [*names.split(), "acct", "swapon"]:
    refused(call, name, 0, 0, 0, 0, 0)
for option, value in (38, 0), (22, 0), (28, 0), (8, 1), (24, 0), (47, 2), (36, 1), (0x59616D61, -1):
    refused(libc.prctl, option, value, 0, 0, 0)
refused(call, "capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6))
if os.uname().machine == "x86_64":
    for number in 272, 165, 56: refused(libc.syscall, 0x40000000 + number, 0x10000000, 0, 0, 0, 0)
""",
    _ANY_END,  # a call of the other kind ends who makes it
)
if os.uname().machine == "x86_64":
    python(
        "calls_of_32_bits",
        """
import mmap
code = bytes.fromhex("b836010000bb00000010cd80c3")  # unshare(CLONE_NEWUSER) by int 0x80
page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
if ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))() == 0: broke()
""",
        ("ok", "error"),
    )

# network

python(
    "network_of_the_host",
    """
names = ["127.0.0.1", "127.0.1.1", "0.0.0.0", "10.0.0.1", "172.17.0.1", "192.168.0.1", "169.254.169.254", "8.8.8.8"]
for name in names:
    for port in HOST_PORT, 22, 53, 80, 443:
        with socket.socket() as mine:
            mine.settimeout(0.2); refused(mine.connect, (name, port))
for name in "::1", "::", "fe80::1", "::ffff:127.0.0.1":
    with socket.socket(socket.AF_INET6) as mine:
        mine.settimeout(0.2); refused(mine.connect, (name, HOST_PORT))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
    for name in names[3:]: refused(mine.sendto, b"x", (name, 53))
    refused(mine.setsockopt, socket.SOL_SOCKET, 36, 1)
devices = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
if devices != ["lo"]: broke(devices)
""",
)
python(
    "sockets_with_names",
    """
names = "/run/docker.sock /var/run/docker.sock /run/systemd/private /run/dbus/system_bus_socket /var/run/nscd/socket"
for name in ["\\0LISTENER", "\\0titan_rl_other", "\\0/tmp/.X11-unix/X0", *names.split()]:
    for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET:
        with socket.socket(socket.AF_UNIX, kind) as mine: refused(mine.connect, name)
print(open("/proc/net/unix").read())
if "LISTENER" in open("/proc/net/unix").read(): broke("names")
""",
)
python(
    "families_of_sockets",
    """
for family in range(64):
    if family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6): continue
    for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET, 10:
        refused(socket.socket, family, kind, 0)
    refused(socket.socketpair, family, socket.SOCK_STREAM)
for family in socket.AF_INET, socket.AF_INET6:
    for number in range(256): refused(socket.socket, family, socket.SOCK_RAW, number)
    refused(socket.socket, family, 10, 3)
refused(socket.socket, socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
""",
)
shell(
    "names_of_the_net",
    """
refused getent ahosts example.com; refused python3 -c 'import socket; socket.getaddrinfo("example.com", 80)'
refused bash -c 'exec 3<>/dev/tcp/example.com/80'; refused bash -c 'echo x >/dev/udp/8.8.8.8/53'
refused pip download --no-deps -d /tmp six; refused git clone -q https://example.com/x y; true
""",
)
python(
    "loopback_of_others",
    """
for port in 7000, 8000, *range(7001, 7050):
    with socket.socket() as mine: refused(mine.connect, ("127.0.0.1", port))
import fcntl
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
    for request in 0x8914, 0x8916, 0x8922, 0x8924, 0x890B, 0x890C, 0x8943, 0x89A0, 0x89F1:
        refused(fcntl.ioctl, mine, request, struct.pack("16s16s", b"lo", bytes(16)))
    refused(mine.setsockopt, 0, 64, bytes(84))  # a table of the packet filter
""",
)

# other processes

shell("ends_everything", "sleep 50 & kill -9 -1; kill -TERM -1; kill -9 1; echo still; exit 0", ("ok", "error"))
shell(
    "ends_its_init",
    "for s in INT TERM HUP QUIT USR1 SEGV STOP TSTP; do kill -$s 1; done; sleep 0.1; exit 9",
    ("error",),
)
python(
    "memory_of_others",
    KERNEL
    + """
vector = (ctypes.c_uint64 * 2)(ctypes.addressof(ctypes.create_string_buffer(64)), 64)
for pid in 1, os.getppid(), HOST_PID:
    for request in 16, 0x4206: refused(call, "ptrace", request, pid, 0, 0)
    for name in "process_vm_readv", "process_vm_writev": refused(call, name, pid, vector, 1, vector, 1, 0)
    refused(call, "kcmp", pid, os.getpid(), 0, 0, 0)
for pid in range(1, 400):
    number = libc.syscall(HERE["pidfd_open"], pid, 0)
    if number >= 0:
        for other in 0, 3, 4: refused(call, "pidfd_getfd", number, other, 0)
        os.close(number)
""",
)
python(
    "processes_of_the_host",
    """
own = {1, os.getpid(), os.getppid()}
for pid in [HOST_PID, *range(2, 3000), *range(30000, 31000)]:
    if pid in own: continue
    for number in 0, signal.SIGKILL: refused(os.kill, pid, number); refused(os.killpg, pid, number)
    refused(os.sched_getaffinity, pid)
if len([name for name in os.listdir("/proc") if name.isdigit()]) > 3: broke(os.listdir("/proc"))
""",
)
python(
    "priorities",
    KERNEL
    + """
for kind in os.PRIO_PROCESS, os.PRIO_PGRP, os.PRIO_USER: refused(os.setpriority, kind, 0, -20)
for policy in os.SCHED_FIFO, os.SCHED_RR: refused(os.sched_setscheduler, 0, policy, os.sched_param(1))
refused(os.sched_setaffinity, 0, {0}); refused(call, "ioprio_set", 1, 0, 1 << 13)
tried(os.setpriority, os.PRIO_USER, 0, 19)
import resource
for name in "AS CPU NPROC NOFILE MEMLOCK MSGQUEUE NICE RTPRIO SIGPENDING".split():
    kind = getattr(resource, f"RLIMIT_{name}")
    refused(resource.setrlimit, kind, (resource.getrlimit(kind)[1], resource.getrlimit(kind)[1] + 1))
""",
)
python(
    "clocks_and_names",
    KERNEL
    + """
refused(time.clock_settime, time.CLOCK_REALTIME, 0); refused(call, "settimeofday", (ctypes.c_long * 2)(1, 1), None)
refused(call, "adjtimex", ctypes.create_string_buffer(struct.pack("I", 1), 256))
refused(socket.sethostname, "MARK"); refused(call, "setdomainname", b"MARK", 4); refused(call, "syslog", 3, None, 0)
refused(call, "shmget", 1, 4096, 0o1777); refused(call, "msgget", 1, 0o1777); refused(call, "semget", 1, 1, 0o1777)
refused(call, "mq_open", b"MARK", 66, 0o777, None)
""",
)
python(
    "descriptors_in_flight",
    """
import array
for _ in range(30):
    one, two = socket.socketpair()
    numbers = array.array("i", [one.fileno(), two.fileno(), 1])
    for mine in one, two: tried(mine.sendmsg, [b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
    one.detach(); two.detach()
print("left in a circle")
os._exit(0)
""",
)
python(
    "stopped_processes",
    """
for _ in range(10):
    if not os.fork():
        os.setsid(); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(100); os._exit(0)
os.kill(os.getpid(), signal.SIGSTOP)
""",
    ("timeout",),
)

# what there is to take

shell("fork_bomb", "bomb() { bomb | bomb & }; bomb; while true; do :; done", ("timeout",))
python(
    "fork_bomb_of_orphans",
    "while True:\n    try:\n        if not os.fork(): os.setsid()\n    except OSError: pass",
    ("timeout", "memory"),
)
python("memory_bomb", "import gc\nheld = []\nwhile True: held.append(bytearray(b'x') * (8 << 20))", _TOO_MUCH)
python(
    "memory_bomb_of_many",
    "for _ in range(5): os.fork()\nheld = [bytearray(b'x') * (1 << 20) for _ in range(400)]\ntime.sleep(100)",
    _TOO_MUCH,
)
python(
    "small_mappings",
    """
import mmap
held = []
while True:
    for _ in range(1000): held.append(mmap.mmap(-1, 4096, mmap.MAP_PRIVATE, len(held) % 2 + 1))
""",
    _TOO_MUCH,
)
shell(
    "disk",
    "head -c 1G /dev/zero > big || head -c 1G /dev/urandom > big; cp big big2; mkdir more; echo x > more/y; df .; true",
)
shell(
    "sparse_files",
    "truncate -s 4E a; truncate -s 1P b; dd if=/dev/urandom of=b bs=1M seek=9000000 count=100; fallocate -l 1T c; true",
)
python(
    "inodes",
    f"""
made = 0
try:
    for made in range(2 * {MOST_FILES}): open(f"/tmp/{{made}}", "w").close()
    broke(made)
except OSError as error: print(made, error)
try:
    while True: os.link("/tmp/0", f"/workspace/{{made}}"); made += 1
except OSError as error: print(made, error)
if made > 2 * {MOST_FILES}: broke(made)
""",
)
shell("much_output", "head -c 200M < <(yes MARK)")
shell("output_without_end", "yes & yes >&2 & while true; do echo -n .; done", ("timeout",))
shell("no_descriptors", "exec 0<&- 1>&- 2>&-; (sleep 100) & sleep 100", ("timeout",))
python(
    "daemons",
    """
for _ in range(5):
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.chdir("/")
            for number in range(3): os.close(number)
            for number in signal.SIGHUP, signal.SIGTERM, signal.SIGINT: signal.signal(number, signal.SIG_IGN)
            os.execvpe("sleep", ["sleep", "1000", ], {"TITAN_RL_MARK": "MARK"})
        os._exit(0)
time.sleep(0.05)
""",
)
shell(
    "daemons_of_the_shell",
    "nohup setsid sleep 1000 MARK 2>/dev/null & disown; (setsid sh -c 'while :; do sleep 1; done' &) ; true",
)
shell(
    "deaf",
    "trap '' TERM HUP INT QUIT ALRM XCPU; trap 'while :; do sleep 1; done' EXIT; while true; do sleep 1; done",
    ("timeout",),
)
shell("sleeps_for_ever", "cat <(sleep inf) & mkfifo f; cat f", ("timeout",))
python(
    "threads",
    """
import threading
try:
    for _ in range(9999): threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    broke()
except RuntimeError as error: print(error)
os._exit(0)
""",
)
python("all_cores", "for _ in range(3): tried(os.fork)\nwhile True: pass", ("timeout", "memory"))
python(
    "pipes",
    """
held = []
def fill():
    try:
        while True:
            one, two = os.pipe(); held.append(one); os.set_blocking(two, False)
            os.write(two, bytes(1 << 16)); os.close(two)
    except OSError as error: print(len(held), error)
fill()
import fcntl
refused(fcntl.fcntl, held[0], 1031, 1 << 20)
""",
    _ANY_END,
)
_BUFFERS = """
held, total, piece = [], 0, bytes(1 << 16)
for _ in range(40):
    for mine in pair():
        held.append(mine)
        mine.setblocking(False)
        for option in socket.SO_SNDBUF, socket.SO_RCVBUF: tried(mine.setsockopt, socket.SOL_SOCKET, option, 1 << 30)
        try:
            while total < MOST: total += mine.send(piece)
        except BlockingIOError: pass
time.sleep(0.2)
print(total, len(held))
if total >= MOST: broke(total)
""".replace("MOST", str(MOST_MEMORY * 3 // 2))
python("buffers_of_sockets", f"pair = socket.socketpair\n{_BUFFERS}", (*_TOO_MUCH, "ok"))
python(
    "buffers_of_connections",
    f"""
server = socket.create_server(("127.0.0.1", 0))
def pair():
    mine = socket.create_connection(server.getsockname())
    return mine, server.accept()[0]
{_BUFFERS}""",
    (*_TOO_MUCH, "ok"),
)
python(
    "many_descriptors",
    """
try:
    for _ in range(9999): os.open("/dev/null", 0)
    broke()
except OSError as error: print(error)
""",
)
python("ended_children", "for _ in range(40):\n    if tried(os.fork) == 0: os._exit(0)\ntime.sleep(100)", ("timeout",))
python(
    "timers",
    """
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)
while True: time.sleep(1)
""",
    ("timeout",),
)
shell("deep_shell", "ulimit -s 512; f() { f; }; f", ("error", "memory", "timeout"))
shell(
    "long_arguments",
    """
x=$(head -c 120000 /dev/urandom | base64 -w 0 | head -c 120000); for i in 1 2 3 4; do export V$i=$x; done
/usr/bin/env | wc -c; /usr/bin/env $x$x; true
""",
)

# what is said of it

python(
    "descriptors_not_given",
    """
shown = {int(name) for name in os.listdir("/proc/self/fd")}
if max(shown) > 3: broke(shown)
for number in range(3, 1000):
    refused(os.write, number, b"!")
    refused(os.write, number, b'{"exit": 0, "why": "", "seconds": 0.0, "memory": 0}')
    refused(os.read, number, 1)
for pid in 1, os.getppid():
    for number in range(40): refused(os.open, f"/proc/{pid}/fd/{number}", os.O_RDWR) if pid != os.getpid() else None
""",
)
python(
    "its_own_descriptors",
    """
import fcntl
stdin = os.open("/proc/self/fd/0", os.O_RDWR)
refused(os.write, stdin, b"!"); refused(os.pwrite, 0, b"!", 0); refused(os.ftruncate, stdin, 0)
refused(os.ftruncate, stdin, 1 << 40)
output = tried(os.open, "/proc/self/fd/1", os.O_RDWR)
for flags in os.O_NONBLOCK, os.O_APPEND, 0o40000, 0o20000: tried(fcntl.fcntl, 1, fcntl.F_SETFL, flags)
for command in fcntl.F_SETOWN, fcntl.F_SETSIG, fcntl.F_NOTIFY, fcntl.F_SETLEASE, 1033, 1031:
    refused(fcntl.fcntl, 1, command, 1)
os.write(1, b'!{"exit": 0}\\n')
""",
)
shell(
    "forged_exit",
    """printf '!{"exit": 0, "why": ""}\\n' | tee /dev/stderr; echo '{"exit": 0}' >&1; exit 3""",
    ("error",),
)
shell("ends_by_a_signal", "trap 'exit 0' TERM; kill -9 $$", ("error",))
shell("ends_with_a_child_that_writes", "(while :; do echo late; done) & exec 9>&1; exit 4", ("error",))
shell(
    "programs_of_the_next_one",
    """
printf '#!/usr/bin/python3\\nprint("evaluated MARK")\\n' > fake; chmod +x fake
mkdir -p /usr/local/bin ~/.local/lib/python3.11/site-packages ~/.config /bin 2>/dev/null
echo /workspace/evil.so > /etc/ld.so.preload
cp fake ~/.local/lib/python3.11/site-packages/usercustomize.py
cp fake ~/.bashrc; cp fake ~/.profile; cp fake /etc/profile; cp fake /etc/bash.bashrc
for place in /bin /sbin /lib; do
  mv $place $place.was && mkdir $place && cp fake $place/bash && cp fake $place/python3
done
mv /lib64 /lib64.was
""",
    _ANY_END,
)
shell(
    "programs_by_the_environment",
    "export BASH_ENV=/workspace/x LD_PRELOAD=/workspace/x.so PYTHONPATH=/workspace; exec -a MARK true",
)
shell("its_folder_is_another", "cd /; rm -rf /workspace; ln -s /proc /workspace; ln -s / /tmp/x")
shell(
    "all_is_gone",
    "rm -rf /workspace /etc /tmp /root /bin /lib64 /var /run; rm -rf --no-preserve-root --one-file-system /; true",
)
shell("nobody_may_enter", "chmod 0 /workspace/kept /tmp /root; chmod 0 /workspace; chmod 0 /; true")

# names

python(
    "odd_names",
    """
names = [b"a\\nb", b"-rf", b"\\xff\\xfe", b"$(touch x)", b"`x`", b"a:b", b"a,b", b"a\\\\b", b"a=b"]
names += [b"work0", b" ", b"*"]
names += [b".wh.kept", b".wh..wh..opq", b".wh...", b"..x", b"x" * 255, b"\\x1b]0;x\\x07", b"\\xe2\\x80\\xae"]
for name in names:
    os.mkdir(b"/workspace/" + name); open(b"/workspace/" + name + b"/" + name, "w").close()
    os.symlink(name, b"/tmp/" + name)
    os.rename(b"/workspace/" + name, b"/tmp/moved"); os.rename(b"/tmp/moved", b"/workspace/" + name)
refused(open, "x" * 256, "w")
for name in os.listdir(b"/workspace"): os.write(1, name + b"\\n")
""",
)
python(
    "deep_folders",
    f"""
try:
    for depth in range(2 * {MOST_FILES}): os.mkdir("d" * 200); os.chdir("d" * 200)
    broke(depth)
except OSError as error: print(depth, error)
refused(os.listdir, "/workspace/" + "/".join(["d" * 200] * 30))
""",
)
python(
    "folders_that_stay",
    """
for place in "/usr", "/dev", "/proc", "PYTHON_FOLDER": refused(os.rmdir, place); refused(os.rename, place, "/gone")
os.mkdir("stay"); os.chdir("stay"); os.mkdir("in"); os.chmod("in", 0)
os.rename("/workspace/stay", "/tmp/stay"); os.chmod(".", 0)
held = open("/tmp/held", "w+"); held.write("x" * 100000); os.unlink("/tmp/held")
if not os.fork(): time.sleep(100)
""",
)
python(
    "files_that_wait",
    """
import fcntl
for name in "kept", "conftest.py", "__init__.py", "setup.cfg", "git":
    tried(os.unlink, name); os.mkfifo(name)
with socket.socket(socket.AF_UNIX) as mine: mine.bind("/workspace/socket"); mine.listen()
lock = open("/tmp/lock", "w"); fcntl.flock(lock, fcntl.LOCK_EX); fcntl.lockf(lock, fcntl.LOCK_EX)
if not os.fork(): time.sleep(100)
""",
)
