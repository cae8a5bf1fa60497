"""Hosts of other machines, without any: what is refused, who goes where, what is carried, how long a lease lasts."""

import asyncio
import json
import os
import pickle
import socket
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_rl.config.io.overrides import parse_overrides
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.plugins import resolve as resolve_plugin
from titan_rl.config.sections.hosts import HostsConfig, hosts_of, parse_address
from titan_rl.controller.preflight.host_checks import check_hosts, paths_on_hosts
from titan_rl.data.storage.folders import manifest_of, read_part, remove_files, write_part
from titan_rl.mesh.channel.batches import StagedRows, pull_rows
from titan_rl.mesh.control.trainer_snapshots import can_map
from titan_rl.mesh.hosts.agent import Heartbeat, Lease
from titan_rl.mesh.hosts.command import checked_address
from titan_rl.mesh.hosts.host_files import WrongFiles, bring, fetch
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.hosts.hosts import Host
from titan_rl.mesh.hosts.remote_hosts import HostNeeds, NoHosts, RemoteHosts
from titan_rl.mesh.hosts.remote_processes import RemoteProcesses
from titan_rl.mesh.launch.base import make_host_launcher
from titan_rl.mesh.launch.claims import ClaimSuperseded
from titan_rl.mesh.resources.certificates import make_certificates, use_certificates
from titan_rl.mesh.resources.cores import Crew
from titan_rl.mesh.resources.network import HOST_ADDRESS, address_for, has_address, interface_of, own_address
from titan_rl.mesh.resources.rendezvous import open_store, store_at
from titan_rl.mesh.supervision.abort_collectives import hang_up
from titan_rl.mesh.supervision.actor_process import ActorDied
from titan_rl.mesh.supervision.calls import call
from titan_rl.mesh.supervision.remote_call import RemoteCall
from titan_rl.mesh.supervision.run_files import collect
from titan_rl.records.run_directory.controller_epochs import next_epoch

TWO = '["tls://A:26600", "tls://B:26600"]'


@pytest.mark.parametrize(
    "text", ["A:1", "http://A:1", "tls://A", "tls://A:x", "tls://A:70000", "tls://A:1/x", "tls://u@A:1"]
)
def test_what_is_no_address(text):
    with pytest.raises(ValueError, match="tls://NAME:PORT"):
        parse_address(text)


def test_an_address_keeps_its_name_as_it_is_written():
    assert parse_address("tls://Node-A:26600") == ("tls", "Node-A", 26600)
    assert parse_address("tcp://[fe80::1]:1").host == "fe80::1"
    assert str(checked_address("tls://:26600", insecure=False)) == f"tls://{socket.gethostname()}:26600"


def test_plain_tcp_is_refused_unless_it_is_asked_for_by_name():
    with pytest.raises(ConfigError, match="runs code as its owner.*--insecure"):
        checked_address("tcp://A:26600", insecure=False)
    assert checked_address("tcp://A:26600", insecure=True).scheme == "tcp"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"launcher": "slrum"}, ("hosts.launcher", "unknown")),
        ({"launcher": "attach"}, ("nothing to attach to", "titan-rl host")),
        ({"launcher": "attach", "addresses": '["tcp://A:1"]'}, ("hosts.insecure = true",)),
        ({"launcher": "attach", "addresses": TWO, "insecure": "true"}, ("hosts.insecure", "leave it out")),
        ({"launcher": "attach", "addresses": '["tls://:1"]'}, ("hosts.addresses", "NAME")),
        ({"launcher": "attach", "addresses": '["tls://A:1", "tls://A:1"]'}, ("twice",)),
        ({"launcher": "attach", "addresses": TWO, "labels": '["a", "b", "c"]'}, ("hosts.labels", "2 hosts")),
        ({"launcher": "attach", "addresses": TWO, "trainer": "[2]"}, ("hosts.trainer", "0 to 1")),
        ({"launcher": "attach", "addresses": TWO, "verifier": '["gpu"]'}, ("hosts.verifier", "'gpu'")),
        ({"launcher": "attach", "addresses": TWO, "silence": "1"}, ("hosts.silence",)),
        ({"launcher": "attach", "addresses": TWO, "mesh.worker_loops": "2"}, ("mesh.worker_loops",)),
        ({"launcher": "attach", "addresses": TWO, "mesh.transport": "shared_memory"}, ("mesh.transport",)),
        ({"launcher": "attach", "addresses": TWO, "gpus": "8"}, ("hosts.gpus", "hosts.gpu_memory_gib", "together")),
        ({"launcher": "attach", "addresses": TWO}, ("certificates", "--make-certificates")),
    ],
)
def test_a_mistake_is_one_line_with_the_mend(settings, said, monkeypatch):
    monkeypatch.delenv("HYPERACTOR_TLS_CERT", raising=False)
    names = {key if "." in key else f"hosts.{key}": value for key, value in settings.items()}
    config = load_config(None, parse_overrides([f"--{key}={value}" for key, value in names.items()]))
    with pytest.raises(ConfigError) as error:
        check_hosts(config)
    assert all(words in str(error.value) for words in said) and "\n" not in str(error.value)


