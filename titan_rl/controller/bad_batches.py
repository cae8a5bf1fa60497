"""Batches whose loss or gradient is not finite: how many in a row, and what follows."""


class BadStreak:
    """Batches in a row with bad numbers. A step that is done again after a return to before it does not end the row."""

    def __init__(self) -> None:
        self.length = self._newest = 0

    def bad(self, step: int) -> None:
        self.length, self._newest = self.length + 1, max(step, self._newest)

    def good(self, step: int) -> None:
        if step >= self._newest:
            self.length = 0


class BadNumbersError(RuntimeError):
    """Too many batches in a row whose loss or gradient was not finite."""
