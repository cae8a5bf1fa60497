"""The TorchTitan models against transformers, on whole documents and on packed rows, and weights both ways."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from parity import (
    TOLERANCE,
    assert_documents_agree,
    assert_packed_rows_agree,
    distance,
    learner_of,
    reference_logits,
    row_logits,
)
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from titan_rl.config.load import load_config
from titan_rl.data.types import Row, Segment
from titan_rl.generator.weights.quantization.e4m3 import quantize_weight, tolerance
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.families.registry import FAMILIES, REQUIRED, Family, PackedLlama
from titan_rl.models.layers.decoder import decoder_config
from titan_rl.models.spec import longest_rollout, model_spec, read_hf_config
from titan_rl.models.weights.hf_weights import load_hf
from titan_rl.models.weights.quantized_files import Quantizer
from titan_rl.models.weights.shards import local_shards
from titan_rl.trainer.model.parallel import parallel_model
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
VARIANTS = {
    "llama": {},
    "llama untied": dict(tie_word_embeddings=False),
    "qwen3": dict(architecture="qwen3"),
    "qwen3 untied": dict(architecture="qwen3", tie_word_embeddings=False),
    "qwen3_moe": dict(architecture="qwen3_moe", tie_word_embeddings=False),
    "qwen3_moe not normalized": dict(architecture="qwen3_moe", norm_topk_prob=False),
    "rope llama3": dict(rope_parameters=LLAMA3),
    "rope linear": dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)),
    "rope yarn": dict(
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
    ),
}


@torch.no_grad()
def make_model(path, **settings) -> PreTrainedModel:
    """A tiny model with weights so uneven that no norm, head or position can be taken for another."""
    model = make_tiny(path, seed=1, hidden_size=64, num_layers=2, **settings).eval()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 2.0, generator=generator)
        else:
            parameter.normal_(0, 0.2, generator=generator)
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """(learner, transformers model) of one directory."""
    path = tmp_path_factory.mktemp("model")
    reference = make_model(path, **VARIANTS[request.param])
    return learner_of(path), reference


def test_documents_agree_with_transformers(pair):
    assert_documents_agree(*pair, lengths=[1, 2, 31, 200])


@pytest.mark.parametrize("share_prefix", [True, False])
def test_packed_rows_agree_with_transformers(pair, share_prefix):
    assert_packed_rows_agree(*pair, share_prefix)


def test_rope_scaling_is_not_the_plain_one(tmp_path):
    """Else the agreement above would prove nothing about scaling."""
    tokens = np.arange(3, 90)
    plain, *scaled = (
        reference_logits(make_model(tmp_path, **VARIANTS[name]), tokens)
        for name in ("llama", "rope llama3", "rope linear", "rope yarn")
    )
    assert all(distance(logits, plain) > 100 * TOLERANCE for logits in scaled)


def test_smollm2_agrees_with_transformers_and_comes_back_bit_for_bit(smollm2, tmp_path):
    learner = learner_of(smollm2)
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    assert_documents_agree(learner, reference, lengths=[40])
    for share_prefix in (True, False):
        assert_packed_rows_agree(learner, reference, share_prefix)
    learner.save_hf(tmp_path / "out", dtype="bfloat16")
    before, after = (load_file(path / "model.safetensors") for path in (smollm2, tmp_path / "out"))
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["llama", "llama untied", "qwen3", "qwen3_moe"])
def test_weights_come_back_bit_for_bit(tmp_path, variant, dtype):
    source, out = tmp_path / "source", tmp_path / "out"
    make_model(source, **VARIANTS[variant]).to(dtype).save_pretrained(source)
    learner_of(source).save_hf(out, dtype=str(dtype).removeprefix("torch."))
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert after[name].dtype == dtype and torch.equal(after[name], tensor), name


@pytest.mark.parametrize(
    ("asked", "most", "written"),
    [
        ("auto", 10**9, torch.float32),
        ("auto", 10, torch.bfloat16),  # too large a model: as it was begun with
        ("float32", 10, torch.float32),
        ("bfloat16", 10**9, torch.bfloat16),
        ("float16", 10**9, torch.float16),
    ],
)
def test_the_model_that_was_trained_is_the_one_that_is_written(tmp_path, monkeypatch, asked, most, written):
    """A step of 1e-6 is less than bf16 can show, and is in float32 all the same. config.json says which it is."""
    monkeypatch.setattr("titan_rl.models.weights.hf_weights.MOST_AS_TRAINED", most)
    source, out = tmp_path / "source", tmp_path / "out"
    make_model(source).to(torch.bfloat16).save_pretrained(source)
    learner = learner_of(source)
    with torch.no_grad():
        for parameter in learner.model_parts[0].parameters():
            parameter.mul_(1 + 1e-6)
    learner.save_hf(out, dtype=asked)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {written}
    assert json.loads((out / "config.json").read_text())["dtype"] == str(written).removeprefix("torch.")
    for name, tensor in before.items():
        assert torch.equal(after[name], (tensor.float() * (1 + 1e-6)).to(written)), name
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == written


def test_a_weight_that_float16_cannot_hold_is_told_and_nothing_is_written(tmp_path):
    source = tmp_path / "source"
    make_model(source)
    learner = learner_of(source)
    with torch.no_grad():
        next(learner.model_parts[0].parameters())[0, 0] = 1e6
    with pytest.raises(ValueError, match="beyond what float16 holds: set checkpoint.export_dtype"):
        learner.save_hf(tmp_path / "out", dtype="float16")
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("scheme", "scale"),
    [("fp8_per_tensor", "weight_scale"), ("fp8_per_channel", "weight_scale"), ("fp8_per_block", "weight_scale_inv")],
)
def test_what_is_written_in_fp8_is_read_by_transformers(tmp_path, scheme, scale):
    """Linear layers of the blocks alone; what else there is, engines have in their dtype, too."""
    source, out = tmp_path / "source", tmp_path / "out"
    make_tiny(source, seed=0, hidden_size=256, num_layers=1)
    learner_of(source).save_hf(out, quantizer=Quantizer(scheme, torch.bfloat16, quantize_weight))
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    model(torch.arange(3, 9)[None])
    for name, weight in before.items():
        if name.endswith("_proj.weight"):
            bound = tolerance(weight, torch.bfloat16)
            assert after.pop(name).dtype == torch.float8_e4m3fn and after.pop(f"{name}_{scale[7:]}").numel()
            assert ((model.get_parameter(name) - weight).abs() <= bound).all(), name
        else:
            assert torch.equal(after.pop(name), weight.bfloat16()), name
    assert not after


def test_saved_directory_is_whole(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    make_model(source)
    learner_of(source).save_hf(out)
    assert {file.name for file in source.iterdir()} == {file.name for file in out.iterdir()}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer.encode("gcd(4,6) =\n2")) == "gcd(4,6) =\n2"
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_tiny_is_the_same_for_the_same_seed(tmp_path):
    one, same, other = (make_tiny(tmp_path / str(n), seed=s).state_dict() for n, s in enumerate([1, 1, 2]))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("key", "value", "mend"),
    [
        ("attention_bias", True, "False"),
        ("mlp_bias", True, "False"),
        ("hidden_act", "gelu", "'silu'"),
        ("model_type", "gpt2", "llama, mistral, olmo2"),
        ("mlp_only_layers", [0], "[]"),
        ("decoder_sparse_step", 2, "1"),
    ],
)
def test_model_that_cannot_be_built_is_refused_with_the_mend(tmp_path, key, value, mend):
    make_model(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError) as caught:
        read_hf_config(tmp_path)
    [line] = str(caught.value).splitlines()
    assert repr(value) in line and mend in line


class ForeignConfig(LlamaConfig):
    """Llama's under a name that neither this tree nor transformers knows."""

    model_type = "foreign_llama"


