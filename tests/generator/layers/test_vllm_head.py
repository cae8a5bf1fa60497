"""The sampler's output head on a CPU: fp32 logits as vLLM's own, from a weight that is widened once a version."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from titan_rl.generator.weights import vllm_head
from titan_rl.generator.weights.vllm_head import widen_head_once


class Counted(torch.Tensor):
    """A weight that counts how often it is cast."""

    casts = 0

    def to(self, *arguments, **keywords):
        Counted.casts += 1
        return super().to(*arguments, **keywords).as_subclass(torch.Tensor)


@pytest.fixture
def model():
    """With nothing but what makes its logits."""
    processor = LogitsProcessor.__new__(LogitsProcessor)
    nn.Module.__init__(processor)
    processor.head_dtype = torch.float32
    return nn.ModuleDict({"logits_processor": processor})


def head(seed: int) -> SimpleNamespace:
    weight = torch.randn(50, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return SimpleNamespace(weight=weight.as_subclass(Counted), quant_method=UnquantizedEmbeddingMethod())


@pytest.mark.parametrize("is_packed", [False, True])
def test_it_is_widened_once_a_version_and_is_vllms_own(model, monkeypatch, is_packed):
    """To the bit, unless it is packed, which adds up in another order."""
    monkeypatch.setattr(vllm_head, "multiplies_wide", lambda: is_packed)
    processor, hidden, bias = model["logits_processor"], torch.randn(3, 16).bfloat16(), torch.randn(50).bfloat16()
    biases = (None, bias)
    plain = [[processor._apply_head(head(seed), hidden, each) for each in biases] for seed in (1, 2)]
    Counted.casts = 0
    for version, wanted in enumerate(plain, 1):
        widen_head_once(model)
        for each, logits_SV in zip(biases, wanted, strict=True):
            found_SV = processor._apply_head(head(version), hidden, each)
            assert found_SV.dtype == torch.float32
            torch.testing.assert_close(found_SV, logits_SV, rtol=0, atol=1e-5 if is_packed else 0)
        assert Counted.casts == version


@pytest.mark.parametrize("is_packed", [False, True])
def test_its_copy_goes_with_its_version(model, monkeypatch, is_packed):
    """At once: a collection of cycles may be many versions away."""
    monkeypatch.setattr(vllm_head, "multiplies_wide", lambda: is_packed)
    processor = model["logits_processor"]
    widen_head_once(model)
    processor._apply_head(head(1), torch.randn(3, 16).bfloat16(), None)
    before = weakref.ref(processor._apply_head)
    gc.disable()
    try:
        widen_head_once(model)
        assert before() is None
    finally:
        gc.enable()


def test_a_head_in_the_models_own_dtype_is_left_alone(model):
    widen_head_once(model)
    processor = model["logits_processor"]
    processor.head_dtype = torch.bfloat16
    widen_head_once(model)
    Counted.casts = 0
    one = SimpleNamespace(weight=None, quant_method=SimpleNamespace(apply=lambda *_, bias: "its own"))
    assert processor._apply_head(one, torch.randn(3, 16).bfloat16(), None) == "its own" and not Counted.casts
