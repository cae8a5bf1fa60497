"""Blocks over TCP: who has the token gets published blocks, and nobody gets anything else."""

import shutil
import socket
import ssl
import subprocess
import threading
import time

import pytest
import torch

from titan_rl.mesh.channel.memory.checksums import checksums
from titan_rl.mesh.channel.memory.region import FAILED, WRITING, Region, stamp_of
from titan_rl.mesh.channel.plan import Read
from titan_rl.mesh.channel.tcp import client as client_module
from titan_rl.mesh.channel.tcp import security
from titan_rl.mesh.channel.tcp import server as server_module
from titan_rl.mesh.channel.tcp.client import BlockClient, Refused, Version, WrongBlock, dealt, streams_each
from titan_rl.mesh.channel.tcp.protocol import (
    FRAME_BYTES,
    MAGIC,
    MAX_BLOCKS,
    REQUEST_BYTES,
    Frame,
    ProtocolError,
    Request,
    Status,
)
from titan_rl.mesh.channel.tcp.server import Address, BlockServer, read_exactly
from titan_rl.mesh.resources.host_identity import HOST_ID, host_identity
from titan_rl.mesh.resources.network import HOST_ADDRESS, address_for, host_address

BLOCKS = [(0, 3 << 20), (3 << 20, (3 << 20) + 5), ((3 << 20) + 64, (4 << 20) + 1)]
SIZE = 5 << 20


