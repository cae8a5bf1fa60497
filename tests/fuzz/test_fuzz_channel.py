"""Bytes from another host: what a port is told there ends its connection at the most, and nothing else."""

import json
import socket
import time
from contextlib import suppress
from functools import cache

import torch
import xxhash
from fuzzing import ANY_TEXT, as_json, fuzz, mutated, spoilt
from hypothesis import strategies as st

from titan_rl.mesh.channel.plan import Read
from titan_rl.mesh.channel.tcp.client import BlockClient, Held, Refused, Version, WrongBlock
from titan_rl.mesh.channel.tcp.differences import difference
from titan_rl.mesh.channel.tcp.protocol import (
    FRAME_BYTES,
    MAGIC,
    NUMBER_BYTES,
    REQUEST_BYTES,
    TOKEN_BYTES,
    Frame,
    ProtocolError,
    Request,
    Status,
)
from titan_rl.mesh.channel.tcp.server import _MAX_CLIENTS as MAX_CLIENTS
from titan_rl.mesh.channel.tcp.server import Address, Block, BlockServer
from titan_rl.mesh.launch.claims import read_claim

COUNTS = st.integers(0, (1 << 32) - 1)
REQUESTS = st.builds(
    Request, COUNTS, st.integers(0, (1 << 63) - 1), COUNTS, st.floats(0, 24 * 3600), st.lists(COUNTS, min_size=1)
)


@fuzz(request=REQUESTS)
def test_a_request_is_read_as_it_was_written(request):
    data = request.pack()
    count = Request.count_in(data[:REQUEST_BYTES])
    assert len(data) == REQUEST_BYTES + NUMBER_BYTES * count
    assert Request.unpack(data[:REQUEST_BYTES], data[REQUEST_BYTES:]) == request


@fuzz(head=st.binary(min_size=REQUEST_BYTES, max_size=REQUEST_BYTES))
def test_a_request_asks_for_few_blocks_within_a_day(head):
    try:
        count = Request.count_in(head)
    except ProtocolError as error:
        assert str(error).isprintable() and len(str(error)) < 200
        return
    assert 0 < count <= 1 << 16 and 0 <= Request.unpack(head, b"").seconds <= 24 * 3600


FRAMES = st.builds(Frame, st.sampled_from(Status), st.integers(-2, 1 << 62), st.integers(0, (1 << 64) - 1), COUNTS)


@fuzz(frame=FRAMES, data=st.binary(min_size=FRAME_BYTES, max_size=FRAME_BYTES))
def test_a_frame_is_read_as_it_was_written(frame, data):
    assert Frame.unpack(frame.pack()) == frame
    try:
        assert Frame.unpack(data).pack() == data
    except ProtocolError as error:
        assert str(error).isprintable() and len(str(error)) < 200


class Region:
    """Of two blocks, in one slot, of version 7."""

    fd, memory = -1, memoryview(bytes(range(16)))

    def look(self, slot, block, stamp):
        if slot or block > 1:
            raise IndexError
        return (Status.READY if stamp == 7 else Status.GONE), 7

    def block(self, slot, block):
        return Block(8 * block, 8, 5)

    def difference(self, slot, block, held):
        return bytes(4) if held == 6 else None


TOKEN = b"t" * TOKEN_BYTES


@cache
def server() -> BlockServer:
    """One that listens nowhere."""
    server = BlockServer("127.0.0.1")
    server.close()
    server._token, server._served = TOKEN, {1: Region()}
    return server


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


HELLO = MAGIC + TOKEN
SAID = HELLO + Request(1, 7, 0, 0.0, [0, 1]).pack() + Request(2, 7, 0, 0.0, [3]).pack()
NEAR = st.integers(0, 2)
ASKED = st.builds(Request, NEAR, st.integers(6, 8), NEAR, st.just(0.0), st.lists(NEAR, min_size=1, max_size=3))


@fuzz(
    said=st.just(SAID).flatmap(mutated)
    | st.lists(ASKED | REQUESTS, max_size=3).map(lambda each: HELLO + b"".join(one.pack() for one in each))
    | st.binary(max_size=99)
)
def test_whatever_a_client_says_ends_its_connection_alone(said):
    known, num_refused = [], server().num_refused
    ours, theirs = pair()
    with ours:
        ours.sendall(said)
        ours.shutdown(socket.SHUT_WR)
        server()._meet(theirs, lambda: known.append(True))
        assert known == [True] and theirs.fileno() == -1 and server()._clients._value == MAX_CLIENTS
        if not said.startswith(HELLO):
            assert server().num_refused == num_refused + 1
            with suppress(ConnectionResetError):
                assert not ours.recv(1)


READS = [Read(holder=0, block=place, offset=8 * place, nbytes=8, into=8 * place) for place in range(2)]
BLOCK = bytes(8)
GOOD = Frame(Status.READY, 7, xxhash.xxh3_64_intdigest(BLOCK), 8).pack() + BLOCK
HELD = b"\1" * 8
CHANGES = difference(memoryview(HELD), memoryview(HELD[:7] + b"\2"))
GOOD_CHANGES = Frame(Status.DIFFERENCE, 7, xxhash.xxh3_64_intdigest(HELD[:7] + b"\2"), len(CHANGES)).pack() + CHANGES
SAYS = st.just(GOOD) | st.just(GOOD_CHANGES).flatmap(mutated) | FRAMES.map(Frame.pack) | st.binary(max_size=30)


@fuzz(said=st.lists(SAYS, max_size=6).map(b"".join), has_held=st.booleans())
def test_whatever_a_server_says_is_blocks_or_an_error_of_the_clients(said, has_held):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        client, buffer, done = (
            BlockClient(Address("127.0.0.1", 1, 1, False, b"")),
            torch.ones(16, dtype=torch.uint8),
            [],
        )
        held = Held(6, {read.into for read in READS}, lambda read, changes: None) if has_held else None
        try:
            version = Version(7, 0, time.monotonic() + 5, held)
            client._take(ours, version, READS, buffer, lambda read, checksum: done.append(read))
        except (Refused, WrongBlock, OSError) as error:
            assert str(error).isprintable() and len(str(error)) < 300
        for read in done:
            block = bytes(buffer[read.into : read.into + 8].tolist())
            assert xxhash.xxh3_64_intdigest(block) in [int.from_bytes(said[n : n + 8]) for n in range(len(said))]


CLAIM = {"run": "0" * 32, "epoch": 1, "number": 2, "controller": "node0"}


@fuzz(line=st.just(CLAIM).flatmap(spoilt).map(as_json) | ANY_TEXT)
def test_a_claim_is_one_or_a_value_error(line):
    try:
        claim = read_claim(line.encode("utf-8", "surrogatepass"))
    except ValueError:
        return
    assert claim.run and claim.controller and type(claim.epoch) is type(claim.number) is int
    json.dumps([claim.run, claim.controller])
