"""Rollouts as Parquet, one file per step: what was trained on can be read, audited and trained on again."""

import math
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from titan_rl.config.io.bounded_files import RefusedFile
from titan_rl.data.images import ImageProcessor, PlacedImage
from titan_rl.data.storage.decoding import Penalties
from titan_rl.data.storage.files import replacing, wanting
from titan_rl.data.storage.routed_experts import ExpertShape, check_experts, is_recorded
from titan_rl.data.storage.sampling_mask import SamplingMask
from titan_rl.data.storage.stored_images import IMAGES, check_covered, check_images, image_rows, images_of
from titan_rl.data.storage.tables import check_table, read_table
from titan_rl.data.text.thinking import ThinkingTags, forced_tokens
from titan_rl.data.types import Decoding, Group, Provenance, Rollout, Status, ToolCall, Turn, is_model
from titan_rl.records.steps.step_names import step_name, steps_of

_CALL = {"name": pa.string(), "arguments": pa.string(), "status": pa.string(), "seconds": pa.float64()}
_PENALTIES = dict.fromkeys(("repetition", "presence", "frequency"), pa.float64())
_MASK = {"vocabulary": pa.int32(), "data": pa.binary(), "ends": pa.list_(pa.int64())}
_EXPERTS = {"layers": pa.int32(), "experts": pa.int32(), "dtype": pa.string(), "data": pa.binary()}
SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "sample": pa.int32(),
        "tokens": pa.list_(pa.int32()),
        "provenance": pa.list_(pa.int8()),
        "logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "turn_start": pa.list_(pa.int32()),
        "turn_stop": pa.list_(pa.int32()),
        "stop_reason": pa.list_(pa.string()),
        "calls": pa.list_(pa.list_(pa.struct(_CALL))),
        "status": pa.string(),
        "reward": pa.float64(),
        "reward_parts": pa.map_(pa.string(), pa.float64()),
        "turn_rewards": pa.list_(pa.float64()),
        "advantage": pa.float64(),
        "task_reward": pa.float64(),
        "text": pa.string(),
        "grade": pa.float64(),
        "question": pa.string(),
        "expected": pa.string(),
        "task": pa.string(),
        "branches": pa.list_(pa.int32()),
        "seat": pa.string(),
        "mask": pa.struct(_MASK),
        "penalties": pa.struct(_PENALTIES),
        "routed_experts": pa.struct(_EXPERTS),
        "reprompt": pa.list_(pa.int32()),
        "images": IMAGES,
    }
)
RATIO = 256
"""Bytes in memory for each of a file (data/storage/tables.py): a token of a tool takes 160, and in the file two."""
_SHOWN = 200
"""Characters of another library's message."""


def _path(folder: Path, step: int) -> Path:
    return folder / f"{step_name(step)}.parquet"


def _row(rollout: Rollout) -> dict[str, Any]:
    plain = ("prompt_id", "sample", "tokens", "provenance", "logprobs", "versions", "status", "reward", "text", "grade")
    more = ("advantage", "task_reward", "turn_rewards", "branches", "seat", "reprompt")
    return {name: getattr(rollout, name) for name in (*plain, *more)} | dict(
        turn_start=[turn.start for turn in rollout.turns],
        turn_stop=[turn.stop for turn in rollout.turns],
        stop_reason=[turn.stop_reason for turn in rollout.turns],
        calls=[[asdict(call) for call in turn.calls] for turn in rollout.turns],
        reward_parts=list(rollout.reward_parts.items()),
        mask=_mask_row(rollout.mask),
        penalties=None if rollout.penalties is None else asdict(rollout.penalties),
        routed_experts=_experts_row(rollout.routed_experts),
    )


def _experts_row(experts_TLK: np.ndarray | None) -> dict[str, Any] | None:
    if experts_TLK is None:
        return None
    _, layers, experts = experts_TLK.shape
    return {"layers": layers, "experts": experts, "dtype": experts_TLK.dtype.name, "data": experts_TLK.tobytes()}


