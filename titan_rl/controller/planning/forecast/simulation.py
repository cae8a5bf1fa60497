"""Event simulation of a run's steps: engines, groups, admission, trainer and weight versions.

What arithmetic leaves out is here: how long a batch waits for its longest answers, and how much of that a staleness of
so many versions hides. Nothing is random but lengths, which a seed makes.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from titan_rl.controller.loop.admission import Admission
from titan_rl.controller.planning.forecast.generation import decode_step
from titan_rl.controller.planning.forecast.step import Scenario, forecast

_STEPS, _WARMING = 12, 4
_EVENTS = 400_000
"""What a simulation may take; with more answers, fewer steps."""


@dataclass(frozen=True)
class SimulatedRun:
    """Averages of simulated steps after warm-up."""

    seconds: float
    """Of a step, on average."""
    trainer_idle: float
    """Share of the trainer's time in which it waits for a batch."""
    engines_idle: float
    """Share of engines' time in which they run no request."""
    staleness_max: int
    steps: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def lengths(mean: float, longest: float, count: int, seed: int) -> np.ndarray:
    """Tokens of answers: Gamma of shape 2, which has a long tail, cut at ``longest``, with this mean before the cut;
    all alike where the mean is the longest."""
    if mean >= longest:
        return np.full(count, longest)
    return np.clip(np.random.default_rng(seed).gamma(2.0, mean / 2, count), 1.0, longest)


@dataclass
class _Engine:
    """All its requests advance together, a token a step, so that a request ends when ``progress`` reaches its length
    behind where it began."""

    seats: int
    step: Callable[[float], float]
    """Seconds of a decode step with so many requests."""
    prefill: float
    """Seconds of a prompt."""
    now: float = 0.0
    progress: float = 0.0
    busy: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)
    waiting: deque[tuple[float, int]] = field(default_factory=deque)
    groups: int = 0

    def advance(self, until: float) -> None:
        """No request ends before."""
        if self.running and until > self.now:
            self.progress += (until - self.now) / self.step(len(self.running))
            self.busy += until - self.now
        self.now = max(self.now, until)

    def fill(self) -> None:
        while self.waiting and len(self.running) < self.seats:
            tokens, group = self.waiting.popleft()
            heapq.heappush(self.running, (self.progress + tokens, group))

    def pause(self, seconds: float) -> None:
        """Nothing advances meanwhile."""
        self.now += seconds

    @property
    def ends(self) -> float:
        """When its next request does."""
        if not self.running:
            return float("inf")
        return self.now + max(self.running[0][0] - self.progress, 0.0) * self.step(len(self.running))


