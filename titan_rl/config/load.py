"""One TOML file, plus ``--section.key value`` overrides, becomes one checked configuration.

TorchTitan's sections are built from its own dataclasses in trainer/titan_config.py, an algorithm's keys by the
algorithm (algorithms/registry.py). Whatever is wrong is a ConfigError: one line that says what, and how to mend it.
"""

import difflib
import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import tomli
from pydantic import TypeAdapter, ValidationError

from titan_rl.config.model_directory.checks import find_model
from titan_rl.config.schema import OUR_SECTIONS, TITAN_SECTIONS, AlgorithmConfig, Config

RENAMED_SECTIONS = {"warmup": "sft"}
"""Former names: refused in what a user writes, understood in the records of earlier releases."""
_NUM_NAMED = 20


class ConfigError(ValueError):
    """A user's mistake: one line, exit code 2, nothing started."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name."""
    listed = sorted(known)
    close = difflib.get_close_matches(name, listed, n=1, cutoff=0.5)
    more = f" and {len(listed) - _NUM_NAMED} more" if len(listed) > _NUM_NAMED else ""
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(listed[:_NUM_NAMED])}{more}"


def build_section(cls: type, values: dict[str, Any], section: str, also_known: Iterable[str] = ()):
    """A dataclass from TOML values, strictly typed. Errors: ConfigError naming ``section.key``.

    ``also_known``: keys of the same section that somebody else reads, for the hint.
    """
    known = {f.name for f in fields(cls) if not f.name.startswith("_")}
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key {section}.{key}: {nearest(key, known | set(also_known))}")
    try:
        # from JSON, strict mode still takes an integer for a float and a list for a tuple, but no "3" for 3
        return TypeAdapter(cls).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([section, *(str(part) for part in first["loc"])])
        raise ConfigError(f"{where} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}") from None


def parse_overrides(arguments: list[str]) -> dict[str, dict[str, Any]]:
    """``["--training.steps", "20"]`` becomes ``{"training": {"steps": 20}}``; a bare flag is true; deeper dots nest."""
    overrides: dict[str, dict[str, Any]] = {}
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if not argument.startswith("--") or "." not in argument:
            raise ConfigError(f"cannot read {argument!r}: overrides look like --section.key value")
        name, has_value, text = argument[2:].partition("=")
        if not has_value:
            following = arguments[position + 1 : position + 2]
            if following and not following[0].startswith("--"):
                text, position = following[0], position + 1
            else:
                text = "true"
        *path, key = name.split(".")
        table = overrides
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--{name} and another override exclude each other: {part} is a value or a table")
        table[key] = _toml_value(text)
        position += 1
    return overrides


def _toml_value(text: str) -> Any:
    try:
        return tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return text


def _merge(base: dict, over: dict) -> dict:
    merged = dict(base)
    for key, value in over.items():
        nests = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if nests else value
    return merged


def read_toml(path: str | Path) -> dict[str, Any]:
    """Errors: ConfigError if the file is missing or is not TOML."""
    try:
        with open(path, "rb") as file:
            return tomli.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a TOML file") from None
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def load_config(path: str | Path | None, overrides: dict[str, dict[str, Any]] | None = None) -> Config:
    """Parse and check our sections. TorchTitan's sections and the algorithm's own keys are checked where they are
    built, as they need torch."""
    tables = _merge(read_toml(path) if path else {}, overrides or {})
    _check_sections(tables)
    config = _build(tables)
    if not config.run.plugin_path:
        folders = ([Path(path).resolve().parent] if path else []) + [Path.cwd()]
        config.run.plugin_path = list(dict.fromkeys(map(str, folders)))
    _check_combinations(config)
    if config.model.path != "tiny":
        config.model.path = _model_directory(config)
    return config


def load_resolved(path: Path) -> Config:
    """The configuration that a run directory keeps. Errors: ConfigError, also if it is another release's."""
    try:
        tables = json.loads(path.read_text())
        tables = {RENAMED_SECTIONS.get(name, name): table for name, table in tables.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read {path} as a run's configuration: {error}") from None
    return load_config(None, tables)


def _check_sections(tables: dict[str, Any]) -> None:
    known = (*OUR_SECTIONS, *TITAN_SECTIONS)
    for name, table in tables.items():
        if name in RENAMED_SECTIONS:
            raise ConfigError(f"[{name}] is called [{RENAMED_SECTIONS[name]}] now: rename the section")
        if name not in known:
            raise ConfigError(f"unknown section [{' '.join(name.split())}]: {nearest(name, known)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{name} = {table!r} must be a section: write [{name}] and keys below it")


def _build(tables: dict[str, dict[str, Any]]) -> Config:
    classes = {f.name: f.default_factory for f in fields(Config) if f.name != "titan"}
    tables = tables | {"algorithm": _with_options(tables.get("algorithm", {}))}
    ours = {name: build_section(classes[name], tables.get(name, {}), name) for name in OUR_SECTIONS}
    return Config(**ours, titan={name: tables[name] for name in TITAN_SECTIONS if name in tables})


def _with_options(algorithm: dict[str, Any]) -> dict[str, Any]:
    """The keys that every algorithm has, and the rest as ``options``."""
    common = {f.name for f in fields(AlgorithmConfig)} - {"options"}
    own = {key: value for key, value in algorithm.items() if key not in common}
    return {key: value for key, value in algorithm.items() if key in common} | {"options": own}


def _check_combinations(config: Config) -> None:
    rollout, algorithm = config.rollout, config.algorithm
    if algorithm.updates_per_batch > rollout.prompts_per_step:
        raise ConfigError(
            f"algorithm.updates_per_batch = {algorithm.updates_per_batch} is more than "
            f"rollout.prompts_per_step = {rollout.prompts_per_step}: an optimizer step needs a group of its own"
        )
    if config.generator.update == "drain" and config.generator.kv == "recompute":
        raise ConfigError(
            "generator.kv = 'recompute' has nothing to recompute with generator.update = 'drain', which leaves no "
            "request running: leave one of them out"
        )
    if config.mesh.launcher != "local" and not config.mesh.hosts:
        raise ConfigError("mesh.launcher starts worker loops, and mesh.hosts = 0 asks for none: set mesh.hosts too")
    if config.model.path == "tiny" and config.task.style == "chat":
        raise ConfigError("task.style = 'chat' needs a chat model: set model.path, or task.style = 'compact' for tiny")
    if config.task.system_prompt and config.task.style != "chat":
        raise ConfigError("task.system_prompt needs task.style = 'chat': set it, or write the text into the prompts")


def _model_directory(config: Config) -> str:
    """Errors: ConfigError for a model that cannot be trained."""
    model, is_chat = config.model, config.task.style == "chat"
    try:
        return find_model(model.path, own_family=bool(model.family), is_chat=is_chat)
    except ValueError as error:
        raise ConfigError(f"model.path = {model.path!r}: {error}") from None


def as_dict(config: Config) -> dict[str, Any]:
    """Our sections as plain values, as a TOML would write them."""
    tables = {name: asdict(getattr(config, name)) for name in OUR_SECTIONS}
    tables["algorithm"] |= tables["algorithm"].pop("options")
    return tables
