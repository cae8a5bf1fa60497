"""What a machine does in a second, by runs that were made there: a forecast's formulas, solved for their rates.

Each phase is a sum of what is counted (FLOPs, engine steps, tokens, rows) times seconds that are wanted. They are found
by least squares of relative errors, none below zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from titan_rl.controller.planning.forecast.rates import Rates
from titan_rl.controller.planning.forecast.step import Scenario, forecast
from titan_rl.controller.planning.forecast.training import num_rows, train_flops

_NONE = 1e30
"""Of FLOPs a second, where a phase does not depend on them."""


@dataclass(frozen=True)
class Measured:
    """A run: what it was, and the seconds of its phases (records/metrics.py)."""

    scenario: Scenario
    seconds: dict[str, float]


def least_squares(counts_RC: Sequence[Sequence[float]], seconds_R: Sequence[float]) -> list[float]:
    """Seconds of each count (R runs, C counts), none below zero."""
    seconds = np.asarray(seconds_R, float)
    matrix = np.asarray(counts_RC, float) / seconds[:, None]
    solution, open_columns = np.zeros(matrix.shape[1]), list(range(matrix.shape[1]))
    while open_columns:
        part = np.linalg.lstsq(matrix[:, open_columns], np.ones(len(seconds)), rcond=None)[0]
        if (part >= 0).all():
            solution[open_columns] = part
            break
        open_columns.pop(int(part.argmin()))
    return [float(value) for value in solution]


def _engine_counts(run: Measured) -> list[float]:
    """FLOPs, engine steps, tokens."""
    work, batch, engine = run.scenario.work, run.scenario.batch, run.scenario.engine
    share = batch.answers / run.scenario.replicas
    requests = max(min(engine.max_requests, share), 1.0)
    prompts = batch.groups * batch.prompt / run.scenario.replicas
    tokens = share * batch.answer
    flops = work.forward_flops(prompts, prompts * batch.prompt / 2)
    flops += work.forward_flops(tokens, tokens * (batch.prompt + batch.answer / 2))
    return [flops / engine.ranks, tokens / requests + batch.longest - batch.answer, tokens]


def _trainer_counts(run: Measured) -> list[float]:
    """FLOPs, rows."""
    layout, batch, work = run.scenario.layout, run.scenario.batch, run.scenario.work
    share = min(run.scenario.trained / work.parameters, 1.0)
    flops = train_flops(work, batch, layout.recomputed, share) + run.scenario.beside
    return [flops / layout.ranks, num_rows(batch, layout)]


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds > 0 else _NONE


def fitted(runs: Sequence[Measured], base: Rates) -> Rates:
    """Rates fitted to measured runs.

    ``base``: with what is not fitted, its memory's bandwidth among it, which was measured by itself.
    """

    def solved(counts: Callable[[Measured], list[float]], phase: str) -> list[float]:
        return least_squares([counts(run) for run in runs], [run.seconds[phase] for run in runs])

    train, row = solved(_trainer_counts, "forward_backward")
    sample, engine_step, token = solved(_engine_counts, "generate")
    peak = _rate(train)
    rates = replace(
        base,
        peak_flops=peak,
        train_share=1.0,
        decode_share=_rate(sample) / peak,
        prefill_share=_rate(sample) / peak,
        seconds_row=row,
        seconds_engine_step=engine_step,
        seconds_token=token,
        seconds_optimizer=0.0,
        seconds_sync=0.0,
        seconds_step=0.0,
        seconds_answer=0.0,
    )
    return _with_rest(runs, rates)


def _with_rest(runs: Sequence[Measured], rates: Rates) -> Rates:
    """What phases take beside their bytes, and a step beside its phases."""

    def beside(phase: str, counted: Callable[[Scenario], float]) -> float:
        left = [run.seconds[phase] - counted(replace(run.scenario, rates=rates)) for run in runs]
        return max(float(np.median(left)), 0.0)

    optimizer = beside("optimizer", lambda its: forecast(its).training.optimizer)
    sync = beside("weight_sync", lambda its: forecast(its).syncing.seconds)
    rates = replace(rates, seconds_optimizer=optimizer, seconds_sync=sync)
    left = [run.seconds["step"] - forecast(replace(run.scenario, rates=rates)).seconds for run in runs]
    last = [_scored_last(replace(run.scenario, rates=rates)) for run in runs]
    step, answer = least_squares([[1.0, each] for each in last], [max(each, 1e-3) for each in left])
    return replace(rates, seconds_step=step, seconds_answer=answer)


def _scored_last(scenario: Scenario) -> float:
    """Answers, for each scorer, that are scored when sampling is over."""
    one = replace(scenario, rates=replace(scenario.rates, seconds_answer=1.0))
    return forecast(one).scored_last
