"""Whose turn it is to sample: requests for the same weights together, others in the order in which they came."""

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from titan_rl.data.types import Request
from titan_rl.service.adapters import serving
from titan_rl.service.adapters.serving import ServedWeights

_A, _B = Path("a"), Path("b")
_REQUEST = Request(np.arange(3), [1], 4, 1.0)


class Mesh:
    """Stands for trainer, channel and generators: notes what is served, and who samples under which weights."""

    def __init__(self) -> None:
        self.shown: Path | None = None
        self.live: Path | None = None
        self.versions: list[int] = []
        self.sampled: list[Path | None] = []
        self.gate = asyncio.Event()
        self.trainer = SimpleNamespace(step_done=0, ask=lambda work: work())
        self.weights = SimpleNamespace(link=SimpleNamespace(stage=self.stage), announce=self.announce)
        self.dispatcher = SimpleNamespace(complete=self.complete)
        self.num_inside = 0

    async def show(self, folder: Path | None) -> None:
        self.shown = folder

    async def stage(self, version: int) -> None:
        self.versions.append(version)

    async def announce(self, version: int) -> None:
        assert not self.num_inside, "nobody samples while weights change"
        self.live = self.shown

    async def complete(self, request: Request) -> list:
        self.num_inside += 1
        at_first = self.live
        await self.gate.wait()
        assert self.live == at_first
        self.sampled.append(self.live)
        self.num_inside -= 1
        return []


async def _started() -> tuple[Mesh, ServedWeights]:
    mesh = Mesh()
    weights = ServedWeights(mesh, mesh)  # type: ignore[arg-type]
    await weights.start()
    return mesh, weights


def test_requests_for_the_same_weights_go_together_and_others_wait_until_they_have_ended():
    async def check() -> None:
        mesh, weights = await _started()
        asked = [asyncio.create_task(weights.complete(source, _REQUEST)) for source in (None, _A, _A, None, _B)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert mesh.num_inside == 2  # both of the base model: nobody has waited long
        mesh.gate.set()
        await asyncio.gather(*asked)
        assert mesh.sampled == [None, None, _A, _A, _B]
        assert mesh.versions == [0, 1, 2]

    asyncio.run(check())


def test_who_has_waited_long_is_not_overtaken(monkeypatch):
    monkeypatch.setattr(serving, "_PATIENCE_SECONDS", -1.0)

    async def check() -> None:
        mesh, weights = await _started()
        asked = [asyncio.create_task(weights.complete(source, _REQUEST)) for source in (None, _A, None)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert mesh.num_inside == 1
        mesh.gate.set()
        await asyncio.gather(*asked)
        assert mesh.sampled == [None, _A, None]

    asyncio.run(check())


def test_weights_that_cannot_be_shown_are_told_and_the_next_are_served():
    async def check() -> None:
        mesh, weights = await _started()
        mesh.gate.set()

        async def fail(folder: Path | None) -> None:
            raise ValueError("NaN")

        show, mesh.show = mesh.show, fail  # type: ignore[method-assign]
        results = await asyncio.gather(weights.complete(_A, _REQUEST), return_exceptions=True)
        assert isinstance(results[0], ValueError)
        mesh.show = show  # type: ignore[method-assign]
        await weights.complete(_B, _REQUEST)
        assert mesh.sampled == [_B]

    asyncio.run(check())


def test_weights_that_nobody_waits_for_any_more_hold_nobody_up():
    async def check() -> None:
        mesh, weights = await _started()
        asked = [asyncio.create_task(weights.complete(source, _REQUEST)) for source in (None, _A, _B)]
        for _ in range(20):
            await asyncio.sleep(0)
        asked[1].cancel()
        mesh.gate.set()
        await asyncio.gather(*asked, return_exceptions=True)
        assert mesh.sampled == [None, _B]

    asyncio.run(check())


@pytest.mark.parametrize("seed", range(8))
def test_whoever_comes_and_goes_everyone_else_samples_under_its_own_weights(seed, monkeypatch):
    draw = random.Random(seed)
    monkeypatch.setattr(serving, "_PATIENCE_SECONDS", draw.choice([-1.0, 0.0, 100.0]))

    async def check() -> None:
        mesh, weights = await _started()
        told: list[tuple[Path | None, Path | None]] = []

        async def complete(request: Request) -> list:
            mesh.num_inside += 1
            under = mesh.live
            try:
                for _ in range(draw.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                mesh.num_inside -= 1
            return [under]

        mesh.dispatcher.complete = complete

        async def ask(source: Path | None) -> None:
            [under] = await weights.complete(source, _REQUEST)
            told.append((source, under))  # type: ignore[arg-type]

        asked = []
        for _ in range(150):
            asked.append(asyncio.create_task(ask(draw.choice([None, _A, _B, Path("c")]))))
            if draw.random() < 0.3:
                draw.choice(asked).cancel()
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
        async with asyncio.timeout(10):
            results = await asyncio.gather(*asked, return_exceptions=True)
        assert all(source == under for source, under in told)
        assert sum(not isinstance(result, asyncio.CancelledError) for result in results) == len(told) > 50

    asyncio.run(check())
