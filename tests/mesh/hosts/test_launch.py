"""Launchers of hosts, and what ``titan-rl launch`` writes: no cluster is needed."""

import asyncio
import base64
import copy
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from fake_slurm import FakeSlurm
from manifest_checks import flaws
from waiting import eventually

from titan_rl.cli import main
from titan_rl.config.io.overrides import parse_overrides
from titan_rl.config.sections.hosts import HostsConfig
from titan_rl.controller.launching.kubernetes import dns_name
from titan_rl.mesh.launch.base import HostOrder, HostUnavailable, make_host_launcher
from titan_rl.mesh.launch.kubernetes.options import kubernetes_options
from titan_rl.mesh.launch.kubernetes.pods import CERTIFICATES, TAKE_CERTIFICATES
from titan_rl.mesh.launch.resumable import resumable
from titan_rl.mesh.launch.slurm.commands import JobState, job_environment, parse_jobs
from titan_rl.mesh.launch.slurm.script import FIRST_PORT, NUM_PORTS, port_of
from titan_rl.mesh.resources.certificates import complete, make_certificates, use_certificates


def slurm_settings(folder: Path, **more) -> HostsConfig:
    options = {"folder": str(folder), "name": "r"} | more.pop("options", {})
    return HostsConfig(launcher="slurm", count=2, controller="ctl", certificates=str(folder), options=options, **more)


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> FakeSlurm:
    async def listens(address):
        assert address.port == port_of(int(address.host.removeprefix("node")))

    monkeypatch.setattr("titan_rl.mesh.launch.slurm.launcher.until_it_listens", listens)
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


# Slurm's jobs


def test_a_host_is_a_job_and_its_address_follows_from_both(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1")
    monkeypatch.setenv("TITAN_RL_HOST_ADDRESS", "10.0.0.1")
    options = {"partition": "gpu", "gpus": 4, "sbatch": ["--constraint=a100"], "setup": ["module load python"]}
    launcher = make_host_launcher(slurm_settings(tmp_path, options=options), [])
    assert launcher.count == 2 and launcher.rendezvous() == "tls://ctl:0"
    order = HostOrder(1, 0, {"GREETING": "hello"})
    assert asyncio.run(launcher.start(order)) == f"tls://node41:{port_of(41)}"
    script = slurm.read("script-41")
    for line in ("--nodes=1", "--no-requeue", "--job-name=r-host1", "--partition=gpu", "--gpus-per-node=4"):
        assert f"#SBATCH {line}\n" in script
    assert script.index("--constraint=a100") < script.index("module load python") < script.index("exec ")
    assert script == (tmp_path / "r-host1-0.sh").read_text(), "what was submitted is there to be read"
    given = slurm.read("environment-41")
    assert "GREETING=hello" in given, "and nothing of the job, or of the run, that this process is in"
    assert "SLURM_MEM_PER_NODE" not in given and "TITAN_RL_HOST_ADDRESS" not in given


def test_the_job_s_script_is_shell_and_finds_the_same_port(slurm, tmp_path):
    launcher = make_host_launcher(slurm_settings(tmp_path), [])
    asyncio.run(launcher.start(HostOrder(0, 0)))
    script = slurm.read("script-41").replace("exec ", "echo ")
    environment = os.environ | {"SLURM_JOB_ID": "41", "SLURMD_NODENAME": "node41"}
    said = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, check=True).stdout
    assert f" host tls://node41:{port_of(41)} --certificates {tmp_path} " in said


def test_no_two_jobs_share_a_port():
    ports = {port_of(job) for job in range(5_000_000, 5_000_000 + NUM_PORTS)}
    assert len(ports) == NUM_PORTS and min(ports) == FIRST_PORT and max(ports) < 32768


def test_what_waits_in_the_queue_is_waited_for(slurm, tmp_path):
    async def run():
        launcher = make_host_launcher(slurm_settings(tmp_path), [])
        slurm.mark("away")
        starting = asyncio.ensure_future(launcher.start(HostOrder(0, 0)))
        await eventually(lambda: slurm.read("looks"), "a look at the queue", seconds=10)
        slurm.set(41, "PENDING")
        slurm.mark("away", there=False)
        await asyncio.sleep(1.5)
        assert not starting.done(), "neither a silent server nor a queue ends it"
        slurm.set(41, "RUNNING", "node41")
        return await starting

    assert asyncio.run(run()).startswith("tls://node41:")


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"])
def test_a_job_that_has_ended_is_a_host_less(slurm, tmp_path, state):
    async def run():
        launcher = make_host_launcher(slurm_settings(tmp_path), [])
        await launcher.start(HostOrder(0, 0))
        watching = asyncio.ensure_future(launcher.watch(0))
        await asyncio.sleep(0.2)
        assert not watching.done()
        slurm.set(41, state, "node41")
        return await asyncio.wait_for(watching, 60)

    assert f"job 41 is {state}" in asyncio.run(run())


