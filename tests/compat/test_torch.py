"""torch 2.13's private names: those of ``titan_rl/compat/torch``, and the two operators in ``kernels/``."""

import threading

import pytest
import torch
import torch.nn.attention.varlen as varlen
from reaches import check_forms, check_page, rows_of
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from tree import TREE

from titan_rl.compat.reach import TORCH
from titan_rl.compat.torch import (
    checkpoint,
    collectives,
    compiling,
    cuda_allocator,
    fsdp,
    pipelining,
    sharding,
    tensors,
)

MODULES = (tensors, compiling, collectives, sharding, fsdp, pipelining, checkpoint, cuda_allocator)
_FSDP = "torch.distributed.fsdp._fully_shard"
_SCHEDULES = "torch.distributed.pipelining.schedules"
_STEP = "(self, arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)"
FORMS = {
    "torch.nn:Module._parameters": "annotated",
    "torch.nn:Module._buffers": "annotated",
    "torch.nn:Module._non_persistent_buffers_set": "annotated",
    "torch:UntypedStorage._cdata": "getset_descriptor",
    "torch:ops.aten.copy_.default._schema": "FunctionSchema",
    "torch.utils._python_dispatch:TorchDispatchMode": "class",
    "torch:_foreach_copy_": "builtin_function_or_method",
    "torch:ops.aten._softmax_backward_data": "OpOverloadPacket",
    "torch._C:__file__": "str",
    "torch._inductor.config:deterministic": "bool",
    "torch._inductor.config:emulate_precision_casts": "bool",
    "torch._functorch.partitioners:get_default_op_list": "()",
    "torch.distributed.distributed_c10d:_abort_process_group": "(group)",
    "torch.distributed.tensor:DTensor._local_tensor": "member_descriptor",
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state": "(self)",
    f"{_FSDP}._fsdp_state:FSDPState._fsdp_param_groups": "set",
    f"{_FSDP}._fsdp_param_group:FSDPParamGroup.fsdp_params": "set",
    f"{_FSDP}._fsdp_param:FSDPParam.sharded_param": "annotated",
    f"{_FSDP}._fsdp_param:FSDPParam._sharded_param_data": "annotated",
    "torch.distributed.tensor.placement_types:_StridedShard": "class",
    "torch.distributed._functional_collectives:AsyncCollectiveTensor": "class",
    "torch.distributed._functional_collectives:all_to_all_single_autograd": (
        "(self, output_split_sizes, input_split_sizes, group, tag)"
    ),
    f"{_SCHEDULES}:PipelineScheduleSingle._stage": "set",
    f"{_SCHEDULES}:PipelineScheduleMulti._stages": "set",
    f"{_SCHEDULES}:PipelineScheduleSingle._step_microbatches": _STEP,
    f"{_SCHEDULES}:PipelineScheduleMulti._step_microbatches": _STEP,
    "torch.distributed.checkpoint._fsspec_filesystem:FileSystem": "class",
    "torch.distributed.checkpoint._fsspec_filesystem:FsspecWriter": "class",
    "torch.distributed.checkpoint._traverse:set_element": "(root_dict, path, value)",
    "torch.distributed.checkpoint.filesystem:_StorageInfo": "class",
    "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING": "class",
    "torch.serialization:_get_layout": "(name)",
    "torch._C:_accelerator_getAllocatorSettings": "builtin_function_or_method",
    "torch._C:_accelerator_setAllocatorSettings": "builtin_function_or_method",
}


def test_names_are_there_in_their_form():
    check_forms(TORCH, MODULES, FORMS)


def test_the_page_lists_them():
    check_page(TORCH, MODULES, "tests/compat/test_torch.py")
    elsewhere = [row for row in rows_of(TORCH) if not row[2].startswith("`compat.")]
    operators = [row[0] for row in elsewhere if row[2] == "`kernels/packed_attention.py`"]
    assert operators == ["`torch.ops.torch_attn._varlen_attn`", "`torch.ops.torch_attn._varlen_attn_backward`"]
    assert {row[2] for row in elsewhere} == {"`kernels/packed_attention.py`", "`mesh/resources/listeners/gloo.py`"}
    assert all((TREE / row[3].strip("`")).is_file() for row in elsewhere)


def test_operators_of_packed_attention_take_what_the_kernel_gives():
    assert varlen.varlen_attn
    forward, backward = torch.ops.torch_attn._varlen_attn.default, torch.ops.torch_attn._varlen_attn_backward.default
    lengths = ["cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert [argument.name for argument in forward._schema.arguments][:7] == ["query", "key", "value", *lengths]
    expected = ["grad_out", "query", "key", "value", "out", "lse", *lengths]
    assert [argument.name for argument in backward._schema.arguments][:10] == expected
    for operator in (forward, backward):
        names = {argument.name for argument in operator._schema.arguments}
        assert {"is_causal", "scale", "window_size"} <= names
        assert ("rng_state" in names) == (operator is backward)


# tensors and modules


def test_tables_of_a_module_are_its_own():
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    tensors.own_parameters(module)["weight"] = None
    tensors.own_buffers(module)["running_mean"] = torch.ones(2)
    assert module.weight is None and module.running_mean.tolist() == [1, 1]
    assert tensors.non_persistent_buffers(module) == {"scratch"}


def test_storages_are_told_apart_on_meta():
    whole, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert tensors.storage_identity(whole[1:]) == tensors.storage_identity(whole) != tensors.storage_identity(other)


def test_operators_that_write_are_known():
    assert tensors.changes_arguments(torch.ops.aten.add_.Tensor)
    assert not tensors.changes_arguments(torch.ops.aten.add.Tensor)


def test_each_tensor_is_copied_to_its_place():
    places, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.arange(3.0)]
    tensors.copy_each(places, sources)
    assert all(map(torch.equal, places, sources))


