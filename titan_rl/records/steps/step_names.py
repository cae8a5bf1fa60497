"""What belongs to a step has its number in its name: ``step-000012``, here and nowhere else."""

import re
from collections.abc import Iterable


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step that a name without suffix is of; None for a name that is not ours, such as ``step-12``."""
    digits = re.fullmatch("step-([0-9]{6,})", name)
    step = int(digits[1]) if digits else None
    return step if step is not None and step_name(step) == name else None


def steps_of(names: Iterable[str]) -> list[int]:
    """The steps among these names, in order; other names are passed over."""
    return sorted(step for name in names if (step := step_of(name)) is not None)
