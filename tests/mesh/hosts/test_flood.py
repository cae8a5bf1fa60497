"""Another user of the host who connects, forks and fills all that he can slows a run at most, and ends nothing."""

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys

import pytest
import running
from another_user import NOBODY, as_another_user, become, needs_root
from tree import SUPPORT

from titan_rl.environments.agents.endpoint import Endpoint
from titan_rl.mesh.resources.listeners.callers import is_other_users
from titan_rl.records.run_directory.events import read_events

# whose a connection is


@pytest.mark.parametrize("family, host", [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_connection_of_our_own_is_known(family, host):
    with socket.create_server((host, 0), family=family) as listener, socket.socket(family) as one:
        one.connect(listener.getsockname()[:2])
        with listener.accept()[0] as other:
            assert not is_other_users(other) and not is_other_users(one)


def test_an_address_of_both_families_is_known():
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])),
        listener.accept()[0] as other,
    ):
        assert other.getpeername()[0] == "::ffff:127.0.0.1" and not is_other_users(other)


@needs_root
def test_one_of_another_user_is_not_ours_nor_one_that_was_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place, (ours, its) = listener.getsockname(), os.pipe()
        if (pid := os.fork()) == 0:
            become(NOBODY)
            one = socket.socket()
            one.connect(place)
            os.read(ours, 1)
            os._exit(0)
        with listener.accept()[0] as other:
            assert is_other_users(other)
            os.write(its, b"x")
            os.waitpid(pid, 0)
            assert is_other_users(other), "it is nobody's any more"
        os.close(ours)
        os.close(its)


# gloo

MEETING = """
import faulthandler, os, resource, socket, sys, threading, time
from contextlib import suppress
from datetime import timedelta
import torch, torch.distributed as dist
from another_user import NOBODY, become
from titan_rl.mesh.resources.listeners.gloo import guard_gloo

faulthandler.dump_traceback_later(400, exit=True)
strangers, hard = int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
(ours, its), (told, tell), (until, ended) = os.pipe(), os.pipe(), os.pipe()
if os.fork() == 0:
    os.close(ended)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    become(NOBODY)
    port, held = int.from_bytes(os.read(told, 2), "big"), []
    for _ in range(strangers):
        held.append(one := socket.socket())
        one.connect(("127.0.0.1", port))
        with suppress(OSError):  # it is closed already
            one.sendall(len(held).to_bytes(8, "little"))  # what the peer would say first
    os.write(its, b"x")
    os.read(until, 1)
    os._exit(0)
os.close(its)
guard_gloo()
store, groups = dist.HashStore(), {}

def meet(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=300))

def ports():
    rows = [line.split() for line in open("/proc/self/net/tcp").read().splitlines()[1:]]
    places = {f"socket:[{row[9]}]": int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    links = [f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd")]
    return [places[link] for link in map(os.readlink, filter(os.path.islink, links)) if link in places]

first = threading.Thread(target=meet, args=(0,))
first.start()
while not (open_ports := ports()):
    time.sleep(0.05)
[port] = open_ports
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
os.write(tell, port.to_bytes(2, "big"))
assert os.read(ours, 1) == b"x"
second = threading.Thread(target=meet, args=(1,))
second.start()
first.join(), second.join()
assert ports() == [], "no group listens that has met"
with socket.socket() as late:
    assert late.connect_ex(("127.0.0.1", port)) != 0
tensors = [torch.ones(1000), torch.ones(1000)]
works = [groups[rank].allreduce([tensors[rank]]) for rank in (0, 1)]
[work.wait() for work in works]
assert all(float(tensor.sum()) == 2000 for tensor in tensors)
del works
groups.clear()
print("well")
"""


