"""``[placement]``: who shares devices with whom."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class PlacementConfig:
    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    """Who holds a device's memory. ``disaggregated``: trainer and generators side by side. ``colocated``: in turns;
    generators hold neither weights nor KV while the trainer works, and it no moments while they do; for
    ``rollout.max_staleness = 0``."""
