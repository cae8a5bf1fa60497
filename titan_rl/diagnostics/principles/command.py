"""``titan-rl principles``: rows of SFT and pairs by a constitution, and the judge's agreement with people.

Each reply is on disk before it counts: a command that was killed goes on where it was, by the same line.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from titan_rl.config.command_line import EXIT_FAULT, EXIT_OK
from titan_rl.config.io.printable import say
from titan_rl.controller.preflight.checks import Checked
from titan_rl.data.storage.files import DiskFull
from titan_rl.diagnostics.principles.agreement import agreement_of
from titan_rl.diagnostics.principles.asking import Ask, Recorded
from titan_rl.diagnostics.principles.backends import model_backend, opened_when_asked, server_backend
from titan_rl.diagnostics.principles.folder import EXCHANGES, SUMMARY, check_folder, held, write_json
from titan_rl.diagnostics.principles.rows import rows_of
from titan_rl.diagnostics.principles.stages import Compared, Made, compare, make, to_answer
from titan_rl.diagnostics.principles.summary import summary_of, table
from titan_rl.diagnostics.principles.work import Overrides, Work, work_of
from titan_rl.environments.rewards.judge_server import JudgeFailed
from titan_rl.mesh.members.router import NoneLeft
from titan_rl.mesh.processes.deadlines import together
from titan_rl.records.preferences.rows import say_result, write_rows

_PLACES = 512
"""Prompts under way: most are done before the last ones begin."""
T = TypeVar("T")


def principles(options: argparse.Namespace, overrides: Overrides) -> int:
    """Exit code of the command. Errors: ConfigError before anything starts."""
    work = work_of(options, overrides)
    folder = options.out or Path("principles", options.file.stem)
    check_folder(folder, work.settings)
    try:
        with held(folder, work.settings):
            return _run(work, folder, as_json=options.json)
    except (DiskFull, JudgeFailed, NoneLeft) as error:
        say(f"titan-rl: {error}; replies are kept in {folder}, and the same command goes on", sys.stderr)
        return EXIT_FAULT


def _run(work: Work, folder: Path, *, as_json: bool) -> int:
    recorded = Recorded(folder / EXCHANGES)
    try:
        made, labelled = asyncio.run(_ask_all(work, recorded))
    finally:
        recorded.close()
    agreement = agreement_of(work.labelled, labelled) if work.labelled else None
    summary = summary_of(made, labelled, agreement, is_duel=work.against is not None)
    written = write_rows(folder, rows_of(made))
    write_json(folder / SUMMARY, summary.as_dict())
    say_result(folder, written, summary.as_dict() if as_json else table(summary))
    return EXIT_OK


async def _ask_all(work: Work, recorded: Recorded) -> tuple[list[Made], list[Compared]]:
    """Everything that is made of the prompts, and the comparisons of labelled pairs, in their order."""
    if work.against is not None and work.checked is not None:
        await _answer_first(work, work.checked, recorded)
    model = work.against or work.checked
    backends = [] if model is None else [model_backend(model, _log)]
    if work.server is not None:
        backends.append(server_backend(work.server))
    async with AsyncExitStack() as stack:
        asks = [recorded.asking(opened_when_asked(each, stack)) for each in backends]
        return await make_all(work, asks[0], asks[-1])


async def _answer_first(work: Work, checked: Checked, recorded: Recorded) -> None:
    """Answers of the model that is compared, on record before the other one's engines start."""
    questions = [to_answer(work.stages, prompt, 0) for prompt in work.prompts]
    progress = Progress(len(questions), "answers of --model", _log)
    async with AsyncExitStack() as stack:
        ask = recorded.asking(opened_when_asked(model_backend(checked, _log), stack))
        await together(progress.counted(ask(question)) for question in questions)


async def make_all(work: Work, model: Ask, judge: Ask) -> tuple[list[Made], list[Compared]]:
    """Stages of all prompts, and comparisons of all labelled pairs. ``model`` answers, ``judge`` compares."""
    places, stages = asyncio.Semaphore(_PLACES), work.stages
    progress = Progress(len(work.prompts) + len(work.labelled), "prompts and labelled pairs", _log)

    async def in_place(one: Coroutine[Any, Any, T]) -> T:
        async with places:
            return await progress.counted(one)

    made = await together(in_place(make(stages, model, judge, prompt)) for prompt in work.prompts)
    items = [each.item for each in work.labelled]
    labelled = await together(in_place(compare(stages, judge, f"label/{item.id}", item)) for item in items)
    return made, labelled


def _log(line: str) -> None:
    say(line, sys.stderr)


class Progress:
    """Count of what is done, told at each tenth."""

    def __init__(self, total: int, what: str, log: Callable[[str], None]) -> None:
        self._total, self._what, self._log, self._done = total, what, log, 0

    async def counted(self, one: Coroutine[Any, Any, T]) -> T:
        """Result of one, which is done then."""
        result = await one
        self._done += 1
        if self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
            self._log(f"{self._done} of {self._total} {self._what}")
        return result