def _experts(row: dict[str, Any] | None) -> np.ndarray | None:
    """Errors: ValueError for bytes of another form."""
    if row is None:  # runs of before there were any lack the column
        return None
    if row["dtype"] not in ("uint8", "uint16") or min(row["layers"], row["experts"]) < 1:
        raise ValueError(f"routed experts of {row['layers']} layers, {row['experts']} each, as {row['dtype']!r:.20}")
    return np.frombuffer(row["data"], row["dtype"]).reshape(-1, row["layers"], row["experts"])


def _mask_row(mask: SamplingMask | None) -> dict[str, Any] | None:
    return None if mask is None else {"vocabulary": mask.vocabulary, "data": mask.data.tobytes(), "ends": mask.ends}


def _mask(row: dict[str, Any] | None) -> SamplingMask | None:
    if row is None:  # runs of before there were any lack the column
        return None
    return SamplingMask(row["vocabulary"], np.frombuffer(row["data"], np.uint8), np.asarray(row["ends"], np.int64))


def _penalties(row: dict[str, Any] | None) -> Penalties | None:
    """Errors: ValueError for numbers that penalize nothing or everything."""
    if row is None:  # runs of before there were any lack the column
        return None
    penalties = Penalties(**row)
    if not all(math.isfinite(value) for value in row.values()) or penalties.repetition <= 0:
        raise ValueError(f"{penalties} are no penalties")
    return penalties


def has_rollouts(folder: Path, step: int) -> bool:
    return _path(folder, step).is_file()


def recorded_steps(folder: Path) -> list[int]:
    """Steps whose rollouts are there, in order. Other names are passed over."""
    return steps_of(path.stem for path in folder.glob("step-*.parquet") if path.is_file())


def sample_names(folder: Path, step: int) -> set[tuple[str, int]]:
    """Prompt and number of each of a step's samples. Errors: OSError, RefusedFile or
    pyarrow.ArrowException for a damaged file."""
    names = ["prompt_id", "sample"]
    check_table(_path(folder, step), names)
    return set(zip(*read_table(_path(folder, step), SCHEMA, names).to_pydict().values(), strict=True))


def last_recorded(folder: Path, first: int, last: int) -> int:
    """The last step up to ``last`` that recorded steps lead to from step ``first`` without a gap."""
    step = first
    while step < last and has_rollouts(folder, step + 1):
        step += 1
    return step


def write_rollouts(folder: Path, step: int, groups: list[Group]) -> None:
    """Write all rollouts of a step's groups, in training order. Errors: DiskFull."""
    rows = [
        _row(rollout)
        | dict(question=group.question, expected=group.expected, task=group.task)
        | dict(images=None if number else image_rows(rollout.images))  # which are those of the whole group
        for group in groups
        for number, rollout in enumerate(group.rollouts)
    ]
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), buffer)
    data, path = buffer.getvalue(), _path(folder, step)
    with wanting(path, data.size), replacing(path) as writing:
        writing.write_bytes(data)


def set_aside_rollouts(folder: Path, step: int) -> Path:
    """Keep a batch that was not trained on under another name; returns its new path."""
    number = 1 + sum(1 for _ in folder.glob(f"bad-{step:06d}-*.parquet"))
    return _path(folder, step).rename(folder / f"bad-{step:06d}-{number}.parquet")


class RolloutsError(ValueError):
    """A file of rollouts that is damaged, or that no run wrote; one line that names it."""


@dataclass(frozen=True)
class Limits:
    """Limits of a model, its rows and its decoding settings."""

    vocabulary: int
    length: int
    """Tokens of a rollout."""
    decoding: Decoding
    """What the tokens were sampled with."""
    tags: ThinkingTags | None = None
    """Of the model's thinking, where there is a budget for it."""
    experts: ExpertShape | None = None
    """Of the model, where those that tokens went through are recorded."""
    tasks: frozenset[str] = frozenset()
    """Names of a mixture's tasks, where a teacher is chosen by them; empty: any."""
    images: ImageProcessor | None = None
    """Of a model that sees images."""


