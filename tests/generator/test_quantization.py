"""E4M3 by hand and by a table of all its values, layers that multiply in it, and vLLM's own fed by the channel."""

from types import SimpleNamespace

import pytest
import torch
from vllm import distributed
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor import parameter
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.platforms import current_platform

from titan_rl.compat.vllm.loading import give_new_memory, process_layer
from titan_rl.generator.weights.quantization.e4m3 import dequantize, quantize_weight
from titan_rl.generator.weights.quantization.linear import is_quantized_from, quantize_linears, quantized_layers
from titan_rl.generator.weights.vllm_recording import record
from titan_rl.models.weights.quantized_files import Quantizer

SCHEMES = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
POSITIVE = [m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
TABLE = torch.tensor(sorted({sign * value for value in POSITIVE[:-1] for sign in (1, -1)}), dtype=torch.float64)
"""All values of E4M3: a sign, four bits of exponent, three of mantissa; the last code is NaN."""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)  # of an engine, which there is none of
    for module in (parameter, distributed):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)


def rounded(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    return dequantize(*quantize_weight(weight, scheme), scheme)


def test_by_hand():
    """Scales of 1 and of 1/10; ties go to the even mantissa, and between 16 and 32 a step is 2."""
    weight = torch.tensor([[448.0, -17.0, 19.0, 0.3], [44.8, 3.0, 0.0, -44.8]])
    by_tensor = [[448.0, -16.0, 20.0, 0.3125], [44.0, 3.0, 0.0, -44.0]]
    by_channel = [by_tensor[0], [44.8, 3.0, 0.0, -44.8]]
    torch.testing.assert_close(rounded(weight, "fp8_per_tensor"), torch.tensor(by_tensor), rtol=1e-6, atol=0)
    torch.testing.assert_close(rounded(weight, "fp8_per_channel"), torch.tensor(by_channel), rtol=1e-6, atol=0)
    torch.testing.assert_close(rounded(weight, "fp8_per_block"), torch.tensor(by_tensor), rtol=1e-6, atol=0)


def test_blocks_have_scales_of_their_own_also_those_at_the_ends():
    weight = torch.zeros(130, 129)
    weight[0, 0], weight[129, 128], weight[128, 128] = 448.0, 0.5, 0.3
    codes, scales = quantize_weight(weight, "fp8_per_block")
    assert scales.shape == (2, 2) and float(scales[0, 0]) == 1.0 and float(codes[129, 128]) == 448.0
    assert float(rounded(weight, "fp8_per_block")[128, 128]) == pytest.approx(256 * 0.5 / 448)
    assert float(rounded(weight, "fp8_per_tensor")[128, 128]) == 0.3125


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_equal_values_and_a_second_time(scheme):
    assert not rounded(torch.zeros(3, 5), scheme).any()
    torch.testing.assert_close(rounded(torch.full((3, 5), -0.7), scheme), torch.full((3, 5), -0.7), rtol=1e-7, atol=0)
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    once = rounded(weight, scheme)
    assert not torch.equal(once, weight) and torch.equal(rounded(once, scheme), once)
    for wrong in (float("nan"), float("inf")):
        weight[7, 9] = wrong
        with pytest.raises(ValueError, match="not finite"):
            quantize_weight(weight, scheme)


def nearest(values: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Values to E4M3 and back in groups of so many rows and columns, by the table, in fp64."""
    found = torch.empty_like(values, dtype=torch.float64)
    for row in range(0, values.shape[0], size[0]):
        for column in range(0, values.shape[1], size[1]):
            group = values[row : row + size[0], column : column + size[1]].double()
            scale = float(group.abs().max()) / 448 or 1.0
            places = (group[..., None] / scale - TABLE).abs().argmin(-1)
            found[row : row + size[0], column : column + size[1]] = TABLE[places] * scale
    return found


GROUPS = {
    "fp8_per_tensor": ((96, 160), (1, 160)),
    "fp8_per_channel": ((1, 160), (1, 160)),
    "fp8_per_block": ((128, 128), (1, 128)),
}


def model_of(dtype: torch.dtype, quant_config=None) -> torch.nn.Module:
    model = torch.nn.Module()
    made = dict(bias=True, params_dtype=dtype, disable_tp=True, return_bias=False, quant_config=quant_config)
    model.layer = ReplicatedLinear(160, 96, prefix="layer", **made)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_has_the_products_of_the_reference(scheme, dtype):
    """So has it with the next version of the weights, whose scales are others."""
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        model = model_of(dtype)
        quantize_linears(model, scheme)
    layer, of_weights, of_inputs = model.layer, *GROUPS[scheme]
    bias, x_TI = torch.nn.init.normal_(layer.bias).detach(), (3 * torch.randn(2, 4, 160)).to(dtype)
    for scale in (1.0, 0.01):
        weight = (scale * torch.randn(96, 160)).to(dtype)
        layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        layer.quant_method.process_weights_after_loading(layer)
        wanted = nearest(x_TI.flatten(0, 1), of_inputs) @ nearest(weight, of_weights).T + bias.double()
        found = layer(x_TI)
        assert found.dtype == dtype and found.shape == (2, 4, 96)
        # a tie, of which bf16 has many, may go the other way; without E4M3 the two are 0.04 apart
        assert (found.flatten(0, 1) - wanted).norm() / wanted.norm() < (1e-3 if dtype == torch.float32 else 8e-3)
        assert torch.equal(layer(x_TI), found) and torch.equal(layer(x_TI[:1, 1:2]), found[:1, 1:2])
        assert is_quantized_from(layer, weight) and not is_quantized_from(layer, 1.2 * weight)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_wrong_scale_is_found(monkeypatch, scheme):
    with set_current_vllm_config(VllmConfig()):
        model = model_of(torch.float32)
        quantize_linears(model, scheme)
    weight = torch.nn.init.normal_(model.layer.weight).detach().clone()

    def twice(codes, scales, scheme):
        scales[-1, -1] *= 2
        return dequantize(codes, scales, scheme)

    monkeypatch.setattr("titan_rl.generator.weights.quantization.linear.dequantize", twice)
    model.layer.quant_method.process_weights_after_loading(model.layer)
    assert list(quantized_layers(model)) == ["layer"] and not is_quantized_from(model.layer, weight)


class Kernel(FP8ScaledMMLinearKernel):
    """Of no GPU: multiplies by what vLLM has made of the weights."""

    is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
    can_implement = classmethod(lambda cls, config: (True, None))

    def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape):
        product = (A.float() * As) @ (B.float() * Bs.T) + (0 if bias is None else bias)
        return product.to(out_dtype).view(output_shape)


def test_vllms_own_quantization_is_fed_by_the_channel(monkeypatch):
    """Its loaders wait for a whole layer: the plan is recorded all the same, and a version is quantized as it comes."""
    monkeypatch.setitem(kernels._POSSIBLE_FP8_KERNELS, current_platform._enum, [Kernel])
    arguments = resolve_quantization_config("fp8_per_channel", None)
    config = VllmConfig()
    monkeypatch.setattr(config, "model_config", SimpleNamespace(dtype=torch.bfloat16))
    with set_current_vllm_config(config):
        model = model_of(torch.bfloat16, OnlineQuantizationConfig(arguments))
    record_metadata_for_reloading(model)

    def load(weights):
        for name, tensor in weights:
            target = model.get_parameter(name)
            target.weight_loader(target, tensor)

    model.load_weights = load
    load([("layer.weight", torch.ones(96, 160)), ("layer.bias", torch.ones(96))])
    assert model.layer.weight.dtype == torch.float8_e4m3fn
    recorded = record(model, [("layer.weight", (96, 160)), ("layer.bias", (96,))])
    assert [(copy.name, copy.dtype) for copy in recorded] == [("layer.weight", "bfloat16"), ("layer.bias", "bfloat16")]

    weight = torch.randn(96, 160).bfloat16()
    initialize_layerwise_reload(model)
    give_new_memory(model.layer)
    model.layer.weight.data.copy_(weight)
    process_layer(model.layer)
    assert model.layer.weight.dtype == torch.float8_e4m3fn
    assert is_quantized_from(model.layer, weight) and not is_quantized_from(model.layer, 2 * weight)


ATTENTION = "model.layers.0.self_attn."


def fused_layer(quant_config=None) -> torch.nn.Module:
    made = dict(bias=False, params_dtype=torch.bfloat16, disable_tp=True, return_bias=False, quant_config=quant_config)
    return QKVParallelLinear(160, 64, 4, 2, prefix=f"{ATTENTION}qkv_proj", **made)


def load(layer: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        part, _, parameter_name = name.removeprefix(ATTENTION).partition("_proj.")
        target = layer.get_parameter(parameter_name)
        target.weight_loader(target, tensor, part)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_file_has_the_codes_and_scales_that_an_engine_computes_and_vllm_reads_them(monkeypatch, scheme):
    """Of layers that engines fuse, to the bit: in the engine of a run on a CPU, and in vLLM's own layer."""
    torch.manual_seed(0)
    sent = {f"{ATTENTION}{part}_proj.weight": torch.randn(size, 160) for part, size in (("k", 128), ("q", 256))}
    sent |= {f"{ATTENTION}v_proj.weight": 3 * torch.randn(128, 160)}  # whose scale others have per tensor, too
    computed = []
    with set_current_vllm_config(VllmConfig()):
        engine = torch.nn.ModuleList([fused_layer()])
        quantize_linears(engine, scheme)
    load(engine[0], sent)

    def noted(codes, scales, scheme):
        computed.append((codes, scales))
        return dequantize(codes, scales, scheme)

    monkeypatch.setattr("titan_rl.generator.weights.quantization.linear.dequantize", noted)
    engine[0].quant_method.process_weights_after_loading(engine[0])
    [(codes, scales)] = computed

    quantizer = Quantizer(scheme, torch.bfloat16, quantize_weight)
    written = {name: weight.to(quantizer.dtype) for name, weight in sent.items()}
    quantizer.quantize(written, torch.device("cpu"))
    monkeypatch.setitem(kernels._POSSIBLE_FP8_KERNELS, current_platform._enum, [Kernel])
    monkeypatch.setitem(kernels._POSSIBLE_FP8_BLOCK_KERNELS, current_platform._enum, [Kernel])
    read = get_quantization_config(quantizer.config["quant_method"]).from_config(quantizer.config)
    read.packed_modules_mapping = {"qkv_proj": [f"{part}_proj" for part in "qkv"]}
    config = VllmConfig()
    monkeypatch.setattr(config, "model_config", SimpleNamespace(dtype=torch.bfloat16))
    with set_current_vllm_config(config):
        served = fused_layer(read)
    load(served, written)
    scale = served.weight_scale_inv if scheme == "fp8_per_block" else served.weight_scale
    assert torch.equal(served.weight.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(scale, scales[:3, 0] if scheme == "fp8_per_tensor" else scales)


def test_what_has_no_scale_is_named():
    weights = {"model.layers.1.mlp.down_proj.weight": torch.full((2, 2), torch.inf)}
    with pytest.raises(
        ValueError, match="model.layers.1.mlp.down_proj.weight has values that are not finite, which E4"
    ):
        Quantizer("fp8_per_channel", torch.float32, quantize_weight).quantize(weights, torch.device("cpu"))
