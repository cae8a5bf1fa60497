"""Seconds of sampling a batch: prefill bounded by FLOPs, decode by memory's bandwidth or FLOPs. Pure arithmetic.

Sources: Pope et al. 2022, arXiv:2211.05102: a decode step reads the weights once, and of each request its KV cache; a
rank of tensor parallelism holds 1/t of both, and adds up twice a layer over the ranks. Leviathan et al. 2023,
arXiv:2211.17192, section 3: drafts are checked in one pass, which reads the weights once for all of them.
"""

from dataclasses import dataclass

from titan_rl.controller.planning.forecast.rates import Rates
from titan_rl.controller.planning.forecast.work import Batch, Work


@dataclass(frozen=True)
class Engine:
    """One replica."""

    ranks: int
    max_requests: int
    """At once: by ``generator.max_num_seqs``, and by the KV cache."""
    element: int
    """Bytes of a weight, and of a key or value."""
    link: float
    """Bytes a second between its ranks."""
    layer_element: int
    """Bytes of a layer's weight, fewer in FP8, whose faster products are not counted."""


@dataclass(frozen=True)
class Drafting:
    """Tokens that are drafted for each request in a step, and what drafts them."""

    tokens: int
    work: Work | None
    """Of the model, the head or the layer, which passes once for each; None: n-grams."""


@dataclass(frozen=True)
class DraftGain:
    """What drafts cost with so many requests at once, and what they must bring."""

    requests: float
    ratio: float
    """Seconds of a step with drafts over those without."""
    needed_acceptance: float
    """``draft_acceptance_rate`` from which on they gain; above 1: they cannot."""


@dataclass(frozen=True)
class Generating:
    """Seconds of one replica's part of a batch."""

    prefill: float
    decode: float
    """At its mean load."""
    tail: float
    """In which the longest answers are sampled alone, where nothing new may begin meanwhile."""
    requests: float
    """That run at once."""
    engine_step: float

    @property
    def alone(self) -> float:
        """Of a batch that is waited for."""
        return self.prefill + self.decode + self.tail

    @property
    def running(self) -> float:
        """Of a batch among others."""
        return self.prefill + self.decode


def decode_step(
    work: Work, engine: Engine, rates: Rates, requests: float, context: float, drafting: Drafting | None = None
) -> float:
    """Seconds of a step of so many requests, of so many tokens each before it: of one token each, and of its drafts."""
    tokens = requests * (1 + drafting.tokens if drafting else 1)
    seconds = _pass(work, engine, rates, requests, tokens, context)
    if drafting and drafting.work:
        seconds += drafting.tokens * _pass(drafting.work, engine, rates, requests, requests, context)
    return seconds + rates.seconds_engine_step + tokens * rates.seconds_token


def _pass(work: Work, engine: Engine, rates: Rates, requests: float, tokens: float, context: float) -> float:
    """Seconds of a device, for so many tokens of all requests together."""
    weights = (work.touched(tokens) - work.around) * engine.layer_element + work.around * engine.element
    read = weights + requests * context * work.kv_bytes(engine.element)
    flops = work.forward_flops(tokens, tokens * context)
    device = max(
        read / engine.ranks / rates.memory,
        flops / engine.ranks / (rates.peak_flops * rates.decode_share),
    )
    return device + _added_up(work, engine, rates, tokens)


def draft_gain(
    work: Work, engine: Engine, rates: Rates, requests: float, context: float, drafting: Drafting
) -> DraftGain:
    """A step makes ``1 + acceptance x tokens`` tokens of a request, and gains if it takes less than so many times as
    long."""
    plain = decode_step(work, engine, rates, requests, context)
    ratio = decode_step(work, engine, rates, requests, context, drafting) / plain
    return DraftGain(requests, ratio, (ratio - 1) / drafting.tokens)


def _added_up(work: Work, engine: Engine, rates: Rates, tokens: float) -> float:
    """All-reduces over the ranks of an engine, two a layer (Shoeybi et al. 2019, arXiv:1909.08053), each moving
    2 (t - 1) / t of its bytes over every link."""
    if engine.ranks == 1:
        return 0.0
    moved = 2 * (engine.ranks - 1) / engine.ranks * tokens * work.hidden * engine.element
    return 2 * work.layers * (rates.seconds_collective + moved / engine.link)


def generating(work: Work, engine: Engine, rates: Rates, batch: Batch, replicas: int, in_flight: int = 1) -> Generating:
    """Of a replica with its share of the groups. A group's prompt is computed once, and shared by its answers.
    ``in_flight``: batches whose answers may be under way at once."""
    share = batch.answers / replicas
    requests = max(min(engine.max_requests, share * in_flight), 1.0)
    prompts = batch.groups * batch.prompt / replicas
    flops = work.forward_flops(prompts, prompts * batch.prompt / 2)
    prefill = flops / engine.ranks / (rates.peak_flops * rates.prefill_share)
    context = batch.prompt + batch.answer / 2
    step = decode_step(work, engine, rates, requests, context)
    decode = share * batch.answer / requests * step
    tail = max(batch.longest - batch.answer, 0) * decode_step(work, engine, rates, 1, batch.prompt + batch.longest)
    return Generating(prefill, decode, tail, requests, step)
