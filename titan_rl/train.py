"""One training run from a TOML: check everything, start the meshes, run the loop, leave a whole run directory.

``titan-rl train FILE --section.key value`` or ``python -m titan_rl.train --job.config_file FILE --section.key value``.
"""

import asyncio
import signal
import sys
import traceback
from typing import Any

from titan_rl.config import Config, ConfigError, as_dict, load_config, parse_overrides
from titan_rl.prompts import PromptStream, held_out_prompts
from titan_rl.rundir import RunDir, new_run_dir, run_dir_to_resume
from titan_rl.tasks.base import make_task

EXIT_OK, EXIT_FAULT, EXIT_USER, EXIT_STOPPED = 0, 1, 2, 130


def train(config_file: str | None, overrides: dict[str, dict[str, Any]], resume: bool) -> int:
    """Run to the end; the exit code. Errors: ConfigError before any process is started."""
    config = load_config(config_file, overrides)
    task = make_task(config.task.name, config.task.style, config.task.options)
    held_out = held_out_prompts(task, config.eval.prompts)
    run_dir = run_dir_to_resume(config, config_file) if resume else new_run_dir(config, config_file)

    from titan_rl.checks import check_algorithm, check_model, check_prompts, check_transport
    from titan_rl.titan_config import build_titan

    titan = build_titan(config)
    check_algorithm(config)
    check_model(config)
    check_transport(config)
    check_prompts(config, titan.training.seq_len, task, held_out)
    if resume:
        _check_resumable(run_dir, config)
    run_dir.open(as_dict(config) | titan.as_dict())
    return asyncio.run(_run(config, titan, run_dir, task, held_out, resume))


def _check_resumable(run_dir: RunDir, config: Config) -> None:
    """Errors: ConfigError if there is neither a whole checkpoint nor a record of all steps to resume from."""
    from titan_rl.checkpoint import CheckpointFolder
    from titan_rl.ledger import Ledger
    from titan_rl.rollouts import last_recorded

    folder = CheckpointFolder(run_dir.checkpoints, config.checkpoint.keep_latest_k)
    if folder.newest_whole() is not None:
        return
    trained = Ledger(run_dir.ledger).last_trained_step()
    if (recorded := last_recorded(run_dir.rollouts, 0, trained)) < trained:
        flaws = ", ".join(f"of step {step}, {folder.flaw(step)}" for step in folder.steps()) or "there is none"
        raise ConfigError(
            f"no checkpoint of {run_dir.root} is whole ({flaws}), and the rollouts of step {recorded + 1} are not "
            f"there: leave --resume out, and give another --run.dir"
        )


def model_path(config: Config, run_dir: RunDir) -> str:
    """The directory to start from; ``tiny`` is made here."""
    if config.model.path != "tiny":
        return config.model.path
    if not run_dir.base_model.exists():
        from titan_rl.model.tiny import make_tiny

        half = run_dir.base_model.with_suffix(".writing")  # a run that is killed must not leave half a model
        make_tiny(half, seed=config.run.seed)
        half.rename(run_dir.base_model)
    return str(run_dir.base_model)


async def _run(config: Config, titan, run_dir: RunDir, task, held_out, resume: bool) -> int:
    from titan_rl.controller import Controller, Stopped
    from titan_rl.display import Display
    from titan_rl.ledger import Ledger
    from titan_rl.mesh.meshes import Meshes
    from titan_rl.metrics import MetricsLog
    from titan_rl.plot import plot_curves
    from titan_rl.summary import write_summary

    ledger = Ledger(run_dir.ledger)
    metrics = MetricsLog(run_dir.root, config.metrics.tensorboard)
    stream = PromptStream(task, config.run.seed)
    meshes = Meshes(config, titan, model_path(config, run_dir), logs=run_dir.logs.absolute())
    with Display(titan.training.steps, run_dir.log) as display:
        display.say(f"run directory {run_dir.root}")
        controller = Controller(config, titan, run_dir, meshes, stream, held_out, ledger, metrics, display)
        _stop_on_signals(controller.stop_requested)
        why, code = "completed", EXIT_OK
        try:
            await controller.run(resume)
        except Stopped:
            why, code = "stopped by the user", EXIT_STOPPED
        except asyncio.CancelledError:
            if controller.stop_requested.is_set():  # the second Ctrl-C
                why, code = "stopped by the user at once", EXIT_STOPPED
            else:
                why, code = "cancelled, and not by the user", EXIT_FAULT
                display.say(traceback.format_exc())
        except Exception as error:  # told whole, written into the summary, and an exit code that says so
            why, code = one_line(error), EXIT_FAULT
            display.say(traceback.format_exc())
        finally:
            await meshes.stop()
            metrics.close()
            summary = write_summary(run_dir, controller.progress, titan.training.steps, why, ledger.account())
            ledger.close()
            plot_curves(run_dir.root, run_dir.curves)
        display.close_table()
        if code == EXIT_FAULT:
            display.say(f"what the actors printed is in {run_dir.logs}")
        display.say(
            f"{why}: {summary['steps_done']} of {summary['steps_asked']} steps, "
            f"training took {summary['seconds_training'] + summary['seconds_warm_up']:.0f} s"
        )
        for when in ("before", "after"):
            if (result := getattr(controller.progress, f"held_out_{when}")) is not None:
                display.say(f"held-out accuracy {when:>6}: {result}")
    return code


def one_line(error: Exception) -> str:
    """What failed and why, from an error that may hold the traceback of another process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}" + (f" {lines[-1]}" if len(lines) > 1 else "")


def _stop_on_signals(stop: asyncio.Event) -> None:
    """The first Ctrl-C ends the run after the step at hand, saved; the second one ends it at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

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
