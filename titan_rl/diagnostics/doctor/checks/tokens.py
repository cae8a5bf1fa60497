"""Tokens: what trainer and generator say of each, whether both sides read the same ones, and which are trained."""

from dataclasses import replace

import numpy as np
import pandas as pd

from titan_rl.config.model_directory.directory import stop_token_ids
from titan_rl.controller.preflight.checks import tokenizer_of
from titan_rl.data.storage.decoding import Penalties
from titan_rl.data.storage.routed_experts import is_recorded
from titan_rl.data.text.thinking import ThinkingTags, forced_tokens, thinking_tags
from titan_rl.data.types import Batch, Decoding, Group, Provenance, Rollout, is_model
from titan_rl.diagnostics.doctor import actor_queries as probes
from titan_rl.diagnostics.doctor.actors_under_test import sample_of
from titan_rl.diagnostics.doctor.check_errors import CheckFailed, CheckSkipped
from titan_rl.diagnostics.doctor.context import CheckContext
from titan_rl.diagnostics.doctor.probes.agreement import compare
from titan_rl.environments.rollout.decoding import decoding_of
from titan_rl.environments.rollout.group import encode_prompt
from titan_rl.models.layers.penalties import PenalizedTokens, penalized_tokens

_END_SEEDS, _END_TOKENS = 48, 64
_SHOWN = 60


# the same tokens on both sides


async def same_tokens(context: CheckContext) -> str:
    """Verifiers read text as the model's directory has it, and engines see the tokens that they were asked."""
    actors = context.actors
    expected = probes.tokenizer_facts(tokenizer_of(context.checked.config))
    for number, actual in enumerate(await actors.ask_verifiers(probes.verifier_facts)):
        if unlike := [name for name in expected | actual if expected.get(name) != actual.get(name)]:
            name = unlike[0]
            evidence = f"{name} is {_short(actual.get(name))} there and {_short(expected.get(name))} by the directory"
            raise CheckFailed(f"verifier {number} has another tokenizer than the model", evidence)
    _check_prompts(context, await context.groups())
    await _check_count(context)
    return f"{len(expected)} facts of the tokenizer, {len(await context.groups())} prompts, and the tokens of a request"


def _check_prompts(context: CheckContext, groups: list[Group]) -> None:
    """What stands before the first answer is the prompt as it is written out here."""
    task, tokenizer = context.checked.task, tokenizer_of(context.checked.config)
    if task.speaks_first or task.has_agent or task.parts:
        return
    for group in groups:
        prompt = encode_prompt(task, tokenizer, context.actors.stream.by_id(group.prompt_id))
        for rollout in group.rollouts:
            sent = rollout.tokens[: rollout.turns[0].start]
            if not np.array_equal(sent, prompt):
                evidence = f"{group.prompt_id} was sent as {_short(sent.tolist())}, and is {_short(prompt.tolist())}"
                raise CheckFailed("a prompt reaches the generator as other tokens than it is written as", evidence)


async def _check_count(context: CheckContext) -> None:
    actors, rollout = context.actors, (await context.groups())[0].rollouts[0]
    prompt_tokens = rollout.tokens[: rollout.turns[0].start]
    await actors.meshes.take_statistics()
    answers = await actors.complete(prompt_tokens, 4, 1)
    saw = sum(engine.num_prompt_tokens for engine in await actors.meshes.take_statistics())
    if saw != len(prompt_tokens) * len(answers):
        evidence = f"{len(prompt_tokens)} tokens were sent, and the engine saw {saw / len(answers):g}"
        raise CheckFailed("the engine puts tokens before a prompt, or drops some", evidence)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# the mask


async def trained_tokens(context: CheckContext) -> str:
    """The loss has exactly the tokens that the model wrote: in rollouts, in rows, and at the trainer's ranks."""
    groups, budget = await context.groups(), context.checked.config.rollout.thinking_budget
    tags = thinking_tags(tokenizer_of(context.checked.config)) if budget else None
    written = {(r.prompt_id, r.sample): check_marks(r, tags, budget) for group in groups for r in group.rollouts}
    check_rows(groups, context.actors.batch(groups), written)
    reading = await context.reading()
    count = sum(int(written_T.sum()) for written_T in written.values())
    if reading.metrics.num_trained_tokens != count:
        evidence = f"the model wrote {count}, the trainer's loss has {reading.metrics.num_trained_tokens}"
        raise CheckFailed("the trainer's loss has not the tokens that the model wrote", evidence)
    others = sum(len(rollout.tokens) for group in groups for rollout in group.rollouts) - count
    return f"{count} tokens of the model's, none of {others} of prompts, templates and tools"


