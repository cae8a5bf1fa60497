"""On GPUs: who is where, what each process holds there, and what is left for KV caches."""

import json
from types import SimpleNamespace

import pytest

from titan_rl.config.device_defaults import for_device, generator_on
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.role_sections import ImagesConfig
from titan_rl.config.sections.schema import GeneratorConfig
from titan_rl.controller.planning import device_report
from titan_rl.controller.planning.device_plan import DevicePlan, Machine, plan_devices
from titan_rl.controller.planning.device_report import as_json, placement_lines
from titan_rl.controller.planning.memory_plan import GIB
from titan_rl.controller.preflight.checks import resolve
from titan_rl.controller.session import Session
from titan_rl.mesh.resources.devices import HELPER, Seat, seats_of
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.builtin.tiny_vision import make_tiny_vision


def planned(machine: Machine, **sections) -> DevicePlan:
    return plan_devices(resolve(load_config(None, sections), on_cpu=False), machine)


def total(plan: DevicePlan, seat: Seat) -> float:
    return sum(need.total for need in plan.needs[seat])


ONE = Machine(1, 16 * GIB)
EIGHT = Machine(8, 16 * GIB)


def test_on_one_gpu_trainer_and_engine_share_it_side_by_side():
    plan = planned(ONE)
    assert [need.process for need in plan.needs[Seat(0, 0)]] == ["trainer rank 0", "generator 0"]
    assert plan.kv_cache > 0 and total(plan, Seat(0, 0)) <= 0.9 * 16 * GIB
    assert plan.devices.engine.share * 16 * GIB == plan.needs[Seat(0, 0)][1].total


def test_a_kv_cache_takes_what_everyone_else_leaves_and_no_more_than_it_can_use():
    roomy, tight = planned(ONE), planned(Machine(1, 4.7 * GIB))
    assert tight.kv_cache < roomy.kv_cache
    assert total(tight, Seat(0, 0)) == pytest.approx(0.9 * 4.7 * GIB)
    assert planned(Machine(1, 64 * GIB)).kv_cache == roomy.kv_cache  # all requests at once, at their longest


def test_a_kv_cache_that_the_user_gives_is_taken_and_checked():
    assert planned(ONE, generator={"kv_cache_gib": 2.5}).kv_cache == 2.5 * GIB
    with pytest.raises(ConfigError, match=r"GPU 0 of host 0 would have to hold .* may be used: .*kv_cache_gib"):
        planned(ONE, generator={"kv_cache_gib": 15.0})


def test_what_cannot_fit_is_refused_in_one_line_with_the_mend():
    with pytest.raises(ConfigError) as error:
        planned(Machine(1, 2 * GIB))
    assert "\n" not in str(error.value) and "Take one of: more ranks" in str(error.value)


def test_shards_share_a_model_and_replicas_have_one_each():
    whole = planned(EIGHT).needs[Seat(0, 0)][0].bytes_by_reason
    sharded = planned(EIGHT, parallelism={"data_parallel_shard_degree": 4}).needs[Seat(0, 3)][0].bytes_by_reason
    copied = planned(EIGHT, parallelism={"data_parallel_replicate_degree": 4}).needs[Seat(0, 3)][0].bytes_by_reason
    for reason in ("weights", "gradients", "moments", "weights to send"):
        assert sharded[reason] == whole[reason] / 4 and copied[reason] == whole[reason]


def test_ranks_of_an_engine_share_its_model_too():
    one, two = (planned(EIGHT, generator={"tensor_parallel": n}) for n in (1, 2))
    whole, half = (plan.needs[Seat(0, 1)][0].bytes_by_reason for plan in (one, two))
    assert half["weights"] == whole["weights"] / 2
    assert [need.process for need in two.needs[Seat(0, 2)]] == ["generator 0 rank 1"]
    assert two.devices.table.engines() == [(Seat(0, 1), Seat(0, 2))]


