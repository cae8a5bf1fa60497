"""Parameters that vLLM holds in fp32 have the values that the trainer multiplies by."""

from types import SimpleNamespace

import torch
from torch import nn

from titan_rl.compat.vllm.loading import FileLoader
from titan_rl.generator.weights import vllm_backend
from titan_rl.generator.weights.vllm_loader import DirectoryLoader, round_parameters
from titan_rl.generator.weights.vllm_recording import Target
from titan_rl.mesh.channel.plan import Box


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


def test_a_directory_and_an_update_are_rounded(monkeypatch):
    model, whole, values = layer(torch.bfloat16), Box((0,), (3,)), torch.tensor([3.003, 1.001, 2.003])
    settings = SimpleNamespace(dtype=torch.bfloat16)
    loader = DirectoryLoader.__new__(DirectoryLoader)
    loader._max_num_seqs = 1
    monkeypatch.setattr(FileLoader, "load_weights", lambda *_: model.A_log.data.copy_(values))
    loader.load_weights(model, settings)
    loaded = model.A_log.tolist()
    for name, instead in (("give_new_memory", lambda _: ["A_log"]), ("process_layer", lambda _: None)):
        monkeypatch.setattr(vllm_backend, name, instead)
    engine = vllm_backend.ChannelEngine.__new__(vllm_backend.ChannelEngine)
    engine.model_config = settings
    engine._fill(model, [vllm_backend._Fill(Target("", "A_log", 0, (1,)), whole, whole, values)])
    assert loaded == model.A_log.tolist() == values.bfloat16().tolist()
