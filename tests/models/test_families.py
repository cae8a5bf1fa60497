"""Each model family against transformers: sizes that are odd wherever they may be, and no parameter that is zero."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import batch_of
from family_models import CASES, DEEP_YARN, EVEN, PLAIN, even, make
from layout_ranks import Layout, Step, one_step, run_layouts
from parity import TOLERANCE, assert_documents_agree, assert_packed_rows_agree, distance, learner_of, reference_logits
from safetensors.torch import load_file, save_file

from titan_rl.config.load import ConfigError, load_config
from titan_rl.data.types import Segment
from titan_rl.models.layers.attention import plan_attention
from titan_rl.models.spec import longest_rollout, model_spec, read_hf_config
from titan_rl.models.weights.hf_weights import check_weights
from titan_rl.models.weights.shards import expected_shapes
from titan_rl.trainer.model.layout import check_layout
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")

WINDOWS = [name for name, (_, settings) in CASES.items() if settings.get("sliding_window")]
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """(learner, transformers model) of one directory."""
    path = tmp_path_factory.mktemp("model")
    reference = make(path, request.param)
    return learner_of(path), reference


def test_documents_agree_with_transformers(pair):
    assert_documents_agree(*pair, lengths=[1, 2, 31, 200])


@pytest.mark.parametrize("share_prefix", [True, False])
def test_packed_rows_agree_with_transformers(pair, share_prefix):
    assert_packed_rows_agree(*pair, share_prefix)


def test_a_window_reaches_back_into_the_prefix_and_is_made_once():
    """A prompt of 5 tokens, and a sample of 3 behind it, whose queries see 3 tokens each."""
    plan = plan_attention([Segment(0, 5), Segment(5, 3, ((0, 5),))], 8, torch.device("cpu"))
    [_, sample_DQK] = plan.masks(3)
    assert [query_K.nonzero().flatten().tolist() for query_K in sample_DQK[0]] == [[3, 4, 5], [4, 5, 6], [5, 6, 7]]
    assert plan.masks(3) is plan.masks(3) and plan.masks(None) is not plan.masks(3)
    assert plan.masks(None)[0] is None and plan.masks(5)[0] is None  # the prompt alone is plainly causal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_case
def test_weights_come_back_bit_for_bit_and_are_those_expected(tmp_path, case, dtype):
    source, out = tmp_path / "source", tmp_path / "out"
    make(source, case, dtype=dtype)
    learner_of(source).save_hf(out, dtype=str(dtype).removeprefix("torch."))
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in before.items()} == expected_shapes(model_spec(source))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        wanted = torch.float32 if name.endswith("e_score_correction_bias") else dtype
        assert after[name].dtype == wanted and torch.equal(after[name], tensor), name
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_every_parameter_is_trained(pair):
    learner, _ = pair
    learner.forward_backward(batch_of(0).rows[0])
    for name, parameter in learner.model_parts[0].named_parameters():
        assert float(parameter.grad.abs().max()) > 0, name
    learner.optimizer.zero_grad()


def logits_without(path: Path, case: str, **changes) -> torch.Tensor:
    return reference_logits(make(path, case, **changes), np.arange(3, 90))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        *((name, dict(sliding_window=200)) for name in WINDOWS),
        ("phi3 longrope", dict(rope_parameters=PLAIN)),
        ("gemma3_text", dict(query_pre_attn_scalar=10)),
        ("gemma3_text", dict(layer_types=["sliding_attention"] * 3)),
        ("gemma3_text", dict(rope_parameters={"full_attention": PLAIN, "sliding_attention": PLAIN})),
        ("deepseek_v3 yarn", dict(rope_parameters=PLAIN)),
        ("deepseek_v3 yarn", dict(rope_parameters=DEEP_YARN | dict(mscale=0.7))),
        ("deepseek_v3 yarn", dict(rope_parameters=DEEP_YARN | dict(mscale_all_dim=0.9))),
        ("glm4", dict(rope_parameters=PLAIN | dict(partial_rotary_factor=1.0))),
        ("glm4_moe", dict(routed_scaling_factor=1.0)),
        ("glm4_moe", dict(n_group=1, topk_group=1)),
        ("glm4_moe", dict(norm_topk_prob=False)),
        ("glm4_moe 2", dict(rope_parameters=PLAIN | dict(partial_rotary_factor=1.0))),
        ("gpt_oss", dict(rope_parameters=PLAIN)),
        ("gpt_oss", dict(swiglu_limit=1e9)),
        ("qwen3_5_text", dict(layer_types=["full_attention", *["linear_attention"] * 4])),
        ("qwen3_5_text", dict(rope_parameters=PLAIN)),
    ],
)
def test_what_a_config_asks_for_shows_in_the_logits(tmp_path, case, changes):
    """Else the agreement above would prove nothing about it."""
    assert distance(logits_without(tmp_path, case, **changes), logits_without(tmp_path, case)) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("gpt_oss", dict(quantization_config={"quant_method": "mxfp4"}), ["mxfp4", "Mxfp4Config(dequantize=True)"]),
        ("qwen2", dict(quantization_config={"quant_method": "gptq"}), ["gptq", "save_pretrained"]),
        (
            "qwen2",
            dict(quantization_config={"quant_method": "fp8"}),
            ["--resume --checkpoint.export_quantization=none"],
        ),
        ("gpt_oss", dict(layer_types=["full_attention"] * 3), ["layer_types", "sliding_attention"]),
        ("gpt_oss", dict(rope_parameters=PLAIN), ["rope", "yarn"]),
        ("gpt_oss", dict(swiglu_limit=9.0), ["swiglu_limit = 9.0", "7.0"]),
        ("deepseek_v3", dict(topk_method=None), ["topk_method = None", "'noaux_tc'"]),
        ("deepseek_v3", dict(scoring_func="softmax"), ["scoring_func = 'softmax'", "'sigmoid'"]),
        ("deepseek_v3", dict(rope_interleave=False), ["rope_interleave = False", "True"]),
        ("deepseek_v3", dict(rms_norm_eps=1e-5), ["rms_norm_eps = 1e-05", "1e-06"]),
        ("deepseek_v3", dict(attention_bias=True), ["attention_bias = True", "False"]),
        ("deepseek_v3", dict(moe_layer_freq=2), ["moe_layer_freq = 2", "1"]),
        ("deepseek_v3", dict(num_key_value_heads=3), ["num_key_value_heads = 3", "6"]),
        ("deepseek_v3", dict(kv_lora_rank=0), ["kv_lora_rank = 0"]),
        ("deepseek_v3", dict(rope_parameters=PLAIN | dict(rope_type="linear", factor=2.0)), ["'linear'", "'yarn'"]),
        ("deepseek_v3", dict(rope_parameters=DEEP_YARN | dict(mscale=None)), ["mscale", "neither"]),
        ("deepseek_v3", dict(rope_parameters=DEEP_YARN | dict(attention_factor=1.1)), ["attention_factor"]),
        ("glm4", dict(hidden_act="gelu"), ["hidden_act = 'gelu'", "'silu'"]),
        ("glm4", dict(rope_parameters=PLAIN | dict(partial_rotary_factor=0.25)), ["partial_rotary_factor", "pairs"]),
        ("glm4_moe", dict(n_group=2), ["n_group = 2", "n_routed_experts = 9"]),
        ("glm4_moe", dict(topk_group=4), ["topk_group = 4", "n_group = 3"]),
        ("glm4_moe", dict(num_experts_per_tok=7), ["num_experts_per_tok = 7", "6 experts", "topk_group = 2"]),
        ("glm4_moe", dict(first_k_dense_replace=3), ["first_k_dense_replace = 3", "num_hidden_layers = 3"]),
        ("glm4_moe", dict(n_shared_experts=0), ["n_shared_experts = 0"]),
        ("qwen3_next", dict(num_experts_per_tok=6), ["num_experts_per_tok = 6", "num_experts = 5"]),
        ("gemma3_text", dict(final_logit_softcapping=30.0), ["final_logit_softcapping = 30.0", "None"]),
        ("gemma3_text", dict(hidden_activation="silu"), ["hidden_activation = 'silu'", "'gelu_pytorch_tanh'"]),
        ("qwen3_5_text", dict(attn_output_gate=False), ["attn_output_gate = False", "True"]),
        ("qwen3_5_text", dict(output_gate_type="sigmoid"), ["output_gate_type = 'sigmoid'", "'silu'"]),
        ("qwen3_5_text", dict(linear_num_key_heads=4), ["linear_num_value_heads = 6", "linear_num_key_heads = 4"]),
        ("qwen3_5_text", dict(linear_conv_kernel_dim=0), ["linear_conv_kernel_dim = 0"]),
        ("qwen3_5_text", dict(layer_types=["sliding_attention"] * 5), ["layer_types", "linear_attention"]),
        ("qwen2", dict(use_sliding_window=True), ["use_sliding_window = True", "False"]),
    ],
)
def test_what_is_not_computed_is_refused_in_one_line(tmp_path, case, changes, words):
    make(tmp_path, case)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError) as caught:
        read_hf_config(tmp_path)
    [line] = str(caught.value).splitlines()
    assert all(word in line for word in words), line


def test_only_yarn_has_a_temperature(tmp_path):
    rope = PLAIN | dict(factor=4.0, mscale_all_dim=1.0)
    reference = make(tmp_path, "deepseek_v3", rope_parameters=rope)
    [attention, *_] = (layer.attention for layer in model_spec(tmp_path).model.layers)
    assert attention.inner_attention.scale == pytest.approx(reference.model.layers[0].self_attn.scaling)


def test_the_correction_bias_changes_the_choice_and_no_step_moves_it(tmp_path):
    """Else its agreement with transformers would prove nothing."""
    reference, name = make(tmp_path, "glm4_moe"), "model.layers.2.mlp.gate.e_score_correction_bias"
    wanted = reference_logits(reference, np.arange(3, 90))
    learner = learner_of(tmp_path)
    learner.train(batch_of(0).rows[0], True)
    [shard] = [shard for shard in learner.shards() if shard.name == name]
    assert torch.equal(shard.tensor, load_file(tmp_path / "model.safetensors")[name])
    reference.get_buffer(name).zero_()
    assert distance(reference_logits(reference, np.arange(3, 90)), wanted) > 100 * TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize(("case", "rounds"), [("deepseek_v3", False), ("glm4_moe", False), ("qwen3_next", True)])
def test_a_router_in_bf16_has_the_precision_that_it_has_in_the_engine(tmp_path, case, rounds):
    """Weights in fp32 always, and logits but those behind a softmax, which vLLM rounds."""
    make(tmp_path, case)
    router = model_spec(tmp_path).model.layers[-1].moe.router.build().bfloat16()
    generator = torch.Generator().manual_seed(4)
    router.gate.weight.normal_(generator=generator)
    x_BLD = torch.randn(1, 50, 60, generator=generator).bfloat16()
    weights_BLK, _, scores_BLE = router(x_BLD)
    exact_BLE, found_BLE = x_BLD.double() @ router.gate.weight.double().T, router.gate(x_BLD)
    assert weights_BLK.dtype == scores_BLE.dtype == found_BLE.dtype == torch.float32
    assert torch.equal(found_BLE, found_BLE.bfloat16().float()) == rounds
    assert distance(found_BLE, exact_BLE) < (2**-8 if rounds else 1e-6)


@pytest.mark.parametrize(("told", "is_fine"), [(1, True), (0, False)])
def test_layers_for_multi_token_prediction_are_written_as_they_were(tmp_path, told, is_fine):
    make(tmp_path, "glm4_moe", num_nextn_predict_layers=told)
    file = tmp_path / "model.safetensors"
    further = {f"model.layers.3.{name}.weight": torch.ones(60) for name in ("enorm", "hnorm")}
    save_file(load_file(file) | further, file)
    spec = model_spec(tmp_path)
    if is_fine:
        check_weights(spec, tmp_path)
        learner_of(tmp_path).save_hf(tmp_path / "out")
        written = load_file(tmp_path / "out" / "model.safetensors")
        assert written.keys() == expected_shapes(spec).keys() | further.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in further.items())
    else:
        with pytest.raises(ValueError, match="2 tensors that config.json does not ask for, first model.layers.3"):
            check_weights(spec, tmp_path)


def test_rollouts_end_where_longrope_would_change(tmp_path):
    make(tmp_path, "phi3 longrope")
    assert longest_rollout(10**6, tmp_path) == 220


def test_an_expert_has_its_width_by_another_name(tmp_path):
    make(tmp_path, "gpt_oss", **EVEN | dict(intermediate_size=53))
    titan = build_titan(load_config(None, {"parallelism": {"tensor_parallel_degree": 2}}))
    with pytest.raises(ConfigError, match="must divide the model's intermediate_size = 53"):
        check_layout(read_hf_config(tmp_path), titan.parallelism)


def test_tensor_parallel_ranks_cannot_share_linear_attention(tmp_path):
    make(tmp_path, "qwen3_5_text")
    titan = build_titan(load_config(None, {"parallelism": {"tensor_parallel_degree": 2}}))
    with pytest.raises(ConfigError, match="tensor_parallel_degree = 2 cannot share the model's linear attention"):
        check_layout(read_hf_config(tmp_path), titan.parallelism)


LAYOUTS = {
    "dp2": dict(data_parallel_shard_degree=2),
    "tp2": dict(tensor_parallel_degree=2),
    "tp2 no SP": dict(tensor_parallel_degree=2, enable_sequence_parallel=False),
    "pp2": dict(pipeline_parallel_degree=2),
    "ep2": dict(data_parallel_shard_degree=2, expert_parallel_degree=2),
}
SPREAD = {
    "qwen2": ["tp2"],
    "mistral window": ["tp2", "pp2"],
    "olmo2": ["tp2", "tp2 no SP"],
    "phi3 window": ["dp2", "tp2", "tp2 no SP"],
    "gemma3_text": ["dp2", "tp2"],
    "deepseek_v3": ["dp2", "tp2", "tp2 no SP", "ep2", "pp2"],
    "glm4": ["dp2", "tp2", "tp2 no SP", "pp2"],
    "glm4_moe": ["dp2", "tp2", "tp2 no SP", "ep2", "pp2"],
    "gpt_oss": ["dp2", "tp2", "tp2 no SP", "ep2", "pp2"],
    "qwen3_5_text": ["dp2", "pp2"],
    "qwen3_next": ["dp2", "ep2", "pp2"],
}


INVARIANT = [
    Layout("qwen2", LAYOUTS["tp2"], engine_ranks=1),
    Layout("qwen2", LAYOUTS["tp2 no SP"], engine_ranks=2),
    Layout("qwen2", LAYOUTS["tp2"], engine_ranks=2, dtype="bfloat16"),
]


@pytest.fixture(scope="module")
def spread(tmp_path_factory) -> Path:
    """A step of every family in every layout, by two processes."""
    folder = tmp_path_factory.mktemp("layouts")
    for case in SPREAD:
        # At the scale of the rest, rounding each weight of gpt_oss anew moves grad_norm by 3e-5; at this one by 3e-7.
        make(folder / "models" / case, case, scale=0.15, **even(case))
    layouts = {f"{case}, {name}": Layout(case, LAYOUTS[name]) for case, names in SPREAD.items() for name in names}
    layouts |= {f"invariant {number}": layout for number, layout in enumerate(INVARIANT)}
    run_layouts(2, folder / "models", folder, layouts, one_step)
    return folder


@pytest.fixture(scope="module")
def alone(spread) -> dict[str, Step]:
    return {case: one_step(Layout(case), spread / "models", spread) for case in SPREAD}


@pytest.mark.parametrize(("case", "layout"), [(case, layout) for case, names in SPREAD.items() for layout in names])
def test_two_ranks_step_as_one_does(spread, alone, case, layout):
    step, wanted = torch.load(spread / f"{case}, {layout}.pt"), alone[case]
    for metrics in step["metrics"]:
        for name in ("loss", "grad_norm", "entropy"):
            assert metrics[0][name] == pytest.approx(getattr(wanted.metrics[0][0], name), rel=1e-5), name
    for name, tensor in load_file(spread / "models" / case / "model.safetensors").items():
        assert torch.equal(step["loaded"][name], tensor), name
        difference = (step["trained"][name] - wanted.trained[name]).norm()
        assert difference <= 1e-3 * (wanted.trained[name] - tensor).norm(), name


@pytest.mark.parametrize("number", range(len(INVARIANT)))
def test_two_ranks_compute_the_bits_of_one_beside_an_engine_of_two(spread, alone, number):
    layout = INVARIANT[number]
    step = torch.load(spread / f"invariant {number}.pt")
    wanted = one_step(replace(layout, parallelism={}, engine_ranks=2), spread / "models", spread)
    assert len(step["logprobs"]) > 1
    for logprob_S, wanted_S in zip(step["logprobs"], wanted.logprobs, strict=True):
        assert torch.equal(logprob_S, wanted_S)
    if layout.dtype == "float32":  # in bf16 Adam makes a whole step of what rounding makes of a small gradient
        for name, tensor in load_file(spread / "models" / layout.model / "model.safetensors").items():
            plain = alone[layout.model].trained[name]
            assert (step["trained"][name] - plain).norm() <= 1e-3 * (plain - tensor).norm(), name
