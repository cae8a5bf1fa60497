"""Which faults an experiment may inject, and a schedule of them by seed. Pure."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from titan_rl.config.sections.schema import Config
from titan_rl.trainer.roles.names import MAY_BE_OWN, SCORING

PHASES = ("generating", "training", "publishing", "saving")
"""What a run's ``phase`` file says, from its first step on."""
_PHASE_OF_STATE = {
    "trainer": {
        "idle": "generating",
        "mid-forward": "training",
        "mid-sync": "publishing",
        "mid-checkpoint": "saving",
    },
    "critic": {"idle": "generating", "mid-forward": "training", "mid-checkpoint": "saving"},
    "implicit_reward": {"idle": "generating", "mid-forward": "training", "mid-checkpoint": "saving"},
    "generator": {"generating": "generating", "idle": "training", "mid-sync": "publishing"},
    "verifier": {"generating": "generating", "scoring": "generating", "idle": "training"},
    "scorer": {"scoring": "generating", "idle": "training"},
    "reward_model": {"scoring": "generating", "idle": "training"},
    "reference": {"idle": "generating", "mid-forward": "training"},
    "teacher": {"idle": "generating", "mid-forward": "training"},
    "host": {
        "generating": "generating",
        "mid-forward": "training",
        "mid-sync": "publishing",
        "mid-checkpoint": "saving",
    },
    "controller": {
        "generating": "generating",
        "mid-forward": "training",
        "mid-sync": "publishing",
        "mid-checkpoint": "saving",
        "starting": "",
    },
}
"""The phase in which each kind of process is in each of its states."""
KINDS = tuple(_PHASE_OF_STATE)
STATES = {kind: tuple(phases) for kind, phases in _PHASE_OF_STATE.items()}
"""Those that are scheduled. A process hit while it replaces a dead one is reported as ``starting``."""
WAYS = {
    "trainer": ("kill", "stop", "exit", "raise"),
    "critic": ("kill", "stop", "exit", "raise"),
    "implicit_reward": ("kill", "stop", "exit", "raise"),
    "generator": ("kill", "stop", "exit", "raise"),
    "verifier": ("kill", "stop", "exit", "raise"),
    "scorer": ("kill", "stop"),
    "reward_model": ("kill", "stop"),
    "reference": ("kill", "stop"),
    "teacher": ("kill", "stop"),
    "host": ("kill", "stop"),
    "controller": ("kill",),
}
"""SIGKILL, SIGSTOP, an exit with code 0, an exception."""


OF_TRAINER = ("trainer", *SCORING)
"""Kinds whose ranks are put aside, written into checkpoints and repaired together."""
BELOW_VERIFIERS = ("scorer", "reward_model")
"""Kinds of which each verifier has a process, started anew by itself and without an event."""


def kinds_of(config: Config) -> tuple[str, ...]:
    """The kinds that a run has: hosts only if it has worker loops, and roles that have processes of their own."""
    may_lack = {
        "host": config.mesh.worker_loops > 0,
        "reward_model": bool(config.reward_model.path),
    } | {role: getattr(config, role).placement == "own" for role in MAY_BE_OWN}
    return tuple(kind for kind in KINDS if may_lack.get(kind, True))


_LAST_STEPS = 3


@dataclass(frozen=True)
class Fault:
    """Planned fault: after how many steps, to which kind of process, in which state, and how."""

    after_step: int
    kind: str
    state: str
    way: str


def phase_of(kind: str, state: str) -> str:
    """The phase in which that kind is in that state; empty before a run's first step."""
    return _PHASE_OF_STATE[kind][state]


def state_of(kind: str, phase: str, *, is_scoring: bool = False, is_writing: bool = False) -> str:
    """The state of a process of that kind in a phase.

    ``is_scoring``: its scorer (or it itself, below a verifier) runs; ``is_writing``: a checkpoint is being written.
    """
    if kind in ("verifier", *BELOW_VERIFIERS) and is_scoring:
        return "scoring"
    if kind in (*OF_TRAINER, "host", "controller") and is_writing:
        return "mid-checkpoint"
    states = (state for state, of in _PHASE_OF_STATE[kind].items() if of == phase and state != "scoring")
    return next(states, "starting" if kind == "controller" else "idle")


def last_fault_step(steps: int, checkpoint_every: int) -> int:
    """The last step that a fault is scheduled after; below 1 if there are too few steps.

    Faults may come late, if earlier ones took long or a checkpoint is waited for, but never after the run's end.
    """
    return steps - _LAST_STEPS - checkpoint_every - steps // 10


def schedule_faults(count: int, seed: int, last_step: int, kinds: tuple[str, ...]) -> list[Fault]:
    """Faults spread evenly over steps 1 to ``last_step``: each kind in turn, and of each kind every state and way in
    turn. The seed decides the order."""
    chosen = random.Random(f"chaos {seed}")
    targets = [kinds[index % len(kinds)] for index in range(count)]
    chosen.shuffle(targets)
    turns = {kind: _in_turn(kind, chosen) for kind in kinds}
    when = sorted(chosen.randint(1, last_step) for _ in range(count))
    return _starts_follow_ends(
        [Fault(step, kind, *next(turns[kind])) for step, kind in zip(when, targets, strict=True)]
    )


def _in_turn(kind: str, chosen: random.Random) -> Iterator[tuple[str, str]]:
    """Every state with every way once, then all of them again in another order, without end."""
    while True:
        combinations = [(state, way) for state in STATES[kind] for way in WAYS[kind]]
        chosen.shuffle(combinations)
        yield from combinations


def _starts_follow_ends(faults: list[Fault]) -> list[Fault]:
    """A controller starts only after one was killed, so a fault during its start follows that kill directly."""
    ordered: list[Fault] = []
    for fault in faults:
        before = [index for index, other in enumerate(ordered) if other.kind == "controller"]
        if fault.state != "starting":
            ordered.append(fault)
        elif before:
            place = before[-1]
            ordered.insert(place + 1, replace(fault, after_step=ordered[place].after_step))
        else:
            ordered.append(replace(fault, state="generating"))
    return ordered
