"""The sampler's linear layers in bf16 on a CPU that multiplies fp32 faster: the same products, rounded once."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

from titan_rl.generator.weights import vllm_linear
from titan_rl.generator.weights.vllm_linear import WideLinearMethod, widen_linears


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setattr(vllm_linear, "multiplies_wide", lambda: True)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)  # of an engine, which there is none of
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)


def layer_of(dtype: torch.dtype = torch.bfloat16) -> ReplicatedLinear:
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        layer = ReplicatedLinear(48, 96, bias=True, params_dtype=dtype, disable_tp=True, return_bias=False)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_products_are_rounded_once(num_tokens):
    layer = layer_of()
    weight_OI, x_NI = layer.weight.detach().double(), torch.randn(num_tokens, 48).bfloat16()
    exact_NO = x_NI.double() @ weight_OI.T + layer.bias.double()
    widen_linears(layer, 64)
    assert type(layer.quant_method) is WideLinearMethod
    for factor in (1, 2):  # packed again, with another version
        layer.weight = torch.nn.Parameter((weight_OI * factor).bfloat16(), requires_grad=False)
        layer.quant_method.process_weights_after_loading(layer)
        assert not layer.weight.numel()
        wanted_NO = exact_NO + (factor - 1) * (exact_NO - layer.bias.double())
        found_NO = layer(x_NI)
        assert found_NO.dtype == torch.bfloat16
        assert (found_NO.double() - wanted_NO).abs().max() <= wanted_NO.abs().max() * 2**-8


@pytest.mark.parametrize("why", ["fp32", "few sequences", "fast bf16"])
def test_others_stay_as_vllm_has_them(monkeypatch, why):
    layer = layer_of(torch.float32 if why == "fp32" else torch.bfloat16)
    monkeypatch.setattr(vllm_linear, "multiplies_wide", lambda: why != "fast bf16")
    widen_linears(layer, 8 if why == "few sequences" else 64)
    assert type(layer.quant_method) is UnquantizedLinearMethod
