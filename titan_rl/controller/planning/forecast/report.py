"""Report of a forecast, as text and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from titan_rl.controller.planning.forecast.generation import DraftGain
from titan_rl.controller.planning.forecast.search import FittingChoice
from titan_rl.controller.planning.forecast.step import Forecast
from titan_rl.controller.planning.memory_plan import GIB

_DAY = 86400.0
_SECOND = 1.0


def forecast_lines(its: Forecast, days: float | None, steps: int) -> list[str]:
    """Lines about time and traffic of a step. ``days``: duration to count steps for; ``steps``: of the run."""
    scenario, batch = its.scenario, its.scenario.batch
    work = f"{batch.groups} x {batch.group_size} answers of {batch.answer:.0f} tokens to prompts of {batch.prompt:.0f}"
    order = "its phases overlap, as sampling goes on beside training" if its.is_beside else "one phase after the other"
    helpers = ", without helper generators, which the simulation below has" if scenario.helpers else ""
    lines = [
        f"a step of {work}: {_seconds(its.seconds)}, {order} (staleness {scenario.staleness}){helpers}:",
        *(_phase(its, name, seconds) for name, seconds in its.phases().items() if seconds > 0),
        f"  trainer {_seconds(its.trainer)}, generators {_seconds(its.generators)} of a step; of all devices' time "
        f"{100 * its.idle:.0f} % is spent waiting; pipeline bubble {100 * its.training.bubble:.0f} %",
        f"  an engine runs {its.generating.requests:.0f} requests at once, a trainer rank {its.training.rows} rows",
        *_drafts(its),
        *_links(its),
    ]
    return [*lines, *_duration(its, days, steps)]


def _phase(its: Forecast, name: str, seconds: float) -> str:
    line = f"  {name:<17} {_seconds(seconds)}"
    if name != "score" or its.is_beside or its.scored_beside < 0.05 * its.scoring:
        return line
    return f"{line}, and {_seconds(its.scored_beside)} of work beside sampling, where answers end early"


def _drafts(its: Forecast) -> list[str]:
    if (drafting := its.scenario.drafting) is None:
        return []
    words = "; ".join(
        f"{each.requests:.0f} request{'s' * (each.requests > 1)} {each.ratio:.2f} x, {_rate(each)}"
        for each in its.draft_gains()
    )
    return [
        f"  these are seconds without drafts; how much longer {drafting.tokens} of them make an engine's step, and the "
        f"draft_acceptance_rate from which on they gain: {words}"
    ]


def _rate(gain: DraftGain) -> str:
    return f"{gain.needed_acceptance:.2f}" if gain.needed_acceptance < 1 else "never"


def _links(its: Forecast) -> list[str]:
    words = "; ".join(f"{what} {size / 1e9:.3g} GB" for what, size in its.bytes_sent().items() if size)
    return [f"  a device sends in a step: {words}"] if words else []


def _duration(its: Forecast, days: float | None, steps: int) -> list[str]:
    whole = its.seconds * steps / _DAY
    if days is None:
        return [f"  {steps} steps: {whole:.2f} days"]
    return [f"  in {days:g} days: {days * _DAY / its.seconds:.0f} steps; the {steps} asked for take {whole:.2f} days"]


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= _SECOND else f"{1000 * value:.1f} ms"


def ranking_lines(ranking: Sequence[FittingChoice]) -> list[str]:
    """Lines about the cheapest placement, as TOML keys, and the next ones."""
    first, *others = ranking
    choice = first.choice
    lines = [f"cheapest that fits: {_words(first)}", *(f"  {line}" for line in _toml(choice.tables()))]
    lines += [f"  next: {_words(each)}" for each in others[:4]]
    return lines


def _words(each: FittingChoice) -> str:
    choice, its = each.choice, each.forecast
    turns = ", in turns" if choice.in_turns else ""
    context = f"{choice.context} context x " if choice.context > 1 else ""
    kinds = f"{choice.shards} shards x {context}{choice.tensor} tensor x {choice.stages} stages"
    trainers = f"{choice.trainers} train ({kinds})"
    engines = f"{choice.engines * choice.engine_ranks} generate ({choice.engines} engines of {choice.engine_ranks})"
    return f"{trainers}, {engines}{turns}: {_seconds(its.seconds)} a step, {100 * its.idle:.0f} % waiting"


def _toml(tables: dict[str, dict[str, Any]]) -> list[str]:
    def word(value: Any) -> str:
        return f'"{value}"' if isinstance(value, str) else str(value)

    return [f"{name}.{key} = {word(value)}" for name, table in tables.items() for key, value in table.items()]


def as_json(its: Forecast) -> dict[str, Any]:
    """Forecast as JSON, in seconds and bytes."""
    scenario = its.scenario
    return {
        "seconds": its.seconds,
        "phases": its.phases(),
        "seconds_scored_beside": its.scored_beside,
        "seconds_trainer": its.trainer,
        "seconds_generators": its.generators,
        "idle_share": its.idle,
        "bubble": its.training.bubble,
        "bytes_sent": its.bytes_sent(),
        "drafts": [asdict(gain) for gain in its.draft_gains()],
        "batch": asdict(scenario.batch),
        "staleness": scenario.staleness,
        "devices": scenario.devices,
        "requests_at_once": its.generating.requests,
        "rows": its.training.rows,
        "rates": asdict(scenario.rates),
    }


def ranking_as_json(ranking: Sequence[FittingChoice]) -> list[dict[str, Any]]:
    """Placements as JSON, the cheapest first."""
    return [
        asdict(each.choice)
        | {
            "trainers": each.choice.trainers,
            "tables": each.choice.tables(),
            "kv_cache_gib": each.plan.kv_cache / GIB,
            "forecast": as_json(each.forecast),
        }
        for each in ranking
    ]
