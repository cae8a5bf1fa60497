"""What a run will hold is told by arithmetic before it starts, and what cannot fit is refused then."""

import json

import pytest
import torch
from family_models import make

from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.planning import memory_plan
from titan_rl.controller.planning.memory_plan import (
    activations,
    check_memory,
    fit_into_memory,
    held_at_once,
    host_needs,
    memory_needs,
)
from titan_rl.controller.preflight.checks import check, read_config
from titan_rl.controller.session import Session
from titan_rl.data.types import Segment
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.layers.gated_delta_net import causal_convolution, gated_delta_rule, plan_recurrence
from titan_rl.models.spec import read_hf_config, spec_of
from titan_rl.models.weights.shards import expected_shapes
from titan_rl.trainer.titan_config import build_titan

GIB = 2**30


def needs_of(**sections) -> dict[str, dict[str, float]]:
    checked = check(load_config(None, sections))
    return {need.process: need.bytes_by_reason for need in memory_needs(checked)}


@pytest.fixture
def num_parameters() -> int:
    shapes = expected_shapes(spec_of(read_config(check(load_config(None, {}))), "")).values()
    return sum(a * (b[0] if b else 1) for a, *b in shapes)


def test_a_trainer_holds_its_state_and_a_copy(num_parameters):
    trainer = needs_of()["trainer"]
    assert trainer["weights"] == trainer["gradients"] == 4 * num_parameters
    assert trainer["moments"] == 8 * num_parameters
    assert trainer["snapshots"] == 12 * num_parameters
    assert trainer["weights to send"] == 2 * 4 * num_parameters
    assert "snapshots" not in needs_of(recovery={"snapshot_every": 0})["trainer"]


def test_a_draft_model_that_learns_is_trained_sent_and_fetched(num_parameters, tmp_path):
    make_tiny(tmp_path, seed=1)
    drafts = {"generator": {"speculative": {"method": "draft_model"}}}
    still = needs_of(generator={"speculative": {"method": "draft_model", "model": str(tmp_path)}})
    learns = needs_of(**drafts, drafter={"path": str(tmp_path)})
    assert still["generators"]["draft model"] == 4 * num_parameters
    assert learns["generators"]["draft model"] == 8 * num_parameters
    for reason in ("weights", "moments", "weights to send"):
        assert learns["trainer"][reason] == 2 * still["trainer"][reason], reason


def test_shards_add_up_to_one_model_and_replicas_to_several(num_parameters):
    sharded = needs_of(parallelism={"data_parallel_shard_degree": 2})["trainer"]
    replicated = needs_of(parallelism={"data_parallel_replicate_degree": 2})["trainer"]
    assert sharded["weights"] == 4 * num_parameters and replicated["weights"] == 8 * num_parameters


def test_of_a_model_with_adapters_only_they_are_trained(num_parameters):
    trainer = needs_of(lora={"rank": 4, "alpha": 8})["trainer"]
    assert trainer["weights"] > 4 * num_parameters
    assert trainer["snapshots"] == 6 * trainer["gradients"] < 6 * num_parameters


def test_a_reference_is_one_more_model_but_never_trained(num_parameters):
    plain, beside = needs_of()["trainer"], needs_of(algorithm={"kl_coefficient": 0.1})["trainer"]
    assert beside["weights"] == plain["weights"] + 4 * num_parameters
    assert beside["moments"] == plain["moments"] and beside["snapshots"] == plain["snapshots"]