def read_rollouts(folder: Path, step: int, limits: Limits | None = None) -> list[Group]:
    """A step's groups as they were trained, without timings, which are not stored.

    Errors: FileNotFoundError; RolloutsError.
    """
    path = _path(folder, step)
    groups: dict[str, Group] = {}
    try:
        check_table(path, ratio=RATIO)
        for row in read_table(path, SCHEMA).to_pylist():
            group, rollout = _empty_group(row), _rollout(row)
            first = groups.get(rollout.prompt_id, group).rollouts[:1]
            if first and rollout.images:
                raise ValueError(f"{rollout.prompt_id} sample {rollout.sample} has images of its own")
            rollout.images = first[0].images if first else rollout.images
            _check(rollout, limits)
            if limits is not None and limits.tasks and rollout.is_scored and group.task not in limits.tasks:
                raise ValueError(f"{rollout.prompt_id} is of task {group.task!r:.60}, which has no teacher")
            groups.setdefault(rollout.prompt_id, group).rollouts.append(rollout)
    except FileNotFoundError:
        raise
    except RefusedFile as error:
        raise RolloutsError(str(error)) from None
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
        raise RolloutsError(f"{path} cannot be read: {' '.join(str(error).split())[:_SHOWN]}") from None
    if not groups:
        raise RolloutsError(f"{path} cannot be read: it holds no rollouts")
    return list(groups.values())


def read_rollout(folder: Path, step: int, prompt_id: str, sample: int) -> tuple[Group, Rollout] | None:
    """Rollout of a step, with its prompt's group, which holds no other; None if it is not there.

    Errors: RolloutsError.
    """
    path = _path(folder, step)
    try:
        check_table(path, ratio=RATIO)
        if not (rows := read_table(path, SCHEMA, prompt_id=prompt_id, sample=sample).to_pylist()):
            return None
        group, rollout = _empty_group(rows[0]), _rollout(rows[0])
        rollout.images = rollout.images or _images_of(path, prompt_id)
        _check(rollout, None)
        group.rollouts.append(rollout)
        return group, rollout
    except RefusedFile as error:
        raise RolloutsError(str(error)) from None
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
        raise RolloutsError(f"{path} cannot be read: {' '.join(str(error).split())[:_SHOWN]}") from None


def _images_of(path: Path, prompt_id: str) -> tuple[PlacedImage, ...]:
    """Images of a prompt, which its first rollout has in the file. Errors: as ``read_table``; ValueError."""
    rows = read_table(path, SCHEMA, ("prompt_id", "tokens", "images"), prompt_id=prompt_id)
    return images_of(rows["images"][0].as_py(), len(rows["tokens"][0]))


def _empty_group(row: dict[str, Any]) -> Group:
    """Group that a row's rollout belongs to. Takes the group's own columns out of the row."""
    question, expected, task = (row.pop(name) or "" for name in ("question", "expected", "task"))
    return Group(row["prompt_id"], [], question=question, expected=expected, task=task)


def _rollout(row: dict[str, Any]) -> Rollout:
    turns = zip(row.pop("turn_start"), row.pop("turn_stop"), row.pop("stop_reason"), strict=True)
    calls = row.pop("calls") or repeat(())  # runs of before there were any lack the column
    converted: dict[str, Any] = dict(
        tokens=np.asarray(row["tokens"], np.int32),
        provenance=np.asarray(row["provenance"], np.int8),
        logprobs=np.asarray(row["logprobs"], np.float32),
        versions=np.asarray(row["versions"], np.int32),
        turns=[
            Turn(*turn, tuple(ToolCall(**call) for call in called or ()))
            for turn, called in zip(turns, calls, strict=False)
        ],
        turn_rewards=row["turn_rewards"] or [],
        branches=row["branches"] or [],
        seat=row["seat"] or "",
        reward_parts=dict(row["reward_parts"]),
        mask=_mask(row["mask"]),
        penalties=_penalties(row["penalties"]),
        routed_experts=_experts(row["routed_experts"]),
        reprompt=None if row["reprompt"] is None else np.asarray(row["reprompt"], np.int32),
        images=images_of(row["images"], len(row["tokens"])),
    )
    return Rollout(**row | converted)


