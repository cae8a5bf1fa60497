"""Prompts on their way into a batch: admitted in order, sampled side by side, collected in the order of admission.

What a batch holds does not depend on who was faster. A group that cannot be trained on, or that ``[filter]`` leaves
out, is discarded by name, and its slot is free for another. One that met an infrastructure failure is sampled
again.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Protocol

from titan_rl.algorithms.batches.batching import Selection, discard_reason, sample_outcomes
from titan_rl.config.errors import NamedFault
from titan_rl.config.sections.schema import Config
from titan_rl.controller.loop.admission import Admission
from titan_rl.data.types import Group, Prompt, Sampling, Status
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.environments.rollout.decoding import decoding_of
from titan_rl.mesh.control.dispatcher import POISON, Dispatcher
from titan_rl.mesh.control.poison_prompts import ConsecutiveFailures
from titan_rl.mesh.control.weight_sync import WeightSync
from titan_rl.mesh.processes.background import retrieve_exception
from titan_rl.mesh.processes.deadlines import DeadlineError
from titan_rl.records.ledger.ledger import Ledger, Outcomes

_MAX_DISCARDS = 20
"""Batches' worth of groups in a row that cannot be trained on, after which the run gives up. One that is filtered could
have been."""

_LOOK_SECONDS = 1.0
"""Between two looks whether the run cannot go on, whatever the first group waits for."""


@dataclass(frozen=True)
class InFlight:
    prompt: Prompt
    group: asyncio.Task[Group]


@dataclass(frozen=True)
class Collected:
    """A batch: the groups to train on, and those that were sampled for it and filtered, by reason."""

    groups: list[Group]
    filtered: dict[str, list[Group]]

    @property
    def sampled(self) -> list[Group]:
        """All of them."""
        return [*self.groups, *(group for groups in self.filtered.values() for group in groups)]


class OnScoreFailed(Protocol):
    """Takes a sample that could not be scored, by its group and number, and why."""

    def __call__(self, group: Group, sample: int, why: str, /) -> None: ...


class OnScoreRetried(Protocol):
    """Takes a group that is sampled again, the number of its samples without a score, and why the first has none."""

    def __call__(self, group: Group, samples: int, why: str, /) -> None: ...


class RolloutQueue:
    """Owns who is in flight and who comes next, and settles each sample in the ledger."""

    def __init__(
        self,
        config: Config,
        stream: PromptStream,
        ledger: Ledger,
        dispatcher: Dispatcher,
        admission: Admission,
        weights: WeightSync,
        *,
        max_tokens: int,
        reprompt_template: str = "",
        on_score_failed: OnScoreFailed,
        on_score_retried: OnScoreRetried = lambda *_: None,
    ):
        """``max_tokens``: of a rollout, prompt included. ``reprompt_template``: of a self-teacher, where the algorithm
        has one. ``on_score_failed`` hears of samples without a score, ``on_score_retried`` of prompts that are sampled
        again for such."""
        self.config, self.stream, self.ledger, self.dispatcher = config, stream, ledger, dispatcher
        self.admission, self.weights = admission, weights
        self.on_score_failed, self.on_score_retried = on_score_failed, on_score_retried
        self.max_tokens, self.reprompt_template = max_tokens, reprompt_template
        self._in_flight: deque[InFlight] = deque()
        self._backlog: deque[Prompt] = deque()
        """Issued before, and to be sampled first."""
        self._num_discarded_in_a_row = 0
        self._ahead: asyncio.Task[None] | None = None
        """Admits beside the training of a batch."""

    @property
    def num_waiting(self) -> int:
        """Prompts that are sampled before any new one is."""
        return len(self._backlog)

    @property
    def _sampling(self) -> Sampling:
        rollout = self.config.rollout
        lengths = rollout.max_new_tokens, rollout.temperature, self.max_tokens, rollout.max_turns
        replays = self.config.algorithm.routing == "replay"
        return Sampling(
            rollout.group_size,
            *lengths,
            decoding=decoding_of(rollout),
            routed_experts=replays,
            reprompt_template=self.reprompt_template,
        )

    def restart(self, backlog: deque[Prompt], version: int) -> None:
        """The run goes on at a version: nothing is in flight, and these prompts come first. Settings may be others."""
        self.cancel()
        self._in_flight.clear()
        self._backlog = backlog
        rollout = self.config.rollout
        self.admission.limit(rollout.prompts_per_step, rollout.max_staleness)
        self.admission.restart(version)

    def cancel(self) -> None:
        for task in (in_flight.group for in_flight in self._in_flight):
            task.cancel()
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    # a batch

    async def collect(self) -> Collected:
        """The next batch. Errors: NamedFault if too many groups in a row cannot be trained on; EveryPromptFails; an
        actor's fault."""
        self._end_ahead()
        selection = Selection(self.config)
        while not selection.is_complete:
            group = await self._next_group()
            self._report_failures(group)
            if (reason := discard_reason(group, self.config.algorithm)) is not None:
                self._discard(group, reason)
                continue
            self._num_discarded_in_a_row = 0
            if not selection.put(group):
                self.admission.give_back()
        batch = Collected(selection.chosen(), selection.filtered())
        filtered = (self._outcomes(groups, reason) for reason, groups in batch.filtered.items())
        self.ledger.settle({name: outcome for outcomes in filtered for name, outcome in outcomes.items()})
        self._ahead = asyncio.create_task(self._admit_ahead())
        self._ahead.add_done_callback(retrieve_exception)
        return batch

    def give_back_batch(self) -> None:
        """None of the last batch was trained, so that another must make its step."""
        self.admission.give_back(self.config.rollout.prompts_per_step)

    async def _next_group(self) -> Group:
        """The one that was admitted first; meanwhile, whatever may be admitted is."""
        while True:
            self.dispatcher.faults.check()
            self._admit()
            first = self._in_flight[0].group if self._in_flight else None
            if first is not None and first.done():
                return self._in_flight.popleft().group.result()
            pending = self.weights.pending
            waited_for = {task for task in (first, pending) if task}
            await asyncio.wait(waited_for, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if pending is not None and pending.done():
                await self.weights.until_live()

    async def _admit_ahead(self) -> None:
        """Once the version on its way is live, whose slots would stay empty until the next ``collect`` otherwise: where
        sampling is faster than training, two batches would then be sampled at once, and none beside the training of
        every second step."""
        if self.weights.pending is not None:
            await asyncio.wait([self.weights.pending])  # who owns it tells what it failed of
        self._admit()

    def _end_ahead(self) -> None:
        """Errors: those of admitting."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead.cancel():
            ahead.result()

    def _admit(self) -> None:
        prompts, new = [], []
        while self.admission.can_admit():
            self.admission.admit()
            if self._backlog:
                prompts.append(self._backlog.popleft())
            else:
                new.append(next(self.stream))
                prompts.append(new[-1])
        if new:
            self.ledger.issue([prompt.id for prompt in new], self.config.rollout.group_size)
        for prompt in prompts:
            group = asyncio.create_task(self._sample(prompt))
            group.add_done_callback(retrieve_exception)  # the first that fails is told
            self._in_flight.append(InFlight(prompt, group))

    async def _sample(self, prompt: Prompt) -> Group:
        """A group, for people too."""
        retries, sample = self.config.rollout.max_retries, self.dispatcher.run_group
        on_retry = partial(self._count_retry, prompt)
        group = await sampled(sample, prompt, self._sampling, retries, self.dispatcher.faults, on_retry)
        return _with_prompt(group, prompt)

    def _count_retry(self, prompt: Prompt, group: Group) -> None:
        self.ledger.count_retry(group.prompt_id)
        if failed := [rollout for rollout in group.rollouts if rollout.status == "infra_error"]:
            self.on_score_retried(_with_prompt(group, prompt), len(failed), failed[0].failure)

    def _report_failures(self, group: Group) -> None:
        for rollout in group.rollouts:
            if rollout.failure:
                self.on_score_failed(group, rollout.sample, rollout.failure)

    def _discard(self, group: Group, reason: str) -> None:
        self.ledger.settle(self._outcomes([group]))
        self.admission.give_back()
        self._num_discarded_in_a_row += 1
        if self._num_discarded_in_a_row >= _MAX_DISCARDS * self.config.rollout.prompts_per_step:
            raise NamedFault(
                f"the last {self._num_discarded_in_a_row} groups were all discarded, the last for {reason}"
            )

    # the account

    def settle(self, trained: list[Group], bad: list[Group], step: int) -> None:
        """After a step's updates: whose samples were trained on, and whose were left out for non-finite values.

        Errors: LedgerError if the account does not add up.
        """
        self.ledger.settle(self._outcomes(trained), step)
        self.ledger.settle(self._outcomes(bad, "nonfinite"))
        self.ledger.check((len(self._in_flight) + len(self._backlog)) * self.config.rollout.group_size)

    def _outcomes(self, groups: list[Group], fault: str | None = None) -> Outcomes:
        """``fault``: why samples that could have been trained on were not."""
        size, algorithm = self.config.rollout.group_size, self.config.algorithm
        return {g.prompt_id: [reason or fault for reason in sample_outcomes(g, algorithm, size)] for g in groups}


def _with_prompt(group: Group, prompt: Prompt) -> Group:
    """The group, which tells people what was asked."""
    group.question, group.expected, group.task = prompt.text, prompt.answer, prompt.task
    group.place = prompt.entry.get("place", "")
    return group


_PAUSE_SECONDS = 0.5
"""After a first failure in an environment or a score, twice as long after the next: what it needs may be on its way
back."""

_SLOW = "no answer was in time; mend what is slow, or raise verifier.score_timeout, or verifier.step_timeout"


async def sampled(
    run_group: Callable[[Prompt, Sampling], Awaitable[Group]],
    prompt: Prompt,
    sampling: Sampling,
    max_retries: int,
    faults: ConsecutiveFailures,
    on_retry: Callable[[Group], None] = lambda group: None,
) -> Group:
    """A group, or what is left of the last attempt. ``on_retry`` takes what came of an attempt before each further one.

    Errors: EveryPromptFails if this is one prompt too many that nothing but one failure came of.
    """
    attempt, score_retries, began = 0, 0, time.monotonic()
    while True:
        try:
            group = await run_group(prompt, sampling)
        except DeadlineError as error:
            faults.record_failure(prompt.id, str(error), inf)  # no actor was available, which no prompt causes
            group = Group(prompt.id, [], refused="timeout")
        group.score_retries = score_retries
        is_whole = not group.refused and all(rollout.status != "infra_error" for rollout in group.rollouts)
        if is_whole and (why := _only_failure(group, "timeout")):
            faults.record_failure(prompt.id, f"{why}: {_SLOW}", began)
        if is_whole or group.refused == POISON:  # which was tried as often as it may be
            return group
        if attempt >= max_retries:
            if why := _only_failure(group, "infra_error"):
                faults.record_failure(prompt.id, why, began)
            return group
        if not group.refused:
            score_retries += 1
            await asyncio.sleep(_PAUSE_SECONDS * 2**attempt * faults.patience)
        attempt += 1
        on_retry(group)


def _only_failure(group: Group, status: Status) -> str:
    """The commonest, if all samples have this status."""
    if group.refused or not group.rollouts or any(rollout.status != status for rollout in group.rollouts):
        return ""
    [(failure, _)] = Counter(rollout.failure or status for rollout in group.rollouts).most_common(1)
    return failure