def _sampled(rollout: Rollout, tags: ThinkingTags | None, budget: int) -> np.ndarray:
    """Whether each token was sampled, bool [T]: inside answers, and not forced by a budget.

    Errors: CheckFailed for thinking that was not closed."""
    mask = np.zeros(len(rollout.tokens), bool)
    for turn in rollout.turns:
        mask[turn.start : turn.stop] = True
    try:
        return mask if tags is None else mask & ~forced_tokens(rollout, tags, budget)
    except ValueError as error:
        evidence = f"{rollout.prompt_id} sample {rollout.sample}: {error}"
        raise CheckFailed("the engine does not close thinking at its budget", evidence) from None


def check_marks(rollout: Rollout, tags: ThinkingTags | None, budget: int) -> np.ndarray:
    """Check of a rollout's provenance against its answers; bool [T], whether each token was sampled.

    ``tags``: of thinking, where there is a budget. Errors: CheckFailed."""
    sampled_T = _sampled(rollout, tags, budget)
    if not rollout.branches:
        _check_marked(rollout, sampled_T)
    return sampled_T


def _check_marked(rollout: Rollout, sampled_T: np.ndarray) -> None:
    marked = rollout.provenance == Provenance.MODEL
    if (unlike := np.flatnonzero(marked != sampled_T)).size:
        place = int(unlike[0])
        what = "marked as the model's" if marked[place] else "not marked as the model's"
        evidence = (
            f"token {place} of {rollout.prompt_id} sample {rollout.sample} (id {rollout.tokens[place]}) is {what}"
        )
        raise CheckFailed("a rollout's mask is not its answers", evidence)
    if (rollout.versions[marked] < 0).any():
        evidence = f"{rollout.prompt_id} sample {rollout.sample}"
        raise CheckFailed("a token that counts as the model's has no version of it", evidence)


def check_rows(groups: list[Group], batch: Batch, sampled: dict[tuple[str, int], np.ndarray]) -> None:
    """Each trained token stands behind the token that came before it, and every one is trained once.

    ``sampled``: bool [T] of each rollout. Errors: CheckFailed."""
    rollouts = {(r.prompt_id, r.sample): r for group in groups for r in group.rollouts}
    targets: dict[tuple[str, int], list[int]] = {key: [] for key in rollouts}
    for row in (row for rows in batch.rows for row in rows):
        offsets = row.branch_offsets
        for (prompt_id, sample, _), begin, end in zip(row.owners, offsets, offsets[1:], strict=False):
            trained = row.weight_S[begin:end] > 0
            targets[prompt_id, sample] += row.target_S[begin:end][trained].tolist()
    for key, rollout in rollouts.items():
        if targets[key] != (expected := rollout.tokens[sampled[key]].tolist()):
            evidence = (
                f"{key[0]} sample {key[1]}: the model wrote {_short(expected)}, trained are {_short(targets[key])}"
            )
            raise CheckFailed("the packed rows train other tokens than the model wrote", evidence)


# penalties and the sampling mask

_PLAIN_SEEDS, _PLAIN_TOKENS = 8, 16


async def penalties(context: CheckContext) -> str:
    """Logits are penalized for the same words on both sides, in answers of an engine and in the run's own."""
    decoding, groups = decoding_of(context.checked.config.rollout), await context.groups()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        check_penalties(rollout, decoding.penalties)
    if decoding.penalties is None:
        return "none"
    check_starts(groups, context.actors.batch(groups))
    await _check_plain(context, rollouts[0], "penalties")
    alone = replace(decoding, top_p=1.0, top_k=0, min_p=0.0)
    try:
        text = compare(await _answered(context, rollouts[0], alone), context.limits, "penalized tokens")
        if not decoding.truncates:  # a mask could be wrong, too
            text = compare((await context.reading()).tokens, context.limits, "the tokens that were sampled")
    except CheckFailed as error:
        fault = "penalties are of other words than the engine's: without them both sides agree"
        raise CheckFailed(fault, error.evidence) from None
    return text


def check_starts(groups: list[Group], batch: Batch) -> None:
    """Each penalized token of a row counts from the beginning of its own answer.

    Errors: CheckFailed."""
    rollouts = {(r.prompt_id, r.sample): r for group in groups for r in group.rollouts}
    for row in (row for rows in batch.rows for row in rows):
        for number, tokens in enumerate(penalized_tokens(row)):
            if tokens is not None:
                _check_starts(rollouts[row.owners[number][:2]], row.rollouts[number][1], tokens)


