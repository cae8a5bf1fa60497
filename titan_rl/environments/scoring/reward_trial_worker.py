"""``python -m titan_rl.environments.scoring.reward_trial_worker SETTINGS``: the trial of a run's user code.

The own answers of three rows of each task are played in its environment, if that is the user's, and scored by a
scorer as the run's. Where a row's answer cannot be scored as it is, forms are tried in which rewards want answers: a
function may raise for a wrong answer, or for one in another form, and a run is refused only for what no answer mends.
One JSON object goes to standard output: lines that refuse the run, and notices.
"""

import asyncio
import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from titan_rl.config.load import ConfigError
from titan_rl.config.mixture import all_tasks
from titan_rl.config.plugins import is_reference, what_happened
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.task import Task, parts_of, task_of
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.environments.registry import make_task
from titan_rl.environments.rollout.demonstrations import worked_answers
from titan_rl.environments.rollout.prompt_checks import place
from titan_rl.environments.scoring.scorer import Scorer
from titan_rl.environments.scoring.scripted import FORMS, ScriptedEpisodes
from titan_rl.mesh.processes.deadlines import DeadlineError

_ROWS, _LOOKED_AT = 3, 64
"""Rows that are tried of each task, among the first ones of all."""
_WORKERS, _MOST_TURNS = 2, 8
_SECONDS, _NICENESS = 120.0, 10
_NEVER_WORKS = re.compile(
    r"\b(?:NameError|UnboundLocalError|ImportError|ModuleNotFoundError|SyntaxError|IndentationError|SystemExit)\b"
    r"|the row has the columns|gave a value of type|gave \[\]|name each part"
)
"""In what is said of code that fails whatever an answer is."""
_ASKS_SERVER = re.compile(
    r"connect|timeout|http|URLError|gaierror|RateLimit|API\w*Error"
    r"|unavailable|refused|unreachable|route to host|ReadError",
    re.IGNORECASE,
)
"""In what is said of a server that may yet come up."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Tried:
    """Outcome of one row."""

    task: str
    """Label within a mixture, else empty."""
    place: str
    answer: str
    status: Literal["ok", "timeout", "failed"]
    why: str = ""
    is_own: bool = False
    """Whether the user's environment gave the answer as its demonstration."""

    @property
    def never_works(self) -> bool:
        """Whether other answers would fail, too."""
        fails_at_own = self.is_own and not _ASKS_SERVER.search(self.why)
        return self.status == "failed" and (fails_at_own or bool(_NEVER_WORKS.search(self.why)))


def report(tried: Sequence[Tried]) -> dict[str, list[str]]:
    """Lines that refuse the run, and notices."""
    lines: dict[str, list[str]] = {"refusals": [], "notices": []}
    for label in dict.fromkeys(each.task for each in tried):
        rows = [each for each in tried if each.task == label]
        failed = [each for each in rows if each.status != "ok"]
        if not failed:
            continue
        first = next((each for each in failed if each.never_works), failed[0])
        which = f"the answer {first.answer!r} to {first.place}" if first.answer else f"an empty answer to {first.place}"
        if len(failed) < len(rows):
            count = f"{len(failed)} of the {len(rows)} rows that were tried cannot be scored"
            lines["notices"].append(f"{count}: {which}: {first.why}")
        elif not all(each.never_works for each in rows):
            lines["notices"].append(f"no answer that was tried could be scored: {which}: {first.why}")
        else:
            lines["refusals"].append(
                f"no answer can be scored: {which}: {first.why}: mend that code; `titan-rl doctor FILE --rows "
                f"{_ROWS}` tries it again"
            )
    return lines


