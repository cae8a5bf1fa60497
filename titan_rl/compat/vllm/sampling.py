"""vLLM's sampler: how a CPU draws tokens, the tokens that each was sampled from, and texts that end an answer.

vLLM draws a token by noise for every word (Gumbel), which takes a CPU a fifth of a step where the vocabulary is large;
here it is drawn by one number, for which the cumulative distribution is inverted.

Model Runner V2, which vLLM has for GPUs, returns masks itself, of every request in the batch; those of the whole
vocabulary are dropped. On a CPU they are read off the processed log-probabilities, where what was cut away is -inf.

Dimensions: N requests, V words, K blocks of W words, or candidates of a draw.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.outputs import ModelRunnerOutput, SamplingMaskLists
from vllm.v1.sample import sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.worker.gpu.sample import logprob
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from titan_rl.compat.reach import VLLM, Reach

_SAMPLER = "vllm.v1.sample"
REACHES = (
    Reach("vllm.v1.core.sched.scheduler:Scheduler.return_sampling_mask", "hand on what each token was sampled from"),
    Reach("vllm.v1.worker.gpu.sample.sampler:Sampler.return_sampling_mask", "have a GPU's sampler return it"),
    Reach("vllm.v1.outputs:ModelRunnerOutput.sampling_masks", "return what each token was sampled from on a CPU"),
    Reach("vllm.v1.worker.gpu.sample.output:SamplingMaskTensors.tolists", "list no whole vocabulary"),
    Reach("vllm.v1.worker.gpu.sample.output:SamplingMaskTensors.counts", "list no whole vocabulary"),
    Reach("vllm.v1.worker.gpu.sample.output:SamplingMaskTensors.vocab_size", "list no whole vocabulary"),
    Reach("vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs", "take log-probabilities by the trainer's kernel"),
    Reach("vllm.v1.outputs:SamplingMaskLists.to_nested_list", "keep it as arrays"),
    Reach("vllm.v1.outputs:SamplingMaskLists.slice_request", "keep a request's part, not the batch's"),
    Reach("vllm.v1.worker.gpu_model_runner:GPUModelRunner.sampler", "find the sampler"),
    Reach("vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens", "return masks with a CPU's tokens"),
    Reach(f"{_SAMPLER}.sampler:Sampler.topk_topp_sampler", "read off what a CPU's sampler has cut away"),
    Reach(f"{_SAMPLER}.ops.topk_topp_sampler:TopKTopPSampler.forward", "read off what a CPU's sampler has cut away"),
    Reach(f"{_SAMPLER}.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu", "draw a token by one number on a CPU"),
    Reach(f"{_SAMPLER}.ops.topk_topp_sampler:apply_top_k_top_p", "draw a token by one number on a CPU"),
    Reach(f"{_SAMPLER}.sampler:batched_count_greater_than", "count no ranks of tokens, which nobody reads"),
    Reach("vllm.v1.engine.output_processor:OutputProcessor.tokenizer", "find texts that end an answer"),
)
VLLM.require(REACHES)
_LISTS_OF_ALL, _PART_OF = SamplingMaskTensors.tolists, SamplingMaskLists.slice_request
_BY_NOISE = TopKTopPSampler.forward_cpu
_LARGE_VOCABULARY, _BLOCK = 4096, 128
"""Words from which on a draw by one number is faster; and those that are added up before one of them is looked for: the
vocabularies of most models are multiples."""


def sample_by_inversion() -> None:
    """Have the samplers of this process, which works on a CPU, draw tokens of a large vocabulary by ``draw``."""
    TopKTopPSampler.forward_cpu = _forward_cpu
    sampler.batched_count_greater_than = _no_ranks  # pyright: ignore[reportPrivateImportUsage]


def _forward_cpu(
    self: TopKTopPSampler,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens [N], and log-probabilities [N, V] of what they were drawn from. ``generators``: of seeded requests."""
    if logits.shape[-1] < _LARGE_VOCABULARY or self.logprobs_mode != "processed_logprobs":
        return _BY_NOISE(self, logits, generators, k, p)
    logprob_NV = apply_top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
    return draw(logprob_NV.exp(), uniform_numbers(len(logits), generators, logits.device)), logprob_NV


def uniform_numbers(count: int, generators: Mapping[int, torch.Generator], device: torch.device) -> torch.Tensor:
    """Random numbers of [0, 1), float64 [count]: those of seeded requests by their ``generators``."""
    uniform_N = torch.rand(count, dtype=torch.float64, device=device)
    for place, generator in generators.items():
        uniform_N[place].uniform_(generator=generator)
    return uniform_N