def _check_starts(rollout: Rollout, branch: int, tokens: PenalizedTokens) -> None:
    begin, _ = rollout.spans[branch]
    for place, start in zip((tokens.place_S + begin).tolist(), (tokens.start_S + begin).tolist(), strict=True):
        turn = next((turn for turn in rollout.turns if turn.start <= place < turn.stop), None)
        if turn is None or turn.start != start:
            its = "no answer" if turn is None else f"the answer from {turn.start} on"
            whose = f"token {place} of {rollout.prompt_id} sample {rollout.sample}"
            evidence = f"{whose} is in {its}, and counts from {start}"
            raise CheckFailed("penalties count from elsewhere than an answer's beginning", evidence)


def check_penalties(rollout: Rollout, wanted: Penalties | None) -> None:
    """Errors: CheckFailed for a rollout that does not say what it was sampled with."""
    if rollout.num_model_tokens and rollout.penalties != wanted:
        evidence = f"{rollout.prompt_id} sample {rollout.sample} has {rollout.penalties}, the settings have {wanted}"
        raise CheckFailed("penalties are not where they should be", evidence)


async def _answered(context: CheckContext, rollout: Rollout, decoding: Decoding) -> pd.DataFrame:
    """The trainer's reading of an engine's answers to what a rollout's last answer was asked with."""
    last = rollout.turns[-1].start
    actors, prompt = context.actors, rollout.tokens[max(begin for begin, _ in rollout.spans if begin <= last) : last]
    answers = await actors.complete(prompt, _PLAIN_SEEDS, _PLAIN_TOKENS, decoding=decoding)
    samples = [sample_of(prompt, answer, "doctor/decoding", number) for number, answer in enumerate(answers)]
    return (await actors.read(actors.batch_of_samples([samples]))).tokens


async def _check_plain(context: CheckContext, rollout: Rollout, what: str) -> None:
    """Errors: CheckSkipped if both sides disagree about answers of the whole distribution, too."""
    try:
        compare(await _answered(context, rollout, Decoding()), context.limits, "tokens of the whole vocabulary")
    except CheckFailed as error:
        raise CheckSkipped(f"without {what} they disagree, too: {error.evidence}") from None


async def sampling_mask(context: CheckContext) -> str:
    """Masks are what the settings say, and with them, as without any, trainer and generator agree."""
    decoding, groups = decoding_of(context.checked.config.rollout), await context.groups()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        check_mask(rollout, decoding)
    if not decoding.truncates:
        return "none: tokens are sampled from the whole vocabulary"
    await _check_plain(context, rollouts[0], "a mask")
    try:
        compare((await context.reading()).tokens, context.limits, "the tokens that were sampled")
    except CheckFailed as error:
        fault = "a sampling mask has not the tokens that were sampled from: without one both sides agree"
        raise CheckFailed(fault, error.evidence) from None
    masks = [rollout.mask for rollout in rollouts if rollout.mask is not None]
    kept = [mask.num_kept[is_model(r.provenance)] for mask, r in zip(masks, rollouts, strict=True)]
    return f"{len(np.concatenate(kept))} tokens, sampled from {np.concatenate(kept).mean():.1f} on average"


def check_mask(rollout: Rollout, decoding: Decoding) -> None:
    """Check of a rollout's mask by itself.

    Errors: CheckFailed for one that is missing or too many, is of other tokens, or leaves its own token out.
    """
    whose, wrote = f"{rollout.prompt_id} sample {rollout.sample}", np.flatnonzero(is_model(rollout.provenance))
    if (mask := rollout.mask) is None or not decoding.truncates:
        if (mask is not None) != decoding.truncates:
            what = "no sampling mask" if mask is None else "a sampling mask, and nothing is cut away"
            raise CheckFailed("sampling masks are not where they should be", f"{whose} has {what}")
        return
    if len(mask) != len(rollout.tokens):
        raise CheckFailed("a sampling mask is of other tokens", f"{whose}: {len(mask)} and {len(rollout.tokens)}")
    if (place := mask.first_without(rollout.tokens, wrote)) is not None:
        kept = _short(mask.kept(place).tolist())
        evidence = f"token {place} of {whose} (id {rollout.tokens[place]}) was sampled from {kept}, as its mask says"
        raise CheckFailed("a sampling mask leaves its own token out: is it another token's?", evidence)


# routed experts


async def routing(context: CheckContext) -> str:
    """Routed experts are there for each token that answers, and with them trainer and generator agree."""
    actors, groups = context.actors, await context.groups()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        check_routed_experts(rollout, actors.replays_routing)
    if not actors.replays_routing:
        return "none: the trainer's own routers choose"
    reading = await context.reading()
    try:
        found = compare(reading.tokens, context.limits, "the tokens that were sampled")
    except CheckFailed as error:
        await _check_own_routers(context, groups)
        raise CheckFailed("tokens went through other experts than is recorded of them", error.evidence) from None
    return f"{found}; the trainer's own routers would change {reading.metrics.loss_metrics['routing_changed']:.2%}"


