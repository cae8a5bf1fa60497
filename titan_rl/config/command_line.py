"""Command-line parts shared by ``titan-rl`` and ``python -m titan_rl.train``: arguments, one-line errors, exit codes,
one controller.
"""

import argparse
import atexit
import difflib
import io
import os
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from titan_rl.config.errors import AlreadyComplete, ConfigError, NamedFault
from titan_rl.config.io.overrides import is_override, join_overrides, override_arguments, parse_overrides
from titan_rl.config.io.printable import printable, say
from titan_rl.config.load import nearest_override, nearest_setting
from titan_rl.config.torchrun import World, number_of, refusal, report_to_torchrun, world_of

Join = Callable[[World], None]

EXIT_OK, EXIT_FAULT, EXIT_USER, EXIT_STOPPED = 0, 1, 2, 130
EXIT_UNREAD = 128 + signal.SIGPIPE
"""What a shell calls a program that nobody reads any more: ``titan-rl tasks | head -1``."""

_STARTERS = (
    ("torchrun", "WORLD_SIZE", "RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)
"""What starts copies, the variable that says how many, and the one that numbers them. In a batch script SLURM tells the
tasks of the job, which are not copies of anything yet, so those of the step are asked for."""
_OTHERS_WAIT_SECONDS = 10.0
"""torchrun ends all as soon as one has ended, and rank 0 must have spoken by then."""
_GATEWAY_SECONDS, _GOODBYE_SECONDS = 0.3, 10.0
_MAX_CHARACTERS = 1000


class Parser(argparse.ArgumentParser):
    """argparse, with mistakes in one line and no abbreviations."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` tells more")


@dataclass(frozen=True)
class TrainCommand:
    """What ``titan-rl train`` was told, which the commands that are offered next repeat."""

    config_file: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """By section."""

    def resume(self, run_dir: Path) -> str:
        """Command that resumes the run."""
        named = [self.config_file] if self.config_file else []
        resumed = ["--resume", "--run.dir", str(run_dir)]
        return shlex.join(["titan-rl", "train", *named, *resumed, *self._arguments("run.dir")])

    def evaluate(self, model: Path, drafter: Path | None = None) -> str | None:
        """Command that evaluates the model as the run did; None for a run without a TOML. ``drafter``: that the run has
        trained."""
        if self.config_file is None:
            return None
        named = ["titan-rl", "eval", str(model), "--config", self.config_file]
        learned = override_arguments({"drafter": {"path": str(drafter)}}) if drafter is not None else []
        left_out = ("run.dir", "model.path", *["drafter.path"] * bool(learned))
        return shlex.join([*named, *self._arguments(*left_out), *learned])

    def _arguments(self, *left_out: str) -> list[str]:
        given = override_arguments(dict(self.overrides))
        return [argument for argument in given if argument[2:].partition("=")[0] not in left_out]


def parse(parser: Parser, arguments: list[str]) -> tuple[argparse.Namespace, dict[str, dict[str, Any]]]:
    """Options, and the overrides, which may stand anywhere among them. Errors: ConfigError."""
    joined = join_overrides(arguments)
    options, unread = parser.parse_known_args([argument for argument in joined if not is_override(argument)])
    if unread:
        raise ConfigError(f"cannot read {unread[0]!r}: {_hint(unread[0], vars(options))}")
    return options, parse_overrides([argument for argument in joined if is_override(argument)])


def _hint(argument: str, options: Mapping[str, Any]) -> str:
    """What an unknown argument may stand for. ``options``: of the command, by name."""
    own = [f"--{name.replace('_', '-')}" for name in options]
    if close := difflib.get_close_matches(argument.partition("=")[0], own, n=1, cutoff=0.8):
        return f"did you mean {close[0]}?"
    hint = nearest_setting(argument, "--") if argument.startswith("--") else nearest_override(argument)
    return hint or "overrides look like --section.key value; --help lists the rest"


def answer(command: Callable[[list[str]], int], arguments: list[str] | None = None, join: Join | None = None) -> int:
    """The exit code of a door's command. A mistake is one line on stderr; a reader that has gone is no fault.

    ``join``: what torchrun's processes do before the command; it comes back in one of them.
    """
    world = None
    _say_what_cannot_be_written()
    try:
        world = world_of(os.environ)
        check_started_once(os.environ, joins_torchrun=join is not None)
        if join is not None and world is not None and world.size > 1:
            join(world)
        try:
            with _signals_as_ctrl_c():
                return command(sys.argv[1:] if arguments is None else arguments)
        finally:
            print(end="", flush=True)  # here, where it can be answered for: Python does it after the last line
    except ConfigError as error:
        lines = "\n".join(f"titan-rl: {_one_line(finding)}" for finding in error.findings)
        say(lines, sys.stderr)
        if world is not None:
            report_to_torchrun(world, lines)
        return EXIT_USER
    except AlreadyComplete as complete:
        say(str(complete), sys.stdout)
        return EXIT_OK
    except NamedFault as fault:
        say(f"titan-rl: {_one_line(str(fault))}", sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        print("titan-rl: stopped", file=sys.stderr)
        return EXIT_STOPPED
    except BrokenPipeError:
        if _is_read(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python will flush it once more
        return EXIT_UNREAD


def _say_what_cannot_be_written() -> None:
    """On a terminal that is not UTF-8 a sign that it lacks is shown as its code, as Python does on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def _signals_as_ctrl_c() -> Iterator[None]:
    """SIGTERM and a closed terminal end a command as Ctrl-C does, which lets go of what it holds: its temporary
    folders, its processes. The next one ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    taken = [number for number, handler in before.items() if handler is signal.SIG_DFL]

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        (on_ctrl_c if callable(on_ctrl_c) else signal.default_int_handler)(number, frame)

    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def in_process(main: Callable[[], int]) -> int:
    """A door's command as a program: its exit code, with which the process ends as soon as what is to be done at exit
    is done.

    Python would then take its modules apart one by one. Monarch's threads still hold objects, among them some of
    triton's, whose binding library prints forty lines about each end of a run that they are left over.
    """
    ended: list[int] = []

    def leave() -> None:
        if ended:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended[0])

    atexit.register(leave)  # the first to come is the last to be called
    ended.append(main())
    for number in (signal.SIGINT, signal.SIGTERM):  # the exit code stands, and what is left takes a moment
        signal.signal(number, signal.SIG_IGN)
    leave_monarch()
    return ended[0]


@cache
def leave_monarch_at_exit() -> None:
    """Leave Monarch when this process ends, where no command of titan-rl does. Monarch must be loaded, whose own
    handler then has nothing left to do."""
    atexit.register(leave_monarch)


def leave_monarch() -> None:
    """Its own goodbye at exit has one second, and on a busy machine says TimeoutError with a traceback."""
    if (monarch := sys.modules.get("monarch.actor")) is None:
        return
    ours, log = sys.modules.get("titan_rl.compat.monarch.actors"), partial(print, file=sys.stderr)
    # the exit code stands, and nobody needs what Monarch would still do: the run's reaper removes what is left
    with suppress(TimeoutError), ours.unknown_faults_logged(log) if ours is not None else nullcontext():
        monarch.shutdown_context(host_timeout=_GATEWAY_SECONDS).get(timeout=_GOODBYE_SECONDS)


def check_started_once(environment: Mapping[str, str], *, joins_torchrun: bool = False) -> None:
    """A run has one controller, which starts all other processes. Errors: ConfigError in the first of several copies;
    the others exit without a word. ``joins_torchrun``: whether torchrun's copies become one run."""
    for starter, size, rank in _STARTERS:
        number = environment.get(size, "")
        if not number.isdecimal() or number_of(environment, size) < 2:
            continue
        why = (
            f"{starter} starts {number} controllers ({size} = {number}), and a run has one, which starts all other "
            f"processes itself: start it once, without {starter} or with 1 process, or unset {size}"
        )
        if starter == "torchrun" and joins_torchrun:
            why = refusal(environment)
        if why and environment.get(rank, "0") != "0":
            time.sleep(_OTHERS_WAIT_SECONDS)
            sys.exit(EXIT_USER)
        if why:
            raise ConfigError(why)


def _one_line(finding: str) -> str:
    """However long what was given is, the mend at the end stays."""
    text = printable(" ".join(finding.splitlines()))
    half = _MAX_CHARACTERS // 2
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def _is_read(stream: Any) -> bool:
    """Whether somebody holds the other end of a pipe."""
    poll = select.poll()
    poll.register(stream, 0)
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