def _check(rollout: Rollout, limits: Limits | None) -> None:
    """Errors: ValueError for what cannot be trained on. Numbers that are not finite are left to the trainer."""
    name, length = f"{rollout.prompt_id} sample {rollout.sample}", len(rollout.tokens)
    kinds = (str, int, float, str)
    values = (rollout.prompt_id, rollout.sample, rollout.reward, rollout.text)
    if not all(isinstance(value, kind) for value, kind in zip(values, kinds, strict=True)):
        raise ValueError(f"{name} lacks a value")
    parts = (rollout.tokens, rollout.provenance, rollout.logprobs, rollout.versions)
    if not length or any(part.shape != (length,) for part in parts):
        raise ValueError(f"{name} has {', '.join(map(str, map(np.size, parts)))} values, not one a token")
    if rollout.status not in get_args(Status) or not set(rollout.provenance.tolist()) <= set(Provenance):
        raise ValueError(f"{name} has a status or a provenance that there is not")
    _check_branches(name, rollout)
    _check_mask(name, rollout, limits)
    _check_answers(name, rollout)
    if limits is not None:
        _check_truncation(name, rollout, limits.decoding)
        _check_penalties(name, rollout, limits.decoding)
        _check_experts(name, rollout, limits.experts)
        _check_reprompt(name, rollout, limits)
        _check_images(name, rollout, limits)
    if len(rollout.turn_rewards) not in (0, len(rollout.turns)):
        raise ValueError(f"{name} has {len(rollout.turn_rewards)} rewards of turns and {len(rollout.turns)} turns")
    if not all(0 <= turn.start <= turn.stop <= length for turn in rollout.turns):
        raise ValueError(f"{name} has a turn outside its {length} tokens")
    longest = max(stop - start for start, stop in rollout.spans)
    if limits is not None and longest > limits.length:
        raise ValueError(f"{name} has {longest} tokens, and a row has room for {limits.length}")
    top = limits.vocabulary if limits is not None else 1 << 31
    if not 0 <= int(rollout.tokens.min()) <= int(rollout.tokens.max()) < top:
        raise ValueError(f"{name} has a token outside the model's vocabulary of {top}")
    if limits is not None:
        _check_forced(name, rollout, limits)


def _check_mask(name: str, rollout: Rollout, limits: Limits | None) -> None:
    """Errors: ValueError."""
    if (mask := rollout.mask) is None:
        return
    if len(mask) != len(rollout.tokens) or limits is not None and mask.vocabulary != limits.vocabulary:
        raise ValueError(f"{name} has a sampling mask of {len(mask)} tokens of a vocabulary of {mask.vocabulary}")
    try:
        mask.check()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if (place := mask.first_without(rollout.tokens, np.flatnonzero(is_model(rollout.provenance)))) is not None:
        raise ValueError(f"{name} has a sampling mask that leaves token {place} itself out")


def _check_experts(name: str, rollout: Rollout, experts: ExpertShape | None) -> None:
    """Errors: ValueError for experts that the model has not, or that a token to be trained lacks."""
    experts_TLK = rollout.routed_experts
    if experts is None:
        if experts_TLK is not None:
            raise ValueError(f"{name} has routed experts, and algorithm.routing was not 'replay'")
        return
    if experts_TLK is None and not rollout.num_model_tokens:  # nobody asked the model
        return
    shape = len(rollout.tokens), experts.num_layers, experts.per_token
    if experts_TLK is None or experts_TLK.shape != shape:
        raise ValueError(f"{name} has routed experts {getattr(experts_TLK, 'shape', None)}, and should have {shape}")
    try:
        check_experts(experts_TLK, experts)
    except ValueError as error:
        raise ValueError(f"{name} has {error}") from None
    recorded_T, places = is_recorded(experts_TLK), np.flatnonzero(is_model(rollout.provenance))
    if not recorded_T[places - 1].all():
        raise ValueError(f"{name} lacks the experts that answered token {places[~recorded_T[places - 1]][0]}")


