"""Entry points: a run from a TOML, the evaluation of a model, and the only event loop.

``titan-rl train FILE --section.key value``, or the same by ``python -m titan_rl.train``. Both also take a file as
TorchTitan does: 0.3 by ``--module titan_rl --config FILE``, older releases by ``--job.config_file FILE``.
"""

import argparse
import asyncio
import gc
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from titan_rl.config.command_line import (
    EXIT_FAULT,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER,
    Parser,
    TrainCommand,
    answer,
    in_process,
    parse,
)
from titan_rl.config.errors import NamedFault
from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError, load_config, nearest_section
from titan_rl.config.plugins import is_reference
from titan_rl.config.sections.schema import MADE_MODELS, OUR_SECTIONS, TITAN_SECTIONS, Config
from titan_rl.config.shipped import LISTED, shipped, subject
from titan_rl.config.torchrun import World, adopt, earlier_run, forget, record_run, report_to_torchrun, world_of
from titan_rl.data.storage.files import is_full
from titan_rl.environments.scoring.reward_trial import RewardTrial, reward_trial
from titan_rl.mesh.forking.forking import servers_started_early
from titan_rl.mesh.resources.imports import IMPORTS, collector_paused
from titan_rl.mesh.resources.open_files import raise_open_files

if TYPE_CHECKING:  # its imports take seconds, which a mistake in the TOML need not wait for
    from titan_rl.controller.session import Session
    from titan_rl.mesh.launch.torchrun import OtherRanks
    from titan_rl.records.statistics import Proportion

T = TypeVar("T")


def drive(work: Coroutine[Any, Any, T]) -> T:
    """A coroutine's result, in an event loop of its own."""
    return asyncio.run(work)


def _check_caller() -> None:
    """Errors: ConfigError where the command could have neither an event loop nor signals."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise ConfigError(
            "an event loop is running here already, as in a notebook: use titan_rl.controller.session.Session there"
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "signals reach the main thread alone: call this there, or start `titan-rl train` as a process"
        )


def train(config_file: str | None, overrides: dict[str, dict[str, Any]], resume: bool) -> int:
    """Run to the end; the exit code. Errors: ConfigError before any actor is started."""
    _check_caller()
    config, world = load_config(config_file, overrides), world_of(os.environ)
    command = TrainCommand(config_file, overrides)
    raise_open_files()  # before anything is begun ahead; the run says so when it starts
    with reward_trial(config) as trial:  # beside the imports
        if config.hosts.is_on and world is None:
            return _train_over_hosts(config, command, resume, trial)
        if world is None:
            kinds = IMPORTS if config.has_generators else ("trainer",)
            with servers_started_early(config, kinds):
                return drive(run_to_end(_open(config, command, resume, trial)))
        return _train_under_torchrun(world, config, command, resume, trial)


def _open(
    config: Config,
    command: TrainCommand,
    resume: bool,
    trial: RewardTrial | None,
    ranks: "OtherRanks | None" = None,
) -> "Session":
    from titan_rl.config.io.terminal import Terminal

    with Terminal().status("loading libraries"), collector_paused():  # a terminal must not stay empty for seconds
        from titan_rl.controller.session import Session
    try:
        return Session.open(config, command, resume=resume, ranks=ranks, trial=trial, leave_complete=ranks is None)
    except Exception as error:  # SQLite's and Arrow's, too, mean a full disk
        if not is_full(error):
            raise
        raise ConfigError(f"{error}; make room first") from None


def _train_over_hosts(config: Config, command: TrainCommand, resume: bool, trial: RewardTrial | None) -> int:
    """With hosts of other machines. Certificates must be known before Monarch is loaded."""
    from titan_rl.mesh.launch.base import make_host_launcher
    from titan_rl.mesh.resources.certificates import certify

    if not is_reference(config.hosts.launcher):  # a user's own may load Monarch
        make_host_launcher(config.hosts, config.run.plugin_path)
    certify(config.hosts)
    session = _open(config, command, resume, trial)
    code = drive(run_to_end(session))
    _exit_at_once(code)  # a host that was lost would be waited for


def _train_under_torchrun(
    world: World, config: Config, command: TrainCommand, resume: bool, trial: RewardTrial | None
) -> int:
    """Rank 0. A job that torchrun has started again goes on with the run that it had begun."""
    from titan_rl.mesh.launch.torchrun import OtherRanks

    ranks = OtherRanks(world)
    adopt(config, world)
    forget(os.environ)
    if (earlier := earlier_run(world)) is not None:
        config.run.dir, resume = earlier, True
    session = _open(config, command, resume, trial, ranks)
    record_run(world, session.run_dir.root)
    code = drive(run_to_end(session))
    if code != EXIT_OK:
        report_to_torchrun(world, f"titan-rl: {session.why_ended}")
    if session.stop_request.is_forced:
        _exit_at_once(code)
    return code


def _exit_at_once(code: int) -> NoReturn:
    """Monarch's own goodbye, as Python ends, waits for the dead host, and torchrun has no patience. What it would
    remove, the run's reaper does."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def join_torchrun(world: World) -> None:
    """Announce this process to torchrun's others. Any rank but 0 becomes a host and does not return."""
    from titan_rl.mesh.launch.torchrun import announce, serve

    announce(world)
    if world.rank:
        serve(world, _listen)


