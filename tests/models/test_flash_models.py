"""Models where flash attention is: they build on Hopper, choose it where it fits, compute the same, and compile.

No GPU is needed. Capabilities are faked, and the kernel has a loop on the CPU in its place (flash_on_cpu.py).
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from batches import batch_of
from family_models import CASES, EVEN, make
from flash_on_cpu import flash_on_cpu
from layout_ranks import Layout, one_packed_step, one_step, run_layouts
from torchtitan.config import CompileConfig

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.preflight.checks import check_model
from titan_rl.controller.preflight.role_checks import check_roles
from titan_rl.data.batches.packing import dummy_row
from titan_rl.environments.registry import make_task
from titan_rl.kernels.packed_attention import PackedPlan, packed_attention
from titan_rl.models import device
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.models.layers import attention, memory_saving
from titan_rl.models.layers.attention import BlockPlan, attention_form, plan_attention
from titan_rl.models.spec import model_spec, read_hf_config
from titan_rl.trainer.model.layout import check_products
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCKS = ("deepseek_v3", "deepseek_v3 yarn", "gpt_oss", "qwen3_5_text", "qwen3_next")
"""Whose latents, sinks and states flash attention does not know."""
OF_THEIR_OWN = ("deepseek", "phi3")
FITTING = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
"""Heads of a multiple of 8."""
every_case = pytest.mark.parametrize("case", CASES)


def fitting(case: str) -> dict:
    """``head_dim`` is none of Phi-3's keys, and DeepSeek's are others."""
    longrope = {"rope_parameters": CASES[case][1]["rope_parameters"] | _FACTORS} if "longrope" in case else {}
    more = {"num_key_value_heads": 4} if case.startswith("deepseek") else {}
    return {k: v for k, v in FITTING.items() if k != "head_dim" or not case.startswith(OF_THEIR_OWN)} | longrope | more


_FACTORS = dict(short_factor=[1.0, 1.1, 1.2, 1.3, 1.5, 1.7], long_factor=[2.0, 3.0, 4.0, 5.0, 6.0, 8.0])


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(device, "DEVICE_TYPE", "cuda")


@every_case
def test_every_family_builds_on_hopper(hopper, tmp_path, case):
    """TorchTitan's own attention wants FlashAttention 3 there, which nobody has asked to install."""
    make(tmp_path, case)
    spec = model_spec(tmp_path)
    with torch.device("meta"):
        model = spec.model.build()
    assert sum(parameter.numel() for parameter in model.parameters()) > 0


@every_case
def test_flash_attention_is_chosen_where_it_fits(hopper, tmp_path, case):
    make(tmp_path / "odd", case)
    make(tmp_path / "fitting", case, **fitting(case))
    odd, fit = (model_spec(tmp_path / name).model for name in ("odd", "fitting"))
    assert attention_form(odd, CUDA, torch.bfloat16) == ("packed" if case == "phi3 longrope" else "blocks")
    assert attention_form(fit, CUDA, torch.bfloat16) == ("blocks" if case in BLOCKS else "packed")
    assert attention_form(fit, CUDA, torch.float32) == attention_form(fit, CPU, torch.bfloat16) == "blocks"


def test_older_gpus_have_none(hopper, monkeypatch, tmp_path):
    make(tmp_path, "qwen2", **FITTING)
    spec = model_spec(tmp_path).model
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert attention_form(spec, CUDA, torch.bfloat16) == "blocks"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert attention_form(spec, CUDA, torch.bfloat16) == "packed"


def test_large_heads_need_the_shared_memory_of_some(hopper, monkeypatch, tmp_path):
    make(tmp_path, "gemma3_text", **FITTING | dict(head_dim=256))
    spec = model_spec(tmp_path).model
    assert attention_form(spec, CUDA, torch.bfloat16) == "packed"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    assert attention_form(spec, CUDA, torch.bfloat16) == "blocks"


