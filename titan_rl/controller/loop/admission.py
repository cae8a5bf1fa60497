"""Admission of groups: limits how far sampling runs ahead of training. Pure counting."""


class Admission:
    """Slots for groups: with version v live, groups for the batches of steps v + 1 to v + 1 + max_staleness may run.

    A group admitted under version v is trained no later than the step that makes version v + max_staleness + 1, so
    no sample lags more than ``max_staleness`` versions behind the weights that it trains.
    """

    def __init__(self, groups_per_step: int, max_staleness: int, version: int = 0):
        self.limit(groups_per_step, max_staleness)
        self.restart(version)

    def limit(self, groups_per_step: int, max_staleness: int) -> None:
        """Set the bounds; ``restart`` comes next."""
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness

    def restart(self, version: int) -> None:
        """Reset to a version with nothing in flight. No group is admitted until it is live."""
        self.version: int | None = None
        self._admitted = version * self.groups_per_step

    @property
    def num_free(self) -> int:
        if self.version is None:  # what the generators hold by now is another one
            return 0
        return (self.version + 1 + self.max_staleness) * self.groups_per_step - self._admitted

    def can_admit(self) -> bool:
        return self.num_free > 0

    def admit(self) -> None:
        assert self.can_admit(), "admitted beyond the staleness bound"
        self._admitted += 1

    def give_back(self, count: int = 1) -> None:
        """Free the slots of discarded groups."""
        self._admitted -= count

    def advance(self, version: int) -> None:
        """Admit groups of a version that went live."""
        self.version = version
