"""Forward, loss and backward of every family, torch's meta device in a GPU's place: what is on the host is a mistake.

A tensor without a device named is made on the host, where a CPU's tests never miss it. Nothing is computed here, so
shapes and devices are all that is checked. One process is the whole mesh, without FSDP, which wants real memory.
"""

from contextlib import nullcontext

import family_models
import pytest
import torch
from batches import batch_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.load import load_config
from titan_rl.config.sections.schema import AlgorithmConfig
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.families import gpt_oss
from titan_rl.models.layers import attention, moe
from titan_rl.models.spec import apply_parallelism, model_spec
from titan_rl.models.value_head import value_spec
from titan_rl.trainer.distributed.ranks import parallel_dims
from titan_rl.trainer.model import sharded_model
from titan_rl.trainer.model.sharded_model import ShardedModel
from titan_rl.trainer.objective.objective import loss_and_sums
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")
FAKE = torch.device("meta")
TINY = ("llama", "qwen3", "qwen3_moe")
BLOCKS = ("deepseek_v3", "deepseek_v3 yarn", "gpt_oss", "qwen3_5_text", "qwen3_next")
"""Whose latents, sinks and states flash attention does not know."""
FORMS = ("blocks", "packed") if hasattr(attention, "attention_form") else ("blocks",)


class MixedDevices(AssertionError):
    pass


class OneDevice(TorchDispatchMode):
    """Refuses operations that touch the host's memory. A GPU takes single numbers from the host, and copies."""

    _COPIES = ("aten._to_copy.default", "aten.copy_.default", "aten.detach.default", "aten.alias.default")

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        if str(function) not in self._COPIES:
            tensors = [x for x in tree_leaves((arguments, keywords, out)) if isinstance(x, torch.Tensor)]
            if host := [x for x in tensors if x.device != FAKE and x.ndim]:
                raise MixedDevices(f"{function}: {[tuple(x.shape) for x in host]} on the host")
        return out


def build_on_fake(spec, titan, dims, device):
    """parallel.parallel_model for one rank, but for FSDP."""
    assert device == FAKE
    apply_parallelism(spec, titan.parallelism, titan.training)
    with FAKE:
        model = spec.model.build()
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    return [model.train()], None


def make(path, monkeypatch, head: str = "vocabulary") -> ShardedModel:
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # there is none for meta; routers ask for it
    for module in (moe, gpt_oss):  # how many tokens an expert gets is a number that nobody knows here
        monkeypatch.setattr(module, "grouped_product", lambda a, w, **_: torch.einsum("rk,ekn->rn", a, w))
    monkeypatch.setattr(sharded_model, "parallel_model", build_on_fake)
    monkeypatch.setattr(ShardedModel, "load", lambda self, path: None)
    titan = build_titan(load_config(None))
    spec = value_spec(model_spec(path)) if head == "value" else model_spec(path)
    dims = parallel_dims(titan.parallelism)
    return ShardedModel(spec, titan, path, dims, FAKE, temperature=0.7, kernel="reference")


def forward_backward(model: ShardedModel, algorithm) -> None:
    rows = batch_of(0).rows[0]
    assert any(segment.prefix for row in rows for segment in row.segments)
    columns = [model.columns(row) for row in rows]
    keywords = [model.keywords(row, one) for row, one in zip(rows, columns, strict=True)]  # planned on the host
    with OneDevice():
        for one, words in zip(columns, keywords, strict=True):
            statistics = model.parts[0](one["tokens_T"][None], **words)
            loss, sums = loss_and_sums(algorithm, statistics, one)
            loss.backward()
            assert {x.device for x in (loss, *sums.values())} == {FAKE}
    for name, parameter in model.parts[0].named_parameters():
        assert parameter.grad is not None and parameter.grad.device == FAKE, name


GRPO = make_algorithm(AlgorithmConfig(name="grpo"), [])


@pytest.mark.parametrize(
    ("family", "form"),
    [
        (family, form)
        for family in (*TINY, *family_models.CASES)
        for form in FORMS
        if form == "blocks" or family not in BLOCKS
    ],
)
def test_nothing_of_a_step_is_on_the_host(tmp_path, monkeypatch, family, form):
    if family in TINY:
        make_tiny(tmp_path, seed=1, architecture=family, hidden_size=64, num_layers=2)
    else:
        family_models.make(tmp_path, family)
    model = make(tmp_path, monkeypatch)
    if form == "packed":
        model.attention_form = form
    forward_backward(model, GRPO)


@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo", "rloo", "reinforce_pp", "maxrl", "sapo", "dppo"])
def test_nothing_of_a_loss_is_on_the_host(tmp_path, monkeypatch, name):
    make_tiny(tmp_path, seed=1, hidden_size=64, num_layers=1)
    algorithm = make_algorithm(AlgorithmConfig(name=name), [])
    forward_backward(make(tmp_path, monkeypatch), algorithm)


def test_a_value_head_is_there_too(tmp_path, monkeypatch):
    make_tiny(tmp_path, seed=1, hidden_size=64, num_layers=1)
    model = make(tmp_path, monkeypatch, head="value")
    [row, *_] = batch_of(0).rows[0]
    columns = model.columns(row)
    keywords = model.keywords(row, columns)
    with OneDevice():
        model.parts[0](columns["tokens_T"][None], **keywords).sum().backward()


def test_the_witness_sees_what_is_on_the_host():
    there = torch.ones(3, device=FAKE)
    with OneDevice():
        _ = there + torch.ones((), device=FAKE), there * torch.tensor(2.0), there.to("meta")
        with pytest.raises(MixedDevices):
            torch.arange(3)
        with pytest.raises((MixedDevices, RuntimeError)):
            there.index_select(0, torch.tensor([0, 1]))