def _check_reprompt(name: str, rollout: Rollout, limits: Limits) -> None:
    """Errors: ValueError for a reprompt that no row has room for, or with tokens that the model has not."""
    if (reprompt := rollout.reprompt) is None:
        return
    if not len(reprompt) or len(reprompt) + rollout.num_model_tokens > limits.length:
        raise ValueError(f"{name} has a reprompt of {len(reprompt)} tokens, and a row has room for {limits.length}")
    if not 0 <= int(reprompt.min()) <= int(reprompt.max()) < limits.vocabulary:
        raise ValueError(f"{name} has a reprompt with a token outside the model's vocabulary of {limits.vocabulary}")


def _check_images(name: str, rollout: Rollout, limits: Limits) -> None:
    """Errors: ValueError."""
    try:
        check_images(rollout.tokens, rollout.images, limits.images)
        is_prompt_T = rollout.provenance == Provenance.TEMPLATE
        check_covered(rollout.tokens, is_prompt_T, rollout.images, limits.images)
    except ValueError as error:
        raise ValueError(f"{name} has {error}") from None


def _check_truncation(name: str, rollout: Rollout, decoding: Decoding) -> None:
    """Errors: ValueError for other distributions than the settings leave."""
    mask, wrote = rollout.mask, np.flatnonzero(is_model(rollout.provenance))
    if mask is None and decoding.truncates and len(wrote):
        raise ValueError(f"{name} has no sampling mask, and rollout.top_p, top_k or min_p was set")
    if mask is not None and not decoding.truncates:
        raise ValueError(f"{name} has a sampling mask, and none of rollout.top_p, top_k and min_p was set")
    if mask is not None and decoding.top_k and not mask.lengths[wrote].all():  # the others may leave all
        raise ValueError(f"{name} has a token sampled from the whole vocabulary, and rollout.top_k = {decoding.top_k}")


def _check_answers(name: str, rollout: Rollout) -> None:
    """Errors: ValueError for a penalized token in no answer, of which nobody knows what it was penalized for."""
    starts = [turn.start for turn in rollout.turns]
    if rollout.penalties and starts != sorted(starts):
        raise ValueError(f"{name} has answers in another order than its tokens")
    for begin, end in rollout.spans if rollout.penalties else ():
        wrote = np.flatnonzero(is_model(rollout.provenance[begin:end]))
        if len(wrote) and not any(begin <= start <= begin + wrote[0] for start in starts):
            raise ValueError(f"{name} has token {begin + wrote[0]} before its first answer")


def _check_penalties(name: str, rollout: Rollout, decoding: Decoding) -> None:
    """Errors: ValueError for other penalties than the settings have."""
    if rollout.num_model_tokens and rollout.penalties != decoding.penalties:
        has, wanted = rollout.penalties or Penalties(), decoding.penalties or Penalties()
        raise ValueError(f"{name} was sampled with {has}, and the settings have {wanted}")


def _check_forced(name: str, rollout: Rollout, limits: Limits) -> None:
    """Errors: ValueError for other forced tokens than the tokens and the settings say."""
    budget, marked_T = limits.decoding.thinking_budget, rollout.provenance == Provenance.FORCED
    if not budget and marked_T.any():
        raise ValueError(f"{name} has a closing of thinking that was forced, and rollout.thinking_budget was not set")
    if not budget or limits.tags is None:
        return
    wrong = np.flatnonzero(marked_T != forced_tokens(rollout, limits.tags, budget))
    if len(wrong):
        what = "is marked as forced, and was not" if marked_T[wrong[0]] else "was forced, and is not marked so"
        raise ValueError(f"{name}: token {wrong[0]} {what}, with rollout.thinking_budget = {budget}")


def _check_branches(name: str, rollout: Rollout) -> None:
    """Errors: ValueError."""
    starts = rollout.branches or [0]
    if starts[0] != 0 or any(stop <= start for start, stop in rollout.spans):
        raise ValueError(f"{name} has branches that do not follow each other")
    if any(rollout.provenance[start] == Provenance.MODEL for start in starts):
        raise ValueError(f"{name} begins with a token of the model's own")
