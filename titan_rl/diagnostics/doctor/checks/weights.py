"""Weights: which were loaded, what an update and a sync change, and what they must leave alone."""

from functools import partial
from pathlib import Path

import numpy as np
from safetensors import safe_open

from titan_rl.config.io.bounded_files import read_json
from titan_rl.data.types import Completion
from titan_rl.diagnostics.doctor.actors_under_test import Patient, sample_of
from titan_rl.diagnostics.doctor.context import Visit, usable
from titan_rl.diagnostics.doctor.findings import NotLookedAt, Wrong
from titan_rl.diagnostics.doctor.probes import actors as probes
from titan_rl.diagnostics.doctor.probes.agreement import Limits, compare
from titan_rl.diagnostics.doctor.probes.bandit import FAR, Bandit
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


async def loaded(visit: Visit) -> str:
    """The trainer's weights are those of the files that the index names, and no other file claims to be them."""
    patient = visit.patient
    files = named_files(Path(patient.path))
    if stale := stale_file(Path(patient.path)):
        raise Wrong(f"{patient.path} holds weights that its index does not name", f"{stale}, which are not read here")
    if visit.checked.algorithm.head == "value" or visit.checked.config.lora.adapter:
        raise NotLookedAt("the model that learns is not the directory's alone: a head or an adapter is added")
    answers = await patient.ask_trainer(partial(probes.unlike_files, files=files))
    if unlike := sorted({name for _, names in answers for name in names}):
        evidence = f"{unlike[0]} is not what {files.get(unlike[0], 'the directory')} holds, and {len(unlike) - 1} more"
        raise Wrong("the trainer's weights are not those that the model's index names", evidence)
    return f"{len(files)} tensors of {len(set(files.values()))} files, and no other file of such"


# what an update changes


async def still(visit: Visit) -> str:
    """An update at a learning rate of 0, and the sync after it, change no bit of a weight and none of an answer; in
    bf16 no more of an answer than rounding does, which is another one in another batch."""
    patient, bandit = visit.patient, await visit.bandit()
    before, said = await patient.ask_trainer(probes.learned_digests), await _answers(patient, bandit, "still")
    async with patient.taken_back():
        await patient.read(bandit.batch)
        await patient.ask_trainer(partial(probes.take_rate, rate=0.0))
        await patient.update()
        if await patient.ask_trainer(probes.learned_digests) != before:
            raise Wrong("an update at a learning rate of 0 changes weights", "their digest is another one after it")
        await patient.sync()
        again = await _answers(patient, bandit, "still")
    if told := _changed(said, again, visit.limits):
        raise Wrong("a sync of unchanged weights changes answers", told)
    alike = "the same, bit for bit" if _difference(said, again) == 0.0 else "the same but for rounding"
    return f"weights, bit for bit, and {sum(len(each.tokens) for each in said)} sampled tokens are {alike}"


def _changed(said: list[Completion], again: list[Completion], limits: Limits) -> str:
    """What is not as it was; empty if nothing is."""
    if limits.is_exact:
        far = _difference(said, again)
        is_far = far > (0.0 if DEVICE_TYPE == "cpu" else limits.token)
        return f"log-probabilities of the same seeds differ by up to {far:.2e}" if is_far else ""
    alike = np.concatenate([_until_they_part(*pair) for pair in zip(said, again, strict=True)])
    if 2 * len(alike) < sum(len(each.tokens) for each in said):
        return (
            f"the same seeds draw other tokens: {len(alike)} are as before, of {sum(len(each.tokens) for each in said)}"
        )
    mean = float(np.exp(np.abs(alike)).mean())
    return f"the mean of exp|difference| of the same seeds is {mean:.4f}" if mean > limits.mean else ""


def _until_they_part(said: Completion, again: Completion) -> np.ndarray:
    """Differences of log-probabilities of two answers, as far as they hold the same tokens."""
    both = min(len(said.tokens), len(again.tokens))
    alike = np.cumprod(said.tokens[:both] == again.tokens[:both]).sum()
    return said.logprobs[:alike] - again.logprobs[:alike]


async def _answers(patient: Patient, bandit: Bandit, name: str) -> list[Completion]:
    return await patient.complete(bandit.prompt, _SEEDS, _TOKENS, name)


