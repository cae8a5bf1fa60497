"""vLLM 0.32's private names, and what its scheduler's counters mean."""

import ast
import inspect
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reaches import check_forms, check_page
from transformers import CONFIG_MAPPING
from vllm import SamplingParams
from vllm.config.reasoning import ReasoningConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import models as vllm_models
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS
from vllm.platforms.cpu import CpuPlatform
from vllm.triton_utils import HAS_TRITON, dispatcher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2

from titan_rl.compat.reach import VLLM, DependencyChanged
from titan_rl.compat.vllm import (
    admission,
    engine,
    layers,
    lean_import,
    loading,
    parallel,
    quantization,
    routing,
    sampling,
    speculation,
    thinking,
    vision,
)
from titan_rl.data.text.thinking import ThinkingTags, forced_closings
from titan_rl.models.families.registry import FAMILIES

MODULES = (
    *(admission, layers, loading, engine, parallel, quantization, routing, sampling, speculation, thinking, vision),
    lean_import,
)
_LAYERS, _LOADER = "vllm.model_executor.layers", "vllm.model_executor.model_loader"
_INFO = f"{_LOADER}.reload.types:LayerReloadingInfo"
_CAPTURER = f"{_LAYERS}.fused_moe.routed_experts_capturer"
_HOLDER = "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder"
FORMS = {
    f"{_LAYERS}.logits_processor:LogitsProcessor._apply_head": "(self, lm_head, hidden_states, embedding_bias)",
    f"{_LAYERS}.logits_processor:LogitsProcessor.head_dtype": "set",
    f"{_LAYERS}.linear:UnquantizedLinearMethod.process_weights_after_loading": "(self, layer)",
    f"{_LAYERS}.utils:dispatch_cpu_unquantized_gemm.cpu_linear": "set",
    "vllm._custom_ops:create_onednn_mm": "(weight, primitive_cache_size)",
    "vllm._custom_ops:onednn_mm": "(dnnl_handler, x, bias)",
    "vllm._custom_ops:rms_norm": "(out, input, weight, epsilon)",
    f"{_LAYERS}.fused_moe.fused_moe_method_base:FusedMoEMethodBase.moe_kernel": "set",
    "vllm.model_executor.models.registry:_run_in_subprocess": "(fn)",
    "vllm.triton_utils.dispatcher:_rebind_kernels": "(overrides)",
    "vllm.triton_utils.dispatcher:sys": "module",
    f"{_LOADER}:_LOAD_FORMAT_TO_MODEL_LOADER": "dict",
    f"{_LOADER}.default_loader:DefaultModelLoader._prepare_weights": (
        "(self, model_name_or_path, subfolder, revision, fall_back_to_pt, allow_patterns_overrides)"
    ),
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory._registry": "dict",
    f"{_LOADER}.reload.layerwise:_get_original_loader": "(tensor)",
    f"{_LOADER}.reload.layerwise:get_layerwise_info": "(layer)",
    f"{_LOADER}.reload.layerwise:_layerwise_process": "(layer, info)",
    f"{_LOADER}.reload.layerwise:_place_kernel_tensors": "(layer, info)",
    f"{_LOADER}.reload.meta:materialize_layer": "(layer, info)",
    f"{_LOADER}.reload.meta:restore_layer_on_meta": "(layer, info)",
    f"{_LOADER}.reload.utils:get_layer_params_buffers": "(layer)",
    f"{_INFO}.restore_metadata": "annotated",
    f"{_INFO}.kernel_tensors": "NoneType",
    f"{_INFO}.kernel_non_persistent_buffers": "annotated",
    f"{_LAYERS}.quantization.online.fp8:_fp8_channel_scale": "(amax)",
    f"{_LAYERS}.quantization.online.fp8:_fp8_quant_per_channel": "(weight, scale)",
    f"{_LAYERS}.quantization.input_quant_fp8:QuantFP8.forward_native": "(self, x, scale, scale_ub, use_triton)",
    "vllm.utils.deep_gemm:per_block_cast_to_fp8": "(x, block_size, use_ue8m0)",
    "vllm.v1.engine.core_client:InprocClient.engine_core": "set",
    "vllm.v1.engine.core:EngineCore.scheduler": "set",
    "vllm.v1.core.sched.scheduler:Scheduler.requests": "set",
    "vllm.v1.request:Request.num_output_tokens": "property",
    "vllm.v1.request:Request.num_output_placeholders": "set",
    "vllm.v1.request:Request.num_stale_output_tokens": "set",
    "vllm.v1.request:Request.drop_stale_output": "set",
    "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher._distributed_args": "(self)",
    "vllm.v1.executor.uniproc_executor:Lock": "builtin_function_or_method",
    f"{_CAPTURER}:RoutedExpertsCapturer.snapshot_routing_data": "(self, num_tokens)",
    f"{_CAPTURER}:RoutedExpertsCapturer.shape_per_token": "set",
    f"{_CAPTURER}:bind_routed_experts_capturer": "(model, capturer)",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": "(self, scheduler_output, intermediate_tensors)",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.requests": "set",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState.block_ids": "annotated",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState.num_computed_tokens": "annotated",
    "vllm.outputs:CompletionOutput.routed_experts": "NoneType",
    "vllm.v1.core.sched.scheduler:Scheduler.return_sampling_mask": "set",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.return_sampling_mask": "set",
    "vllm.v1.outputs:ModelRunnerOutput.sampling_masks": "NoneType",
    "vllm.v1.worker.gpu.sample.output:SamplingMaskTensors.tolists": "(self, num_sampled_tokens)",
    "vllm.v1.worker.gpu.sample.output:SamplingMaskTensors.counts": "_tuplegetter",
    "vllm.v1.worker.gpu.sample.output:SamplingMaskTensors.vocab_size": "_tuplegetter",
    "vllm.v1.outputs:SamplingMaskLists.to_nested_list": "(self)",
    "vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs": "(logits, token_ids)",
    "vllm.v1.outputs:SamplingMaskLists.slice_request": "(self, req_idx, num_positions)",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sampler": "set",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": "(self, grammar_output)",
    "vllm.v1.sample.sampler:Sampler.topk_topp_sampler": "set",
    "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward": "(self, input)",
    "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu": "(self, logits, generators, k, p)",
    "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p": "(logits, k, p)",
    "vllm.v1.sample.sampler:batched_count_greater_than": "(x, values)",
    "vllm.v1.engine.output_processor:OutputProcessor.tokenizer": "set",
    "vllm.reasoning.abs_reasoning_parsers:ToolServer": "class",
    "vllm.v1.structured_output:ParserEngineReasoningAdapter": "class",
    "vllm.config.reasoning:ReasoningConfig._reasoning_start_token_ids": "NoneType",
    "vllm.config.reasoning:ReasoningConfig._reasoning_end_token_ids": "NoneType",
    "vllm.config.reasoning:ReasoningConfig._natural_reasoning_end_token_ids": "NoneType",
    "vllm.v1.engine.llm_engine:LLMEngine.vllm_config": "set",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.thinking_budget_state": "set",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.req_states": "set",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.input_batch": "set",
    "vllm.v1.worker.gpu_input_batch:InputBatch.thinking_budget_state_holder": "set",
    f"{_HOLDER}._init_state_entry": "(self, prompt_tok_ids, thinking_token_budget)",
    f"{_HOLDER}._state": "set",
    "vllm.inputs.engine:mm_input": ("(prompt_token_ids, mm_kwargs, mm_hashes, mm_placeholders, prompt, cache_salt)"),
    "vllm.multimodal.inputs:MultiModalFieldConfig.flat_from_sizes": "(modality, size_per_item, dim, keep_on_cpu)",
    "vllm.multimodal.inputs:MultiModalKwargsItems.from_hf_inputs": "(hf_inputs, config_by_key)",
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl:smart_resize": (
        "(height, width, factor, min_pixels, max_pixels)"
    ),
    "vllm.multimodal.processing.context:BaseProcessingInfo.get_mm_max_tokens_per_item": "(self, seq_len, mm_counts)",
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": (
        "(x, cu_num_tokens, num_tokens, replace_from, replace_to)"
    ),
    "vllm.v1.sample.rejection_sampler:sample_recovered_tokens": (
        "(max_spec_len, num_draft_tokens, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, "
        "sampling_metadata, device, use_fp64_gumbel)"
    ),
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": (
        "(self, metadata, draft_probs, logits, sampling_metadata)"
    ),
    "vllm.v1.sample.rejection_sampler:RejectionSampler.sampler": "set",
    "vllm.v1.spec_decode.llm_base_proposer:compute_probs_and_sample_next_token": (
        "(logits, sampling_metadata, use_fp64_gumbel)"
    ),
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._maybe_share_lm_head": (
        "(self, target_language_model)"
    ),
    "vllm.v1.worker.gpu.spec_decode.eagle.utils:_should_share": "(eagle, flag, draft, target)",
    "vllm.v1.core.sched.scheduler:Scheduler.dynamic_sd_lookup": "set",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "(self, scheduler_output, model_runner_output)",
    "vllm.v1.core.sched.output:SchedulerOutput.num_spec_tokens_to_schedule": "int",
    "vllm.v1.core.sched.output:SchedulerOutput.scheduled_spec_decode_tokens": "annotated",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": "(self, throttle_prefills)",
    "vllm.v1.core.sched.scheduler:Scheduler.max_num_active_reqs": "set",
    "vllm.v1.core.sched.scheduler:Scheduler.max_num_running_reqs": "set",
    "vllm.v1.core.sched.scheduler:Scheduler.running": "set",
    "vllm.v1.core.sched.scheduler:Scheduler.waiting": "set",
    "vllm.v1.core.sched.scheduler:Scheduler.hash_block_size": "set",
    "vllm.v1.core.sched.scheduler:Scheduler.reset_preempted_req_ids": "set",
    "vllm.v1.core.sched.output:SchedulerOutput.preempted_req_ids": "NoneType",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.usage": "property",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.block_pool": "set",
    "vllm.v1.core.block_pool:BlockPool.free_block_queue": "set",
    "vllm.v1.core.block_pool:BlockPool.blocks": "set",
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": "(self)",
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": "class",
    "vllm.v1.kv_cache_interface:get_kv_cache_spec_sliding_window": "(kv_cache_spec)",
    "vllm.v1.request:Request.block_hashes": "set",
    "vllm.v1.request:Request.num_prompt_tokens": "set",
    "vllm.v1.request:Request.num_tokens": "property",
    "vllm.v1.request:Request.max_tokens": "set",
} | {
    f"vllm.distributed.parallel_state:{name}": "NoneType"
    for name in ("_WORLD", "_PP", "_DP", "_EP", "_PCP", "_DCP", "_TP")
}


