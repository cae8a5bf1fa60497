"""``titan-rl watch RUN [RUN …]``: serves the page of runs, or of evaluations, on loopback until Ctrl-C.

Rollouts are read once into memory, beside the serving; nothing is written into a run's directory, nor anywhere else.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.config.load import ConfigError
from titan_rl.diagnostics.web.serving import PageServer

if TYPE_CHECKING:
    from fastapi import FastAPI

    from titan_rl.diagnostics.web.data.watched_run import Watched, WatchedEvaluations


def watch(roots: list[Path], port: int = 0, log: Callable[[str], None] = print) -> int:
    """Web page of these folders, until Ctrl-C. ``port``: 0 for any. Errors: ConfigError before anything listens."""
    from titan_rl.diagnostics.web.data.watched_run import Watched

    app, runs = application(roots)
    server = PageServer(port)
    for run in runs:
        if isinstance(run, Watched):
            threading.Thread(target=run.index.refresh, daemon=True).start()
    log(server.address)
    log("This address is for you alone; only this machine reaches it. Ctrl-C ends it; the runs are not touched.")
    server.run(app)
    return 0


def application(roots: list[Path]) -> "tuple[FastAPI, list[Watched | WatchedEvaluations]]":
    """An ASGI application without a guard, and what it shows. Errors: ConfigError where neither a run nor an
    evaluation is."""
    # before its import: it would make a folder in the current one, and load fonts and styles as it likes
    os.environ.setdefault("MATPLOTLIB", "false")
    from titan_rl.diagnostics.web.data.watched_run import watched

    if len({root.resolve() for root in roots}) != len(roots):
        raise ConfigError("a run is given twice: give each once")
    runs = watched(roots)
    from fastapi import FastAPI, Request
    from nicegui import ui

    from titan_rl.diagnostics.web.pages import Pages

    @ui.page("/", title=f"titan_rl: {', '.join(run.name for run in runs)}")
    def page(request: Request) -> None:
        Pages(runs, request.query_params)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    ui.run_with(app, title="titan_rl", dark=None, show_welcome_message=False)
    return app, runs