def draw(weight_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """A word of each row by its weights, at a number of [0, 1): int64 [N]; inversion (Devroye, 1986, section III.2).

    First among blocks of words, then in the block. A word whose weight is 0 is not drawn; where a row's weights are all
    0, or one is NaN, any word is."""
    num_words = weight_NV.shape[1]
    blocks_NKW = F.pad(weight_NV, (0, -num_words % _BLOCK)).unflatten(1, (-1, _BLOCK))
    block_N1, rest_N1 = _place(blocks_NKW.sum(-1), uniform_N[:, None])
    own_NW = blocks_NKW.take_along_dim(block_N1[..., None], 1)[:, 0]
    word_N1, _ = _place(own_NW, rest_N1)
    return (block_N1 * _BLOCK + word_N1).clamp_(max=num_words - 1)[:, 0]


def _place(weight_NK: torch.Tensor, fraction_N1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidate behind so much of the weights' sum [N, 1], and what fraction of its own weight is left before it."""
    sums_NK = weight_NK.cumsum(-1, dtype=torch.float64)
    total_N1 = sums_NK[:, -1:]
    sought_N1 = torch.minimum(fraction_N1 * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    place_N1 = torch.searchsorted(sums_NK, sought_N1, right=True).clamp_(max=sums_NK.shape[1] - 1)
    behind_N1 = (sums_NK.gather(1, place_N1) - sought_N1) / weight_NK.gather(1, place_N1)
    return place_N1, (1 - behind_N1).clamp_(0.0, 1.0)


def _no_ranks(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """In the place of each token's rank [N], for which vLLM compares ``values`` [N, 1] with all of ``x`` [N, V]."""
    return torch.zeros(len(x), dtype=torch.int64)


def keep_masks(scheduler: Scheduler, runner: Any) -> None:
    """Return, from now on, with each token of a request the ids that it was sampled from; none for all of them.

    vLLM's own setting would refuse greedy requests, and top-p without top-k. ``runner``: a worker's model runner.
    Errors: RuntimeError for the older model runner on a GPU.
    """
    if scheduler.return_sampling_mask:
        return
    if isinstance(runner.sampler, SamplerV2):
        SamplingMaskTensors.tolists = _lists
        runner.sampler.return_sampling_mask = True
    elif runner.device.type == "cpu":
        _CpuMasks(runner)
    else:
        raise RuntimeError("vLLM returns no sampling masks with VLLM_USE_V2_MODEL_RUNNER=0 on a GPU: unset that")
    SamplingMaskLists.to_nested_list = _arrays  # pyright: ignore[reportAttributeAccessIssue]  # lists take ten times it
    SamplingMaskLists.slice_request = _part
    scheduler.return_sampling_mask = True


def _lists(self: SamplingMaskTensors, num_sampled_tokens: np.ndarray | None = None) -> SamplingMaskLists:
    """Ids that each token was sampled from; none for all, as of a greedy request: vLLM would list every one of them."""
    counts = self.counts.where(self.counts < self.vocab_size, 0)
    return _LISTS_OF_ALL(self._replace(counts=counts), num_sampled_tokens)


def _part(self: SamplingMaskLists, req_idx: int, num_positions: int) -> SamplingMaskLists:
    """One request's masks. vLLM's own is a view, which keeps the ids of the whole batch until the request ends."""
    part = _PART_OF(self, req_idx, num_positions)
    return part._replace(token_ids=part.token_ids.copy())


def _arrays(masks: SamplingMaskLists) -> list[np.ndarray]:
    if masks.offsets is None:
        return [masks.token_ids]
    return np.split(masks.token_ids, masks.offsets[1:-1])


class _CpuMasks:
    """Recorder of what each step's sampler left, in the form that vLLM's scheduler hands on."""

    def __init__(self, runner: GPUModelRunner):
        self._sampler = runner.sampler.topk_topp_sampler
        self._sample, self._cut = runner.sample_tokens, self._sampler.forward
        self._masks: SamplingMaskLists | None = None
        self._sampler.forward = self._forward
        runner.sample_tokens = self._sample_tokens  # pyright: ignore[reportAttributeAccessIssue]  # it is called by name

    def _forward(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        sampled, logprob_NV = self._cut(*arguments)
        assert logprob_NV is not None, "the engine returns processed log-probabilities"
        self._masks = masks_of(logprob_NV)
        return sampled, logprob_NV

    def _sample_tokens(self, *arguments: Any) -> Any:
        self._masks = None  # where all are greedy nothing is cut
        output = self._sample(*arguments)
        if isinstance(output, ModelRunnerOutput):
            output.sampling_masks = self._masks
        return output


def masks_of(logprob_NV: torch.Tensor) -> SamplingMaskLists:
    """Ids of each of N requests whose log-probability is finite; none where all V are."""
    is_kept_NV = logprob_NV > -torch.inf
    is_kept_NV &= ~is_kept_NV.all(dim=1, keepdim=True)
    offsets = np.concatenate([[0], is_kept_NV.sum(dim=1).cumsum(0).numpy()])
    return SamplingMaskLists(is_kept_NV.nonzero()[:, 1].to(torch.int32).numpy(), offsets)


def set_logprobs(logprobs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Have a GPU's sampler take log-probabilities by ``logprobs``, of processed logits [N, V] and tokens [N, K]."""
    logprob.compute_token_logprobs = logprobs


def give_tokenizer(engine: LLMEngine, tokenizer: Any) -> None:
    """Let an engine without a tokenizer read the answers of requests with stop strings."""
    engine.output_processor.tokenizer = tokenizer