FOREIGN = Family(
    partial(decoder_config, model=PackedLlama, block=FAMILIES["llama"].model_config.keywords["block"]),
    FAMILIES["llama"].parallelize,
    required={**REQUIRED, "num_hidden_layers": 2},
)


@pytest.fixture
def foreign(tmp_path, monkeypatch) -> Path:
    """A Llama directory of model type ``foreign_llama``, which transformers is told of."""
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", dict(CONFIG_MAPPING._extra_content))
    AutoConfig.register("foreign_llama", ForeignConfig)
    return rename_model_type(tmp_path, "foreign_llama")


def rename_model_type(path: Path, model_type: str) -> Path:
    make_model(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": model_type}))
    return path


@torch.no_grad()
def test_a_family_from_outside_gives_the_same_logits(foreign, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_model(path)
    llama, titan = learner_of(path), build_titan(load_config(None))
    spec = model_spec(foreign, FOREIGN)
    parts, _ = parallel_model(spec, titan, llama.parallel_dims, torch.device("cpu"))
    load_hf(local_shards(spec, parts), foreign)
    tokens, places, nothing = np.arange(3, 90), np.arange(87), np.zeros(0, np.float32)
    row = Row(tokens, places, [Segment(0, 87)], places, places, nothing, nothing, nothing)
    assert spec.name == "foreign_llama" and longest_rollout(10**6, foreign, FOREIGN) == 256
    assert torch.equal(row_logits(SimpleNamespace(model_parts=parts), row), row_logits(llama, row))


def test_a_family_from_outside_is_checked_too(foreign):
    file = foreign / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="num_hidden_layers = 3 .* only 2"):
        read_hf_config(foreign, FOREIGN)


@pytest.mark.parametrize(("family", "word"), [(None, "model.family"), (FOREIGN, "AutoConfig.register")])
def test_an_unknown_model_type_is_one_line(tmp_path, family, word):
    rename_model_type(tmp_path, "unheard_of")
    with pytest.raises(ValueError, match=word) as caught:
        read_hf_config(tmp_path, family)
    assert "'unheard_of'" in str(caught.value) and "\n" not in str(caught.value)


def test_rope_that_depends_on_the_length_is_refused(tmp_path):
    rope = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    make_model(tmp_path, rope_parameters=rope)
    with pytest.raises(ValueError, match="dynamic.*llama3"):
        learner_of(tmp_path)


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    make_model(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name][:5].clone()}, file)
    with pytest.raises(ValueError, match=name):
        learner_of(tmp_path)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"lacks 1 tensors.*{name}"):
        learner_of(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="no .*safetensors"):
        learner_of(tmp_path)