class _Run:
    """Owns the clock."""

    def __init__(self, scenario: Scenario, steps: int, seed: int):
        self.scenario, self.steps = scenario, steps
        self.expected = forecast(scenario)
        batch, work, engine = scenario.batch, scenario.work, scenario.engine
        context = batch.prompt + batch.answer / 2
        seconds_of: dict[float, float] = {}

        def step(requests: float) -> float:
            if requests not in seconds_of:
                seconds_of[requests] = decode_step(work, engine, scenario.rates, requests, context)
            return seconds_of[requests]

        prompts = max(batch.groups / scenario.replicas, 1e-9)
        prefill = self.expected.generating.prefill / prompts
        self.engines = [_Engine(engine.max_requests, step, prefill) for _ in range(scenario.replicas)]
        total = (steps + scenario.staleness + 1) * batch.answers
        self.tokens = lengths(batch.answer, batch.longest, total, seed).reshape(-1, batch.group_size)
        self.admission = Admission(batch.groups, scenario.staleness)
        self.admission.advance(0)
        self.next_ends: list[tuple[float, int]] = []
        """A heap: of each engine, when its next request ends, and its place."""
        self.left: list[int] = []
        self.of_group: list[tuple[int, int]] = []
        """Of each group: its engine, and the version that was live."""
        self.stale = 0

    def admit(self, now: float) -> None:
        """Every group that may run, to the engine with the fewest."""
        for engine in self.engines:
            engine.advance(now)
        while self.admission.can_admit() and len(self.left) < len(self.tokens):
            self.admission.admit()
            version = self.admission.version
            assert version is not None, "none is admitted before one is live"
            number = len(self.left)
            place = min(range(len(self.engines)), key=lambda each: self.engines[each].groups)
            engine = self.engines[place]
            self.left.append(len(self.tokens[number]))
            self.of_group.append((place, version))
            engine.groups += 1
            engine.pause(engine.prefill)
            engine.busy += engine.prefill
            engine.waiting.extend((float(tokens), number) for tokens in self.tokens[number])
        for engine in self.engines:
            engine.fill()
        self.look_ahead()

    def look_ahead(self) -> None:
        """Again, since every engine may have changed."""
        self.next_ends = [(engine.ends, place) for place, engine in enumerate(self.engines)]
        heapq.heapify(self.next_ends)

    def end_one(self) -> float:
        """The next request to end; when that is. Errors: AssertionError if nothing runs."""
        now, place = self.next_ends[0]
        assert now < float("inf"), "nothing runs, and a batch is waited for"
        engine = self.engines[place]
        engine.advance(now)
        _, group = heapq.heappop(engine.running)
        self.left[group] -= 1
        engine.groups -= not self.left[group]
        engine.fill()
        heapq.heapreplace(self.next_ends, (engine.ends, place))
        return now

    def sampled(self, step: int, now: float) -> float:
        """When the groups of a step, those admitted first, are complete."""
        size = self.scenario.batch.groups
        mine = range(step * size, (step + 1) * size)
        while any(self.left[group] for group in mine):
            now = max(now, self.end_one())
        self.stale = max(self.stale, *(step - self.of_group[group][1] for group in mine))
        return now

    def until(self, time: float) -> None:
        """All that ends before."""
        while self.next_ends[0][0] <= time:
            self.end_one()


def simulated(scenario: Scenario, steps: int = _STEPS, seed: int = 1) -> SimulatedRun:
    """Seconds of steps ``_WARMING`` and on."""
    steps = max(min(steps, _EVENTS // scenario.batch.answers), _WARMING + 2)
    run = _Run(scenario, steps, seed)
    expected, trained, waited, began = run.expected, 0.0, 0.0, 0.0
    run.admit(0.0)
    now, busy = 0.0, 0.0
    for step in range(steps):
        if step == _WARMING:
            began, waited, busy = now, 0.0, sum(engine.busy for engine in run.engines)
        ready = run.sampled(step, now) + (expected.scored_last if expected.is_beside else expected.scored_after)
        waited += max(ready - now, 0.0)
        trained = max(ready, now) + scenario.rates.seconds_step + expected.turns + expected.trainer
        live = trained + expected.syncing.fetch
        run.until(live)
        for engine in run.engines:
            engine.advance(live)
            engine.pause(expected.syncing.apply)
        run.admission.advance(step + 1)
        run.admit(live)
        now = live if not expected.is_beside else trained
    counted = steps - _WARMING
    whole = now - began
    sampled = sum(engine.busy for engine in run.engines) - busy
    return SimulatedRun(
        seconds=whole / counted,
        trainer_idle=waited / whole,
        engines_idle=max(1 - sampled / (whole * len(run.engines)), 0.0),
        staleness_max=run.stale,
        steps=counted,
    )


def as_words(result: SimulatedRun) -> str:
    """One line."""
    return (
        f"simulated, {result.steps} steps with answers of different lengths: {result.seconds:.1f} s a step; the "
        f"trainer waits {100 * result.trainer_idle:.0f} % of it, engines {100 * result.engines_idle:.0f} %; staleness "
        f"up to {result.staleness_max}"
    )
