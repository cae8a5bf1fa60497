"""A run as an object, driven from a coroutine in a loop that somebody else made."""

import asyncio
import json

import pytest
import running

from titan_rl.config.load import load_config, parse_overrides
from titan_rl.controller.loop.shutdown import Stopped, StopRequest
from titan_rl.controller.session import Session
from titan_rl.records.metrics import read_metrics

STEPS = 5


@pytest.mark.slow
def test_start_two_steps_evaluate_close(tmp_path):
    """Beside it the loop answers others; after it no process is left, and the run can be gone on with."""
    root = tmp_path / "run"
    config = load_config(None, parse_overrides(running.overrides(training__steps=STEPS)))
    config.run.dir = str(root)

    async def drive() -> tuple[set[int], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.05)
                ticks += 1

        ticking = asyncio.create_task(tick())
        async with await Session.open(config) as session:
            pids = set(session.meshes.pids)
            await session.step(2)
            accuracy = await session.evaluate()
            assert accuracy.count == 16 and session.progress.step == 2
        ticking.cancel()
        return pids, ticks

    pids, ticks = asyncio.run(drive())
    assert pids and running.gone(pids)
    assert ticks > 20, "the loop was held"
    summary = json.loads((root / "summary.json").read_text())
    assert summary["steps_done"] == 2 and summary["why_ended"] == "closed"
    assert [record["step"] for record in read_metrics(root) if "reward" in record] == [1, 2]
    assert (root / "checkpoints" / "step-000002").is_dir() and (root / "model" / "config.json").is_file()
    assert running.train(root, "--resume", training__steps=3) == 0, running.output(root)[-3000:]
    assert json.loads((root / "summary.json").read_text())["steps_done"] == 3


def test_a_stop_interrupts_what_waits():
    async def drive() -> bool:
        stop = StopRequest()
        work = asyncio.ensure_future(asyncio.Event().wait())
        asyncio.get_running_loop().call_later(0.01, stop.ask)
        with pytest.raises(Stopped):
            await stop.interrupts(work)
        await asyncio.sleep(0)
        return work.cancelled()

    assert asyncio.run(drive())


def test_without_a_stop_the_work_is_done_and_its_errors_are_its_own():
    async def work(result):
        if isinstance(result, Exception):
            raise result
        return result

    async def drive() -> None:
        stop = StopRequest()
        assert await stop.interrupts(work(3)) == 3
        with pytest.raises(KeyError):
            await stop.interrupts(work(KeyError("x")))

    asyncio.run(drive())
