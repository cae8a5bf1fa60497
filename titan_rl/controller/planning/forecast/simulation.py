"""Event simulation of a run's steps: engines, groups, admission, trainer and weight versions.

What arithmetic leaves out is here: how long a batch waits for its longest answers, and how much of that a staleness of
so many versions hides. Nothing is random but lengths, which a seed makes.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

import numpy as np

from titan_rl.config.sections.placement import most_samples
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
    most: float = inf
    """Requests that it takes at once; a larger group has it for itself."""
    groups: int = 0
    sleeps: bool = False
    """Whether it is a helper, and the trainer has its devices."""

    @property
    def held(self) -> int:
        return len(self.running) + len(self.waiting)

    def has_room(self, size: int, most: float | None = None) -> bool:
        """Whether it takes a group of this size now. ``most``: requests that it then has; None: as many as it takes."""
        return not self.sleeps and (not self.held or self.held + size <= (most or self.most))

    def take(self, number: int, tokens: Iterable[float]) -> None:
        """A group, with the tokens of its answers."""
        self.groups += 1
        self.pause(self.prefill)
        self.busy += self.prefill
        self.waiting.extend((float(count), number) for count in tokens)
        self.fill()

    def numbers(self) -> list[int]:
        """Of its groups, those that came first before."""
        return sorted({number for _, number in (*self.running, *self.waiting)})

    def drop(self, number: int) -> None:
        """A group, which another engine takes."""
        self.groups -= 1
        self.running = [each for each in self.running if each[1] != number]
        heapq.heapify(self.running)
        self.waiting = deque(each for each in self.waiting if each[1] != number)
        self.fill()

    def advance(self, until: float) -> None:
        """No request ends before."""
        if self.running and until > self.now and not self.sleeps:
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
        if not self.running or self.sleeps:
            return inf
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

        def made(*, is_helper: bool) -> _Engine:
            seats = engine.max_requests
            most = most_samples(seats, batch.group_size, is_helper=is_helper) if scenario.helpers else inf
            return _Engine(seats, step, prefill, most=most, sleeps=is_helper)

        self.engines = [made(is_helper=False) for _ in range(scenario.replicas)]
        self.helpers = [made(is_helper=True) for _ in range(scenario.helpers)]
        self.engines += self.helpers
        self.trained = scenario.rates.seconds_step + self.expected.turns + self.expected.trainer
        """Seconds that the trainer works in a step."""
        self.lending = self.expected.offloading + self.expected.syncing.fetch + self.expected.syncing.apply
        total = (steps + scenario.staleness + 1) * batch.answers
        self.tokens = lengths(batch.answer, batch.longest, total, seed).reshape(-1, batch.group_size)
        self.admission = Admission(batch.groups, scenario.staleness)
        self.admission.advance(0)
        self.next_ends: list[tuple[float, int]] = []
        """A heap: of each engine, when its next request ends, and its place."""
        self.queue: deque[int] = deque()
        """Groups that wait for an engine with room."""
        self.left: list[int] = []
        self.of_group: list[tuple[int, int]] = []
        """Of each group: its engine, and the version that was live."""
        self.stale = 0
        self.lent_since = 0.0
        self.works_until = -inf
        """When the trainer is expected to wait again."""
        self.began: dict[int, float] = {}
        """Of each group, when it came to its engine."""
        self.helped: dict[int, float] = defaultdict(float)
        """Seconds that a helper has worked on a group."""

    def admit(self, now: float) -> None:
        """Every group that may run."""
        while self.admission.can_admit() and len(self.left) < len(self.tokens):
            self.admission.admit()
            version = self.admission.version
            assert version is not None, "none is admitted before one is live"
            self.queue.append(number := len(self.left))
            self.left.append(len(self.tokens[number]))
            self.of_group.append((0, version))
        self.assign(now)

    def assign(self, now: float) -> None:
        """Groups that wait, each to the engine with the fewest, as far as there is room."""
        for engine in self.engines:
            engine.advance(now)
        size, able = self.scenario.batch.group_size, range(len(self.engines))
        while self.queue:
            if self.helpers:
                able = [place for place, engine in enumerate(self.engines) if engine.has_room(size)]
            if not able:
                break
            self.begin(self.queue.popleft(), able, now)
        for engine in self.engines:
            engine.fill()
        if not self.queue:
            self.move(now)
        self.look_ahead()

    def begin(self, number: int, able: Iterable[int], now: float) -> None:
        """A group, at the engine of these that has the fewest."""
        place = min(able, key=lambda each: self.engines[each].groups)
        self.of_group[number], self.began[number] = (place, self.of_group[number][1]), now
        self.engines[place].take(number, self.tokens[number])

    def move(self, now: float) -> None:
        """Groups that sleep, to engines with room, where less is done again than the trainer still works."""
        size = self.scenario.batch.group_size
        for helper in (helper for helper in self.helpers if helper.sleeps):
            for number in helper.numbers():
                able = [place for place, engine in enumerate(self.engines) if engine.has_room(size, engine.seats)]
                if able and self.helped[number] <= self.works_until - now:
                    helper.drop(number)
                    self.left[number] = size
                    self.begin(number, able, now)

    def lend(self, now: float) -> None:
        """Helpers go on with what they had, and take groups."""
        for engine in self.helpers:
            engine.advance(now)
            engine.sleeps = False
        self.lent_since = now
        self.assign(now)

    def take(self, now: float) -> float:
        """Seconds until the trainer has its devices back."""
        if not any(not engine.sleeps for engine in self.helpers):
            return 0.0
        for engine in self.helpers:
            engine.advance(now)
            engine.sleeps = True
            for number in engine.numbers():
                self.helped[number] += now - max(self.lent_since, self.began[number])
        self.works_until = now + self.expected.offloading + self.trained
        self.assign(now)
        return self.expected.offloading

    @property
    def seconds_busy(self) -> float:
        """Of engines besides helpers."""
        return sum(engine.busy for engine in self.engines[: self.scenario.replicas])

    def look_ahead(self) -> None:
        """Again, since every engine may have changed."""
        self.next_ends = [(engine.ends, place) for place, engine in enumerate(self.engines)]
        heapq.heapify(self.next_ends)

    def end_one(self) -> float:
        """The next request to end; when that is. Errors: AssertionError if nothing runs."""
        now, place = self.next_ends[0]
        assert now < inf, "nothing runs, and a batch is waited for"
        engine = self.engines[place]
        engine.advance(now)
        _, group = heapq.heappop(engine.running)
        self.left[group] -= 1
        engine.groups -= not self.left[group]
        if self.queue or any(helper.sleeps and helper.held for helper in self.helpers):
            self.assign(now)
        else:
            engine.fill()
            heapq.heapreplace(self.next_ends, (engine.ends, place))
        return now

    def sampled(self, step: int, now: float) -> float:
        """When the groups of a step, those admitted first, are complete."""
        size = self.scenario.batch.groups
        mine = range(step * size, (step + 1) * size)
        # lent when it has waited for as long as lending and taking take (mesh/control/helpers.py)
        lent = now + 2 * self.lending + self.expected.offloading if self.helpers and step else inf
        while any(self.left[group] for group in mine):
            is_wanted = bool(self.queue) or any(engine.held for engine in self.helpers)
            if lent <= self.next_ends[0][0] and is_wanted:
                self.lend(lent)
                lent = inf
            else:
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
            began, waited, busy = now, 0.0, run.seconds_busy
        ready = run.sampled(step, now) + (expected.scored_last if expected.is_beside else expected.scored_after)
        waited += max(ready - now, 0.0)
        back = max(ready, now) + run.take(max(ready, now))
        trained = back + run.trained
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
    sampled = run.seconds_busy - busy
    return SimulatedRun(
        seconds=whole / counted,
        trainer_idle=waited / whole,
        engines_idle=max(1 - sampled / (whole * scenario.replicas), 0.0),
        staleness_max=run.stale,
        steps=counted,
    )


def as_words(result: SimulatedRun, without_helpers: SimulatedRun | None = None) -> str:
    """One line. ``without_helpers``: the same run without helper generators, where it has such."""
    helped = "" if without_helpers is None else f"; {without_helpers.seconds:.1f} s without helper generators"
    return (
        f"simulated, {result.steps} steps with answers of different lengths: {result.seconds:.1f} s a step; the "
        f"trainer waits {100 * result.trainer_idle:.0f} % of it, engines {100 * result.engines_idle:.0f} %; staleness "
        f"up to {result.staleness_max}{helped}"
    )
