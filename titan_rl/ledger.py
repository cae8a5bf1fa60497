"""Every prompt's fate, on disk: pending, trained at a step, or discarded for a named reason."""

import sqlite3
from collections.abc import Iterable
from pathlib import Path

_SCHEMA = """
create table if not exists prompts (
    id text primary key,
    state text not null check (state in ('pending', 'trained', 'discarded')),
    step integer,
    reason text
) without rowid
"""


class Ledger:
    """One writer: the controller. Survives its process; a power cut costs at most the last commits."""

    def __init__(self, path: Path):
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("pragma journal_mode = wal")
        self._connection.execute("pragma synchronous = normal")
        self._connection.execute(_SCHEMA)

    def issue(self, prompt_id: str) -> None:
        """Errors: sqlite3.IntegrityError if the prompt was issued before."""
        self._connection.execute("insert into prompts values (?, 'pending', null, null)", (prompt_id,))

    def train(self, prompt_ids: Iterable[str], step: int) -> None:
        self._settle([("trained", step, None, prompt_id) for prompt_id in prompt_ids])

    def discard(self, prompt_id: str, reason: str) -> None:
        self._settle([("discarded", None, reason, prompt_id)])

    def _settle(self, rows: list[tuple]) -> None:
        statement = "update prompts set state = ?, step = ?, reason = ? where id = ? and state = 'pending'"
        self._connection.execute("begin")
        try:
            for row in rows:
                changed = self._connection.execute(statement, row).rowcount
                assert changed == 1, f"{row[-1]} is not pending, so it cannot be {row[0]}"
        except BaseException:  # all rows or none, and no transaction left open, whatever it was
            self._connection.execute("rollback")
            raise
        self._connection.execute("commit")

    def rewind(self, step: int) -> list[str]:
        """Back to a checkpoint's mark: what was trained later is pending again. Gives all that is pending, in order."""
        self._connection.execute("update prompts set state = 'pending', step = null where step > ?", (step,))
        rows = self._connection.execute("select id from prompts where state = 'pending' order by id")
        return [prompt_id for (prompt_id,) in rows]

    def last_issued(self) -> str | None:
        """The id that comes last in the stream's order."""
        [(prompt_id,)] = self._connection.execute("select max(id) from prompts")
        return prompt_id

    def sync(self) -> None:
        """All that was committed is on disk, beyond a power cut."""
        self._connection.execute("pragma wal_checkpoint(truncate)")

    def account(self) -> dict[str, int]:
        """``issued``, ``trained`` and ``pending``, and ``discarded (reason)`` for each reason."""
        rows = self._connection.execute("select state, reason, count(*) from prompts group by state, reason").fetchall()
        account = {"issued": sum(count for *_, count in rows), "trained": 0, "pending": 0}
        for state, reason, count in rows:
            account[f"discarded ({reason})" if state == "discarded" else state] = count
        return account

    def close(self) -> None:
        self._connection.close()
