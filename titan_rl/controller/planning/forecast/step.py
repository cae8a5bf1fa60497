"""Seconds of a whole step, by phase, and how long whose devices stand still. Pure arithmetic.

In turns, or with ``max_staleness = 0``, phases follow each other. With more, sampling runs beside training, and a step
takes as long as the slower of the two (simulation.py has what lies between).
"""

from dataclasses import dataclass, field
from functools import cached_property

from titan_rl.controller.planning.forecast.generation import (
    DraftGain,
    Drafting,
    Engine,
    Generating,
    draft_gain,
    generating,
)
from titan_rl.controller.planning.forecast.rates import Rates
from titan_rl.controller.planning.forecast.training import Layout, Training, training
from titan_rl.controller.planning.forecast.weight_sync import Route, Syncing, syncing
from titan_rl.controller.planning.forecast.work import Batch, Work


@dataclass(frozen=True)
class Scenario:
    """A run, in numbers."""

    work: Work
    batch: Batch
    rates: Rates
    layout: Layout
    engine: Engine
    replicas: int
    trained: int
    """Parameters that learn."""
    sends_adapters: bool = False
    """Instead of weights."""
    staleness: int = 0
    in_turns: bool = False
    scorers: int = 1
    beside: float = 0.0
    """FLOPs of other models that pass a batch in the trainer's processes."""
    crosses_hosts: bool = False
    """Whether engines are on other hosts than the trainer."""
    copies: int = 0
    """Of the model that trainers send in a sync; 0: one for each replica."""
    helpers: int = 0
    """Engines on the trainer's devices, while it waits."""
    drafting: Drafting | None = None
    """Of engines, which no second counts."""

    @property
    def devices(self) -> int:
        engines = self.replicas * self.engine.ranks
        return max(self.layout.ranks, engines) if self.in_turns else self.layout.ranks + engines


