"""Products of bf16 by fp32 units: those of torch, rounded once, and their gradients."""

from dataclasses import fields, is_dataclass

import pytest
import torch
import torch.nn.functional as F

import titan_rl.models.device  # noqa: F401  isort: skip  (before any other torchtitan module)

from torchtitan.models.common import Linear

from titan_rl.kernels import linear_logprob
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.families.registry import find_family
from titan_rl.models.layers.cpu_products import LeanLinear, is_widened, with_lean_linears
from titan_rl.models.layers.memory_saving import _GateAndProject
from titan_rl.models.spec import read_hf_config


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setattr(linear_logprob, "multiplies_wide", lambda: True)


def results(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.randn(out.shape).to(out.dtype))]


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).bfloat16() for shape in shapes]


def assert_rounded_once(found: list[torch.Tensor], exact: list[torch.Tensor], roundings: int = 1) -> None:
    """``roundings``: to bf16, by no more than 2**-8 of a number each."""
    for ours, wanted in zip(found, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        error = (ours.double() - wanted).norm() / wanted.norm()
        assert error <= roundings * 2**-8


@pytest.mark.parametrize("bias", [False, True])
def test_linear_layer(wide, bias):
    layer = LeanLinear.Config(in_features=24, out_features=40, bias=bias).build()
    tensors = drawn((2, 9, 24), (40, 24), *([(40,)] if bias else []))

    def ours(input_I, *weights):
        layer._parameters.update(zip(("weight", "bias"), weights, strict=False))
        assert is_widened(input_I, layer.weight)
        return layer(input_I)

    assert_rounded_once(results(ours, *tensors), results(F.linear, *(x.double() for x in tensors)))


def test_feed_forward(wide):
    tensors = drawn((1, 7, 24), (1, 7, 24), (16, 24))
    exact = results(
        lambda gate_F, up_F, down_DF: F.linear(F.silu(gate_F) * up_F, down_DF), *(x.double() for x in tensors)
    )
    assert_rounded_once(results(_GateAndProject.apply, *tensors), exact, roundings=3)


def test_frozen_weights_get_no_gradient(wide):
    input_I, weight_OI = drawn((3, 8), (5, 8))
    layer = LeanLinear.Config(in_features=8, out_features=5).build()
    layer.weight = torch.nn.Parameter(weight_OI, requires_grad=False)
    layer(input_I.requires_grad_()).sum().backward()
    assert layer.weight.grad is None and input_I.grad is not None


@pytest.mark.parametrize("other", ["fp32", "a CPU with fast bf16"])
def test_elsewhere_it_is_torch_s(monkeypatch, other):
    monkeypatch.setattr(linear_logprob, "multiplies_wide", lambda: other == "fp32")
    input_I, weight_OI = (x.float() if other == "fp32" else x for x in drawn((3, 8), (5, 8)))
    layer = LeanLinear.Config(in_features=8, out_features=5).build()
    layer.weight = torch.nn.Parameter(weight_OI)
    assert not is_widened(input_I, layer.weight)
    assert torch.equal(layer(input_I), F.linear(input_I, weight_OI))


def linears(config) -> list[type]:
    if not is_dataclass(config) or isinstance(config, type):
        return []
    own = [type(config)] if isinstance(config, Linear.Config) else []
    return own + [found for field in fields(config) for found in linears(getattr(config, field.name))]


def test_all_linear_layers_of_a_model_are_such(tmp_path):
    make_tiny(tmp_path, seed=1, hidden_size=64, num_layers=2)
    hf = read_hf_config(tmp_path)
    found = [one for layer in find_family(hf.model_type).model_config(hf).layers for one in linears(layer)]
    assert set(found) == {LeanLinear.Config} and len(found) == 2 * 6  # keys and values share a config
    assert with_lean_linears(Linear.Config(in_features=3, out_features=4, bias=True)).bias


@pytest.mark.parametrize(
    ("cpu", "is_wide"),
    [
        (dict(architecture="x86_64", cpu_name="Intel Xeon", amx_tile=False, avx512_bf16=True), True),
        (dict(architecture="x86_64", cpu_name="Intel Xeon", amx_tile=True, avx512_bf16=True), False),
        (dict(architecture="x86_64", cpu_name="AMD EPYC", amx_tile=False, avx512_bf16=True), False),
        (dict(architecture="x86_64", cpu_name="AMD EPYC", amx_tile=False, avx512_bf16=False), True),
        (dict(architecture="aarch64", cpu_name="Neoverse", amx_tile=False, avx512_bf16=False), False),
    ],
)
def test_which_units_are_faster(monkeypatch, cpu, is_wide):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    assert linear_logprob.multiplies_wide.__wrapped__() == is_wide
