"""What a run without a generator learns from, checked before any process starts: ``[data]``, and what goes with it."""

from collections.abc import Iterable, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from titan_rl.algorithms.base import Algorithm
from titan_rl.config.load import ConfigError
from titan_rl.config.mixture import all_tasks
from titan_rl.config.sections.role_sections import ChatTemplateConfig
from titan_rl.config.sections.schema import MADE, MADE_MODELS, MIXTURE, Config
from titan_rl.config.sections.suites import have_chats
from titan_rl.data.rows.datasets import Dataset, FileRows, check_format, make_dataset, read_files, store_rows
from titan_rl.data.rows.examples import Example
from titan_rl.data.rows.row_shapes import Written
from titan_rl.data.text.checks import TextUse, check_model_text
from titan_rl.data.text.tokenizer import load_tokenizer
from titan_rl.data.types import correct
from titan_rl.environments.interfaces.task import Task, parts_of
from titan_rl.environments.rollout.prompt_checks import encode_all, training_prompts
from titan_rl.environments.rollout.suites import Suite, make_suites
from titan_rl.environments.rollout.synthetic_data import synthetic_rows
from titan_rl.mesh.processes.parallel_map import parallel_map


def check_settings(config: Config, algorithm: Algorithm) -> None:
    """Errors: ConfigError for a setting that would have another effect than its name says."""
    setting = f"algorithm.name = {config.algorithm.name!r}"
    if config.recovery.nonfinite == "rollback":
        raise ConfigError("recovery.nonfinite = 'rollback' would meet the same rows of data.file again: leave it out")
    if config.sft.steps and algorithm.trains_on == "demonstrations":
        raise ConfigError(
            f"[sft] steps are steps before another algorithm's: with {setting} set training.steps instead"
        )
    if config.sft.steps and algorithm.head != "vocabulary":
        raise ConfigError(f"[sft] steps need a model that writes: with {setting} leave them out")
    if algorithm.trains_on == "labels" and config.data.examples_per_step == 1:
        raise ConfigError(
            f"data.examples_per_step = 1: with {setting} a row's question is measured with another row's answer: set 2 "
            f"or more"
        )


def row_notices(task: Task, dataset: Dataset | None) -> list[str]:
    """Lines about training rows that ask what a held-out row asks, and what tasks say of their rows. Errors:
    ConfigError."""
    lines, parts = [], parts_of(task)
    if count := sum(part.num_overlapping for part in parts) if dataset is None else dataset.num_overlapping:
        rows = f"{count} training rows are" if count > 1 else "1 training row is"
        lines.append(f"{rows} left out: held-out rows ask the same")
    return lines if dataset else [*lines, *(line for part in parts for line in part.row_notices)]


def weight_notices(config: Config) -> list[str]:
    """Lines about tasks whose weighted rewards of up to 1 add up to less than a right answer has."""
    lines = []
    for setting, task in all_tasks(config.task).items():
        most = sum(max(weight, 0.0) for weight in task.rewards.values())
        if task.rewards and not config.data.file and not correct(most):
            lines.append(
                f"{setting}.rewards: weights add up to {most:g}, and an answer counts as right, in accuracies and pass "
                f"rates, from a reward of 1 on: with rewards of at most 1 none will; let the weights add up to 1"
            )
    return lines


def label_notice(algorithm: Algorithm, dataset: Dataset | None) -> list[str]:
    """Line about labelled rows of one kind alone; none otherwise."""
    if dataset is None or algorithm.trains_on != "labels":
        return []
    kinds = {"desirable" if is_good else "undesirable" for is_good in (dataset.train.labels_R > 0).tolist()}
    return [f"all rows to train on are {kind}: nothing says what is not" for kind in kinds] if len(kinds) == 1 else []


def template_notice(config: Config, task: Task) -> list[str]:
    """Line about a chat model that is asked without its template; none otherwise. Errors: ConfigError."""
    path, settings = config.model.path, all_tasks(config.task).values()
    is_compact = any(each.style == "compact" for each in settings if each.name != MIXTURE)
    if config.data.file or path in MADE_MODELS or not is_compact:
        return []
    if not any(_asks_plainly(part, config.run.seed) for part in parts_of(task)):
        return []
    if not getattr(load_tokenizer(path, config), "chat_template", None):
        return []
    return [
        "task.style = 'compact': the model has a chat template and is asked without it; to ask with it, set "
        "task.style = 'chat'"
    ]