def test_a_job_that_never_ran_says_where_to_look(slurm, tmp_path):
    launcher = make_host_launcher(slurm_settings(tmp_path), [])
    sbatch = slurm.folder / "sbatch"
    sbatch.write_text(sbatch.read_text().replace("RUNNING|node$number", "FAILED|"))
    with pytest.raises(HostUnavailable, match=f"41 is FAILED.*{tmp_path}"):
        asyncio.run(launcher.start(HostOrder(0, 0)))
    slurm.mark("refuses")
    with pytest.raises(HostUnavailable, match="invalid partition"):
        asyncio.run(launcher.start(HostOrder(0, 1)))


def test_one_that_ends_before_it_listens_is_not_waited_for(slurm, tmp_path, monkeypatch):
    async def never(address):
        slurm.set(41, "FAILED", "node41")
        await asyncio.Event().wait()

    monkeypatch.setattr("titan_rl.mesh.launch.slurm.launcher.until_it_listens", never)
    launcher = make_host_launcher(slurm_settings(tmp_path), [])
    with pytest.raises(HostUnavailable, match="41 is FAILED"):
        asyncio.run(asyncio.wait_for(launcher.start(HostOrder(0, 0)), 60))


def test_jobs_of_an_earlier_controller_are_cancelled_first_and_its_own_at_the_end(slurm, tmp_path):
    async def run():
        launcher = make_host_launcher(slurm_settings(tmp_path), [])
        await launcher.start(HostOrder(0, 0))
        assert "--name=r-host0" in slurm.read("cancelled")
        await launcher.kill(0)
        await launcher.kill(0)
        await launcher.kill(1)
        assert await launcher.watch(0) == "it was given back"
        shutil.rmtree(slurm.folder)
        await launcher.kill(0)
        return launcher

    slurm_folder = slurm.folder
    asyncio.run(run())
    assert not slurm_folder.exists()


def test_who_is_not_waited_for_any_longer_leaves_the_queue(slurm, tmp_path):
    async def run():
        launcher = make_host_launcher(slurm_settings(tmp_path), [])
        sbatch = slurm.folder / "sbatch"
        sbatch.write_text(sbatch.read_text().replace("RUNNING|node$number", "PENDING|"))
        starting = asyncio.ensure_future(launcher.start(HostOrder(0, 0)))
        await eventually(lambda: slurm.read("looks"), "a look at the queue", seconds=10)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(run())
    assert slurm.read("cancelled").splitlines()[-1] == "41"


@pytest.mark.waits
def test_the_queue_is_looked_at_for_all_hosts_at_once(slurm, tmp_path):
    async def run():
        launcher = make_host_launcher(slurm_settings(tmp_path), [])
        await asyncio.gather(*(launcher.start(HostOrder(number, 0)) for number in range(2)))
        before = len(slurm.read("looks").splitlines())
        watching = [asyncio.ensure_future(launcher.watch(number)) for number in (0, 1) for _ in range(20)]
        await asyncio.sleep(2.5)
        assert len(slurm.read("looks").splitlines()) - before <= 4
        for each in watching:
            each.cancel()

    asyncio.run(run())


def test_what_squeue_says_is_read_line_by_line():
    said = "12|RUNNING|node1\n13|PENDING|\nslurm: something else\n14_2|RUNNING|n\n"
    assert parse_jobs(said) == {12: JobState("RUNNING", "node1"), 13: JobState("PENDING", "")}
    assert job_environment({"SLURM_CONF": "c", "SLURM_JOB_ID": "1", "HOME": "h"}) == {"SLURM_CONF": "c", "HOME": "h"}


# what starts a controller again


def test_the_first_start_begins_a_run_and_others_go_on_with_it(tmp_path):
    home = tmp_path / "a run"
    lines = resumable("echo", "my file.toml", ["--run.dir=x y"], str(home))

    def start() -> str:
        return subprocess.run(["sh", "-u"], input="\n".join(lines), capture_output=True, text=True, check=True).stdout

    assert start() == "train my file.toml --run.dir=x y\n"
    home.mkdir()
    (home / "lock").touch()
    (home / "config.json").touch()
    assert start() == "train my file.toml --run.dir=x y --resume\n"


# certificates


