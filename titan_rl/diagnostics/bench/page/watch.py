"""``titan-rl bench watch``: how quick the page is with 100,000 rollouts, in a real browser, and pictures of it.

--watch.rollouts N        so many instead
--watch.screenshots DIR   where the pictures go (a new folder under the temporary one)
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.page.browser import browser_page, why_no_browser
from titan_rl.diagnostics.bench.page.synthetic_run import make_run

_ROLLOUTS = 100_000
_FIRST_VIEW_BAR, _FILTER_BAR = 2.0, 0.5
_REPEATS = 3
_PATIENCE = 60_000
"""Milliseconds."""
_ROW = ".rollouts tbody tr"


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Bench of the web page. Errors: ConfigError where there is no browser."""
    options = overrides.get("watch", {})
    if why := why_no_browser():
        raise ConfigError(why)
    count = int(options.get("rollouts", _ROLLOUTS))
    pictures = Path(options.get("screenshots") or tempfile.mkdtemp(prefix="titan_rl_watch_"))
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="watch_") as folder:
        make_run(root := Path(folder) / "made", count)
        make_run(beside := Path(folder) / "seed-2", 128 * 40, seed=2)
        with served(root, beside) as address:
            rows = _measure(address, count, pictures)
    return [*rows, row("screenshots", len(list(pictures.glob("*.png"))), "files", folder=str(pictures))]


@contextmanager
def served(*roots: Path) -> Iterator[str]:
    """The address of a page in a process of its own, which ends as Ctrl-C ends it."""
    command = [sys.executable, "-m", "titan_rl.cli", "watch", *map(str, roots)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None, "it is a pipe"
        try:
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _measure(address: str, count: int, pictures: Path) -> list[dict[str, Any]]:
    with browser_page() as page:
        start = time.perf_counter()
        page.goto(f"{address}?view=rollouts")
        page.wait_for_selector(_ROW, timeout=_PATIENCE)
        cold = time.perf_counter() - start
        # a page like a reader's: the server has been up for a moment
        views = [_timed(partial(_open, page, address, *view)) for view in _VIEWS for _ in range(_REPEATS)]
        filters = list(_filters(page))
        page.screenshot(path=pictures / "rollouts-filtered.png")
        sort = _timed(lambda: _sort(page))
        sheet = _timed(lambda: _open_sheet(page))
        page.screenshot(path=pictures / "rollout.png")
        page.get_by_text("disagreement", exact=True).last.click()
        page.wait_for_selector(".tok-down")
        page.screenshot(path=pictures / "rollout-disagreement.png")
        errors, elsewhere = list(page.errors), list(page.elsewhere)
    for dark in (False, True):
        _photograph(address, pictures, dark)
    first = max(statistics.median(views[start : start + _REPEATS]) for start in range(0, len(views), _REPEATS))
    return [
        row("first view", first, "s", _FIRST_VIEW_BAR, rollouts=count, views=[round(value, 3) for value in views]),
        row("first view, the server just started", cold, "s"),
        row("filter", max(filters), "s", _FILTER_BAR, each=[round(value, 3) for value in filters]),
        row("sort", sort, "s"),
        row("open a rollout", sheet, "s"),
        row("errors in the console", len(errors), "", 0, told=errors[:5]),
        row("requests to elsewhere", len(elsewhere), "", 0, to=elsewhere[:5]),
    ]


_VIEWS = (("curves", ".panels canvas"), ("rollouts", _ROW))


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _open(page: Any, address: str, view: str, shown: str) -> None:
    page.goto(f"{address}?view={view}", wait_until="commit")
    page.wait_for_selector(shown, timeout=_PATIENCE)


def _filters(page: Any) -> Iterator[float]:
    """Seconds from the last key to the rows, of each kind of filter."""
    summary = page.locator(".card > div.soft").first
    for label, text in (("least reward", "1"), ("least length", "60"), ("least disagreement", "0.008")):
        yield _filter(page, summary, page.get_by_label(label, exact=True), text)
    yield _filter(page, summary, page.get_by_label("search answers and prompts"), "carry one")


def _filter(page: Any, summary: Any, box: Any, text: str) -> float:
    before = summary.inner_text()
    start = time.perf_counter()
    box.fill(text)
    page.wait_for_function(
        "before => document.querySelector('.card > div.soft').innerText !== before", arg=before, timeout=_PATIENCE
    )
    page.wait_for_function("() => document.querySelectorAll('.rollouts tbody tr').length > 0", timeout=_PATIENCE)
    return time.perf_counter() - start


def _sort(page: Any) -> None:
    first = page.locator(_ROW).first
    before = first.inner_text()
    page.locator(".rollouts th", has_text="disagreement").click()
    page.wait_for_function(
        "before => document.querySelector('.rollouts tbody tr').innerText !== before", arg=before, timeout=_PATIENCE
    )


def _open_sheet(page: Any) -> None:
    page.locator(_ROW).first.click()
    page.wait_for_selector(".tok span", timeout=_PATIENCE)


def _photograph(address: str, pictures: Path, dark: bool) -> None:
    look = "dark" if dark else "light"
    with browser_page(dark=dark) as page:
        for view, shown in (*_VIEWS, ("steps", ".tl-row"), ("mesh", "table.plain")):
            _open(page, address, view, shown)
            page.wait_for_timeout(700)  # charts are drawn a moment after they are there
            page.screenshot(path=pictures / f"{view}-{look}.png", full_page=True)
