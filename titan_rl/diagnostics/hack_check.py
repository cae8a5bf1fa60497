"""``titan-rl hack-check RUN``: was the reward earned or gamed? Alarms of a run, active or ended, from its metrics."""

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from titan_rl.config.io.terminal import Terminal
from titan_rl.config.load import ConfigError
from titan_rl.records.alarms.alarms import HISTORY, REWARD_HACKING, Alarm, history
from titan_rl.records.alarms.windows import WINDOW
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.rundir import existing_run_dir, is_on_data

_COLUMNS = {
    "reward": "what the policy is trained on",
    "grade": "what it is not trained on (eval.grader)",
    "response_length": "tokens of an answer",
    "truncated": "answers that ran out of tokens",
    "effective_answers": "effective number of different answers to a step's prompts",
}
_NEEDED_BY = {"grade": "reward_gap", "response_length": "length_runaway", "effective_answers": "answers_collapse"}


def check_run(root: Path) -> dict:
    """Alarms, and the first and the last window of what they look at. Errors: ConfigError if there is no step yet."""
    if is_on_data(existing_run_dir(root)):
        raise ConfigError(f"{root} is a run on data.file, which samples no answers: it has no reward to be gamed")
    records = [record for record in read_metrics(root) if "reward" in record]
    if not records:
        raise ConfigError(f"{root} has no recorded step: give a run directory, such as runs/quickstart-<date>-<time>")
    windows = {
        name: (_mean(records[:WINDOW], name), _mean(records[-WINDOW:], name))
        for name in _COLUMNS
        if all(name in record for record in records)
    }
    alarms, last = history(records, REWARD_HACKING), int(records[-1]["step"])
    return {
        "run": str(root),
        "steps": len(records),
        "alarms": [asdict(alarm) | {"stands": alarm.last == last} for alarm in alarms],
        "unwatched": _unwatched(len(records), windows),
        "first_and_last_steps": windows,
    }


def _mean(records: list[dict[str, float]], name: str) -> float:
    return sum(record[name] for record in records) / len(records)


def _unwatched(num_steps: int, windows: dict) -> dict[str, str]:
    """Alarms that could not have been raised, and why."""
    if num_steps < 2 * WINDOW:
        return dict.fromkeys(REWARD_HACKING, f"it takes {2 * WINDOW} steps to compare, and there are {num_steps}")
    why = {"grade": "the run has no eval.grader"}
    return {
        alarm: why.get(name, f"{name} was not recorded, or not at every step")
        for name, alarm in _NEEDED_BY.items()
        if name not in windows
    }


def _table(checked: dict) -> Table:
    table = Table(title=f"{checked['run']}, {checked['steps']} steps", title_justify="left")
    table.add_column("mean of steps")
    for name in (f"first {WINDOW}", f"last {WINDOW}"):
        table.add_column(name, justify="right")
    for name, (first, last) in checked["first_and_last_steps"].items():
        table.add_row(f"{name}: {_COLUMNS[name]}", f"{first:.3f}", f"{last:.3f}")
    return table


def _line(alarm: Alarm, stands: bool) -> str:
    until = "and stands" if stands else f"until step {alarm.last}"
    return f"ALARM {alarm.name} from step {alarm.first} {until}: {alarm.says}"


def hack_check(root: Path, *, as_json: bool) -> int:
    """Print it; the exit code, which is 1 if an alarm was raised, whether it stands or not."""
    checked = check_run(root)
    if as_json:
        print(json.dumps(checked))
        return 1 if checked["alarms"] else 0
    console = Terminal()
    console.print(_table(checked))
    lines = [f"not watched: {name}, since {why}" for name, why in checked["unwatched"].items()]
    if checked["steps"] > HISTORY:
        lines.append(f"watched: the last {HISTORY} steps")
    for alarm in checked["alarms"]:
        stands = alarm.pop("stands")
        lines.append(_line(Alarm(**alarm), stands))
    for line in lines if checked["alarms"] else [*lines, "no alarm"]:
        console.print(line, soft_wrap=True)
    return 1 if checked["alarms"] else 0
