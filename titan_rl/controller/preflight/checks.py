"""Everything that a run can be refused for, checked before any process starts. Needs torch, so it follows the TOML."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from titan_rl.algorithms.base import Algorithm
from titan_rl.algorithms.policy_gradient.gdpo import GDPO
from titan_rl.algorithms.registry import check_algorithm, make_algorithm, with_correction
from titan_rl.config.device_defaults import for_device
from titan_rl.config.errors import raise_findings
from titan_rl.config.load import ConfigError, as_dict
from titan_rl.config.mixture import all_tasks
from titan_rl.config.model_directory.directory import stop_token_ids
from titan_rl.config.plugins import is_reference
from titan_rl.config.sections.schema import (
    ANSWER_REWARDS,
    MADE_MODELS,
    MIXTURE,
    OWN_SCORE,
    TASKS_OF_OTHERS,
    Config,
    TaskConfig,
)
from titan_rl.controller.preflight.data_checks import check_settings, load_dataset, load_suites
from titan_rl.controller.preflight.device import check_placement, device_type, is_on_cpu
from titan_rl.controller.preflight.engine_checks import (
    check_batch_invariant,
    check_decoding,
    check_engine,
    check_export,
    check_generator_layout,
    check_suite_decoding,
)
from titan_rl.controller.preflight.host_checks import check_hosts
from titan_rl.controller.preflight.ineffective_settings import check_read
from titan_rl.controller.preflight.role_checks import (
    check_draft_model,
    check_image_limits,
    check_reward_model,
    check_roles,
)
from titan_rl.data.rows.datasets import Dataset
from titan_rl.data.storage.shards import StoreError
from titan_rl.data.text.checks import TextUse, check_model_text
from titan_rl.data.text.control_tokens import end_of_answer
from titan_rl.data.text.template_limits import checking
from titan_rl.data.text.tokenizer import load_tokenizer, settings_of
from titan_rl.data.types import Prompt
from titan_rl.environments.prompts.stream import held_out_prompts
from titan_rl.environments.registry import Task, make_task
from titan_rl.environments.rewards.llm_judge import ask_judges, check_judges
from titan_rl.environments.rollout.decoding import held_out_budget, training_budget
from titan_rl.environments.rollout.prompt_checks import (
    ThinkingCheck,
    check_characters,
    check_demonstrations,
    check_seats,
    encode_all,
    place,
    training_prompts,
)
from titan_rl.environments.rollout.suites import Suite, errors_under, tasks_of
from titan_rl.environments.sandbox.remote import check_server
from titan_rl.environments.scoring.part_names import check_weights_of_parts, part_names
from titan_rl.environments.scoring.reward_model import PART
from titan_rl.environments.scoring.scorer import check_grader
from titan_rl.mesh.channel.transports import has_ibverbs
from titan_rl.mesh.launch.base import HostLauncher, Launcher, make_launcher
from titan_rl.models.builtin.made import config_of, made_stops, made_tokenizer
from titan_rl.models.families.registry import Family, make_family
from titan_rl.models.layers.rope import num_positions
from titan_rl.models.spec import model_spec, parameter_names, read_hf_config, spec_of
from titan_rl.models.weights.hf_weights import check_weights
from titan_rl.records.checkpoints.shard_store import check_store
from titan_rl.records.trackers import check_trackers
from titan_rl.trainer.model.layout import check_layout, check_products, check_replay
from titan_rl.trainer.model.lora_checks import check_lora
from titan_rl.trainer.titan_config import TitanConfig, build_titan
from titan_rl.trainer.titan_limits import check_length, check_patterns


@dataclass(frozen=True)
class Checked:
    """A configuration and what its names stand for."""

    config: Config
    titan: TitanConfig
    task: Task
    algorithm: Algorithm
    family: Family | None
    """Of the user's own; None: the one for the model's type."""
    launcher: Launcher | None
    """Of the user's own; None: on this host."""
    held_out: list[Prompt]
    dataset: Dataset | None = None
    """What a run without a generator learns from."""
    suites: tuple[Suite, ...] = ()
    """Of ``eval.suites``, with their questions."""
    host_launcher: HostLauncher | None = None
    """Of hosts of other machines; None: the run is on this one."""

    @property
    def scored_tasks(self) -> dict[str, TaskConfig]:
        """Tasks of the run and of its suites, by their settings. Errors: ConfigError."""
        return tasks_of(self.config.task, self.config.eval.suites)

    @property
    def launchers(self) -> dict[str, Any]:
        """Launchers as arguments of the mesh."""
        return {"launcher": self.launcher, "host_launcher": self.host_launcher}

    def as_dict(self) -> dict[str, Any]:
        """The whole configuration as a TOML would write it, with everything that was left out."""
        tables = as_dict(self.config) | self.titan.as_dict()
        tables["algorithm"] |= asdict(self.algorithm.settings)
        return tables