def _difference(said: list[Completion], again: list[Completion]) -> float:
    """The largest of two log-probabilities of one place; infinite if other tokens were drawn."""
    if any(not np.array_equal(a.tokens, b.tokens) for a, b in zip(said, again, strict=True)):
        return float("inf")
    return max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in zip(said, again, strict=True))


# what a sync changes


async def sync(visit: Visit) -> str:
    """After an update generators have the new weights, all of them, and say so."""
    patient, bandit = visit.patient, await visit.bandit()
    async with patient.taken_back():
        return await _synced(visit, patient, bandit)


async def _synced(visit: Visit, patient: Patient, bandit: Bandit) -> str:
    said = await _answers(patient, bandit, "sync")
    before = await patient.ask_trainer(probes.learned_digests)
    await bandit.move(patient, FAR)
    if await patient.ask_trainer(probes.learned_digests) == before:
        raise Wrong("an update changes no weight", "their digest is what it was")
    version = await patient.sync()
    pieces = [piece for rank in await patient.ask_generators(probes.fetched_pieces) for piece in rank]
    found = await patient.ask_trainer(partial(probes.unlike_pieces, pieces=pieces))
    if unlike := sorted({name for _, names in found for name in names}):
        raise Wrong("generators fetched other bytes than the trainer has", f"{unlike[0]} and {len(unlike) - 1} more")
    groups = usable(await patient.sample_groups())
    labels = {int(v) for g in groups for r in g.rollouts for v in r.versions if v >= 0}
    if labels != {version}:
        evidence = f"version {version} is live, tokens sampled after it say {sorted(labels)}"
        raise Wrong("tokens are labelled with a version that did not make them", evidence)
    reading = await patient.read(patient.batch(groups))
    told = compare(reading.tokens, visit.limits, "tokens that were sampled after an update")
    if _difference(said, await _answers(patient, bandit, "sync")) == 0.0:
        raise Wrong("generators answer as they did before the update", f"{_SEEDS} answers are the same, bit for bit")
    return f"{len(pieces)} pieces as the trainer has them; {told}"


async def _ask_long(patient: Patient, prompt: np.ndarray) -> np.ndarray:
    """A prompt of many blocks, which is in the engines' caches from now on."""
    long = np.resize(prompt, min(_LONG, patient.meshes.max_tokens - _TOKENS - 1)).astype(np.int32)
    for _ in range(2 * len(patient.meshes.generators.replicas)):
        await patient.complete(long, 2, 1)
    return long


async def cache(visit: Visit) -> str:
    """A prompt that was asked before the update is answered by the weights that came after it."""
    patient, bandit = visit.patient, await visit.bandit()
    long = await _ask_long(patient, bandit.prompt)
    async with patient.taken_back():
        await bandit.move(patient, FAR)
        await patient.sync()
        answers = await patient.complete(long, _SEEDS, _TOKENS)
        samples = [sample_of(long, answer, "doctor/cache", number) for number, answer in enumerate(answers)]
        reading = await patient.read(patient.batch_of_samples([samples]))
    told = compare(reading.tokens, visit.limits, "prompts that were asked before the update, too")
    return f"a prompt of {len(long)} tokens: {told}"


# what nothing changes


async def reference(visit: Visit) -> str:
    """Roles that never learn are in no optimizer, and an update leaves them as they were."""
    patient = visit.patient
    before = await _digests(patient)
    if not before:
        raise NotLookedAt("no model of this run is to stay as it is")
    if named := sorted({name for names in await patient.ask_trainer(probes.trainable_roles) for name in names}):
        raise Wrong(f"the {named[0]} can learn", "its parameters take a gradient, or are in the policy's optimizer")
    bandit = await visit.bandit()
    if unlike := [answer for answer in await patient.ask_trainer(probes.other_temperatures) if answer]:
        raise Wrong("a model beside the policy has another temperature", unlike[0])
    async with patient.taken_back():
        await bandit.move(patient)
        after = await _digests(patient)
    if moved := [name for name in before if before[name] != after[name]]:
        raise Wrong(f"an update moves the {moved[0]}", "the digest of its weights is another one after it")
    return f"{', '.join(before)}: the same weights after an update, and in no optimizer"


async def _digests(patient: Patient) -> dict[str, list[str]]:
    shared, own = await patient.trainer.call(TrainerEndpoints.digests()), await patient.meshes.roles.digests()
    return {role: [rank[role] for rank in shared if role in rank] for role in shared[0]} | own
