"""Who gets a worker loop of a host: the latest controller of a run, and nobody that is not let in."""

import asyncio
import errno
import json
import queue
import socket
import ssl
import threading

import pytest
from waiting import eventually

from titan_rl.config.sections.hosts import parse_address
from titan_rl.mesh.channel.tcp.pending_connections import MOST
from titan_rl.mesh.hosts import command as host_command
from titan_rl.mesh.hosts.command import HostServer
from titan_rl.mesh.launch import claims as reception_module
from titan_rl.mesh.launch.claims import Claim, ClaimListener, ClaimSuperseded, ask_for_loop, read_claim
from titan_rl.mesh.resources.certificates import VARIABLES, make_certificates

FIRST = Claim("run", 0, 0, "one")
ADDRESS = "tls://A:26600"


class FakeService:
    """Of a host, without any process."""

    made: list["FakeService"] = []

    def __init__(self, reception, environment, claim):
        self.claim, self.is_over = claim, False
        FakeService.made.append(self)

    def address(self) -> str:
        return f"loop {FakeService.made.index(self)}"

    def end(self) -> None:
        self.is_over = True


class FakeCaller:
    def __init__(self, *claim):
        self.claim = Claim(*claim)

    def give(self, address: str) -> None:
        self.got = address

    def refuse(self, why: str, *, is_over: bool) -> None:
        self.got = (is_over, why)


def num_threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(host_command, "HostService", FakeService)
    monkeypatch.setattr(FakeService, "made", [])
    return HostServer(parse_address(ADDRESS), {})


def ask(served: HostServer, *claim):
    caller = FakeCaller(*claim)
    served.answer(caller)
    return caller.got


def test_each_claim_gets_a_loop_of_its_own_and_the_one_before_is_ended_first(served):
    assert ask(served, "run", 0, 0, "one") == "loop 0"
    assert ask(served, "run", 0, 1, "one") == "loop 1", "it has counted the host as lost, and found it again"
    assert ask(served, "run", 1, 0, "two") == "loop 2", "the run was resumed, wherever that was"
    assert [service.is_over for service in FakeService.made] == [True, True, False]


def test_an_answer_that_was_lost_is_given_again(served):
    assert ask(served, "run", 0, 0, "one") == ask(served, "run", 0, 0, "one") == "loop 0"
    assert not FakeService.made[0].is_over


@pytest.mark.parametrize(
    "stale", [("run", 0, 7, "one"), ("run", 1, 0, "two"), ("run", 1, 1, "a resumed copy, beside it")]
)
def test_a_controller_whose_run_has_gone_on_elsewhere_gets_nothing_any_more(served, stale):
    """Also when the later one is through with the host."""
    assert ask(served, "run", 1, 1, "two") == "loop 0"
    is_over, why = ask(served, *stale)
    assert is_over and "later controller" in why and not FakeService.made[0].is_over
    served.end()
    assert ask(served, *stale)[0] and len(FakeService.made) == 1


def test_another_run_waits_until_the_host_is_free(served):
    ask(served, "run", 5, 0, "one")
    assert ask(served, "other", 0, 0, "two") == (False, "it serves another run, until that is over")
    served.end()
    assert ask(served, "other", 0, 0, "two") == "loop 1"


def test_a_loop_that_does_not_come_up_may_be_asked_for_again(served, monkeypatch):
    monkeypatch.setattr(FakeService, "address", lambda self: "")
    assert ask(served, "run", 0, 0, "one") == (False, "its worker loop did not come up")
    monkeypatch.undo()
    monkeypatch.setattr(host_command, "HostService", FakeService)
    assert ask(served, "run", 0, 0, "one").startswith("loop")


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"7", b'{"run": "r"}', b"[" * 5000]
    + [json.dumps(dict(run="r", epoch=e, number=n, controller=c)).encode() for e, n, c in
       ((True, 0, "c"), ("1", 0, "c"), (0, 1.5, "c"), (0, 0, ""), (0, 0, 7))],
)  # fmt: skip
def test_what_is_no_claim(line):
    with pytest.raises(ValueError):
        read_claim(line)


# over the wire


def local(scheme: str) -> tuple:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return parse_address(f"{scheme}://127.0.0.1:{probe.getsockname()[1]}")


async def answering(reception: ClaimListener, *answers) -> None:
    """One caller after the other gets these: an address, or a reason and whether it is over."""
    for answer in answers:
        caller = await asyncio.to_thread(reception.callers.get, timeout=60)
        assert caller.claim == FIRST
        if isinstance(answer, str):
            caller.give(answer)
        else:
            caller.refuse(answer[0], is_over=answer[1])


