"""Which settings may change while a run goes on, and who must take them up."""

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_type_hints

from titan_rl.config.load import ConfigError, nearest_key, nearest_section
from titan_rl.config.sections.schema import OUR_SECTIONS, TITAN_SECTIONS, Config
from titan_rl.environments.rollout.decoding import DECODING_KEYS
from titan_rl.trainer.titan_config import titan_keys


class Effect(Enum):
    """Besides the controller, which reads its settings whenever it needs them."""

    UPDATES = "optimizer, schedule and algorithm take other values where they are"
    TRAINER = "its ranks join anew, with the weights and moments that they had"
    SAMPLING = "what is under way is sampled again"
    REWARD = "answers are scored by another function"


Effects = frozenset[Effect]

_UPDATES, _TRAINER = frozenset({Effect.UPDATES}), frozenset({Effect.TRAINER})
_SAMPLING = frozenset({Effect.SAMPLING})
_OF_RUNS_ON_DATA = _UPDATES | _TRAINER
_EFFECTS: dict[str, Effects] = {
    "optimizer.lr": _UPDATES,
    "optimizer.betas": _UPDATES,
    "optimizer.eps": _UPDATES,
    "optimizer.weight_decay": _UPDATES,
    "optimizer": _TRAINER,
    "lr_scheduler": _UPDATES,
    "training.max_norm": _UPDATES,
    "algorithm": _UPDATES,
    "critic.optimizer": _TRAINER,
    "critic.lr_scheduler": _TRAINER,
    "implicit_reward.optimizer": _TRAINER,
    "implicit_reward.lr_scheduler": _TRAINER,
    "drafter.optimizer": _TRAINER,
    "drafter.lr_scheduler": _TRAINER,
    "rollout.temperature": _TRAINER | _SAMPLING,
    **dict.fromkeys(DECODING_KEYS, _SAMPLING),
    "rollout.max_new_tokens": _TRAINER | _SAMPLING,
    "rollout.max_turns": _SAMPLING,
    "rollout.max_staleness": _SAMPLING,
    "rollout.prompts_per_step": _SAMPLING,
    "filter": _SAMPLING,
    "task.reward": _SAMPLING | {Effect.REWARD},
    "eval.every": frozenset(),
    "checkpoint.every": frozenset(),
}
"""By the beginning of a key; the first that fits."""
_WHY_NOT = {
    "algorithm.updates_per_batch": "the schedule of the learning rate counts updates",
    "algorithm.routing": "engines record routed experts from their start on, or not: close the run, and resume it",
    "rollout.group_size": "the ledger counts the samples of a prompt by it",
    "generator.replicas": "session.scale(count) is how replicas come and go",
    "training.steps": "the schedule and the end depend on it: close the run, and give it with resume=True",
}


def _check_there(key: str) -> None:
    """Errors: ConfigError for a section or a key that no configuration has."""
    section, *path = key.split(".")
    if section not in (*OUR_SECTIONS, *TITAN_SECTIONS):
        raise ConfigError(f"unknown section [{section}]: {nearest_section(section)}")
    if section == "algorithm":  # whose keys are checked where it is built
        return
    kind: Any = get_type_hints(Config).get(section)
    for name in path:
        table = section.rpartition(".")[2]
        names = _titan_names(table) if table in TITAN_SECTIONS else _names(kind)
        if not names:  # a value, or a table whose keys somebody else knows
            return
        if name not in names:
            raise ConfigError(f"unknown key {section}.{name}: {nearest_key(name, section, names)}")
        kind = get_type_hints(kind).get(name) if is_dataclass(kind) else None
        section = f"{section}.{name}"


def _names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind) if not field.name.startswith("_")} if is_dataclass(kind) else set()


def _titan_names(section: str) -> set[str]:
    """Also those that have no effect here, of which it is said elsewhere."""
    cls, known = titan_keys()[section]
    return known.keys() | _names(cls)


def effects_of(key: str, *, on_data: bool) -> Effects:
    """``on_data``: of a run without a generator. Errors: ConfigError for a setting that must stay."""
    if key in _WHY_NOT:
        raise ConfigError(f"{key} cannot change while a run goes on: {_WHY_NOT[key]}")
    _check_there(key)
    key_effects = next((effects for name, effects in _EFFECTS.items() if f"{key}.".startswith(f"{name}.")), None)
    if key_effects is None or (on_data and not key_effects <= _OF_RUNS_ON_DATA):
        can = (
            name
            for name, effects in _EFFECTS.items()
            if not name.startswith("optimizer.") and (not on_data or effects <= _OF_RUNS_ON_DATA)
        )
        raise ConfigError(f"{key} cannot change while a run goes on; what can: {', '.join(can)}")
    return key_effects
