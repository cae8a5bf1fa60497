"""Python tool: a model's programs run in the sandbox; their output is the result."""

from titan_rl.environments.interfaces.tool import Tool
from titan_rl.environments.sandbox.pool import check_sandbox, shared_sandbox
from titan_rl.environments.sandbox.program import Limits, Outcome, Program

_LAST_LINES = 5
"""Of standard error."""
_PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "a whole program; print what you want to know"}},
    "required": ["code"],
    "additionalProperties": False,
}


def python_tool(limits: Limits | None = None) -> Tool:
    """Tool that runs each call as a program of its own, without shared state.

    Errors: ConfigError without a sandbox.
    """
    check_sandbox()
    limits = limits or Limits()

    async def run(code: str) -> str:
        return _tool_result(await shared_sandbox().run(Program(code, limits=limits)), limits)

    # the program has a deadline of its own; this one allows for the wait until a box is free
    return Tool("python", "Runs a Python program and gives what it prints.", _PARAMETERS, run, 4 * limits.seconds + 10)


def _tool_result(outcome: Outcome, limits: Limits) -> str:
    """Output of the program, and the reason of a forced end."""
    why = {
        "ok": "",
        "error": "\n".join(outcome.stderr.strip().split("\n")[-_LAST_LINES:]),
        "timeout": f"stopped after {limits.seconds:g} s",
        "memory": f"stopped: more than {limits.memory >> 20} MiB of memory",
        "output": f"stopped: more than {limits.output >> 10} KiB of output",
    }[outcome.ending]
    text = "\n".join(part for part in (outcome.stdout.rstrip("\n"), why) if part)
    return text or "(it printed nothing)"
