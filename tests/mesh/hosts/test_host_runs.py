"""A run over hosts that share nothing but a wire and lose their power in turn; and who else may come in.

One run: the machine of its controller is off, and another goes on with it from the same directory. Then the machine of
its generator and verifier is off, and comes back; then that of a trainer rank, to which the generator had gone. What a
stranger without certificates can get of it, and another user of a host, is tried meanwhile.
"""

import json
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import host_runs
import machines
import pytest
import running
from tree import SUPPORT, TREE

from titan_rl.mesh.resources.network import HOST_ADDRESS
from titan_rl.records.metrics import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(why := machines.why_not()), reason=why or "they can be made"),
]
HOSTS = ("A", "B", "C")
SETTINGS = dict(
    sft__steps=5,
    parallelism__data_parallel_shard_degree=2,
    checkpoint__every=8,
    rollout__prompts_per_step=8,
    eval__prompts=8,
)
PLACED = dict(hosts__trainer="[0, 1]", hosts__generator="[2]", hosts__verifier="[2]")
ENGINE = dict(generator__tensor_parallel=2)
"""Two ranks, on one host."""
NOBODY, ROOT = "65534", "0"


def strangers_get(cluster: machines.Machines, *addresses: str) -> list[str]:
    """What a process on a host without certificates gets at these addresses."""
    command = [sys.executable, str(SUPPORT / "hosts" / "outsider.py"), *addresses]
    stranger = cluster.start("X", *command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    said, _ = stranger.communicate(timeout=60)
    return [line.split(": ", 1)[1] for line in said.splitlines()]


def told(cluster: machines.Machines, name: str) -> list[tuple[str, str]]:
    """Of each process on a host that knows where others reach it: that address, and the certificate that it shows."""
    found = []
    for pid in cluster.processes(name):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/environ").read_text().split("\0")
            known = dict(field.split("=", 1) for field in fields if "=" in field)
            if HOST_ADDRESS in known:
                found.append((known[HOST_ADDRESS], known.get("HYPERACTOR_TLS_CERT", "")))
    return found


def ports(cluster: machines.Machines, name: str) -> list[str]:
    """Addresses at which something listens on a host, for others."""
    rows = [line.split() for line in Path(f"/proc/{cluster.first(name)}/net/tcp").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return [f"tls://{name}:{int(port, 16)}" for address, port in places if address != "0100007F"]


def user_gets(cluster: machines.Machines, name: str, user: str) -> set[str]:
    """What a user of a host gets of the run: the first word of each thing."""
    command = [sys.executable, str(SUPPORT / "hosts" / "intruder.py"), user, str(TREE), sys.prefix, sys.base_prefix]
    said, _ = cluster.start(name, *command, stdout=subprocess.PIPE, text=True).communicate(timeout=host_runs.SECONDS)
    return set(said.splitlines())


def without_its_data(run: host_runs.OverHosts) -> tuple[int, str]:
    """Another run over two of the hosts, whose rows are on the controller's machine alone: how it ends."""
    rows = [json.dumps({"question": f"{number}+1=", "answer": str(number + 1)}) for number in range(64)]
    run.cluster.path("other", "/tmp/rows.jsonl").write_text("\n".join(rows) + "\n")
    asked = dict(task__name="jsonl", task__options__file="/tmp/rows.jsonl", eval__prompts=8)
    settings = {name: value for name, value in running.SMALL.items() if not name.startswith("task.")}
    addresses = json.dumps([f"tls://{name}:{host_runs.PORT}" for name in run.alive])
    files = dict(hosts__launcher="attach", hosts__addresses=addresses)
    given = settings | asked | files | dict(hosts__controller="other", hosts__certificates=run.certificates)
    parts = [
        part
        for key, value in given.items()
        for part in (f"--{key.replace('__', '.')}", value if isinstance(value, str) else str(value).lower())
    ]
    command = [*host_runs.PYTHON, "train", "--run.dir", str(run.out / "refused"), *parts]
    ended = run.cluster.start("other", *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said, _ = ended.communicate(timeout=host_runs.SECONDS)
    return ended.returncode, said


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("hosts")
    # a process has one thread then, as in the run on one core: on some CPUs MKL's sums depend on how many there are
    with machines.Machines("ctl", "other", *HOSTS, "X", folder=out, one_core_each=True) as cluster:
        run = host_runs.OverHosts(cluster, out, HOSTS, ("ctl", "other"))
        run.wait_until_hosts_listen()
        run.idle = {name: ports(cluster, name) for name in HOSTS}
        run.begin("ctl", training__steps=5000, **SETTINGS, **PLACED)
        run.wait_for_step(2)
        _let_others_try(run)
        run.seconds = {}
        _lose_controller(run)
        _lose_generator(run)
        _lose_trainer_rank(run)
        run.code = run.interrupt()
        run.alive = [name for name in HOSTS if name != run.lost]
        run.wait_until_idle(*run.alive)
        print({fault: round(seconds, 1) for fault, seconds in run.seconds.items()})
        run.left_over = {
            name: sorted(path.name for path in cluster.path(name, "/tmp").glob("titan_rl_*/*")) for name in run.alive
        }
        run.refused = without_its_data(run)
        run.codes = {name: run.end(name) for name in run.alive}
        run.left_at_last = {name: list(cluster.path(name, "/tmp").glob("titan_rl_*")) for name in run.alive}
        yield run


def _let_others_try(run: host_runs.OverHosts) -> None:
    run.told = {name: told(run.cluster, name) for name in HOSTS}
    run.users = {user: user_gets(run.cluster, "C", user) for user in (NOBODY, ROOT)}
    run.open = [address for address in ports(run.cluster, "A") if not address.endswith(":26600")]
    run.got = strangers_get(run.cluster, "tls://A:26600", "tcp://C:26600", *run.open)


def _lose_controller(run: host_runs.OverHosts) -> None:
    run.wait_for(lambda: any((run.root / "checkpoints").glob("step-*")))
    before = {name: host_runs.of_runs(run.cluster, name) for name in HOSTS}
    off = time.monotonic()
    run.cluster.off("ctl")
    run.controller.wait(60)
    step = max(host_runs.losses(run.root))
    run.begin("other", "--resume", training__steps=5000, **SETTINGS, **PLACED)
    run.wait_for_step(step + 1)
    run.seconds["controller"] = time.monotonic() - off
    run.left_by_controller = {name: host_runs.of_runs(run.cluster, name) & before[name] for name in HOSTS}


def _whole_after(run: host_runs.OverHosts, fault: str, count: int) -> None:
    """The generator has been brought back so often, and a step was done since."""
    off = time.monotonic()
    run.wait_for(lambda: len(run.events("generator_serves")) == count)
    run.wait_for_step(max(host_runs.losses(run.root)) + 1)
    run.seconds[fault] = time.monotonic() - off


def _lose_generator(run: host_runs.OverHosts) -> None:
    run.cluster.off("C")
    _whole_after(run, "generator and verifier", 1)
    run.cluster.on("C")
    run.serve("C")
    run.seconds["booted, joined"] = run.wait_for(lambda: len(run.events("started", name="host 2 (C)")) == 3)


def hosts_of_the_generator(run: host_runs.OverHosts) -> list[str]:
    """One after the other."""
    return [event["host"] for event in run.events("started", name="generator 0")]


def _lose_trainer_rank(run: host_runs.OverHosts) -> None:
    """The generator is there, too, by now: it goes to its own host again."""
    run.lost = {"host 0 (A)": "A", "host 1 (B)": "B"}[hosts_of_the_generator(run)[-1]]
    run.cluster.off(run.lost)
    _whole_after(run, "trainer rank and generator", 2)


def test_the_run_goes_on_whatever_host_is_lost(run):
    assert run.code == 130, run.said("other")[-3000:]
    lost = {f"host {HOSTS.index(name)} ({name})" for name in (run.lost, "C")}
    assert {event["name"] for event in run.events("died")} >= lost, "the faults have happened"
    last = max(host_runs.losses(run.root))
    assert sorted(host_runs.losses(run.root)) == list(range(1, last + 1))


def test_it_learns_what_it_learns_on_one_host(run, tmp_path):
    steps = max(host_runs.losses(run.root))
    settings = SETTINGS | dict(training__steps=steps)
    assert running.train(tmp_path / "one", on_one_core=True, **settings) == 0, running.output(tmp_path / "one")[-3000:]
    assert host_runs.losses(run.root) == host_runs.losses(tmp_path / "one"), "bit for bit, also what was done again"
    over_hosts, alone = ledger(run.root), ledger(tmp_path / "one")
    assert over_hosts["trained"] == alone["trained"] == alone["issued"], "nothing is lost or trained twice"
    assert over_hosts["issued"] == over_hosts["trained"] + over_hosts["pending"], "Ctrl-C left a batch that was begun"
    for name in (f"checkpoints/step-{steps:06}", "model"):
        assert files(run.root / name) == files(tmp_path / "one" / name), "carried from the hosts"


def test_when_the_new_controller_goes_on_the_old_one_s_processes_are_gone(run):
    assert run.left_by_controller == {name: set() for name in HOSTS}


def test_a_host_that_has_booted_anew_gets_work_in_the_same_run(run):
    hosts = hosts_of_the_generator(run)
    assert hosts[-1] == "host 2 (C)" != hosts[-2], hosts


@pytest.mark.waits
def test_a_slow_link_that_loses_packets_costs_time_and_nothing_else(tmp_path):
    """By adapters, which travel alone between hosts."""
    link, hosts = machines.Link(delay=0.05, loss=0.01), HOSTS[:2]
    placed = dict(hosts__trainer="[0, 1]", hosts__generator="[1]", hosts__verifier="[0]")
    with machines.Machines("ctl", *hosts, folder=tmp_path, link=link) as cluster:
        run = host_runs.OverHosts(cluster, tmp_path, hosts, ("ctl",))
        run.wait_until_hosts_listen()
        settings = SETTINGS | placed | dict(sft__steps=1, training__steps=2, lora__rank=4)
        code = run.begin("ctl", **settings).wait(2 * host_runs.SECONDS)
        assert code == 0, run.said("ctl")[-3000:]
        assert not run.events("died"), "nothing is taken for dead"
        assert sorted(host_runs.losses(run.root)) == [1, 2]
        seconds = [row["seconds_step"] for row in read_metrics(run.root) if "seconds_step" in row]
        model = (run.root / "model" / "model.safetensors").stat().st_size
        [*_, sent] = synced(run.root)
        assert 0 < sent < 0.2 * model
        print(f"a step over such links takes {statistics.median(seconds):.1f} s")


def test_weights_and_batches_travel_over_tcp_inside_the_run_s_tls(run):
    assert "weights by tcp (" in run.said("other"), run.said("other")[-3000:]
    for name in HOSTS:
        mine = run.cluster.address(name), str(Path(run.certificates, f"{name}.pem"))
        assert run.told[name] and set(run.told[name]) == {mine}
    assert all(synced(run.root)) and synced(run.root)


def synced(root: Path) -> list[float]:
    """Bytes of each version that came from trainers."""
    return [row["weight_bytes_from_trainers"] for row in read_metrics(root) if "weight_bytes_from_trainers" in row]


def ledger(root: Path) -> dict:
    return json.loads((root / "summary.json").read_text())["samples"]


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_of_a_run_nothing_is_left_on_hosts_which_wait_for_the_next_one(run):
    servers = ["generator", "trainer", "verifier"]
    assert run.left_over == dict.fromkeys(run.alive, servers), "where fork servers listen"
    assert run.codes == dict.fromkeys(run.alive, 143) and run.left_at_last == dict.fromkeys(run.alive, [])


def test_a_host_that_waits_has_one_port_open(run):
    assert run.idle == {name: [f"tls://{name}:26600"] for name in HOSTS}


def test_what_is_not_on_every_host_is_a_mistake_before_any_actor_starts(run):
    code, said = run.refused
    assert code == 2, said
    assert any(f"({name}) has no /tmp/rows.jsonl: put it there" in said for name in run.alive)
    assert "Traceback" not in said and "started" not in said
    events = (run.out / "refused" / "events.jsonl").read_text()
    assert "trainer" not in events and "generator" not in events


def test_another_user_of_a_host_gets_nothing(run):
    assert any("TITAN" not in thing and thing.startswith(("file", "environ")) for thing in run.users[ROOT])
    assert {thing.split()[0] for thing in run.users[ROOT]} >= {"file", "environ", "mem", "fd", "socket"}
    assert run.users[NOBODY] == set()


def test_what_actors_print_is_in_the_run_directory(run):
    assert any(path.name.startswith("trainer_rank_1") for path in (run.root / "logs").iterdir())


def test_whoever_has_no_certificate_gets_nothing(run):
    assert len(run.open) > 2, "its worker loop's, and its processes'"
    assert run.got == ["TimeoutError"] * (2 + len(run.open))


def test_the_same_stranger_gets_in_where_tcp_was_asked_for_by_name(run, tmp_path):
    """So it is the certificates that kept him out."""
    address = f"tcp://{run.cluster.address('C')}:26700"
    command = [sys.executable, "-m", "titan_rl.cli", "host", address, "--insecure"]
    host = run.cluster.start("C", *command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert b"listening" in host.stdout.readline()
    assert strangers_get(run.cluster, address) == ["a process of user 0 on C"]
