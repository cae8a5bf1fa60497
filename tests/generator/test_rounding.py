"""Parameters that vLLM holds in fp32 have the values that the trainer multiplies by."""

import torch
from torch import nn

from titan_rl.generator.vllm_loader import round_parameters


def layer(dtype: torch.dtype) -> nn.Module:
    module = nn.Module()
    for name, of in (("A_log", torch.float32), ("weight", dtype), ("e_score_correction_bias", torch.float32)):
        module.register_parameter(name, nn.Parameter(torch.tensor([1.0, 1.001, 2.003]).to(of)))
    return module


def test_they_are_rounded_to_the_dtype_of_the_model():
    model = nn.Sequential(layer(torch.bfloat16))
    round_parameters(model, torch.bfloat16)
    assert model[0].A_log.dtype == torch.float32
    assert torch.equal(model[0].A_log, model[0].weight.float())


def test_a_correction_bias_and_a_model_in_fp32_keep_all_digits():
    kept = torch.tensor([1.0, 1.001, 2.003])
    for dtype, names in ((torch.bfloat16, ["e_score_correction_bias"]), (torch.float32, ["A_log", "weight"])):
        model = layer(dtype)
        round_parameters(model, dtype)
        assert all(torch.equal(model.get_parameter(name), kept) for name in names)