def test_a_machine_makes_its_own_where_the_authority_s_key_is(tmp_path):
    given = tmp_path / "given"
    make_certificates(given, ["A"])
    assert complete(str(given), "A", aside=True) == str(given)
    own = Path(complete(str(given), "B", aside=True))
    assert sorted(path.name for path in own.iterdir()) == ["B.key", "B.pem", "ca.pem"], "and leaves that key behind"
    assert not (given / "B.key").exists() and stat.S_IMODE(own.stat().st_mode) == 0o700
    use_certificates(str(own), "B", {}, "x")
    assert complete(str(given), "C") == str(given) and (given / "C.key").exists()
    (given / "ca.key").unlink()
    assert complete(str(given), "D") == str(given) and not (given / "D.key").exists()
    assert complete("", "D") == ""


def test_what_was_made_aside_goes_with_the_process(tmp_path):
    make_certificates(tmp_path / "c", [])
    program = "import sys; from titan_rl.mesh.resources import certificates as c\n"
    program += "print(c.complete(*sys.argv[1:], aside=True))"
    command = [sys.executable, "-c", program, str(tmp_path / "c"), "B"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "titan_rl_" in done.stdout and not Path(done.stdout.strip()).exists()


# pods


def test_a_pod_is_known_by_its_name(monkeypatch):
    settings = HostsConfig(launcher="kubernetes", count=2, options={"name": "r", "namespace": "ml"})
    launcher, looked = make_host_launcher(settings, []), []

    async def listens(address):
        looked.append(str(address))

    monkeypatch.setattr("titan_rl.mesh.launch.kubernetes.launcher.until_it_listens", listens)
    assert launcher.count == 2 and launcher.rendezvous() == "tls://controller.r.ml.svc.cluster.local:0"
    address = asyncio.run(launcher.start(HostOrder(1, 0)))
    assert looked == [address] == ["tls://r-host-1.r.ml.svc.cluster.local:26600"]


# what is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("launch slrum quickstart --nodes 2", "did you mean 'slurm'?"),
        ("launch slurm quickstart --nodes 0", "--nodes 0"),
        ("launch slurm quickstart", "--nodes"),
        ("launch slurm no/such.toml --nodes 2", "no/such.toml"),
        ("launch slurm quickstart --nodes 2 --trainning.steps 3", "did you mean 'training'?"),
        ("launch slurm quickstart --nodes 2 --training.stepz 3", "did you mean 'steps'?"),
        ("launch slurm quickstart --nodes 2 --hosts.count 3", "hosts.count"),
        ("launch slurm quickstart --nodes 2 --hosts.options.partitionn x", "did you mean 'partition'?"),
        ("launch slurm quickstart --nodes 2 --hosts.options.partition 'a b'", "one word"),
        ("launch slurm quickstart --nodes 2 --hosts.options.sbatch '[\"x\"]'", "no option of sbatch"),
        ("launch slurm quickstart --nodes 2 --hosts.trainer [2]", "0 to 1"),
        ("launch slurm quickstart --nodes 2", "no sbatch on PATH"),
        ("launch k8s quickstart --nodes 2", "image"),
        ("launch k8s quickstart --nodes 2 --hosts.options.image x", "needs kubectl"),
        ("launch k8s quickstart --nodes 2 --hosts.options.image x --hosts.options.memory lots", "16Gi"),
        ("launch k8s quickstart --nodes 2 --hosts.options.image x --hosts.options.user 0", "root"),
        ("launch k8s quickstart --nodes 2 --hosts.options.image x --training.stepz 3", "did you mean 'steps'?"),
        ("launch k8s quickstart --nodes 2 --hosts.options.image x --run.dir y", "run.dir"),
        ("train quickstart --hosts.launcher slrum", "Known: attach, kubernetes, local, slurm"),
        ("train quickstart --hosts.launcher slurm", "hosts.count"),
        ("train quickstart --hosts.launcher slurm --hosts.count 2", "hosts.options.folder"),
        ("train quickstart --hosts.launcher kubernetes --hosts.count 2", "launch k8s"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(shlex.split(arguments)) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("titan-rl: ")
    assert not list(tmp_path.iterdir())


# titan-rl launch slurm


def launched(tmp_path, monkeypatch, to: str, *more: str) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", to, "quickstart", "--nodes", "2", "--folder", "out", *more]) == 0
    return tmp_path / "out"


def test_a_dry_run_writes_what_would_be_submitted(tmp_path, monkeypatch, capsys):
    more = ("--dry-run", "--hosts.options.account", "lab", "--training.steps", "7", "--run.dir", "my runs/x")
    folder = launched(tmp_path, monkeypatch, "slurm", *more)
    script = (folder / "controller.sh").read_text()
    assert str(folder / "controller.sh") in capsys.readouterr().out
    for line in ("--requeue", "--open-mode=append", "--account=lab", "--nodes=1", f"--chdir={tmp_path}"):
        assert f"#SBATCH {line}\n" in script
    assert "--training.steps=7" in script and "--hosts.count=2" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert f"'{tmp_path}/my runs/x'/config.json" in script, "the same run directory, however often it is started"
    assert "PRIVATE" not in script
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "certificates" / "ca.key").stat().st_mode) == 0o600


