"""Settings that a run would never read: refused by name, so that none is without effect and nobody says so.

``_RULES`` is the whole table: which section, or single key, is read by which kind of run; every run reads what is not
in it. A setting counts as set where it differs from its default: a TOML may write a default down for nothing. What
depends on the machine (``generator.gpu_memory_utilization`` on a CPU) is not asked: a TOML is for many machines. A
switch that is turned off on the command line takes its section of the file with it (config/load.py ``SWITCHES``).
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any

from titan_rl.algorithms.base import Algorithm
from titan_rl.algorithms.policy_gradient.turn_grpo import TurnGRPO
from titan_rl.config.errors import raise_findings
from titan_rl.config.load import as_dict
from titan_rl.config.mixture import all_tasks, names_of
from titan_rl.config.sections.schema import JUDGE, MADE, MADE_MODELS, OUR_SECTIONS, TITAN_SECTIONS, Config
from titan_rl.config.sections.suites import have_chats
from titan_rl.data.images import sees_images
from titan_rl.environments.interfaces.task import Task
from titan_rl.trainer.roles.names import FROZEN, LEARNED, MAY_BE_OWN, learned_roles
from titan_rl.trainer.titan_config import TitanConfig, build_titan, learned_titan


@dataclass(frozen=True)
class Run:
    """Run as seen by the rules: configuration, algorithm, task."""

    config: Config
    algorithm: Algorithm
    titan: TitanConfig
    task: Task

    @property
    def on_data(self) -> bool:
        return bool(self.config.data.file)

    @property
    def named(self) -> str:
        return f"algorithm.name = {self.config.algorithm.name!r}"


Rule = Callable[[Run], str]
"""Why a setting is not read, and the mend; empty: it is."""


def _unless(is_read: Callable[[Run], Any], why: str) -> Rule:
    return lambda run: "" if is_read(run) else why


def _sampled(mend: str = "leave it out") -> Rule:
    return _unless(lambda run: not run.on_data, f"a run on data.file samples no answers; {mend}")


_, _TINY_VISION = MADE_MODELS
_ABSURD_LR = 0.5
_HAS_GENERATORS = _unless(
    lambda run: run.config.has_generators, "a run on data.file samples no answers without eval.suites; leave it out"
)


def _role(role: str) -> Rule:
    def why(run: Run) -> str:
        if getattr(run.algorithm.needs, role):
            return ""
        needs = f"{run.named}, as it is set, needs no {role}" if role in FROZEN else f"{run.named} has none"
        return f"{needs}; leave it out"

    return why


def _drafter(run: Run) -> str:
    if not run.config.drafter.learns:
        return "no draft model learns without drafter.path, or drafter.train_mtp; set one, or leave it out"
    return _sampled()(run) or _drafted_by("draft_model", "eagle3", "mtp")(run)


def _aggregation(run: Run) -> str:
    kind = run.algorithm.trains_on
    each = f"with {run.named} each of the {kind} counts alike; leave it out"
    return each if run.on_data and kind != "demonstrations" else ""


def _max_new_tokens(run: Run) -> str:
    divides = run.config.algorithm.aggregation == "constant" and run.algorithm.trains_on == "demonstrations"
    return "" if divides or _has_suite_of_task(run) else _sampled()(run)


def _has_suite_of_task(run: Run) -> bool:
    """Whether a suite is no public set, whose answers are single ones of a length of their own."""
    return any("task" in suite for suite in run.config.eval.suites)


def _own(role: str) -> Rule:
    def why(run: Run) -> str:
        is_own = getattr(run.algorithm.needs, role) and getattr(run.config, role).placement == "own"
        return "" if is_own else f"it has no processes of its own; leave it out, or set {role}.placement = 'own'"

    return why


def _reference_path(run: Run) -> str:
    """trainer/roles/frozen.py PolicyWithoutAdapters."""
    is_adapted = run.config.lora.rank and run.config.reference.placement == "with_trainer"
    without = "with lora.rank > 0 the reference is the policy without its adapters"
    return f"{without}; leave it out, or set reference.placement = 'own'" if is_adapted else ""


def _teacher_path(run: Run) -> str:
    names = names_of(run.config.task)
    has_own = names and all(name in run.config.teacher.by_task for name in names)
    return "each task of the mixture has its own in teacher.by_task; leave it out" if has_own else ""


def _drafted_by(*methods: str) -> Rule:
    return _unless(
        lambda run: run.config.generator.speculative.method in methods,
        f"it is of generator.speculative.method = {' or '.join(map(repr, methods))}; set that, or leave it out",
    )


def _judge(run: Run) -> str:
    graded = run.config.eval.grader
    parts = all_tasks(run.config.task).values()
    judges = any(JUDGE in part.reward_names for part in parts) or graded == JUDGE
    return (
        ""
        if judges
        else "[task.judge] judges nothing; set task.reward = 'judge', name it in task.rewards, or " + ("leave it out")
    )


def _writes_chats(run: Run) -> bool:
    has_chats = any(task.style == "chat" for task in all_tasks(run.config.task).values())
    return run.on_data or has_chats or have_chats(run.config.eval.suites)


_ONE_ANSWER = "nothing in the task replies to an answer, so an episode has one; leave it out"


def _discount(run: Run) -> str:
    is_of_turns = isinstance(run.algorithm.settings, TurnGRPO.Settings)
    return _ONE_ANSWER if is_of_turns and run.task.has_one_answer else ""


def _images(run: Run) -> str:
    path = run.config.model.path
    sees = path == _TINY_VISION or path not in MADE_MODELS and sees_images(path)
    return "" if sees else f"model.path = {path!r} sees no images; leave it out"


_HAS_CHATS = _unless(
    _writes_chats,
    "task.style = 'compact' writes prompts without a chat template; leave it out, or set task.style = 'chat'",
)
_HAS_ADAPTERS = _unless(
    lambda run: run.config.lora.rank, "lora.rank = 0 trains the whole model, without adapters; set it, or leave it out"
)
_HAS_HOSTS = _unless(
    lambda run: run.config.hosts.is_on,
    "hosts.launcher = 'local' has no other hosts; set it to 'attach', or another launcher, or leave it out",
)
_HAS_DATA = _unless(
    lambda run: run.on_data, "the run samples its answers and reads no data; set data.file, or leave it out"
)
_FROM_FILE = _unless(
    lambda run: run.config.data.file != MADE, "data.file = 'task' makes the rows, of [task]; leave it out"
)
_HAS_SFT = _unless(lambda run: run.config.sft.steps, "sft.steps = 0 leaves SFT out; set it, or leave it out")
_HAS_FLOAT8 = _unless(lambda run: run.titan.float8.is_on, "float8.recipe_name is 'none'; set it, or leave it out")
_COMPILES = _unless(lambda run: run.titan.compile.enable, "compile.enable is false; set it, or leave it out")
_HAS_DRAFTS = _unless(
    lambda run: run.config.generator.speculative.method != "none",
    "generator.speculative.method = 'none' drafts nothing; set it to 'ngram', 'draft_model', 'eagle3' or 'mtp', or "
    "leave it out",
)
_HAS_UPDATES_BETWEEN = _unless(
    lambda run: run.config.rollout.max_staleness,
    "rollout.max_staleness = 0 samples no answer while weights are updated; leave it out, or set that above 0",
)


def _decays(section: str) -> Rule:
    why = f"{section}.decay_ratio = 0 keeps the learning rate as it is; set it, or leave it out"
    role = section.rpartition(".")[0]
    if role:
        return _unless(lambda run: getattr(run.config, role).lr_scheduler.get("decay_ratio"), why)
    return _unless(lambda run: run.titan.lr_scheduler.decay_ratio, why)


_HAS_STAGES = _unless(
    lambda run: run.titan.parallelism.pipeline_parallel_degree > 1,
    "parallelism.pipeline_parallel_degree = 1 has no stages; set it, or leave it out",
)
_RULES: dict[str, tuple[Rule, ...]] = {
    "task": (
        _unless(
            lambda run: not run.on_data or run.config.data.file == MADE,
            "data.file is what the run learns from; leave it out",
        ),
    ),
    "task.reward": (_sampled(),),
    "task.rewards": (_sampled(),),
    "task.rewards_by_source": (_sampled(),),
    "task.judge": (_sampled(), _judge),
    "task.sandbox": (_HAS_GENERATORS,),
    "task.scoring": (_sampled(),),
    "task.keep_special": (_HAS_GENERATORS,),
    **{f"model.chat_template.{key}": (_HAS_CHATS,) for key in ("text", "options", "date")},
    **{f"model.images.{key}": (_images,) for key in ("min_pixels", "max_pixels")},
    "algorithm.aggregation": (_aggregation,),
    "algorithm.updates_per_batch": (_sampled("set data.examples_per_step lower"),),
    "algorithm.train_truncated": (_sampled(),),
    "algorithm.routing": (_sampled(),),
    "algorithm.discount": (_discount,),
    "algorithm.overlong_buffer": (_sampled(),),
    "algorithm.overlong_penalty": (
        _sampled(),
        _unless(lambda run: run.config.algorithm.overlong_buffer, "algorithm.overlong_buffer = 0; set it, too"),
    ),
    "debug.batch_invariant": (_HAS_GENERATORS,),
    "lora.alpha": (_HAS_ADAPTERS,),
    "lora.targets": (_HAS_ADAPTERS,),
    "lora.adapter": (_HAS_ADAPTERS,),
    "lora.sync": (_HAS_ADAPTERS, _HAS_GENERATORS),
    **{role: (_role(role),) for role in MAY_BE_OWN},
    "drafter": (_drafter,),
    "drafter.path": (_drafted_by("draft_model", "eagle3"),),
    "drafter.train_mtp": (_drafted_by("mtp"),),
    "reference.path": (_reference_path,),
    "teacher.path": (_teacher_path,),
    "reward_model": (_sampled(),),
    "reward_model.reads_end": (
        _unless(lambda run: run.config.reward_model.path, "there is none without reward_model.path; leave it out"),
    ),
    "rollout": (_sampled(),),
    "rollout.max_new_tokens": (_max_new_tokens,),
    "rollout.stop": (_HAS_GENERATORS,),
    "rollout.thinking_budget": (_HAS_GENERATORS,),
    "eval.thinking_budget": (_HAS_GENERATORS,),
    "rollout.max_retries": (_HAS_GENERATORS,),
    "rollout.max_turns": (
        _HAS_GENERATORS,
        _unless(
            lambda run: _has_suite_of_task(run) or not (run.on_data or run.task.has_one_answer),
            _ONE_ANSWER,
        ),
    ),
    "rollout.share_prefix": (
        _unless(
            lambda run: run.algorithm.trains_on in ("rollouts", "pairs"),
            "each row is trained with one answer, so nothing shares its prompt; leave it out",
        ),
    ),
    "filter": (_sampled(),),
    "filter.max_refills": (
        _unless(lambda run: run.config.filter.is_on, "nothing is filtered; set another key of [filter], too"),
    ),
    "curriculum": (_sampled(),),
    "curriculum.memory": (
        _unless(lambda run: run.config.curriculum.is_on, "curriculum.least_chance = 1 asks all alike; set it, too"),
    ),
    "generator": (_HAS_GENERATORS,),
    "generator.update": (_HAS_UPDATES_BETWEEN,),
    **{f"generator.speculative.{key}": (_HAS_DRAFTS,) for key in ("num_speculative_tokens", "adaptive")},
    **{f"generator.speculative.prompt_lookup_{key}": (_HAS_DRAFTS, _drafted_by("ngram")) for key in ("min", "max")},
    "generator.speculative.model": (_HAS_DRAFTS, _drafted_by("draft_model", "eagle3")),
    "generator.kv": (_HAS_UPDATES_BETWEEN,),
    "verifier": (_HAS_GENERATORS,),
    "sft.examples_per_step": (_HAS_SFT,),
    "sft.lr": (_HAS_SFT,),
    "data": (_HAS_DATA,),
    "data.held_out_file": (_FROM_FILE,),
    "data.held_out_share": (
        _FROM_FILE,
        _unless(lambda run: not run.config.data.held_out_file, "data.held_out_file has those rows; leave it out"),
    ),
    "data.format": (_FROM_FILE,),
    "data.columns": (_FROM_FILE,),
    "data.made_rows": (
        _unless(lambda run: run.config.data.file == MADE, "rows are made with data.file = 'task' only; leave it out"),
    ),
    "eval.grader": (_sampled(),),
    "recovery.warm_spares": (_sampled(),),
    "mesh.launcher": (
        _unless(lambda run: run.config.mesh.worker_loops, "mesh.worker_loops = 0, so nothing to start; set it, too"),
    ),
    "hosts": (_HAS_HOSTS,),
    "hosts.generator": (_HAS_GENERATORS,),
    "hosts.verifier": (_HAS_GENERATORS,),
    "placement.mode": (
        _unless(lambda run: not run.on_data, "a run on data.file has no generators to take turns with; leave it out"),
    ),
    "placement.helper_generators": (_sampled(),),
    "placement.generator": (_HAS_GENERATORS,),
    **{f"placement.{role}": (_own(role),) for role in MAY_BE_OWN},
    "metrics.project": (
        _unless(
            lambda run: run.config.metrics.wandb or run.config.metrics.trackio,
            "neither metrics.wandb nor metrics.trackio is on; set one, or leave it out",
        ),
    ),
    **{
        f"{section}.{key}": (_decays(section),)
        for section in ("lr_scheduler", *(f"{role}.lr_scheduler" for role in LEARNED))
        for key in ("decay_type", "min_lr_factor")
    },
    "compile.components": (_COMPILES,),
    "compile.backend": (_COMPILES,),
    "float8.filter_fqns": (_HAS_FLOAT8,),
    "parallelism.pipeline_parallel_schedule": (_HAS_STAGES,),
    "parallelism.pipeline_parallel_layers_per_stage": (_HAS_STAGES,),
    "parallelism.pipeline_parallel_first_stage_less_layers": (_HAS_STAGES,),
    "parallelism.pipeline_parallel_last_stage_less_layers": (_HAS_STAGES,),
    "parallelism.module_fqns_per_model_part": (_HAS_STAGES,),
    "parallelism.enable_sequence_parallel": (
        _unless(
            lambda run: run.titan.parallelism.tensor_parallel_degree > 1,
            "parallelism.tensor_parallel_degree = 1 splits no layer; leave it out",
        ),
    ),
}
"""By section, for all its keys, and by key."""
_ONLY_THEIR_OWN = {
    *("rollout.max_new_tokens", "rollout.max_turns", "rollout.max_retries", "rollout.stop", "rollout.share_prefix"),
    "rollout.thinking_budget",
    *("task.sandbox", "task.keep_special", "generator.gpu_memory_utilization"),
    *("data.file", "hosts.launcher"),
}
"""Keys for which their section's rules do not hold."""


