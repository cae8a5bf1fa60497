"""Work of a ``titan-rl principles`` command, checked: everything that can be wrong is said before a process starts."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os.path import isfile  # says no to a name that is too long
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError, build_section
from titan_rl.controller.preflight.checks import Checked, check, read_config, tokenizer_of
from titan_rl.controller.preflight.data_checks import longest_prompt
from titan_rl.data.storage.files import sampled_checksum
from titan_rl.data.text.messages import message
from titan_rl.data.text.turns import NO_TEMPLATE
from titan_rl.diagnostics.principles.agreement import Labelled, labelled_pairs
from titan_rl.diagnostics.principles.arguments import REVISIONS, SAMPLES
from titan_rl.diagnostics.principles.asking import Question
from titan_rl.diagnostics.principles.backends import request_of
from titan_rl.diagnostics.principles.constitution import Constitution, read_constitution
from titan_rl.diagnostics.principles.stages import Stages
from titan_rl.diagnostics.principles.verdicts import question
from titan_rl.diagnostics.web.collect.arguments import TEMPERATURE
from titan_rl.diagnostics.web.collect.generation import checked_prompts
from titan_rl.diagnostics.web.collect.sources import asked_item
from titan_rl.environments.rewards.judge_server import ServerConfig, check_server
from titan_rl.models.layers.rope import num_positions
from titan_rl.records.preferences.collection import ITEMS, read_collection
from titan_rl.records.preferences.items import Item, shown
from titan_rl.records.run_directory.sources import find_sources

Overrides = dict[str, dict[str, Any]]
_SECTION = "judge"
_OF_PROMPTS = ("count", "revisions", "samples", "temperature", "against")
"""Arguments of a model's answers to prompts."""


@dataclass(frozen=True)
class Work:
    """Everything that is to be done."""

    stages: Stages
    checked: Checked | None
    """Configuration of the model; None: nothing is asked of one."""
    prompts: list[Item]
    labelled: list[Labelled]
    server: ServerConfig | None
    """Server of the judge; None: the model judges, or the one that it is compared with."""
    settings: dict[str, Any]
    """To tell whether a later start means the same."""
    against: Checked | None = None
    """Configuration of another model, which gives the second answer of each pair."""


def work_of(options: argparse.Namespace, overrides: Overrides) -> Work:
    """Work by the arguments of the command. Errors: ConfigError."""
    _check_numbers(options)
    constitution = read_constitution(options.file)
    stages = _stages(options, constitution)
    server = _server(overrides.get(_SECTION))
    of_model = {name: table for name, table in overrides.items() if name != _SECTION}
    _check_together(options, of_model, server)
    labelled = [] if options.labels is None else labelled_pairs(read_collection(options.labels))
    _check_principles(options.file, stages, has_labels=bool(labelled))
    checked, against = (
        None if path is None else _checked(path, options, of_model, stages, labelled)
        for path in (options.model, options.against)
    )
    prompts = [] if checked is None or options.prompts is None else _prompts(checked)
    settings = _settings(options, stages, checked, server, of_model)
    if against is not None:
        settings["against"] = find_sources(against.config)["model.path"]
    return Work(stages, checked, prompts, labelled, server, settings, against)


# arguments


def _check_numbers(options: argparse.Namespace) -> None:
    """Errors: ConfigError for a number that none of its kind can be."""
    for name, least in (("count", 1), ("max_new_tokens", 1), ("revisions", 0), ("samples", 0), ("seed", 0)):
        value, most = getattr(options, name), 100 if name in ("revisions", "samples") else (1 << 31) - 1
        if value is not None and not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give {least} or more, up to {most}")
    if options.samples is not None and options.samples % 2:
        raise ConfigError(f"--samples {options.samples}: answers are compared two by two; give an even number")


def _check_together(options: argparse.Namespace, of_model: Overrides, server: ServerConfig | None) -> None:
    """Errors: ConfigError for arguments without an effect, or without what they need."""
    if options.model is None and (options.labels is None or server is None or options.prompts is not None):
        raise ConfigError(
            "principles needs --model RUN_OR_MODEL; a judge with --judge.url and --judge.model is measured by --labels "
            "DIR without one"
        )
    if options.against is not None:
        _check_against(options)
    if options.model is not None and options.prompts is None and (options.labels is None or server is not None):
        raise ConfigError("principles needs --prompts FILE, which the model answers; or --labels DIR that it judges")
    if options.prompts is not None:
        return
    of_prompts = _OF_PROMPTS if options.model is not None else (*_OF_PROMPTS, "max_new_tokens")
    given = [f"--{name.replace('_', '-')}" for name in of_prompts if getattr(options, name) is not None]
    if given := given or [f"--{section}.*" for section in sorted(of_model) if options.model is None]:
        raise ConfigError(f"{given[0]} is of a model that answers --prompts FILE: give both, or leave it out")


def _check_against(options: argparse.Namespace) -> None:
    """Errors: ConfigError for arguments that a comparison of two models does not read."""
    if options.model is None:
        raise ConfigError("--against RUN_OR_MODEL is compared with --model RUN_OR_MODEL: give both")
    if given := next((name for name in ("revisions", "samples") if getattr(options, name) is not None), None):
        raise ConfigError(f"--{given}: with --against each model answers a prompt once; leave it out")