def resolve(config: Config, num_held_out: int = 0, *, on_cpu: bool | None = None) -> Checked:
    """Names become objects. ``on_cpu``: whether the run is, which settles what was left open; None: as this one will
    be. Errors: ConfigError."""
    config = with_correction(for_device(config, on_cpu=is_on_cpu(config) if on_cpu is None else on_cpu))
    folders, on_data = config.run.plugin_path, bool(config.data.file)
    task = make_task(config.task, folders)
    return Checked(
        config=config,
        held_out=held_out_prompts(task, num_held_out) if num_held_out and not on_data else [],
        titan=build_titan(config),
        task=task,
        algorithm=make_algorithm(config.algorithm, folders, on_data=on_data),
        family=make_family(config.model.family, folders),
        launcher=make_launcher(config.mesh.launcher, folders),
    )


def recheck_updates(checked: Checked, config: Config, keys: Collection[str]) -> Checked:
    """With other settings of optimizer, schedule and algorithm, all else being as it was checked.

    ``keys``: as to ``check``. Errors: ConfigError for what ``check`` would refuse."""
    config = with_correction(for_device(config, on_cpu=is_on_cpu(config)))
    algorithm = make_algorithm(config.algorithm, config.run.plugin_path, on_data=bool(config.data.file))
    again = replace(checked, config=config, titan=build_titan(config), algorithm=algorithm)
    check_read(config, algorithm, again.titan, checked.task, keys)
    for each in CHECKS:
        if each.of_updates and each.applies(config):
            each.run(again)
    return again


def with_dataset(checked: Checked) -> Checked:
    """Errors: ConfigError for settings or a row that the run cannot be trained on."""
    config, hf = checked.config, read_config(checked)
    check_settings(config, checked.algorithm)
    positions, row_tokens = num_positions(hf), checked.titan.training.seq_len
    limits = dict(row_tokens=row_tokens, sample_tokens=min(positions, row_tokens))
    use = TextUse(stops_of(config), samples=False, learns=True)
    with checking():
        dataset = load_dataset(config, checked.algorithm, checked.task, tokenizer_of(config), use, **limits)
    largest = max(int(examples.largest_R.max()) for examples in (dataset.train, dataset.held_out))
    if largest >= hf.vocab_size:
        _check_ids(checked, largest)
    return replace(checked, dataset=dataset)


def with_suites(checked: Checked) -> Checked:
    """Errors: ConfigError for a suite, or a row of one, that the model cannot be asked."""
    if checked.algorithm.head != "vocabulary":
        raise ConfigError(
            f"eval.suites ask a model that writes, and algorithm.name = {checked.config.algorithm.name!r} trains one "
            f"that does not: leave them out"
        )
    limits = dict(seq_len=checked.titan.training.seq_len, positions=num_positions(read_config(checked)))
    config = checked.config
    with checking():
        suites = load_suites(config, tokenizer := tokenizer_of(config), stops_of(config), **limits)
        for suite in suites:
            check_suite_decoding(suite, config, read_config(checked), tokenizer)
    return replace(checked, suites=tuple(suites))


def read_config(checked: Checked) -> PreTrainedConfig:
    """The model's config.json."""
    return config_of(checked.config.model.path, checked.family)


def check_prompts(checked: Checked) -> None:
    """Errors: ConfigError if a prompt, tokenized as it will be, leaves no room for an answer, holds a character that
    the tokenizer does not know, or has no worked example where SFT needs one; or if there is no chat template."""
    with checking():
        _check_prompts(checked)


def _check_prompts(checked: Checked) -> None:
    config, task = checked.config, checked.task
    tokenizer = tokenizer_of(config)
    _check_text(checked, tokenizer)
    training = list(training_prompts(task, config.run.seed))
    check_characters(task, tokenizer, [*checked.held_out, *training])
    check_seats(task, config.rollout.group_size)
    if config.sft.steps:
        limits = checked.titan.training.seq_len, num_positions(read_config(checked))
        check_demonstrations(task, config.run.seed, tokenizer, *limits)
    _check_tokens(checked, tokenizer, training)


