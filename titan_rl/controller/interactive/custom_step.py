"""One step of a custom loop, built from the controller's sample, train and publish.

    sample ─▶ advantages of one's own ─▶ batch ─▶ forward_backward ─▶ optim_step ─▶ publish

Nothing is kept from the records: rollouts, with the advantages that they were given, ledger, metrics and checkpoints
are those of any run. So it is resumed, repaired and replayed as any run is.
"""

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.controller.loop.controller import Controller
from titan_rl.controller.loop.reporting import PhaseTimer, StepReport
from titan_rl.controller.loop.rollout_queue import Collected
from titan_rl.controller.session import Session
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.types import Batch, Group, StepMetrics
from titan_rl.trainer.roles.names import learned_role


class OrderError(RuntimeError):
    """A verb came before the one that it needs; says which that is."""


class CustomStep:
    """One step of a custom loop. Errors of all but ``batch``: OrderError; what ends a run."""

    def __init__(self, session: Session):
        """Errors: ConfigError where a loop cannot be one's own."""
        if not isinstance(session.controller, Controller):
            raise ConfigError("a run on data samples nothing: step() is its loop")
        settings = session.config.algorithm
        only = "a loop of your own makes one update a step, of the policy alone, and"
        if settings.updates_per_batch > 1:
            raise ConfigError(f"{only} algorithm.updates_per_batch = {settings.updates_per_batch}")
        if (role := learned_role(session.config, session.checked.algorithm.needs)) is not None:
            raise ConfigError(f"{only} the {role} learns beside it: leave that out, or take step()")
        self.controller: Controller = session.controller
        self._timer = PhaseTimer()
        self._collected: Collected | None = None
        self._batch: Batch | None = None
        self._metrics: StepMetrics | None = None
        self._is_applied = False

    @property
    def _sampled(self) -> Collected:
        if self._collected is None:
            raise OrderError("nothing is sampled yet: sample comes first")
        return self._collected

    async def sample(self) -> list[Group]:
        """Groups of the step; the same ones on each call before the update."""
        if self._is_applied:
            raise OrderError("the update of this step is made: publish comes next")
        if self._collected is None:
            self._collected = await self.controller.sample()
            self._timer.end("wait")
        return self._collected.groups

    def batch(self, groups: list[Group]) -> Batch:
        """Errors: ValueError unless these are the groups that were sampled, with advantages for all samples or none."""
        if [getattr(group, "prompt_id", None) for group in groups] != [each.prompt_id for each in self._sampled.groups]:
            raise ValueError(
                "these are not the groups of sample(), all of them in their order: to leave one out, give its rollouts "
                "an advantage of 0"
            )
        for group in groups:
            _check_advantages(group)
        [batch] = self.controller.batches(groups)
        return batch

    async def forward_backward(self, batch: Batch) -> StepMetrics | NonfiniteBatch:
        """Compute gradients of a batch; another call replaces them."""
        if self._is_applied:
            raise OrderError("the update of this step is made: publish comes next")
        self._batch = batch
        return await self.controller.trainer.forward_backward(batch)

    async def optim_step(self) -> StepMetrics | None:
        if self._batch is None or self._is_applied:
            raise OrderError("there are no gradients: forward_backward comes first")

        async def update(step: int) -> list[StepMetrics | NonfiniteBatch]:
            return [await self.controller.trainer.optim_step(step)]

        self._metrics = await self.controller.train(self._sampled, update)
        self._is_applied = True
        self._timer.end("train")
        return self._metrics

    async def publish(self) -> None:
        """Publish the weights of the step, unless its update was skipped as non-finite."""
        if not self._is_applied or self._batch is None:
            raise OrderError("there is no update to publish: forward_backward and optim_step come first")
        progress = self.controller.progress
        progress.seconds_training += self._timer.total
        if self._metrics is not None:
            step = progress.step
            await self.controller.publish(StepReport(step, self._sampled, [self._batch], self._metrics, self._timer))


def _check_advantages(group: Group) -> None:
    """Errors: ValueError for advantages that are no finite numbers, or that only some samples have."""
    given = {rollout.sample: rollout.advantage for rollout in group.rollouts if rollout.advantage is not None}
    for sample, advantage in given.items():
        whose = f"the advantage of {group.prompt_id} sample {sample}"
        try:
            is_finite = bool(np.isfinite(np.asarray(advantage, np.float64)).all())
        except (TypeError, ValueError):
            raise ValueError(f"{whose} is {advantage!r:.80}: give a number, or one for each token") from None
        if not is_finite:
            raise ValueError(f"{whose} is {advantage!r:.80}: give finite numbers")
    if given and (missing := [rollout.sample for rollout in group.rollouts if rollout.sample not in given]):
        raise ValueError(
            f"sample {missing[0]} of {group.prompt_id} has no advantage, and {min(given)} has: give one to each, or to "
            f"none"
        )
