"""``titan-rl collect``: serves the page until Ctrl-C, and writes what was collected.

A collection is a folder. The first start makes it of a run, a file or a model; each later one goes on with it.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl.config.command_line import EXIT_FAULT, EXIT_OK
from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError, folders_of_code
from titan_rl.data.rows.file_sources import locate_sources
from titan_rl.data.rows.row_files import data_files
from titan_rl.data.storage.files import DiskFull, sampled_checksum
from titan_rl.diagnostics.web.collect.arguments import COUNT, LABELLERS, MAX_NEW_TOKENS, TEMPERATURE
from titan_rl.diagnostics.web.collect.sources import check_forms, disguised, file_items, planted_items
from titan_rl.records.preferences.collection import (
    Collection,
    Served,
    Settings,
    check_folder,
    check_new,
    create,
    is_collection,
    lock,
    read_collection,
    read_settings,
)
from titan_rl.records.preferences.items import Item, Mode, shuffled
from titan_rl.records.preferences.journal import latest
from titan_rl.records.preferences.rows import judged_items, rows_of, say_result, write_rows
from titan_rl.records.preferences.summary import summary_of, table

if TYPE_CHECKING:
    from titan_rl.diagnostics.web.serving import PageServer

Overrides = dict[str, dict[str, Any]]
_OF_MODEL = ("max_new_tokens", "temperature")
_PLAIN = ("count", "step", *_OF_MODEL)
_OF_SOURCES = ("pairs", "prompts", "planted", "rate", "count", "step", "seed", "out", *_OF_MODEL)


def collect(options: argparse.Namespace, overrides: Overrides) -> int:
    """Serve, or report; the exit code. Errors: ConfigError before anything listens."""
    _check(options, overrides)
    try:
        return _collect(options, overrides) if options.report is None else report(options.report, as_json=options.json)
    except DiskFull as error:
        say(error, sys.stderr)
        return EXIT_FAULT


def _collect(options: argparse.Namespace, overrides: Overrides) -> int:
    from titan_rl.diagnostics.web.serving import PageServer

    folder = _folder(options)
    check_folder(folder, write=True)
    with closing(PageServer(options.port)) as server:  # a port that is taken is said before a model is sampled
        if not is_collection(folder):
            check_new(folder)
            _create(folder, options, overrides)
        elif options.source != folder:
            _check_same(folder, options, overrides)
        return serve(folder, options.labellers, server)


def serve(folder: Path, labellers: int | None, server: "PageServer") -> int:
    """Serve a collection until Ctrl-C, and write its rows. Errors: ConfigError."""
    from titan_rl.diagnostics.web.collect.application import POLICY, application

    collection = Collection(folder, labellers)
    try:
        say(server.address)
        say(f"{len(collection.items)} to judge. Only your account on this machine reaches the page. Ctrl-C ends it.")
        server.run(application(collection), POLICY)
    finally:
        collection.close()
    return report(folder, as_json=False)


def report(folder: Path, *, as_json: bool) -> int:
    """Print a collection's summary, and write its rows unless another process serves it.

    Errors: ConfigError; DiskFull."""
    check_folder(folder, write=True)
    record = read_collection(folder)
    summary = summary_of(record)
    try:
        with lock(folder):
            written = write_rows(folder, rows_of(record.items, judged_items(latest(record.judgements))))
    except Served:
        say(f"{folder} is served by another process, which writes the rows when it ends", sys.stderr)
        written = {}
    say_result(folder, written, summary.as_dict() if as_json else table(summary))
    return EXIT_OK


# what is judged


def _check(options: argparse.Namespace, overrides: Overrides) -> None:
    """Errors: ConfigError for arguments that do not go together."""
    if options.report is not None and (options.source or _given(options) or options.labellers or overrides):
        raise ConfigError("--report DIR stands alone, or beside --json: leave the others out")
    if options.json and options.report is None:
        raise ConfigError("--json is of --report DIR: give that, or leave it out")
    for name in ("labellers", "count", "max_new_tokens"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1 << 31:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give 1 or more")
    if options.seed is not None and not 0 <= options.seed < 1 << 31:
        raise ConfigError(f"--seed {options.seed}: give 0 or more, below 2^31")
    if options.report is None:
        _check_source(options, overrides)


def _given(options: argparse.Namespace) -> list[str]:
    """Arguments of a new collection that were given; 0 is a value."""
    values = {name: getattr(options, name) for name in _OF_SOURCES}
    return [name for name, value in values.items() if value is not None and value is not False]


def _check_source(options: argparse.Namespace, overrides: Overrides) -> None:
    if options.source is None and options.pairs is None:
        raise ConfigError("collect needs a run, a model with --prompts FILE, or --pairs FILE; --help tells more")
    if options.pairs is not None and (options.source is not None or options.prompts is not None):
        raise ConfigError(f"--pairs {options.pairs} has its own answers: leave RUN_OR_MODEL and --prompts out")
    if options.prompts is None:
        of_model = next(
            (name for name in ("max_new_tokens", "temperature") if getattr(options, name) is not None), None
        )
        of_run = ("run", "plugin_path") if options.source else ()
        others = sorted(section for section, table in overrides.items() if (section, *table) != of_run)
        if of_model or others:
            name = of_model or f"{others[0]}.*"
            raise ConfigError(f"--{name.replace('_', '-')} is of a model that answers --prompts FILE: leave it out")
    if options.step is not None and (options.source is None or options.prompts is not None):
        raise ConfigError(f"--step {options.step} is of a run: leave it out")


def _folder(options: argparse.Namespace) -> Path:
    """Folder of the collection. Errors: ConfigError for a collection beside arguments of a new one."""
    if options.source is not None and is_collection(options.source):
        if given := _given(options):
            raise ConfigError(f"{options.source} is a collection: go on with it without --{given[0].replace('_', '-')}")
        return options.source
    named = Path(options.pairs.rstrip("/")).stem if options.source is None else options.source.resolve().name
    return options.out or Path("preferences", re.sub(r"[*?\[\]]", "", named).strip(".") or "collection")


def _create(folder: Path, options: argparse.Namespace, overrides: Overrides) -> None:
    """Make a collection; what can be wrong is looked at before a model is sampled."""
    mode, seed = _mode(options), _seed(options)
    settings = Settings(mode, seed, options.labellers or LABELLERS, _source(options, overrides))
    planted = planted_items(options.planted, mode) if options.planted else []
    items = _items(options, overrides, mode, seed, partial(check_forms, planted))
    create(folder, settings, shuffled([*items, *disguised(planted, items, seed)], seed))


def _items(
    options: argparse.Namespace, overrides: Overrides, mode: Mode, seed: int, check: Callable[[set[str | None]], None]
) -> list[Item]:
    """``check``: of the items' forms. Errors: ConfigError."""
    if options.prompts is not None:
        from titan_rl.diagnostics.web.collect.generation import model_items

        return model_items(options, overrides, mode, seed, check)
    if options.pairs is not None:
        items = file_items("--pairs", options.pairs, mode, count=options.count, seed=seed)
    else:
        from titan_rl.diagnostics.web.collect.recorded import run_items

        chosen = dict(step=options.step, count=options.count or COUNT, folders=folders_of_code(overrides))
        items = run_items(options.source, mode, seed=seed, **chosen)
    check({item.form for item in items})
    return items