def test_a_run_without_hosts_has_no_launcher():
    assert check_hosts(load_config(None)) is None and make_host_launcher(HostsConfig(), []) is None


def test_a_host_that_was_lost_is_looked_for_until_it_listens_again():
    from titan_rl.mesh.launch.base import HostOrder

    async def run():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        address = f"tls://127.0.0.1:{port}"
        launcher = make_host_launcher(HostsConfig(launcher="attach", addresses=[address], controller="ctl"), [])
        assert launcher.count == 1 and launcher.rendezvous() == "tls://ctl:0"
        assert await launcher.start(HostOrder(0, 0)) == address, "at first it may come up a moment later"
        looking = asyncio.ensure_future(launcher.start(HostOrder(0, 1)))
        await asyncio.sleep(0.1)
        assert not looking.done()
        with socket.create_server(("127.0.0.1", port)):
            assert await asyncio.wait_for(looking, 60) == address

    asyncio.run(run())


# certificates


def test_keys_are_their_user_s_alone_and_an_authority_is_kept(tmp_path):
    from cryptography import x509

    make_certificates(tmp_path / "c", ["A", "10.0.0.7"])
    authority = (tmp_path / "c" / "ca.pem").read_bytes()
    make_certificates(tmp_path / "c", ["B"])
    keys = sorted((tmp_path / "c").glob("*.key"))
    assert [key.name for key in keys] == ["10.0.0.7.key", "A.key", "B.key", "ca.key"]
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert (tmp_path / "c" / "ca.pem").read_bytes() == authority
    signed_by = x509.load_pem_x509_certificate(authority)
    for name in ("A", "B", "10.0.0.7"):
        x509.load_pem_x509_certificate((tmp_path / "c" / f"{name}.pem").read_bytes()).verify_directly_issued_by(
            signed_by
        )


def test_certificates_are_looked_at_before_anything_starts(tmp_path):
    make_certificates(tmp_path, ["A"])
    found: dict[str, str] = {}
    use_certificates(str(tmp_path), "A", found, "x")
    assert found["HYPERACTOR_TLS_KEY"] == str(tmp_path / "A.key") and len(found) == 3
    with pytest.raises(ConfigError, match="B.pem cannot be read"):
        use_certificates(str(tmp_path), "B", {}, "x")
    (tmp_path / "A.key").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        use_certificates("", "A", found, "x")


@pytest.mark.parametrize("name", ["a/b", "", "Ä"])
def test_what_is_no_name_of_a_host(name, tmp_path):
    with pytest.raises(ConfigError, match="no name of a host"):
        make_certificates(tmp_path, [name])


# who goes where


