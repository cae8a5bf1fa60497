"""Weights: which were loaded, what an update and a sync change, and what they must leave alone."""

from functools import partial
from pathlib import Path

import numpy as np
from safetensors import safe_open

from titan_rl.config.io.bounded_files import read_json
from titan_rl.data.types import Completion
from titan_rl.diagnostics.doctor import actor_queries as probes
from titan_rl.diagnostics.doctor.actors_under_test import ActorsUnderTest, sample_of
from titan_rl.diagnostics.doctor.check_errors import CheckFailed, CheckSkipped
from titan_rl.diagnostics.doctor.context import CheckContext, usable
from titan_rl.diagnostics.doctor.probes.agreement import Limits, compare
from titan_rl.diagnostics.doctor.probes.bandit import FAR, RIGHT, Bandit, gains
from titan_rl.mesh.members.endpoints import TrainerEndpoints
from titan_rl.models.device import DEVICE_TYPE

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SEEDS, _TOKENS = 8, 8
_LONG = 96
"""Tokens of a prompt that fills blocks of a prefix cache."""


# what was loaded


def named_files(path: Path) -> dict[str, Path]:
    """Tensor to file: by the index, or of the one file. Read here anew, since the run's own reader is on trial."""
    if (path / _INDEX).is_file():
        return {name: path / file for name, file in read_json(path / _INDEX)["weight_map"].items()}
    files = [path / _SINGLE] if (path / _SINGLE).is_file() else sorted(path.glob("*.safetensors"))[:1]
    return {name: file for file in files for name in _names(file)}


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


def stale_file(path: Path) -> str:
    """Weights that lie beside those which are named, under the same tensors' names; empty if there are none."""
    named = named_files(path)
    for file in sorted(set(path.glob("*.safetensors")) - set(named.values())):
        if alike := sorted(set(_names(file)) & set(named)):
            return f"{file.name} holds {alike[0]}" + (f" and {len(alike) - 1} more" if len(alike) > 1 else "")
    return ""


async def loaded(context: CheckContext) -> str:
    """The trainer's weights are those of the files that the index names, and no other file claims to be them."""
    actors = context.actors
    files = named_files(Path(actors.path))
    if stale := stale_file(Path(actors.path)):
        raise CheckFailed(
            f"{actors.path} holds weights that its index does not name", f"{stale}, which are not read here"
        )
    if context.checked.algorithm.head == "value" or context.checked.config.lora.adapter:
        raise CheckSkipped("the trained model is not the directory's alone: a head or an adapter is added")
    answers = await actors.ask_trainer(partial(probes.unlike_files, files=files))
    if unlike := sorted({name for _, names in answers for name in names}):
        evidence = f"{unlike[0]} is not what {files.get(unlike[0], 'the directory')} holds, and {len(unlike) - 1} more"
        raise CheckFailed("the trainer's weights are not those that the model's index names", evidence)
    return f"{len(files)} tensors of {len(set(files.values()))} files, and no other file of such"


# what an update changes


async def still(context: CheckContext) -> str:
    """Null update: a learning rate of 0, and the sync after it, change no bit of weights and answers."""
    actors, bandit = context.actors, await context.bandit()
    before, answers = await actors.ask_trainer(probes.learned_digests), await _answers(actors, bandit, "still")
    async with actors.rolled_back():
        await actors.read(bandit.batch)
        await actors.ask_trainer(partial(probes.take_rate, rate=0.0))
        await actors.update()
        if await actors.ask_trainer(probes.learned_digests) != before:
            raise CheckFailed(
                "an update at a learning rate of 0 changes weights", "their digest is another one after it"
            )
        await actors.sync()
        again = await _answers(actors, bandit, "still")
    if change := _changed(answers, again, context.limits):
        raise CheckFailed("a sync of unchanged weights changes answers", change)
    alike = "the same, bit for bit" if _difference(answers, again) == 0.0 else "the same but for rounding"
    return f"weights, bit for bit, and {sum(len(each.tokens) for each in answers)} sampled tokens are {alike}"


def _changed(answers: list[Completion], again: list[Completion], limits: Limits) -> str:
    """What is not as it was; empty if nothing is."""
    if limits.is_exact:
        far = _difference(answers, again)
        is_far = far > (0.0 if DEVICE_TYPE == "cpu" else limits.token)
        return f"log-probabilities of the same seeds differ by up to {far:.2e}" if is_far else ""
    alike = np.concatenate([_until_they_part(*pair) for pair in zip(answers, again, strict=True)])
    num_tokens = sum(len(each.tokens) for each in answers)
    if 2 * len(alike) < num_tokens:
        return f"the same seeds draw other tokens: {len(alike)} are as before, of {num_tokens}"
    mean = float(np.exp(np.abs(alike)).mean())
    return f"the mean of exp|difference| of the same seeds is {mean:.4f}" if mean > limits.mean else ""


def _until_they_part(answer: Completion, again: Completion) -> np.ndarray:
    """Differences of log-probabilities of two answers, as far as they hold the same tokens."""
    both = min(len(answer.tokens), len(again.tokens))
    alike = np.cumprod(answer.tokens[:both] == again.tokens[:both]).sum()
    return answer.logprobs[:alike] - again.logprobs[:alike]


async def _answers(actors: ActorsUnderTest, bandit: Bandit, name: str) -> list[Completion]:
    return await actors.complete(bandit.prompt, _SEEDS, _TOKENS, name)


def _difference(answers: list[Completion], again: list[Completion]) -> float:
    """The largest of two log-probabilities of one place; infinite if other tokens were drawn."""
    if any(not np.array_equal(a.tokens, b.tokens) for a, b in zip(answers, again, strict=True)):
        return float("inf")
    return max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in zip(answers, again, strict=True))