@dataclass(frozen=True)
class Forecast:
    """Of a scenario's step, in seconds."""

    scenario: Scenario = field(repr=False)
    generating: Generating
    training: Training
    syncing: Syncing
    scoring: float
    """Of a whole batch; answers that end early are scored beside those that go on."""

    @property
    def is_beside(self) -> bool:
        """Whether sampling and training run at the same time."""
        return self.scenario.staleness > 0 and not self.scenario.in_turns

    @cached_property
    def scored_last(self) -> float:
        """Of those that run to the end together."""
        return self.scoring * min(1.0, self.generating.requests * self.scenario.replicas / self.scenario.batch.answers)

    @cached_property
    def turns(self) -> float:
        """Moments to the host and back, where trainer and engines take turns."""
        return 2 * self.offloading if self.scenario.in_turns else 0.0

    @cached_property
    def offloading(self) -> float:
        """Moments to the host, or back."""
        state = 8 * self.scenario.trained / (self.scenario.layout.ranks / self.scenario.layout.replicas)
        return state / (self.scenario.rates.host_bandwidth * self.scenario.rates.link_share)

    @cached_property
    def trainer(self) -> float:
        """Seconds of a step in which the trainer works."""
        return self.training.seconds + self.syncing.publish

    @cached_property
    def generators(self) -> float:
        if self.is_beside:
            return self.generating.running + self.syncing.apply
        return self.generating.alone + self.syncing.apply

    @cached_property
    def way_round(self) -> float:
        """From the version that a batch is sampled by to the one that it makes; 1 + staleness batches are under way, so
        none can be made in less than that part of it (Little 1961, Operations Research 9, 383-387)."""
        sampled = self.generating.prefill + self.scenario.batch.longest * self.generating.engine_step
        return sampled + self.scored_last + self.trainer + self.syncing.fetch + self.syncing.apply

    @cached_property
    def seconds(self) -> float:
        rest = self.scenario.rates.seconds_step
        if self.is_beside:
            return max(
                self.generators, self.trainer + rest, self.scoring, self.way_round / (1 + self.scenario.staleness)
            )
        return self.generators + self.scored_after + self.trainer + self.syncing.fetch + self.turns + rest

    @cached_property
    def idle(self) -> float:
        """Share of all devices' seconds in which they neither sample nor train, a pipeline's bubble among them."""
        scenario = self.scenario
        trains = self.trainer - self.training.bubble * self.training.compute
        engines = scenario.replicas * scenario.engine.ranks
        busy = scenario.layout.ranks * trains + engines * self.generators
        return max(1 - busy / (self.scenario.devices * self.seconds), 0.0)

    @cached_property
    def scored_after(self) -> float:
        """Of a batch that is waited for, after its last token: also what sampling was too short for."""
        return self.scored_last + max(self.scoring - self.scored_last - self.generating.alone, 0.0)

    @property
    def scored_beside(self) -> float:
        """Of the scoring, what is done while other answers are sampled."""
        return self.scoring if self.is_beside else self.scoring - self.scored_after

    def phases(self) -> dict[str, float]:
        """In the order of a step; their sum is the step's seconds where one follows the other."""
        return {
            "prefill": self.generating.prefill,
            "decode": self.generating.decode,
            "tail": 0.0 if self.is_beside else self.generating.tail,
            "score": self.scoring if self.is_beside else self.scored_after,
            "forward_backward": self.training.forward_backward,
            "optimizer": self.training.optimizer,
            "publish": self.syncing.publish,
            "weight_fetch": self.syncing.fetch,
            "weight_apply": self.syncing.apply,
            "turns": self.turns,
            "rest": self.scenario.rates.seconds_step,
        }

    def draft_gains(self) -> list[DraftGain]:
        """With as many requests as run at once, and with one alone, as at the end of a batch."""
        scenario, drafting = self.scenario, self.scenario.drafting
        if drafting is None:
            return []
        loads = sorted({self.generating.requests, 1.0}, reverse=True)
        context = scenario.batch.prompt + scenario.batch.answer / 2
        each = scenario.work, scenario.engine, scenario.rates
        return [draft_gain(*each, requests, context, drafting) for requests in loads]

    def bytes_sent(self) -> dict[str, float]:
        """Of one device in a step, by what it sends them for."""
        engine, batch = self.scenario.engine, self.scenario.batch
        tokens = (batch.generated + batch.groups * batch.prompt) / self.scenario.replicas
        sums = 2 * self.scenario.work.layers * 2 * (engine.ranks - 1) / engine.ranks
        return {
            "trainer: FSDP": self.training.shard_bytes,
            "trainer: tensor parallel": self.training.tensor_bytes,
            "trainer: context parallel": self.training.context_bytes,
            "trainer: pipeline": self.training.stage_bytes,
            "trainer: weights to engines": self.syncing.sent,
            "engine: tensor parallel": sums * tokens * self.scenario.work.hidden * engine.element,
            "engine: weights received": self.syncing.received,
        }


def forecast(scenario: Scenario) -> Forecast:
    """The step that this scenario makes."""
    work, rates, layout, engine = scenario.work, scenario.rates, scenario.layout, scenario.engine
    route = Route(
        shards=layout.ranks // layout.replicas,
        senders=layout.ranks,
        replicas=scenario.replicas,
        ranks=engine.ranks,
        crosses_hosts=scenario.crosses_hosts,
        copies=min(scenario.copies or scenario.replicas, scenario.replicas),
    )
    adapters = (scenario.trained, layout.element) if scenario.sends_adapters else (0, 0)
    return Forecast(
        scenario=scenario,
        generating=generating(work, engine, rates, scenario.batch, scenario.replicas, 1 + scenario.staleness),
        training=training(work, layout, rates, scenario.batch, scenario.trained, scenario.beside),
        syncing=syncing(work.parameters, engine.element, route, rates, adapters),
        scoring=scenario.batch.answers * rates.seconds_answer / scenario.scorers,
    )
