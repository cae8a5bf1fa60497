"""Seconds by arithmetic: each formula by small cases that are worked out by hand, and the whole by its invariants."""

import json
from dataclasses import replace

import pytest

from titan_rl.cli import main
from titan_rl.config.load import ConfigError
from titan_rl.controller.planning.forecast.generation import Drafting, Engine, decode_step, draft_gain, generating
from titan_rl.controller.planning.forecast.rates import as_toml, device_names, rates_of
from titan_rl.controller.planning.forecast.report import forecast_lines
from titan_rl.controller.planning.forecast.shapes import SHAPES, known, shape_of, write_shape
from titan_rl.controller.planning.forecast.simulation import lengths, simulated
from titan_rl.controller.planning.forecast.step import Scenario, forecast
from titan_rl.controller.planning.forecast.training import Layout, bubble, num_rows, ring, train_flops, training
from titan_rl.controller.planning.forecast.weight_sync import Route, syncing, traffic
from titan_rl.controller.planning.forecast.work import Batch, Work
from titan_rl.controller.planning.memory_plan import Size
from titan_rl.diagnostics.bench.planning.fitting import Measured, fitted, least_squares
from titan_rl.models.spec import read_hf_config

WORK = Work(
    parameters=7_000_000_000,
    active=6.5e9,
    experts=0,
    num_experts=0,
    num_active=0,
    layers=32,
    hidden=4096,
    attention_width=4096,
    kv_width=1024,
    vocab=128256,
    around=525_336_576,
)
MIXTURE = replace(WORK, parameters=1000, experts=800, num_experts=8, num_active=2, around=0)
BATCH = Batch(groups=64, group_size=8, prompt=512, answer=1024, longest=2048)
RATES = replace(rates_of(), seconds_engine_step=0.0, seconds_token=0.0, seconds_collective=0.0, seconds_sync=0.0)
ENGINE = Engine(ranks=1, max_requests=128, element=2, link=RATES.link, layer_element=2)
SCENARIO = Scenario(WORK, BATCH, RATES, Layout(shards=8, row_tokens=8192), ENGINE, replicas=8, trained=WORK.parameters)
LARGE = {
    "model.embed_tokens.weight": (1024, 256),
    "model.norm.weight": (256,),
    "lm_head.weight": (1024, 256),
    **{
        f"model.layers.{n}.{name}.weight": shape
        for n in range(16)
        for name, shape in {
            "self_attn.q_proj": (256, 256),
            "self_attn.k_proj": (64, 256),
            "self_attn.v_proj": (64, 256),
            "self_attn.o_proj": (256, 256),
            "mlp.gate_proj": (1024, 256),
            "mlp.up_proj": (1024, 256),
            "mlp.down_proj": (256, 1024),
            "input_layernorm": (256,),
        }.items()
    },
}


# a model's work


def test_flops_are_two_for_each_parameter_and_token_and_attention_grows_with_the_context():
    assert WORK.forward_flops(10, 0) == 2 * 6.5e9 * 10
    assert WORK.forward_flops(0, 100) == 4 * 32 * 4096 * 100
    assert train_flops(WORK, BATCH, 0) == 3 * WORK.forward_flops(BATCH.trained, BATCH.attended)
    assert train_flops(WORK, BATCH, 1) == 4 * WORK.forward_flops(BATCH.trained, BATCH.attended)
    assert train_flops(WORK, BATCH, 0, trained_share=0) == 2 * WORK.forward_flops(BATCH.trained, BATCH.attended)


def test_a_mixture_s_step_reads_the_experts_that_it_meets():
    assert MIXTURE.touched(0) == 200
    assert MIXTURE.touched(1) == pytest.approx(200 + 800 * 2 / 8)
    assert MIXTURE.touched(1000) == pytest.approx(1000)
    assert WORK.touched(1) == WORK.parameters


def test_a_shared_prompt_passes_the_trainer_once():
    apart = replace(BATCH, share_prefix=False)
    assert apart.trained - BATCH.trained == 64 * 7 * 512
    assert BATCH.generated == 64 * 8 * 1024


# sampling


