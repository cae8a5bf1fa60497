"""The memory of this machine's GPUs, which a child process asks for: here of fakes."""

import time
from types import SimpleNamespace

import pytest
import torch

from titan_rl.models import device


@pytest.fixture
def two_gpus(monkeypatch):
    """Returns what tells their properties."""
    module = SimpleNamespace(get_device_properties=lambda index: SimpleNamespace(total_memory=100 + index))
    monkeypatch.setattr(device, "DEVICE_TYPE", "cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    return module


def test_each_gpu_is_asked(two_gpus):
    assert device.gpu_memory() == [100, 101]


@pytest.mark.parametrize("ask", [lambda index: 1 / 0, lambda index: time.sleep(60)], ids=["fails", "hangs"])
def test_who_cannot_be_asked_is_an_error(ask, two_gpus, monkeypatch, capfd):
    two_gpus.get_device_properties = ask
    monkeypatch.setattr(device, "_ASK_SECONDS", 0.5)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="memory of this machine's GPUs is unknown"):
        device.gpu_memory()
    assert time.monotonic() - begun < 30


def test_a_cpu_has_none():
    assert device.gpu_memory() == []
