"""One TOML file, plus ``--section.key value`` overrides, becomes one checked configuration.

TorchTitan's sections are built from its own dataclasses in trainer/titan_config.py, an algorithm's keys by the
algorithm (algorithms/registry.py). Whatever is wrong is a ConfigError: one line that says what, and how to mend it.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tomli
from pydantic import TypeAdapter, ValidationError

from titan_rl.config import other_names
from titan_rl.config.errors import ConfigError
from titan_rl.config.io.bounded_files import read_bytes, read_json
from titan_rl.config.model_directory.chat_template import read_template
from titan_rl.config.model_directory.checks import check_reward_model, find_model, find_value_model
from titan_rl.config.model_directory.config_checks import NoModelError
from titan_rl.config.model_directory.draft_heads import find_draft_head
from titan_rl.config.sections.combinations import check_combinations
from titan_rl.config.sections.schema import (
    MADE,
    MADE_MODELS,
    OUR_SECTIONS,
    TITAN_SECTIONS,
    AlgorithmConfig,
    Config,
    RewardModelConfig,
    RunConfig,
)
from titan_rl.config.sections.text_lists import lists_meant, with_lists
from titan_rl.config.shipped import LISTED, find_config, shipped

_TOML_BYTES = 1 << 20
"""A configuration of ten thousand lines."""
RENAMED_SECTIONS = {"warmup": "sft"}
"""Former names: refused in what a user writes, understood in the records of earlier releases."""
RENAMED_KEYS = {
    ("mesh", "hosts"): "worker_loops",
    ("model", "chat_template_kwargs"): "chat_template.options",
    ("model", "chat_template_date"): "chat_template.date",
    ("recovery", "bad_numbers"): "nonfinite",
    ("recovery", "max_bad_steps"): "max_nonfinite_steps",
}
"""The same for keys: section and former name to the new one."""
SWITCHES = {"sft": ("steps", 0), "lora": ("rank", 0), "curriculum": ("least_chance", 1), "hosts": ("launcher", "local")}
"""Keys that turn their whole section off, by a value: given over a file, what the file says in it no longer counts."""
T = TypeVar("T")
_NUM_NAMED, _SETTINGS_NAMED = 40, 4
_DEPTH = 30
"""Tables and lists within each other, from a section on."""
Settings = dict[str, Any]
"""A configuration, flat: ``training.seq_len`` to 512."""


def nearest(name: str, names: Iterable[str], other: str = "") -> str:
    """A hint for a misspelt name. ``other``: what may be given besides these names."""
    quoted = sorted(names)
    close = [each for each in quoted if each.lower() == name.lower()]
    close = close or difflib.get_close_matches(name, quoted, n=3, cutoff=0.5)
    close = close or difflib.get_close_matches(name.lower(), quoted, n=3, cutoff=0.5)
    close = sorted(close, key=lambda each: sorted(each) != sorted(name))  # two letters that changed places come first
    more = f" and {len(quoted) - _NUM_NAMED} more" if len(quoted) > _NUM_NAMED else ""
    if close:
        return f"did you mean {close[0]!r}?" + (f" Else give {other}" if other else "")
    return f"known: {', '.join(quoted[:_NUM_NAMED])}{more}" + (f"; or give {other}" if other else "")


def nearest_key(key: str, section: str, names: Iterable[str]) -> str:
    """A hint for a key that the section does not have: what other systems call so, or else the nearest."""
    our_key = other_names.KEYS.get(key, "")
    if key in other_names.NOT_HERE and section != "algorithm":
        return f"there is none here: {other_names.NOT_HERE[key]}; leave it out"
    if not our_key or our_key == f"{section}.{key}" or difflib.get_close_matches(key, names, n=1, cutoff=0.85):
        return nearest(key, names)
    same_section = our_key.removeprefix(f"{section}.")
    return f"did you mean {same_section!r}?" if same_section in set(names) else f"here it is {our_key}"


def nearest_setting(name: str, dashes: str = "") -> str:
    """A hint for a name without a section, with the settings that it may stand for; empty if there is none.
    ``dashes``: what settings begin with where it was given."""
    key = name.lstrip("-").partition("=")[0].replace("-", "_")
    if our_key := other_names.KEYS.get(key):
        return f"here it is {dashes}{our_key}"
    if why := other_names.NOT_HERE.get(key):
        return f"there is none here: {why}; leave it out"
    kinds = get_type_hints(Config)
    keys = {f"{section}.{f.name}": f.name for section in OUR_SECTIONS for f in fields(kinds[section])}
    close = difflib.get_close_matches(key, sorted(set(keys.values())), n=1, cutoff=0.8)
    meant = [f"{dashes}{setting}" for setting, last in keys.items() if close and last == close[0]]
    return f"did you mean {' or '.join(meant[:_SETTINGS_NAMED])}?" if meant else ""


def nearest_override(argument: str) -> str:
    """A hint for ``section.key=value`` without dashes, as Hydra takes it; empty for what has another form."""
    name, equals, _ = argument.partition("=")
    section, *path = name.split(".")
    is_section = section in (*OUR_SECTIONS, *TITAN_SECTIONS)
    if not path or not all(part.isidentifier() for part in (section, *path)) or not (equals or is_section):
        return ""
    if path == ["toml"]:  # a file's name
        return ""
    if not is_section:
        inner: Any = argument
        for part in reversed(path):
            inner = {part: inner}
        return _with_dashes(nearest_section(section, inner))
    kind = get_type_hints(Config).get(section)
    names = {f.name for f in fields(kind)} if kind is not None else set()
    if section != "algorithm" and names and path[0] not in names:
        return _with_dashes(nearest_key(path[0], section, names))
    return f"did you mean --{argument}?"


def _with_dashes(hint: str) -> str:
    return f"{hint}{'' if hint.endswith('?') else '.'} Settings are given with two dashes, as --section.key value"


def nearest_section(name: str, table: Any = None) -> str:
    """A hint for an unknown section. ``table``: what is given in it, of which a single key may be known by name."""
    key, inner = "", table
    while isinstance(inner, dict) and len(inner) == 1:
        [(key, inner)] = inner.items()
    sections = (*OUR_SECTIONS, *TITAN_SECTIONS)
    is_slip = bool(difflib.get_close_matches(name, sections, n=1, cutoff=0.8))
    if key and not is_slip and not isinstance(inner, dict) and (key in other_names.KEYS or key in other_names.NOT_HERE):
        return nearest_setting(key)
    if why := other_names.SECTIONS_NOT_HERE.get(name):
        return f"there is none here: {why}; leave it out"
    there = other_names.SECTIONS.get(name)
    return f"did you mean [{there}]?" if there else nearest(name, sections)


def build_section(cls: type[T], values: dict[str, Any], section: str, also_known: Iterable[str] = ()) -> T:
    """A dataclass from TOML values, strictly typed. Errors: ConfigError naming ``section.key``.

    ``also_known``: keys of the same section that somebody else reads, for the hint.
    """
    _check_keys(cls, values, section, also_known)
    try:
        # from JSON, strict mode still takes an integer for a float and a list for a tuple, but no "3" for 3
        return _adapter(cls).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([section, *(str(part) for part in first["loc"])])
        raise ConfigError(_refusal(where, first["type"], first["input"], first["msg"])) from None


def _refusal(where: str, kind: str, value: Any, why: str) -> str:
    """``kind`` and ``why``: of the validator's error."""
    if kind.startswith("missing"):
        return f"{where} is needed, and is not given: set it"
    bare = f" (--{where} without a value is true: give one)" if value is True else ""
    if kind == "string_type" and isinstance(value, bool | int | float):
        text = json.dumps(value)
        return f"{where} = {text} is no text: put it in quotes, as in --{where} '\"{text}\"'{bare}"
    if kind == "bool_type" and isinstance(value, str) and value.lower() in ("true", "false"):
        return f"{where} = {value!r}: write {value.lower()}, in small letters and without quotes"
    if kind in ("list_type", "tuple_type") and isinstance(value, str):
        lists = " or ".join(json.dumps(each, ensure_ascii=False) for each in lists_meant(value))
        return f"{where} = {value!r} is one text: give a list, {lists}"
    return f"{where} = {'true' if value is True else repr(value)}: {why.removeprefix('Value error, ')}{bare}"