def test_an_engine_makes_room_for_a_step_of_images_or_a_larger_one(monkeypatch):
    def images(**sections) -> float:
        [_, engine] = planned(ONE, **sections).needs[Seat(0, 0)]
        return engine.bytes_by_reason.get("images", 0.0)

    monkeypatch.setattr("titan_rl.controller.planning.device_memory.GPU_STEP_TOKENS", 100)
    seeing = {"model": {"path": "tiny-vision"}, "task": {"name": "shapes"}}
    limited = seeing | {"model": {"path": "tiny-vision", "images": {"max_pixels": 128 * 64}}}
    assert images() == 0 < images(**limited) == images(**seeing) / 2


def test_roles_with_processes_of_their_own_have_gpus_of_their_own():
    sections = {"algorithm": {"name": "ppo", "kl_coefficient": 0.1}}
    own = {"critic": {"placement": "own"}, "reference": {"placement": "own"}}
    beside, apart = planned(EIGHT, **sections), planned(EIGHT, **sections, **own)
    names = [need.process for needs in apart.needs.values() for need in needs]
    assert names == ["trainer rank 0", "critic rank 0", "reference rank 0", "generator 0"]
    assert seats_of(apart.devices, "trainer", "critic") == [Seat(0, 0), Seat(0, 1)] and seats_of(None, "trainer") == []
    trainer, critic, reference = (apart.needs[Seat(0, i)][0].bytes_by_reason for i in range(3))
    whole = beside.needs[Seat(0, 0)][0].bytes_by_reason
    assert whole["weights"] == trainer["weights"] + critic["weights"] + reference["weights"]
    assert whole["moments"] == trainer["moments"] + critic["moments"] and "moments" not in reference


def test_a_draft_model_that_learns_is_trained_sent_and_fetched(tmp_path):
    make_tiny(tmp_path, seed=1)
    drafts = {"method": "draft_model"}
    still = planned(EIGHT, generator={"speculative": drafts | {"model": str(tmp_path)}})
    learns = planned(EIGHT, generator={"speculative": drafts}, drafter={"path": str(tmp_path)})
    for place, reasons in ((0, ("weights", "moments", "weights to send")), (1, ("next weights",))):
        before, after = (plan.needs[Seat(0, place)][0].bytes_by_reason for plan in (still, learns))
        assert all(after[reason] == 2 * before[reason] for reason in reasons)


def test_spares_wait_on_gpus_of_their_own():
    plan = planned(EIGHT, recovery={"warm_spares": 1})
    assert [need.process for need in plan.needs[Seat(0, 2)]] == ["generator spare"]
    with pytest.raises(ConfigError, match="recovery.warm_spares"):
        planned(ONE, recovery={"warm_spares": 1})


def test_a_run_on_data_has_no_engines():
    plan = planned(EIGHT, algorithm={"name": "sft"}, data={"file": "task"})
    assert plan.kv_cache == 0 and plan.devices.table.engines() == []
    assert "weights to send" not in plan.needs[Seat(0, 0)][0].bytes_by_reason


def test_snapshots_are_in_the_host_s_memory():
    plan = planned(EIGHT, parallelism={"data_parallel_shard_degree": 2})
    moments = plan.needs[Seat(0, 0)][0].bytes_by_reason["moments"]
    [ranks] = plan.on_host[0]
    assert ranks.total == 2 * 2 * (moments + moments / 2)
    assert planned(EIGHT, recovery={"snapshot_every": 0}).on_host == {0: []}


def test_in_turns_a_gpu_holds_what_the_larger_of_the_two_needs():
    turns = {"placement": {"mode": "colocated"}}
    plan = planned(Machine(1, 6 * GIB), **turns)
    trainer, engine = plan.needs[Seat(0, 0)]
    asleep = sum(trainer.bytes_by_reason[each] for each in ("weights", "weights to send", "libraries"))
    engines_turn = asleep + engine.total
    trainers_turn = trainer.total + engine.bytes_by_reason["libraries"]
    assert plan.held(Seat(0, 0)) == max(engines_turn, trainers_turn) < trainer.total + engine.total
    side_by_side = planned(Machine(1, 4.7 * GIB)).kv_cache
    assert planned(Machine(1, 4.7 * GIB), **turns).kv_cache > side_by_side
    [host] = plan.on_host[0]
    assert host.bytes_by_reason["moments"] == trainer.bytes_by_reason["moments"]
    assert "take turns" in placement_lines(plan)[0] and "moments" in placement_lines(plan)[-1]


