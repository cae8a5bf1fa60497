"""The ledger against what else a run directory knows: rollout files, metrics, checkpoints.

A chain does not show that its end was cut off together with the rows that it made, nor that the whole file was written
anew. These were written by others at the time: a step's rollouts before it was settled, its metrics and checkpoint
after that. So they are read before the ledger, and a run that goes on meanwhile contradicts nothing; only one that
returns to a checkpoint just then may seem to, once.
"""

import json
import sqlite3
from pathlib import Path

import pyarrow as pa

from titan_rl.config.io.bounded_files import RefusedFile
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder
from titan_rl.records.ledger.audit import UnreadableLedger, read
from titan_rl.records.ledger.ledger import is_unchained
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import recorded_steps, sample_names

_METRICS = "metrics.jsonl"

Sample = tuple[str, int]
"""Prompt and number."""


def contradictions(root: Path) -> list[str]:
    """Contradictions between a run directory and its ledger, a line each; empty without one, or without a ledger."""
    unreadable, recorded = _recorded(root)
    steps = _recorded_steps(root)
    try:
        return unreadable + read(RunDir(root).ledger, lambda connection: _against(connection, recorded, steps))
    except UnreadableLedger:  # told by whoever asks for its flaws
        return unreadable


def _against(connection: sqlite3.Connection, recorded: dict[int, set[Sample]], steps: dict[str, set[int]]) -> list[str]:
    problems, last = [], _last_step(connection)
    last_steps = {what: max(its_steps, default=0) for what, its_steps in steps.items()}
    for step, names in recorded.items():
        rows = connection.execute("select prompt_id, sample, state from samples where step = ?", (step,))
        if settled := {(name, sample): state for name, sample, state in rows}:
            problems += _differences(connection, step, names, settled)
        elif step > last + 1:  # the one after the last may be in training, or have been when the run ended
            problems.append(f"rollouts of step {step} are recorded, but the ledger ends at step {last}")
    problems += [
        f"{what} has step {step}, but the ledger ends at step {last}: its end was truncated, or lost in a power failure"
        for what, step in last_steps.items()
        if step > last
    ]
    return problems + [
        f"step {step} was trained, says the ledger, but metrics.jsonl has no record of it"
        for step in _trained_steps(connection)
        if step <= max(last_steps.values()) and step not in steps[_METRICS]
    ]


def _trained_steps(connection: sqlite3.Connection) -> list[int]:
    rows = connection.execute("select distinct step from samples where state = 'trained' and typeof(step) = 'integer'")
    return sorted(step for (step,) in rows)


def _recorded(root: Path) -> tuple[list[str], dict[int, set[Sample]]]:
    """What cannot be read; and each step's samples."""
    cannot, recorded = [], {}
    folder = RunDir(root).rollouts
    for step in recorded_steps(folder):
        try:
            recorded[step] = sample_names(folder, step)
        except FileNotFoundError:  # the run set it aside meanwhile
            continue
        except (OSError, pa.ArrowException, RefusedFile) as error:
            cannot.append(f"rollouts of step {step} cannot be read, and prove nothing: {' '.join(str(error).split())}")
    return cannot, recorded


def _recorded_steps(root: Path) -> dict[str, set[int]]:
    """Steps that metrics and checkpoints are of: a run writes both once the ledger has the step."""
    metrics = {int(record["step"]) for record in read_metrics(root) if "reward" in record}
    return {_METRICS: metrics, "a checkpoint": set(CheckpointFolder(RunDir(root).checkpoints, 1).steps())}


def _last_step(connection: sqlite3.Connection) -> int:
    """The last that ever was settled, also if the run went back from it: its rollouts and metrics stay until it
    makes them again."""
    [(last,)] = connection.execute("select max(step) from samples where typeof(step) = 'integer'")
    return max(_last_entered(connection), last or 0)


def _last_entered(connection: sqlite3.Connection) -> int:
    if is_unchained(connection):
        return 0
    steps = [0]
    for (content,) in connection.execute("select content from entries"):
        try:
            steps.append(int(json.loads(content).get("step") or 0))
        except (
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,
            OverflowError,
        ):  # an entry that is damaged is told elsewhere
            continue
    return max(steps)


def _differences(
    connection: sqlite3.Connection, step: int, names: set[Sample], settled: dict[Sample, str]
) -> list[str]:
    """Samples that were trained are all recorded; what is recorded besides was discarded outside of any step."""
    trained = {name for name, state in settled.items() if state == "trained"}
    question = "select 1 from samples where prompt_id = ? and sample = ? and state = 'discarded' and step is null"
    return [
        f"{name} sample {sample} was trained at step {step}, says the ledger, but is not among that step's rollouts"
        for name, sample in sorted(trained - names, key=str)
    ] + [
        f"{name} sample {sample} is among the rollouts of step {step}, but the ledger does not have it there"
        for name, sample in sorted(names - settled.keys(), key=str)
        if connection.execute(question, (name, sample)).fetchone() is None
    ]