def test_the_gradient_of_a_softmax_is_autograds():
    scores = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    grad, probability = torch.randn(3, 5, generator=torch.Generator().manual_seed(2)), scores.softmax(-1)
    [expected] = torch.autograd.grad(probability, scores, grad)
    assert torch.equal(tensors.softmax_gradient(grad, probability.detach()), expected)


def test_openmp_is_found():
    assert tensors.openmp_library().omp_get_max_threads() >= 1


# the compiler


@pytest.fixture
def compiled(monkeypatch):
    """What is compiled, without the compiler."""
    compiled = []

    def compile_now(function=None, **options):
        compiled.append((function, options))
        return lambda *arguments: ("compiled", function(*arguments))

    monkeypatch.setattr(torch, "compile", compile_now)
    return compiled


def test_what_is_given_to_the_compiler_meanwhile_is_compiled_once_when_it_is_called(compiled):
    before = torch.compile
    with compiling.compiled_at_first_call():
        later = torch.compile(abs, fullgraph=True)
        decorated = torch.compile(mode="default")(abs)
    assert torch.compile is before and not compiled
    assert [later(-1), later(-2), decorated(-3)] == [("compiled", 1), ("compiled", 2), ("compiled", 3)]
    assert compiled == [(abs, {"fullgraph": True}), (abs, {"mode": "default"})]


def test_while_the_compiler_is_disabled_it_is_not_imported(compiled, monkeypatch):
    monkeypatch.setattr(torch, "compile", torch.compile)
    before = torch.compile
    compiling.import_no_disabled_compiler()
    assert torch.compile is before, "it is not disabled"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    compiling.import_no_disabled_compiler()
    assert torch.compile(abs, fullgraph=True) is abs and torch.compile(mode="default")(abs) is abs
    assert torch.compile(model=abs) is abs
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    assert torch.compile(mode="default")(abs)(-1) == ("compiled", 1)
    assert compiled == [(abs, {"mode": "default"})]


def test_other_threads_compile_as_ever(compiled):
    with compiling.compiled_at_first_call():
        thread = threading.Thread(target=lambda: torch.compile(abs))
        thread.start()
        thread.join()
    assert compiled == [(abs, {})]


def test_an_import_that_fails_leaves_the_compiler_as_it_was(compiled):
    before = torch.compile
    with pytest.raises(ImportError), compiling.compiled_at_first_call():
        raise ImportError
    assert torch.compile is before


# schedules


def test_stages_of_either_kind_of_schedule_are_found():
    one, several = object.__new__(_Single), object.__new__(_Multi)
    one._stage, several._stages = "stage", ["first", "second"]
    assert pipelining.stages_of(one) == ["stage"] and pipelining.stages_of(several) == ["first", "second"]


class _Single(PipelineScheduleSingle):
    def _step_microbatches(self, *arguments, **keywords):
        raise NotImplementedError


class _Multi(PipelineScheduleMulti):
    pass


# CUDA's allocator


@pytest.fixture
def settings():
    """CUDA's allocator's, which torch keeps without CUDA, too: to be set, and to be read."""
    before = torch._C._accelerator_getAllocatorSettings()
    yield torch._C._accelerator_setAllocatorSettings, torch._C._accelerator_getAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "expandable_segments:True"),
        ("max_split_size_mb:128", "max_split_size_mb:128,expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments:False"),
    ],
)
def test_segments_grow_unless_the_user_has_said_otherwise(settings, before, after):
    set_to, read = settings
    set_to(before)
    cuda_allocator.expand_segments()
    assert read() == after


@pytest.mark.parametrize("before", ["", "max_split_size_mb:128", "expandable_segments:False"])
def test_fixed_segments_stay_as_they_are(settings, before):
    set_to, read = settings
    set_to(before)
    with cuda_allocator.fixed_segments():
        assert read() == before
    assert read() == before


def test_segments_that_grow_are_fixed_for_a_while_and_other_settings_stay(settings):
    set_to, read = settings
    set_to("expandable_segments:True,max_split_size_mb:128")
    with pytest.raises(ValueError, match="no memory"), cuda_allocator.fixed_segments():
        assert read() == "max_split_size_mb:128,expandable_segments:False"
        raise ValueError("no memory")
    assert read() == "max_split_size_mb:128,expandable_segments:True"
