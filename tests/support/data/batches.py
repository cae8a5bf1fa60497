"""Packed batches of random tokens."""

from dataclasses import replace

import numpy as np
import torch

from titan_rl.data.batches.packing import pack, token_weights
from titan_rl.data.storage.decoding import Penalties
from titan_rl.data.storage.sampling_mask import SamplingMask
from titan_rl.data.types import Batch, Provenance, Sample, is_model
from titan_rl.trainer.objective.nonfinite import parts

VOCABULARY = 90
WORDS = 99
"""Of the tiny models, some of which no token here is."""


def batch_of(
    seed: int,
    *,
    row_tokens: int = 64,
    share_prefix: bool = True,
    scale: float = 1.0,
    with_outcomes: bool = False,
    num_still: int = 0,
    prompts: str = "p",
    branches: bool = False,
    masked: bool = False,
    penalties: Penalties | None = None,
    experts: tuple[int, int, int] | None = None,
    reprompts: bool = False,
    tasks: bool = False,
    apart: bool = True,
    **layout: int,
) -> Batch:
    """Three groups of four samples, about as likely as the untrained model finds them; ``scale`` of advantages;
    a sample whose advantage is above 0 has the outcome 1. ``num_still``: of the first groups, whose advantages are 0.
    ``prompts``: how their names begin. ``branches``: whether samples are rollouts of up to three conversations, every
    second of which begins with the prompt; then each rollout weighs the same. ``masked``: whether tokens were sampled
    from some of the words alone. ``penalties``: of every second sample, and of its branches.
    ``experts``: layers, experts, and those of a token, which tokens went through.
    ``reprompts``: whether all but the first sample of a group have one.
    ``tasks``: whether groups are of tasks, the second of another than the others; ``apart``: with teachers of their
    own, so that they share no row.

    Some tokens are a tool's, not the model's. ``layout``: ``num_ranks`` and ``row_multiple``.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for group in range(3):
        prompt = rng.integers(3, VOCABULARY, rng.integers(1, 9))
        groups.append([])
        for sample in range(4):
            answer = rng.integers(3, VOCABULARY, rng.integers(1, 12))
            tokens = np.concatenate([prompt, answer])
            provenance = np.full(len(tokens), Provenance.MODEL, np.int8)
            provenance[: len(prompt)] = Provenance.TEMPLATE
            provenance[len(prompt) + 4 : len(prompt) + 6] = Provenance.TOOL
            logprobs = rng.normal(-4.6, 0.2, len(tokens)).astype(np.float32)
            advantage = scale * float(rng.normal()) if group >= num_still else 0.0
            outcome = float(advantage > 0) if with_outcomes else None
            groups[-1].append(Sample(tokens, provenance, logprobs, advantage, f"{prompts}{group}", sample, outcome))
            if masked:
                groups[-1][-1] = with_mask(groups[-1][-1], WORDS)
            if penalties and sample % 2:
                groups[-1][-1] = with_penalties(groups[-1][-1], penalties)
            if experts:
                groups[-1][-1] = with_experts(groups[-1][-1], *experts)
            if reprompts and sample:
                reprompt = rng.integers(3, VOCABULARY, 12 + sample % 2).astype(np.int32)
                groups[-1][-1] = replace(groups[-1][-1], reprompt=reprompt)
            if tasks:
                groups[-1][-1] = replace(groups[-1][-1], task=group % 2, teacher=group % 2 if apart else 0)
            if branches:
                groups[-1] += [_branch(groups[-1][-1], number, prompt) for number in range(1, 1 + sample % 3)]
    aggregation = "sequence" if branches else "token"
    return pack(
        groups,
        row_tokens=row_tokens,
        share_prefix=share_prefix,
        weigh=lambda samples: token_weights(samples, aggregation, 16),
        **{"num_ranks": 1} | layout,
    )


def with_mask(sample: Sample, num_words: int) -> Sample:
    """The sample as if each token was sampled from up to 40 words, about as likely as an untrained model finds it."""
    rng = np.random.default_rng(sample.tokens.tolist())
    supports = [np.union1d(rng.integers(0, num_words, rng.integers(0, 40)), token) for token in sample.tokens]
    logprobs = np.array([rng.normal(-np.log(len(support)), 0.2) for support in supports], np.float32)
    return replace(sample, logprobs=logprobs, mask=SamplingMask.of(supports, num_words))


def with_penalties(sample: Sample, penalties: Penalties) -> Sample:
    """The sample as if its logits were penalized; an answer begins wherever the model's tokens do."""
    wrote = np.flatnonzero(is_model(sample.provenance))
    starts = wrote[np.diff(wrote, prepend=-1) > 1]
    return replace(sample, penalties=penalties, starts=tuple(starts.tolist()))


def with_experts(sample: Sample, layers: int, num_experts: int, chosen: int) -> Sample:
    """The sample as if its tokens had gone through random experts, the same for the same tokens of a prompt; some are
    not recorded."""
    rng = np.random.default_rng(sample.tokens[:1].tolist())
    order = rng.random((len(sample.tokens), layers, num_experts)).argsort(axis=2)[..., :chosen].astype(np.uint8)
    order[np.arange(len(sample.tokens)) % 7 == 6] = 255
    return replace(sample, routed_experts=order)


def _branch(first: Sample, number: int, prompt: np.ndarray) -> Sample:
    """Another conversation of a rollout."""
    rng = np.random.default_rng([*first.tokens.tolist(), number])
    context = prompt if number % 2 else rng.integers(3, VOCABULARY, 5)
    tokens = np.concatenate([context, rng.integers(3, VOCABULARY, rng.integers(1, 9))])
    provenance = np.full(len(tokens), Provenance.MODEL, np.int8)
    provenance[: len(context)] = Provenance.TEMPLATE
    logprobs = rng.normal(-4.6, 0.2, len(tokens)).astype(np.float32)
    columns = dict(
        tokens=tokens, provenance=provenance, logprobs=logprobs, branch=number, mask=None, routed_experts=None
    )
    return replace(first, **columns, starts=(len(context),) if first.penalties else ())


POISON = 123.0
"""An advantage whose token gets a gradient of NaN from a poisoned learner."""
FAULTS = ("sampling logprob", "loss", "gradient", "weights")


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.nan


def poison(learner) -> None:
    """From now on a sample with the advantage POISON has a finite loss and no finite gradient."""
    plain = learner._loss

    def poisoned(output, index, columns, totals):
        loss = plain(output, index, columns, totals)
        return _Poison.apply(loss) if (columns["advantage_S"] == POISON).any() else loss

    learner._loss = poisoned


def with_fault(batch: Batch, fault: str, prompt_id: str, sample: int) -> Batch:
    """The batch, with something of one sample out of order."""
    for row in (row for rows in batch.rows for row in rows):
        for name, part in parts(row):
            if name != (prompt_id, sample):
                continue
            if fault == "sampling logprob":
                row.logprob_S[part.start] = np.nan
            elif fault == "loss":
                row.advantage_S[part.start] = np.inf
            elif fault == "gradient":
                row.advantage_S[part.start] = POISON
    return batch


def spoil_a_weight(learner) -> str:
    """One weight becomes NaN; its name."""
    name, parameter = next(
        (name, p) for part in learner.model_parts for name, p in part.named_parameters() if "norm" in name
    )
    with torch.no_grad():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.view(-1)[:1] = torch.nan
    return name
