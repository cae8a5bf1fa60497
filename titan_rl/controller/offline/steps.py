"""What each step of a run without a generator is trained on, and what held-out data says of the weights.

A step's examples follow from its number, and from which rows met non-finite values by then, which is recorded
(records/steps/skipped_rows.py): so a run that goes on anywhere, and a trainer that is repaired, draws the same again.
The trainer is asked, and nothing is decided here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from titan_rl.algorithms.base import Algorithm
from titan_rl.algorithms.batches.batching import data_batch
from titan_rl.algorithms.offline.kto import with_zero
from titan_rl.algorithms.offline.sft import SFT
from titan_rl.config.sections.schema import Config
from titan_rl.controller.loop.interface import HeldOut
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.rows.datasets import Dataset
from titan_rl.data.rows.examples import Example, as_pairs, label_of, mismatched
from titan_rl.data.types import Batch, Layout, Row, StepMetrics
from titan_rl.mesh.control.trainer_repair import TrainerMesh
from titan_rl.mesh.members.trainers import Trainers
from titan_rl.records.statistics import Proportion

_ACCURACY, _TIES, _LOG_RATIO = "rewards/accuracies", "rewards/ties", "log_ratio"
_JUDGE = "dpo"
"""By whose metrics labelled answers are compared, two and two."""
Trainer = TrainerMesh | Trainers


class DataSteps:
    """Batches of each step from a dataset. Pure but for calls to the trainer."""

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        layout: Layout,
        dataset: Dataset,
        is_left_out: Callable[[str, int], bool],
    ):
        """``is_left_out``: whether the row at a place has no part in a step."""
        self.config, self.algorithm, self.layout, self.dataset = config, algorithm, layout, dataset
        self._is_left_out = is_left_out

    @property
    def _is_labelled(self) -> bool:
        return self.algorithm.trains_on == "labels"

    def position(self, step: int) -> int:
        """Examples that all steps up to this one have drawn."""
        return step * self.config.data.examples_per_step

    def examples(self, step: int) -> list[Example]:
        count = self.config.data.examples_per_step
        drawn = self.dataset.draw(self.position(step - 1), count, self.config.run.seed)
        return [example for example in drawn if not self._is_left_out(example.place, step)]

    async def batch(self, trainer: Trainer, step: int) -> Batch:
        return self._pack(await self._with_zero(trainer, self.examples(step)))

    async def train(self, trainer: Trainer, step: int) -> tuple[Batch, StepMetrics | NonfiniteBatch]:
        """A step, and what it was trained on. The trainer must be at the step before."""
        if not self.examples(step):
            return self._pack([]), NonfiniteBatch("all of its rows are left out", [], [], 0)
        batch = await self.batch(trainer, step)
        [result] = await trainer.train([batch], step)
        return batch, result

    def sft_rows(self) -> list[list[list[Row]]]:
        """Of the supervised steps before the first: on chosen, or desirable, answers, in an order of their own."""
        settings, algorithm = self.config.sft, SFT()
        source, size, seed = self.dataset.good(), settings.examples_per_step, self.config.run.seed
        drawn = (source.draw(step * size, size, seed, stream="sft") for step in range(settings.steps))
        steps = (list(map(_demonstration, examples)) for examples in drawn)
        return [data_batch(examples, algorithm, self.config, self.layout).rows for examples in steps]

    # held-out data

    async def held_out(self, trainer: Trainer) -> HeldOut:
        examples = self.dataset.held_out
        metrics = await trainer.evaluate(self._pack(await self._with_zero(trainer, examples)))
        means = self.means(metrics, examples)
        return HeldOut({"loss": metrics.loss} | means, await self._accuracy(trainer, means))

    async def _accuracy(self, trainer: Trainer, means: dict[str, float]) -> Proportion | None:
        """Of labelled answers, of those to the same question."""
        pairs: Sequence[Example] = self.dataset.held_out
        if self._is_labelled:
            pairs = as_pairs(self.dataset.held_out, self.layout.row_tokens)
        if self._is_labelled and pairs:
            batch = self._pack(pairs)
            means = _means(await trainer.evaluate(batch, _JUDGE), {"": len(pairs)})
        if _ACCURACY not in means or not pairs or self.algorithm.trains_on == "demonstrations":
            return None
        correct, ties = (round(means[name] * len(pairs)) for name in (_ACCURACY, _TIES))
        return Proportion(correct, len(pairs), num_ties=ties)

    # numbers

    def means(self, metrics: StepMetrics, examples: Sequence[Example]) -> dict[str, float]:
        """Of what a loss counts, by example and not by token; of chosen or rejected answers, by those alone."""
        if self.algorithm.trains_on == "demonstrations":
            return metrics.loss_metrics
        counts = {"": len(examples)}
        if self._is_labelled:
            chosen = sum(label_of(example) > 0 for example in examples)
            counts |= {"/chosen": chosen, "/rejected": len(examples) - chosen}
        return _means(metrics, counts)

    def _pack(self, examples: Sequence[Example]) -> Batch:
        return data_batch(examples, self.algorithm, self.config, self.layout)

    async def _with_zero(self, trainer: Trainer, examples: Sequence[Example]) -> Sequence[Example]:
        """Labelled examples with what KTO measures by other rows: its z, of the weights as they are."""
        if not self._is_labelled:
            return examples
        others = mismatched(examples, self.dataset.train, self.layout.row_tokens)
        metrics = await trainer.evaluate(self._pack(others)) if others else StepMetrics()
        divergence = _means(metrics, {"": len(others)}).get(_LOG_RATIO, 0.0)
        # with a zero that is no number all samples would be at fault: the step itself tells whose are not finite
        zero = max(0.0, divergence) if math.isfinite(divergence) else 0.0
        return [_with_advantage(example, with_zero(label_of(example), zero)) for example in examples]


def _means(metrics: StepMetrics, counts: dict[str, int]) -> dict[str, float]:
    """``counts``: how many a sum is over, by the end of its name."""
    ends = sorted(counts, key=len, reverse=True)
    means = {}
    for name, mean in metrics.loss_metrics.items():
        count = counts[next(end for end in ends if name.endswith(end))]
        means[name] = mean * metrics.num_trained_tokens / max(count, 1)
    return means


def _with_advantage(example: Example, advantage: float) -> Example:
    return replace(example, samples=tuple(replace(sample, advantage=advantage) for sample in example.samples))


def _demonstration(example: Example) -> Example:
    return _with_advantage(replace(example, samples=example.samples[:1]), 1.0)