def test_names_are_there_in_their_form():
    check_forms(VLLM, MODULES, FORMS)


def test_an_engine_makes_its_lock_by_the_name_that_is_ours():
    assert "Lock" in UniProcExecutor._init_executor.__code__.co_names


def test_the_page_lists_them():
    check_page(VLLM, MODULES, "tests/compat/test_vllm.py")


@pytest.mark.parametrize(
    ("ours", "its", "name", "caller"),
    [
        (loading.FileLoader, DefaultModelLoader, "_prepare_weights", DefaultModelLoader._get_weights_iterator),
        (engine.OwnRankExecutor, ExecutorWithExternalLauncher, "_distributed_args", UniProcExecutor._init_executor),
        (layers.PackedLinearMethod, UnquantizedLinearMethod, "process_weights_after_loading", None),
        (None, LogitsProcessor, "_apply_head", LogitsProcessor._get_logits),
    ],
)
def test_what_is_overridden_is_what_vllm_calls(ours, its, name, caller):
    """By its name, on an instance, where one can tell from the caller's code."""
    if ours is not None:
        assert list(inspect.signature(getattr(ours, name)).parameters) == list(
            inspect.signature(getattr(its, name)).parameters
        )
    assert caller is None or name in caller.__code__.co_names


def test_one_processors_projection_is_replaced_and_made_of_vllms_own_each_time():
    processor = object.__new__(LogitsProcessor)
    torch.nn.Module.__init__(processor)
    own = layers.head_projection(processor)
    seen = []

    def make(of):
        seen.append(layers.head_projection(of))
        return lambda *arguments: "ours"

    for _ in range(2):
        layers.set_head_projection(processor, make)
        assert processor._apply_head(None, None, None) == "ours"
    assert seen == [own, own]


