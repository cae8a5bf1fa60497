"""Batches for the trainer from groups of rollouts: which are trained on, their advantages, then rows. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from numbers import Real
from typing import Any, get_args

import numpy as np

from titan_rl.algorithms.arithmetic.advantages import check_rewards
from titan_rl.algorithms.base import Algorithm
from titan_rl.algorithms.batches.shaping import shaped
from titan_rl.algorithms.offline.sft import SFT
from titan_rl.config.errors import NamedFault
from titan_rl.config.mixture import Teachers, teachers_of
from titan_rl.config.plugins import what_happened
from titan_rl.config.sections.schema import AlgorithmConfig, Config, FilterConfig
from titan_rl.data.batches.packing import pack, token_weights
from titan_rl.data.numbers import all_equal
from titan_rl.data.rows.examples import Example
from titan_rl.data.types import Batch, Cutoff, Group, Layout, Rollout, Sample, correct, num_model_tokens

FILTER_REASONS = ("no_signal", "too_easy", "too_hard", "all_truncated")
"""Why groups that could be trained on are left out, by the names that ledger and metrics have for it."""


def scored_rollouts(group: Group) -> list[Rollout]:
    """Rollouts with advantages: no timeouts, no infrastructure failures, at least one trained token."""
    written = [rollout for rollout in group.rollouts if rollout.num_model_tokens]
    return [rollout for rollout in written if rollout.is_scored]


def usable_rollouts(group: Group, config: AlgorithmConfig) -> list[Rollout]:
    """Scored rollouts that may reach the loss."""
    return [rollout for rollout in scored_rollouts(group) if _is_usable(rollout, config)]


def _is_usable(rollout: Rollout, config: AlgorithmConfig) -> bool:
    return rollout.status == "ok" or config.train_truncated


def comparable_rollouts(group: Group, config: AlgorithmConfig) -> list[Rollout]:
    """Usable rollouts with a peer for comparison, of the same seat if an episode has several."""
    return [rollout for rollout in _with_peers(scored_rollouts(group)) if _is_usable(rollout, config)]


def _with_peers(rollouts: list[Rollout]) -> list[Rollout]:
    count = Counter(rollout.seat for rollout in rollouts)
    return [rollout for rollout in rollouts if count[rollout.seat] >= 2]


def discard_reason(group: Group, config: AlgorithmConfig) -> str | None:
    """Reason why a group is not trained on, or None."""
    if group.refused:
        return group.refused
    if comparable_rollouts(group, config):
        return None
    reasons = [_reason(rollout) for rollout in group.rollouts]
    faults = ("infra_error", "timeout", *get_args(Cutoff))
    return "unasked" if "unasked" in reasons and not {*faults} & {*reasons} else max(faults, key=reasons.count)


def _reason(rollout: Rollout) -> str:
    """Why a rollout that is not usable is none: its status, or that the model wrote no token of it."""
    return "unasked" if rollout.status == "ok" and not rollout.num_model_tokens else rollout.status


def sample_outcomes(group: Group, config: AlgorithmConfig, num_samples: int) -> list[str | None]:
    """Discard reason of each sample, by number; None if it may be trained on (records/ledger/ledger.py)."""
    if group.refused:
        return [group.refused] * num_samples
    outcomes: dict[int, str | None] = {rollout.sample: _reason(rollout) for rollout in group.rollouts}
    outcomes |= {rollout.sample: "no_peers" for rollout in usable_rollouts(group, config)}
    outcomes |= {rollout.sample: None for rollout in comparable_rollouts(group, config)}
    return [outcomes.get(sample, "infra_error") for sample in range(num_samples)]


def filter_reason(group: Group, limits: FilterConfig) -> str | None:
    """Reason why a trainable group is filtered, or None.

    Pass rates use the task's own rewards, the signal the trained ones before shaping; all scored samples count.

    Source: dynamic sampling, DAPO, arXiv 2503.14476, section 3.2: 0 < the group's right answers < G.
    """
    rollouts = scored_rollouts(group)
    if limits.all_truncated and all(rollout.status != "ok" for rollout in rollouts):
        return "all_truncated"
    pass_rate = sum(correct(rollout.true_reward) for rollout in rollouts) / len(rollouts)
    if pass_rate < limits.min_pass_rate:
        return "too_hard"
    if pass_rate > limits.max_pass_rate:
        return "too_easy"
    if limits.no_signal and all_equal(rollout.reward for rollout in rollouts):
        return "no_signal"
    return None


class Selection:
    """Batch as it fills up: ``size`` places, each for a group that stays.

    Groups come in the order of their admission, never of their arrival, so a batch does not prefer short answers.

    A group that is filtered gives its place to another, up to ``max_refills`` x ``size`` times; then its place stays
    empty, and the batch is that much smaller. It has a group for each optimizer step in any case: where too few stay,
    the first ones are taken back whose place would be empty.
    """

    def __init__(self, config: Config):
        self.size, self.num_wanted = config.rollout.prompts_per_step, config.algorithm.updates_per_batch
        self._num_refills = config.filter.max_refills * self.size
        self._reason: Callable[[Group], str | None] = lambda group: filter_reason(group, config.filter)
        self._sampled: list[tuple[Group, str | None]] = []
        self._in_place: list[int] = []
        """Of those, the numbers of the ones that nobody was sampled in place of."""

    @property
    def is_complete(self) -> bool:
        return len(self._in_place) == self.size

    def put(self, group: Group) -> bool:
        """Add a group; returns false if a replacement must be sampled."""
        self._sampled.append((group, self._reason(group)))
        is_replaced = self._sampled[-1][1] is not None and self._num_refills > 0
        if is_replaced:
            self._num_refills -= 1
        else:
            self._in_place.append(len(self._sampled) - 1)
        return not is_replaced

    def chosen(self) -> list[Group]:
        """Groups of a complete batch to train on."""
        return [self._sampled[number][0] for number in self._chosen()]

    def filtered(self) -> dict[str, list[Group]]:
        """Filtered groups of a complete batch, by reason."""
        chosen, by_reason = set(self._chosen()), {}
        for number, (group, reason) in enumerate(self._sampled):
            if number not in chosen:
                by_reason.setdefault(reason, []).append(group)
        return by_reason

    def _chosen(self) -> list[int]:
        selected = [number for number in self._in_place if self._sampled[number][1] is None]
        empty = [number for number in self._in_place if self._sampled[number][1] is not None]
        return sorted(selected + empty[: max(self.num_wanted - len(selected), 0)])


def checked_advantages(algorithm: Algorithm, rollouts: list[Rollout]) -> list[float | np.ndarray]:
    """Advantages of the algorithm, one for each rollout.

    Errors: ValueError for wrong counts or shapes; whatever the algorithm raises."""
    values = algorithm.advantages(rollouts)
    if not isinstance(values, Sequence | np.ndarray) or len(values) != len(rollouts):
        what = f"{len(values)} of them" if isinstance(values, Sequence | np.ndarray) else type(values).__name__
        raise ValueError(f"a list or array with one for each of {len(rollouts)} rollouts is wanted, not {what}")
    return [_advantage(value, rollout) for value, rollout in zip(values, rollouts, strict=True)]


def _advantage(value: Any, rollout: Rollout) -> float | np.ndarray:
    if isinstance(value, Real):
        return float(value)
    count = rollout.num_model_tokens
    if isinstance(value, np.ndarray) and value.shape == (count,) and value.dtype.kind in "fiub":
        return value
    what = f"an array {value.shape} of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise ValueError(f"each must be a number or an array of {count} (the tokens that the model wrote), not {what}")


def _advantages_by_seat(algorithm: Algorithm, rollouts: list[Rollout]) -> list[float | np.ndarray]:
    """Who plays white is compared with others that play white."""
    values: dict[int, float | np.ndarray] = {}
    for seat in dict.fromkeys(rollout.seat for rollout in rollouts):
        places = [place for place, rollout in enumerate(rollouts) if rollout.seat == seat]
        check_rewards(peers := [rollouts[place] for place in places])
        advantages = checked_advantages(algorithm, peers)
        values |= zip(places, advantages, strict=True)
    return [values[place] for place in range(len(rollouts))]


def _custom_advantages(rollouts: list[Rollout]) -> list[float | np.ndarray]:
    """By a loop of one's own; empty if it gave none. Errors: ValueError if it gave some."""
    advantages = {rollout.sample: rollout.advantage for rollout in rollouts if rollout.advantage is not None}
    if advantages and (missing := [rollout.sample for rollout in rollouts if rollout.sample not in advantages]):
        raise ValueError(
            f"sample {missing[0]} has no advantage, and {min(advantages)} has: give one to each, or to none"
        )
    return list(advantages.values())


