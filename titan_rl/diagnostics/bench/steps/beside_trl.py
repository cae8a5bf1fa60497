"""SmolLM2-135M in bf16 on gcd beside TRL, in turns: seconds a step, and the memory of all processes of each.

    titan-rl bench beside-trl --model.path models/smollm2 [--rollout.max_new_tokens 512 --training.steps 2]

TRL is installed into an environment of its own, on top of this one's packages. It gets the prompts of our own run, as
many rows at once as are fastest, weights in bf16 throughout (ours are trained in fp32) or in fp32, whichever trains the
model faster on this machine, and the allocator's settings that made it a quarter faster. Our trainer and generator take
turns, as the two do in TRL's one process, or stand side by side with ``--placement.mode disaggregated``.
"""

import json
import os
import statistics
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from titan_rl.config.load import ConfigError
from titan_rl.data.types import Group
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.memory_watch import MemoryUse, memory_watch
from titan_rl.diagnostics.bench.steps.matrix_share import matrix_rates, share_rows, training_share
from titan_rl.diagnostics.bench.steps.step_smollm2 import OVERRIDES
from titan_rl.diagnostics.bench.train_for_bench import bench_run, trained
from titan_rl.mesh.resources.cores import available_cores
from titan_rl.records.metrics import read_metrics
from titan_rl.records.steps.rollouts import read_rollouts

_TRL = "trl==1.16.0"
_HOME = Path("~/.cache/titan_rl").expanduser() / _TRL.replace("==", "-")
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 35),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
_OURS = OVERRIDES | {"placement": {"mode": "colocated"}}
_SECONDS = 7200.0


@dataclass(frozen=True)
class _Plan:
    """What is run, and what TRL's time and memory are to be multiplied by at most."""

    pairs: int
    num_warming: int
    trl_rows: int
    bar: float
    memory_bar: float


_IN_TURNS = _Plan(2, 2, 16, 0.35, 1.2)
_SIDE_BY_SIDE = _Plan(2, 2, 16, 0.30, 1.6)
_LONG = _Plan(1, 1, 8, 0.35, 0.6)
"""Of answers of more than 64 tokens, whose steps take minutes."""


@dataclass(frozen=True)
class _Ran:
    step: float
    """Median seconds."""
    memory: MemoryUse
    length: float
    """New tokens of a sample."""
    dtype: str
    """Of the weights, where they are multiplied."""


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    python = _environment()
    rates = matrix_rates()
    is_apart = overrides.get("placement", {}).get("mode") == "disaggregated"
    is_long = overrides.get("rollout", {}).get("max_new_tokens", 0) > 64
    plan = _LONG if is_long else _SIDE_BY_SIDE if is_apart else _IN_TURNS
    own_runs, trl_runs, shares, phases, prompts = [], [], [], [], []
    for _ in range(plan.pairs):
        with memory_watch() as memory_use, trained("smollm2", _OURS, overrides) as root:
            config = json.loads((root / "config.json").read_text())
            records = [record for record in read_metrics(root) if "reward" in record][plan.num_warming :]
            groups = [group for record in records for group in read_rollouts(root / "rollouts", int(record["step"]))]
            prompts = _prompts(groups, config["model"]["path"])
            shares.append(training_share(root, records, max(rates.values())))
            result = bench_run(root, records)
            phases.append(result.seconds)
        own_runs.append(_Ran(result.seconds["step"], memory_use, result.response_length, config["generator"]["dtype"]))
        trl_runs.append(_run_trl(python, config, prompts, plan))
    rows = [
        _ratio("step over TRL's", own_runs, trl_runs, lambda ran: ran.step, plan.bar),
        _ratio("step over TRL's, by new token", own_runs, trl_runs, lambda ran: ran.step / ran.length, plan.bar),
        _ratio("memory of all processes over TRL's", own_runs, trl_runs, lambda ran: ran.memory.mib, plan.memory_bar),
        *share_rows(statistics.median(shares), rates),
        *(
            row(f"titan_rl: {phase}", statistics.median(seconds[phase] for seconds in phases), "s")
            for phase in ("generate", "forward_backward")
        ),
    ]
    for name, runs in (("titan_rl", own_runs), ("TRL", trl_runs)):
        steps = [ran.step for ran in runs]
        rows += [
            row(f"{name}: step", statistics.median(steps), "s", runs=steps, dtype=runs[-1].dtype),
            row(f"{name}: memory", runs[-1].memory.mib / 1024, "GiB", mib_by_process=runs[-1].memory.by_process),
            row(f"{name}: new tokens of a sample", statistics.mean(ran.length for ran in runs), "tokens"),
        ]
    return rows


def _ratio(
    name: str, own_runs: list[_Ran], trl_runs: list[_Ran], of: Callable[[_Ran], float], bar: float
) -> dict[str, Any]:
    ratios = [of(a) / of(b) for a, b in zip(own_runs, trl_runs, strict=True)]
    return row(name, statistics.median(ratios), "ratio", bar, pairs=ratios)


def _prompts(groups: list[Group], model: str) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    starts = (group.rollouts[0].tokens[: group.rollouts[0].turns[0].start] for group in groups)
    return [tokenizer.decode(tokens) for tokens in starts]


def _environment() -> Path:
    """The Python that has TRL. Errors: ConfigError if it cannot be installed."""
    python, stamp = _HOME / "bin" / "python", _HOME / "installed"
    if stamp.exists():
        return python
    venv.create(_HOME, clear=True, symlinks=True, with_pip=True)
    for packages in (_HOME / "lib").glob("python*/site-packages"):
        (packages / "below.pth").write_text(sysconfig.get_path("purelib"))
    done = subprocess.run([python, "-m", "pip", "install", "-q", _TRL], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{_TRL} cannot be installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    stamp.touch()
    return python


def _run_trl(python: Path, config: dict[str, Any], prompts: list[str], plan: _Plan) -> _Ran:
    """Errors: RuntimeError with the end of what it printed."""
    rollout, model = config["rollout"], config["model"]["path"]
    dtype = _faster_dtype(python, model)
    settings = {name: rollout[name] for name in ("prompts_per_step", "group_size", "max_new_tokens")}
    settings |= {
        "model": model,
        "dtype": dtype,
        "prompts": prompts,
        "steps": config["training"]["steps"],
        "rows": plan.trl_rows,
    }
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        file = Path(folder) / "asked.json"
        file.write_text(json.dumps(settings | {"folder": folder}))
        with memory_watch() as memory:
            lines = _printed(python, "trl_program.py", str(file))
    seconds = [float(words[1]) for words in lines if words[:1] == ["seconds"]]
    [length] = [float(words[1]) for words in lines if words[:1] == ["length"]]
    return _Ran(statistics.median(seconds[plan.num_warming :]), memory, length, dtype)


@cache  # of all pairs
def _faster_dtype(python: Path, model: str) -> str:
    """Errors: those of ``_printed``."""
    [[dtype]] = _printed(python, "trl_dtype.py", model)
    return dtype


def _printed(python: Path, program: str, argument: str) -> list[list[str]]:
    """The words of each line that one of these programs prints, with TRL's settings. Errors: RuntimeError with the end
    of what it printed."""
    more = _ALLOCATOR | {"OMP_NUM_THREADS": str(available_cores()), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-P", Path(__file__).with_name(program), argument],
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(
            f"{program} ended with exit code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return [line.split() for line in done.stdout.splitlines()]