@needs_root
def test_gloo_meets_its_peers_while_another_user_takes_all_descriptors():
    """It has room for 40 more, and 300 connections come that it did not ask for, in a peer's place."""
    paths = os.pathsep.join([str(SUPPORT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", MEETING, "300"],
        env=os.environ | {"PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout == "well\n", done.stderr[-3000:]


# limits


@pytest.mark.parametrize("soft, hard, said", [(256, 1000, "may have 1000"), (1000, 1000, "")])
def test_as_many_files_may_be_open_as_the_hard_limit_says(soft, hard, said):
    """And those who are started may, too."""
    program = f"""
import resource, subprocess
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from titan_rl.mesh.resources.open_files import raise_open_files
assert {said!r} in raise_open_files() and bool(raise_open_files()) is {bool(said)}
print(subprocess.run(["sh", "-c", "ulimit -n"], capture_output=True, text=True).stdout)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) == hard, done.stderr


# the endpoint of agents


@needs_root
def test_connections_of_another_user_take_nothing_of_the_endpoint():
    """Each is ended before a byte of it is read."""

    def try_all(port: int) -> None:
        held = [socket.socket() for _ in range(200)]
        for one in held:
            one.settimeout(60)
            one.connect(("127.0.0.1", port))
        for one in held:
            try:
                if one.recv(1):
                    return
            except ConnectionResetError:
                pass
        raise ConnectionResetError

    async def run() -> None:
        endpoint = Endpoint()
        await endpoint.start()
        port = int(endpoint.base_url.rpartition(":")[2].partition("/")[0])
        before = len(os.listdir("/proc/self/fd"))
        assert await asyncio.to_thread(as_another_user, {"any": lambda: try_all(port)}) == []
        assert len(os.listdir("/proc/self/fd")) <= before
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401"), "its owner is asked for a key"
        writer.close()
        await endpoint.close()

    asyncio.run(run())


# a run

CALM, FLOODED = 15, 60
"""Steps before the flood, and in it."""


@needs_root
@pytest.mark.slow
@pytest.mark.confirms
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("connections", "processes"), [(20_000, 500), (20_000, 0), (0, 500), (0, 0)])
def test_a_flood_ends_nothing_of_a_run(tmp_path, connections, processes):
    """60 steps, with all connections that are to be had of 20,000, 500 processes and a full /dev/shm. The network and
    /dev/shm (64 MiB) are this run's and the flood's alone: other runs of this host are no target. Each kind by itself
    tells what steps wait for, as ``-s`` prints: connections, or a share of the cores; neither is the control."""
    alone = "mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm && ip link set lo up"
    root = tmp_path / "run"
    trained = [sys.executable, "-m", "titan_rl.train", "--run.dir", str(root)]
    trained += running.overrides(
        training__steps=CALM + FLOODED,
        parallelism__data_parallel_shard_degree=2,
        checkpoint__every=20,
        rollout__prompts_per_step=192,  # a step of seconds, which the start of 500 processes does not double
        rollout__group_size=8,
        rollout__max_new_tokens=16,
    )
    with open(tmp_path / "run.out", "w") as output:
        run = subprocess.Popen(
            ["unshare", "--mount", "--net", "sh", "-c", f'{alone} && exec "$@"', "sh", *trained],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    flood = None
    try:
        running.wait_for_step(root, CALM, timeout=900)
        flood = subprocess.Popen(
            [
                "nsenter",
                "--mount",
                "--net",
                "--target",
                str(run.pid),
                sys.executable,
                str(SUPPORT / "hosts" / "flood.py"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        flood.stdin.write(f"{connections} {processes}\n")
        flood.stdin.flush()
        held = json.loads(flood.stdout.readline())
        assert held["processes"] == processes and held["filled"] > 32 << 20, held
        assert run.wait(1500) == 0, running.output(root)[-3000:]
        assert flood.poll() is None
        held |= json.loads(flood.communicate(timeout=60)[0])
    finally:
        for process in (flood, run):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    steps = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if "reward" in step] == list(range(1, CALM + FLOODED + 1))
    kinds = {event["kind"] for event in read_events(root)}
    assert not kinds & {"died", "trainer_repaired"}
    seconds = [step["seconds_step"] for step in steps if "seconds_step" in step]
    before = statistics.median(seconds[2:CALM])  # compilation and the first pages come before
    ratios = [after / before for after in seconds[CALM:]]
    slower = sum(ratio > 2 for ratio in ratios)
    median, worst = statistics.median(ratios), max(ratios)
    slowest = f"worst {worst:.2f} x in step {CALM + 1 + ratios.index(worst)}"
    print(f"{held}: {before:.2f} s, median {median:.2f} x, {slowest}, {slower} of {len(ratios)} > 2 x")
