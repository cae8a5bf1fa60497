"""A TOML and what is given over it: a configuration, or one line."""

import json
import tempfile
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import get_type_hints

import tomli
from fuzzing import ANY_TEXT, VALUES, as_json, assert_one_line, fragments, fuzz, lists_of, mutated, spoilt
from hypothesis import strategies as st
from tree import TREE

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.io.overrides import override_arguments, parse_overrides
from titan_rl.config.io.toml_text import toml_text
from titan_rl.config.load import ConfigError, load_config, read_resolved, with_overrides, written
from titan_rl.config.sections.schema import OUR_SECTIONS, TITAN_SECTIONS, Config
from titan_rl.controller.preflight.resume import changes, flat
from titan_rl.environments.registry import make_task

SHIPPED = [path.read_text() for path in sorted((TREE / "configs").rglob("*.toml"))]
KEYS = [
    f"{section}.{field.name}"
    for section, kind in get_type_hints(Config).items()
    if section in OUR_SECTIONS
    for field in fields(kind)
] + [f"{section}.steps" for section in TITAN_SECTIONS]
NAMES = st.sampled_from(KEYS) | st.sampled_from(["task.options.file", "a.b.c", ".", "training.", "run"]) | ANY_TEXT
ARGUMENTS = st.builds("--{}={}".format, NAMES, VALUES.map(as_json) | ANY_TEXT) | NAMES.map("--{}".format) | ANY_TEXT


def from_text(data: bytes) -> Config | None:
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "run.toml")).write_bytes(data)
        try:
            return load_config(path, with_models=False)
        except ConfigError as error:
            assert_one_line(error)
            return None


def made(config: Config) -> None:
    """What its names stand for."""
    for make in (lambda: make_algorithm(config.algorithm, [], on_data=False), lambda: make_task(config.task, [])):
        try:
            make()
        except ConfigError as error:
            assert_one_line(error)


@fuzz(few=15, data=st.sampled_from([text.encode() for text in SHIPPED]).flatmap(mutated))
def test_bytes_are_a_configuration_or_one_line(data):
    if (config := from_text(data)) is not None:
        made(config)


@fuzz(data=fragments("[", "]", "[task]", "\n", "=", "name", '"', "'''", "{", "}", ".", "1e999", "0x", "[[", "#", ","))
def test_text_is_toml_or_one_line(data):
    from_text(data.encode("utf-8", "surrogatepass"))


@cache
def tables() -> list[dict]:
    """Those that ship, without what they leave to the defaults."""
    return [tomli.loads(text) for text in SHIPPED]


@fuzz(few=15, arguments=lists_of(ARGUMENTS), more=st.builds(tables).flatmap(st.sampled_from).flatmap(spoilt))
def test_what_is_given_over_a_file_is_a_configuration_or_one_line(arguments, more):
    try:
        overrides = parse_overrides(arguments)
    except ConfigError as error:
        return assert_one_line(error)
    for given in (overrides, more):
        try:
            config = load_config(None, given, with_models=False)
            made(config)
            again = with_overrides(load_config(None, with_models=False), {})
            assert written(again)
        except ConfigError as error:
            assert_one_line(error)
        except AttributeError:
            assert not isinstance(given, dict), "tables come from TOML, whose whole is a table"


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
TOML = st.dictionaries(
    st.text(min_size=1),
    st.dictionaries(st.text(min_size=1), LEAVES.filter(lambda leaf: leaf is not None) | st.lists(st.integers())),
)


@fuzz(examples=[{"tables": {"a b": {"": "\x7f"}}}, {"tables": {"task": {"\U0001f600": 1}}}], tables=TOML)
def test_tables_are_written_as_toml_that_says_the_same(tables):
    assert tomli.loads(toml_text(tables)) == tables


PARTS = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1)


@fuzz(
    examples=[{"tables": {"run": {"name": "\x7f"}}}],
    tables=st.dictionaries(PARTS, st.dictionaries(PARTS, LEAVES.filter(lambda leaf: leaf is not None), min_size=1)),
)
def test_tables_are_written_as_overrides_that_say_the_same(tables):
    assert parse_overrides(override_arguments(tables)) == tables


@fuzz(few=15, text=st.builds(tables).flatmap(st.sampled_from).flatmap(spoilt).map(as_json) | ANY_TEXT)
def test_a_runs_record_of_its_configuration_is_one_or_one_line(text):
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "config.json")).write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            tables = read_resolved(path)
            assert changes(flat(tables), flat(json.loads(json.dumps(tables)))) is not None
            made(load_config(None, tables, with_models=False))
        except ConfigError as error:
            assert_one_line(error)
