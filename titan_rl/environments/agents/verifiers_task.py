"""``[task] name = "verifiers"``: an environment of the verifiers library (0.4), as it is.

Its harness asks the model as it would ask any OpenAI-style server, and its rewards are the episode's; where several
agents of it are trained, their mean. Tasks are listed once, by the process that makes prompts; a training task with the
text of a held-out one is left out.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.sections.kinds import Count, Seconds
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.numbers import finite
from titan_rl.data.rows.splits import Split, key, split_by_share
from titan_rl.data.types import Prompt
from titan_rl.environments.conversation.json_lines_process import LineProcess
from titan_rl.environments.conversation.session_limit import Sessions
from titan_rl.environments.interfaces.agent import ModelAccess, Outcome
from titan_rl.environments.interfaces.server_address import one_line
from titan_rl.environments.prompts.jsonl_task import ListedTask
from titan_rl.environments.prompts.row_files import DataRow
from titan_rl.environments.prompts.seeded_task import needs

_WORKER = Path(__file__).with_name("verifiers_worker.py")
_START_SECONDS = 120.0
"""For its imports, and what its environment loads."""


@dataclass(kw_only=True)
class VerifiersOptions:
    """``[task.options]``."""

    env: dict[str, Any]
    """As verifiers' own ``[env]`` table: ``taskset.id``, ``agent.harness.id``, ``agent.runtime.type``, and more."""
    python: str = ""
    """The Python that verifiers is installed for, if it is another than this one."""
    tasks: Count = 1000
    """Of the taskset, how many are taken at most."""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """How many of them are for evaluation only."""
    sessions: Count = 64
    """Episodes at once in a verifier process; the others wait for their turn."""
    session_timeout: Seconds = 120.0
    """Seconds that an episode waits for its turn; keep it well below verifier.episode_timeout."""
    timeout: Seconds = 120.0
    """Seconds for an episode, scoring included; below verifier.episode_timeout."""


class VerifiersTask(ListedTask):
    """Task of a verifiers environment.

    Errors: ConfigError, for options at once, for the environment with the first prompt.
    """

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        needs(task, ["env"], "verifiers' own table, with taskset.id at least")
        if task.style != "chat":
            raise ConfigError(
                "task.name = 'verifiers' speaks with a model through its chat template: set task.style = 'chat'"
            )
        if not task.scores_itself or task.system_prompt:
            raise ConfigError(
                "task.name = 'verifiers' is asked and rewarded by its environment: leave task.reward and "
                "task.system_prompt out"
            )
        super().__init__(task)
        self.options = build_section(VerifiersOptions, task.options, "task.options")
        if not Path(self._python).name.startswith("python"):
            raise ConfigError(f"task.options.python = {self._python!r} is no Python: give the path of one")
        self.folders = [str(Path(folder).absolute()) for folder in folders]
        self.sessions = Sessions(self.options.sessions, self.options.session_timeout)
        self._free: list[tuple[int, str]] = []
        self._num_slots = 0
        self._process: LineProcess | None = None

    def _make_split(self) -> Split[DataRow]:
        rows = self._all_rows()
        if len({key(row.text) for row in rows}) < 2:
            raise ConfigError(
                f"task.options.env: its taskset has {len(rows)} tasks with one text: it takes two, one to be held out"
            )
        return split_by_share(rows, self.options.held_out_share, "task.options")

    def _all_rows(self) -> list[DataRow]:
        try:
            completed = subprocess.run(
                self._command("list"), env=_environment(), capture_output=True, text=True, timeout=_START_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"task.options.python = {self._python!r}: {one_line(error)}") from None
        if completed.returncode:
            output = (completed.stdout or completed.stderr).strip().splitlines() or [
                f"it ended with {completed.returncode}"
            ]
            raise ConfigError(f"task.options.env: {one_line(output[-1])}{self._mend(output[-1])}")
        return [_row(place, json.loads(line)) for place, line in enumerate(completed.stdout.splitlines())]

    def _mend(self, message: str) -> str:
        if "'verifiers'" not in message:
            return ""
        return (
            f"; {self._python} has none: install verifiers in an environment of its own, and give task.options.python"
        )

    @property
    def _python(self) -> str:
        return self.options.python or sys.executable

    def _command(self, mode: str) -> list[str]:
        settings = {"env": self.options.env, "folders": self.folders, "tasks": self.options.tasks}
        return [self._python, str(_WORKER), mode, json.dumps(settings)]

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        """Empty: the environment has rewarded."""
        return {}

    def demonstration(self, prompt: Prompt) -> str:
        raise ConfigError("task.name = 'verifiers' has no worked examples: set sft.steps = 0")

    def agent(self, prompt: Prompt) -> "VerifiersAgent":
        if self._process is None:
            self._process = _Worker(
                "the verifiers environment", self._command("play"), _environment(), self.options.timeout, _START_SECONDS
            )
        return VerifiersAgent(self._process, prompt.entry["row"], self._slot(), self._free, self.options.timeout)

    def _slot(self) -> tuple[int, str]:
        """A number and a key that no episode under way has."""
        if not self._free:
            self._free.append((self._num_slots, secrets.token_urlsafe(24)))
            self._num_slots += 1
        return self._free.pop()

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()


class VerifiersAgent:
    """Agent of one episode, whose key is reused: the worker keeps a connection for each session."""

    def __init__(self, process: LineProcess, row: dict[str, Any], slot: tuple[int, str], free: list, timeout: float):
        self.process, self.row, self.timeout = process, row, timeout
        self._slot, self._free = slot, free
        self.api_key = slot[1]

    async def run(self, model: ModelAccess) -> Outcome:
        """Play the episode in the worker process. Errors: EpisodeFailed."""
        request = {"task": self.row["task"], "hash": self.row["hash"], "slot": self._slot[0]}
        try:
            reply = json.loads(
                await self.process.ask(json.dumps(request | {"url": model.base_url, "key": model.api_key}))
            )
        finally:
            self._free.append(self._slot)
        if "error" in reply:
            raise EpisodeFailed(one_line(reply["error"]))
        return Outcome(finite(reply["reward"]), frozenset(reply["left_out"]))


class EpisodeFailed(RuntimeError):
    """Failure of an episode, in the environment's words."""


class _Worker(LineProcess):
    def _cancel(self, process: asyncio.subprocess.Process, number: int) -> None:
        self._write(process, f"{number} null")


def _row(place: int, listed: dict[str, Any]) -> DataRow:
    text = "\n".join(message["content"] for message in listed["messages"])
    columns = {"task": place, "hash": listed["hash"], "messages": listed["messages"]}
    return DataRow(f"task {place}", columns, text, listed["messages"], None)


def _environment() -> dict[str, str]:
    """Of the user's own program; what it speaks with on this machine is never behind a proxy."""
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), "127.0.0.1", "localhost"]))
    return dict(os.environ) | {"NO_PROXY": no_proxy, "no_proxy": no_proxy}
