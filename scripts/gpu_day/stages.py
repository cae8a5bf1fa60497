"""The stages: what each runs, for how long at most, and what is wanted of it. The one table.

Wanted is what docs/benchmarks.md is compared with; a bar that is missed fails the command, and is no fault by itself.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from gpu_check.supervision import SCRIPTS
from gpu_check.thresholds import Bar

from gpu_day.runs import Figures, figures_of_check, figures_of_kernels, figures_of_tests, figures_of_trl

TREE = SCRIPTS.parent


@dataclass(frozen=True)
class Stage:
    """A command in a folder. ``run``: the run directory in it that the command makes; else ``read`` makes figures of
    what it printed."""

    command: tuple[str, ...]
    deadline: float
    bars: tuple[Bar, ...] = ()
    run: str = ""
    read: Callable[[str], Figures] = lambda log: {}


def _train(toml: str, run: str, *overrides: str) -> tuple[str, ...]:
    return ("titan-rl", "train", toml, "--run.dir", run, *overrides)


def _noise(run: str, steps: int, *overrides: str) -> tuple[str, ...]:
    return _train("noise.toml", run, "--training.steps", str(steps), *overrides)


_IN_BF16 = (Bar("agreement_mean", 1.01), Bar("used_of_planned", 1.0))
STAGES: dict[str, Stage] = {
    # first, since it is meant to find nothing cached
    "quickstart": Stage(_train("quickstart", "quickstart"), 300, (Bar("seconds_whole", 100),), run="quickstart"),
    "quickstart again": Stage(
        _train("quickstart", "again", "--training.steps", "2"), 120, (Bar("seconds_until_up", 20),), run="again"
    ),
    "model": Stage((sys.executable, "-m", "gpu_day.model", "."), 120),
    "1.51B": Stage(
        _noise("beside", 6), 300, (Bar("seconds_to_first_step", 45), Bar("seconds_step", 4.1), *_IN_BF16), run="beside"
    ),
    "1.51B again": Stage(_noise("beside_again", 3), 150, (Bar("seconds_to_first_step", 20),), run="beside_again"),
    "1.51B engine not compiled": Stage(
        _noise("graphs", 3, "--generator.torch_compile", "false"),
        150,
        (Bar("seconds_to_first_step", 45),),
        run="graphs",
    ),
    "1.51B compiled": Stage(_noise("compiled", 4, "--compile.enable", "true"), 240, run="compiled"),
    "1.51B colocated": Stage(
        _noise("colocated", 4, "--placement.mode", "colocated"), 240, (Bar("share_between", 0.1),), run="colocated"
    ),
    "1.51B batch-invariant": Stage(
        # an engine divides by a temperature in a kernel of vLLM's own
        _noise("invariant", 3, "--debug.batch_invariant", "true", "--rollout.temperature", "0.7"),
        300,
        (Bar("agreement_mean", 1.0),),
        run="invariant",
    ),
    "TRL": Stage(
        (sys.executable, "-m", "gpu_day.trl_steps", ".", "4"), 240, (Bar("ours_over_trl", 0.35),), read=figures_of_trl
    ),
    "check": Stage(
        (sys.executable, str(SCRIPTS / "gpu_check.py")),
        500,
        (Bar("train 1b bfloat16 share", 0.55, at_least=True), Bar("train 1b compiled share", 0.62, at_least=True)),
        read=figures_of_check,
    ),
    "kernels": Stage((sys.executable, str(TREE / "kernels" / "bench.py")), 240, read=figures_of_kernels),
    "tests": Stage(
        (sys.executable, *("-m", "pytest", "-q", "-n", "8", "tests/kernels", "tests/mesh/channel/test_channel.py")),
        240,
        (Bar("failed", 0),),
        read=figures_of_tests,
    ),
}
