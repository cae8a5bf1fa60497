"""A run as an object, driven from a coroutine in a loop that somebody else made."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import running

from titan_rl.config.command_line import TrainCommand
from titan_rl.config.io.overrides import parse_overrides
from titan_rl.config.load import load_config
from titan_rl.controller.interactive.live import LiveSession, RunEnded
from titan_rl.controller.loop.shutdown import Stopped, StopRequest
from titan_rl.controller.session import Session
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.run_directory.summary import Progress

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
                await asyncio.sleep(0.01)
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


@pytest.mark.parametrize("is_asked_before", [False, True])
def test_a_second_stop_ends_a_session_unsaved_and_in_order(is_asked_before):
    """While it saves, or before that."""
    happened, session = [], object.__new__(Session)

    async def rescue(error: BaseException) -> None:
        asyncio.get_running_loop().call_soon(session.stop_request.hurry)
        await asyncio.Event().wait()

    async def end(why: str) -> dict:
        await asyncio.sleep(0)
        happened.append(why)
        return dict(
            steps_done=3,
            steps_asked=5,
            reward_by_step=[],
            steps_without_signal=0,
            truncated_mean=None,
            helper_token_share_mean=None,
            samples={},
        )

    async def close() -> None:
        session.stop_request = StopRequest()
        if is_asked_before:
            session.stop_request.hurry()
        await session.close(Stopped(), "stopped by the user")

    nothing = SimpleNamespace(close=lambda: None, close_table=lambda: None)
    session._controller, session._is_finished, session._end = SimpleNamespace(rescue=rescue), False, end
    session.display = session._exits = nothing
    session.run_dir, session.command, session.log = RunDir(Path("run")), TrainCommand("a.toml"), happened.append
    session.run_dir.close, session.progress = nothing.close, Progress(steps_asked=5)
    asyncio.run(close())
    assert happened[0] == "stopped by the user at once" and f"{happened[0]}: 3 of 5 steps" in happened[1]
    assert happened[-1].startswith("next: titan-rl train a.toml --resume")


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


def test_a_fault_that_no_call_raises_ends_what_waits_and_whatever_comes_later():
    async def drive() -> None:
        stop, fault, ended = StopRequest(), OSError("the trainer cannot be repaired"), []

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.append(True)

        asyncio.get_running_loop().call_later(0.01, stop.fail, fault)
        for count in (1, 2):
            with pytest.raises(OSError) as raised:
                await stop.unless_failed(waits())
            assert raised.value is fault and len(ended) == count, "its own end came first"
        assert not stop.is_requested, "what can be saved is"

    asyncio.run(drive())


@pytest.mark.parametrize("of_the_work", [ValueError("its own"), None])
def test_what_ends_by_itself_is_answered(of_the_work):
    async def work() -> int:
        if of_the_work is not None:
            raise of_the_work
        return 7

    if of_the_work is None:
        assert asyncio.run(StopRequest().unless_failed(work())) == 7
    else:
        with pytest.raises(ValueError, match="its own"):
            asyncio.run(StopRequest().unless_failed(work()))


def test_a_cell_that_waits_ends_with_the_fault_and_the_run_is_closed():
    stop, closed = StopRequest(), []

    async def close(error: BaseException) -> None:
        closed.append(error)

    async def drive() -> None:
        session = SimpleNamespace(
            run_dir=RunDir(Path("run")), stop_request=stop, close=close, display=SimpleNamespace(follow=lambda: None)
        )
        run = LiveSession(session)
        asyncio.get_running_loop().call_later(0.01, stop.fail, OSError("the trainer cannot be repaired"))
        with pytest.raises(OSError, match="cannot be repaired"):
            await run._in_turn(asyncio.Event().wait)
        with pytest.raises(RunEnded, match="the trainer cannot be repaired"):
            await run._in_turn(asyncio.Event().wait)

    asyncio.run(drive())
    assert [str(error) for error in closed] == ["the trainer cannot be repaired"]
