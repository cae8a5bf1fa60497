"""Checksums of the model's and data's files at the start of a run."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from titan_rl.config.io.bounded_files import read_json
from titan_rl.config.load import ConfigError
from titan_rl.config.mixture import all_tasks
from titan_rl.config.sections.schema import FILE_OPTIONS, MADE, MADE_MODELS, TASKS_OF_FILES, Config
from titan_rl.data.rows.file_sources import Source, locate_sources
from titan_rl.data.rows.row_files import data_files
from titan_rl.data.storage.files import replace_text, sampled_checksum
from titan_rl.environments.rollout.suites import suite_sources
from titan_rl.records.run_directory.rundir import RunDir

Sources = dict[str, dict[str, str]]
"""Setting to file name to checksum."""

_MODEL_FILES = ("config.json", "tokenizer.json", "*.safetensors")
_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
"""What lays out images."""
_TEXT_FILES = ("chat_template*", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
"""What turns messages into tokens, and ends answers."""
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_DATA_OPTIONS = ("file", "held_out_file")
_COMMITS = "commits"
"""Commits of the Hub: the same rows may be in another one."""


def find_sources(config: Config) -> Sources:
    """Checksums of the run's model, adapter and data files, as they are now. Errors: ConfigError if a file is not
    there."""
    sources: Sources = {}
    if config.model.path not in MADE_MODELS:
        root = Path(config.model.path)
        for setting, patterns in {
            "model.path": _MODEL_FILES,
            "model.path (text)": _TEXT_FILES,
            "model.path (images)": _IMAGE_FILES,
        }.items():
            paths = sorted(path for pattern in patterns for path in root.glob(pattern) if path.is_file())
            sources[setting] = {path.name: sampled_checksum(path) for path in paths}
    if config.lora.adapter:
        paths = [Path(config.lora.adapter) / name for name in _ADAPTER_FILES]
        sources["lora.adapter"] = {path.name: sampled_checksum(path) for path in paths}
    of_files = {place: task for place, task in all_tasks(config.task).items() if task.name in TASKS_OF_FILES}
    for (place, task), option in product(of_files.items(), FILE_OPTIONS):
        if files := task.options.get(option):
            setting = f"{place}.options.{option}"
            sources[setting] = _sums(locate_sources(setting, files, config.run.plugin_path))
    for setting, found in suite_sources(config).items():
        sources[setting] = _sums(found)
    for option in _DATA_OPTIONS:
        if (files := getattr(config.data, option)) not in ("", MADE):
            setting = f"data.{option}"
            sources[setting] = _sums(locate_sources(setting, files, config.run.plugin_path))
    return sources


def _sums(sources: Sequence[Source]) -> dict[str, str]:
    """Checksums of a file setting's files; the weights and the Hub's commits beside."""
    paths = [path for source in sources for path in source.paths]
    if len(paths) > 1:
        sums = {f"file {number}": _sum(path) for number, path in enumerate(paths, 1)}
    elif paths[0].is_dir():
        sums = {str(file.relative_to(paths[0])): sampled_checksum(file) for file in data_files(paths[0])}
    else:
        sums = {"rows": sampled_checksum(paths[0])}
    if sources[0].weight is not None:
        sums["weights"] = " ".join(f"{source.weight:g} x {len(source.paths)}" for source in sources)
    if commits := [f"{source.name.partition('@')[0]}@{source.commit}" for source in sources if source.commit]:
        sums[_COMMITS] = " ".join(commits)
    return sums


def _sum(path: Path) -> str:
    return " ".join(sampled_checksum(file) for file in data_files(path))


def write_sources(run_dir: RunDir, sources: Sources) -> None:
    replace_text(run_dir.sources, json.dumps(sources, indent=2) + "\n")


def check_sources(run_dir: RunDir, sources: Sources, instead: str = "or leave --resume out") -> None:
    """Comparison of the run's sources with those at its begin.

    ``instead``: what can be done besides giving it. Errors: ConfigError that names what is not as it was when the run
    was begun. One that recorded nothing passes.
    """
    if not run_dir.sources.exists():
        return
    try:
        recorded = {setting: dict(sums) for setting, sums in read_json(run_dir.sources).items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{run_dir.sources} is damaged ({type(error).__name__}): put it back, {instead}") from None
    for setting, now in sources.items():
        before = recorded.get(setting, now)
        names = (now.keys() | before.keys()) - {_COMMITS}
        if changed := sorted(name for name in names if now.get(name) != before.get(name)):
            what = f"{before[_COMMITS]!r}" if before.get(_COMMITS) else "what it was"
            raise ConfigError(
                f"{setting} is not what {run_dir.root} was begun with (changed: {changed[0]}); give {what}, {instead}"
            )
