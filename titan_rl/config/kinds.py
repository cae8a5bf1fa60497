"""Kinds of values in a TOML, and their bounds."""

from typing import Annotated, Literal

from pydantic import Field

Style = Literal["compact", "chat"]
"""How prompts and calls are written: as plain text, or through the model's chat template."""
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Gib = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