def test_helpers_work_on_the_trainer_s_gpus_in_turns_and_the_engines_have_their_own():
    helped = {"placement": {"helper_generators": 1}}
    plan, alone = planned(EIGHT, **helped), planned(EIGHT)
    trainer, helper = plan.needs[Seat(0, 0)]
    assert helper.process == "generator 1" and [need.process for need in plan.needs[Seat(0, 1)]] == ["generator 0"]
    assert plan.held(Seat(0, 0)) < trainer.total + helper.total
    assert plan.kv_cache == alone.kv_cache and plan.devices.engine == alone.devices.engine
    assert plan.devices.of_engine(GeneratorConfig(), is_helper=True).kv_cache_gib == plan.helper_kv_cache / GIB
    with pytest.raises(ConfigError, match="GPU 0 .* generator 1 .* Take one of: fewer placement.helper_generators"):
        planned(Machine(8, 5 * GIB), **helped)
    [host] = plan.on_host[0]
    assert host.bytes_by_reason["moments"] == trainer.bytes_by_reason["moments"]
    assert "lends its own to helper generators" in placement_lines(plan)[0]
    assert plan.devices.table.engines(HELPER) == [(Seat(0, 0),)]


def test_helpers_want_gpus_of_a_trainer_that_no_engine_has():
    with pytest.raises(ConfigError, match="helper_generators = 1: trainer and engines share a GPU"):
        planned(ONE, placement={"helper_generators": 1})
    with pytest.raises(ConfigError, match="helper_generators = 1: helpers are for a run on one host"):
        planned(Machine(4, 16 * GIB, hosts=2), placement={"helper_generators": 1})


def test_engines_that_read_a_trainer_s_slots_take_some_of_its_gpu():
    apart, together = planned(EIGHT), planned(EIGHT, placement={"mode": "colocated"})
    assert apart.needs[Seat(0, 0)][0].bytes_by_reason["mapped by engines"] > 0
    assert "mapped by engines" not in together.needs[Seat(0, 0)][0].bytes_by_reason


def test_the_table_is_told_by_gpu_and_alike_ones_share_a_line():
    lines = placement_lines(planned(EIGHT, parallelism={"data_parallel_shard_degree": 4}, generator={"replicas": 2}))
    assert lines[0] == "placement on 1 x 8 GPUs of 16.0 GiB, 0.9 of which may be used:"
    assert lines[1].startswith("  host 0 GPU 0 to 3: ") and "trainer rank 0 to trainer rank 3" in lines[1]
    assert lines[2].startswith("  host 0 GPU 4 to 5: ") and "generator 0 to generator 1" in lines[2]
    assert lines[3].startswith("  host 0 memory: trainer ranks snapshots")


def test_programs_are_told_in_bytes():
    plan = planned(ONE)
    table = json.loads(json.dumps(as_json(plan)))
    [device] = table["devices"]
    assert device["bytes"] == total(plan, Seat(0, 0)) and table["kv_cache_bytes"] == plan.kv_cache
    assert {each["name"] for each in device["processes"]} == {"trainer rank 0", "generator 0"}


# a run


def test_a_run_on_gpus_says_the_table_at_its_start(monkeypatch, tmp_path):
    monkeypatch.setattr(device_report, "machine_of", lambda checked: EIGHT)
    session = Session.open(load_config(None, {"run": {"dir": str(tmp_path / "run")}}))
    said = (tmp_path / "run" / "log.txt").read_text()
    assert "placement on 1 x 8 GPUs" in said and "host 0 GPU 1: " in said
    assert session.plan.devices.table.engines() == [(Seat(0, 1),)]


def test_a_run_that_does_not_fit_is_refused_and_nothing_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(device_report, "machine_of", lambda checked: ONE)
    sections = {"run": {"dir": str(tmp_path / "run")}, "parallelism": {"data_parallel_shard_degree": 2}}
    with pytest.raises(ConfigError, match="the trainer needs 2 GPUs, and 1 of 1 GPU is left"):
        Session.open(load_config(None, sections))
    assert not (tmp_path / "run").exists()


