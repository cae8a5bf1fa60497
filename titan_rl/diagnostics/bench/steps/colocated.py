"""What trainer and generators hold together where they take turns, over what the larger of them holds at its largest.

SmolLM2-135M in bf16 on gcd, in both modes. Libraries of either, as the memory plan counts them, are left out, since on
GPUs they lie elsewhere; a row tells it with them. Needs ``--model.path DIR``.
"""

import json
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_rl.controller.planning.memory_plan import LIBRARIES
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.memory_watch import proportional_mib
from titan_rl.diagnostics.bench.steps.step_smollm2 import OVERRIDES
from titan_rl.diagnostics.bench.train_for_bench import trained
from titan_rl.records.metrics import read_metrics

_BAR, _EVERY_SECONDS = 1.1, 0.1
_KINDS = ("trainer", "generator")
_MIB_PER_GIB = 1024
_LIBRARIES = (LIBRARIES["trainer"], LIBRARIES["generator"])
_NUM_WARMING = 2


@dataclass
class _MemoryUse:
    """MiB of each kind at each look."""

    looks: list[tuple[float, float]] = field(default_factory=list)

    def look(self, root: Path) -> None:
        try:
            names = json.loads((root / "pids.json").read_text())
            of_kind = [[pid for pid, name in names.items() if name.startswith(kind)] for kind in _KINDS]
            trainer, generator = (sum(proportional_mib(Path("/proc", pid)) for pid in pids) for pids in of_kind)
            self.looks.append((trainer, generator))
        except (OSError, ValueError):
            pass  # the run begins or ends

    @contextmanager
    def watch(self, root: Path) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_EVERY_SECONDS):
                self.look(root)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def largest(self, without: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float, float]:
        """GiB of both together at the most, of the trainer and of the generators, but for so much of each."""
        looks = [[mib / _MIB_PER_GIB - less for mib, less in zip(look, without, strict=True)] for look in self.looks]
        trainers, generators = zip(*looks, strict=True)
        return max(map(sum, looks)), max(trainers), max(generators)


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for mode in ("disaggregated", "colocated"):
        memory, tables = _MemoryUse(), OVERRIDES | {"placement": {"mode": mode}}
        with trained("smollm2", tables, overrides, watch=memory.watch) as root:
            records = [record for record in read_metrics(root) if "reward" in record]
        bar = _BAR if mode == "colocated" else None
        for name, less, its_bar in (("", _LIBRARIES, bar), (", libraries included", (0.0, 0.0), None)):
            together, *each = memory.largest(less)
            gib = dict(together_gib=together, trainer_gib=each[0], generator_gib=each[1])
            what = f"{mode}: both together over the larger{name}"
            rows.append(row(what, together / max(each), "", its_bar, at_most=True, **gib))
        seconds = [record["seconds_step"] for record in records[_NUM_WARMING:]]
        rows.append(row(f"{mode}: step", statistics.median(seconds), "s", loss=[record["loss"] for record in records]))
    return rows