def check_read(
    config: Config, algorithm: Algorithm, titan: TitanConfig, task: Task, keys: Collection[str] | None = None
) -> None:
    """``keys``: those to check; None: all. Errors: ConfigError for settings that differ from their defaults and that
    the run would never read, once for a section that has no effect."""
    run, findings, refused = Run(config, algorithm, titan, task), [], set()
    for key, value in _set(run):
        if keys is not None and not any(f"{checked_key}.".startswith(f"{key}.") for checked_key in keys):
            continue
        section = key.partition(".")[0]
        if why := _why([] if key in _ONLY_THEIR_OWN else _RULES.get(section, ()), run):
            if section not in refused:
                findings.append(f"{key} = {_shown(value)}: [{section}] has no effect: {why}")
            refused.add(section)
        elif why := _why(_RULES.get(key, ()), run):
            findings.append(f"{key} = {_shown(value)} has no effect: {why}")
    raise_findings(findings)


def learning_rate_notices(config: Config, algorithm: Algorithm, titan: TitanConfig) -> list[str]:
    """Lines about models with a learning rate of 0, which only a control should have, or a far too large one."""
    lines = []
    for role in ("", *learned_roles(config, algorithm.needs)):
        role_config = learned_titan(config, titan, role) if role else titan
        groups = [group.optimizer_kwargs for group in role_config.optimizer.param_groups]
        key = f"{role}.optimizer.lr" if role else "optimizer.lr"
        for group in role_config.optimizer.param_groups:
            of_group = "" if group.pattern == ".*" else f" of {group.pattern!r}"
            if (rate := group.optimizer_kwargs.get("lr", 0)) >= _ABSURD_LR:
                lines.append(
                    f"{key}{of_group} = {rate:g}: Adam moves each weight by about that much a step, which leaves "
                    f"nothing of a model; 1e-6 to 1e-2 are usual"
                )
        if all(group.get("lr") == 0 for group in groups):
            lines.append(f"{key} = 0: the {role or 'model'} stays as it is")
    return lines