def test_experts_are_forgotten_and_packed_weights_dropped():
    module = torch.nn.Linear(1, 1)
    module.quant_method, module.cpu_linear = SimpleNamespace(moe_kernel=object()), object()
    layers.forget_packed_experts(module)
    layers.drop_packed_weights(module)
    assert module.quant_method.moe_kernel is None and not hasattr(module, "cpu_linear")
    layers.forget_packed_experts(torch.nn.Linear(1, 1))


def test_a_mask_has_what_is_finite_and_nothing_where_all_is():
    logprob_NV = torch.tensor([[-1.0, -torch.inf, -2.0], [-1.0, -1.0, -1.0], [-torch.inf, 0.0, -torch.inf]])
    masks = sampling.masks_of(logprob_NV)
    supports = [sampling._arrays(masks.slice_request(place, 1))[0].tolist() for place in range(3)]
    assert supports == [[0, 2], [], [1]] == [part.tolist() for part in sampling._arrays(masks)]


def test_a_gpus_masks_list_no_whole_vocabulary_and_keep_no_batch(monkeypatch):
    """As a batch has them in which a greedy request, or one without truncation, stands beside others."""
    for kind, name in ((SamplingMaskTensors, "tolists"), (SamplingMaskLists, "slice_request")):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # as they were, when the test is over
    monkeypatch.setattr(SamplingMaskLists, "to_nested_list", SamplingMaskLists.to_nested_list)
    scheduler, sampler = SimpleNamespace(return_sampling_mask=False), object.__new__(SamplerV2)
    sampling.keep_masks(scheduler, SimpleNamespace(sampler=sampler))
    assert scheduler.return_sampling_mask and sampler.return_sampling_mask

    is_kept_NV = np.zeros((3, 37), bool)
    is_kept_NV[0, [3, 5]] = is_kept_NV[1] = is_kept_NV[2, 1:] = True  # the last: more than the compact rows hold
    counts, compact_NK = is_kept_NV.sum(1), np.full((3, 8), -1, np.int32)
    for row, is_kept in zip(compact_NK, is_kept_NV, strict=True):
        kept = np.flatnonzero(is_kept)[:8]
        row[: len(kept)] = kept
    parts = compact_NK, np.packbits(is_kept_NV, axis=1, bitorder="little"), counts.astype(np.int32)
    lists = SamplingMaskTensors(*map(torch.from_numpy, parts), vocab_size=37).tolists(np.ones(3, np.int64))
    slices = [lists.slice_request(place, 1) for place in range(3)]
    assert [each.to_nested_list()[0].tolist() for each in slices] == [[3, 5], [], [*range(1, 37)]]
    assert all(each.token_ids.base is None for each in slices) and len(lists.token_ids) == 2 + 36


