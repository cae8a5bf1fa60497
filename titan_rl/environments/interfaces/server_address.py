"""Address of a server, as the user wrote it. Nothing else is contacted, and no redirect is followed."""

import asyncio
import ipaddress
import os
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from titan_rl.config.load import ConfigError
from titan_rl.environments.interfaces.environment import EnvironmentFailed

T = TypeVar("T")
_SHOWN = 300
"""Characters of a server's reply in a message."""
SECTION = "task.options"
SETTING = f"{SECTION}.url"


@dataclass(frozen=True)
class Address:
    """URL and token variable of a server."""

    url: str
    token_env: str = ""
    """Name of the environment variable with the server's token; its value is in no record and no log."""
    section: str = SECTION
    """Section of the settings, for messages."""
    token_key: str = "token_env"
    """Key of the setting that names the variable, for messages."""

    @property
    def parts(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine, past every proxy."""
        host = self.parts.hostname
        try:
            return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
        except ValueError:
            return False

    def headers(self) -> dict[str, str]:
        """Authorization header, if a token is set. Errors: EnvironmentFailed for a missing or unusable token."""
        if not self.token_env:
            return {}
        setting = f"{self.section}.{self.token_key} = {self.token_env!r}"
        if not (token := os.environ.get(self.token_env)):
            raise EnvironmentFailed(f"{setting}: there is no such variable: set it")
        if not (token.isascii() and token.isprintable()):  # what refuses it later would show it
            raise EnvironmentFailed(f"{setting}: it holds what no header can hold")
        return {"Authorization": f"Bearer {token}"}


def read_address(task_name: str, url: str, token_env: str, schemes: tuple[str, ...], example: str) -> Address:
    """Checked address of a task's server. Errors: ConfigError."""
    if not url:
        raise ConfigError(f"task.name = {task_name!r} needs {SETTING}, where its server is: give it as {example!r}")
    return checked_address(Address(url, token_env), schemes, example)


def checked_address(address: Address, schemes: tuple[str, ...], example: str) -> Address:
    """Check an address and return it. Errors: ConfigError."""
    setting = f"{address.section}.url"
    assignment, hint = f"{setting} = {address.url!r}", f"give it as {example!r}"
    try:
        parts = address.parts
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{assignment}: {error}: {hint}") from None
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"{setting} has more than an address, which a run would record: leave out what is before an @ or behind a "
            f"'?' or '#', and name the variable that holds a token in {address.section}.{address.token_key}"
        )
    if parts.scheme not in schemes or not parts.hostname or port == 0:
        raise ConfigError(f"{assignment}: {hint}")
    return address


def one_line(text: object) -> str:
    """External text in one printable line, cut to 300 characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)[: 10 * _SHOWN]).split())[:_SHOWN]


def run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop of its own thread, for callers inside of a loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