async def _check_own_routers(context: CheckContext, groups: list[Group]) -> None:
    """Errors: CheckSkipped if both sides disagree by the trainer's own routers, too."""
    plain = [replace(g, rollouts=[replace(r, routed_experts=None) for r in g.rollouts]) for g in groups]
    own = await context.actors.read(context.actors.batch(plain))
    try:
        compare(own.tokens, context.limits, "the tokens that were sampled")
    except CheckFailed as error:
        raise CheckSkipped(f"by the trainer's own routers they disagree, too: {error.evidence}") from None


def check_routed_experts(rollout: Rollout, wanted: bool) -> None:
    """Check of a rollout's experts by themselves. Errors: CheckFailed for some that are missing, too many or of other
    tokens."""
    whose, experts_TLK = f"{rollout.prompt_id} sample {rollout.sample}", rollout.routed_experts
    if (experts_TLK is not None) != wanted:
        what = "no routed experts" if wanted else "routed experts, and the trainer's own routers choose"
        raise CheckFailed("routed experts are not where they should be", f"{whose} has {what}")
    if experts_TLK is None:
        return
    if len(experts_TLK) != len(rollout.tokens):
        raise CheckFailed("routed experts are of other tokens", f"{whose}: {len(experts_TLK)}, {len(rollout.tokens)}")
    places = np.flatnonzero(is_model(rollout.provenance))
    if not (recorded := is_recorded(experts_TLK)[places - 1]).all():
        evidence = f"{whose}: of what answered token {places[~recorded][0]} none are recorded"
        raise CheckFailed("routed experts of a token are missing", evidence)


# agreement


async def agreement(context: CheckContext) -> str:
    """Agreement of trainer and generator, at the run's temperature, under its first weights."""
    return compare((await context.reading()).tokens, context.limits, "the tokens that were sampled")


async def ends(context: CheckContext) -> str:
    """An answer that ended by itself ends with a stop token, which is trained, and about which both sides agree."""
    actors, stops = context.actors, stop_token_ids(context.actors.path)
    if not stops:
        raise CheckSkipped("the model's directory names no token that ends an answer")
    for number, engine_stops in enumerate(await actors.ask_generators(probes.end_tokens)):
        if missing := sorted(set(stops) - set(engine_stops)):
            evidence = f"generator {number} stops at {engine_stops}; the model's directory names {missing[0]}, too"
            raise CheckFailed("an end token does not stop the engine", evidence)
    first = (await context.groups())[0].rollouts[0]
    prompt = first.tokens[: first.turns[0].start]
    answers = await actors.complete(prompt, _END_SEEDS, _END_TOKENS)
    for answer in answers:
        _check_end(answer.tokens, answer.stop_reason, stops, "an engine's answer")
    for rollout in (r for group in await context.groups() for r in group.rollouts):
        for turn in rollout.turns:
            its = rollout.tokens[turn.start : turn.stop]
            _check_end(its, turn.stop_reason, stops, f"{rollout.prompt_id} sample {rollout.sample}")
    ended = [answer for answer in answers if answer.stop_reason == "stop"]
    if not ended:
        raise CheckSkipped(f"none of {len(answers)} answers of up to {_END_TOKENS} tokens ended by itself")
    samples = [sample_of(prompt, answer, "doctor/ends", number) for number, answer in enumerate(ended)]
    reading = await actors.read(actors.batch_of_samples([samples]))
    last = reading.tokens.groupby("sample").tail(1)
    return f"{compare(last, context.limits, 'tokens that end an answer')}, {len(ended)} of {len(answers)} answers ended"


def _check_end(tokens: np.ndarray, reason: str, stops: list[int], whose: str) -> None:
    if reason == "stop" and (not len(tokens) or int(tokens[-1]) not in stops):
        evidence = (
            f"{whose} ended by itself, its last tokens are {tokens[-3:].tolist()}, and those that end are {stops}"
        )
        raise CheckFailed("the token that ended an answer is not in it, so the end is never trained", evidence)
    if np.isin(tokens[:-1], stops).any():
        place = int(np.flatnonzero(np.isin(tokens[:-1], stops))[0])
        evidence = f"{whose} goes on after token {place}, which is {int(tokens[place])}"
        raise CheckFailed("the generator does not stop at a token that ends answers", evidence)