def _samples(
    prompt_id: str, rollouts: list[Rollout], algorithm: Algorithm, compared: list[Rollout] | None = None
) -> list[Sample]:
    """``compared``: all that advantages are made of, these among them. Errors: NamedFault, with the prompt."""
    compared = rollouts if compared is None else compared
    try:
        advantages = _custom_advantages(rollouts)
        if not advantages:
            numbers = [rollout.sample for rollout in compared]
            values = dict(zip(numbers, _advantages_by_seat(algorithm, compared), strict=True))
            advantages = [values[rollout.sample] for rollout in rollouts]
    except Exception as error:  # a user's algorithm may raise anything
        raise NamedFault(f"advantages of {prompt_id}: {what_happened(error)}") from error
    return [
        Sample(
            *(rollout.tokens, rollout.provenance, rollout.logprobs, advantage, rollout.prompt_id, rollout.sample),
            mask=rollout.mask,
            penalties=rollout.penalties,
            starts=tuple(turn.start for turn in rollout.turns) if rollout.penalties else (),
            routed_experts=rollout.routed_experts,
            reprompt=rollout.reprompt,
            images=rollout.images,
        )
        for rollout, advantage in zip(rollouts, advantages, strict=True)
    ]


def _branches(sample: Sample, rollout: Rollout) -> list[Sample]:
    """One for each conversation, which is all that its tokens see."""
    branches, begin = [], 0
    for number, (start, stop) in enumerate(rollout.spans):
        span, provenance = slice(start, stop), sample.provenance[start:stop]
        end = begin + num_model_tokens(provenance)
        advantage = sample.advantage[begin:end] if isinstance(sample.advantage, np.ndarray) else sample.advantage
        columns = dict(tokens=sample.tokens[span], provenance=provenance, logprobs=sample.logprobs[span])
        if sample.routed_experts is not None:
            columns["routed_experts"] = sample.routed_experts[span]
        mask = sample.mask and sample.mask.take(np.arange(start, stop))
        starts = tuple(place - start for place in sample.starts if start <= place < stop)
        images = tuple(image.moved(-start) for image in sample.images if start <= image.start < stop)
        own = dict(mask=mask, starts=starts, images=images)
        branches.append(replace(sample, **columns, **own, advantage=advantage, branch=number))
        begin = end
    return branches


