"""``titan-rl collect``: serves the page until Ctrl-C, and writes what was collected.

A collection is a folder. The first start makes it of a run, a file or a model; each later one goes on with it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from titan_rl.config.command_line import EXIT_FAULT, EXIT_OK
from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError
from titan_rl.data.rows.file_sources import locate_sources
from titan_rl.data.rows.row_files import data_files
from titan_rl.data.storage.files import DiskFull, sampled_checksum
from titan_rl.diagnostics.web.collect.arguments import COUNT, LABELLERS
from titan_rl.diagnostics.web.collect.sources import file_items, planted_items, run_items
from titan_rl.records.preferences.collection import (
    Collection,
    Settings,
    check_folder,
    check_new,
    create,
    is_collection,
    read_collection,
    read_settings,
)
from titan_rl.records.preferences.items import Item, Mode, shuffled
from titan_rl.records.preferences.journal import latest
from titan_rl.records.preferences.rows import judged_items, rows_of, write_rows
from titan_rl.records.preferences.summary import summary_of, table

Overrides = dict[str, dict[str, Any]]
_OF_MODEL = ("max_new_tokens", "temperature")
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
    folder = _folder(options)
    check_folder(folder, write=True)
    if not is_collection(folder):
        check_new(folder)
        _create(folder, options, overrides)
    elif options.source != folder:
        _check_same(folder, options, overrides)
    return serve(folder, options.labellers, options.port)


def serve(folder: Path, labellers: int | None, port: int) -> int:
    """Serve a collection until Ctrl-C, and write its rows. Errors: ConfigError before anything listens."""
    from titan_rl.diagnostics.web.collect.application import POLICY, application
    from titan_rl.diagnostics.web.serving import PageServer

    collection = Collection(folder, labellers)
    try:
        server = PageServer(port)
        say(server.address)
        say(f"{len(collection.items)} to judge. Only your account on this machine reaches the page. Ctrl-C ends it.")
        server.run(application(collection), POLICY)
    finally:
        collection.close()
    return report(folder, as_json=False)


def report(folder: Path, *, as_json: bool) -> int:
    """Print a collection's summary, and write its rows. Errors: ConfigError; DiskFull."""
    check_folder(folder, write=True)
    record = read_collection(folder)
    summary = summary_of(record)
    written = write_rows(folder, rows_of(record.items, judged_items(latest(record.judgements))))
    if as_json:
        say(json.dumps(summary.as_dict() | {"rows": written}))
        return EXIT_OK
    say(table(summary))
    for name, count in written.items():
        say(f"wrote {folder / name}: {count} rows")
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
        if of_model or overrides:
            name = of_model or f"{min(overrides)}.*"
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
    return options.out or Path("preferences", named or "collection")


def _create(folder: Path, options: argparse.Namespace, overrides: Overrides) -> None:
    mode, seed = _mode(options), _seed(options)
    items = _items(options, overrides, mode, seed)
    if options.planted:
        items = [*items, *planted_items(options.planted, mode)]
    settings = Settings(mode, seed, options.labellers or LABELLERS, _source(options, overrides))
    create(folder, settings, shuffled(items, seed))


def _items(options: argparse.Namespace, overrides: Overrides, mode: Mode, seed: int) -> list[Item]:
    if options.pairs is not None:
        return file_items("--pairs", options.pairs, mode)[: options.count]
    if options.prompts is not None:
        from titan_rl.diagnostics.web.collect.generation import model_items

        return model_items(options, overrides, mode, seed)
    return run_items(options.source, mode, step=options.step, count=options.count or COUNT, seed=seed)


def _mode(options: argparse.Namespace) -> Mode:
    return "ratings" if options.rate else "pairs"


def _seed(options: argparse.Namespace) -> int:
    return 1 if options.seed is None else options.seed


def _source(options: argparse.Namespace, overrides: Overrides) -> dict[str, Any]:
    """What the items are made of, to tell whether a later start means the same."""
    files = {name: getattr(options, name) for name in ("pairs", "prompts", "planted") if getattr(options, name)}
    plain = ("count", "step", *_OF_MODEL)
    return {
        **({"directory": str(options.source.resolve())} if options.source else {}),
        **{name: {"file": file, "checksums": _checksums(name, file)} for name, file in files.items()},
        **{name: getattr(options, name) for name in plain if getattr(options, name) is not None},
        **({"settings": overrides} if overrides else {}),
    }


def _checksums(name: str, file: str) -> list[str]:
    sources = locate_sources(f"--{name}", file, [])
    paths = [each for source in sources for path in source.paths for each in data_files(path)]
    return [sampled_checksum(path) for path in paths]


def _check_same(folder: Path, options: argparse.Namespace, overrides: Overrides) -> None:
    """Errors: ConfigError if the folder's collection was begun with something else."""
    begun = read_settings(folder)
    now = {"rate": _mode(options) == "ratings", "seed": _seed(options), **_source(options, overrides)}
    was = {"rate": begun.mode == "ratings", "seed": begun.seed, **begun.source}
    if other := next((name for name in {**was, **now} if was.get(name) != now.get(name)), None):
        raise ConfigError(
            f"{folder} was begun with {other.replace('_', '-')} = {json.dumps(was.get(other))}, which is another now: "
            f"give another --out, or go on with it by `titan-rl collect {folder}`"
        )
