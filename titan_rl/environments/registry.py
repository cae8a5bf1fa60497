"""Registry of tasks by name, and their list (``titan-rl tasks``).

It is made anew wherever it is needed: in the controller for the prompt stream, in verifiers to write out prompts, and
in scorer processes, the only place where a model's answer meets the expected one.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import is_reference
from titan_rl.config.sections.schema import MIXTURE, TASKS_OF_FILES, TASKS_OF_OTHERS, TaskConfig
from titan_rl.config.sections.suites import PRESETS
from titan_rl.environments.interfaces.task import Task, correct
from titan_rl.environments.prompts.jsonl_task import RowsTask
from titan_rl.environments.reasoning_gym.families import described_families
from titan_rl.environments.rewards.functions import with_rewards
from titan_rl.environments.sandbox.pool import choose_sandbox
from titan_rl.environments.tasks.calculator import CalculatorTask
from titan_rl.environments.tasks.code.code_task import CodeTask
from titan_rl.environments.tasks.math_task import MathTask
from titan_rl.environments.tasks.mixture import MixtureTask
from titan_rl.environments.tasks.search.search_task import SearchTask
from titan_rl.environments.tasks.suites.gsm8k import GSM8KTask
from titan_rl.environments.tasks.suites.ifeval import IFEvalTask
from titan_rl.environments.tasks.suites.multiple_choice import MultipleChoiceTask
from titan_rl.environments.tasks.suites.problems import ProblemsTask
from titan_rl.environments.tasks.suites.programs import HumanEvalTask, MBPPTask
from titan_rl.environments.tasks.swe.swe_task import swe_task
from titan_rl.environments.tasks.text.alphabet_sort import AlphabetSortTask
from titan_rl.environments.tasks.text.reverse_text import ReverseTextTask
from titan_rl.environments.tasks.text.treasure_hunt import TreasureTask
from titan_rl.environments.tasks.text.wordle import WordleTask
from titan_rl.environments.tasks.user_task import user_task
from titan_rl.environments.tasks.vision.shapes import ShapesTask

__all__ = ["BUILT_IN", "Task", "correct", "make_part", "make_task"]

BUILT_IN = {
    "calculator": CalculatorTask,
    "treasure": TreasureTask,
    "alphabet_sort": AlphabetSortTask,
    "reverse_text": ReverseTextTask,
    "wordle": WordleTask,
    "shapes": ShapesTask,
}
"""Tasks of our own, by name; all other plain names are reasoning-gym's."""
_OF_FILES = {
    "jsonl": RowsTask,
    "code": CodeTask,
    "math": MathTask,
    "search": SearchTask,
    "swe": swe_task,
    "gsm8k": GSM8KTask,
    "math500": ProblemsTask,
    "aime": ProblemsTask,
    "mmlu_pro": MultipleChoiceTask,
    "ifeval": IFEvalTask,
    "humaneval": HumanEvalTask,
    "mbpp": MBPPTask,
}


def make_task(task: TaskConfig, folders: Sequence[str] = ()) -> Task:
    """Make a configured task, with its reward function.

    ``folders``: where ``pkg.module:name`` and data files are looked for (``run.plugin_path``). A data file is read and
    checked with its first prompt; verifiers and scorers never read it, since prompts carry their rows.

    Errors: ConfigError for a name that is unknown or refused, a style or scoring that the task does not have, options
    that it does not take, or a mistake in the user's module.
    """
    choose_sandbox(task.sandbox)
    return make_part(task, folders)


def make_part(task: TaskConfig, folders: Sequence[str]) -> Task:
    """Make one of several tasks; the sandbox is the run's. Errors: as ``make_task``."""
    _check_scoring(task)
    base = _by_name(task, folders)
    return with_rewards(base, task, folders)


def _check_scoring(task: TaskConfig) -> None:
    if task.scoring == "auto":
        return
    setting = f"task.scoring = {task.scoring!r} is of reasoning-gym families alone"
    if not task.scores_itself:
        several = task.rewards or task.rewards_by_source
        replacement = f"task.rewards = {several!r}" if several else f"task.reward = {task.reward!r}"
        raise ConfigError(f"{setting}, and {replacement} takes its place: keep one of them")
    if task.name in (*TASKS_OF_FILES, *TASKS_OF_OTHERS, MIXTURE, *BUILT_IN) or is_reference(task.name):
        raise ConfigError(f"{setting}, and task.name = {task.name!r} is none: leave it out")


def _by_name(task: TaskConfig, folders: Sequence[str]) -> Task:
    if is_reference(task.name):
        return user_task(task, folders)
    if task.name in _OF_FILES:
        return _OF_FILES[task.name](task, folders)
    if task.name == MIXTURE:
        return MixtureTask(task, partial(make_part, folders=folders))
    if task.name in BUILT_IN:
        return BUILT_IN[task.name](task)
    if task.name in TASKS_OF_OTHERS:
        return _of_others(task, folders)
    from titan_rl.environments.reasoning_gym.task import ReasoningGymTask  # its import takes a second

    return ReasoningGymTask(task)


def _of_others(task: TaskConfig, folders: Sequence[str]) -> Task:
    """Each imports what it speaks with, which no other task waits for."""
    if task.name == "openenv":
        from titan_rl.environments.servers.openenv import OpenEnvTask

        return OpenEnvTask(task, folders)
    if task.name == "nemo_gym":
        from titan_rl.environments.servers.nemo_gym import NemoGymTask

        return NemoGymTask(task, folders)
    if task.name == "verifiers":
        from titan_rl.environments.agents.verifiers_task import VerifiersTask

        return VerifiersTask(task, folders)
    from titan_rl.environments.tasks.gymnasium_task import GymnasiumTask

    return GymnasiumTask(task, folders)


_DESCRIBED = (
    "jsonl  (rows of a file of your own: task.options.file)",
    "code  (programs to write, from a file of your own; they run in a sandbox, against each row's tests)",
    "math  (rows of your own, whose answers are mathematics: what equals the expected one is right)",
    "search  (questions of your own, and a tool that searches a corpus of your own: task.options.file, corpus)",
    "swe  (issues of repositories of your own, resolved by commands or an agent in a workspace, against tests)",
    *(f"{name}  (rows as {preset.data_set} has them: task.options.file)" for name, preset in PRESETS.items()),
    "mixture  (several of these in one run: a table [task.options.NAME] for each, with its weight)",
    "openenv  (an environment behind an OpenEnv server: task.options.url, action, observation, prompt)",
    "nemo_gym  (rows, tools and rewards of a NeMo Gym resources server: task.options.url, file)",
    "verifiers  (environments of the verifiers library, with their own harness: task.options.env, python)",
    "gymnasium  (an environment of gymnasium.make, in text: task.options.id, prompt)",
)


def list_tasks() -> Iterator[str]:
    """Lines of all tasks: name and description."""
    yield from _DESCRIBED
    for name, task in BUILT_IN.items():
        yield f"{name}  ({task.ABOUT})"
    for family in described_families():
        yield _family_line(**family)


def _family_line(name: str, styles: list[str], scoring: str, constant_answer: dict | None) -> str:
    also = "compact (exact) too" if "compact" in styles else ""
    pay = "unknown what"
    if constant_answer:
        pay = "{family:.2f} by its scorer, {exact:.2f} exact".format(**constant_answer)
    return f"{name:<24} {also:<20} scored {scoring + ';':<8} the best constant answer earns {pay}"
