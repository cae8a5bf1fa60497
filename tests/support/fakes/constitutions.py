"""Principles of a constitution, and a model and a judge of given replies."""

import re

from titan_rl.diagnostics.principles.asking import Reply

TABLES = [
    {"name": name, "critique": f"Is it {name}?", "revision": f"Make it {name}.", "comparison": f"Which is {name}?"}
    for name in ("short", "kind", "true")
]
CONSTITUTION = "\n".join(
    "\n".join(["[[principles]]", *(f'{key} = "{value}"' for key, value in table.items())]) for table in TABLES
)
"""As a TOML."""


async def model(asked) -> Reply:
    """Replies that tell what was asked, each another."""
    return Reply(f"<{asked.name}>")


async def longer(asked) -> Reply:
    """A judge that prefers the longer answer, and of two as long the one that is the later one in the alphabet."""
    return Reply(prefers_longer(asked.messages[0]["content"]))


def prefers_longer(asked: str | dict) -> str:
    """The same judge: its reply to a question, or to a request to its server."""
    text = asked if isinstance(asked, str) else asked["messages"][0]["content"]
    shown = [re.search(rf"<answer_{mark}>\n(.*)\n</answer_{mark}>", text, re.DOTALL)[1] for mark in "ab"]
    first, second = ((len(each), each) for each in shown)
    return f"Verdict: B is tempting.\nVerdict: {'A' if first > second else 'B'}"
