"""Nothing that somebody else wrote reaches a terminal but text: no control sequence, no markup, no line of its own."""

import ast
import io
import sys

import pytest
from rich.table import Table
from rich.text import Text
from tree import PACKAGE

from titan_rl.config import command_line
from titan_rl.config.io.printable import printable_lines, say
from titan_rl.config.io.terminal import Terminal
from titan_rl.config.load import ConfigError

EVIL = {
    "title": "\x1b]0;owned\x07",
    "clear": "\x1b[2J\x1b[H",
    "clipboard": "\x1b]52;c;cm0gLXJmIC8=\x07",
    "eight bits": "\x9b2J\x9d0;owned\x9c",
    "link": "\x1b]8;;http://evil\x1b\\\\here\x1b]8;;\x1b\\\\",
    "overwritten": "is wrong\ris right",
    "backspaces": "wrong\b\b\b\b\bright",
    "right to left": "\u202egnorw\u202c",
    "markup": "[link=http://evil]x[/link][/nothing]",
    "surrogate": "\udc9b2J",
    "unseen": "a\u200bb\u2066c\x00\x7f",
}
SAY_IT = ("config/command_line.py", "config/io/printable.py", "mesh/channel/memory/pinned.py", "train.py")
"""Modules that print what is written in them, or in the schema."""


def is_text(shown: str) -> bool:
    return all(sign == "\n" or sign.isprintable() for sign in shown)


@pytest.mark.parametrize("text", EVIL.values(), ids=EVIL)
def test_what_is_said_is_text(text, capsys):
    say(f"one: {text}")
    say(f"two: {text}", sys.stderr)
    out, err = capsys.readouterr()
    assert is_text(out) and is_text(err) and out == f"one: {printable_lines(text)}\n" and out.isascii()


@pytest.mark.parametrize("text", EVIL.values(), ids=EVIL)
def test_a_table_a_title_and_styled_text_are_text(text, monkeypatch):
    """Rich's own sequences are left out here, with the colours."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    table = Table(title=f"of {text}")
    table.add_column(text)
    table.add_row(text)
    terminal = Terminal()
    terminal.print(table, soft_wrap=True)
    terminal.print(text, soft_wrap=True)
    terminal.print(Text.assemble((text, "bold")), soft_wrap=True)
    sys.stdout.flush()
    shown = sys.stdout.buffer.getvalue().decode()
    assert is_text(shown) and ("[link=http://evil]" in shown or "[link" not in text)


def test_a_terminal_still_has_its_colours(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    Terminal(force_terminal=True).print(Text.assemble(("\x1b]0;owned\x07", "bold red")))
    assert sys.stdout.getvalue() == "\x1b[1;31m\\x1b]0;owned\x1b[0m\n"  # rich drops a bell by itself


@pytest.mark.parametrize("text", EVIL.values(), ids=EVIL)
def test_a_mistake_is_one_line_of_text(text, capsys):
    def command(arguments):
        raise ConfigError(f"no such prompt {text}\n: give another")

    assert command_line.answer(command, []) == command_line.EXIT_USER
    out, err = capsys.readouterr()
    assert not out and is_text(err) and err.count("\n") == 1


@pytest.mark.parametrize("size", ["²", "9" * 5000, "999999999", "x", "-1"])
def test_a_terminal_has_a_size_whatever_the_environment_says(size, monkeypatch):
    with monkeypatch.context() as patch:  # pytest itself draws as wide as it is told
        patch.setattr(sys, "stdout", io.StringIO())
        patch.setenv("COLUMNS", size)
        patch.setenv("LINES", size)
        terminal = Terminal()
    terminal.print(Table("a"))
    assert terminal.width == 80


def test_a_terminal_that_lacks_a_sign_is_shown_its_code(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    table = Table(title="é →")
    assert command_line.answer(lambda arguments: say("é →") or Terminal().print(table) or 0, []) == 0
    assert sys.stdout.buffer.getvalue().startswith(b"\xe9 \\u2192\n")


def calls(path):
    """Names that a file calls, with the first argument."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, ast.unparse(node.args[0]) if node.args else ""


def test_what_is_printed_goes_through_one_function():
    """Besides JSON, which is ASCII; programs in a box have no terminal, and benches print what they measured."""
    files = [path for path in PACKAGE.rglob("*.py") if not {"bench", "inside", "agents"} & set(path.parts)]
    names = {str(path.relative_to(PACKAGE)): path for path in files}
    assert len(names) > 100
    printing = {
        name
        for name, path in names.items()
        for function, first in calls(path)
        if (function == "print" and not first.startswith("json.dumps(")) or function == "Console"
    }
    assert printing - set(SAY_IT) == {"diagnostics/trace_export.py"}, "its text is JSON"