def test_a_delta_rule_keeps_what_the_plan_counts(tmp_path):
    """Of 3 layers, 2 have linear attention, of 2 heads of keys and 6 of values; made again, one is there at a time."""
    make(tmp_path, "qwen3_next", linear_key_head_dim=48, linear_value_head_dim=32)
    hf, training = read_hf_config(tmp_path), build_titan(load_config(None)).training
    plan, kept = plan_recurrence([Segment(0, 256)], torch.device("cpu")), {}
    shapes = {"mixed": (2 * 2 * 48 + 6 * 32,), "q": (6, 48), "k": (6, 48), "v": (6, 32), "decay": (6,), "beta": (6,)}
    columns = {name: torch.rand(256, *shape).bfloat16().requires_grad_() for name, shape in shapes.items()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = [causal_convolution(columns.pop("mixed"), torch.rand(384, 1, 4).bfloat16().requires_grad_(), plan)]
        held.append(gated_delta_rule(*columns.values(), plan))
    training.seq_len, found = 256, sum(storage.nbytes() for storage in kept.values())
    with_states = [activations(hf, training, is_kept) for is_kept in (True, False)]
    hf.layer_types = ["full_attention"] * 3
    without = [activations(hf, training, is_kept) for is_kept in (True, False)]
    told = [more - less for more, less in zip(with_states, without, strict=True)]
    assert told == [pytest.approx(2 * found, rel=0.02), pytest.approx(found, rel=0.02)]


def test_engines_are_counted_each():
    one, two = (needs_of(generator={"replicas": count, "kv_cache_gib": 0.25})["generators"] for count in (1, 2))
    assert one["KV cache"] == 0.25 * GIB and two == {reason: 2 * size for reason, size in one.items()}


def test_what_cannot_fit_is_refused_in_one_line_and_nothing_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_plan, "memory_limit", lambda: GIB // 4)
    root = tmp_path / "run"
    refusal = r"needs at least 0.5 GiB of memory, and there are 0.2: .*snapshot_every"
    with pytest.raises(ConfigError, match=refusal) as error:
        Session.open(load_config(None, {"run": {"dir": str(root)}}))
    assert "\n" not in str(error.value) and not root.exists()


def test_what_fits_is_said_by_process(monkeypatch):
    monkeypatch.setattr(memory_plan, "memory_limit", lambda: 24 * GIB)
    said = check_memory(check(load_config(None, {})))
    assert said.startswith("memory: about ") and "of 24.0 GiB: trainer " in said and "KV cache 0.5" in said


def test_in_turns_less_is_held_at_once():
    """What the trainer wants for a step, or what engines hold beside libraries: the smaller of the two is spared."""
    checked = check(load_config(None, {"placement": {"mode": "colocated"}, "checkpoint": {"every": 10}}))
    needs = memory_needs(checked)
    of = {need.process: need.bytes_by_reason for need in needs}
    awake = of["generators"]["weights"] + of["generators"]["KV cache"]
    step = of["trainer"]["gradients"] + of["trainer"]["activations"]
    whole = sum(need.total for need in needs)
    assert held_at_once(checked.config, needs) == whole - min(awake, step) < whole
    assert "snapshots" not in of["trainer"], "the state itself is the only one"
    certain = held_at_once(checked.config, needs, ("activations",))
    assert certain == whole - of["trainer"]["activations"] - min(of["trainer"]["gradients"], awake)
    assert check_memory(checked).endswith("; in turns")
    apart = check(load_config(None, {}))
    assert held_at_once(apart.config, memory_needs(apart)) == sum(need.total for need in memory_needs(apart))


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(memory_plan, "DEVICE_TYPE", "cuda")


def with_limit(monkeypatch, limit: float, **sections):
    monkeypatch.setattr(memory_plan, "memory_limit", lambda: limit)
    return fit_into_memory(check(load_config(None, sections)))


def test_on_gpus_the_host_holds_what_is_put_aside(on_gpu, monkeypatch, num_parameters):
    checked = check(load_config(None, {"recovery": {"standby": False}}))
    needs = {need.process: need.bytes_by_reason for need in host_needs(checked)}
    assert needs["trainer"]["snapshots"] == 24 * num_parameters
    assert needs["trainer"]["checkpoint being written"] == 12 * num_parameters
    assert "weights to send" not in needs["trainer"] and "weights" not in needs["generators"]
    checked.config.mesh.transport = "shared_memory"
    needs = {need.process: need.bytes_by_reason for need in host_needs(checked)}
    assert needs["trainer"]["weights to send"] == 2 * 4 * num_parameters
    assert needs["generators"]["weights"] == 4 * num_parameters
    fitting, [said] = with_limit(monkeypatch, 24 * GIB)
    assert said.startswith("host memory: about ") and fitting.config.recovery.snapshot_every == 1


def test_on_gpus_snapshots_without_room_are_not_taken_and_that_is_said(on_gpu, monkeypatch, num_parameters):
    """The run's record says what was asked for: on another machine they may fit."""
    checked = check(load_config(None, {}))
    whole = sum(need.total for need in host_needs(checked))
    for limit, every in ((whole, 1), (whole - 1, 0)):
        fitting, told = with_limit(monkeypatch, limit)
        assert fitting.config.recovery.snapshot_every == every
        assert [line.startswith("warning: snapshots of the trainer would take") for line in told[1:]] == [True] * (
            1 - every
        )
        assert not any("\n" in line for line in told)
    assert "snapshots" not in host_needs(fitting)[0].bytes_by_reason
    assert with_limit(monkeypatch, whole - 1, recovery={"snapshot_every": 0})[1] == told[:1], "it was asked for"


def test_on_a_cpu_snapshots_are_never_left_out_unasked(monkeypatch):
    with pytest.raises(ConfigError, match="snapshot_every"):
        with_limit(monkeypatch, GIB // 4)
    fitting, told = with_limit(monkeypatch, 24 * GIB)
    assert fitting.config.recovery.snapshot_every == 1 and len(told) == 1


def test_workspaces_that_may_hold_more_than_is_left_are_told(monkeypatch, tmp_path):
    row = dict(problem_statement="a", files={"a.py": "a = 1\n"}, calls=[], FAIL_TO_PASS=["a"])
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row | {'problem_statement': n})}\n" for n in "abcdef"))

    def told(limit: float, **options) -> list[str]:
        options = {"file": "rows.jsonl", "memory_mib": 512, "disk_mib": 256} | options
        sections = {"task": {"name": "swe", "options": options}, "run": {"plugin_path": [str(tmp_path)]}}
        return with_limit(monkeypatch, limit, **sections, eval={"prompts": 1}, sft={"steps": 0})[1]

    [_, warning] = told(14 * GIB)
    assert warning.startswith("warning: workspaces may hold up to 12.0 GiB") and "about 9." in warning
    assert len(told(24 * GIB)) == len(told(14 * GIB, sessions=4)) == 1


def test_a_launcher_s_hosts_have_memory_of_their_own(monkeypatch):
    monkeypatch.setattr(memory_plan, "memory_limit", lambda: 0)
    checked = check(load_config(None, {}))
    checked.config.mesh.launcher = "mine:launcher"
    assert check_memory(checked) == ""