def test_hosts_are_named_by_number_or_label_and_all_are_meant_where_none_is():
    settings = HostsConfig(labels=["big", "big", "small"], trainer=["big"], generator=[2, "big"])
    assert hosts_of(settings, "trainer", 4) == {0, 1} == hosts_of(settings, "critic", 4)
    assert hosts_of(settings, "generator", 4) == {0, 1, 2} and hosts_of(settings, "verifier", 4) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("kind", "cores", "here", "alternating", "threads"),
    [
        ("trainer", 8, {"trainer": 2}, True, 4),
        ("trainer", 8, {"trainer": 2, "generator": 1}, True, 4),
        ("trainer", 8, {"trainer": 2, "generator": 1}, False, 2),
        ("generator", 8, {"trainer": 2, "generator": 1}, False, 4),
        ("generator", 8, {"generator": 1}, False, 8),
        ("trainer", 8, {}, True, 8),
        ("critic", 1, {"trainer": 4}, True, 1),
        ("verifier", 8, {"trainer": 1}, True, None),
    ],
)
def test_threads_are_shared_by_what_is_on_the_host(kind, cores, here, alternating, threads):
    assert Crew({"trainer": 2, "generator": 1}, alternating).threads(kind, cores, here) == threads


def remote(**facts) -> Host:
    return Host("host 0 (A)", None, facts=SimpleNamespace(**facts))


def test_snapshots_are_kept_where_memory_can_be_mapped():
    async def run():
        here, loop, there, elsewhere = Host("controller", None), Host("host 0", None), remote(), remote()
        assert can_map(here, loop) and can_map(there, there)
        assert not can_map(there, elsewhere) and not can_map(here, there)

    asyncio.run(run())


def at_a_host(*arguments):
    """What an endpoint gets there of these arguments, the last of them by its name."""

    async def run():
        got = []

        async def call_one(*positional, last):
            got.extend(pickle.loads(pickle.dumps([*positional, last])))

        paths = {"runs/x": "/tmp/s/run", "/models/m": "/tmp/s/model"}
        process = SimpleNamespace(
            host=Host("host 0", None, paths=paths),
            actor=SimpleNamespace(do=SimpleNamespace(call_one=call_one)),
            is_dead=False,
            died=asyncio.get_running_loop().create_future(),
            wakes=set(),
        )
        *positional, last = arguments
        await call(process, RemoteCall("do", tuple(positional), {"last": last}), seconds=5, what="working")
        return got

    return asyncio.run(run())


def test_paths_below_the_run_directory_are_others_on_a_host():
    paths = "runs/x", "runs/x/checkpoints/writing-1", "/models/m", "/models/mm"
    there = at_a_host(*map(HostPath, paths))
    assert there == ["/tmp/s/run", "/tmp/s/run/checkpoints/writing-1", "/tmp/s/model", "/models/mm"]
    assert {type(path) for path in there} == {str}


def test_text_that_begins_like_a_path_of_the_run_arrives_as_it_is():
    """A prompt, say, or an answer."""
    texts = "runs/x/notes.txt holds what?", "runs/x", "/models/m/config.json", 7
    assert at_a_host(*texts) == list(texts)


# what is done to processes there


class FakeAgent:
    """Endpoints as plain coroutines."""

    def __init__(self, **endpoints):
        for name, work in endpoints.items():
            setattr(self, name, SimpleNamespace(call_one=work))


def test_a_process_is_signalled_on_its_host_and_its_death_is_told_by_that():
    async def run():
        sent, over, ended = [], asyncio.Event(), []

        async def gone(pid):
            await over.wait()

        async def send(pids, number):
            sent.append((pids, number))

        processes = RemoteProcesses(FakeAgent(gone=gone, signal=send))
        processes.watch(os.getpid(), lambda: ended.append("one"))
        processes.signal([os.getpid()], 9)  # this test's own process here
        await asyncio.sleep(0.01)
        assert sent == [([os.getpid()], 9)] and not ended
        over.set()
        await asyncio.sleep(0.01)
        assert ended == ["one"]

    asyncio.run(run())


def test_on_a_host_that_is_lost_nothing_lives_any_more():
    async def run():
        ended = []

        async def never(*_):
            await asyncio.Event().wait()

        processes = RemoteProcesses(FakeAgent(gone=never, signal=never))
        processes.watch(7, lambda: ended.append(7))
        processes.is_lost = True
        processes.signal([7], 9)
        processes.watch(8, lambda: ended.append(8))
        assert ended == [7, 8] and processes.is_gone(9)

    asyncio.run(run())


