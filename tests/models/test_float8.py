"""Layers in FP8: values of an engine's layers, gradients by hand, whatever else is in a row, and what is refused."""

import numpy as np
import pytest
import torch
from batches import batch_of
from parity import row_logits
from torchtitan.models.common import Linear

from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.preflight.checks import check_model
from titan_rl.data.types import Row, Segment
from titan_rl.generator.weights.quantization.e4m3 import dequantize, quantize_weight
from titan_rl.models import float8
from titan_rl.models.builtin.tiny import make_tiny, tiny_config
from titan_rl.models.float8 import Float8Config, convert_to_float8, float8_names, linear_names
from titan_rl.models.spec import model_config
from titan_rl.trainer.model import layout
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

GW_HP = "rowwise_with_gw_hp"
RECIPES = ("rowwise", GW_HP)


def rounded(values: torch.Tensor, dim: int | None) -> torch.Tensor:
    """To E4M3 and back, with one scale for each row (-1) or column (0), or for all."""
    groups = values.reshape(1, -1) if dim is None else values if dim == -1 else values.T
    codes = dequantize(*quantize_weight(groups.contiguous(), "fp8_per_channel"), "fp8_per_channel")
    return codes.reshape(values.shape) if dim is None else codes if dim == -1 else codes.T


def layer_of(recipe: str, inputs: int = 48, outputs: int = 32, emulate: bool = True) -> torch.nn.Module:
    """One layer of a model that was converted."""
    config = model_config(tiny_config())
    linear = Linear.Config(in_features=inputs, out_features=outputs, bias=True)
    config.layers[0].feed_forward.w2 = linear
    convert_to_float8(config, Float8Config(recipe_name=recipe), emulate=emulate, compiles=False)
    layer = config.layers[0].feed_forward.w2.build()
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_are_an_engines_and_gradients_those_of_the_recipe(recipe):
    torch.manual_seed(0)
    layer = layer_of(recipe)
    x_TI, grad_TO = torch.randn(2, 20, 48, requires_grad=True), torch.randn(2, 20, 32)
    out_TO = layer(x_TI)
    weight_OI, rows_TI, grads_TO = layer.weight.detach(), x_TI.detach().flatten(0, 1), grad_TO.flatten(0, 1)
    wanted_TO = rounded(rows_TI, -1) @ rounded(weight_OI, -1).T + layer.bias.detach()
    torch.testing.assert_close(out_TO.flatten(0, 1), wanted_TO, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(layer(x_TI[:1, 3:4]), out_TO[:1, 3:4], rtol=1e-5, atol=1e-5)  # no other token has a say

    out_TO.backward(grad_TO)
    assert x_TI.grad is not None
    if recipe == GW_HP:
        of_weight, of_input = grads_TO.T @ rows_TI, rounded(grads_TO, -1) @ rounded(weight_OI, None)
    else:
        of_weight = rounded(grads_TO, 0).T @ rounded(rows_TI, 0)
        of_input = rounded(grads_TO, -1) @ rounded(weight_OI, 0)
    torch.testing.assert_close(layer.weight.grad, of_weight, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x_TI.grad.flatten(0, 1), of_input, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(layer.bias.grad, grads_TO.sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_gets_products_of_sizes_that_it_has(monkeypatch, recipe):
    """Of a row of any length: torch checks sizes without a GPU, too."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    layer = layer_of(recipe, emulate=False).to("meta", torch.bfloat16)
    x_TI = torch.empty(1, 37, 48, device="meta", dtype=torch.bfloat16, requires_grad=True)
    layer(x_TI).sum().backward()
    assert layer.weight.grad.shape == (32, 48) and x_TI.grad.shape == x_TI.shape


def test_a_gpu_without_such_products_is_refused_where_it_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match=r"float8.recipe_name = .* needs a GPU of compute capability 8.9"):
        layer_of(GW_HP, emulate=False)
    monkeypatch.setattr(layout.device, "DEVICE_TYPE", "cuda")
    settings = load_config(None, {"float8": {"recipe_name": GW_HP}})
    with pytest.raises(ConfigError, match="needs a GPU of compute capability 8.9 or later, this one has"):
        layout.check_products(tiny_config(), build_titan(settings))
    for on_cpu in (True, False):  # of other machines
        layout.check_products(tiny_config(), build_titan(settings), on_cpu=on_cpu)


def test_which_layers_are_converted():
    """All of the blocks but what is left out; head, embeddings and norms never are."""
    config = model_config(tiny_config())
    names = linear_names(config)
    assert {name.rsplit(".", 1)[1] for name in names} == {"wq", "wkv", "wo", "w1", "w2", "w3"}
    assert len(names) == 6 * len(config.layers)
    chosen = float8_names(config, Float8Config(recipe_name=GW_HP, filter_fqns=["layers.0.", "w2"]))
    assert chosen == [name for name in names if not name.startswith("layers.0.") and not name.endswith("w2")]
    config.layers[1].feed_forward.w1.out_features = 100
    assert "layers.1.feed_forward.w1" not in float8_names(config, Float8Config(recipe_name=GW_HP)), (
        "of no multiple of 16"
    )


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, hidden_size=64, num_layers=2)
    return path


def made(path, recipe: str = GW_HP, **tables) -> Learner:
    config = load_config(None, {"training": {"steps": 10}, "float8": {"recipe_name": recipe}} | tables)
    return Learner(config, build_titan(config), path)


def row_of(tokens: np.ndarray, lengths: list[int]) -> Row:
    places, nothing = np.concatenate([np.arange(n) for n in lengths]), np.zeros(0, np.float32)
    starts = np.cumsum([0, *lengths])
    segments = [Segment(int(start), n) for start, n in zip(starts, lengths, strict=False)]
    return Row(tokens, places, segments, np.arange(len(tokens)), np.arange(len(tokens)), nothing, nothing, nothing)


@pytest.mark.usefixtures("process_group")
def test_documents_of_a_row_know_nothing_of_each_other(model_path):
    """Scales are a token's own."""
    learner, words = made(model_path), np.random.default_rng(0).integers(0, 90, 30)
    packed = row_logits(learner, row_of(words, [11, 19]))
    for part in (slice(0, 11), slice(11, 30)):
        alone = row_logits(learner, row_of(words[part], [len(words[part])]))
        torch.testing.assert_close(packed[part], alone, rtol=1e-4, atol=1e-4)
    plain = row_logits(made(model_path, "none"), row_of(words, [11, 19]))
    assert float((packed - plain).abs().max()) > 1e-2


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_lie_near_those_without(model_path, recipe):
    def gradient(learner: Learner) -> torch.Tensor:
        learner.forward_backward(batch_of(0, row_tokens=48).rows[0])
        parameters = (p for p in learner.model_parts[0].parameters() if p.requires_grad)
        return torch.cat([p.grad.full_tensor().flatten() for p in parameters])

    found, plain = gradient(made(model_path, recipe)), gradient(made(model_path, "none"))
    assert 0.95 < float(torch.nn.functional.cosine_similarity(found, plain, dim=0)) < 0.99999


def refusal(**tables) -> str:
    with pytest.raises(ConfigError) as raised:
        check_model(load_config(None, {"float8": {"recipe_name": GW_HP}} | tables))
    [line] = raised.value.findings
    return line


def test_what_is_refused(tmp_path, monkeypatch):
    check_model(load_config(None, {"float8": {"recipe_name": GW_HP, "filter_fqns": ["w2"]}}))
    filtered = {"float8": {"recipe_name": GW_HP, "filter_fqns": ["down_proj"]}}
    assert "float8.filter_fqns: no linear layer has 'down_proj' in its name" in refusal(**filtered)
    assert "no linear layer is left" in refusal(float8={"recipe_name": GW_HP, "filter_fqns": ["layers"]})
    assert "lora.rank = 4 and float8.recipe_name" in refusal(lora={"rank": 4})
    make_tiny(tmp_path, seed=1, architecture="qwen3_moe", tie_word_embeddings=False)
    assert "a mixture of experts is not trained in FP8" in refusal(model={"path": str(tmp_path)})
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    assert "needs torchao: pip install 'titan-rl[float8]'" in refusal()
