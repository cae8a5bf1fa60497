"""Tokens: what trainer and generator say of each, whether both sides read the same ones, and which are trained."""

import numpy as np

from titan_rl.config.model_directory.directory import stop_token_ids
from titan_rl.controller.preflight.checks import tokenizer_of
from titan_rl.data.types import Batch, Group, Provenance, Rollout
from titan_rl.diagnostics.doctor.actors_under_test import sample_of
from titan_rl.diagnostics.doctor.context import Visit
from titan_rl.diagnostics.doctor.findings import NotLookedAt, Wrong
from titan_rl.diagnostics.doctor.probes import actors as probes
from titan_rl.diagnostics.doctor.probes.agreement import compare
from titan_rl.environments.rollout.group import encode_prompt

_END_SEEDS, _END_TOKENS = 48, 64
_SHOWN = 60


# the same tokens on both sides


async def same_tokens(visit: Visit) -> str:
    """Verifiers read text as the model's directory has it, and engines see the tokens that they were asked."""
    patient = visit.patient
    ours = probes.tokenizer_facts(tokenizer_of(visit.checked.config))
    for number, theirs in enumerate(await patient.ask_verifiers(probes.verifier_facts)):
        if unlike := [name for name in ours | theirs if ours.get(name) != theirs.get(name)]:
            name = unlike[0]
            evidence = f"{name} is {_short(theirs.get(name))} there and {_short(ours.get(name))} by the directory"
            raise Wrong(f"verifier {number} has another tokenizer than the model", evidence)
    _check_prompts(visit, await visit.groups())
    await _check_count(visit)
    return f"{len(ours)} facts of the tokenizer, {len(await visit.groups())} prompts, and what an engine was asked"


def _check_prompts(visit: Visit, groups: list[Group]) -> None:
    """What stands before the first answer is the prompt as it is written out here."""
    task, tokenizer = visit.checked.task, tokenizer_of(visit.checked.config)
    if task.speaks_first or task.has_agent or task.parts:
        return
    for group in groups:
        prompt = encode_prompt(task, tokenizer, visit.patient.stream.by_id(group.prompt_id))
        for rollout in group.rollouts:
            asked = rollout.tokens[: rollout.turns[0].start]
            if not np.array_equal(asked, prompt):
                evidence = f"{group.prompt_id} was asked as {_short(asked.tolist())}, and is {_short(prompt.tolist())}"
                raise Wrong("a prompt reaches the generator as other tokens than it is written as", evidence)


async def _check_count(visit: Visit) -> None:
    patient, rollout = visit.patient, (await visit.groups())[0].rollouts[0]
    asked = rollout.tokens[: rollout.turns[0].start]
    await patient.meshes.take_statistics()
    answers = await patient.complete(asked, 4, 1)
    saw = sum(engine.num_prompt_tokens for engine in await patient.meshes.take_statistics())
    if saw != len(asked) * len(answers):
        evidence = f"{len(asked)} tokens were asked, and it saw {saw / len(answers):g}"
        raise Wrong("the engine puts tokens before a prompt, or drops some", evidence)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# the mask


async def trained_tokens(visit: Visit) -> str:
    """The loss has exactly the tokens that the model wrote: in rollouts, in rows, and at the trainer's ranks."""
    groups = await visit.groups()
    for group in groups:
        for rollout in group.rollouts:
            _check_rollout(rollout)
    batch = visit.patient.batch(groups)
    _check_rows(groups, batch)
    reading = await visit.reading()
    count = sum(turn.stop - turn.start for group in groups for rollout in group.rollouts for turn in rollout.turns)
    if reading.metrics.num_trained_tokens != count:
        evidence = f"the model wrote {count}, the trainer's loss has {reading.metrics.num_trained_tokens}"
        raise Wrong("the trainer's loss has not the tokens that the model wrote", evidence)
    others = sum(len(rollout.tokens) for group in groups for rollout in group.rollouts) - count
    return f"{count} tokens of the model's, none of {others} of prompts, templates and tools"


def wrote(rollout: Rollout) -> np.ndarray:
    """Of each token, whether it lies in an answer, as the answers' own places tell: bool [T]."""
    found = np.zeros(len(rollout.tokens), bool)
    for turn in rollout.turns:
        found[turn.start : turn.stop] = True
    return found


