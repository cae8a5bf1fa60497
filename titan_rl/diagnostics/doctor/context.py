"""One examination: what checks look at, made once when the first of them wants it."""

from dataclasses import dataclass, field
from pathlib import Path

from titan_rl.controller.preflight.checks import Checked
from titan_rl.data.types import Group
from titan_rl.diagnostics.doctor.actors_under_test import ActorsUnderTest, Reading
from titan_rl.diagnostics.doctor.check_errors import CheckSkipped
from titan_rl.diagnostics.doctor.probes.agreement import Limits, limits
from titan_rl.diagnostics.doctor.probes.bandit import Bandit, make_bandit
from titan_rl.diagnostics.doctor.probes.rewards import Earned, probe_rewards


@dataclass
class CheckContext:
    checked: Checked
    folder: Path
    started: ActorsUnderTest | None = None
    """None until actors are up."""
    lost: dict[str, str] = field(default_factory=dict)
    """Parts of the mesh that ended in an earlier check, and what is said of that."""
    _earned: Earned | None = None
    _groups: list[Group] = field(default_factory=list)
    _reading: Reading | None = None

    @property
    def limits(self) -> Limits:
        config, titan = self.checked.config, self.checked.titan
        return limits(
            *(config.generator.dtype, titan.training.mixed_precision_param),
            fp8=config.uses_fp8,
            batch_invariant=titan.debug.batch_invariant,
        )

    @property
    def actors(self) -> ActorsUnderTest:
        """The started actors, for checks that need some (``Check.needs``)."""
        assert self.started is not None, "this check says that it needs no actors"
        return self.started

    async def earned(self) -> Earned:
        """Rewards of answers of known worth. Errors: CheckSkipped."""
        if self._earned is None:
            self._earned = await probe_rewards(self.checked)
        return self._earned

    async def groups(self) -> list[Group]:
        """Answers to the run's own prompts under the weights that it begins with. Errors: CheckSkipped if none is of
        use."""
        if not self._groups:
            await self.actors.sync()
            sampled = await self.actors.sample_groups()
            self._groups = usable(sampled)
        return self._groups

    async def reading(self) -> Reading:
        """Trainer's reading of ``groups``."""
        if self._reading is None:
            self._reading = await self.actors.read(self.actors.batch(await self.groups()))
        return self._reading

    async def bandit(self) -> Bandit:
        """A batch of the check's own, sampled as the trainer has it now. Errors: CheckSkipped."""
        return await make_bandit(self.actors, await self.groups())


def usable(groups: list[Group]) -> list[Group]:
    """Groups with at least two trainable answers. Errors: CheckSkipped."""
    for group in groups:
        group.rollouts = [rollout for rollout in group.rollouts if rollout.is_scored]
    trainable = [group for group in groups if len(group.rollouts) > 1]
    if not trainable:
        refused = next((group.refused for group in groups if group.refused), "no answer was scored")
        raise CheckSkipped(f"no answer to the run's prompts can be trained on: {refused}")
    return trainable
