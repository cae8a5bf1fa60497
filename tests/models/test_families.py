"""Each model family against transformers: sizes that are odd wherever they may be, and no parameter that is zero."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import batch_of
from family_models import CASES, EVEN, PLAIN, make
from layout_ranks import Layout, Step, one_step, run_layouts
from parity import TOLERANCE, assert_documents_agree, assert_packed_rows_agree, distance, learner_of, reference_logits
from safetensors.torch import load_file

from titan_rl.config.load import ConfigError, load_config
from titan_rl.data.types import Segment
from titan_rl.models.layers.attention import plan_attention
from titan_rl.models.spec import longest_rollout, model_spec, read_hf_config
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
        assert after[name].dtype == dtype and torch.equal(after[name], tensor), name


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
        ("gpt_oss", dict(rope_parameters=PLAIN)),
        ("gpt_oss", dict(swiglu_limit=1e9)),
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
        ("gpt_oss", dict(layer_types=["full_attention"] * 3), ["layer_types", "sliding_attention"]),
        ("gpt_oss", dict(rope_parameters=PLAIN), ["rope", "yarn"]),
        ("gpt_oss", dict(swiglu_limit=9.0), ["swiglu_limit = 9.0", "7.0"]),
        ("gemma3_text", dict(final_logit_softcapping=30.0), ["final_logit_softcapping = 30.0", "None"]),
        ("gemma3_text", dict(hidden_activation="silu"), ["hidden_activation = 'silu'", "'gelu_pytorch_tanh'"]),
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


def test_rollouts_end_where_longrope_would_change(tmp_path):
    make(tmp_path, "phi3 longrope")
    assert longest_rollout(10**6, tmp_path) == 220


def test_an_expert_has_its_width_by_another_name(tmp_path):
    make(tmp_path, "gpt_oss", **EVEN | dict(intermediate_size=53))
    titan = build_titan(load_config(None, {"parallelism": {"tensor_parallel_degree": 2}}))
    with pytest.raises(ConfigError, match="must divide the model's intermediate_size = 53"):
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
    "gpt_oss": ["dp2", "tp2", "tp2 no SP", "ep2", "pp2"],
}


@pytest.fixture(scope="module")
def spread(tmp_path_factory) -> Path:
    """A step of every family in every layout, by two processes."""
    folder = tmp_path_factory.mktemp("layouts")
    for case in SPREAD:
        # At the scale of the rest, rounding each weight of gpt_oss anew moves grad_norm by 3e-5; at this one by 3e-7.
        make(folder / "models" / case, case, scale=0.15, **EVEN)
    layouts = {f"{case}, {name}": Layout(case, LAYOUTS[name]) for case, names in SPREAD.items() for name in names}
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
