"""Selection of groups for a batch, and replacement of those without a signal.

Pure.

Groups come in the order of their admission, never of their arrival, so a batch does not prefer short answers.
"""

from collections.abc import Callable

from titan_rl.algorithms.batches.batching import scored_rollouts
from titan_rl.config.sections.schema import Config, FilterConfig
from titan_rl.data.types import Group, all_equal, correct

REASONS = ("no_signal", "too_easy", "too_hard", "all_truncated")
"""Why groups are left out, by the names that ledger and metrics have for it."""


def filter_reason(group: Group, limits: FilterConfig) -> str | None:
    """Reason why a trainable group is filtered, or None.

    Pass rates use the task's own rewards, the signal the trained ones before shaping; all scored samples count.

    Source: dynamic sampling, DAPO, arXiv 2503.14476, section 3.2: 0 < the group's right answers < G.
    """
    rollouts = scored_rollouts(group)
    if limits.all_truncated and all(rollout.status == "truncated" for rollout in rollouts):
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