def _why(rules: Iterable[Rule], run: Run) -> str:
    return next((why for rule in rules if (why := rule(run))), "")


def _set(run: Run) -> Iterator[tuple[str, Any]]:
    """Keys that differ from their defaults, in the schema's order, with their values."""
    defaults = _defaults()
    tables = as_dict(run.config) | run.titan.as_dict()
    for section in (*OUR_SECTIONS, *TITAN_SECTIONS):
        yield from _changed(section, tables[section], defaults[section])
    settings = run.algorithm.settings
    for own in fields(settings):
        if own.default not in (MISSING, value := getattr(settings, own.name)):
            yield f"algorithm.{own.name}", value
    for role in LEARNED:
        for key, value in getattr(run.config, role).lr_scheduler.items():
            if defaults["lr_scheduler"].get(key, value) != value:
                yield f"{role}.lr_scheduler.{key}", value


def _changed(section: str, table: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys of a table that differ from their defaults; those of a table within it that has keys of its own."""
    for key, value in table.items():
        default = defaults.get(key, value)
        if isinstance(default, dict) and default:
            yield from _changed(f"{section}.{key}", value, default)
        elif default != value:
            yield f"{section}.{key}", value


@cache
def _defaults() -> Mapping[str, Mapping[str, Any]]:
    config = Config()
    return as_dict(config) | build_titan(config).as_dict()


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."
