"""``titan-rl trace RUN``: who did what when, as JSON that https://ui.perfetto.dev and Chrome's trace viewer open."""

import json
import sys
from pathlib import Path

from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError
from titan_rl.records.run_directory.rundir import existing_run_dir, is_on_data
from titan_rl.records.steps.trace import as_chrome, read_trace


def export_trace(run: Path, steps: str | None, out: Path | None) -> int:
    """Export of a run's trace.

    ``steps``: ``A:B``, or one step; all by default. ``out``: a file; else it is printed. Errors: ConfigError.
    """
    first, last = _range(steps)
    run_dir = existing_run_dir(run)
    trace = read_trace(run_dir.root, first, last)
    if not trace and is_on_data(run_dir):
        raise ConfigError(
            f"{run} is a run on data.file, whose steps are its trainer's alone: they leave no trace, and the seconds "
            f"of each are in metrics.jsonl"
        )
    if not trace:
        recorded = read_trace(run)
        there = f"its steps {min(recorded)} to {max(recorded)} are" if recorded else "none of its steps is"
        raise ConfigError(f"{run} has no trace of that: {there} recorded")
    text = json.dumps(as_chrome(trace))
    if out is None:
        print(text)
        return 0
    try:
        out.write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}; give another --out") from None
    say(f"{out}: steps {min(trace)} to {max(trace)}, to be opened at ui.perfetto.dev or chrome://tracing", sys.stderr)
    return 0


def _range(steps: str | None) -> tuple[int, int | None]:
    if steps is None:
        return 0, None
    first, colon, last = steps.partition(":")
    try:
        begin, end = int(first or 0), (int(last) if last else None) if colon else int(first)
    except ValueError:
        raise ConfigError(f"--steps {steps}: give two steps as A:B, or one") from None
    if end is not None and end < begin:
        raise ConfigError(f"--steps {steps}: the first step comes first: give {end}:{begin}")
    return begin, end