def _stages(options: argparse.Namespace, constitution: Constitution) -> Stages:
    has_prompts = options.prompts is not None
    given = {
        "seed": (options.seed, 1),
        "samples": (options.samples, SAMPLES if has_prompts else 0),
        "revisions": (options.revisions, REVISIONS if has_prompts and options.against is None else 0),
        "temperature": (options.temperature, TEMPERATURE),
    }
    values = {name: default if value is None else value for name, (value, default) in given.items()}
    return Stages(constitution, **values)


def _check_principles(file: Path, stages: Stages, *, has_labels: bool) -> None:
    """Errors: ConfigError for a constitution without a principle of a stage that is asked for."""
    if not stages.revisions and not stages.samples and not has_labels:
        raise ConfigError("--revisions 0 and --samples 0 leave nothing to do: raise one of them")
    if stages.revisions and not stages.constitution.of_revisions:
        raise ConfigError(f"{file} has no principle with critique and revision: add one, or give --revisions 0")
    if (stages.samples or has_labels) and not stages.constitution.of_comparisons:
        raise ConfigError(f"{file} has no principle with a comparison: add one, or give --samples 0 without --labels")


def _server(values: Any) -> ServerConfig | None:
    """Judge's server by ``--judge.*``; None without any. Errors: ConfigError."""
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ConfigError("--judge is a section: give --judge.url and --judge.model")
    config = build_section(ServerConfig, values, _SECTION)
    check_server(config, _SECTION)
    return config


# the model


def _checked(
    path: Path, options: argparse.Namespace, overrides: Overrides, stages: Stages, labelled: Sequence[Labelled]
) -> Checked:
    """Configuration of a model with the prompts as its suite, and with room for the longest question. Errors:
    ConfigError."""
    if not stages.temperature and stages.samples and options.against is None:
        raise ConfigError("--temperature 0 gives the same answer twice: raise it, or give --samples 0")
    asking = argparse.Namespace(
        source=_model(path),
        prompts=options.prompts or str(options.labels / ITEMS),
        count=options.count,
        max_new_tokens=options.max_new_tokens,
        temperature=stages.temperature,
    )
    checked = checked_prompts(asking, overrides, 1, stages.seed)
    has_length = "seq_len" in overrides.get("training", {})
    checked = checked if has_length else _with_room(checked, stages.constitution, labelled)
    _check_dialogue(checked)
    return checked


def _model(path: Path) -> Path:
    """Model directory; of a run the one that it exported."""
    exported = path / "model"
    return exported if not isfile(path / "tokenizer.json") and isfile(exported / "config.json") else path


def _with_room(checked: Checked, constitution: Constitution, labelled: Sequence[Labelled]) -> Checked:
    """With room for the longest prompt and three replies, and for labelled pairs, as far as the model has positions."""
    [suite] = checked.suites
    tokenizer = tokenizer_of(checked.config)
    requests = [each or "" for one in constitution.principles for each in (one.critique, one.revision, one.comparison)]
    frames = [question("", ("", ""), request) for request in requests]
    pairs = [question(shown(each.item.prompt), [*map(shown, each.item.answers)], "") for each in labelled]
    frame, pair = (max((len(tokenizer.encode(text)) for text in texts), default=0) for texts in (frames, pairs))
    needed = 3 * suite.config.max_new_tokens + 2 * frame + max(longest_prompt(suite, tokenizer), pair)
    room = min(max(needed, checked.titan.training.seq_len), num_positions(read_config(checked)))
    titan = checked.config.titan | {"training": checked.config.titan.get("training", {}) | {"seq_len": room}}
    return check(replace(checked.config, titan=titan), keys=())


def _check_dialogue(checked: Checked) -> None:
    """Check that the template has a place for an answer and what is said of it. Errors: ConfigError."""
    [suite] = checked.suites
    tokenizer, turns = tokenizer_of(checked.config), [message("assistant", "a"), message("user", "b")]
    for prompt in suite.prompts:
        item = asked_item(suite.task, prompt, (), "")
        if isinstance(item.prompt, str):
            raise ConfigError(NO_TEMPLATE)
        request_of(Question("", [*item.prompt, *turns], 0, item.tools, item.template_options), checked, tokenizer)


def _prompts(checked: Checked) -> list[Item]:
    """Prompts as their task asks them, numbered, without answers."""
    [suite] = checked.suites
    items = [asked_item(suite.task, prompt, (), str(prompt.entry["place"])) for prompt in suite.prompts]
    return [replace(item, id=f"{number:06d}") for number, item in enumerate(items)]


# whether a later start means the same


def _settings(
    options: argparse.Namespace,
    stages: Stages,
    checked: Checked | None,
    server: ServerConfig | None,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Settings by the argument that gives each, as JSON has them."""
    settings: dict[str, Any] = {key: getattr(stages, key) for key in ("seed", "samples", "revisions", "temperature")}
    settings["constitution"] = asdict(stages.constitution)
    if options.labels is not None:
        settings["labels"] = sampled_checksum(options.labels / ITEMS)
    if server is not None:
        settings["judge"] = {"model": server.model, "max_tokens": server.max_tokens}
    if checked is not None:
        [suite], sources = checked.suites, find_sources(checked.config)
        settings |= {"model": sources.pop("model.path", {}), "prompts": sources, "count": suite.config.prompts}
        settings["max-new-tokens"] = suite.config.max_new_tokens
        given = {f"{section}.{key}": value for section, table in overrides.items() for key, value in table.items()}
        settings |= {name: json.dumps(value, sort_keys=True, default=str) for name, value in given.items()}
    return settings
