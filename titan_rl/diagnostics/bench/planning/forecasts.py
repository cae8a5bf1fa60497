"""Bench of ``titan-rl plan`` against runs: rates fitted on some, memory and seconds compared on others.

Of a run that is compared nothing is known to the plan but its settings and the mean length of its answers.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from titan_rl.config.load import load_config
from titan_rl.config.shipped import shipped
from titan_rl.controller.planning.device_plan import Models
from titan_rl.controller.planning.forecast.rates import Rates, as_toml, rates_of
from titan_rl.controller.planning.forecast.scenarios import Lengths, scenario_of
from titan_rl.controller.planning.forecast.step import Scenario, forecast
from titan_rl.controller.planning.memory_plan import GIB, held_at_once, memory_needs
from titan_rl.controller.preflight.checks import Checked, resolve
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.memory_watch import memory_watch
from titan_rl.diagnostics.bench.planning.fitting import Measured, fitted
from titan_rl.diagnostics.bench.train_for_bench import trained
from titan_rl.environments.rollout.group import encode_prompt
from titan_rl.environments.rollout.prompt_checks import training_prompts
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.records.metrics import read_metrics

_SECONDS_BAR, _MEMORY_BAR = 0.25, 0.1
_STEPS, _WARMING, _LOOK_EVERY = 8, 2, 1.0
_CONFIG = "quickstart"
_BYTES = 256 << 20
_OVERRIDES = {
    "sft": {"steps": 0},
    "eval": {"every": 0, "prompts": 1},
    "checkpoint": {"every": 0},
    "recovery": {"standby": False},
    "training": {"steps": _STEPS},
}


@dataclass(frozen=True)
class _Setting:
    """Of one run."""

    width: int
    layers: int
    prompts: int
    tokens: int

    def __str__(self) -> str:
        return f"width {self.width}, {self.layers} layers, {self.prompts} x 8 answers of up to {self.tokens} tokens"

    def tables(self, model: str) -> dict[str, Any]:
        rollout = {"prompts_per_step": self.prompts, "group_size": 8, "max_new_tokens": self.tokens}
        return _OVERRIDES | {"rollout": rollout, "model": {"path": model}}


_FITTED = (
    _Setting(128, 2, 8, 8),
    _Setting(128, 4, 32, 8),
    _Setting(256, 4, 16, 32),
    _Setting(512, 6, 16, 16),
    _Setting(384, 8, 32, 24),
)
_COMPARED = (
    _Setting(128, 4, 16, 16),
    _Setting(256, 6, 32, 16),
    _Setting(384, 4, 16, 24),
    _Setting(512, 4, 32, 12),
    _Setting(320, 8, 24, 32),
)


@dataclass(frozen=True)
class _Ran:
    setting: _Setting
    measured: Measured
    gib: float
    planned_gib: float

    def scenario(self, rates: Rates) -> Scenario:
        return replace(self.measured.scenario, rates=rates)


def memory_bandwidth(times: int = 9) -> float:
    """Bytes a second that one core reads and writes."""
    source, target = torch.ones(_BYTES // 4), torch.zeros(_BYTES // 4)
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * _BYTES / statistics.median(seconds)


def machine_rates() -> Rates:
    """Unfitted rates of this machine: its memory is its links, too."""
    bandwidth = memory_bandwidth()
    links = dict.fromkeys(("link_bandwidth", "network_bandwidth", "host_bandwidth"), bandwidth / 2)
    shares = {"memory_share": 1.0, "link_share": 1.0}
    return rates_of(overrides={"memory_bandwidth": bandwidth, "source": "titan-rl bench plan", **links, **shares})


def _prompt_tokens(checked: Checked) -> float:
    tokenizer = character_tokenizer()
    prompts = training_prompts(checked.task, checked.config.run.seed)
    return statistics.mean(len(encode_prompt(checked.task, tokenizer, prompt)) for prompt in prompts)


def _run(setting: _Setting, folder: Path, rates: Rates, overrides: dict[str, Any]) -> _Ran:
    model = folder / str(setting).replace(" ", "_").replace(",", "")
    make_tiny(model, seed=1, hidden_size=setting.width, num_layers=setting.layers)
    tables = setting.tables(str(model))
    with memory_watch(_LOOK_EVERY) as memory, trained(_CONFIG, tables, overrides) as root:
        records = [record for record in read_metrics(root) if "reward" in record][_WARMING:]
    checked = resolve(load_config(shipped()[_CONFIG], tables))
    answer = statistics.mean(record["response_length"] for record in records)
    scenario = scenario_of(Models(checked), Lengths(_prompt_tokens(checked), answer), rates, None)
    names = [name.removeprefix("seconds_") for name in records[0] if name.startswith("seconds_")]
    seconds = {name: statistics.median(record[f"seconds_{name}"] for record in records) for name in names}
    planned = held_at_once(checked.config, memory_needs(checked)) / GIB
    return _Ran(setting, Measured(scenario, seconds), memory.mib / 1024, planned)


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    start = machine_rates()
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        order = [each for pair in zip(_FITTED, _COMPARED, strict=True) for each in pair]  # both under the same load
        ran = {setting: _run(setting, Path(folder), start, overrides) for setting in order}
    fitting = [ran[setting] for setting in _FITTED]
    rates = fitted([each.measured for each in fitting], start)
    libraries = statistics.median(each.gib - each.planned_gib for each in fitting)
    rows = [row(f"fitted: {name}", value, "") for name, value in vars(rates).items() if name != "source"]
    rows += [row("fitted: libraries beside the plan's", libraries, "GiB", rates_toml=as_toml(rates))]
    rows += [_seconds_row("fitted on", each, rates) for each in fitting]
    for setting in _COMPARED:
        rows += [_seconds_row("compared", ran[setting], rates, _SECONDS_BAR), _memory_row(ran[setting], libraries)]
    return rows


def _seconds_row(what: str, ran: _Ran, rates: Rates, bar: float | None = None) -> dict[str, Any]:
    its, seconds = forecast(ran.scenario(rates)), ran.measured.seconds
    planned = {"generate": its.generating.alone, "weight_sync": its.syncing.seconds} | {
        name: its.phases()[name] for name in ("forward_backward", "optimizer")
    }
    details = {"planned_s": its.seconds, "measured_s": seconds["step"]}
    phases = {name: [value, seconds[name]] for name, value in planned.items()}
    error = abs(its.seconds / seconds["step"] - 1)
    return row(f"{what}: seconds of a step, {ran.setting}", error, "", bar, at_most=True, phases=phases, **details)


def _memory_row(ran: _Ran, libraries: float) -> dict[str, Any]:
    planned = ran.planned_gib + libraries
    details = {"planned_gib": planned, "measured_gib": ran.gib, "unfitted_gib": ran.planned_gib}
    return row(f"compared: memory, {ran.setting}", abs(planned / ran.gib - 1), "", _MEMORY_BAR, at_most=True, **details)
