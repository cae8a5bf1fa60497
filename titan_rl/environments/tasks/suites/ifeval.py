"""IFEval: rows with ``prompt``, ``instruction_id_list`` and ``kwargs``. Right is what keeps to all constraints.

Constraints are verified by constraints.py on the whole answer (IFEval's strict accuracy of prompts). A row with a
constraint of the set that is not verified there, a response's language, is left out and counted.
"""

from collections.abc import Mapping
from typing import Any

from titan_rl.config.load import ConfigError, nearest
from titan_rl.data.rows.row_fields import shown
from titan_rl.data.types import Prompt
from titan_rl.environments.prompts.row_files import DataRow
from titan_rl.environments.tasks.suites.base import SuiteTask, text_column
from titan_rl.environments.tasks.suites.constraints import CONSTRAINTS, UNVERIFIED, arguments_of, keeps


class IFEvalTask(SuiteTask):
    """Task of instructions with verifiable constraints."""

    VOTES = False

    def _row(self, place: str, columns: dict[str, Any]) -> DataRow | None:
        asked, constraints = text_column(place, columns, "prompt"), _constraints(place, columns)
        known = {*CONSTRAINTS, *UNVERIFIED}
        if (unknown := next((name for name, _ in constraints if name not in known), None)) is not None:
            raise ConfigError(f"{place}: the instruction {unknown!r:.80} is unknown: {nearest(unknown, known)}")
        if any(name in UNVERIFIED for name, _ in constraints):
            return None
        for identifier, arguments in constraints:
            try:
                keeps("text", identifier, arguments)
            except (TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"{place}: 'kwargs' of {identifier}: {error}; correct the row") from None
        return DataRow(place, columns, self._asked(asked), None, None)

    def _check(self, row: DataRow) -> None:
        self._check_style(row)

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        """Score the last answer: 1 if it keeps to all constraints, else 0."""
        constraints = _constraints(prompt.entry["place"], prompt.entry["row"])
        return {"right": float(all(keeps(answers[-1], *constraint) for constraint in constraints))}


def _constraints(place: str, columns: dict[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Errors: ConfigError."""
    identifiers, arguments = columns.get("instruction_id_list"), columns.get("kwargs")
    if not isinstance(identifiers, list) or not identifiers or not all(isinstance(each, str) for each in identifiers):
        raise ConfigError(f"{place}: 'instruction_id_list' is {shown(identifiers)}: give a list of identifiers")
    arguments = [None] * len(identifiers) if arguments is None else arguments
    if not isinstance(arguments, list) or len(arguments) != len(identifiers):
        raise ConfigError(f"{place}: 'kwargs' is {shown(arguments)}: give a table for each of the instructions")
    try:
        return [(name, arguments_of(each)) for name, each in zip(identifiers, arguments, strict=True)]
    except (ValueError, RecursionError):
        raise ConfigError(f"{place}: 'kwargs' is {shown(arguments)}: give tables of arguments") from None