def _check_text(checked: Checked, tokenizer: PreTrainedTokenizerBase) -> None:
    config, task = checked.config, checked.task
    tasks = all_tasks(config.task).values()
    of_others = any(is_reference(each.name) or each.name in TASKS_OF_OTHERS for each in tasks)
    calls, learns = bool(task.tools), bool(config.sft.steps)
    replies = of_others or calls or not task.has_one_answer
    use = TextUse(stops_of(config), learns=learns, demonstrates=learns, replies=replies, calls=calls)
    styles = {each.style for each in tasks if each.name != MIXTURE}
    check_model_text(config.model.path, tokenizer, use, styles)


def stops_of(config: Config) -> list[int]:
    """Ids that stop the engine."""
    path = config.model.path
    return made_stops(path) if path in MADE_MODELS else stop_token_ids(path)


def _check_tokens(checked: Checked, tokenizer: PreTrainedTokenizerBase, training: list[Prompt]) -> None:
    """Errors: ConfigError for prompts that are too long, that become tokens which the model has no row for, or with
    which a budget for thinking leaves none, or has no effect."""
    lengths, largest = [], 0
    if checked.config.sft.steps:
        eos = tokenizer.eos_token_id
        end = eos if isinstance(eos, int) else end_of_answer(tokenizer)
        assert end is not None, "check_model_text has refused one without an end"
        largest = end
    budgets = training_budget(checked.config), held_out_budget(checked.config)
    thinking = {budget: ThinkingCheck(budget, tokenizer) for budget in budgets}
    for budget, prompts in zip(budgets, (training, checked.held_out), strict=True):
        for prompt, tokens in zip(prompts, encode_all(checked.task, tokenizer, prompts), strict=True):
            lengths.append((place(prompt), len(tokens)))
            largest = max(largest, int(tokens.max(initial=0)))
            thinking[budget].add(prompt, tokens)
    for each in thinking.values():
        each.check_effect()
    check_room(checked, lengths)
    _check_ids(checked, largest)


def tokenizer_of(config: Config) -> PreTrainedTokenizerBase:
    """Errors: ConfigError for a tokenizer that transformers cannot read."""
    path = config.model.path
    return made_tokenizer(path, settings_of(config)) if path in MADE_MODELS else load_tokenizer(path, config)


def check_room(checked: Checked, lengths: Sequence[tuple[str, int]]) -> None:
    """``lengths``: places of prompts, and their tokens. Errors: ConfigError if one leaves no room for an answer."""
    seq_len, positions = checked.titan.training.seq_len, num_positions(read_config(checked))
    answer = checked.config.rollout.max_new_tokens
    room = min(seq_len, positions) - answer
    where, longest = max(lengths, key=lambda each: each[1])
    if longest <= room:
        return
    count = sum(length > room for _, length in lengths)
    too_long = f"{where}; {count} of {len(lengths)} {'is' if count == 1 else 'are'} too long"
    left = f"{room} tokens" if room > 0 else f"none, beside rollout.max_new_tokens = {answer},"
    room_words = f"leaves {left} for prompts, but they have up to {longest} ({too_long})"
    if positions < seq_len:
        raise ConfigError(
            f"model.path = {checked.config.model.path!r} has {positions} positions, which {room_words}: take a model "
            f"with more, or ask for less in task.options, or in the rows"
        )
    raise ConfigError(
        f"training.seq_len = {seq_len} {room_words}: raise it (the model's {positions} positions are the limit), or "
        f"ask for less in task.options, or in the rows"
    )


def _check_ids(checked: Checked, largest: int) -> None:
    path = checked.config.model.path
    if largest >= (size := read_config(checked).vocab_size):
        raise ConfigError(
            f"model.path = {path!r}: its tokenizer makes token {largest} of a prompt or of an answer's end, and the "
            f"model's vocab_size = {size}: copy the tokenizer that belongs to the model"
        )


def check_model(config: Config, family: Family | None = None) -> None:
    """Check a model by building it.

    Errors: ConfigError for an architecture that cannot be built, or not be laid out as ``[parallelism]`` and
    ``[generator]`` say, for weights that are not the model's, or a kernel that this machine cannot run.
    """
    on_cpu = is_on_cpu(config)
    if config.model.kernel == "triton" and on_cpu:
        raise ConfigError("model.kernel = 'triton' needs a GPU, and there is none: leave it out, or take 'reference'")
    path = config.model.path
    hf = config_of(path) if path in MADE_MODELS else _check_directory(path, family)
    titan = build_titan(config)
    check_products(hf, titan, family, on_cpu=on_cpu if config.hosts.is_on else None)
    check_image_limits(config, titan, hf)
    check_laid_out(config, titan, hf, family, on_cpu=on_cpu)