def test_a_launch_submits_what_it_wrote(slurm, tmp_path, monkeypatch, capsys):
    folder = launched(tmp_path, monkeypatch, "slurm")
    assert slurm.read("script-41") == (folder / "controller.sh").read_text()
    assert "Slurm job 41" in capsys.readouterr().out


def test_what_slurm_refuses_is_told_in_its_words(slurm, tmp_path, monkeypatch, capsys):
    slurm.mark("refuses")
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "slurm", "quickstart", "--nodes", "2"]) == 2
    assert "invalid partition" in capsys.readouterr().err


# titan-rl launch k8s

IMAGE = ("--hosts.options.image", "registry.example/titan-rl:1")


def manifests_of(folder: Path) -> list[dict]:
    return [part for path in sorted(folder.glob("*.yaml")) for part in yaml.safe_load_all(path.read_text())]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("k8s") / "out"
    more = ("--hosts.options.gpus", "2", "--hosts.options.storage_class", "fast", "--training.steps", "7")
    assert (
        main(["launch", "k8s", "quickstart", "--nodes", "3", "--folder", str(folder), "--dry-run", *IMAGE, *more]) == 0
    )
    return folder


def part(parts: list[dict], kind: str) -> dict:
    [found] = [part for part in parts if part["kind"] == kind]
    return found


@pytest.mark.parametrize("release", ["1.27", "1.30", "1.33", "1.37"])
def test_manifests_are_valid_by_the_published_schemas(written, release):
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is of the dev extra").validate
    for each in manifests_of(written):
        validate(each, release, strict=True)


def test_the_schemas_find_what_is_wrong(written):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is of the dev extra")
    job = part(manifests_of(written), "Job")
    job["spec"]["backOffLimit"] = job["spec"].pop("backoffLimit")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.33", strict=True)


def test_the_parts_fit_each_other(written):
    assert not flaws(manifests_of(written))


@pytest.mark.parametrize(
    ("kind", "where", "value", "said"),
    [
        ("StatefulSet", "serviceName", "other", "no Service other"),
        ("StatefulSet", "selector.matchLabels.titan-rl/part", "hosts", "its selector"),
        ("Service", "selector.titan-rl/run", "other", "does not select"),
        ("NetworkPolicy", "podSelector.matchLabels.titan-rl/run", "other", "does not select"),
        ("StatefulSet", "template.spec.containers.0.resources.limits.memory", "16 GB", "no amount"),
        ("Job", "template.spec.volumes.0.name", "other", "is mounted and is no volume"),
        ("Job", "template.spec.volumes.0.secret.secretName", "other", "no Secret other"),
        ("Job", "template.spec.subdomain", "other", "no Service other"),
        ("StatefulSet", "template.spec.containers.0.readinessProbe.tcpSocket.port", "other", "no port"),
    ],
)
def test_and_it_is_seen_where_they_would_not(written, kind, where, value, said):
    parts = copy.deepcopy(manifests_of(written))
    table = part(parts, kind)["spec"]
    *path, key = where.split(".")
    for step in path:
        table = table[int(step)] if step.isdecimal() else table[step]
    table[int(key) if key.isdecimal() else key] = value
    assert any(said in flaw for flaw in flaws(parts))


