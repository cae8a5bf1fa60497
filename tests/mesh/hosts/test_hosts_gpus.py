"""GPUs of other machines, without any: who goes where, what a controller without one settles, who waits for whom."""

import asyncio
from types import SimpleNamespace

import pytest

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.hosts import HostsConfig
from titan_rl.controller.planning import device_report
from titan_rl.controller.planning.device_report import fit_and_place
from titan_rl.controller.planning.planner import plan
from titan_rl.controller.preflight.checks import check
from titan_rl.controller.wiring import make_meshes
from titan_rl.mesh.hosts.hosts import Host
from titan_rl.mesh.hosts.remote_hosts import HostNeeds, NoHosts, RemoteHosts
from titan_rl.mesh.meshes import ProcessPlacement
from titan_rl.mesh.resources.cores import Crew
from titan_rl.mesh.resources.devices import Seat
from titan_rl.models.builtin.tiny import make_tiny

TWO = {"launcher": "attach", "addresses": ["tcp://A:1", "tcp://B:1"], "insecure": True}
GPUS = {"gpus": 4, "gpu_memory_gib": 79.0}


def config_of(**hosts):
    sections = {"hosts": TWO | hosts, "generator": {"tensor_parallel": 2, "replicas": 2}}
    return load_config(None, sections | {"parallelism": {"data_parallel_shard_degree": 4}})


def test_a_controller_without_a_gpu_settles_a_run_on_those_of_its_hosts(tmp_path):
    checked = check(config_of(**GPUS, trainer=[1]))
    assert checked.config.generator.dtype == "bfloat16" == checked.titan.training.mixed_precision_param
    fitting, found, lines = fit_and_place(checked, under_torchrun=False)
    assert lines[0].startswith("placement on 2 x 4 GPUs of 79.0 GiB")
    assert found.table.of_role("trainer") == [Seat(1, device) for device in range(4)]
    assert found.table.engines() == [(Seat(0, 0), Seat(0, 1)), (Seat(0, 2), Seat(0, 3))]
    make_tiny(path := str(tmp_path / "model"), seed=1)
    meshes = make_meshes(fitting.config, fitting.titan, path, placement=ProcessPlacement(devices=found.devices))
    environment, *_ = meshes.generators.standby._spawn_arguments
    assert "TORCHDYNAMO_DISABLE" not in environment, "which engines on CPUs have"


def test_a_run_on_cores_of_hosts_says_nothing_of_this_machine(monkeypatch):
    monkeypatch.setattr(device_report, "fit_into_memory", lambda checked: (checked, ["memory of this machine"]))
    checked = check(config_of())
    assert checked.config.generator.dtype == "float32" and fit_and_place(checked, under_torchrun=True)[1:] == (None, [])
    monkeypatch.undo()
    assert fit_and_place(checked, under_torchrun=False)[1:] == (None, [])


def test_a_plan_is_for_the_hosts_that_a_file_names():
    sections = {"hosts": TWO | GPUS, "generator": {"tensor_parallel": 2}}
    assert plan(None, sections, None)[0][0].startswith("placement on 2 x 4 GPUs of 79.0 GiB")


def hosts_with(settings: HostsConfig, seconds: float = 0.2) -> RemoteHosts:
    needs = HostNeeds(None, "model", Crew({"trainer": 1}, alternating=True))
    return RemoteHosts(SimpleNamespace(count=2), settings, needs, seconds=seconds, logs=None, log=print)


def remote(number: int) -> Host:
    return Host(f"host {number}", None, facts=SimpleNamespace(cores=2, mark={}, scratch="/", address="", interface=""))


def test_who_has_gpus_on_a_host_waits_until_it_is_back():
    async def run():
        hosts = hosts_with(HostsConfig(**TWO, **GPUS), seconds=5.0)
        hosts._hosts = {0: remote(0), 1: remote(1)}
        assert (await hosts.choose("trainer", 1)).name == "host 1"
        hosts._hosts[1].died.set_result(None)
        waiting = asyncio.ensure_future(hosts.choose("trainer", 1))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        hosts._hosts[1] = again = remote(1)
        hosts._came.set()
        assert await waiting is again and again.kinds == ["trainer"]

    asyncio.run(run())


def test_a_host_that_does_not_come_back_is_named():
    async def run():
        hosts = hosts_with(HostsConfig(**TWO, **GPUS))
        hosts._hosts = {0: remote(0)}
        with pytest.raises(NoHosts, match="host 1, with the GPUs that it works on, is lost"):
            await hosts.choose("trainer", 1)
        hosts._hosts = {}
        with pytest.raises(NoHosts, match="all hosts of the run are lost"):
            await hosts.choose("trainer")

    asyncio.run(run())


@pytest.mark.parametrize(("count", "gib"), [(2, 79.2), (4, 39.4), (0, 0)])
def test_a_host_that_has_less_than_was_said_is_refused(count, gib):
    async def run():
        hosts = hosts_with(HostsConfig(**TWO, **GPUS))

        async def gpus():
            return count, int(gib * 2**30)

        with pytest.raises(ConfigError, match=rf"host 1 .B. has {count} GPUs .*hosts.gpus = 4"):
            await hosts._check_gpus(1, "B", SimpleNamespace(gpus=SimpleNamespace(call_one=gpus)))

    asyncio.run(run())


def test_on_cores_a_host_s_gpus_are_nobody_s():
    async def run():
        on_cores, on_gpus = hosts_with(HostsConfig(**TWO)), hosts_with(HostsConfig(**TWO, **GPUS))
        assert on_cores.environment(remote(0), "trainer")["CUDA_VISIBLE_DEVICES"] == ""
        assert "CUDA_VISIBLE_DEVICES" not in on_gpus.environment(remote(0), "trainer")

    asyncio.run(run())
