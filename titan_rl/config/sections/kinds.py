"""Kinds of values in a TOML, and their bounds."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

Style = Literal["compact", "chat"]
"""How prompts and calls are written: as plain text, or through the model's chat template."""
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Gib = Annotated[float, Field(ge=0, le=1e6)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
"""vLLM's limits: it samples at 0.01 whatever is asked below that, and refuses more than 2."""
Temperature = Annotated[float, Field(ge=LEAST_TEMPERATURE, le=MOST_TEMPERATURE)]
Repetition = Annotated[float, Field(ge=0.01, le=100)]
"""A repetition penalty. vLLM takes any above 0; beyond these limits logits are no numbers that anybody means."""
Penalty = Annotated[float, Field(ge=-2, le=2)]
"""vLLM's limits of the presence and frequency penalties."""
Quantization = Literal["none", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"]
"""Of an engine's linear layers, by vLLM's names."""
FP8_BLOCK = 128
"""Rows, and columns, of a weight that share a scale in ``fp8_per_block``."""
LearningRate = Annotated[float, Field(gt=0, le=1e6)]


def _files(value: Any) -> Any:
    """Check of a ``file`` setting's form. Errors: ValueError."""
    for entry in value if isinstance(value, list) else [value]:
        table = {"path": entry} if isinstance(entry, str) else entry
        if not isinstance(table, dict) or "path" not in table or not table.keys() <= {"path", "weight"}:
            raise ValueError('give a name, or a list of names and of { path = "a.jsonl", weight = 2.0 }')
        if not isinstance(table["path"], str) or (isinstance(value, list) and not table["path"]):
            raise ValueError(f"{table['path']!r} is no name: give a path, a glob or a name of the Hub, in quotes")
        weight = table.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1e6:
            raise ValueError(f"weight = {weight!r}: give a number above 0, the source's part of the rows drawn")
    if value == []:
        raise ValueError("name at least one")
    if isinstance(value, dict):
        raise ValueError("a table is one of several: put it into a list, or give its path alone")
    return value


Files = Annotated[str | list[Any], PlainValidator(_files)]
"""Where rows are: a path, a glob, a directory of ``datasets`` or a name of the Hub, or a list of these and weights
(data/rows/file_sources.py)."""
