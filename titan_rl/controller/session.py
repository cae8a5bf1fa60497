"""One training run: its parts put together, run to its end, and closed."""

import asyncio
import signal
import traceback

from titan_rl.config.load import ConfigError
from titan_rl.config.schema import Config
from titan_rl.controller.base_model import model_path
from titan_rl.environments.prompts import PromptStream
from titan_rl.records.rundir import RunDir

EXIT_OK, EXIT_FAULT, EXIT_USER, EXIT_STOPPED = 0, 1, 2, 130


def check_resumable(run_dir: RunDir, config: Config) -> None:
    """Errors: ConfigError if there is neither a whole checkpoint nor a record of all steps to resume from."""
    from titan_rl.records.checkpoints import CheckpointFolder
    from titan_rl.records.ledger import Ledger
    from titan_rl.records.rollouts import last_recorded

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


async def run(config: Config, titan, run_dir: RunDir, task, held_out, resume: bool) -> int:
    from titan_rl.controller.controller import Controller, Stopped
    from titan_rl.controller.display import Display
    from titan_rl.controller.wiring import make_meshes
    from titan_rl.records.ledger import Ledger
    from titan_rl.records.metrics import MetricsLog
    from titan_rl.records.plot import plot_curves
    from titan_rl.records.summary import write_summary

    ledger = Ledger(run_dir.ledger)
    metrics = MetricsLog(run_dir.root, config.metrics.tensorboard)
    stream = PromptStream(task, config.run.seed)
    with Display(titan.training.steps, run_dir.log) as display:
        display.say(f"run directory {run_dir.root}")
        meshes = make_meshes(
            config,
            titan,
            model_path(config, run_dir),
            logs=run_dir.logs.absolute(),
            say=display.say,
            tell=lambda kind, **fields: controller._note(kind, **fields),
            reissued=ledger.count_retry,
            catch_up=lambda trainers, step: controller.recovery.catch_up(trainers, step),
        )
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
