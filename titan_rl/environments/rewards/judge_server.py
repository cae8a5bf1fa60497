"""Server of a judge: an OpenAI-style URL that is asked one question at a time.

A question that fails, or whose reply cannot be read, is asked again a few times, and then it is JudgeFailed. A server
that is busy is asked until the question's time is up.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import Field

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.kinds import Count
from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.environments.interfaces.server_address import Address, checked_address, one_line

_ATTEMPTS, _PAUSE_SECONDS = 3, 0.2
_LONGEST_PAUSE = 10.0
_BUSY = (429, 503)
"""Status codes by which a server says that it takes no more for now."""
_REFUSALS = (400, 413, 422)
"""Status codes by which a server refuses what it is asked, whoever asks again."""
T = TypeVar("T")


@dataclass(kw_only=True)
class ServerConfig:
    """Server of a judge."""

    url: str
    """Of an OpenAI-style server, such as ``http://127.0.0.1:8000/v1``."""
    model: str
    """Its name there."""
    max_tokens: Count = 512
    """Of its reply."""
    seconds: Annotated[float, Field(gt=0, le=600)] = 60
    """That it may take, retries included; ``verifier.score_timeout`` must be longer."""
    key_variable: str = ""
    """The environment variable that holds its API key, which the scorer process alone is given."""


class JudgeFailed(RuntimeError):
    """Failure of the judge: unreachable, or without a reply that can be read."""


class QuestionRefused(JudgeFailed):
    """Refusal of one question, such as one that is too long; others may be answered."""


class _Busy(JudgeFailed):
    """Server that takes no more for now."""

    def __init__(self, said: str, seconds: float | None):
        """``seconds``: from its Retry-After, None without."""
        super().__init__(said)
        self.seconds = seconds


class ReplyCut(JudgeFailed):
    """Reply that ended at ``max_tokens``, where its last line may say something else than was meant."""


def check_server(config: ServerConfig, section: str) -> None:
    """Check of a server's settings. ``section``: theirs, for messages. Errors: ConfigError."""
    address = checked_address(_address(config, section), ("http", "https"), "http://127.0.0.1:8000/v1")
    try:
        address.headers()
    except EnvironmentFailed as error:
        raise ConfigError(str(error)) from None


def _address(config: ServerConfig, section: str = "judge") -> Address:
    return Address(config.url, config.key_variable, section, "key_variable")


def without_marks(text: str, names: str) -> str:
    """Text of somebody else that cannot leave its place in a question: marks in it have round brackets.

    ``names``: of the marks, such as ``question|answer``."""
    return re.sub(rf"<(\s*/?\s*(?:{names})\s*)>", r"(\1)", text, flags=re.IGNORECASE)


class JudgeServer:
    """Client of a judge's server."""

    def __init__(self, config: ServerConfig):
        import httpx  # its import takes a tenth of a second

        self.config, self._address = config, _address(config)
        self._client = httpx.AsyncClient(trust_env=not self._address.is_loopback)  # no proxy for this machine's own

    async def ask(self, question: str, read: Callable[[str], T]) -> T:
        """What ``read`` makes of the reply; one that it refuses by JudgeFailed is asked for again. Errors:
        JudgeFailed."""
        try:
            return await asyncio.wait_for(self._ask(question, read), self.config.seconds)
        except TimeoutError:
            raise JudgeFailed(f"the judge took longer than {self.config.seconds:g} s: raise seconds") from None

    async def _ask(self, question: str, read: Callable[[str], T]) -> T:
        end = time.monotonic() + self.config.seconds
        failures = waits = 0
        while True:
            try:
                return read(await self._reply(question))
            except (QuestionRefused, ReplyCut):
                raise
            except _Busy as error:
                waits += 1
                pause = error.seconds or min(_PAUSE_SECONDS * 2**waits, _LONGEST_PAUSE) * random.uniform(0.5, 1.5)
                if time.monotonic() + pause >= end:
                    said = f"{error}, and takes no more within {self.config.seconds:g} s: raise seconds"
                    raise JudgeFailed(said) from None
            except Exception as error:  # of httpx, or JudgeFailed: whatever it is, there is no reply
                failures += 1
                pause = _PAUSE_SECONDS * 2**failures
                if failures == _ATTEMPTS:
                    raise JudgeFailed(f"the judge failed {failures} times: {type(error).__name__}: {error}") from None
            await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _reply(self, question: str) -> str:
        """Errors: httpx.HTTPError, JudgeFailed."""
        from titan_rl.environments.interfaces.http_body import AS_IT_IS, read_body

        config, headers = self.config, AS_IT_IS | self._address.headers()
        body = {
            "model": config.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": config.max_tokens,
            "temperature": 0,
        }
        url = config.url.rstrip("/") + "/chat/completions"
        async with self._client.stream("POST", url, json=body, headers=headers, timeout=config.seconds) as reply:
            content = await read_body(reply, url)
        if not reply.is_success:
            status = f"the judge's server answered with status {reply.status_code}"
            if reply.status_code in _BUSY:
                raise _Busy(status, _seconds(reply.headers.get("Retry-After", "")))
            failure = QuestionRefused if reply.status_code in _REFUSALS else JudgeFailed
            raise failure(f"{status}: {one_line(content.decode(errors='replace'))}")
        try:
            choice = json.loads(content)["choices"][0]
            said, why_ended = str(choice["message"]["content"] or ""), choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise JudgeFailed("its server's reply holds no message") from None
        if why_ended == "length":
            raise ReplyCut(f"the judge's reply is longer than max_tokens = {config.max_tokens}: raise it")
        return said


def _seconds(retry_after: str) -> float | None:
    """Whole seconds of a Retry-After header; None for none, 0 and a date."""
    return float(retry_after) or None if re.fullmatch("[0-9]{1,6}", retry_after) else None