def test_a_small_batch_s_decode_step_takes_as_long_as_its_weights_to_read():
    weights = 2 * WORK.parameters / RATES.memory
    assert decode_step(WORK, ENGINE, RATES, 1, 0) == pytest.approx(weights)
    cache = 1000 * WORK.kv_bytes(2) / RATES.memory
    assert decode_step(WORK, ENGINE, RATES, 1, 1000) == pytest.approx(weights + cache)
    halved = decode_step(WORK, replace(ENGINE, ranks=2), replace(RATES, link_bandwidth=1e30), 1, 0)
    assert halved < weights
    in_fp8 = decode_step(WORK, replace(ENGINE, layer_element=1), RATES, 1, 0)
    assert in_fp8 == pytest.approx((WORK.parameters + WORK.around) / RATES.memory)


def test_a_large_batch_s_decode_step_is_bounded_by_flops():
    slow = replace(RATES, peak_flops=1e12)
    assert decode_step(WORK, ENGINE, slow, 128, 0) == pytest.approx(2 * 6.5e9 * 128 / (1e12 * slow.decode_share))


def test_twice_the_engines_take_half_the_time_until_their_seats_are_empty():
    two, four = (generating(WORK, ENGINE, RATES, BATCH, n) for n in (2, 4))
    assert four.running == pytest.approx(two.running / 2)
    many = generating(WORK, ENGINE, RATES, BATCH, 64)
    assert many.requests == 8 and many.running > two.running / 32


# training


@pytest.mark.parametrize(
    "stages,rows,several,idle", [(1, 4, 1, 0), (4, 4, 1, 3 / 7), (4, 12, 1, 0.2), (4, 4, 2, 3 / 11)]
)
def test_a_pipeline_s_bubble(stages, rows, several, idle):
    assert bubble(stages, rows, several) == pytest.approx(idle)


def test_a_ring_sends_all_but_its_own_part():
    assert ring(1, 100) == 0 and ring(4, 100) == 75


def test_rows_are_whole_and_a_multiple_of_the_stages():
    layout = Layout(shards=8, stages=4, row_tokens=8192)
    assert num_rows(BATCH, layout) % 4 == 0
    assert num_rows(replace(BATCH, groups=1, group_size=2), replace(layout, stages=1)) == 1


def test_ranks_share_the_flops_and_wait_for_whichever_is_slower():
    layout = Layout(shards=8, row_tokens=8192)
    one = training(WORK, layout, RATES, BATCH, WORK.parameters)
    assert one.compute == pytest.approx(
        train_flops(WORK, BATCH, 0) / 8 / (RATES.peak_flops * RATES.train_share), rel=1e-6
    )
    assert one.forward_backward == max(one.compute, one.gathering) and one.adding == 0
    slow = training(WORK, layout, replace(RATES, link_bandwidth=1e6), BATCH, WORK.parameters)
    assert slow.forward_backward == slow.gathering > one.compute
    tensor = training(WORK, replace(layout, shards=4, tensor=2), RATES, BATCH, WORK.parameters)
    assert tensor.adding > 0 and tensor.compute == pytest.approx(one.compute)
    context = training(WORK, replace(layout, shards=4, context=2), RATES, BATCH, WORK.parameters)
    assert context.compute == pytest.approx(one.compute) and context.rows > one.rows
    assert 0 < context.adding < tensor.adding and context.context_bytes == tensor.tensor_bytes / 2
    across = training(WORK, replace(layout, shards=16), RATES, BATCH, WORK.parameters)
    assert across.shard_bytes < one.shard_bytes * 2


def test_drafts_must_bring_what_checking_and_making_them_costs():
    """A step reads the weights once, however many tokens it checks, and multiplies all of them."""
    small = replace(WORK, parameters=10**6, around=10**5)

    def needed(requests: float, drafts_by: Work | None) -> float:
        gain = draft_gain(WORK, ENGINE, RATES, requests, 100.0, Drafting(3, drafts_by))
        assert gain.ratio == 1 + 3 * gain.needed_acceptance
        return gain.needed_acceptance

    assert needed(1.0, None) == 0.0 < needed(1.0, small) < 0.5 < 1.0 == pytest.approx(needed(1.0, WORK))
    assert needed(4096.0, None) == pytest.approx(1.0)


# weights


