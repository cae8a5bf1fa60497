"""vLLM's speculative decoding: how many tokens are drafted at each batch size, and what became of them.

On a CPU 0.32 writes each draft's temperature, top-k and top-p into a copy that it drops
(``cpu_triton_utils._expand_kernel_impl``), and checks drafts by whatever was in memory. The one function that calls it
is replaced there.

Everywhere it copies logits several times to check drafts, also in a step that has none, which costs a third of the
step; there tokens are sampled as without speculation. It samples from a draft model by the process's own randomness:
here by each request's, so that an answer depends on its seed alone, and ranks of an engine draft alike. And what stands
for a refused draft it draws on a CPU, as drafts, by noise for every word: here by one number (sampling.py).

A draft head whose output head has the policy's values when it is loaded would share it from then on, though one of them
is updated by itself.
"""

from dataclasses import dataclass

import torch
from torch import nn
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu.spec_decode.eagle import utils as gpu_eagle

from titan_rl.compat.reach import VLLM, Reach
from titan_rl.compat.vllm.sampling import draw, uniform_numbers

_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_EAGLE = "vllm.v1.worker.gpu.spec_decode.eagle.utils"
_SCHEDULER, _OUTPUT = "vllm.v1.core.sched.scheduler:Scheduler", "vllm.v1.core.sched.output:SchedulerOutput"
REACHES = (
    Reach("vllm.v1.sample.rejection_sampler:expand_batch_to_tokens", "check a CPU's drafts at their temperature"),
    Reach("vllm.v1.sample.rejection_sampler:sample_recovered_tokens", "draw what stands for a refused draft"),
    Reach("vllm.v1.sample.rejection_sampler:RejectionSampler.forward", "check no drafts where there are none"),
    Reach("vllm.v1.sample.rejection_sampler:RejectionSampler.sampler", "sample where there are no drafts"),
    Reach("vllm.v1.spec_decode.llm_base_proposer:compute_probs_and_sample_next_token", "draft by a request's seed"),
    Reach(f"{_PROPOSER}._maybe_share_lm_head", "leave a draft head its own output head"),
    Reach(f"{_EAGLE}:_should_share", "leave a draft head its own output head"),
    Reach(f"{_SCHEDULER}.dynamic_sd_lookup", "draft at some batch sizes only"),
    Reach(f"{_SCHEDULER}.update_from_output", "see what became of drafts"),
    Reach(f"{_OUTPUT}.num_spec_tokens_to_schedule", "know which steps could have drafts"),
    Reach(f"{_OUTPUT}.scheduled_spec_decode_tokens", "count drafts"),
)
VLLM.require(REACHES)


