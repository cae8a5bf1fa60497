"""``[task] name = "nemo_gym"``: a NeMo Gym resources server with the tools and rewards of a file's rows.

The verifier plays the agent: it begins a session with a row, brings the model's calls to the server one by one, and has
the whole verified at the end:

    POST /seed_session  the row          POST /TOOL  a call's arguments          POST /verify  the row and the response

A row may have ``demonstration``, an answer for SFT or a list with that of each turn, which no server sees.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.kinds import Count, Seconds, Style
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.numbers import finite
from titan_rl.data.text.messages import Message, message
from titan_rl.data.types import Prompt, ToolCall
from titan_rl.environments.conversation.session_limit import Sessions
from titan_rl.environments.conversation.tool_calls import Call, Malformed, read_calls
from titan_rl.environments.conversation.tools import MAX_RESULT, ToolEnvironment
from titan_rl.environments.interfaces.environment import EnvironmentFailed, Reply
from titan_rl.environments.interfaces.server_address import SETTING, one_line, read_address, run_in_thread
from titan_rl.environments.interfaces.tool import Tool, ToolError
from titan_rl.environments.prompts.jsonl_task import FileOptions, RowsTask
from titan_rl.environments.prompts.row_files import DataRow, Parse
from titan_rl.environments.prompts.seeded_task import needs
from titan_rl.environments.servers.http_session import HttpSession, read_object
from titan_rl.environments.servers.mapping import as_text
from titan_rl.environments.servers.nemo_gym_rows import messages_of, parse_row, schemas_of
from titan_rl.environments.servers.responses import Transcript

_EXAMPLE = "http://127.0.0.1:8000"
_SHOWN = "demonstration"
_CHECK_SECONDS = 3.0
"""In which a server must answer before a run starts."""


@dataclass(kw_only=True)
class NemoGymOptions(FileOptions):
    """``[task.options]`` of a resources server; ``file`` holds its rows."""

    url: str
    """Where it is: ``http://HOST:PORT``, or ``https``."""
    token_env: str = ""
    """Name of the environment variable with a token that the server asks for, sent as ``Authorization: Bearer``."""
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 8
    """Answers after which an episode is verified, whatever the last one calls."""
    sessions: Count = 64
    """Episodes at once in a verifier process; the others wait for their turn."""
    session_timeout: Seconds = 120.0
    """Seconds that an episode waits for its turn; keep it well below verifier.episode_timeout."""
    timeout: Seconds = 30.0
    """Seconds that the server has for an answer; below verifier.step_timeout."""


class NemoGymTask(RowsTask):
    """Task of a NeMo Gym resources server and its rows. Errors: as RowsTask."""

    OPTIONS = NemoGymOptions
    options: NemoGymOptions

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        needs(task, ["url"], f"where its server is, as in {_EXAMPLE!r}")
        super().__init__(task, folders)
        if not task.scores_itself:
            raise ConfigError("task.name = 'nemo_gym' is rewarded by its server: leave task.reward out")
        options = self.options
        self.address = read_address(task.name, options.url, options.token_env, ("http", "https"), _EXAMPLE)
        self.sessions = Sessions(options.sessions, options.session_timeout)

    def _parser(self) -> Parse:
        return parse_row

    def _check_rows(self, rows: Sequence[DataRow]) -> None:
        schemas = [schema for row in rows for schema in schemas_of(row.place, row.columns)]
        for schema in {json.dumps(schema): schema for schema in schemas}.values():  # most rows have the same
            Tool(**schema, run=str)

    def messages(self, prompt: Prompt) -> str | list[Message]:
        if self.style == "compact":
            return prompt.text
        conversation = messages_of(prompt.entry["place"], prompt.entry["row"])
        if not self.system_prompt or any(message["role"] == "system" for message in conversation):
            return conversation
        return [message("system", self.system_prompt), *conversation]

    def tools_of(self, prompt: Prompt) -> list[dict[str, Any]]:
        schemas = schemas_of(prompt.entry["place"], prompt.entry["row"])
        return [{"type": "function", "function": schema} for schema in schemas]

    def demonstration(self, prompt: Prompt) -> str | list[str]:
        """Worked answers of a row. Errors: ConfigError if it has none."""
        worked = prompt.entry["row"].get(_SHOWN)
        answers = [worked] if isinstance(worked, str) else worked
        if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
            raise ConfigError(
                f"{prompt.entry['place']}: no {_SHOWN!r} to learn from: give text, or a list of texts, or set "
                f"sft.steps = 0 to leave SFT out"
            )
        return answers

    def environment(self, prompt: Prompt) -> "NemoGymEnvironment":
        return self._environment(prompt, self.options.timeout)

    def _environment(self, prompt: Prompt, patience: float) -> "NemoGymEnvironment":
        row = {name: value for name, value in prompt.entry["row"].items() if name != _SHOWN}
        session = HttpSession(self.address, self.options.timeout)
        schemas = schemas_of(prompt.entry["place"], row)
        return NemoGymEnvironment(session, row, schemas, self.style, self.options.max_turns, patience)

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        """Empty: the server verifies, and rewards."""
        return {}

    def check_ready(self) -> None:
        """Begin a session with the first training row. Errors: ConfigError if the server refuses."""
        try:
            run_in_thread(self._try())
        except EnvironmentFailed as error:
            raise ConfigError(f"{error}; start the server that these rows are for, or correct {SETTING}") from None

    async def _try(self) -> None:
        environment = self._environment(self.prompt("check", 0, 0), _CHECK_SECONDS)
        try:
            await environment.reset()
        finally:
            await environment.close()