def test_a_run_on_a_cpu_says_no_table(tmp_path):
    session = Session.open(load_config(None, {"run": {"dir": str(tmp_path / "run")}}))
    assert session.plan is None and "placement" not in (tmp_path / "run" / "log.txt").read_text()


# what is open in a TOML is settled by what the run is on


def test_a_gpu_computes_in_bf16_unless_the_toml_says_otherwise():
    on_gpu = for_device(load_config(None, {}), on_cpu=False)
    assert on_gpu.titan["training"]["mixed_precision_param"] == on_gpu.generator.dtype == "bfloat16"
    asked = {"training": {"mixed_precision_param": "float32", "steps": 3}, "generator": {"dtype": "float32"}}
    told_so = for_device(load_config(None, asked), on_cpu=False)
    assert told_so.titan["training"] == asked["training"] and told_so.generator.dtype == "float32"
    assert resolve(on_gpu, on_cpu=False).titan.training.dtype == "float32"  # of weights and moments


def test_a_cpu_computes_as_it_did():
    checked = resolve(load_config(None, {}))
    assert checked.titan.training.mixed_precision_param == checked.config.generator.dtype == "float32"
    assert checked.config.generator.kv_cache_gib == generator_on(GeneratorConfig(), on_cpu=True).kv_cache_gib == 0.5


@pytest.mark.parametrize("on_cpu", [True, False])
def test_vllm_s_settings(on_cpu, monkeypatch, tmp_path):
    from vllm.config import CompilationMode

    from titan_rl.generator import engine_arguments as arguments

    monkeypatch.setattr(arguments.current_platform, "is_cpu", lambda: on_cpu, raising=False)
    config = GeneratorConfig(tensor_parallel=2, kv_cache_gib=3.0, gpu_memory_utilization=0.25)
    make_tiny(tmp_path, seed=1, num_layers=1)
    made = arguments.engine_arguments(config, tmp_path, 512, () if on_cpu else (2, 3))
    assert made.kv_cache_memory_bytes == 3 * GIB
    if on_cpu:
        assert (made.enable_chunked_prefill, made.async_scheduling, made.device_ids) == (False, False, None)
        assert (made.dtype, made.max_num_batched_tokens, made.enforce_eager) == ("float32", 4096, True)
    else:  # vLLM's own choice, which is to have both
        assert (made.enable_chunked_prefill, made.async_scheduling, made.device_ids) == (None, None, [2, 3])
        assert (made.dtype, made.gpu_memory_utilization, made.enforce_eager) == ("bfloat16", 0.25, False)
        assert made.compilation_config.mode is None, "vLLM's own choice, too"
        config.torch_compile = False
        made = arguments.engine_arguments(config, tmp_path, 512, (2, 3))
        assert made.compilation_config.mode == CompilationMode.NONE and not made.enforce_eager
    make_tiny_vision(tmp_path / "vision", seed=1, hidden_size=64, num_layers=1)
    images = ImagesConfig(max_pixels=4096)
    made = arguments.engine_arguments(config, tmp_path / "vision", 512, images=images)
    assert made.mm_processor_kwargs == {"size": {"shortest_edge": 256, "longest_edge": 4096}}
    made = arguments.engine_arguments(config, tmp_path / "vision", 512)
    assert made.mm_processor_kwargs is None and made.limit_mm_per_prompt == {"image": 999, "video": 0}


def test_a_token_under_way_at_an_update_is_the_old_weights():
    from titan_rl.generator.engine import num_generated

    def request(placeholders: int, stale: int, drops: bool) -> SimpleNamespace:
        fields = dict(num_output_placeholders=placeholders, num_stale_output_tokens=stale, drop_stale_output=drops)
        return SimpleNamespace(num_output_tokens=7, **fields)

    assert num_generated(request(0, 0, False)) == 7  # on a CPU nothing is under way between two steps
    assert num_generated(request(1, 0, False)) == 8
    assert num_generated(request(0, 1, False)) == 8  # preempted, and its token still comes
    assert num_generated(request(0, 1, True)) == 7  # preempted by the update itself, which has it sampled again
