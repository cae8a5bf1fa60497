"""``titan-rl ledger RUN``: the account of a run, active or ended, and whether the run's files prove it."""

import json
import sqlite3
from pathlib import Path

from rich.table import Table

from titan_rl.config.io.terminal import Terminal
from titan_rl.config.load import ConfigError
from titan_rl.records.ledger.audit import UnreadableLedger, flaws_of, read
from titan_rl.records.ledger.cross_checks import contradictions
from titan_rl.records.ledger.ledger import is_unchained, read_account
from titan_rl.records.run_directory.rundir import existing_run_dir, is_on_data

_MAX_FLAWS = 200
"""That are printed; ``--json`` has all."""


def discarded_of(account: dict[str, int]) -> dict[str, int]:
    """Number of discarded samples by reason, of a ledger's account."""
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
    """The account of a run directory, and all flaws of it. Errors: ConfigError if there is none that can be read."""
    run_dir = existing_run_dir(run)
    path = run_dir.ledger
    if not path.is_file():
        raise ConfigError(f"{run} holds no ledger.db: give a run directory, such as runs/quickstart-<date>-<time>")
    if is_on_data(run_dir):
        raise ConfigError(f"{run} is a run on data.file, which samples nothing: it has no ledger, and none is missing")
    against = contradictions(run)
    try:
        account = read(path, lambda connection: _account(connection, steps))
    except UnreadableLedger as error:
        raise ConfigError(str(error)) from None
    account["flaws"] += against
    return {"run": str(run), **account, "adds_up": not account["flaws"]}


def _account(connection: sqlite3.Connection, steps: bool) -> dict:
    account = read_account(connection)
    retries = dict(connection.execute("select retries, count(*) from prompts where retries group by retries"))
    [(prompts, total_retries)] = connection.execute("select count(*), coalesce(sum(retries), 0) from prompts")
    return {
        "prompts": prompts,
        "issued": account["issued"],
        "trained": account["trained"],
        "pending": account["pending"],
        "discarded": discarded_of(account),
        "is_chained": not is_unchained(connection),
        "flaws": flaws_of(connection),
        "retries": total_retries,
        "prompts_by_retries": {str(count): number for count, number in sorted(retries.items())},
        **({"steps": _steps(connection)} if steps else {}),
    }


def _verdict(ledger: dict) -> str:
    if not ledger["is_chained"]:
        return "cannot be proved"
    return "adds up" if ledger["adds_up"] else "does NOT add up"


def _account_table(ledger: dict) -> Table:
    table = Table()
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
    table.add_row("issued", f"{ledger['issued']:,}", _verdict(ledger))
    return table


def _steps_table(steps: list[dict]) -> Table:
    table = Table(title="batches", title_justify="left")
    for name in ("step", "prompts", "trained", "discarded in it"):
        table.add_column(name, justify="left" if name == "discarded in it" else "right")
    for entry in steps:
        why = ", ".join(f"{count} {reason}" for reason, count in entry["discarded"].items())
        table.add_row(str(entry["step"]), str(entry["prompts"]), str(entry["trained"]), why)
    return table


def _shown(flaws: list[str]) -> list[str]:
    more = len(flaws) - _MAX_FLAWS
    return flaws[:_MAX_FLAWS] + ([f"and {more:,} more, which --json lists"] if more > 0 else [])


def show_ledger(run: Path, *, steps: bool, as_json: bool) -> int:
    """Print it; the exit code, which is 1 if the account does not add up, or cannot be proved."""
    ledger = read_ledger(run, steps)
    if as_json:
        print(json.dumps(ledger))
    else:
        console = Terminal()
        console.print(f"ledger of {ledger['run']}", soft_wrap=True)
        console.print(_account_table(ledger))
        again = ", ".join(
            f"{number} prompt{'s' * (number != 1)} {count} time{'s' * (int(count) != 1)}"
            for count, number in ledger["prompts_by_retries"].items()
        )
        console.print(f"{ledger['prompts']:,} prompts; retried after infrastructure failures: {again or 'none'}")
        if steps:
            console.print(_steps_table(ledger["steps"]))
        for flaw in _shown(ledger["flaws"]):
            console.print(flaw, soft_wrap=True)
    return 0 if ledger["adds_up"] else 1