def folders_of_code(overrides: dict[str, Any]) -> list[str]:
    """``--run.plugin_path`` of a command that takes no other setting. Errors: ConfigError."""
    table = with_lists(overrides).get("run", {})
    if overrides.keys() - {"run"} or table.keys() - {"plugin_path"}:
        raise ConfigError("of settings only --run.plugin_path FOLDER can be given here: all others are the run's own")
    return build_section(RunConfig, table, "run").plugin_path


def _check_keys(cls: Any, values: dict[str, Any], section: str, also_known: Iterable[str] = ()) -> None:
    """Check of a table's keys, and of tables in it that have keys of their own. Errors: as ``build_section``."""
    assert is_dataclass(cls), "a section is one"
    kinds = {f.name: f.type for f in fields(cls) if not f.name.startswith("_")}
    for key, value in values.items():
        if key not in kinds:
            names = kinds.keys() | set(also_known)
            raise ConfigError(f"unknown key {section}.{key}: {nearest_key(key, section, names)}")
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{section}.{key} = {value!r}: give a finite number")
        if is_dataclass(kinds[key]) and isinstance(value, dict):
            _check_keys(kinds[key], value, f"{section}.{key}")


@cache
def _adapter(cls: type) -> TypeAdapter:
    """Milliseconds to make, and sections are built over and over where layouts are compared."""
    return TypeAdapter(cls)