def _listen(address: str) -> None:
    from titan_rl.mesh.hosts.worker_loop import listen  # Monarch begins as it is imported

    listen(address)


def evaluate_directory(config_file: str | None, overrides: dict[str, dict[str, Any]]) -> "Proportion":
    """Held-out accuracy of ``model.path``, without a trainer. Errors: ConfigError before any start."""
    config = load_config(config_file, overrides)
    if config.model.path in MADE_MODELS:
        raise ConfigError("eval needs a model: give its Hugging Face directory")
    with servers_started_early(config, ("generator", "verifier")):
        return _evaluate_directory(config)


def _evaluate_directory(config: Config) -> "Proportion":
    from titan_rl.controller.preflight.checks import check
    from titan_rl.controller.wiring import Actors
    from titan_rl.mesh.meshes import ALL_PARTS
    from titan_rl.records.run_directory.path_checks import check_no_modules

    home = Path(config.model.path)
    check_no_modules(home.parent if (home.parent / "config.json").is_file() else home)  # a run directory holds models
    checked = check(config)

    async def evaluate() -> "Proportion":
        log = partial(print, file=sys.stderr)
        async with Actors(checked, config.model.path, ALL_PARTS - {"trainer"}, log=log) as actors:
            return await actors.evaluate()

    return drive(evaluate())


def relieve_collector() -> None:
    """Freeze library objects for the garbage collector, and let it run seldom.

    Its scans were a third of the controller's time for a sample (``titan-rl bench controller``)."""
    gc.freeze()
    gc.set_threshold(100_000, *gc.get_threshold()[1:])


async def run_to_end(session: "Session") -> int:
    """Drive a session from start to end; the exit code."""
    from titan_rl.controller.loop.shutdown import STOPPED_AT_ONCE, Lost, Stopped

    _stop_on_signals(session)
    error: BaseException | None = None
    why, code = None, EXIT_OK
    try:
        await session.stop_request.unless_failed(session.start())
        relieve_collector()
        await session.stop_request.unless_failed(session.run())
    except Stopped as stopped:
        error, why, code = stopped, stopped.why or "stopped by the user", EXIT_FAULT if stopped.why else EXIT_STOPPED
    except asyncio.CancelledError as cancelled:
        error, why, code = cancelled, "cancelled, and not by the user", EXIT_FAULT
    except ConfigError as mistake:  # that a host of another machine was needed to tell
        error, why, code = mistake, str(mistake), EXIT_USER
    except Exception as fault:  # told whole, written into the summary, and an exit code that says so
        error, why, code = fault, _why(fault), EXIT_FAULT
    session.stop_request.driver = None
    if error is not None and session.stop_request.is_urgent:  # whatever came of it first
        error, why, code = Stopped(), STOPPED_AT_ONCE, EXIT_STOPPED
    if error is not None and session.stop_request.is_forced:
        error, why, code = Lost(session.stop_request.why), session.stop_request.why, EXIT_FAULT
    if error is not None and code == EXIT_FAULT and not is_full(error) and not isinstance(error, Stopped | Lost):
        if not isinstance(error, NamedFault):
            session.log("".join(traceback.format_exception(error)))
        session.log(f"what the actors printed is in {session.run_dir.logs}")
    await session.close(error, why)
    _ignore_signals()
    return code


def _why(fault: Exception) -> str:
    """Line of the summary about what ended a run."""
    from titan_rl.controller.session import one_line

    if is_full(fault):
        return f"{one_line(fault).removeprefix('DiskFull: ')}; make room, then --resume goes on"
    return one_line(fault)


def _stop_on_signals(session: "Session") -> None:
    """The first Ctrl-C, SIGTERM or closed terminal ends the run after the step at hand, saved; a second Ctrl-C or
    SIGTERM ends it at once, unsaved. (A closed terminal may send SIGHUP twice.) ``nohup`` has SIGHUP ignored: it stays
    so."""
    loop, task, num_signals = asyncio.get_running_loop(), asyncio.current_task(), itertools.count()
    assert task is not None, "a coroutine that runs is some task's"
    session.stop_request.driver = task

    def on_signal() -> None:
        session.stop()
        if next(num_signals):
            session.stop_request.hurry()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, session.stop)