@pytest.fixture
def server():
    server = BlockServer("127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def region() -> Region:
    region = Region(0, SIZE, BLOCKS, torch.device("cpu"))
    publish(region, stamp_of(1, 7), 1)
    return region


def publish(region: Region, stamp: int, slot: int) -> None:
    region.header.stamps[slot] = WRITING
    torch.manual_seed(stamp % 1000)
    region.slots[slot].copy_(torch.randint(0, 256, (SIZE,), dtype=torch.uint8))
    region.header.checksums[slot] = checksums("xxh3", region.slots[slot], region.blocks)
    region.header.stamps[slot] = stamp


READS = [Read(0, block, start, stop - start, start) for block, (start, stop) in enumerate(BLOCKS)]


def take(address: Address, stamp: int, slot: int = 1, seconds: float = 5.0, reads=READS) -> tuple[torch.Tensor, list]:
    buffer, came = torch.zeros(SIZE, dtype=torch.uint8), []
    deadline = time.monotonic() + seconds
    version = Version(stamp, slot, deadline)
    BlockClient(address).take(version, reads, buffer, lambda read, checksum: came.append(read.block))
    return buffer, came


def test_blocks_arrive_in_the_order_in_which_they_are_asked_for(server, region):
    address = server.serve(region)
    buffer, came = take(address, stamp_of(1, 7), reads=READS[::-1])
    assert came == [2, 1, 0]
    for start, stop in BLOCKS:
        assert torch.equal(buffer[start:stop], region.slots[1][start:stop])
    assert server.bytes_sent[address.region] == sum(stop - start for start, stop in BLOCKS)


def test_more_blocks_than_a_request_may_name_are_asked_for_in_several(server, region, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_BLOCKS", 2)
    assert take(server.serve(region), stamp_of(1, 7))[1] == [0, 1, 2]


def test_a_version_that_is_not_there_yet_is_waited_for(server, region, monkeypatch):
    """For longer than silence would be borne: it says that it waits."""
    monkeypatch.setattr(server_module, "_TOLD_EVERY", 0.02)
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", 0.2)
    later = threading.Timer(0.5, publish, (region, stamp_of(1, 8), 0))
    later.start()
    buffer, came = take(server.serve(region), stamp_of(1, 8), slot=0)
    later.join()
    assert came == [0, 1, 2] and torch.equal(buffer[: 3 << 20], region.slots[0][: 3 << 20])


@pytest.mark.parametrize(
    "found, wanted, status",
    [
        (stamp_of(1, 7), stamp_of(1, 5), Status.GONE),
        (stamp_of(1, 7), stamp_of(2, 5), Status.GONE),
        (FAILED, stamp_of(1, 7), Status.GONE),
        (WRITING, stamp_of(1, 7), Status.LATE),
        (stamp_of(1, 7), stamp_of(1, 9), Status.LATE),
    ],
)
def test_why_a_version_does_not_come_is_said(server, region, found, wanted, status):
    """Superseded; of an epoch that is over; failed; not there in time."""
    region.header.stamps[1] = found
    with pytest.raises(Refused) as refused:
        take(server.serve(region), wanted, seconds=0.2)
    assert refused.value.status is status and refused.value.stamp == found


def test_what_is_not_served_is_unknown(server, region):
    address = server.serve(region)
    for reads, slot in ([[Read(0, 3, 0, 1, 0)], 1], [READS, 2]):
        with pytest.raises(Refused, match="unknown"):
            take(address, stamp_of(1, 7), slot, reads=reads)
    server.forget(address)
    with pytest.raises(Refused, match="unknown"):
        take(address, stamp_of(1, 7))


def test_a_wrong_byte_is_seen(server, region):
    region.slots[1][BLOCKS[2][0]] ^= 1
    with pytest.raises(WrongBlock, match="block 2"):
        take(server.serve(region), stamp_of(1, 7))


def test_a_silent_server_is_not_waited_for(monkeypatch):
    """It takes the connection and says nothing, as a host without power does."""
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address(*listener.getsockname(), 1, False, bytes(32))
        with pytest.raises(TimeoutError):
            take(address, 7, seconds=60)


# strangers


def connected(server: BlockServer) -> socket.socket:
    connection = socket.create_connection((server.host, server.port), 5)
    connection.settimeout(5)
    return connection


def is_cut_off(connection: socket.socket) -> bool:
    """Without a byte."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("hello", [MAGIC + bytes(32), bytes(49), b"GET / HTTP/1.1\r\n" * 10])
def test_without_the_token_nothing_is_said(server, region, hello):
    address = server.serve(region)
    with connected(server) as stranger:
        stranger.sendall(hello + Request(address.region, stamp_of(1, 7), 1, 1.0, [0]).pack())
        assert is_cut_off(stranger)
    assert server.num_refused == 1 and not server.bytes_sent


def test_who_says_nothing_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(server_module, "_HANDSHAKE_SECONDS", 0.1)
    with connected(server) as stranger:
        assert is_cut_off(stranger)


def test_a_request_without_bounds_is_not_read(server, region):
    address = server.serve(region)
    head = Request(address.region, stamp_of(1, 7), 1, 1.0, [0]).pack()[:REQUEST_BYTES]
    for count in (0, MAX_BLOCKS + 1, (1 << 32) - 1):
        with connected(server) as friend:
            friend.sendall(MAGIC + address.token + head[:-4] + count.to_bytes(4, "big"))
            assert is_cut_off(friend)
    for seconds, stamp in ((float("nan"), 7), (1e9, 7), (-1.0, 7), (1.0, WRITING)):
        with pytest.raises(ProtocolError):
            Request.count_in(Request(address.region, stamp, 1, seconds, [0]).pack()[:REQUEST_BYTES])


def test_many_strangers_do_not_keep_friends_out(server, region, monkeypatch):
    """Who shows no token holds one of a few places, until another wants it."""
    monkeypatch.setattr(server_module, "_HANDSHAKE_SECONDS", 600.0)
    address = server.serve(region)
    strangers = [connected(server) for _ in range(300)]
    assert take(address, stamp_of(1, 7))[1] == [0, 1, 2]
    for stranger in strangers:
        stranger.close()


def test_it_listens_at_one_interface_alone(server):
    assert server._strangers._listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", server.port), 1)


def test_a_token_is_in_no_repr(server, region):
    address = server.serve(region)
    assert "token" not in repr(address) and repr(address.token) not in repr(region.handle(over_rdma=False))


def test_a_frame_that_makes_no_sense_is_refused():
    assert Frame.unpack(Frame(Status.READY, 5, 1 << 63, 9).pack()) == Frame(Status.READY, 5, 1 << 63, 9)
    for data in (b"\xff" + bytes(FRAME_BYTES - 1), bytes(FRAME_BYTES - 8) + b"\xff" * 8):
        with pytest.raises(ProtocolError):
            Frame.unpack(data)


# TLS


def make_certificates(folder, authority: str):
    """A CA, and a certificate of it."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    ca, key, request, certificate = (folder / f"{authority}{end}" for end in (".ca", ".key", ".csr", ".pem"))
    for command in (
        ["req", "-x509", *curve, "-days", "2", "-subj", f"/CN={authority}", "-keyout", f"{ca}.key", "-out", ca],
        ["req", *curve, "-subj", "/CN=host", "-keyout", key, "-out", request],
        ["x509", "-req", "-in", request, "-CA", ca, "-CAkey", f"{ca}.key", "-CAcreateserial", "-out", certificate],
    ):
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True)
    return {"CERT": certificate, "KEY": key, "CA": ca}


@pytest.fixture
def certificates(tmp_path, monkeypatch):
    """Has this process show those of one authority or another, or none."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    made = {name: make_certificates(tmp_path, name) for name in ("run", "other")}

    def show(name: str | None) -> None:
        for kind in ("CERT", "KEY", "CA"):
            if name is None:
                monkeypatch.delenv(f"HYPERACTOR_TLS_{kind}", raising=False)
            else:
                monkeypatch.setenv(f"HYPERACTOR_TLS_{kind}", str(made[name][kind]))

    return show


def test_inside_tls_both_ends_show_a_certificate_of_the_run(certificates, region):
    certificates("run")
    server = BlockServer("127.0.0.1")
    address = server.serve(region)
    assert address.is_tls
    buffer, _ = take(address, stamp_of(1, 7))
    assert torch.equal(buffer[: 3 << 20], region.slots[1][: 3 << 20])
    certificates("other")  # it knows the token, too
    with pytest.raises(ssl.SSLError):
        take(address, stamp_of(1, 7))
    certificates(None)
    with pytest.raises(ConnectionError, match="HYPERACTOR_TLS_CERT is not set"):
        take(address, stamp_of(1, 7))
    plain = Address(address.host, address.port, address.region, False, address.token)
    with pytest.raises(OSError):
        take(plain, stamp_of(1, 7))
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    with connected(server) as connection, pytest.raises(OSError):
        stream = bare.wrap_socket(connection)
        stream.sendall(MAGIC + address.token + Request(address.region, stamp_of(1, 7), 1, 1.0, [0]).pack())
        read_exactly(stream, FRAME_BYTES, time.monotonic() + 5)
    assert server.bytes_sent[address.region] == sum(stop - start for start, stop in BLOCKS)
    server.close()


def test_half_of_a_certificate_is_a_mistake(monkeypatch):
    monkeypatch.setenv("HYPERACTOR_TLS_CERT", "here.pem")
    with pytest.raises(ValueError, match="HYPERACTOR_TLS_KEY, HYPERACTOR_TLS_CA is not set"):
        security.certificate_files()


# arithmetic


def test_streams_advance_together():
    assert [list(share) for share in dealt([0, 1, 2, 3, 4], 2)] == [[0, 2, 4], [1, 3]]
    assert dealt([], 2) == [] and len(dealt([0], 4)) == 1
    assert [streams_each(count) for count in (0, 1, 2, 3, 64)] == [4, 4, 2, 1, 1]


def test_a_host_may_be_told_who_it_is(monkeypatch):
    monkeypatch.delenv(HOST_ID, raising=False)
    monkeypatch.delenv(HOST_ADDRESS, raising=False)
    assert host_identity() == host_identity() and host_address() == "127.0.0.1"
    assert address_for(["127.0.0.1"]) == "127.0.0.1", "as the only way leads"
    monkeypatch.setenv(HOST_ID, "a")
    monkeypatch.setenv(HOST_ADDRESS, "10.0.0.7")
    assert (host_identity(), host_address()) == ("a", "10.0.0.7")
    assert address_for(["127.0.0.1"]) == "10.0.0.7"
