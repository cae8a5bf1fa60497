"""The cheapest placement that fits: how many devices train, how many generate, and how each share a model.

A machine is paid for as a whole, so the cheapest is the fastest; of those that are as fast, the one that shares a model
over the fewest kinds of ranks. Every candidate's seconds are arithmetic; what it holds is asked in the order of their
seconds, until one fits (device_plan.py, the one truth about memory).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.controller.planning.device_plan import DevicePlan, Machine, Models, plan_devices
from titan_rl.controller.planning.forecast.rates import Rates
from titan_rl.controller.planning.forecast.scenarios import Lengths, engine_of, scenario_of
from titan_rl.controller.planning.forecast.step import Forecast, Scenario, forecast
from titan_rl.controller.preflight.checks import Checked
from titan_rl.controller.preflight.engine_checks import check_generator_layout
from titan_rl.trainer.model.layout import check_layout
from titan_rl.trainer.titan_config import build_titan

_DEGREES = (1, 2, 4, 8)
_AT_ONCE = (256, 512)
"""Requests of an engine, beside what the TOML has."""
_ALIKE = 1.02
"""Seconds within which two are as fast as each other."""
_SPLITS = 16
"""In which hosts are shared between trainers and engines, at most."""
_NEAR, _KEPT = 1.5, 6
"""How much slower another may be to be told, and how many are looked at of each number of trainers."""
_TRIED = 4000
"""Candidates whose memory is asked, at most."""


@dataclass(frozen=True)
class Choice:
    """Settings that the search varies; the TOML keeps the others."""

    shards: int
    tensor: int
    stages: int
    engines: int
    engine_ranks: int
    checkpointing: str
    in_turns: bool
    at_once: int
    """Requests of an engine."""
    experts: int = 1
    context: int = 1
    """As the TOML has it: rows that one rank cannot hold are the user's to know of."""

    @property
    def trainers(self) -> int:
        return self.shards * self.context * self.tensor * self.stages

    @property
    def simplicity(self) -> tuple[int, int, int, bool, int]:
        return self.stages, self.tensor, self.engine_ranks, self.checkpointing == "full", self.at_once

    def tables(self) -> dict[str, dict[str, Any]]:
        """Choice as TOML tables."""
        return {
            "placement": {"mode": "colocated" if self.in_turns else "disaggregated"},
            "parallelism": {
                "data_parallel_shard_degree": self.shards,
                "data_parallel_replicate_degree": 1,
                "context_parallel_degree": self.context,
                "tensor_parallel_degree": self.tensor,
                "pipeline_parallel_degree": self.stages,
                "expert_parallel_degree": self.experts,
            },
            "generator": {
                "replicas": self.engines,
                "tensor_parallel": self.engine_ranks,
                "max_num_seqs": self.at_once,
            },
            "activation_checkpoint": {"mode": self.checkpointing},
        }


@dataclass(frozen=True)
class FittingChoice:
    choice: Choice
    forecast: Forecast
    plan: DevicePlan


def choices(
    machine: Machine, *, staleness: int, at_once: Sequence[int] = (128,), experts: int = 0, context: int = 1
) -> Iterator[Choice]:
    """All that use the whole machine. Trainers take whole hosts where there are several. ``at_once``: requests that an
    engine may run."""
    devices = machine.hosts * machine.devices_per_host
    unit = machine.devices_per_host * ceil(machine.hosts / _SPLITS) if machine.hosts > 1 else 1
    within = [degree for degree in _DEGREES if degree <= machine.devices_per_host]
    modes = [(False, count) for count in range(unit, devices, unit)] + ([(True, devices)] if not staleness else [])
    for (in_turns, trainers), tensor, stages, ranks in product(modes, within, _DEGREES, within):
        shards, rest = divmod(trainers, context * tensor * stages)
        left = devices if in_turns else devices - trainers
        if rest or not shards or left < ranks:
            continue
        for checkpointing, requests in product(("none", "full"), at_once):
            holders = trainers // stages
            spread = max((d for d in _DEGREES if experts and experts % d == 0 and holders % d == 0), default=1)
            yield Choice(
                shards, tensor, stages, left // ranks, ranks, checkpointing, in_turns, requests, spread, context
            )


