"""``titan-rl ledger RUN``: the account of a run, active or ended, read from its ledger alone."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.table import Table

from titan_rl.config.load import ConfigError
from titan_rl.records.ledger import read_account
from titan_rl.records.rundir import RunDir


def _discarded(account: dict[str, int]) -> dict[str, int]:
    prefix = "discarded ("
    return {name[len(prefix) : -1]: count for name, count in account.items() if name.startswith(prefix)}


def _steps(connection: sqlite3.Connection) -> list[dict]:
    """For each step's batch: how many samples were trained, and why others of the same groups were not."""
    steps: dict[int, dict] = {}
    rows = connection.execute(
        "select step, reason, count(*), count(distinct prompt_id) from samples where step is not null "
        "group by step, reason order by step, reason"
    )
    for step, reason, samples, prompts in rows:
        entry = steps.setdefault(step, {"step": step, "prompts": 0, "trained": 0, "discarded": {}})
        if reason is None:
            entry |= {"prompts": prompts, "trained": samples}
        else:
            entry["discarded"][reason] = samples
    return list(steps.values())


def read_ledger(run: Path, steps: bool = False) -> dict:
    """The account of a run directory. Errors: ConfigError if there is none."""
    path = RunDir(run).ledger
    if not path.is_file():
        raise ConfigError(f"{run} holds no ledger.db: give a run directory, such as runs/quickstart-<date>-<time>")
    try:
        with closing(sqlite3.connect(f"file:{path.absolute()}?mode=ro", uri=True)) as connection:
            connection.execute("begin")  # one snapshot, since the run may be active
            account, discarded = (found := read_account(connection)), _discarded(found)
            retries = dict(connection.execute("select retries, count(*) from prompts where retries group by retries"))
            [(prompts, total_retries)] = connection.execute("select count(*), coalesce(sum(retries), 0) from prompts")
            by_step = _steps(connection) if steps else None
    except sqlite3.DatabaseError as error:
        raise ConfigError(
            f"{path} cannot be read as a ledger ({error}): it is from another release, or damaged"
        ) from None
    settled = account["trained"] + sum(discarded.values()) + account["pending"]
    result = {
        "run": str(run),
        "prompts": prompts,
        "issued": account["issued"],
        "trained": account["trained"],
        "pending": account["pending"],
        "discarded": discarded,
        "adds_up": account["issued"] == settled,
        "retries": total_retries,
        "prompts_by_retries": {str(count): number for count, number in sorted(retries.items())},
    }
    return result | ({"steps": by_step} if steps else {})


def _account_table(ledger: dict) -> Table:
    table = Table(title=f"ledger of {ledger['run']}", title_justify="left")
    table.add_column("samples")
    table.add_column("count", justify="right")
    table.add_column("share", justify="right")
    issued = max(ledger["issued"], 1)
    rows = [("trained", ledger["trained"])]
    rows += [(f"discarded: {reason}", count) for reason, count in ledger["discarded"].items()]
    rows += [("pending", ledger["pending"])]
    for name, count in rows:
        table.add_row(name, f"{count:,}", f"{count / issued:.2%}")
    table.add_section()
    table.add_row("issued", f"{ledger['issued']:,}", "adds up" if ledger["adds_up"] else "does NOT add up")
    return table


def _steps_table(steps: list[dict]) -> Table:
    table = Table(title="batches", title_justify="left")
    for name in ("step", "prompts", "trained", "discarded in it"):
        table.add_column(name, justify="left" if name == "discarded in it" else "right")
    for entry in steps:
        why = ", ".join(f"{count} {reason}" for reason, count in entry["discarded"].items())
        table.add_row(str(entry["step"]), str(entry["prompts"]), str(entry["trained"]), why)
    return table


def show_ledger(run: Path, *, steps: bool, as_json: bool) -> int:
    """Print it; the exit code, which is 1 if the account does not add up."""
    ledger = read_ledger(run, steps)
    if as_json:
        print(json.dumps(ledger))
    else:
        console = Console()
        console.print(_account_table(ledger))
        again = ", ".join(f"{number} prompts {count} times" for count, number in ledger["prompts_by_retries"].items())
        console.print(
            f"{ledger['prompts']:,} prompts; sampled again after a failure of the machinery: {again or 'none'}",
            highlight=False,
        )
        if steps:
            console.print(_steps_table(ledger["steps"]))
    return 0 if ledger["adds_up"] else 1