def expand_batch_to_tokens(
    values: torch.Tensor, cumulative: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Each request's value [B], once for each of its drafts [num_tokens]; ``replace_from`` becomes ``replace_to``.

    ``cumulative``: numbers of drafts, summed up [B]."""
    counts = torch.diff(cumulative, prepend=cumulative.new_zeros(1))
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def sample_recovered_tokens(
    max_spec_len: int,
    num_draft_tokens: list[int],
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    device: torch.device,
    use_fp64_gumbel: bool = False,
) -> torch.Tensor:
    """What stands for each draft if it is the first that is refused: of where the policy's probabilities exceed the
    draft's (arXiv 2211.17192, section 2.3). One number a request, as an answer has one such token at most."""
    if draft_probs is None:
        weights = target_probs.clone()
        weights[torch.arange(len(weights)), draft_token_ids.long().clamp(min=0)] *= draft_token_ids < 0
    else:
        weights = (target_probs - draft_probs).clamp_(min=0.0)
    drafting = {place: each for place, each in sampling_metadata.generators.items() if num_draft_tokens[place]}
    numbers = uniform_numbers(len(num_draft_tokens), drafting, device)
    counts = torch.tensor(num_draft_tokens, device=device)
    return draw(weights, numbers.repeat_interleave(counts, output_size=len(weights))).to(draft_token_ids.dtype)


_check_drafts = rejection_sampler.RejectionSampler.forward


def sample_or_check_drafts(
    self: rejection_sampler.RejectionSampler,
    metadata: SpecDecodeMetadata,
    draft_probs: torch.Tensor | None,
    logits: torch.Tensor,
    sampling_metadata: SamplingMetadata,
) -> SamplerOutput:
    """Tokens of a step: one a request where there are no drafts, whose logits are in the order of requests."""
    if metadata.max_spec_len:
        return _check_drafts(self, metadata, draft_probs, logits, sampling_metadata)
    return self.sampler(logits=logits, sampling_metadata=sampling_metadata)


def sample_draft_tokens(
    logits: torch.Tensor, sampling_metadata: SamplingMetadata, use_fp64_gumbel: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """A draft model's tokens [B], each drawn by its request's generator, and the probabilities they had [B, V].

    ``logits`` [B, V]. A request that is answered by the likeliest tokens is drafted so, too. Where values are not
    finite, any token is drafted, each as often: vLLM checks drafts by their probabilities, and answers stay exact."""
    if sampling_metadata.all_greedy:
        return logits.argmax(-1), logits  # whose probabilities nobody reads
    assert sampling_metadata.temperature is not None, "not all requests are greedy"
    temperature = sampling_metadata.temperature.unsqueeze(-1)
    is_greedy = temperature == 0
    probs = (logits / temperature.masked_fill(is_greedy, 1)).softmax(-1, dtype=torch.float32)
    probs.masked_fill_(probs[:, :1].isnan(), 1 / probs.shape[-1])  # one value that is not finite makes all NaN
    drawn = draw(probs, uniform_numbers(len(probs), sampling_metadata.generators, probs.device))
    return torch.where(is_greedy[:, 0], probs.argmax(-1), drawn), probs


_share_lm_head = llm_base_proposer.SpecDecodeBaseProposer._maybe_share_lm_head


def share_missing_lm_head(self: llm_base_proposer.SpecDecodeBaseProposer, target_language_model: nn.Module) -> None:
    """Give the policy's output head to a draft head that comes without one."""
    if not getattr(self.model, "has_own_lm_head", False):
        _share_lm_head(self, target_language_model)


def is_missing(eagle: nn.Module, flag: str, draft: nn.Module | None, target: nn.Module | None) -> bool:
    """Whether a draft head comes without a module (``flag``: the attribute that says so), in vLLM's runner for GPUs."""
    return not getattr(eagle, flag, False)


def replace_functions(*, on_cpu: bool) -> None:
    """Have vLLM load, draft and check drafts by the functions above, in this process; before an engine starts."""
    llm_base_proposer.SpecDecodeBaseProposer._maybe_share_lm_head = share_missing_lm_head
    gpu_eagle._should_share = is_missing
    rejection_sampler.RejectionSampler.forward = sample_or_check_drafts
    llm_base_proposer.compute_probs_and_sample_next_token = sample_draft_tokens
    if on_cpu:
        rejection_sampler.sample_recovered_tokens = sample_recovered_tokens
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


@dataclass(frozen=True)
class DraftedStep:
    """What one step of an engine drafted, and what came of it."""

    batch: int
    """Requests."""
    limit: int
    """Tokens that could have been drafted for each."""
    num_drafted: int
    num_accepted: int
    """Drafted tokens that are part of an answer: not those behind its end."""
    num_tokens: int
    """That all answers gained."""
    is_decode: bool
    """Whether no prompt was read in it."""


class DraftRecorder:
    """Recorder of an engine's drafts, which also sets how many tokens are drafted."""

    def __init__(self, scheduler: Scheduler):
        """``scheduler``: of an engine with numbers of draft tokens by batch size."""
        assert scheduler.dynamic_sd_lookup is not None, "vLLM was given such numbers"
        self._by_batch_size, self._limit = scheduler.dynamic_sd_lookup, 0
        self._update, self._steps = scheduler.update_from_output, []
        scheduler.update_from_output = self._update_from_output

    def limit(self, batch_sizes: range, num_tokens: int) -> None:
        """Draft so many tokens for a request, from the next step on, in batches of these sizes."""
        for size in batch_sizes:
            if size < len(self._by_batch_size):
                self._by_batch_size[size] = num_tokens

    def take(self) -> list[DraftedStep]:
        """Steps since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def _update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        step, output = scheduler_output, model_runner_output
        drafts = step.scheduled_spec_decode_tokens
        sampled = dict(zip(output.req_ids, map(len, output.sampled_token_ids), strict=False))
        updates = self._update(step, output)
        # vLLM cuts off what is behind an answer's end
        kept = {each.request_id: len(each.new_token_ids) for update in updates.values() for each in update.outputs}
        self._steps.append(
            DraftedStep(
                batch=len(step.num_scheduled_tokens),
                limit=self._limit,
                num_drafted=sum(map(len, drafts.values())),
                # the last token of a check was not drafted
                num_accepted=sum(min(kept.get(name, 0), max(sampled.get(name, 0) - 1, 0)) for name in drafts),
                num_tokens=sum(kept.values()),
                is_decode=all(
                    count == 1 + len(drafts.get(name, ())) for name, count in step.num_scheduled_tokens.items()
                ),
            )
        )
        self._limit = step.num_spec_tokens_to_schedule  # for the drafts that this step ends with
        return updates
