"""Kinds of values in a TOML, and their bounds."""

from typing import Annotated, Literal

from pydantic import Field

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
LearningRate = Annotated[float, Field(gt=0, le=1e6)]