# what a sync changes


async def sync(context: CheckContext) -> str:
    """After an update generators have the new weights, all of them, and say so."""
    actors, bandit = context.actors, await context.bandit()
    async with actors.rolled_back():
        return await _synced(context, actors, bandit)


async def _synced(context: CheckContext, actors: ActorsUnderTest, bandit: Bandit) -> str:
    answers = await _answers(actors, bandit, "sync")
    before = await actors.ask_trainer(probes.learned_digests)
    await bandit.move(actors, FAR)
    if await actors.ask_trainer(probes.learned_digests) == before:
        raise CheckFailed("an update changes no weight", "their digest is what it was")
    version = await actors.sync()
    pieces = [piece for rank in await actors.ask_generators(probes.fetched_pieces) for piece in rank]
    comparisons = await actors.ask_trainer(partial(probes.unlike_pieces, pieces=pieces))
    if unlike := sorted({name for _, names in comparisons for name in names}):
        raise CheckFailed(
            "generators fetched other bytes than the trainer has", f"{unlike[0]} and {len(unlike) - 1} more"
        )
    if layers := [name for rank in await actors.ask_generators(probes.misquantized) for name in rank]:
        raise CheckFailed(
            "an engine's FP8 layer multiplies by other weights than it received",
            f"{layers[0]} and {len(layers) - 1} more",
        )
    groups = usable(await actors.sample_groups())
    labels = {int(v) for g in groups for r in g.rollouts for v in r.versions if v >= 0}
    if labels != {version}:
        evidence = f"version {version} is live, tokens sampled after it say {sorted(labels)}"
        raise CheckFailed("tokens are labelled with a version that did not make them", evidence)
    reading = await actors.read(actors.batch(groups))
    agreement = compare(reading.tokens, context.limits, "tokens that were sampled after an update")
    if _difference(answers, await _answers(actors, bandit, "sync")) == 0.0:
        raise CheckFailed(
            "generators answer as they did before the update", f"{_SEEDS} answers are the same, bit for bit"
        )
    return f"{len(pieces)} pieces as the trainer has them; {agreement}"


async def _ask_long(actors: ActorsUnderTest, prompt: np.ndarray) -> np.ndarray:
    """A prompt of many blocks, which is in the engines' caches from now on."""
    long = np.resize(prompt, min(_LONG, actors.meshes.max_tokens - _TOKENS - 1)).astype(np.int32)
    for _ in range(2 * len(actors.meshes.generators.healthy)):
        await actors.complete(long, 2, 1)
    return long


async def cache(context: CheckContext) -> str:
    """A prompt that was asked before the update is answered by the weights that came after it."""
    actors, bandit = context.actors, await context.bandit()
    long = await _ask_long(actors, bandit.prompt)
    async with actors.rolled_back():
        await bandit.move(actors, FAR)
        await actors.sync()
        answers = await actors.complete(long, _SEEDS, _TOKENS)
        samples = [sample_of(long, answer, "doctor/cache", number) for number, answer in enumerate(answers)]
        reading = await actors.read(actors.batch_of_samples([samples]))
    agreement = compare(reading.tokens, context.limits, "prompts that were asked before the update, too")
    return f"a prompt of {len(long)} tokens: {agreement}"


# what nothing changes


async def reference(context: CheckContext) -> str:
    """Frozen roles: in no optimizer, and unchanged by an update."""
    actors = context.actors
    before = await _digests(actors)
    if not before:
        raise CheckSkipped("no model of this run is to stay as it is")
    if named := sorted({name for names in await actors.ask_trainer(probes.trainable_roles) for name in names}):
        raise CheckFailed(
            f"the {named[0]} can learn", "its parameters take a gradient, or are in the policy's optimizer"
        )
    bandit = await context.bandit()
    if unlike := [answer for answer in await actors.ask_trainer(probes.other_temperatures) if answer]:
        raise CheckFailed("a model beside the policy has another temperature", unlike[0])
    async with actors.rolled_back():
        await bandit.move(actors)
        after = await _digests(actors)
    if moved := [name for name in before if before[name] != after[name]]:
        raise CheckFailed(f"an update moves the {moved[0]}", "the digest of its weights is another one after it")
    return f"{', '.join(before)}: the same weights after an update, and in no optimizer"


async def _digests(actors: ActorsUnderTest) -> dict[str, list[str]]:
    shared, own = await actors.trainer.call(TrainerEndpoints.digests()), await actors.meshes.roles.digests()
    return {role: [rank[role] for rank in shared if role in rank] for role in shared[0]} | own


async def advantages(context: CheckContext) -> str:
    """Gain of the right answer after one update by the run's own loss and optimizer."""
    actors, bandit = context.actors, await context.bandit()
    if not bandit.batch.has_signal:
        raise CheckSkipped(f"{context.checked.config.algorithm.name} makes no advantages of rewards")
    async with actors.rolled_back():
        before = await bandit.move(actors)
        gained, lines = gains(before.tokens, (await actors.read(bandit.batch)).tokens), []
    for (prompt_id, gain_N), right in zip(sorted(gained.items()), RIGHT, strict=True):
        others, best = np.delete(gain_N, right).mean(), int(gain_N.argmax())
        lines.append(f"a right answer gained {gain_N[right]:+.3f}, the others {others:+.3f}")
        if best != right or gain_N[right] <= max(others, 0.0):
            evidence = (
                f"{prompt_id}: of answers 0 to {len(gain_N) - 1}, number {right} was right and gained "
                f"{gain_N[right]:+.4f} in log-probability, number {best} gained {gain_N[best]:+.4f}"
            )
            raise CheckFailed("an update raises another answer than the one that was rewarded", evidence)
    return "; ".join(lines)