def _group_samples(group: Group, algorithm: Algorithm, config: Config, teachers: Teachers | None) -> list[Sample]:
    """Advantages are made of shaped rewards, of samples that are not trained on, too; an outcome is what was verified,
    whatever an answer looks like."""
    scored = scored_rollouts(group)
    compared = _with_peers(scored) or scored
    rollouts = [rollout for rollout in compared if _is_usable(rollout, config.algorithm)]
    samples = _samples(group.prompt_id, rollouts, algorithm, shaped(compared, config))
    if teachers is not None and samples:
        samples = with_task(samples, group.task, teachers)
    if algorithm.needs.implicit_reward:
        outcomes = [rollout.outcome for rollout in rollouts]
        samples = [replace(sample, outcome=outcome) for sample, outcome in zip(samples, outcomes, strict=True)]
    return [branch for sample, rollout in zip(samples, rollouts, strict=True) for branch in _branches(sample, rollout)]


def with_task(samples: list[Sample], task: str, teachers: Teachers) -> list[Sample]:
    """Samples with the numbers of their task and its teacher. Errors: NamedFault, with the prompt, where there are
    several teachers and the task has none."""
    if task not in teachers.of_task:
        if len(teachers.paths) > 1:
            named = f"{task!r}, which the mixture has not" if task else "no task of the mixture"
            raise NamedFault(f"{samples[0].prompt_id} is of {named}: each task has a teacher of its own")
        return samples
    number, teacher = list(teachers.of_task).index(task), teachers.of_task[task]
    return [replace(sample, task=number, teacher=teacher) for sample in samples]


def update_parts(groups: list[Group], config: AlgorithmConfig) -> list[list[Group]]:
    """Split of a batch into the groups of each optimizer step."""
    parts = np.array_split(np.arange(len(groups)), config.updates_per_batch)
    return [[groups[index] for index in part] for part in parts]


def step_batches(groups: list[Group], algorithm: Algorithm, config: Config, layout: Layout) -> list[Batch]:
    """Batches of a step, one for each optimizer update, normalized by its own trained tokens.

    Errors: NamedFault, with the prompt, if the algorithm has no advantages for its rollouts, or its task no teacher.
    """
    aggregation, max_new_tokens = config.algorithm.aggregation, config.rollout.max_new_tokens
    teachers = teachers_of(config) if algorithm.needs.teacher else None
    return [
        pack(
            [_group_samples(group, algorithm, config, teachers) for group in part],
            **asdict(layout),
            share_prefix=config.rollout.share_prefix,
            set_still_apart=algorithm.is_still_without_advantage and layout.row_multiple == 1,  # no pipeline
            weigh=lambda samples: token_weights(samples, aggregation, max_new_tokens),
        )
        for part in update_parts(groups, config.algorithm)
    ]


def sft_batches(rollouts: list[Rollout], config: Config, layout: Layout) -> list[Batch]:
    """Batches of supervised steps, every example alike. Errors: ValueError if one is longer than a row."""
    longest, size = max(len(rollout.tokens) for rollout in rollouts), config.sft.examples_per_step
    if longest > layout.row_tokens:
        raise ValueError(f"a demonstration has {longest} tokens: raise training.seq_len, which is {layout.row_tokens}")
    groups = [_samples(rollout.prompt_id, [rollout], SFT()) for rollout in rollouts]
    return [
        pack(
            groups[begin : begin + size],
            **asdict(layout),
            share_prefix=False,
            weigh=lambda samples: token_weights(samples, "token", 1),
        )
        for begin in range(0, len(groups), size)
    ]


def data_batch(examples: Sequence[Example], algorithm: Algorithm, config: Config, layout: Layout) -> Batch:
    """Batch of an offline step, from records of a data file.

    Samples of pairs and labels weigh alike, whatever their length; those of an example share a row."""
    aggregation = config.algorithm.aggregation if algorithm.trains_on == "demonstrations" else "sequence"
    batch = pack(
        [list(example.samples) for example in examples],
        **asdict(layout),
        share_prefix=config.rollout.share_prefix,
        keep_together=True,
        weigh=lambda samples: token_weights(samples, aggregation, config.rollout.max_new_tokens),
    )
    return replace(batch, has_signal=True)