async def try_rows(
    config: TaskConfig, folders: Sequence[str], seed: int, score_timeout: float, step_timeout: float
) -> list[Tried]:
    """Outcomes of the first rows of each task, up to one that takes too long.

    Errors: ConfigError for a task that cannot be made."""
    task = make_task(config, folders)
    if any(part.has_agent for part in parts_of(task)):
        return []
    scorer = Scorer(config, folders, score_timeout, _WORKERS)
    await scorer.start()
    try:
        trial = _Trial(task, config, scorer, ScriptedEpisodes(task, scorer, step_timeout, _MOST_TURNS))
        tried: list[Tried] = []
        for prompt in _first_rows(task, seed):
            tried.append(await trial.row(prompt))
            if tried[-1].status == "timeout":  # the others would take as long
                break
        return tried
    finally:
        await asyncio.gather(scorer.close(), task.close())


def _first_rows(task: Task, seed: int) -> list[Prompt]:
    prompts: dict[str, list[Prompt]] = {label: [] for label in task.parts} or {"": []}
    for prompt in islice(PromptStream(task, seed), _LOOKED_AT if task.parts else _ROWS):
        if len(prompts[prompt.task]) < _ROWS:
            prompts[prompt.task].append(prompt)
    return [prompt for each in prompts.values() for prompt in each]


@dataclass(frozen=True)
class _Trial:
    task: Task
    config: TaskConfig
    scorer: Scorer
    episodes: ScriptedEpisodes

    async def row(self, prompt: Prompt) -> Tried:
        """Outcome of a row: the first form of its answer that is scored, or how the answer as it is fails."""
        demonstration = _demonstration(task_of(self.task, prompt), prompt)
        is_own = demonstration is not None and self._is_played(prompt)
        outcome: Tried | None = None
        for answers in _answers(demonstration or [prompt.answer]):
            status, why = await self._score(prompt, answers)
            tried = Tried(prompt.task, place(prompt), answers[-1], status, why, is_own)
            if status != "failed":
                return tried
            outcome = outcome or tried
        assert outcome is not None, "there is a candidate"
        return outcome

    async def _score(self, prompt: Prompt, answers: list[str]) -> tuple[Literal["ok", "timeout", "failed"], str]:
        try:
            if self._is_played(prompt):
                score = (await self.episodes.play(prompt, answers)).score
            else:
                ([score], _) = await self.scorer.score(prompt, [answers])
        except DeadlineError as error:
            return "timeout", str(error)
        except Exception as error:  # an environment of the user's own may raise anything
            return "failed", str(error) if isinstance(error, ConfigError) else what_happened(error)
        if score.status == "ok":
            return "ok", ""
        return ("timeout" if score.status == "timeout" else "failed"), score.message

    def _is_played(self, prompt: Prompt) -> bool:
        """Whether its environment is the user's; those of ours may need sandboxes, and need no trial."""
        setting = f"task.options.{prompt.task}" if prompt.task else "task"
        return is_reference(all_tasks(self.config)[setting].name)


def _demonstration(task: Task, prompt: Prompt) -> list[str] | None:
    """A row's worked answers, one for each turn, where it has any."""
    try:
        own = worked_answers(task, prompt)
    except ConfigError:  # it has no worked example
        return None
    return None if own == [""] else own


def _answers(own: list[str]) -> list[list[str]]:
    """Answers to try, one for each turn: the row's own, then in other forms."""
    if own == [""]:
        return [[""], ["1"]]
    return [own] if len(own) > 1 else [own, *([form.format(own[0])] for form in FORMS)]


def main() -> None:
    """Try, and print the report."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(2 * int(_SECONDS))  # a module that hangs while it is imported hears nothing else
    os.nice(_NICENESS)
    settings: dict[str, Any] = json.loads(sys.argv[1])
    if settings.pop("parent") != os.getppid():
        return
    output = os.dup(1)
    os.dup2(2, 1)  # what user code prints is no report
    work = try_rows(TaskConfig(**settings.pop("task")), **settings)
    lines = report(asyncio.run(asyncio.wait_for(work, _SECONDS)))
    os.write(output, json.dumps(lines).encode() + b"\n")


if __name__ == "__main__":
    main()