class NemoGymEnvironment(ToolEnvironment):
    """Environment of one server session.

    The text of a refused call (4xx) is the call's result; every other error is the server's failure. Only the session's
    beginning is tried again.
    """

    def __init__(
        self,
        session: HttpSession,
        row: dict[str, Any],
        schemas: Sequence[dict[str, Any]],
        style: Style,
        max_turns: int,
        patience: float,
    ):
        assert session.timeout is not None, "a task's options set one"
        timeout = 2 * session.timeout  # the session's own comes first
        tools = [
            Tool(**schema, run=partial(self._call_tool, schema["name"]), timeout=timeout, retries=0)
            for schema in schemas
        ]
        super().__init__(tools, style)
        self.session, self.row, self.max_turns, self.patience = session, row, max_turns, patience
        self._transcript, self._num_answers = Transcript(), 0

    async def reset(self) -> None:
        status, text = await self.session.post_until_up("seed_session", self.row, self.patience)
        if status >= 400:
            raise EnvironmentFailed(
                f"{self.session.address.url}/seed_session refused a row with {status}: {one_line(text)}"
            )

    async def step(self, answer: str) -> Reply:
        self._num_answers += 1
        parsed = read_calls(answer, self.style, self.by_name)
        self._transcript.add_answer(answer, self.style, parsed)
        reply = await super().step(answer)
        if reply.messages and self._num_answers < self.max_turns:
            return reply
        return Reply(reward=await self._verify(), calls=reply.calls)

    async def _results(self, calls: Sequence[Call | Malformed]) -> list[tuple[str, ToolCall]]:
        """Results of the calls, one after the other, since a call may change the session's state."""
        results = []
        for number, call in enumerate(calls):
            results.append(await self._result(number, call))
            if isinstance(call, Call):
                self._transcript.add_call(call, results[-1][0][:MAX_RESULT])
        return results

    async def _call_tool(self, name: str, /, **arguments: Any) -> str:
        """Errors: ToolError, EnvironmentFailed."""
        try:
            body = as_text(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
        except ValueError as error:  # 1e999 is JSON, and infinite
            raise ToolError(str(error)) from None
        status, text = await self.session.post(name, json.loads(body))
        if status >= 400:
            raise ToolError(text)
        return text

    async def _verify(self) -> float:
        """Errors: EnvironmentFailed."""
        source = f"{self.session.address.url}/verify"
        status, text = await self.session.post("verify", self.row | {"response": self._transcript.response()})
        if status >= 400:
            raise EnvironmentFailed(f"{source} refused a response with {status}: {one_line(text)}")
        try:
            return finite(read_object(source, text).get("reward"))
        except ValueError as error:
            raise EnvironmentFailed(f"{source} gave the reward {one_line(error)}") from None

    async def close(self) -> None:
        await self.session.close()
