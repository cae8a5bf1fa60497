"""A version of 1B parameters laid down in bf16 for generators: alone against a plain copy of the same tensors, and
beside a step."""

import threading
import time
from typing import Any

import torch

from gpu_check.fixtures import DirectTrainer, Fixtures
from gpu_check.sizes import LONG_STEP
from titan_rl.compat.torch.tensors import copy_each
from titan_rl.data.types import Row


def check(fixtures: Fixtures) -> dict[str, Any]:
    bench, trainer = fixtures.bench, fixtures.trainer("1b", fixtures.config(activation_checkpoint={"mode": "full"}))
    layout = fixtures.plan(trainer).slot(0)
    fixtures.open_region(trainer, layout)
    versions = iter(range(0, 1000, 2))  # all go to one slot

    def publish() -> None:
        trainer.stage(next(versions))
        trainer.writer.wait()

    first, alone = bench.once(publish), bench.seconds(publish)
    copies = [(place, values) for place, values in trainer.writer.copies[0] if isinstance(values, torch.Tensor)]
    places, values = ([pair[index].detach() for pair in copies] for index in (0, 1))
    # what a publish must do at least: the same bytes are read and written
    copy = bench.seconds(lambda: copy_each(places, values))
    flat = torch.empty(layout.nbytes, dtype=torch.uint8, device=fixtures.device)
    raw = bench.seconds(lambda: flat.copy_(trainer.writer.region.slots[0]))
    rows = fixtures.rows("1b", LONG_STEP)
    step = bench.seconds(lambda: fixtures.step(trainer, rows), repeats=1 if fixtures.rehearse else 3)
    beside, stamped = _beside(fixtures, trainer, rows, next(versions))
    return {
        "stamped": int(trainer.writer.region.header.stamps[0]) > 0,
        "publish_of_copy": alone / copy,
        "step_beside_of_step": beside / step,
        "seconds_first": first,
        "seconds_alone": alone,
        "seconds_copy": copy,
        "seconds_copy_of_its_bytes": raw,
        "seconds_step": step,
        "seconds_step_beside": beside,
        "seconds_until_stamped_beside": stamped,
        "gib": layout.nbytes / 2**30,
        "blocks": len(layout.blocks),
    }


def _beside(fixtures: Fixtures, trainer: DirectTrainer, rows: list[Row], version: int) -> tuple[float, float]:
    """Seconds of a step that begins with the publish, and until the version is there."""
    stamped, begun = [], time.perf_counter()
    trainer.stage(version)
    watcher = threading.Thread(target=lambda: (trainer.writer.wait(), stamped.append(time.perf_counter() - begun)))
    watcher.start()
    fixtures.step(trainer, rows)
    fixtures.bench.wait()
    seconds = time.perf_counter() - begun
    watcher.join()
    return seconds, stamped[0]