def check_laid_out(
    config: Config, titan: TitanConfig, hf: PreTrainedConfig, family: Family | None, *, on_cpu: bool
) -> None:
    """Errors: ConfigError for a model that cannot be shared out, adapted or sampled from as the settings say."""
    check_layout(hf, titan.parallelism, family)
    if config.algorithm.routing == "replay":
        check_replay(hf, family)
    if config.lora.rank:
        check_lora(hf, config, titan, family)
    elif [group.pattern for group in titan.optimizer.param_groups] != [".*"]:
        check_patterns(titan.optimizer.param_groups, parameter_names(spec_of(hf, "", family)))
    if config.has_generators:
        check_generator_layout(hf, config.generator.tensor_parallel, on_cpu=on_cpu)
        draft = check_draft_model(config, hf, family, on_cpu=on_cpu)
        config = for_device(config, on_cpu=on_cpu)
        check_engine(config, hf, titan.training.seq_len, draft, on_cpu=on_cpu)
        if titan.debug.batch_invariant:
            check_batch_invariant(config, titan, hf, family)


def _check_directory(path: str, family: Family | None) -> PreTrainedConfig:
    """Errors: ConfigError if the built model has no use for the directory's configuration or weights."""
    try:
        check_weights(model_spec(path, family), path)
        return read_hf_config(path, family)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:  # or what a family raises
        raise ConfigError(f"model.path = {path!r}: {_in_one_line(error)}") from None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def check_together(config: Config, titan: TitanConfig) -> None:
    """Errors: ConfigError for settings that do not go together, whatever model and data they are of."""
    check_length(titan.lr_scheduler, titan.training.steps * config.algorithm.updates_per_batch, "lr_scheduler")
    _check_filter(config)


def _check_filter(config: Config) -> None:
    """Errors: ConfigError for filters that together leave no group of a task of ours, whose scores are from 0 to 1."""
    if not config.filter.no_signal or config.filter.min_pass_rate < 1 or config.reward_model.path:
        return
    tasks = all_tasks(config.task).values()
    of_others = any(is_reference(each.name) or each.name in TASKS_OF_OTHERS for each in tasks)
    if not of_others and not any(set(each.reward_names) - {OWN_SCORE, *ANSWER_REWARDS} for each in tasks):
        raise ConfigError(
            "filter.min_pass_rate = 1 leaves the groups whose answers are all right, and filter.no_signal none whose "
            "rewards are all equal, so there would be none: lower the one, or leave the other out"
        )


def check_checkpoints(config: Config) -> None:
    """Errors: ConfigError for a store that cannot be used from here."""
    if store := config.checkpoint.store:
        try:
            check_store(store)
        except StoreError as error:
            raise ConfigError(f"checkpoint.store = {store!r}: {error}") from None


def check_transport(config: Config) -> None:
    """Errors: ConfigError for a transport that this machine has no hardware for."""
    setting = config.mesh.transport
    if setting == "cuda_ipc" and device_type(config) != "cuda":
        raise ConfigError("mesh.transport = 'cuda_ipc' needs a GPU, and there is none: leave it out")
    if setting == "rdma_ibverbs" and not has_ibverbs():
        raise ConfigError(
            "mesh.transport = 'rdma_ibverbs' needs an RDMA network card, and there is none: leave it out, or take "
            "'rdma_tcp'"
        )


# the whole run


@dataclass(frozen=True)
class Check:
    """Check of a run's configuration."""

    name: str
    run: Callable[[Checked], Checked | None]
    """Result: the configuration with what the check resolved, or None. Errors: ConfigError."""
    needs: str = ""
    """Check that must have passed before."""
    applies: Callable[[Config], bool] = lambda config: True
    asks_others: bool = False
    """Whether it sends to a server: only where nothing else was found."""
    of_updates: bool = False
    """Whether it depends on settings of optimizer, schedule or algorithm, which may change while a run goes on."""


def _check_algorithm(checked: Checked) -> None:
    check_algorithm(checked.algorithm, f"algorithm.name = {checked.config.algorithm.name!r}")


