"""A collection page as a user starts it, and a scripted browser that judges what it is shown."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

COMMAND = [sys.executable, "-m", "titan_rl.cli", "collect"]


class Server:
    """``titan-rl collect`` in a process of its own, in the current folder or ``cwd``."""

    def __init__(self, *arguments: str | Path, cwd: Path | None = None) -> None:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.process = subprocess.Popen([*COMMAND, *map(str, arguments)], env=environment, cwd=cwd, **pipes)
        self.address = self.process.stdout.readline().strip()
        assert self.address.startswith("http://127.0.0.1:"), self.address + self.process.stdout.read()

    def kill(self) -> int:
        """SIGKILL; the exit code."""
        self.process.kill()
        self.process.stdout.close()
        return self.process.wait(20)

    def interrupt(self) -> str:
        """Ctrl-C; what it printed until its end."""
        self.process.send_signal(signal.SIGINT)
        said = self.process.stdout.read()
        self.process.stdout.close()
        assert self.process.wait(20) == 0, said
        return said


@contextmanager
def served(*arguments: str | Path) -> Iterator[str]:
    """The address of a page, until the block ends."""
    server = Server(*arguments)
    try:
        yield server.address
    finally:
        if server.process.poll() is None:
            server.kill()


class Browser:
    """What the page's script does: asks for an item, sends a choice, and again until it is saved."""

    def __init__(self, who: str, choose: Callable[[dict], str]) -> None:
        """``choose``: a choice by an item as it is shown."""
        self.who, self._choose, self._numbers = who, choose, itertools.count()
        self.saved: dict[str, tuple[dict, str]] = {}
        """Item and choice by the item's number, of what the page called saved."""

    def begin(self, client: httpx.Client) -> dict | None:
        """The first item that is open."""
        return client.get("next", params={"who": self.who}).raise_for_status().json()["item"]

    def judgement(self, item: dict) -> dict:
        """Judgement of an item that was not saved before: one that was is never asked again."""
        assert item["id"] not in self.saved, f"item {item['id']} was called saved, and is lost"
        name = f"{self.who}-{next(self._numbers):08d}".replace(" ", "-")
        return {"id": name, "item": item["id"], "who": self.who, "choice": self._choose(item), "seconds": 0.5}

    def send(self, client: httpx.Client, item: dict, judgement: dict) -> dict | None:
        """The next item. Errors: httpx.HTTPError: it may be saved or not."""
        reply = client.post("judgements", json=judgement).raise_for_status().json()
        assert reply["saved"] == judgement["id"]
        self.saved[item["id"]] = (item, judgement["choice"])
        return reply["item"]