def _asks_plainly(task: Task, seed: int) -> bool:
    """Whether prompts of a task are text that no template is around."""
    return not task.has_agent and isinstance(task.messages(next(training_prompts(task, seed))), str)


def load_suites(
    config: Config, tokenizer: PreTrainedTokenizerBase, stops: list[int], *, seq_len: int, positions: int
) -> list[Suite]:
    """Suites with their questions, each of which leaves room for an answer.

    ``stops``: ids that stop the engine. ``seq_len``, ``positions``: longest rollout of the run and of the model.
    Errors: ConfigError."""
    suites = [suite.with_prompts(config.eval.prompts) for suite in make_suites(config)]
    styles = {suite.task_config.style for suite in suites}
    if "chat" in styles and config.model.path in MADE_MODELS:
        raise ConfigError("eval.suites: style = 'chat' needs a chat model: set model.path, or style = 'compact'")
    check_model_text(config.model.path, tokenizer, TextUse(stops), styles)
    for suite in suites:
        longest = longest_prompt(suite, tokenizer)
        answer, room = suite.max_new_tokens(config.rollout.max_new_tokens), min(seq_len, positions)
        if longest + answer > room:
            limit, mend = f"training.seq_len is {seq_len}", "raise that, or "
            if positions <= seq_len:
                limit, mend = f"the model has {positions} positions", ""
            raise ConfigError(
                f"{suite.setting}: its longest question has {longest} tokens and an answer up to {answer}, and "
                f"{limit}: {mend}set {suite.setting}.max_new_tokens lower"
            )
    return suites


def longest_prompt(suite: Suite, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of a suite's longest question. Errors: ConfigError."""
    return max(map(len, encode_all(suite.task, tokenizer, suite.prompts)))


def load_dataset(
    config: Config,
    algorithm: Algorithm,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    use: TextUse,
    *,
    row_tokens: int,
    sample_tokens: int,
) -> Dataset:
    """``row_tokens``, ``sample_tokens``: the longest that a row of the trainer and one answer with its question may be.
    Errors: ConfigError that names the row which is at fault."""
    data, kind = config.data, algorithm.trains_on
    assert kind != "rollouts", "registry.py has refused such an algorithm beside data.file"
    if data.file == MADE:
        check_format(data, kind)
        made = synthetic_rows(task, kind, seed=config.run.seed, count=data.made_rows, num_held_out=config.eval.prompts)
        rows = FileRows(store_rows(made[0]), store_rows(made[1]))
    else:
        rows = read_files(data, kind, config.run.plugin_path)
    limits = dict(row_tokens=row_tokens, sample_tokens=sample_tokens, max_held_out=len(rows.held_out))
    if data.file != MADE:
        limits["max_held_out"] = config.eval.prompts
    is_chat = data.chat or rows.train.have_messages
    _check_chat(config, is_chat, (answer for row in rows.train + rows.held_out for answer in row.answers))
    check_model_text(config.model.path, tokenizer, use, {"chat" if is_chat else "compact"})
    map_rows = partial(parallel_map, what="tokenizing rows")
    dataset = make_dataset(rows, data, tokenizer, **limits, map_rows=map_rows)
    if kind == "labels" and _ask_the_same(dataset.train):
        raise ConfigError(
            f"data.file = {data.file!r}: all rows to train on ask the same, and algorithm.name = "
            f"{config.algorithm.name!r} needs answers to other questions: add such rows"
        )
    return dataset


def _ask_the_same(examples: Sequence[Example]) -> bool:
    text = examples[0].text
    return all(example.text == text for example in examples)


def _check_chat(config: Config, is_chat: bool, answers: Iterable[Written]) -> None:
    """Errors: ConfigError for a setting of chats that no row reads."""
    if config.data.chat and not any(isinstance(answer, str) for answer in answers):
        raise ConfigError("data.chat = true has no effect: each row has messages, which are chats anyway; leave it out")
    if is_chat or have_chats(config.eval.suites):
        return
    for key in ("text", "options", "date"):
        if (value := getattr(config.model.chat_template, key)) != getattr(ChatTemplateConfig(), key):
            raise ConfigError(
                f"model.chat_template.{key} = {value!r:.80} has no effect: rows of text are written without a chat "
                f"template; leave it out, or set data.chat = true"
            )
