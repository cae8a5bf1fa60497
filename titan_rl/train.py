"""Doors: a run from a TOML, the evaluation of a model, and the one place where an event loop is made.

``titan-rl train FILE --section.key value`` or ``python -m titan_rl.train --job.config_file FILE --section.key value``.
"""

import asyncio
import signal
import sys
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from titan_rl.config.load import ConfigError, load_config, parse_overrides
from titan_rl.data.files import is_full

if TYPE_CHECKING:  # its imports take seconds, which a mistake in the TOML need not wait for
    from titan_rl.controller.session import Session
    from titan_rl.records.statistics import Proportion

EXIT_OK, EXIT_FAULT, EXIT_USER, EXIT_STOPPED = 0, 1, 2, 130
T = TypeVar("T")


def drive(work: Coroutine[Any, Any, T]) -> T:
    """A coroutine's result, in an event loop of its own."""
    return asyncio.run(work)


def train(config_file: str | None, overrides: dict[str, dict[str, Any]], resume: bool) -> int:
    """Run to the end; the exit code. Errors: ConfigError before any process is started."""
    config = load_config(config_file, overrides)

    from titan_rl.controller.session import Session

    try:
        session = Session.open(config, config_file, resume=resume)
    except Exception as error:
        if not is_full(error):
            raise
        raise ConfigError(f"{error}; make room first") from None
    return drive(run_to_end(session))


def evaluate_directory(config_file: str | None, overrides: dict[str, dict[str, Any]]) -> "Proportion":
    """Held-out accuracy of ``model.path``, without a trainer. Errors: ConfigError before any start."""
    config = load_config(config_file, overrides)
    if config.model.path == "tiny":
        raise ConfigError("eval needs a model: give its Hugging Face directory")

    from titan_rl.controller.preflight import check
    from titan_rl.controller.wiring import Actors
    from titan_rl.mesh.meshes import ALL_PARTS
    from titan_rl.records.places import check_no_modules

    home = Path(config.model.path)
    check_no_modules(home.parent if (home.parent / "config.json").is_file() else home)  # a run directory holds models

    checked = check(config)

    async def evaluate() -> "Proportion":
        async with Actors(checked, config.model.path, ALL_PARTS - {"trainer"}) as actors:
            return await actors.evaluate()

    return drive(evaluate())


async def run_to_end(session: "Session") -> int:
    """A session from its start to its end, whatever that is; the exit code."""
    from titan_rl.controller.session import one_line
    from titan_rl.controller.stopping import Stopped

    _stop_on_signals(session)
    error, why, code = None, None, EXIT_OK
    try:
        await session.start()
        await session.run()
    except Stopped as stopped:
        error, why, code = stopped, "stopped by the user", EXIT_STOPPED
    except asyncio.CancelledError as cancelled:
        error, why, code = cancelled, "cancelled, and not by the user", EXIT_FAULT
        if session.stop_request.is_asked:  # the second Ctrl-C
            why, code = "stopped by the user at once", EXIT_STOPPED
    except Exception as fault:  # told whole, written into the summary, and an exit code that says so
        error, why, code = fault, one_line(fault), EXIT_FAULT
        if is_full(fault):
            why = f"{one_line(fault).removeprefix('DiskFull: ')}; make room, then --resume goes on"
    if code == EXIT_FAULT and not is_full(error):
        session.say("".join(traceback.format_exception(error)))
        session.say(f"what the actors printed is in {session.run_dir.logs}")
    await session.close(error, why)
    return code


def _stop_on_signals(session: "Session") -> None:
    """The first Ctrl-C ends the run after the step at hand, saved; the second one ends it at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def on_signal() -> None:
        if session.stop_request.is_asked:
            task.cancel()
        session.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


def main(arguments: list[str] | None = None) -> int:
    """TorchTitan's manner: the file as ``--job.config_file``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        resume = "--resume" in arguments
        overrides = parse_overrides([argument for argument in arguments if argument != "--resume"])
        job = overrides.pop("job", {})
        if not isinstance(job, dict) or not isinstance(job.get("config_file", ""), str):
            raise ConfigError("--job.config_file takes the path of a TOML file")
        if set(job) - {"config_file"}:
            raise ConfigError(f"unknown key job.{min(set(job) - {'config_file'})}: [job] takes config_file only")
        return train(job.get("config_file"), overrides, resume)
    except ConfigError as error:
        print(f"titan-rl: {error}", file=sys.stderr)
        return EXIT_USER


if __name__ == "__main__":
    sys.exit(main())