def _mode(options: argparse.Namespace) -> Mode:
    return "ratings" if options.rate else "pairs"


def _seed(options: argparse.Namespace) -> int:
    return 1 if options.seed is None else options.seed


def _source(options: argparse.Namespace, overrides: Overrides) -> dict[str, Any]:
    """What the items are made of, to tell whether a later start means the same."""
    files = {name: getattr(options, name) for name in ("pairs", "prompts", "planted") if getattr(options, name)}
    return {
        **({"directory": str(options.source.resolve())} if options.source else {}),
        **{name: {"file": file, "checksums": _checksums(name, file)} for name, file in files.items()},
        **_defaults(options),
        **{name: getattr(options, name) for name in _PLAIN if getattr(options, name) is not None},
        **({"settings": json.dumps(overrides, sort_keys=True, default=str)} if overrides else {}),
    }


def _defaults(options: argparse.Namespace) -> dict[str, Any]:
    """Values of arguments that may be left out."""
    if options.prompts is not None:
        return {"max_new_tokens": MAX_NEW_TOKENS, "temperature": TEMPERATURE}
    return {"count": COUNT} if options.pairs is None else {}


def _checksums(name: str, file: str) -> list[str]:
    sources = locate_sources(f"--{name}", file, [])
    paths = [each for source in sources for path in source.paths for each in data_files(path)]
    return [sampled_checksum(path) for path in paths]


def _check_same(folder: Path, options: argparse.Namespace, overrides: Overrides) -> None:
    """Errors: ConfigError if the folder's collection was begun with something else."""
    begun = read_settings(folder)
    now = {"rate": _mode(options) == "ratings", "seed": _seed(options), **_source(options, overrides)}
    was = {"rate": begun.mode == "ratings", "seed": begun.seed, **begun.source}
    if (
        other := next((name for name in {**was, **now} if _compared(was.get(name)) != _compared(now.get(name))), None)
    ) is not None:
        raise ConfigError(
            f"{folder} was begun with another {other.replace('_', '-')}: give another --out, or go on with it by "
            f"`titan-rl collect {folder}`"
        )


def _compared(value: Any) -> Any:
    """Of a file its checksums, wherever it is."""
    return value.get("checksums") if isinstance(value, dict) else value