def test_a_gpus_sampler_is_told_the_tags_and_the_older_one_is_refused(monkeypatch):
    told = []
    monkeypatch.setattr(thinking, "ThinkingBudgetState", lambda *arguments: told.append(arguments) or "state")
    vllm_config = SimpleNamespace(model_config=None, reasoning_config=None)
    sampler = object.__new__(SamplerV2)
    sampler.req_states = "requests"
    thinking.limit_thinking(SimpleNamespace(vllm_config=vllm_config), SimpleNamespace(sampler=sampler), 7, 8)
    [(requests, config)] = told
    assert (requests, sampler.thinking_budget_state, config) == ("requests", "state", vllm_config.reasoning_config)
    assert config.enabled and config.reasoning_start_token_ids == [7]
    assert config.reasoning_end_token_ids == config.natural_reasoning_end_token_ids == [8]
    older = SimpleNamespace(sampler=object(), device=torch.device("cuda"))
    with pytest.raises(RuntimeError, match="unset that"):
        thinking.limit_thinking(SimpleNamespace(vllm_config=vllm_config), older, 7, 8)


def test_a_cpus_thinking_is_closed_by_what_the_tokens_say():
    """In a batch whose requests come, go, move and are preempted, as vLLM's sampler asks; vLLM's own closes early."""
    tags, config = ThinkingTags(1, 2), ReasoningConfig()
    config._reasoning_start_token_ids, config._reasoning_end_token_ids = [tags.start], [tags.end]
    seen = 0
    for seed in range(200):
        draw = random.Random(seed)
        holder = thinking.ClosedByTokens(config, 0, 0, torch.device("cpu"), False)
        prompts = [draw.choices(range(6), k=draw.randint(1, 6)) for _ in range(2)]
        answers, budgets = [[], []], [draw.randint(1, 4) for _ in prompts]
        added = [(n, SamplingParams(thinking_token_budget=b), prompts[n], answers[n]) for n, b in enumerate(budgets)]
        holder.sync_batch(BatchUpdate(batch_size=2, removed=[], added=added, moved=[]))
        rows = [0, 1]
        for _ in range(20):
            if draw.random() < 0.2:  # its prompt and what it has written come again
                holder.sync_batch(BatchUpdate(batch_size=2, removed=[rows[0]], added=[], moved=[]))
                again = [(rows[0], *added[0][1:])]
                holder.sync_batch(BatchUpdate(batch_size=2, removed=[], added=again, moved=[]))
            if draw.random() < 0.2:
                holder.sync_batch(BatchUpdate(2, [], [], [(0, 1, MoveDirectionality.SWAP)]))
                rows.reverse()
            holder.update_state([answers[rows.index(row)] for row in (0, 1)], [])
            logits_NV = holder.apply_to_logits(torch.zeros(2, 6), False, [])
            for answer, row in zip(answers, rows, strict=True):
                answer.append(
                    tags.end if logits_NV[row, tags.end] > 0 else draw.choices(range(6), [1, 2, 1, 2, 2, 2])[0]
                )
        for prompt, answer, budget in zip(prompts, answers, budgets, strict=True):
            forced = forced_closings(np.array(prompt), np.array(answer), tags, budget)
            open_at, wanted = -1, []
            for place, token in enumerate([*prompt, *answer]):
                if place >= len(prompt):
                    wanted.append(open_at >= 0 and place - open_at - 1 >= budget)
                open_at = place if token == tags.start else -1 if token == tags.end else open_at
            assert forced.tolist() == wanted
            seen += int(forced.sum())
    assert seen > 500