@pytest.mark.parametrize("case", [case for case in CASES if case not in BLOCKS])
def test_both_forms_give_the_same_logits(tmp_path, case):
    make(tmp_path, case)
    config = load_config(None)
    [model] = Learner(config, build_titan(config), tmp_path).model_parts
    for row in batch_of(0).rows[0]:
        logits = {}
        for form, kind in (("blocks", BlockPlan), ("packed", PackedPlan)):
            plan = plan_attention(row.segments, len(row.tokens_T), CPU, form)
            assert isinstance(plan, kind)
            tokens, positions = (torch.from_numpy(x)[None] for x in (row.tokens_T, row.positions_T))
            with torch.no_grad():
                logits[form] = model(tokens, positions=positions, attention_masks=plan)
        difference = (logits["packed"] - logits["blocks"]).abs().max() / logits["blocks"].abs().max()
        assert difference < 1e-4


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The forms of a GPU, computed here."""
    monkeypatch.setattr(memory_saving, "_is_plain", lambda tensor: False)
    monkeypatch.setattr("titan_rl.trainer.model.sharded_model.attention_form", lambda *_: "packed")
    monkeypatch.setattr(attention, "packed_attention", partial(packed_attention, implementation="flash"))
    with flash_on_cpu():
        yield
    torch._dynamo.reset()


def learner_of(path, compiled: bool) -> Learner:
    """The tracer alone, no compiler behind it: that is where rows of ever new lengths went wrong."""
    config = load_config(None)
    titan = build_titan(config)
    return Learner(config, replace(titan, compile=CompileConfig(enable=compiled, backend="eager")), path)


def gradients(learner: Learner, rows) -> torch.Tensor:
    learner.forward_backward(rows)
    parameters = learner.model_parts[0].parameters()
    found = torch.cat([parameter.grad.to_local().flatten() for parameter in parameters])
    learner.optimizer.zero_grad()
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_layers_are_compiled_for_rows_of_all_lengths(as_on_a_gpu, monkeypatch, tmp_path, family):
    if family == "llama":
        make_tiny(tmp_path / "model", seed=0, num_layers=2)
    else:  # one layer with a window, others without
        windows = dict(layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2)
        make(tmp_path / "model", "gemma3_text", **windows)
    plain, compiled = (learner_of(tmp_path / "model", each) for each in (False, True))
    torch._dynamo.utils.counters.clear()
    for seed in range(12):
        tokens = (64, 200, 40, 90, 300, 1000)[seed % 6]
        rows = batch_of(seed, row_tokens=tokens, share_prefix=seed not in (4, 9)).rows[0]
        rows = [*rows, dummy_row()] if seed % 2 else rows
        wanted, found = (gradients(learner, rows) for learner in (plain, compiled))
        assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
        compiled.policy.measure(rows)
    kinds = 1 if family == "llama" else 2
    # with gradients or without, shared prefixes or not, one token; each of the first two at first of one length
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 10 * kinds


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activations_can_be_computed_again(as_on_a_gpu, tmp_path, mode):
    make_tiny(tmp_path / "model", seed=0, num_layers=2)
    config = load_config(None, {"activation_checkpoint": {"mode": mode}})
    again = Learner(config, build_titan(config), tmp_path / "model")
    for rows in batch_of(0).rows:
        assert torch.equal(gradients(again, rows), gradients(learner_of(tmp_path / "model", False), rows))


LAYOUTS = {
    "dp2": dict(data_parallel_shard_degree=2),
    "tp2": dict(tensor_parallel_degree=2),
    "tp2 no SP": dict(tensor_parallel_degree=2, enable_sequence_parallel=False),
    "pp2": dict(pipeline_parallel_degree=2),
}


def test_two_ranks_step_as_one_does_with_blocks(tmp_path):
    models, case = tmp_path / "models", "mistral window"
    make(models / case, case, scale=0.15, **EVEN)
    wanted = one_step(Layout(case), models, tmp_path)
    run_layouts(2, models, tmp_path, {name: Layout(case, each) for name, each in LAYOUTS.items()}, one_packed_step)
    for name in LAYOUTS:
        step = torch.load(tmp_path / f"{name}.pt")
        for key in ("loss", "grad_norm", "entropy"):
            assert step["metrics"][0][0][key] == pytest.approx(getattr(wanted.metrics[0][0], key), rel=1e-5), name
        for tensor, trained in wanted.trained.items():
            difference = (step["trained"][tensor] - trained).norm()
            assert difference <= 1e-3 * (trained - wanted.loaded[tensor]).norm(), (name, tensor)


def titan_of(**changes):
    return build_titan(load_config(None, {"compile": {"enable": True}, **changes}))


BF16 = {"training": {"mixed_precision_param": "bfloat16"}}


@pytest.mark.parametrize(
    ("case", "fits", "changes", "words"),
    [
        ("qwen2", True, {}, ["float32", "training.mixed_precision_param = 'bfloat16'"]),
        ("qwen2", False, BF16, ["multiple of 8", "have 10", "leave [compile] out"]),
        ("gpt_oss", True, BF16, ["sinks", "leave [compile] out"]),
        ("gpt_oss", True, {}, ["float32", "leave [compile] out"]),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(hopper, tmp_path, case, fits, changes, words):
    make(tmp_path, case, **(fitting(case) if fits else {}))
    with pytest.raises(ConfigError) as caught:
        check_products(read_hf_config(tmp_path), titan_of(**changes))
    [line] = str(caught.value).splitlines()
    assert line.startswith("compile.enable = true") and all(word in line for word in words), line
    assert ("bfloat16" in line) == (case == "qwen2" and not changes)


def test_what_can_be_compiled_is_not_refused(hopper, tmp_path):
    make(tmp_path, "qwen2", **FITTING)
    hf = read_hf_config(tmp_path)
    check_products(hf, titan_of(**BF16))
    check_products(hf, build_titan(load_config(None)))  # nothing is to be compiled


def test_a_run_is_refused_before_it_starts(hopper):
    with pytest.raises(ConfigError, match="compile.enable = true needs flash attention.*float32"):
        check_model(load_config(None, {"compile": {"enable": True}}))
    check_model(load_config(None, {"compile": {"enable": True}} | BF16))


def test_a_role_is_refused_by_its_own_model(hopper, tmp_path):
    tokenizer = character_tokenizer()
    make(tmp_path, "gpt_oss", **FITTING | dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id))
    tokenizer.save_pretrained(tmp_path)
    overrides = {"algorithm": {"name": "distillation"}, "teacher": {"path": str(tmp_path)}} | BF16
    algorithm = make_algorithm(load_config(None, overrides).algorithm, ())
    task = make_task(load_config(None, overrides).task, [])
    check_roles(load_config(None, overrides), algorithm, None, task)
    with pytest.raises(ConfigError, match="compile.enable = true needs flash attention.*sinks"):
        check_roles(load_config(None, overrides | {"compile": {"enable": True}}), algorithm, None, task)


def test_a_role_is_checked_for_the_runs_devices_and_named(tmp_path):
    """Whose GPUs are other hosts'; what is the policy's alone, as names of its layers, is not asked of it."""
    make_tiny(tmp_path, seed=1, architecture="qwen3_moe")
    distillation = {"algorithm": {"name": "distillation"}, "teacher": {"path": str(tmp_path)}}
    hosts = {"hosts": {"launcher": "slurm", "count": 2, "gpus": 8}}
    filters = {"recipe_name": "rowwise", "filter_fqns": ["layers.3."]}

    def check(**tables) -> None:
        config = load_config(None, distillation | tables)
        check_roles(config, make_algorithm(config.algorithm, ()), None, make_task(config.task, []))

    check(compile={"enable": True}, **hosts)
    with pytest.raises(ConfigError, match=f"teacher.path = '{tmp_path}': float8.*: a mixture of experts"):
        check(float8=filters)
    make_tiny(tmp_path, seed=1, num_layers=2)
    check(float8=filters)