def test_a_lease_ends_by_the_time_at_which_word_was_sent():
    lease = Lease(10.0)
    lease.renew(sent=100.0, now=5.0)  # clocks of two machines have nothing to do with each other
    assert not lease.is_over(15.0) and lease.is_over(15.1)
    lease.renew(sent=102.0, now=14.0)  # it was on its way for seven seconds more than the first
    assert not lease.is_over(17.0) and lease.is_over(17.1)


# rendezvous and what passes between hosts


def test_a_store_listens_at_one_address_alone():
    held, place = open_store("127.0.0.1")
    port = int(place.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A"]
    assert f"0100007F:{port:04X}" in listening and f"00000000:{port:04X}" not in listening
    store_at(f"{place}/trainer1", 2, 10.0).set("key", "one")
    assert store_at(f"{place}/trainer1", 2, 10.0).get("key") == b"one"
    assert not store_at(f"{place}/trainer2", 2, 10.0).check(["key"]), "another meeting"
    del held


def test_only_connections_to_the_lost_host_are_ended():
    ours = {}
    for address in ("127.0.0.1", "127.0.0.2"):
        server = socket.create_server((address, 0))
        ours[address] = socket.create_connection(server.getsockname()), server.accept()[0], server
    before = os.listdir("/proc/self/fd")
    hang_up("127.0.0.2")
    assert os.listdir("/proc/self/fd") == before, "none is left behind: one of a pipe would keep that open"
    ours["127.0.0.2"][0].settimeout(5)
    assert ours["127.0.0.2"][0].recv(1) == b"", "as if the peer had hung up"
    ours["127.0.0.1"][1].sendall(b"x")
    assert ours["127.0.0.1"][0].recv(1) == b"x"
    for sockets in ours.values():
        for each in sockets:
            each.close()


def test_the_way_to_another_host_is_by_an_interface():
    assert (
        own_address("127.0.0.1") == "127.0.0.1" and interface_of("127.0.0.1") == "lo" and interface_of("1.2.3.4") == ""
    )


def test_each_host_is_told_at_which_address_others_reach_it(monkeypatch):
    """Its processes by their environment, and the controller for as long as the run lasts; who was told keeps it."""

    async def run():
        needs = HostNeeds(None, Path("model"), Crew({"trainer": 1}, alternating=True))
        launcher = SimpleNamespace(count=0)
        hosts = RemoteHosts(launcher, HostsConfig(), needs, seconds=5.0, logs=None, log=print)
        await hosts.open()
        assert not has_address(), "a run on one host"
        facts = dict(address="127.0.0.2", mark={}, scratch="/tmp/s", cores=2, interface="")
        hosts._hosts[0] = there = Host(
            "host 0", None, facts=SimpleNamespace(**facts), agent=FakeAgent(end=lambda: asyncio.sleep(0))
        )
        assert hosts.environment(there, "trainer")[HOST_ADDRESS] == "127.0.0.2"
        await hosts.open()
        assert os.environ[HOST_ADDRESS] == own_address("127.0.0.2")
        await hosts.close()
        assert not has_address()
        monkeypatch.setenv(HOST_ADDRESS, "10.0.0.7")
        await hosts.open()
        await hosts.close()
        assert os.environ[HOST_ADDRESS] == "10.0.0.7"

    monkeypatch.delenv(HOST_ADDRESS, raising=False)
    asyncio.run(run())


def test_a_loopback_is_not_what_other_machines_reach(monkeypatch):
    monkeypatch.delenv(HOST_ADDRESS, raising=False)
    monkeypatch.setattr("titan_rl.mesh.resources.network.own_address", lambda other: other)
    assert address_for(["127.0.1.1", "10.0.0.2", "10.0.0.3"]) == "10.0.0.2"
    assert address_for(["127.0.1.1"]) == "127.0.1.1"


def test_rows_of_another_host_are_not_looked_for_in_this_one_s_memory():
    with StagedRows([[1, 2]], over_rdma=False) as [handle]:
        assert pull_rows(handle, 5.0) == [1, 2]
        elsewhere = type(handle)(**{**vars(handle), "host": "another"})
        with pytest.raises(ValueError, match="another host's memory"):
            pull_rows(elsewhere, 5.0)


def agent_of(scratch) -> FakeAgent:
    async def manifest(folder):
        return manifest_of(scratch / folder)

    async def read(path, offset, nbytes):
        return read_part(scratch / path, offset, nbytes)

    async def write(path, offset, data):
        agent.written.append(path)
        write_part(scratch / path, offset, data)

    agent = FakeAgent(manifest=manifest, read=read, write=write)
    agent.written = []
    return agent


def test_a_folder_travels_once_and_is_compared_by_checksums(tmp_path, monkeypatch):
    monkeypatch.setattr("titan_rl.mesh.hosts.host_files.PART_BYTES", 4)
    here, agent = tmp_path / "here", agent_of(tmp_path / "there")
    (here / "deep").mkdir(parents=True)
    (here / "deep" / "a").write_bytes(b"0123456789")
    (here / "empty").touch()
    asyncio.run(bring(agent, here, "m"))
    assert manifest_of(tmp_path / "there" / "m") == manifest_of(here) and agent.written.count("m/deep/a") == 3
    agent.written.clear()
    asyncio.run(bring(agent, here, "m"))
    assert not agent.written
    (here / "deep" / "a").write_bytes(b"0123456780")
    asyncio.run(bring(agent, here, "m"))
    assert set(agent.written) == {"m/deep/a"}
    asyncio.run(fetch(agent, "m", tmp_path / "back", leaving="empty"))
    assert [path.name for path in (tmp_path / "back").rglob("*") if path.is_file()] == ["a"]


def test_a_host_cannot_write_where_it_likes(tmp_path):
    async def manifest(folder):
        return {"../evil": (1, "x")}

    with pytest.raises(WrongFiles, match="outside"):
        asyncio.run(
            fetch(FakeAgent(manifest=manifest, read=lambda *_: asyncio.sleep(0, b"x")), "m", tmp_path, leaving="-")
        )


def test_what_was_collected_is_removed_but_for_what_is_in_the_making(tmp_path):
    for name in ("model/a", "checkpoints/writing-1/b"):
        write_part(tmp_path / name, 0, b"x")
    remove_files(tmp_path, "checkpoints/")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["b"]


# what comes from a host that was lost is nobody's


def lost_host(scratch: Path, **endpoints) -> Host:
    facts = SimpleNamespace(scratch=str(scratch), logs=f"{scratch}/logs", name="A", address="10.0.0.2")
    host = Host("host 0 (A)", None, facts=facts, agent=FakeAgent(**endpoints), number=0)
    host.processes = RemoteProcesses(host.agent)
    return host


def test_what_it_prints_is_not_written_down(tmp_path):
    async def run():
        asked, answer = asyncio.Event(), asyncio.Event()

        async def beat(sent):
            asked.set()
            await answer.wait()
            return Heartbeat(frozenset({7}), {"trainer_rank_0.txt": b"stale"})

        async def until_asked(number):
            await asyncio.Event().wait()

        launcher = SimpleNamespace(count=0, kill=until_asked, watch=until_asked)
        needs = HostNeeds(None, Path("model"), Crew({"trainer": 1}, alternating=True))
        hosts = RemoteHosts(launcher, HostsConfig(), needs, seconds=5.0, logs=str(tmp_path), log=print)
        hosts.register(lambda host: None, lambda host: None)
        for is_lost in (False, True):
            host = lost_host(tmp_path, beat=beat, end=lambda: asyncio.sleep(0))
            asked.clear(), answer.clear()
            beating = asyncio.ensure_future(hosts._beat(0, host))
            await asked.wait()
            if is_lost:
                hosts._lose(0, host, "the launcher says so")
            answer.set()
            await asyncio.sleep(0.1)
            assert bool(host.processes.stopped) is not is_lost
            assert (tmp_path / "trainer_rank_0.txt").read_bytes() == b"stale", "once, when it was none"
            beating.cancel()
        await hosts.close()

    asyncio.run(run())


def test_its_files_do_not_come_into_the_run_directory(tmp_path):
    """Neither those that it names afterwards, nor the rest of one that is on its way."""

    async def run():
        asked, answer = asyncio.Event(), asyncio.Event()

        async def manifest(folder):
            return {"model.safetensors": (1, "sum")}

        async def read(path, offset, nbytes):
            asked.set()
            await answer.wait()
            return b"x"

        host = lost_host(tmp_path, manifest=manifest, read=read)
        process = SimpleNamespace(host=host, name="trainer rank 0", why="died")
        collecting = asyncio.ensure_future(collect([process], HostPath(tmp_path / "run")))
        await asked.wait()
        host.died.set_result(None)
        with pytest.raises(ActorDied):
            await collecting
        answer.set()
        await asyncio.sleep(0.1)
        assert not (tmp_path / "run").exists()

    asyncio.run(run())


def test_a_controller_whose_run_has_gone_on_elsewhere_ends(monkeypatch):
    async def run():
        async def kill(number):
            pass

        async def start(order):
            return "tls://A:1"

        async def refused(address, claim, say):
            claims.append(claim)
            raise ClaimSuperseded("a later controller")

        monkeypatch.setattr("titan_rl.mesh.hosts.remote_hosts.ask_for_loop", refused)
        claims, over, ended = [], [], asyncio.Event()
        launcher = SimpleNamespace(count=1, kill=kill, start=start)
        needs = HostNeeds(None, Path("model"), Crew({}, alternating=True), run="r", epoch=3)
        options = dict(seconds=5.0, logs=None, log=print, on_lost=lambda why: (over.append(why), ended.set()))
        hosts = RemoteHosts(launcher, HostsConfig(), needs, **options)
        hosts.register(lambda host: None, lambda host: None)
        hosts._lose(0, lost_host(Path("/x"), end=lambda: asyncio.sleep(0)), "its agent died")
        await asyncio.wait_for(ended.wait(), 5)
        assert over == ["a later controller"] and (claims[0].run, claims[0].epoch) == ("r", 3)
        await hosts.close()

    asyncio.run(run())


def test_a_run_without_a_host_waits_for_one_as_long_as_one_may_take():
    async def run():
        needs = HostNeeds(None, Path("model"), Crew({}, alternating=True))
        hosts = RemoteHosts(SimpleNamespace(count=1), HostsConfig(), needs, seconds=0.3, logs=None, log=print)
        with pytest.raises(NoHosts):
            await hosts.choose("verifier")
        waiting = asyncio.ensure_future(hosts.choose("verifier"))
        await asyncio.sleep(0.05)
        hosts._hosts[0] = lost_host(Path("/x"))
        hosts._came.set()
        await waiting

    asyncio.run(run())


# epochs, and what must be on every host


def test_each_controller_of_a_run_has_an_epoch_of_its_own(tmp_path):
    file = tmp_path / "epoch.json"
    run, epoch = next_epoch(file)
    assert epoch == 0 and next_epoch(file) == (run, 1) and next_epoch(file) == (run, 2)
    assert next_epoch(tmp_path / "other.json")[0] != run


@pytest.mark.parametrize("text", ["", "[]", '{"run": "x", "epoch": 0}', '{"run": 7}', "[" * 9999])
def test_an_epoch_that_is_damaged_is_refused(tmp_path, text):
    (tmp_path / "epoch.json").write_text(text)
    with pytest.raises(ConfigError, match="epoch.json is damaged"):
        next_epoch(tmp_path / "epoch.json")


def test_paths_that_must_be_on_every_host(tmp_path):
    (tmp_path / "my_own_reward.py").write_text("def reward(prompt, completion, row):\n    return 1.0\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    asked = [
        "--run.plugin_path",
        json.dumps([str(tmp_path)]),
        "--task.name",
        "jsonl",
        "--task.reward",
        "my_own_reward:reward",
    ]
    asked += ["--task.options.file", "rows.jsonl"]
    config = load_config(None, parse_overrides(asked))
    config.reference.path, config.teacher.path = "/models/one", config.model.path
    resolve_plugin("task.reward", "my_own_reward:reward", [str(tmp_path)])
    wanted = ["/models/one", str(tmp_path / "rows.jsonl"), str(tmp_path / "my_own_reward.py")]
    assert paths_on_hosts(config) == wanted, "and not what is brought: the model"
