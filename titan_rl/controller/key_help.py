"""Keys of a TOML with their defaults and a line about each: ``titan-rl train --help SECTION``.

The lines are those that stand under the fields in the sources, ours and TorchTitan's.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

from titan_rl.algorithms.policy_gradient.base import PolicyGradientSettings
from titan_rl.algorithms.registry import ALGORITHMS
from titan_rl.config.mixture import PartConfig
from titan_rl.config.sections.schema import OUR_SECTIONS, Config
from titan_rl.environments.prompts.jsonl_task import RowsOptions
from titan_rl.environments.rewards.llm_judge import JudgeConfig
from titan_rl.environments.servers.nemo_gym import NemoGymOptions
from titan_rl.environments.servers.openenv import OpenEnvOptions
from titan_rl.environments.tasks.calculator import CalculatorOptions
from titan_rl.environments.tasks.code.code_task import CodeOptions
from titan_rl.environments.tasks.gymnasium_task import GymnasiumOptions
from titan_rl.environments.tasks.search.search_task import SearchOptions
from titan_rl.environments.tasks.suites.base import SuiteOptions
from titan_rl.environments.tasks.suites.gsm8k import GSM8KOptions
from titan_rl.environments.tasks.suites.programs import ProgramOptions
from titan_rl.environments.tasks.swe.swe_task import SweOptions
from titan_rl.environments.tasks.text.alphabet_sort import AlphabetSortOptions
from titan_rl.environments.tasks.text.reverse_text import ReverseTextOptions
from titan_rl.environments.tasks.text.treasure_hunt import TreasureOptions
from titan_rl.environments.tasks.text.wordle import WordleOptions
from titan_rl.environments.tasks.vision.shapes import ShapesOptions
from titan_rl.trainer.titan_config import titan_keys

_WIDTH = 110
_OWN_HELP = {
    "debug.batch_invariant": "Trainer and engines compute log-probabilities to the same bits, for about twice a step's "
    "seconds; without context parallelism, adapters, FP8, drafts and penalties."
}
"""Keys of TorchTitan's that mean something else here."""
_NEEDED = "needed"
"""In place of the default of a key that has none."""
_OPTIONS = {
    "jsonl, math": RowsOptions,
    "code": CodeOptions,
    "search": SearchOptions,
    "swe": SweOptions,
    "calculator": CalculatorOptions,
    "treasure": TreasureOptions,
    "alphabet_sort": AlphabetSortOptions,
    "reverse_text": ReverseTextOptions,
    "wordle": WordleOptions,
    "shapes": ShapesOptions,
    "gymnasium": GymnasiumOptions,
    "openenv": OpenEnvOptions,
    "nemo_gym": NemoGymOptions,
    "gsm8k": GSM8KOptions,
    "math500, aime, mmlu_pro, ifeval": SuiteOptions,
    "humaneval, mbpp": ProgramOptions,
}
"""``[task.options]`` by the names of the tasks that take them."""


def key_help(section: str) -> str:
    """Help text of one section, with those in it, or of all, ours first. ``section``: its name, or "all"."""
    ours, titans = get_type_hints(Config), titan_keys()
    lines: list[str] = []
    for name in (*OUR_SECTIONS, *titans):
        if section in (name, "all"):
            lines += _section(name, ours[name], {}) if name in ours else _section(name, *titans[name])
            lines += _OF_CHOICES.get(name, tuple)()
    return "\n".join(lines).removeprefix("\n")


def _of_tasks() -> Iterator[str]:
    """Keys of a judge, and of single tasks."""
    yield from _section("task.judge", JudgeConfig, {})
    for names, cls in _OPTIONS.items():
        yield from _section("task.options", cls, {}, of=f"task.name = {names}")
    yield "\n[task.options] of a reasoning-gym family: the family's own (`titan-rl tasks` lists them)"
    yield from _section(
        "task.options.NAME", PartConfig, {"weight": 1}, of="task.name = mixture, beside the keys of [task]"
    )


def _of_algorithms() -> Iterator[str]:
    """Each algorithm's own keys with its defaults; then a line about each key."""
    yield "\n[algorithm], keys of each algorithm's own"
    help_lines = _field_lines(PolicyGradientSettings)  # and not what an algorithm says of its own default
    for name, algorithm in ALGORITHMS.items():
        cls = algorithm.Settings
        help_lines = _lines_of(cls) | help_lines
        keys = ", ".join(f"{f.name} ({_default(f)!r})" for f in fields(cls))
        yield _filled(f"{name}: {keys or 'none'}", "  ", "      ")
    for key, line in sorted(help_lines.items()):
        yield f"  --algorithm.{key}"
        yield _filled(line, "      ", "      ")


_OF_CHOICES = {"task": _of_tasks, "algorithm": _of_algorithms}
"""Keys that a section has by what is chosen in it."""


def _section(section: str, cls: type, defaults: dict[str, Any], of: str = "") -> Iterator[str]:
    """``defaults``: of the keys that are taken; empty: all, with those of the class. ``of``: where the
    section is so."""
    help_lines = _lines_of(cls)
    keys = defaults or {f.name: _default(f) for f in fields(cls) if not f.name.startswith("_")}
    yield f"\n[{section}]" + (f" with {of}" if of else "")
    inner = {key: keys.pop(key) for key in [key for key, default in keys.items() if is_dataclass(default)]}
    for key, default in keys.items():
        shown = default if default is _NEEDED else repr(default)
        yield f"  --{section}.{key}  ({shown if len(shown) < _WIDTH else shown[: _WIDTH // 2] + ' ...'})"
        if line := _OWN_HELP.get(f"{section}.{key}", help_lines.get(key)):
            yield _filled(line, "      ", "      ")
    for key, default in inner.items():
        yield from _section(f"{section}.{key}", type(default), {})


def _filled(line: str, first: str, more: str) -> str:
    return textwrap.fill(line, _WIDTH, initial_indent=first, subsequent_indent=more, break_on_hyphens=False)


def _default(field: Field) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else _NEEDED


def _lines_of(cls: type) -> dict[str, str]:
    """Field to what is said of it, by the class or by those that it is made of."""
    return {name: line for base in reversed(cls.__mro__[:-1]) for name, line in _field_lines(base).items()}


def _field_lines(cls: type) -> dict[str, str]:
    """Field to what the string under it says."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(definition, ast.ClassDef)
    pairs = zip(definition.body, definition.body[1:], strict=False)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