def test_a_version_goes_as_fast_as_its_narrowest_end():
    route = Route(shards=8, senders=8, replicas=16, ranks=8, crosses_hosts=True, copies=16)
    each = syncing(WORK.parameters, 2, route, RATES)
    nbytes = 2 * WORK.parameters
    assert each.sent == 16 * nbytes / 8 and each.received == nbytes / 8
    assert each.fetch == pytest.approx(2 * nbytes / RATES.network)
    handed_on = syncing(WORK.parameters, 2, replace(route, copies=2), RATES)
    assert handed_on.fetch == pytest.approx(each.fetch / 8)
    alone = syncing(WORK.parameters, 2, route, RATES, adapters=(WORK.parameters // 100, 2))
    assert alone.sent == pytest.approx(each.sent / 100, rel=1e-6) and alone.apply == each.apply
    merging = 2 * nbytes / 8 / RATES.memory
    assert alone.fetch == pytest.approx(each.fetch / 100 + merging, rel=1e-6)


@pytest.mark.parametrize("devices", [16, 64, 1024])
def test_the_weight_plan_of_so_many_devices_sends_what_the_formula_says(devices):
    trainers, ranks = devices // 2, 8
    layout, replicas = Layout(shards=trainers // 2, tensor=2), devices // 2 // ranks
    seen = traffic(LARGE, layout, replicas, ranks)
    parameters = seen.model // 2
    route = Route(trainers, trainers, replicas, ranks, crosses_hosts=True, copies=replicas)
    told = syncing(parameters, 2, route, RATES)
    assert sum(seen.sent) == pytest.approx(told.sent * trainers, rel=0.03)
    assert max(seen.received) == pytest.approx(told.received, rel=0.03)
    handed_on = traffic(LARGE, layout, replicas, ranks, copies=min(replicas, 1))
    assert handed_on.copies <= 2


def test_every_rank_of_a_pipeline_sends_its_part():
    seen = traffic(LARGE, Layout(shards=2, stages=4), 2, 2)
    assert len(seen.sent) == 8 and min(seen.sent) > 0 and seen.copies == pytest.approx(2, rel=0.03)


# a step


def test_with_staleness_a_step_takes_as_long_as_the_slower_of_the_two():
    on_policy, beside = forecast(SCENARIO), forecast(replace(SCENARIO, staleness=1))
    bounds = beside.generators, beside.trainer + RATES.seconds_step, beside.scoring, beside.way_round / 2
    assert beside.seconds == max(bounds)
    assert on_policy.seconds > on_policy.trainer + on_policy.generators > beside.seconds
    assert 0 <= beside.idle < 1 and 0 <= on_policy.idle < 1
    turns = forecast(replace(SCENARIO, in_turns=True))
    assert turns.turns > 0 and turns.scenario.devices == 8 and SCENARIO.devices == 16


@pytest.mark.parametrize("seconds_answer", [0.0, 0.01, 1.0])
def test_phases_that_follow_each_other_add_up_to_the_step(seconds_answer):
    """Scoring is one of them as far as no other answer is sampled meanwhile."""
    for scenario in (SCENARIO, replace(SCENARIO, staleness=1, in_turns=True)):
        its = forecast(replace(scenario, rates=replace(RATES, seconds_answer=seconds_answer)))
        assert sum(its.phases().values()) == pytest.approx(its.seconds)
        assert its.scored_after + its.scored_beside == pytest.approx(its.scoring) and its.scored_beside >= 0
        assert its.seconds >= its.scoring


def test_the_report_says_what_is_scored_beside_sampling():
    its = forecast(replace(SCENARIO, rates=replace(RATES, seconds_answer=0.01), replicas=1))
    [line] = [line for line in forecast_lines(its, None, 1) if line.startswith("  score ")]
    assert "of work beside sampling" in line and f"{its.scored_after:.1f} s," in line
    assert "phases overlap" in forecast_lines(forecast(replace(SCENARIO, staleness=1)), None, 1)[0]
    assert (
        "without helper generators" in forecast_lines(forecast(replace(SCENARIO, staleness=1, helpers=1)), None, 1)[0]
    )


def test_a_simulated_step_with_equal_answers_is_the_arithmetic_s():
    equal = replace(SCENARIO, batch=replace(BATCH, longest=BATCH.answer), rates=replace(RATES, seconds_answer=0.0))
    assert simulated(equal).seconds == pytest.approx(forecast(equal).seconds, rel=0.1)
    assert simulated(equal).staleness_max == 0


@pytest.mark.parametrize("devices", [16, 64, 1024])
def test_staleness_hides_how_long_a_batch_waits_for_its_longest_answers(devices):
    half = devices // 2
    batch = replace(BATCH, groups=half)
    scenario = replace(SCENARIO, batch=batch, layout=Layout(shards=half, row_tokens=8192), replicas=half)
    seen = {bound: simulated(replace(scenario, staleness=bound)) for bound in (0, 1, 4)}
    assert seen[0].seconds > seen[1].seconds >= 0.99 * seen[4].seconds
    assert all(each.staleness_max <= bound for bound, each in seen.items())
    assert seen[4].seconds == pytest.approx(forecast(replace(scenario, staleness=4)).seconds, rel=0.15)


def test_helpers_shorten_steps_in_which_the_trainer_waits_for_crowded_engines():
    batch = replace(BATCH, groups=64)
    crowded = replace(SCENARIO, batch=batch, staleness=1, replicas=2, engine=replace(ENGINE, max_requests=32))
    alone, helped = simulated(crowded), simulated(replace(crowded, helpers=2))
    assert alone.trainer_idle > 0.3 and helped.seconds < 0.9 * alone.seconds
    assert helped.trainer_idle < alone.trainer_idle and helped.staleness_max <= 1
    roomy = replace(crowded, engine=replace(ENGINE, max_requests=10**4))
    assert simulated(replace(roomy, helpers=2)).seconds == pytest.approx(simulated(roomy).seconds, rel=0.02)


def test_helpers_cost_nothing_where_the_trainer_hardly_waits_without_them():
    """A group that sleeps in one moves to an engine with room; while all stayed, such steps took a third longer."""
    batch, engine = replace(BATCH, groups=8, longest=3000), replace(ENGINE, max_requests=16)
    layout, rates = replace(SCENARIO.layout, shards=1), replace(RATES, train_share=0.2)
    busy = replace(SCENARIO, batch=batch, engine=engine, layout=layout, rates=rates, staleness=1, replicas=2)
    alone = simulated(busy)
    assert alone.trainer_idle < 0.35
    assert simulated(replace(busy, helpers=1)).seconds < 1.05 * alone.seconds


def test_lengths_are_made_by_a_seed_and_bounded():
    made = lengths(100, 400, 4000, seed=3)
    assert (made == lengths(100, 400, 4000, seed=3)).all() and made.max() <= 400 and 90 < made.mean() < 105
    assert set(lengths(400, 400, 5, seed=1)) == {400}


# rates and shapes


def test_every_device_s_rates_have_a_source_and_can_be_given(tmp_path):
    for name in device_names():
        assert rates_of(name).source and rates_of(name).memory_gib > 20
    assert rates_of("h100", overrides={"train_share": 0.5}).train_share == 0.5
    file = tmp_path / "rates.toml"
    file.write_text(as_toml(replace(rates_of(), peak_flops=1e9)))
    assert rates_of("A100", str(file)).peak_flops == 1e9
    for bad in ({"train_share": 0}, {"no_such": 1}, {"peak_flops": "fast"}):
        with pytest.raises(ConfigError, match="rates"):
            rates_of(overrides=bad)
    with pytest.raises(ConfigError, match="--device"):
        rates_of("H1000")


PUBLISHED = {
    **{"Qwen2.5-0.5B-Instruct": 0.49, "Qwen2.5-1.5B-Instruct": 1.54, "Qwen2.5-3B-Instruct": 3.09},
    **{"Qwen2.5-7B-Instruct": 7.61, "Qwen2.5-32B-Instruct": 32.5, "Qwen3-0.6B": 0.6, "Qwen3-1.7B": 1.7},
    **{"Qwen3-4B": 4.0, "Qwen3-8B": 8.2, "Qwen3-14B": 14.8, "Qwen3-32B": 32.8, "Qwen3-30B-A3B": 30.5},
    **{"Qwen3-235B-A22B": 235, "Llama-3.2-1B-Instruct": 1.23, "Llama-3.2-3B-Instruct": 3.21},
    **{"Llama-3.1-8B-Instruct": 8.03, "Llama-3.3-70B-Instruct": 70.6, "Llama-3.1-405B-Instruct": 405.9},
}
"""Billions of parameters, as the models' cards say."""


def test_each_known_shape_has_as_many_parameters_as_its_card_says(tmp_path):
    assert len(PUBLISHED) == len(SHAPES)
    for name, billions in PUBLISHED.items():
        size = Size.of(read_hf_config(write_shape(known(name), tmp_path / name), None), None)
        assert size.parameters / 1e9 == pytest.approx(billions, rel=0.02), name


def test_a_shape_has_a_name_a_file_or_keys(tmp_path):
    assert known("llama-70b") == SHAPES["meta-llama/Llama-3.3-70B-Instruct"] == known("Llama-3.3-70B-Instruct")
    (tmp_path / "shape.toml").write_text('model_type = "llama"\nhidden_size = 64\n')
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 32}')
    assert shape_of(str(tmp_path / "shape.toml"), {"hidden_size": 128})["hidden_size"] == 128
    assert shape_of(str(tmp_path / "config.json"), {})["hidden_size"] == 32
    with pytest.raises(ConfigError, match="no model of this name"):
        shape_of("llama-71b", {})
    with pytest.raises(ConfigError, match="model_type"):
        shape_of(None, {"hidden_size": 3})


# fitting


def test_least_squares_finds_what_is_there_and_nothing_below_zero():
    assert least_squares([[1, 2], [3, 1], [2, 2]], [5, 5, 6]) == pytest.approx([1, 2])
    assert least_squares([[1, 1], [2, 1], [4, 1]], [1, 2.5, 5.5])[1] == 0


def test_rates_are_found_again_from_the_runs_that_they_make():
    true = replace(
        RATES,
        peak_flops=3e10,
        train_share=1.0,
        decode_share=0.5,
        prefill_share=0.5,
        seconds_row=0.01,
        seconds_engine_step=0.02,
        seconds_token=1e-4,
        seconds_step=0.2,
        seconds_answer=0.001,
        memory_bandwidth=1e13,
    )
    runs = []
    for scale, groups, answer in ((1, 8, 8), (2, 32, 16), (4, 16, 24), (8, 16, 16), (3, 64, 32)):
        work = replace(WORK, parameters=scale * 1_000_000, active=scale * 1e6, layers=4, attention_width=64)
        batch = Batch(groups, 8, 12, answer, answer)
        its = replace(SCENARIO, work=work, batch=batch, rates=true, trained=work.parameters, replicas=1)
        told = forecast(its)
        seconds = {"generate": told.generating.alone, "optimizer": told.training.optimizer}
        seconds |= {"forward_backward": told.training.forward_backward, "weight_sync": told.syncing.seconds}
        runs.append(Measured(its, seconds | {"step": told.seconds}))
    found = fitted(runs, replace(RATES, memory_bandwidth=1e13))
    assert found.peak_flops == pytest.approx(3e10, rel=0.02) and found.seconds_row == pytest.approx(0.01, rel=0.02)
    for run in runs:
        assert forecast(replace(run.scenario, rates=found)).seconds == pytest.approx(run.seconds["step"], rel=0.03)


# the seed question, as docs/operations/planning.md argues it


def test_a_search_keeps_the_context_parallelism_of_the_toml(capsys):
    arguments = ["plan", "quickstart", "--shape", "qwen3-8b", "--search", "--gpus", "8", "--device", "H100", "--json"]
    assert main([*arguments, "--parallelism.context_parallel_degree", "2"]) == 0, capsys.readouterr().err
    table = json.loads(capsys.readouterr().out)
    for found in table["found"]:
        assert found["context"] == 2 and found["trainers"] % 2 == 0
        assert found["trainers"] == 2 * found["shards"] * found["tensor"] * found["stages"]
    ranks = [crew for device in table["devices"] for crew in device["processes"] if "trainer" in crew["name"]]
    assert len(ranks) == table["found"][0]["trainers"]


def test_seventy_billion_parameters_on_64_h100_for_seven_days(capsys):
    """Forty train, FSDP over twenty and tensor parallel over two; three engines of eight generate."""
    arguments = ["plan", "llama_70b_64h100", "--hosts", "8", "--gpus", "8", "--days", "7", "--search", "--json"]
    assert main(arguments) == 0, capsys.readouterr().err
    table = json.loads(capsys.readouterr().out)
    first, second = table["found"][:2]
    assert (first["trainers"], first["shards"], first["tensor"], first["stages"]) == (40, 20, 2, 1)
    assert (first["engines"], first["engine_ranks"], first["checkpointing"]) == (3, 8, "full")
    assert second["trainers"] != 40 and second["forecast"]["seconds"] > first["forecast"]["seconds"]
    assert table["simulation"]["staleness_max"] <= 4
    assert 5000 * table["simulation"]["seconds"] < 7 * 86400
    for device in table["devices"]:
        assert device["bytes"] <= table["usable_share"] * table["device_bytes"] * (1 + 1e-9)
