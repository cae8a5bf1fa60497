"""Rotary embeddings hold no more positions than a run has, and are to the bit what they were."""

import sys

import pytest
import torch
from family_models import CASES, YARN, make

from titan_rl.config.load import load_config
from titan_rl.models.layers.rope import cut_positions
from titan_rl.models.spec import apply_parallelism, model_spec
from titan_rl.trainer.titan_config import build_titan

LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=64)
SCALED = {
    "default": ("qwen2", {}),
    "linear": ("qwen2", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    "llama3": ("qwen2", dict(rope_parameters=LLAMA3)),
    "yarn": ("qwen2", dict(rope_parameters=YARN | dict(truncate=True))),
    **{case: (case, {}) for case in CASES},
}


def caches(spec) -> list[torch.Tensor]:
    attention = [layer.attention for layer in spec.model.layers]
    return [each.rope.build().cache for each in attention if hasattr(each, "rope")]


@pytest.mark.parametrize("scaling", SCALED)
@pytest.mark.parametrize("num_positions", [1, 17, 100, 255])
def test_a_cut_cache_is_the_beginning_of_the_whole_one(tmp_path, scaling, num_positions):
    case, changes = SCALED[scaling]
    make(tmp_path, case, **changes)
    whole, spec = caches(model_spec(tmp_path)), model_spec(tmp_path)
    cut_positions(spec.model, num_positions)
    for cut, full in zip(caches(spec), whole, strict=True):
        assert len(cut) == min(num_positions, len(full)) and torch.equal(cut, full[: len(cut)])


def test_layers_that_turn_alike_have_one_cache(tmp_path):
    make(tmp_path, "qwen2")
    model = model_spec(tmp_path).model
    first, *others = caches(model_spec(tmp_path))
    assert others and all(cache is first for cache in others)
    cut_positions(model, 17)
    assert len(model.layers[0].attention.rope.build().cache) == 17 and len(first) == 256
    with torch.device("meta"):
        assert model.layers[0].attention.rope.build().cache.is_meta


def test_a_run_cuts_them_to_its_rows(tmp_path):
    make(tmp_path, "qwen2", max_position_embeddings=2**17)
    titan, spec = build_titan(load_config(None, {"training": {"seq_len": 512}})), model_spec(tmp_path)
    apply_parallelism(spec, titan.parallelism, titan.training)
    assert {len(cache) for cache in caches(spec)} == {512}


def test_a_model_is_given_its_layout_without_titans_trainer(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torchtitan.trainer", raising=False)
    make(tmp_path, "qwen2")
    titan, spec = build_titan(load_config(None, {})), model_spec(tmp_path)
    apply_parallelism(spec, titan.parallelism, titan.training)
    assert "torchtitan.trainer" not in sys.modules  # it takes two seconds and 110 MiB of each rank


def test_a_model_of_fewer_positions_keeps_them(tmp_path):
    make(tmp_path, "qwen2")
    spec = model_spec(tmp_path)
    cut_positions(spec.model, 10**6)
    assert {len(cache) for cache in caches(spec)} == {256}
