"""Reports of a run: step records, evaluations, stragglers, trainer-generator disagreement, events."""

import time
from dataclasses import dataclass, field

from titan_rl.algorithms.batches.batching import FILTER_REASONS
from titan_rl.algorithms.batches.shaping import shaping_metrics
from titan_rl.config.sections.schema import Config
from titan_rl.controller.console.alarm_watch import AlarmWatch
from titan_rl.controller.console.display import Display
from titan_rl.controller.console.step_table import Sample, sample_of
from titan_rl.controller.loop.rollout_queue import Collected
from titan_rl.data.callbacks import RecordEvent
from titan_rl.data.spans import Span
from titan_rl.data.storage.files import unless_full
from titan_rl.data.types import Batch, EngineStatistics, Group, StepMetrics
from titan_rl.mesh.telemetry.stragglers import Stragglers
from titan_rl.records.evaluations.files import write_result
from titan_rl.records.evaluations.results import SuiteResult
from titan_rl.records.metrics import (
    MetricsLog,
    bytes_between_hosts,
    cache_metrics,
    draft_metrics,
    helper_metrics,
    sampling_metrics,
    speeds,
    trained_metrics,
)
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.statistics import Proportion
from titan_rl.records.steps.step_names import step_name


class PhaseTimer:
    """Seconds of the phases of a step, one after the other; one that comes again adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        self._start = self._last = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.spans.append(Span(phase, time.time() - (now - self._last), now - self._last))
        self.seconds[phase], self._last = self.seconds.get(phase, 0.0) + now - self._last, now

    @property
    def total(self) -> float:
        return self._last - self._start


@dataclass(frozen=True)
class StepReport:
    """Results of a step when its weights are live."""

    step: int
    collected: Collected
    batches: list[Batch]
    metrics: StepMetrics
    timer: PhaseTimer = field(default_factory=PhaseTimer)


class Reporter:
    """Writes metrics and shows them."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        metrics: MetricsLog,
        display: Display,
        stragglers: Stragglers,
        record_event: RecordEvent,
        *,
        agreement_limit: float,
    ):
        self.config, self.run_dir, self.metrics, self.display = config, run_dir, metrics, display
        self.stragglers, self.record_event = stragglers, record_event
        self._agreement_limit = agreement_limit
        self._is_never_stale = not config.rollout.max_staleness
        self._has_warned = self._has_warned_short = self._has_told_retry = False
        self._logged_failures: set[str] = set()
        self._alarms = AlarmWatch(run_dir.root, log=display.log, record_event=record_event)

    def enter(self, step: int, phase: str) -> None:
        """Set the phase in the display and the run directory."""
        self.display.enter(phase)
        with unless_full():
            self.run_dir.phase.write_text(f"{step} {phase}")

    def step(self, report: StepReport, statistics: list[EngineStatistics], seconds_sync: float) -> None:
        """``seconds_sync``: from the publication of the step's weights to the last generator that took them."""
        record = self._record(report, statistics, seconds_sync) | self.stragglers.slowest()
        self.trained(record | self._alarms.update(record), sample_of(report.collected.groups))
        self._warn_of_disagreement(report.step, report.metrics)

    def trained(self, record: dict[str, float], sample: Sample | None = None) -> None:
        """Record and show a step's metrics with one of its answers."""
        self._record_stragglers(int(record["step"]))
        self.metrics.write(record | self.stragglers.slowest())
        self.display.step(record, sample)

    def _record(self, report: StepReport, statistics: list[EngineStatistics], seconds_sync: float) -> dict[str, float]:
        groups, sampled = report.collected.groups, report.collected.sampled
        seconds = {
            "generate": max((engine.seconds_busy for engine in statistics), default=0.0),
            "score": max((group.seconds_score for group in sampled), default=0.0),
            "wait": report.timer.seconds["wait"],
            "forward_backward": report.metrics.seconds_forward_backward,
            "optimizer": report.metrics.seconds_optimizer,
            "publish": report.timer.seconds["publish"],
            "weight_sync": seconds_sync,
            "generator_pause": max((engine.seconds_update for engine in statistics), default=0.0),
            "step": report.timer.total,
        }
        generated = sum(engine.num_tokens for engine in statistics)
        prompt_tokens = sum(engine.num_prompt_tokens for engine in statistics)
        cached = sum(engine.num_cached_tokens for engine in statistics)
        trained = sum(batch.num_tokens for batch in report.batches)
        budget = self.config.rollout.thinking_budget
        record = {"step": report.step, **sampling_metrics(sampled, report.step - 1, budget)}
        record |= self._filter_metrics(report.collected) | shaping_metrics(groups, self.config)
        record |= trained_metrics(report.metrics) | {f"seconds_{name}": value for name, value in seconds.items()}
        record |= bytes_between_hosts(statistics) | cache_metrics(statistics)
        if self.config.generator.speculative.method != "none":
            record |= draft_metrics(statistics)
        if helpers := self.config.placement.helper_numbers(self.config.generator.replicas):
            record |= helper_metrics(statistics, helpers)
        return record | speeds(seconds, generated, trained) | {"prompt_tokens_cached": cached / max(prompt_tokens, 1)}

    def _filter_metrics(self, collected: Collected) -> dict[str, float]:
        """Cost of ``[filter]``: groups sampled for each trained one, and the share of each reason."""
        if not self.config.filter.is_on:
            return {}
        count = len(collected.sampled)
        shares = {f"filtered_{reason}": len(collected.filtered.get(reason, ())) / count for reason in FILTER_REASONS}
        return {"sampled_per_trained": count / len(collected.groups)} | shares

    def collected(self, step: int, batch: Collected) -> None:
        """Warn once of a batch below its size."""
        batch_size = self.config.rollout.prompts_per_step
        if len(batch.groups) < batch_size and not self._has_warned_short:
            self._has_warned_short = True
            self.display.log(
                f"step {step}: of {len(batch.sampled)} groups only {len(batch.groups)} pass the filter, of "
                f"{batch_size} needed: it trains on these (filter.max_refills = {self.config.filter.max_refills}); "
                f"sampled_per_trained in the metrics shows later steps"
            )

    def curriculum_updated(self, step: int, curriculum_metrics: dict[str, float]) -> None:
        """Record the curriculum's metrics of a step, if any."""
        if curriculum_metrics:
            self.metrics.write({"step": step} | curriculum_metrics)

    def _record_stragglers(self, step: int) -> None:
        for name, ratio in self.stragglers.new().items():
            self.display.log(f"step {step}: {name} is slow: {ratio:.1f} times its peers' median of the last steps")
            self.record_event("straggler", name=name, ratio=ratio, step=step)

    def _warn_of_disagreement(self, step: int, metrics: StepMetrics) -> None:
        if self._is_never_stale and not self._has_warned and metrics.agreement_mean > self._agreement_limit:
            self._has_warned = True
            self.display.log(
                f"step {step}: trainer and generator disagree about the tokens that were sampled, by a factor of "
                f"{metrics.agreement_mean:.8g} on average: what is trained is not quite what was sampled"
            )

    def score_failed(self, group: Group, sample: int, why: str) -> None:
        """Record a scoring failure as an event; each reason is logged once."""
        self.record_event("score_failed", prompt=group.prompt_id, row=group.place, sample=sample, why=why)
        if why not in self._logged_failures:
            self._logged_failures.add(why)
            self.display.log(f"{_with_place(group)} sample {sample} could not be scored: {why}")

    def score_retried(self, group: Group, samples: int, why: str) -> None:
        """Record that a prompt is sampled again, since ``samples`` of it could not be scored; the first is logged."""
        self.record_event("score_retried", prompt=group.prompt_id, row=group.place, samples=samples, why=why)
        if not self._has_told_retry:
            self._has_told_retry = True
            self.display.log(
                f"{_with_place(group)} is sampled again, since {samples} of its samples could not be scored: {why}; "
                f"score_retries in the metrics counts later ones"
            )

    def evaluated(self, step: int, when: str, result: Proportion) -> None:
        by_task = {f"held_out_accuracy/{task}": part.value for task, part in result.by_task.items()}
        late = {"held_out_timeouts": result.num_timeouts} if result.num_timeouts else {}
        self.metrics.write({"step": step, "held_out_accuracy": result.value} | by_task | late)
        self._alarms.evaluated(step, result.value)
        self.display.log(f"held-out accuracy {when}: {result}")

    def suite_evaluated(self, step: int, result: SuiteResult) -> None:
        """Record, write and show the result of a suite."""
        self.metrics.write({"step": step} | result.metrics)
        self.display.log(f"step {step}: {result}")
        with unless_full():
            write_result(self.run_dir.evaluations / step_name(step), result)

    def data_evaluated(self, step: int, when: str, metrics: dict[str, float], accuracy: Proportion | None) -> None:
        """Record loss on held-out data and, of pairs, preference accuracy."""
        record = metrics | ({"accuracy": accuracy.value} if accuracy else {})
        self.metrics.write({"step": step} | {f"held_out_{name}": value for name, value in record.items()})
        preferred = f", accuracy {accuracy}" if accuracy else ""
        self.display.log(f"held-out loss {when}: {metrics['loss']:.4f}{preferred}")


def _with_place(group: Group) -> str:
    """Prompt of a group, with its row in a data file."""
    return f"{group.prompt_id} ({group.place})" if group.place else group.prompt_id
