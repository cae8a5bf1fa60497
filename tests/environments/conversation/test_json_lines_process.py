"""Processes that are asked by lines, and how they are ended."""

import asyncio
import time

from titan_rl.environments.conversation import json_lines_process
from titan_rl.mesh.processes.processes import GONE, process_state


def test_a_process_that_ends_by_itself_keeps_its_exit_code(monkeypatch, caplog):
    """Whoever ends it looks for no exit code, which is asyncio's to have: or else that warns of an unknown child."""
    watch = asyncio.unix_events.ThreadedChildWatcher._do_waitpid

    def slowly(self, *arguments) -> None:
        time.sleep(0.3)  # a busy machine
        watch(self, *arguments)

    monkeypatch.setattr(asyncio.unix_events.ThreadedChildWatcher, "_do_waitpid", slowly)

    async def run() -> int:
        process = await asyncio.create_subprocess_exec("sh", "-c", "exit 7", start_new_session=True)
        while process_state(process.pid) != GONE:
            await asyncio.sleep(0.01)
        await json_lines_process._end(process)
        return process.returncode

    assert asyncio.run(run()) == 7
    assert "Unknown child process" not in caplog.text