def _ignore_signals() -> None:
    """The exit code stands, and what is left takes a moment. (A loop that closes would bring back what signals did
    before it.)"""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of both entry points, besides overrides."""
    about = "show this help message, or the keys of a section of the TOML (all: of every one), and exit"
    parser.add_argument("-h", "--help", action=_Help, nargs="?", metavar="SECTION", help=about)
    parser.add_argument("file", nargs="?", help="TOML of the run, or the name of one that comes with titan_rl")
    parser.add_argument("--resume", action="store_true", help="go on with the newest run of that file, where it was")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print every setting as a TOML, look at no model or data, and end",
    )
    parser.add_argument("--config", metavar="FILE", help="the file in TorchTitan's manner")
    parser.add_argument("--module", help="titan_rl: TorchTitan 0.3 wants it beside --config")
    parser.set_defaults(show_help=parser.print_help)
    parser.epilog = "\n".join(
        (
            "Every key can be given as --section.key value, which goes over the file: --training.steps 20.",
            "docs/operations/configuration.md describes them, docs/algorithms.md those of an algorithm's own.",
            fill(f"Sections: {', '.join((*OUR_SECTIONS, *TITAN_SECTIONS))}.", 100),
            "\nThese files come with titan_rl:",
            *_listed(shipped()),
        )
    )


def _listed(files: dict[str, Path]) -> list[str]:
    width = max(map(len, files), default=0) + 2
    return [f"  {name:{width}}{shorten(subject(file), 100, placeholder=' ...')}" for name, file in files.items()]


class _Help(argparse.Action):
    """``--help``, or ``--help SECTION``, which takes the imports of TorchTitan."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        if values is None or values in shipped() or values.endswith(".toml"):
            parser.print_help()
            parser.exit()
        section = values.strip("[]").split(".")[0]
        if section not in (*OUR_SECTIONS, *TITAN_SECTIONS, "all"):
            parser.error(f"--help {values}: a TOML has no section of that name; {nearest_section(section)}")

        from titan_rl.controller.key_help import key_help

        say(key_help(section))
        parser.exit()


def train_command(options: argparse.Namespace, overrides: dict[str, dict[str, Any]]) -> int:
    """``train`` by the arguments of ``add_arguments``; without any, the help. Errors: ConfigError."""
    file = _file(options, overrides.pop("job", {}))
    if file is None and not overrides and not options.resume:
        options.show_help(sys.stderr)
        return EXIT_USER
    if options.print_config:
        return print_config(file, overrides)
    return train(file, overrides, options.resume)


def print_config(config_file: str | None, overrides: dict[str, dict[str, Any]]) -> int:
    """Every setting of a run, defaults and all, as a TOML that makes the same run. Errors: ConfigError, but for models
    and data, which are not looked at."""
    config = load_config(config_file, overrides, with_models=False)

    from titan_rl.config.io.toml_text import toml_text
    from titan_rl.controller.preflight.checks import resolve
    from titan_rl.controller.preflight.ineffective_settings import check_read

    checked = resolve(config)
    check_read(checked.config, checked.algorithm, checked.titan, checked.task)
    print(toml_text(checked.as_dict()))
    return EXIT_OK


def _file(options: argparse.Namespace, job: Any) -> str | None:
    """``job``: the section of that name, which only older releases of TorchTitan have."""
    if not isinstance(job, dict) or not isinstance(job.get("config_file", ""), str):
        raise ConfigError("--job.config_file takes the path of a TOML file")
    if set(job) - {"config_file"}:
        raise ConfigError(f"unknown key job.{min(set(job) - {'config_file'})}: [job] takes config_file only")
    if options.module not in (None, "titan_rl"):
        raise ConfigError(f"--module {options.module}: here it is titan_rl; model.path says which model is trained")
    if options.module and options.config is None:
        raise ConfigError(f"--module titan_rl needs --config: a TOML file, or {LISTED}")
    files = [file for file in (options.file, options.config, job.get("config_file")) if file is not None]
    if len(files) > 1:
        raise ConfigError(f"{' and '.join(files)}: a run has one file; give the rest as --section.key value")
    return files[0] if files else None


def main(arguments: list[str] | None = None) -> int:
    """``python -m titan_rl.train``."""
    return answer(_run, arguments, join_torchrun)


def _run(arguments: list[str]) -> int:
    about = "Run a TOML, as `titan-rl train` does."
    parser = Parser(prog="python -m titan_rl.train", description=about, add_help=False)
    add_arguments(parser)
    return train_command(*parse(parser, arguments))


if __name__ == "__main__":
    sys.exit(in_process(main))
