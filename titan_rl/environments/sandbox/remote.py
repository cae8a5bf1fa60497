"""Remote sandbox: SandboxFusion's single call, ``POST /run_code``, one for each program.

    host ── a script: ours (inside/remote_program.py), with program and inputs ──▶ server: its walls, its machine
         ◀── what the script printed: a report on the program, by a nonce ────────────

What the server says of the run is no verdict: only a report counts, and whatever comes in its place (a page of errors,
half an answer, its own time-out) is SandboxFailed. No expected value travels, so that a program which takes over the
script, or the server, chooses its own outputs there, as it can anyhow. The server's walls are not ours to check.
"""

import asyncio
import base64
import binascii
import json
import secrets
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.sections.kinds import Count, Seconds
from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.environments.interfaces.server_address import Address, checked_address, one_line, run_in_thread
from titan_rl.environments.sandbox.program import Call, CallResult, Limits, Outcome, Program, SandboxFailed
from titan_rl.environments.sandbox.program_report import ExitReport, as_task, outcome_of
from titan_rl.environments.servers.http_session import HttpSession, read_object

_SECTION, _EXAMPLE = "task.sandbox", "http://127.0.0.1:8080"
_PATH = "run_code"
_ATTEMPTS, _PAUSE_SECONDS = 3, 0.2
_INSIDE = Path(__file__).with_name("inside")
_LEAST_PATIENCE = 2.0
_WHY = {"": None, "timeout": "timeout", "output": "output", "memory": "memory"}


@dataclass(kw_only=True)
class RemoteConfig:
    """``[task.sandbox]``"""

    url: str = ""
    """Of a server with SandboxFusion's interface."""
    token_env: str = ""
    """Name of the environment variable that holds the server's token."""
    patience: Seconds = 10.0
    """Seconds besides a program's own that the server has for an answer; then it is asked again, three times in all."""
    at_once: Count = 32
    """Programs that a verifier has there side by side, at most."""


def remote_config(values: dict[str, Any]) -> RemoteConfig:
    """Parse and check ``[task.sandbox]``. Errors: ConfigError."""
    config = build_section(RemoteConfig, values, _SECTION)
    checked_address(_address(config), ("http", "https"), _EXAMPLE)
    if config.patience < _LEAST_PATIENCE:
        raise ConfigError(f"{_SECTION}.patience = {config.patience:g}: give a server {_LEAST_PATIENCE:g} s, or more")
    try:
        _address(config).headers()
    except EnvironmentFailed as error:
        raise ConfigError(str(error)) from None
    return config


def _address(config: RemoteConfig) -> Address:
    return Address(config.url, config.token_env, _SECTION)


class RemoteSandbox:
    """Runner of programs at a server, with a connection for each call."""

    def __init__(self, config: RemoteConfig):
        self._address, self._patience = _address(config), config.patience
        self._turns = asyncio.Semaphore(config.at_once)

    async def run(self, program: Program) -> Outcome:
        """Run a program; an attempt has ``limits.seconds`` and ``patience``, without the wait for a turn.

        Errors: SandboxFailed, after three attempts.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self.run_once(program)
            except SandboxFailed:
                if attempt == _ATTEMPTS:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS * 2**attempt)
        raise AssertionError("a program is tried once at least")

    async def run_once(self, program: Program) -> Outcome:
        """Run a program without a retry. Errors: SandboxFailed."""
        nonce, seconds = secrets.token_hex(16), program.limits.seconds + self._patience
        async with self._turns:
            try:
                async with asyncio.timeout(seconds):
                    text = await self._post(_request(program, nonce, self._patience))
            except TimeoutError:
                raise SandboxFailed(f"{self._address.url} did not answer within {seconds:g} s") from None
            except EnvironmentFailed as error:
                raise SandboxFailed(str(error)) from error
        return _outcome(program, nonce, text)

    async def _post(self, body: dict[str, Any]) -> str:
        """Errors: EnvironmentFailed."""
        session = HttpSession(self._address, timeout=None)
        try:
            status, text = await session.post(_PATH, body)
        except httpx.InvalidURL as error:
            raise EnvironmentFailed(f"{self._address.url}: {error}") from error
        finally:
            await session.close()
        if status >= 400:
            raise EnvironmentFailed(f"{self._address.url}/{_PATH} answered {status}: {one_line(text)}")
        return text

    async def close(self) -> None:
        pass


def _request(program: Program, nonce: str, patience: float) -> dict[str, Any]:
    """The program has a deadline of its own in the script, so that the server's comes later."""
    message = as_task(program) | {"nonce": nonce, "limits": asdict(program.limits)}
    code = f"{_script()}\nmain({json.dumps(message)!r})\n"
    # standard input goes with the rest: whether a server ever closes its own is not known
    return dict(code=code, language="python", stdin="", run_timeout=program.limits.seconds + patience / 2)


@cache
def _script() -> str:
    neighbour = (_INSIDE / "main_module.py").read_text()
    return (
        "import sys, types\n"
        "main_module = sys.modules['main_module'] = types.ModuleType('main_module')\n"
        f"exec({neighbour!r}, main_module.__dict__)\n" + (_INSIDE / "remote_program.py").read_text()
    )


def _outcome(program: Program, nonce: str, text: str) -> Outcome:
    """Errors: SandboxFailed for whatever is no report on this program."""
    try:
        answer = read_object(_PATH, text)
    except EnvironmentFailed as error:
        raise SandboxFailed(str(error)) from error
    try:
        report = json.loads(answer["run_result"]["stdout"])
        if report["nonce"] != nonce:
            raise ValueError("another nonce")
        ended = ExitReport(_WHY[report["why"]], int(report["exit"]), float(report["seconds"]), int(report["memory"]))
        reply, stdout, stderr = (base64.b64decode(part, validate=True) for part in report["received"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError, binascii.Error):
        raise SandboxFailed(f"the server has no report on a program: {one_line(text)}") from None
    return outcome_of(program, ended, reply, stdout, stderr)


def check_server(values: dict[str, Any]) -> None:
    """Run a known program at the server. Errors: ConfigError if it does not end as it must."""
    config = remote_config(values)
    calls, limits = (Call("double", (21,)),), Limits(seconds=10.0)
    program = Program("def double(x): return 2 * x\nprint(input())", "42\n", calls, limits)
    try:
        outcome = run_in_thread(_once(config, program))
        if (outcome.stdout, outcome.results) != ("42\n", (CallResult(42),)):
            raise SandboxFailed(f"a known program ended there with {outcome.ending}: {one_line(outcome.stderr)}")
    except SandboxFailed as error:
        raise ConfigError(
            f"programs cannot be run at {_SECTION}.url = {config.url!r}: {error}; start the server, or correct it, or "
            f"leave [{_SECTION}] out for boxes on this machine"
        ) from None


async def _once(config: RemoteConfig, program: Program) -> Outcome:
    return await RemoteSandbox(config).run_once(program)
