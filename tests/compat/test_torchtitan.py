"""TorchTitan 0.3's private names."""

from titan_rl.compat.torchtitan import device  # isort: skip  (before any other torchtitan module)

import torch
import torchtitan.tools.utils as titan_utils
from reaches import check_forms, check_page
from torch import nn
from torchtitan.components.lora import _get_lora_cls
from torchtitan.models.common import Linear

from titan_rl.compat.reach import TORCHTITAN
from titan_rl.compat.torchtitan import adapters, float8, pipeline

MODULES = (device, adapters, float8, pipeline)
FORMS = {
    "torchtitan.tools.utils:device_type": "str",
    "torchtitan.tools.utils:device_module": "module",
    "torchtitan.components.lora:_get_lora_cls._lora_scaling": "set",
    "torchtitan.components.lora:_get_lora_cls.lora_a": "set",
    "torchtitan.components.lora:_get_lora_cls.lora_b": "set",
    "torchtitan.protocols.module:Module._param_init": "NoneType",
    "torchtitan.components.quantization.float8:Float8Linear.Config._torchao_config": "member_descriptor",
    "torchtitan.distributed.pipeline_parallel:_generate_llm_fqn_per_model_part": (
        "(num_stages, num_layers, input_weight, output_weight)"
    ),
}


def test_names_are_there_in_their_form():
    check_forms(TORCHTITAN, MODULES, FORMS)


def test_the_page_lists_them():
    check_page(TORCHTITAN, MODULES, "tests/compat/test_torchtitan.py")


def test_without_an_accelerator_torchtitan_computes_on_the_cpu():
    accelerator = torch.accelerator.current_accelerator()
    expected = "cpu" if accelerator is None else accelerator.type
    assert titan_utils.device_type == device.DEVICE_TYPE == expected


def adapted() -> nn.Module:
    made = _get_lora_cls(Linear)
    layer = made(made.Config(in_features=3, out_features=2, bias=False, rank=2, alpha=4.0, param_init={}))
    for number, weight in enumerate((layer.weight, layer.lora_a.weight, layer.lora_b.weight), start=1):
        nn.init.constant_(weight, float(number))
    return layer


def test_the_scaling_is_alpha_by_rank_and_what_a_layer_computes_with():
    layer, x = adapted(), torch.ones(3)
    assert adapters.adapter_scaling(layer) == 2.0
    assert layer(x).tolist() == [3 + 2 * 36] * 2
    adapters.set_adapter_scaling(layer, 0.0)
    assert layer(x).tolist() == [3] * 2


def test_a_module_is_initialized_as_it_is_told():
    layer = adapted()
    adapters.set_initialization(layer.lora_a, {"weight": nn.init.zeros_})
    layer.lora_a.init_states(buffer_device=None)
    assert not layer.lora_a.weight.any()


def test_stages_hold_all_modules_in_order():
    stages = pipeline.modules_of_stages(2, 4, 0, 1)
    layers = [f"layers.{number}" for number in range(4)]
    assert sum(stages, []) == ["tok_embeddings", *layers, "norm", "lm_head"] and len(stages) == 2