def _check_adapted_head(checked: Checked) -> None:
    if checked.config.lora.rank and checked.algorithm.head == "value":
        raise ConfigError(
            f"lora.rank = {checked.config.lora.rank}: algorithm.name = {checked.config.algorithm.name!r} trains a head "
            f"for values, which adapters leave as it is: leave [lora] out"
        )


def _check_reward_weights(checked: Checked) -> None:
    settings = checked.algorithm.settings
    if isinstance(settings, GDPO.Settings) and settings.reward_weights:
        has_model = bool(checked.config.reward_model.path)
        check_weights_of_parts(settings.reward_weights, {PART: True} if has_model else part_names(checked.task))


def _check_suites_ready(checked: Checked) -> None:
    for suite in checked.suites:
        with errors_under(suite.setting):
            suite.task.check_ready()


def _samples(config: Config) -> bool:
    return not config.data.file


def _has_generators(config: Config) -> bool:
    return config.has_generators


CHECKS = (
    Check("settings together", lambda c: check_together(c.config, c.titan), of_updates=True),
    Check("algorithm", _check_algorithm, of_updates=True),
    Check("model", lambda c: check_model(c.config, c.family)),
    Check("adapted head", _check_adapted_head, of_updates=True),
    Check("export", lambda c: check_export(c.config, c.algorithm, read_config(c), on_cpu=is_on_cpu(c.config)), "model"),
    Check(
        "decoding",
        lambda c: check_decoding(c.config, c.algorithm, read_config(c)),
        needs="model",
        applies=_samples,
        of_updates=True,
    ),
    Check("roles", lambda c: check_roles(c.config, c.algorithm, c.family, c.task), of_updates=True),
    Check("reward model", lambda c: check_reward_model(c.config, c.algorithm, c.family), of_updates=True),
    Check("judges", lambda c: check_judges(c.scored_tasks, c.config.verifier.score_timeout)),
    Check("transport", lambda c: check_transport(c.config)),
    Check("placement", lambda c: check_placement(c.config, c.titan, c.task, on_cpu=is_on_cpu(c.config))),
    Check("checkpoints", lambda c: check_checkpoints(c.config)),
    Check("hosts", lambda c: replace(c, host_launcher=check_hosts(c.config))),
    Check("trackers", lambda c: check_trackers(c.config.metrics)),
    Check("dataset", with_dataset, needs="model", applies=lambda config: not _samples(config)),
    Check("prompts", check_prompts, needs="model", applies=_samples),
    Check("reward weights", _check_reward_weights, needs="prompts", applies=_samples, of_updates=True),
    Check("suites", with_suites, needs="model", applies=lambda config: bool(config.eval.suites)),
    Check(
        "grader",
        lambda c: check_grader(c.config.task, c.config.eval.grader, c.config.run.plugin_path),
        applies=lambda config: bool(config.eval.grader) and _samples(config),
    ),
    Check(
        "sandbox server",
        lambda c: check_server(c.config.task.sandbox),
        applies=lambda config: bool(config.task.sandbox) and config.has_generators,
        asks_others=True,
    ),
    Check("judges' servers", lambda c: ask_judges(c.scored_tasks), applies=_has_generators, asks_others=True),
    Check("task's servers", lambda c: c.task.check_ready(), applies=_samples, asks_others=True),
    Check("suites' servers", _check_suites_ready, applies=lambda config: bool(config.eval.suites), asks_others=True),
)


def check(config: Config, keys: Collection[str] | None = None, only: Collection[str] | None = None) -> Checked:
    """``keys``: which settings must have an effect, ``only``: names of the checks that apply; None: all. Errors:
    ConfigError with a line for whatever would keep the run from its first step, as far as it can be told here."""
    checked = resolve(config, config.eval.prompts)
    read = Check("read", lambda c: check_read(c.config, c.algorithm, c.titan, c.task, keys))
    findings: list[str] = []
    failed: set[str] = set()
    for each in (read, *CHECKS):
        applies = each.applies(checked.config) and (only is None or each.name in only)
        if not applies or each.needs in failed or (each.asks_others and findings):
            continue
        try:
            checked = each.run(checked) or checked
        except ConfigError as error:
            findings += error.findings
            failed.add(each.name)
        except Exception:
            if not findings:
                raise
            failed.add(each.name)  # a finding may be its cause; if not, it is raised once that is mended
    raise_findings(list(dict.fromkeys(findings)))
    return checked