def _merge(base: dict, over: dict, depth: int = 0) -> dict:
    """Tables with others over them; inside a section an empty table takes the place of a full one."""
    merged = dict(base)
    for key, value in over.items():
        nests = isinstance(value, dict) and isinstance(merged.get(key), dict) and bool(value or not depth)
        merged[key] = _merge(merged[key], value, depth + 1) if nests else value
    return merged


def read_toml(path: Path) -> dict[str, Any]:
    """Errors: ConfigError if the file is missing, is no file, is empty or is not TOML."""
    text = _text_of(path)
    if not text.strip():
        raise ConfigError(f"{path} is empty: write what differs from the defaults, such as [training] and steps = 100")
    try:
        return tomli.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "; write true and false in small letters" if re.search(r"=\s*(True|False)\b", text) else ""
        raise ConfigError(f"{path} is not TOML: {error}{hint}") from None


def _text_of(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ConfigError(f"cannot read {path}: it is not a file; {_toml_to_give(path)}")
        return read_bytes(path, _TOML_BYTES).decode("utf-8-sig")  # with or without a byte-order mark
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {_toml_to_give(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error.reason} in UTF-8; save it as UTF-8") from None


def _toml_to_give(path: Path) -> str:
    if hint := nearest_override(str(path)):
        return hint
    close = difflib.get_close_matches(path.stem, shipped(), n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? Else " if close else ""
    return f"{hint}give the path of a TOML file, or {LISTED}"


def load_config(
    path: str | Path | None, overrides: dict[str, dict[str, Any]] | None = None, *, with_models: bool = True
) -> Config:
    """Parse and check our sections. ``path``: a TOML's, or the name of one that comes with the package. TorchTitan's
    sections and the algorithm's own keys are checked where they are built, as they need torch. ``with_models``: whether
    directories of models are looked for, and looked at."""
    file = None if path is None else find_config(path)
    overrides = with_lists(overrides or {})
    tables = _merge(_without_switched_off(read_toml(file) if file else {}, overrides), overrides)
    _check_sections(tables)
    _check_values(tables)
    config = _build(tables)
    if not config.run.plugin_path:
        folders = ([file.resolve().parent] if file else []) + [Path.cwd()]
        config.run.plugin_path = list(dict.fromkeys(map(str, folders)))
    config = _with_template(config)
    check_combinations(config)
    config = _with_drafter(config)
    return _with_directories(config) if with_models else config


def _without_switched_off(tables: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A file's tables but for sections that the overrides turn off; with another ``data.file``, ``[task]`` is one."""

    def override(name: str, key: str) -> Any:
        table = overrides.get(name)
        return table.get(key) if isinstance(table, dict) else None

    off = {name for name, (key, value) in SWITCHES.items() if override(name, key) == value}
    data = tables.get("data")
    if isinstance(data, dict) and data.get("file") == MADE and override("data", "file") not in (None, MADE):
        off.add("task")
    return {name: table for name, table in tables.items() if name not in off}


def with_overrides(config: Config, overrides: dict[str, dict[str, Any]]) -> Config:
    """Configuration with overrides. Errors: as ``load_config``."""
    return load_config(None, _merge(written(config), overrides))


def written(config: Config) -> dict[str, Any]:
    """All sections as TOML tables; of TorchTitan's, the keys that were set."""
    return as_dict(config) | config.titan


def load_resolved(path: Path) -> Config:
    """The configuration that a run directory keeps. Errors: ConfigError, also if it is another release's."""
    return load_config(None, read_resolved(path))


def read_resolved(path: Path) -> dict[str, dict[str, Any]]:
    """Its tables, under the names of this release; no value in them is checked. Errors: ConfigError."""
    try:
        tables: dict[str, dict[str, Any]] = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path} as a run's configuration: {error}") from None
    if not tables or not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{path} is no run's configuration: it holds no tables, or something else than tables")
    try:
        return {RENAMED_SECTIONS.get(name, name): _renamed(name, table) for name, table in tables.items()}
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"cannot read {path} as a run's configuration: {error}") from None


def _renamed(section: str, table: dict[str, Any]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for key, value in table.items():
        *path, name = RENAMED_KEYS[section, key].split(".") if (section, key) in RENAMED_KEYS else [key]
        inner = renamed
        for part in path:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return renamed


def _check_sections(tables: dict[str, Any]) -> None:
    names = (*OUR_SECTIONS, *TITAN_SECTIONS)
    for name, table in tables.items():
        if name in RENAMED_SECTIONS:
            raise ConfigError(f"[{name}] is called [{RENAMED_SECTIONS[name]}] now: rename the section")
        if name not in names and not isinstance(table, dict) and (hint := nearest_setting(name)):
            raise ConfigError(f"{name} = {table!r:.80} is in no section: {hint}")
        if name not in names:
            raise ConfigError(f"unknown section [{' '.join(name.split())}]: {nearest_section(name, table)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{name} = {table!r} must be a section: write [{name}] and keys below it")
        for key in table:
            if (name, key) in RENAMED_KEYS:
                raise ConfigError(f"{name}.{key} is called {name}.{RENAMED_KEYS[name, key]} now: rename the key")


def _check_values(tables: dict[str, Any]) -> None:
    """Errors: ConfigError for what no setting can be: nests that nothing could walk, text that no file could have as
    its name."""
    level: list[tuple[str, Any]] = list(tables.items())
    for _ in range(_DEPTH):
        level = [(f"{name}.{key}", value) for name, table in level for key, value in _inside(name, table)]
    if level:
        raise ConfigError(f"{level[0][0][:80]}... nests more than {_DEPTH} deep: no setting does")


def _inside(name: str, value: Any) -> Iterable[tuple[Any, Any]]:
    """What a table or a list holds. Errors: ConfigError for text that it should not be."""
    if isinstance(value, str) and ("\0" in value or not _is_whole(value)):
        what = "run directory" if name == "run.dir" else "setting"
        why = "has a null byte" if "\0" in value else "is not UTF-8"
        raise ConfigError(f"{name} = {value!r:.200} cannot be a {what}: it {why}; give another")
    return value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _build(tables: dict[str, dict[str, Any]]) -> Config:
    classes = get_type_hints(Config)
    tables = tables | {"algorithm": _with_options(tables.get("algorithm", {}))}
    ours = {name: build_section(classes[name], tables.get(name, {}), name) for name in OUR_SECTIONS}
    return Config(**ours, titan={name: tables[name] for name in TITAN_SECTIONS if name in tables})


def _with_options(algorithm: dict[str, Any]) -> dict[str, Any]:
    """The keys that every algorithm has, and the rest as ``options``."""
    common = {f.name for f in fields(AlgorithmConfig)} - {"options"}
    own = {key: value for key, value in algorithm.items() if key not in common}
    return {key: value for key, value in algorithm.items() if key in common} | {"options": own}


def _with_template(config: Config) -> Config:
    """Configuration with the text of its chat template in the place of the file. Errors: ConfigError."""
    template = config.model.chat_template
    if not template.file:
        return config
    if template.text:
        raise ConfigError("model.chat_template.file and model.chat_template.text both give the template: leave one out")
    try:
        text = read_template(template.file, config.run.plugin_path)
    except ValueError as error:
        raise ConfigError(f"model.chat_template.file = {template.file!r}: {error}") from None
    return replace(config, model=replace(config.model, chat_template=replace(template, file="", text=text)))


def _with_drafter(config: Config) -> Config:
    """Configuration whose engines draft by the model that learns, if one does. Errors: ConfigError."""
    drafts, path = config.generator.speculative, config.drafter.path
    if not path or not drafts.has_model:
        return config
    if drafts.model not in ("", path):
        raise ConfigError(
            f"drafter.path = {path!r} and generator.speculative.model = {drafts.model!r}: engines draft by the model "
            f"that learns; leave the latter out"
        )
    return replace(config, generator=replace(config.generator, speculative=replace(drafts, model=path)))


def _with_directories(config: Config) -> Config:
    """Models by their directories, checked. Errors: ConfigError for one that cannot be used."""
    if config.model.path not in MADE_MODELS:
        is_chat = config.task.style == "chat" and not config.model.chat_template.text
        config = replace(config, model=_found(config, "model", is_chat=is_chat))
    if config.reward_model.path:
        config = replace(config, reward_model=_reward_model(config.reward_model, config.run.plugin_path))
    roles = ("reference", "teacher", "critic", "implicit_reward", "drafter")
    config = replace(config, **{role: _found(config, role) for role in roles if getattr(config, role).path})
    drafts = config.generator.speculative
    if drafts.model:
        found = _directory(config, "generator.speculative.model", drafts.model, _finder_of_drafts(config))
        config = replace(config, generator=replace(config.generator, speculative=replace(drafts, model=found)))
    if not config.teacher.by_task:
        return config
    paths = config.teacher.by_task
    by_task = {task: _directory(config, f"teacher.by_task.{task}", path) for task, path in paths.items()}
    return replace(config, teacher=replace(config.teacher, by_task=by_task))


def _beside(path: str, folders: Iterable[str]) -> str:
    """A directory's path; where there is none here, that of the directory of this name in one of the folders."""
    places = (path, *(os.path.join(folder, path) for folder in folders))
    return next(filter(os.path.isdir, places), path)  # which a name that no file can have is no error for


def _reward_model(settings: RewardModelConfig, folders: Iterable[str]) -> RewardModelConfig:
    path, setting = os.path.abspath(_beside(settings.path, folders)), f"reward_model.path = {settings.path!r}"
    try:
        check_reward_model(Path(path))
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}") from None
    return replace(settings, path=path)


def _found(config: Config, section: str, **conditions: bool) -> Any:
    settings, find = getattr(config, section), find_model
    if section == "critic":
        find = find_value_model
    elif section == "drafter":
        find = _finder_of_drafts(config)
    return replace(settings, path=_directory(config, f"{section}.path", settings.path, find, **conditions))


def _finder_of_drafts(config: Config) -> Callable[..., str]:
    return find_draft_head if config.generator.speculative.method == "eagle3" else find_model


def _directory(
    config: Config, setting: str, path: str, find: Callable[..., str] = find_model, **conditions: bool
) -> str:
    """Checked directory that a setting names. Errors: ConfigError."""
    try:
        return find(_beside(path, config.run.plugin_path), own_family=bool(config.model.family), **conditions)
    except ValueError as error:
        tiny = ", or 'tiny'" if setting == "model.path" and isinstance(error, NoModelError) else ""
        raise ConfigError(f"{setting} = {path!r}: {error}{tiny}") from None


def as_dict(config: Config) -> dict[str, Any]:
    """Our sections as plain values, as a TOML would write them."""
    tables = {name: asdict(getattr(config, name)) for name in OUR_SECTIONS}
    tables["algorithm"] |= tables["algorithm"].pop("options")
    return tables


_FILES = ("file", "held_out_file")
"""Settings that name files, by their last part: a list of them is one value, with weights or without."""


def flat(values: Any, name: str = "") -> Settings:
    """Nested tables, and lists of tables, by dotted keys; a list of files stays whole."""
    is_list = isinstance(values, list | tuple) and name.rpartition(".")[2] not in _FILES
    if is_list and any(isinstance(value, dict) for value in values):
        values = {str(number): value for number, value in enumerate(values)}
    if not isinstance(values, dict):
        return {name: json.loads(json.dumps(values, default=str))}
    inner = (flat(value, f"{name}.{key}" if name else str(key)) for key, value in values.items())
    return {key: value for table in inner for key, value in table.items()}
