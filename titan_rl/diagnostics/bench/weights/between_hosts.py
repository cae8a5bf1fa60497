"""Bench of weights between hosts: speed of each transport, and bytes sent to many hosts.

Processes of this machine play the hosts, over its loopback. Its cores do all the copying there, so how long a version
takes to many hosts is measured with links that are slower than the cores, and computed for more hosts than fit.
"""

import asyncio
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from monarch.actor import this_host
from monarch.config import configure

from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.weights.host_actors import HostActor
from titan_rl.mesh.channel.plan import BLOCK_BYTES
from titan_rl.mesh.channel.relay.gathering import Parent, Route
from titan_rl.mesh.channel.relay.trees import arrival_times, parents_of
from titan_rl.train import drive

_ROUNDS = 5
_BYTES = 256 << 20
_SLOW_BYTES, _SLOW_RATE, _SLOW_BLOCK = 32 << 20, 30e6, 128 << 10
"""Of the runs with slow links: the model, bytes a second of each host, and a block, so that there are as many as of a
model of 2 GiB."""
_HOSTS = (1, 2, 4, 8)
_MANY_HOSTS, _BLOCKS = (64, 1024), 256
_BAR_SENT, _BAR_TIME = 2.0, 1.5


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    configure(rdma_allow_tcp_fallback=True, rdma_tcp_fallback_parallelism=1, rdma_max_chunk_size_mb=16)
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        rows = drive(_rates("", {})) + drive(_rates(", inside TLS", certificates(Path(folder))))
    return rows + drive(_many_hosts()) + _computed()


def certificates(folder: Path) -> dict[str, str]:
    """Certificates of a new CA, as environment variables."""
    ca, key, request, certificate = (str(folder / name) for name in ("ca.pem", "host.key", "host.csr", "host.pem"))
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for command in (
        ["req", "-x509", *curve, "-days", "2", "-subj", "/CN=bench", "-keyout", f"{ca}.key", "-out", ca],
        ["req", *curve, "-subj", "/CN=host", "-keyout", key, "-out", request],
        ["x509", "-req", "-in", request, "-CA", ca, "-CAkey", f"{ca}.key", "-CAcreateserial", "-out", certificate],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    return {"HYPERACTOR_TLS_CERT": certificate, "HYPERACTOR_TLS_KEY": key, "HYPERACTOR_TLS_CA": ca}


async def _host(name: str, *prepare: Any) -> Any:
    actor = this_host().spawn_procs(name=name).spawn(name, HostActor)
    await actor.prepare.call_one(*prepare)
    return actor


async def _rates(how: str, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Each way in turn, so that the machine's drift hits all alike."""
    tag = "_tls" if environment else ""
    trainer, generator = [await _host(f"{name}{tag}", environment, 0.0, BLOCK_BYTES) for name in ("trainer", "taker")]
    plan, handle, buffers, port = await trainer.stage.call_one(_BYTES)
    await generator.connect.call_one(plan, handle, "taker")
    blocks = [(read.into, read.into + read.nbytes) for read in plan.reads]
    seconds: dict[str, list[float]] = {"raw": [], "tcp": [], "rdma": []}
    for version in range(2 + _ROUNDS):
        await trainer.publish.call_one(version)
        start, end, _ = await generator.fetch.call_one(version, None)
        timings = {"tcp": end - start, "raw": await generator.read_raw.call_one(port)}
        timings["rdma"] = await generator.read_rdma.call_one(buffers, blocks)
        if version >= 2:  # by then all memory has been touched
            for name, one in timings.items():
                seconds[name].append(one)
    rate = {name: _BYTES / statistics.median(timings) / 1e9 for name, timings in seconds.items()}
    over_rdma, over_raw = rate["tcp"] / rate["rdma"], rate["tcp"] / rate["raw"]
    what = f"mesh.transport = tcp{how}, checksums included"
    rows = [row(what, rate["tcp"], "GB/s", over_rdma_tcp=over_rdma, over_raw_socket=over_raw)]
    if environment:
        return rows
    return [
        *rows,
        row("  one raw socket, in the clear and unchecked", rate["raw"], "GB/s"),
        row("  RDMABuffer over TCP, unchecked", rate["rdma"], "GB/s"),
    ]


async def _many_hosts() -> list[dict[str, Any]]:
    trainer, *hosts = [await _host(f"host{i}", {}, _SLOW_RATE, _SLOW_BLOCK) for i in range(1 + max(_HOSTS))]
    plan, handle, _, _ = await trainer.stage.call_one(_SLOW_BYTES)
    relays = [await host.connect.call_one(plan, handle, f"host {i}") for i, host in enumerate(hosts)]
    rows, version, one = [], 0, 0.0
    for count in _HOSTS:
        version, before = version + 1, await trainer.bytes_sent.call_one()
        await trainer.publish.call_one(version)
        routes = [_route(relays, places) for places in parents_of(range(count))]
        fetches = zip(hosts, routes, strict=False)
        times = await asyncio.gather(*(host.fetch.call_one(version, route) for host, route in fetches))
        took = max(end for _, end, _ in times) - min(start for start, _, _ in times)
        one = one or took
        sent = await trainer.bytes_sent.call_one() - before
        name = f"{count} generator host{'s' * (count > 1)}"
        rows.append(row(f"{name}: bytes that trainers sent, over the model", sent / _SLOW_BYTES, "ratio", _BAR_SENT))
        rows.append(row("  time to all, over that to one", took / one, "ratio", _BAR_TIME, seconds=took))
    return rows


def _route(relays: list, places: tuple) -> Route:
    return Route(0, tuple(None if place is None else Parent(relays[place], "tcp") for place in places))


def _computed() -> list[dict[str, Any]]:
    one = arrival_times(1, _BLOCKS)[0]
    ratios = {count: max(arrival_times(count, _BLOCKS)) / one for count in _MANY_HOSTS}
    return [
        row(f"{count} hosts, computed: time to all, over that to one", ratio, "ratio", _BAR_TIME, blocks=_BLOCKS)
        for count, ratio in ratios.items()
    ]