def _check_rollout(rollout: Rollout) -> None:
    if rollout.branches:
        return
    marked = rollout.provenance == Provenance.MODEL
    if (unlike := np.flatnonzero(marked != wrote(rollout))).size:
        place = int(unlike[0])
        what = "marked as the model's" if marked[place] else "not marked as the model's"
        evidence = (
            f"token {place} of {rollout.prompt_id} sample {rollout.sample} (id {rollout.tokens[place]}) is {what}"
        )
        raise Wrong("a rollout's mask is not its answers", evidence)
    if (rollout.versions[marked] < 0).any():
        evidence = f"{rollout.prompt_id} sample {rollout.sample}"
        raise Wrong("a token that counts as the model's has no version of it", evidence)


def _check_rows(groups: list[Group], batch: Batch) -> None:
    """Each trained token stands behind the token that came before it, and every one is trained once."""
    rollouts = {(r.prompt_id, r.sample): r for group in groups for r in group.rollouts}
    found: dict[tuple[str, int], list[int]] = {key: [] for key in rollouts}
    for row in (row for rows in batch.rows for row in rows):
        offsets = row.branch_offsets
        for (prompt_id, sample, _), begin, end in zip(row.owners, offsets, offsets[1:], strict=False):
            trained = row.weight_S[begin:end] > 0
            found[prompt_id, sample] += row.target_S[begin:end][trained].tolist()
    for key, rollout in rollouts.items():
        if found[key] != rollout.tokens[wrote(rollout)].tolist():
            wanted = rollout.tokens[wrote(rollout)].tolist()
            evidence = f"{key[0]} sample {key[1]}: the model wrote {_short(wanted)}, trained are {_short(found[key])}"
            raise Wrong("the packed rows train other tokens than the model wrote", evidence)


# agreement


async def agreement(visit: Visit) -> str:
    """At the run's own temperature, under the weights that it begins with."""
    return compare((await visit.reading()).tokens, visit.limits, "the tokens that were sampled")


async def ends(visit: Visit) -> str:
    """An answer that ended by itself ends with a stop token, which is trained, and about which both sides agree."""
    patient, stops = visit.patient, stop_token_ids(visit.patient.path)
    if not stops:
        raise NotLookedAt("the model's directory names no token that ends an answer")
    for number, known in enumerate(await patient.ask_generators(probes.end_tokens)):
        if missing := sorted(set(stops) - set(known)):
            evidence = f"generator {number} stops at {known}; the model's directory names {missing[0]}, too"
            raise Wrong("an end token does not stop the engine", evidence)
    first = (await visit.groups())[0].rollouts[0]
    prompt = first.tokens[: first.turns[0].start]
    answers = await patient.complete(prompt, _END_SEEDS, _END_TOKENS)
    for answer in answers:
        _check_end(answer.tokens, answer.stop_reason, stops, "an engine's answer")
    for rollout in (r for group in await visit.groups() for r in group.rollouts):
        for turn in rollout.turns:
            its = rollout.tokens[turn.start : turn.stop]
            _check_end(its, turn.stop_reason, stops, f"{rollout.prompt_id} sample {rollout.sample}")
    ended = [answer for answer in answers if answer.stop_reason == "stop"]
    if not ended:
        raise NotLookedAt(f"none of {len(answers)} answers of up to {_END_TOKENS} tokens ended by itself")
    samples = [sample_of(prompt, answer, "doctor/ends", number) for number, answer in enumerate(ended)]
    reading = await patient.read(patient.batch_of_samples([samples]))
    last = reading.tokens.groupby("sample").tail(1)
    return f"{compare(last, visit.limits, 'tokens that end an answer')}, {len(ended)} of {len(answers)} answers ended"


def _check_end(tokens: np.ndarray, reason: str, stops: list[int], whose: str) -> None:
    if reason == "stop" and (not len(tokens) or int(tokens[-1]) not in stops):
        evidence = (
            f"{whose} ended by itself, its last tokens are {tokens[-3:].tolist()}, and those that end are {stops}"
        )
        raise Wrong("the token that ended an answer is not in it, so nobody learns to end", evidence)
    if np.isin(tokens[:-1], stops).any():
        place = int(np.flatnonzero(np.isin(tokens[:-1], stops))[0])
        evidence = f"{whose} goes on after token {place}, which is {int(tokens[place])}"
        raise Wrong("the generator does not stop at a token that ends answers", evidence)