def test_a_controller_asks_until_the_host_is_there_and_free():
    async def run() -> None:
        address, said = local("tcp"), []
        asking = asyncio.ensure_future(ask_for_loop(address, FIRST, said.append))
        await asyncio.sleep(0.1)  # nothing listens there
        reception = ClaimListener(address, None)
        answers = asyncio.ensure_future(answering(reception, ("busy", False), "tcp://x:1", ("too late", True)))
        assert await asking == "tcp://x:1" and said == [f"{address}: busy"]
        with pytest.raises(ClaimSuperseded, match="too late"):
            await ask_for_loop(address, FIRST, said.append)
        await answers
        reception.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address.host, address.port), 5)

    asyncio.run(run())


def test_whoever_has_no_certificate_of_the_authority_is_not_heard(tmp_path, monkeypatch):
    make_certificates(tmp_path / "ours", ["127.0.0.1"])
    make_certificates(tmp_path / "theirs", ["127.0.0.1"])

    def files(folder: str) -> tuple:
        return tuple(str(tmp_path / folder / file.format(name="127.0.0.1")) for file in VARIABLES.values())

    def use(folder: str) -> None:
        for name, path in zip(VARIABLES, files(folder), strict=True):
            monkeypatch.setenv(name, path)

    async def run() -> None:
        address = local("tls")
        reception = ClaimListener(address, files("ours"))
        for attempt in ("plain", "without", "theirs"):
            with pytest.raises((OSError, EOFError, asyncio.TimeoutError)):
                await stranger(address, attempt, files("theirs"))
            with pytest.raises(queue.Empty):
                await asyncio.to_thread(reception.callers.get, timeout=0.2)
        use("ours")
        answers = asyncio.ensure_future(answering(reception, "tls://x:1"))
        assert await asyncio.wait_for(ask_for_loop(address, FIRST, print), 10) == "tls://x:1"
        await answers
        reception.close()

    asyncio.run(run())


@pytest.mark.parametrize("count", [64, 300])
@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_silent_strangers_keep_no_controller_out(tmp_path, monkeypatch, scheme, count):
    """However long each may be silent."""
    monkeypatch.setattr(reception_module, "_CLAIM_SECONDS", 600.0)
    files = None
    if scheme == "tls":
        make_certificates(tmp_path, ["127.0.0.1"])
        files = tuple(str(tmp_path / file.format(name="127.0.0.1")) for file in VARIABLES.values())
        for name, path in zip(VARIABLES, files, strict=True):
            monkeypatch.setenv(name, path)

    async def run() -> None:
        address = local(scheme)
        reception = ClaimListener(address, files)
        silent = [await asyncio.open_connection(address.host, address.port) for _ in range(count)]
        answers = asyncio.ensure_future(answering(reception, "there"))
        assert await asyncio.wait_for(ask_for_loop(address, FIRST, print), 60) == "there"
        await answers
        await eventually(lambda: sum(reader.at_eof() for reader, _ in silent) >= count - MOST, "the oldest's end", 60)
        await eventually(lambda: num_threads("stranger") <= MOST, "the end of their threads", 60)
        for _, writer in silent:
            writer.close()
        reception.close()

    asyncio.run(run())


def test_one_who_finds_no_descriptor_left_waits_and_nobody_is_deaf_afterwards(monkeypatch):
    """What ``accept`` says of a full table passes."""

    class Full(socket.socket):
        left = 3

        def accept(self):
            if Full.left:
                Full.left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    def listen(address, **how):
        listener = real(address, **how)
        return Full(listener.family, listener.type, listener.proto, fileno=listener.detach())

    real = socket.create_server
    monkeypatch.setattr(socket, "create_server", listen)

    async def run() -> None:
        address = local("tcp")
        reception = ClaimListener(address, None)
        answers = asyncio.ensure_future(answering(reception, "there"))
        assert await asyncio.wait_for(ask_for_loop(address, FIRST, print), 60) == "there" and not Full.left
        await answers
        reception.close()

    asyncio.run(run())


async def stranger(address, attempt: str, files: tuple) -> None:
    """Says what a controller would say, and wants an answer."""
    context = None
    if attempt != "plain":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if attempt == "theirs":
            context.load_cert_chain(files[0], files[1])
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    try:
        writer.write(json.dumps(vars(FIRST)).encode() + b"\n")
        await writer.drain()
        if not await asyncio.wait_for(reader.read(1), 2):
            raise EOFError
    finally:
        writer.close()