def test_nobody_is_root_and_nobody_else_comes_in(written):
    parts = manifests_of(written)
    policy = part(parts, "NetworkPolicy")["spec"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}], "no other pod, no other namespace"
    for kind in ("StatefulSet", "Job"):
        spec = part(parts, kind)["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000
        assert not spec["automountServiceAccountToken"]
        [container] = spec["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        shm = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
        assert shm == [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}}]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_container_takes_certificates_again_when_it_is_started_again():
    """Their user, who is not root, owns them alone, and may not write to what he had taken before."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        given, own = Path(folder, "given"), Path(folder, "own")
        given.mkdir()
        (given / "a.key").write_text("one")
        (given / "a.key").chmod(0o444)
        Path(folder).chmod(0o777)
        script = TAKE_CERTIFICATES.replace(CERTIFICATES, str(own)).replace("/etc/titan-rl/certificates", str(given))
        for text in ("one", "two"):
            (given / "a.key").write_text(text)
            subprocess.run(["sh", "-euc", script], user=65534, group=65534, cwd="/", check=True)
            assert (own / "a.key").read_text() == text
        assert not (own / "a.key").stat().st_mode & 0o077 and (own / "a.key").stat().st_uid == 65534


def test_hosts_have_gpus_and_the_controller_has_none(written):
    parts = manifests_of(written)
    containers = {kind: part(parts, kind)["spec"]["template"]["spec"]["containers"] for kind in ("StatefulSet", "Job")}
    limits = {kind: container["resources"]["limits"] for kind, [container] in containers.items()}
    assert limits["StatefulSet"]["nvidia.com/gpu"] == "2" and "nvidia.com/gpu" not in limits["Job"]
    assert part(parts, "StatefulSet")["spec"]["replicas"] == 3


def test_a_killed_controller_is_started_again_and_a_mistake_is_not(written):
    spec = part(manifests_of(written), "Job")["spec"]
    assert spec["backoffLimit"] == 6 and spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    script = spec["template"]["spec"]["containers"][0]["command"][-1]
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    assert "resume=--resume" in script and "--training.steps=7" in script and "--hosts.count=3" in script


def test_keys_are_in_the_secret_alone_and_the_authority_s_is_in_none(written):
    secret = part(manifests_of(written), "Secret")
    assert len([name for name in secret["data"] if name.endswith(".key")]) == 4 and "ca.key" not in secret["data"]
    assert b"PRIVATE KEY" in base64.b64decode(next(v for k, v in secret["data"].items() if k.endswith(".key")))
    name = secret["metadata"]["name"].removesuffix("-certificates")
    assert {f"controller.{name}.default.svc.cluster.local.pem", "ca.pem"} < set(secret["data"])
    assert {f"{name}-host-{i}.{name}.default.svc.cluster.local.key" for i in range(3)} < set(secret["data"])
    assert "PRIVATE" not in (written / "3-run.yaml").read_text()
    assert {stat.S_IMODE(path.stat().st_mode) for path in written.glob("*.yaml")} == {0o600}


def test_pods_find_the_names_that_their_certificates_have(written):
    """The launcher in the controller's pod asks where the StatefulSet puts pods."""
    parts = manifests_of(written)
    hosts, job = part(parts, "StatefulSet"), part(parts, "Job")["spec"]["template"]["spec"]
    script = job["containers"][0]["command"][-1]
    [name] = {word for word in shlex.split(script) if word.startswith("--hosts.options.name=")}
    options = kubernetes_options(HostsConfig(), 3, **parse_overrides([name])["hosts"]["options"])
    domain = f"{hosts['spec']['serviceName']}.{hosts['metadata']['namespace']}.svc.cluster.local"
    assert options.host(2) == f"{hosts['metadata']['name']}-2.{domain}"
    assert options.controller == f"{job['hostname']}.{job['subdomain']}.default.svc.cluster.local"
    assert f'"tls://$POD.{domain}:26600"' in hosts["spec"]["template"]["spec"]["containers"][0]["command"][-1]


def test_a_launch_applies_what_it_wrote(tmp_path, monkeypatch, capsys):
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked; [ ! -e {tmp_path}/refuses ] || {{ echo no >&2; exit 1; }}\n'
    )
    kubectl.chmod(0o700)
    monkeypatch.setenv("PATH", f"{kubectl.parent}:{os.environ['PATH']}")
    folder = launched(tmp_path, monkeypatch, "k8s", *IMAGE)
    files = " ".join(f"-f {folder}/{name}.yaml" for name in ("1-claim", "2-certificates", "3-run"))
    assert (tmp_path / "asked").read_text() == f"apply {files}\n"
    assert "kubectl logs" in capsys.readouterr().out
    (tmp_path / "refuses").touch()
    assert main(["launch", "k8s", "quickstart", "--nodes", "1", "--folder", "out2", *IMAGE]) == 2
    assert capsys.readouterr().err.endswith(": no\n")


@pytest.mark.parametrize("stem", ["Qwen3_1.7B.h200", "7b", "__", "x" * 90])
def test_any_file_has_a_name_in_dns(stem):
    settings = HostsConfig(options={"name": dns_name(stem, "20260101-120000")})
    assert kubernetes_options(settings, 1).name.endswith("-20260101-120000")
