"""Rates of a device: published peaks (devices.toml), attained shares, and overheads.

Any of them can be given instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import tomli

from titan_rl.config.load import ConfigError, build_section, nearest, read_toml

TABLE = Path(__file__).parent / "devices.toml"
DEFAULT = "H100"
_ASSUMED = "assumed"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one device. Bandwidths in bytes a second, of one direction; ``*_share``: of a peak, attained; ``seconds_*``:
    what something takes besides."""

    memory_gib: float
    peak_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    """Between devices of a host."""
    network_bandwidth: float
    """A device's part of its host's."""
    host_bandwidth: float
    """Between a device and its host's memory."""
    train_share: float
    prefill_share: float
    decode_share: float
    memory_share: float
    link_share: float
    seconds_engine_step: float
    seconds_token: float
    seconds_collective: float
    seconds_row: float
    seconds_optimizer: float
    seconds_sync: float
    seconds_step: float
    seconds_answer: float
    source: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "source" and not (value >= 0 if name.startswith("seconds_") else value > 0):
                raise ValueError(f"{name} = {value!r} must be above 0")

    @property
    def link(self) -> float:
        return self.link_bandwidth * self.link_share

    @property
    def network(self) -> float:
        return self.network_bandwidth * self.link_share

    @property
    def memory(self) -> float:
        return self.memory_bandwidth * self.memory_share


@cache
def published() -> dict[str, dict[str, Any]]:
    return tomli.loads(TABLE.read_text())


def device_names() -> list[str]:
    return [name for name in published() if name != _ASSUMED]


def rates_of(device: str = DEFAULT, file: str | None = None, overrides: Mapping[str, Any] | None = None) -> Rates:
    """Rates of a device. ``file``: TOML of other rates; ``overrides``: go over both. Errors: ConfigError."""
    names = {name.casefold(): name for name in device_names()}
    if device.casefold() not in names:
        raise ConfigError(f"--device {device!r} is unknown: {nearest(device, names.values(), '--rates FILE')}")
    tables = published()
    of_file = read_toml(Path(file)) if file else {}
    return build_section(
        Rates, tables[_ASSUMED] | tables[names[device.casefold()]] | of_file | dict(overrides or {}), "rates"
    )


def as_toml(rates: Rates) -> str:
    """TOML text of rates."""
    lines = [f"{f.name} = {getattr(rates, f.name)!r}" for f in fields(rates) if f.name != "source"]
    return "\n".join([*lines, f'source = "{rates.source}"', ""])