# what the counters mean

MODEL = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=64,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        block_size=32,
        enforce_eager=True,
        enable_chunked_prefill=False,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=2**24,
    )
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = 16
    return config


@pytest.fixture
def make(config):
    """A scheduler of a kind, without an engine."""

    def make(kind: type[Scheduler]) -> Scheduler:
        spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=16, dtype=torch.float32)
        return kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=16, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=32,
        )

    return make


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_tokens_are_counted_as_the_engine_takes_them(make, kind):
    scheduler = make(kind)
    engine.check_counts(scheduler)
    assert not scheduler.requests and not scheduler.has_requests(), "the engine's own scheduler saw nothing"


@pytest.mark.parametrize(("drops", "count"), [(False, 1), (True, 0)])
def test_the_token_under_way_of_a_preempted_request_counts_unless_it_is_dropped(make, drops, count):
    scheduler, request = make(AsyncScheduler), Request("counted", [0], SamplingParams(max_tokens=4), None)
    scheduler.add_request(request)
    scheduler.schedule()
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0, drop_stale_output=drops)
    assert engine.num_generated(request) == count


@pytest.mark.parametrize("counter", ["num_output_placeholders", "num_stale_output_tokens"])
def test_a_counter_of_another_meaning_is_named_at_the_start(make, monkeypatch, counter):
    """As if a later vLLM counted under another name: the old one would keep its first value."""
    scheduler = make(AsyncScheduler)
    ignored = property(lambda self: 0 if counter == "num_output_placeholders" else 1, lambda self, value: None)
    monkeypatch.setattr(Request, counter, ignored, raising=False)
    with pytest.raises(DependencyChanged, match=rf"vLLM 0\.32\.\d+ counts \d tokens of a request .* {counter} = \d"):
        engine.check_counts(scheduler)