def scenario(start: Scenario, choice: Choice, models: Models, machine: Machine) -> Scenario:
    """``start``: of the TOML's own layout, whose numbers it takes but for what was chosen."""
    layout = replace(
        start.layout,
        replicas=1,
        shards=choice.shards,
        context=choice.context,
        tensor=choice.tensor,
        stages=choice.stages,
        recomputed=float(choice.checkpointing == "full"),
        gathers_again=choice.stages == 1,
    )
    generator = replace(models.config.generator, tensor_parallel=choice.engine_ranks, max_num_seqs=choice.at_once)
    usable = generator.gpu_memory_utilization * machine.memory
    room = usable - sum(models.of_engine_rank(generator).values())
    engine = engine_of(models, generator, room, start.batch, start.rates.link)
    is_spread = machine.hosts > 1
    return replace(
        start, layout=layout, engine=engine, replicas=choice.engines, in_turns=choice.in_turns, crosses_hosts=is_spread
    )


def ranked(
    models: Models, lengths: Lengths, rates: Rates, machine: Machine, copies: int = 0
) -> list[tuple[Choice, Forecast]]:
    """Forecasts of all choices, the fastest first, without a check of memory."""
    start = scenario_of(models, lengths, rates, None, copies)
    start = replace(start, layout=replace(start.layout, devices_per_host=machine.devices_per_host))
    current = models.config.generator.max_num_seqs
    at_once, experts = sorted({current, *(n for n in _AT_ONCE if n > current)}), start.work.num_experts
    forecasts = []
    varied = choices(machine, staleness=start.staleness, at_once=at_once, experts=experts, context=start.layout.context)
    for choice in varied:
        its = scenario(start, choice, models, machine)
        if its.engine.max_requests and its.replicas <= its.batch.groups:
            forecasts.append((choice, forecast(its)))
    return sorted(forecasts, key=lambda each: each[1].seconds)


def _with(checked: Checked, choice: Choice) -> Checked:
    """Errors: ConfigError."""
    tables, config = choice.tables(), checked.config
    titan = dict(config.titan)
    for section in ("parallelism", "activation_checkpoint"):
        titan[section] = titan.get(section, {}) | tables[section]
    chosen = replace(
        config,
        placement=replace(config.placement, trainer=[], generator=[], **tables["placement"]),
        generator=replace(config.generator, **tables["generator"]),
        titan=titan,
    )
    return replace(checked, config=chosen, titan=build_titan(chosen))


def fitted(models: Models, choice: Choice, machine: Machine) -> DevicePlan | None:
    """Device plan of a choice; None if it is invalid or does not fit."""
    try:
        chosen = _with(models.checked, choice)
        check_layout(models.hf, chosen.titan.parallelism, chosen.family)
        check_generator_layout(models.hf, choice.engine_ranks, on_cpu=False)
        usable = chosen.config.generator.gpu_memory_utilization * machine.memory
        is_too_large = not choice.in_turns and sum(Models(chosen, models).of_trainer().values()) > usable
        return None if is_too_large else plan_devices(chosen, machine, cached=models)
    except ConfigError:
        return None


def cheapest(models: Models, lengths: Lengths, rates: Rates, machine: Machine, copies: int = 0) -> list[FittingChoice]:
    """The cheapest that fits, and after it those that are nearly as fast, each of another number of trainers. Errors:
    ConfigError if none fits."""
    fitting: list[FittingChoice] = []
    best = float("inf")
    for choice, its in ranked(models, lengths, rates, machine, copies)[:_TRIED]:
        if its.seconds > best * _NEAR:
            break
        if sum(each.choice.trainers == choice.trainers for each in fitting) == _KEPT:
            continue
        if (plan := fitted(models, choice, machine)) is not None:
            best = min(best, its.seconds)
            fitting.append(FittingChoice(choice, its, plan))
    if not fitting:
        raise ConfigError(
            "no placement on this machine fits: give more --hosts or --gpus, a shorter training.seq_len, or [lora]"
        )
    alike = [each for each in fitting if each.forecast.seconds <= best * _ALIKE]
    first = min(alike, key=lambda each: (each.choice.simplicity, each.forecast.seconds))
    others = {each.choice.trainers: each for each in reversed(fitting) if each.choice.trainers != first.choice.trainers}
    return [first, *sorted(others.values(), key=lambda each: each.forecast.seconds)]