# kernels of a CPU


def test_a_kernel_is_replaced_in_vllms_modules_and_ours(monkeypatch):
    original, wrapper = object(), object()
    for name in ("vllm.fake", "titan_rl.fake", "other.fake"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(kernel=original))
    monkeypatch.setattr(dispatcher, "_rebind_kernels", dispatcher._rebind_kernels)
    loading.rebind_kernels_of_vllm()
    dispatcher._rebind_kernels([(original, wrapper)])
    assert [sys.modules[f"{owner}.fake"].kernel is wrapper for owner in ("vllm", "titan_rl", "other")] == [1, 1, 0]
    assert dispatcher.sys is sys


@pytest.mark.skipif(HAS_TRITON, reason="the kernels stay Triton's where that runs")
def test_no_other_modules_have_kernels(monkeypatch):
    overrides = {}
    monkeypatch.setattr(dispatcher, "register_kernels", overrides.update)
    CpuPlatform.register_triton_kernel_overrides()
    kernels = [id(getattr(*dispatcher._resolve_kernel(name))) for name in overrides]
    owners = {
        name.partition(".")[0]
        for name, module in list(sys.modules.items())
        for value in list(getattr(module, "__dict__", {}).values())
        if {id(value), id(getattr(value, "__dict__", {}).get("kernel"))}.intersection(kernels)
    }
    assert kernels and owners == {"vllm"}


# what engines import

IMPORTS = """
import sys

import titan_rl.generator.engine
import vllm.v1.worker.gpu_worker
from vllm.tracing import is_otel_available

assert not is_otel_available()
assert not {"torch._inductor.lowering", "torch._inductor.compile_fx", "vllm.entrypoints.openai"} & sys.modules.keys()

import opentelemetry, torch, torch._inductor.lowering  # whoever asks for them afterwards

assert torch.compile(abs) is abs and torch.compile(fullgraph=True)(abs) is abs
"""


def test_an_engine_that_compiles_nothing_imports_no_compiler():
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


TYING = "tie_word_embeddings"


def ties_words(module: str, architecture: str) -> bool:
    """Whether vLLM's model shares its embeddings with its head where config.json says so, by its source."""
    text = (Path(vllm_models.__file__).parent / f"{module.replace('.', '/')}.py").read_text()
    tree = ast.parse(text)
    origins = {
        alias.name: node.module.removeprefix("vllm.model_executor.models.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    [model] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == architecture]
    bases = [base.id for base in model.bases if isinstance(base, ast.Name)]
    within = [base for base in bases if f"class {base}(" in text]
    from_others = [(origins[base], base) for base in bases if base in origins and base.endswith("ForCausalLM")]
    return (
        TYING in ast.unparse(model)
        or any(ties_words(module, base) for base in within)
        or any(ties_words(origin, base) for origin, base in from_others)
    )


def test_tied_models_are_refused_whose_head_vllm_would_leave_unfilled():
    """What vLLM has no weights for it leaves as it was, and a run would only see that trainer and engine disagree."""
    named = {"gemma3_text": "Gemma3", "qwen2_5_vl": "Qwen2", "qwen3_5_text": "Qwen3_5"}
    untied = set()
    for model_type in FAMILIES:
        name = named.get(model_type) or CONFIG_MAPPING[model_type].__name__.removesuffix("Config")
        found = _TEXT_GENERATION_MODELS.get(f"{name}ForCausalLM")  # others are transformers' own, which ties them
        if found is not None and not ties_words(*found[:2]):
            untied.add(model_type)
    assert untied == {name for name, family in FAMILIES.items() if family.required.get(TYING) is False}
