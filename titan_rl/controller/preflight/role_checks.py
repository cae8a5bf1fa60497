"""Whether the roles beside the policy are as the algorithm needs them: checked before any process starts.

Limits of images are checked here, too, by which policy and roles see them.
"""

from dataclasses import replace
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from titan_rl.algorithms.base import Algorithm
from titan_rl.config.load import ConfigError
from titan_rl.config.mixture import names_of, teachers_of
from titan_rl.config.model_directory.config_checks import VISION
from titan_rl.config.model_directory.directory import read_object, stored_tensors
from titan_rl.config.model_directory.draft_heads import EMBEDDING, POLICIES, layers_read
from titan_rl.config.model_directory.tokenizer_checks import vocabulary
from titan_rl.config.model_directory.vision_checks import check_limits
from titan_rl.config.sections.schema import MADE_MODELS, Config
from titan_rl.controller.preflight.device import is_on_cpu
from titan_rl.controller.preflight.engine_checks import check_generator_layout
from titan_rl.data.images import UNLIMITED, image_processor
from titan_rl.environments.interfaces.task import Task
from titan_rl.environments.rollout.decoding import PENALTIES, changed
from titan_rl.models.builtin.made import config_of, image_processor_at, made_tokenizer
from titan_rl.models.families.registry import Family
from titan_rl.models.layers.rope import num_positions
from titan_rl.models.spec import model_spec, parameter_names, prediction_layer_spec, read_hf_config, spec_of
from titan_rl.models.value_head import check_has_classifier, check_value_weights, value_spec
from titan_rl.models.weights.hf_weights import check_weights
from titan_rl.trainer.model.layout import check_layout, check_products, check_uncut
from titan_rl.trainer.roles.names import DRAFTER, FROZEN, learned_roles, num_words
from titan_rl.trainer.titan_config import TitanConfig, build_titan, learned_titan, role_titan
from titan_rl.trainer.titan_limits import check_length, check_patterns

_TRAIN_MTP = "drafter.train_mtp = true"
_OTHER_DRAFTS = ("eagle-", "eagle3", "dflash", "dspark")
"""Words by which vLLM 0.32 tells other kinds of drafts from draft models, in whatever folder they stand."""


def check_roles(config: Config, algorithm: Algorithm, family: Family | None, task: Task) -> None:
    """Errors: ConfigError for a role that cannot be built or laid out, or that has other tokens than the policy."""
    if algorithm.head == "value" and family is None:
        _check_classifier("model", config)
    for role in FROZEN:
        if not getattr(algorithm.needs, role):
            continue
        if role == "teacher":
            _check_taught(config)
        _check_placement(config, role)
        for key, path in _frozen_models(config, role).items():
            _check_model(config, role, family, num_words(role, algorithm.needs), key, path)
    if algorithm.needs.self_teacher:
        _check_self_teacher(config, algorithm, task, family)
        _check_words(algorithm.needs.teacher_words, config_of(config.model.path, family))
    learned = learned_roles(config, algorithm.needs)
    if len(learned) > 1:
        raise ConfigError(
            f"{_drafter_setting(config)}: algorithm.name = {config.algorithm.name!r} needs a model "
            f"that learns, too ({learned[0]}), and one model learns beside the policy: leave it out, or take another "
            f"algorithm"
        )
    for role in learned:
        _check_learned(config, role, family)
    if config.drafter.learns and config.sends_adapters:
        raise ConfigError(
            f"{_drafter_setting(config)}: generators are sent adapters alone; set lora.sync = 'merged', or leave it out"
        )


def _drafter_setting(config: Config) -> str:
    """Of the drafter that learns."""
    return f"drafter.path = {config.drafter.path!r}" if config.drafter.path else _TRAIN_MTP


def _check_taught(config: Config) -> None:
    """Errors: ConfigError for what has no teacher, and for teachers of what there is not."""
    teacher, names = config.teacher, names_of(config.task)
    if teacher.by_task and not names:
        raise ConfigError(
            f"teacher.by_task names teachers of a mixture's tasks, and task.name = {config.task.name!r} is one task: "
            f"give teacher.path instead"
        )
    if unknown := [name for name in teacher.by_task if name not in names]:
        raise ConfigError(
            f"teacher.by_task: {unknown[0]!r:.60} is no task of the mixture ({', '.join(names)}): rename it, or leave "
            f"it out"
        )
    if empty := [name for name, path in teacher.by_task.items() if not path]:
        raise ConfigError(f"teacher.by_task.{empty[0]} is empty: give a Hugging Face directory, or leave it out")
    untaught = [name for name in names if name not in teacher.by_task]
    if teacher.path or (names and not untaught):
        return
    if teacher.by_task:
        raise ConfigError(
            f"task.options.{untaught[0]} has no teacher: give one as teacher.by_task.{untaught[0]}, or teacher.path "
            f"for all that have none of their own"
        )
    mend = "as teacher.path" + (", or one of each task in [teacher.by_task]" if names else "")
    setting = f"algorithm.name = {config.algorithm.name!r}"
    raise ConfigError(f"{setting} needs a teacher: give its Hugging Face directory {mend}")


def teacher_notice(config: Config, algorithm: Algorithm) -> list[str]:
    """Line about the teacher of each task, where there are several teachers."""
    teachers = teachers_of(config)
    if not algorithm.needs.teacher or len(teachers.paths) < 2:
        return []
    both = zip(teachers.tasks, teachers.paths, strict=True)
    return ["teachers: " + "; ".join(f"of {', '.join(tasks)}: {path}" for tasks, path in both)]


def _frozen_models(config: Config, role: str) -> dict[str, str]:
    """Directories of a role's models, by the settings that name them."""
    settings = getattr(config, role)
    by_task = {f"teacher.by_task.{task}": path for task, path in settings.by_task.items()} if role == "teacher" else {}
    return ({} if by_task and not settings.path else {f"{role}.path": settings.path}) | by_task


def _check_self_teacher(config: Config, algorithm: Algorithm, task: Task, family: Family | None) -> None:
    """Errors: ConfigError for what a self-teacher, which reads one answer behind another prompt, cannot follow."""
    setting, rollout = f"algorithm.name = {config.algorithm.name!r}", config.rollout
    if config_of(config.model.path, family).model_type in VISION:
        raise ConfigError(f"{setting} has the policy read another prompt, without its images: take grpo")
    if not task.has_one_answer:
        raise ConfigError(
            f"{setting} is for tasks of one answer, and task.name = {config.task.name!r} replies: take grpo"
        )
    if algorithm.needs.self_teacher == "initial" and config.reference.placement == "own":
        raise ConfigError(f"reference.placement = 'own': {setting} asks it beside the policy; leave it out")
    if keys := changed(rollout, PENALTIES):
        raise ConfigError(
            f"rollout.{keys[0]} = {getattr(rollout, keys[0])}: {setting} has the policy read an answer behind another "
            f"prompt, whose words would be penalized, too: leave it out"
        )
    if rollout.thinking_budget:
        raise ConfigError(
            f"rollout.thinking_budget = {rollout.thinking_budget}: {setting} reads sampled tokens alone, and a budget "
            f"forces others between them: leave it out"
        )


def _check_placement(config: Config, role: str) -> None:
    settings = getattr(config, role)
    if settings.placement == "with_trainer" and settings.parallelism:
        raise ConfigError(
            f"{role}.parallelism is of processes of its own, and {role}.placement = 'with_trainer' has the "
            f"trainer's layout: set placement = 'own', or leave it out"
        )


def check_reward_model(config: Config, algorithm: Algorithm, family: Family | None) -> None:
    """Errors: ConfigError if there is none where the algorithm needs one, or it reads other tokens."""
    path, setting = config.reward_model.path, f"reward_model.path = {config.reward_model.path!r}"
    if not path:
        if algorithm.needs.reward_model:
            raise ConfigError(
                f"algorithm.name = {config.algorithm.name!r} needs a reward model: give its directory as "
                f"reward_model.path"
            )
        return
    if algorithm.rewards == "not_negative":
        raise ConfigError(
            f"{setting} gives rewards of both signs, and algorithm.name = {config.algorithm.name!r} divides by a "
            f"group's mean: take grpo"
        )
    try:
        model = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
        raise ConfigError(f"{setting}: {' '.join(str(error).split())}") from None
    policy = config_of(config.model.path, family)
    if policy.model_type in VISION:
        raise ConfigError(f"{setting} reads text alone, and the policy sees images: leave it out")
    if model.get_text_config().vocab_size != policy.vocab_size:
        raise ConfigError(
            f"{setting} has vocab_size = {model.get_text_config().vocab_size}, the policy {policy.vocab_size}: the "
            f"reward model must read the policy's tokens"
        )


def _check_learned(config: Config, role: str, family: Family | None) -> None:
    _check_placement(config, role)
    settings, titan = getattr(config, role), learned_titan(config, build_titan(config), role)
    steps = titan.training.steps
    if settings.warmup_steps >= steps:
        raise ConfigError(
            f"{role}.warmup_steps = {settings.warmup_steps} leaves the policy none of training.steps = {steps}: "
            f"lower it, or raise training.steps"
        )
    check_length(titan.lr_scheduler, steps * config.algorithm.updates_per_batch, f"{role}.lr_scheduler")
    if role == DRAFTER and config.drafter.train_mtp:
        _check_prediction_layer(config, titan, config_of(config.model.path, family))
    if path := settings.path:
        try:
            spec = model_spec(path, family)
            if role == "critic":
                check_value_weights(value_spec(spec), path)
            elif role == DRAFTER and config.generator.speculative.method == "eagle3":
                check_weights(spec, path)
                _check_shares_embeddings(path)
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # or what a family raises
            raise ConfigError(f"{role}.path = {path!r}: {' '.join(str(error).split())}") from None
    _check_model(config, role, family, 0, f"{role}.path", settings.path)
    _check_groups(config, role, titan, family)
    if role == "critic" and family is None:
        _check_classifier(role, config)


def _check_prediction_layer(config: Config, titan: TitanConfig, policy: PreTrainedConfig) -> None:
    """Errors: ConfigError where the policy's own layer cannot learn, or could not be written."""
    if (count := policy.num_nextn_predict_layers) != 1:
        raise ConfigError(
            f"{_TRAIN_MTP}: the policy has {count} layers for multi-token prediction (num_nextn_predict_layers), and "
            f"one alone can learn; leave it out"
        )
    if config.checkpoint.export_quantization != "none":
        raise ConfigError(
            f"{_TRAIN_MTP} and checkpoint.export_quantization = {config.checkpoint.export_quantization!r}: that layer "
            f"is not written in FP8; leave one of them out"
        )
    check_uncut(titan.parallelism, "a layer for multi-token prediction that learns, nor its policy")


def _check_shares_embeddings(path: str) -> None:
    """Errors: ValueError for a draft head with embeddings of its own."""
    if EMBEDDING in stored_tensors(path):
        raise ValueError(
            f"it holds {EMBEDDING}, and a head that learns reads the policy's embeddings: remove it, or give the head "
            f"as generator.speculative.model, which does not learn"
        )


def _check_classifier(role: str, config: Config) -> None:
    """``role``: whose model gets a value head, of a family that transformers must know by then."""
    path = getattr(config, role).path or config.model.path
    try:
        check_has_classifier(config_of(path).model_type)
    except ValueError as error:
        raise ConfigError(f"{role}.path = {path!r}: {error}") from None


def _check_groups(config: Config, role: str, titan: TitanConfig, family: Family | None) -> None:
    """Errors: ConfigError if a group of parameters has none of the role's, or one has no group."""
    groups, path = titan.optimizer.param_groups, getattr(config, role).path
    if [group.pattern for group in groups] == [".*"]:
        return
    policy = config_of(config.model.path, family)
    if role == DRAFTER and config.drafter.train_mtp:
        spec = prediction_layer_spec(policy)
    else:
        spec = model_spec(path, family) if path else spec_of(policy, "", family)
    spec = value_spec(spec) if role == "critic" else spec
    check_patterns(groups, parameter_names(spec), section=f"{role}.optimizer")


def check_image_limits(config: Config, titan: TitanConfig, hf: PreTrainedConfig) -> None:
    """Errors: ConfigError for limits that the model's images cannot have, or that leave no room for an answer."""
    if config.model.images == UNLIMITED:
        return
    try:
        processor = image_processor_at(config.model.path)
    except ValueError as error:
        raise ConfigError(f"model.path = {config.model.path!r}: {error}") from None
    if processor is not None:
        seq_len, positions = titan.training.seq_len, num_positions(hf)
        reason = f"training.seq_len = {seq_len}" if seq_len <= positions else f"a model of {positions} positions"
        room = min(seq_len, positions) - config.rollout.max_new_tokens - len(processor.around)
        check_limits(config.model.images, processor.form, room, reason)


def _check_words(words: int, policy: PreTrainedConfig) -> None:
    """Errors: ConfigError for more of the likeliest words than there are."""
    if words > policy.vocab_size:
        raise ConfigError(
            f"algorithm.top_k: {words} tokens exceed the vocabulary of {policy.vocab_size}: give no more than that"
        )


def check_draft_model(
    config: Config, policy: PreTrainedConfig, family: Family | None, *, on_cpu: bool
) -> PreTrainedConfig | None:
    """The draft model's config, if there is one. Errors: ConfigError for a model that engines cannot run, or that has
    other tokens than the policy."""
    settings = config.generator.speculative
    if not settings.has_model or not settings.model:
        return None
    key = "drafter.path" if config.drafter.path else "generator.speculative.model"
    setting = f"{key} = {settings.model!r}"
    try:
        draft = read_hf_config(settings.model, family)
        check_generator_layout(draft, config.generator.tensor_parallel, on_cpu=on_cpu)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:  # or what a family raises
        raise ConfigError(f"{setting}: {' '.join(str(error).split())}") from None
    if settings.method == "eagle3":
        _check_draft_head(setting, Path(settings.model), policy)
    elif taken := [word for word in _OTHER_DRAFTS if word in settings.model.lower()]:
        raise ConfigError(
            f"{setting}: vLLM takes a path with {taken[0]!r} in it for one of another kind of draft; give the model "
            f"another path, such as a link"
        )
    if policy.model_type in VISION:
        raise ConfigError(f"{setting}: there are no drafts for a policy that sees images; take 'ngram'")
    kinds = {"draft": draft, "policy": policy}
    if latent := [kind for kind, hf in kinds.items() if getattr(hf, "kv_lora_rank", None) is not None]:
        raise ConfigError(
            f"{setting}: the {latent[0]}'s latent attention (kv_lora_rank) has a KV cache of its own kind; take 'ngram'"
        )
    if "linear_attention" in (getattr(draft, "layer_types", None) or ()):
        raise ConfigError(f"{setting}: its states of linear attention cannot go back over a draft; take another model")
    longest = min(build_titan(config).training.seq_len, num_positions(policy))
    if num_positions(draft) < longest:
        raise ConfigError(
            f"{setting} has {num_positions(draft)} positions (max_position_embeddings), and drafts for rollouts of up "
            f"to {longest} tokens: take another model, or lower training.seq_len"
        )
    if not config.drafter.path:  # of which it is checked as of each role
        _check_tokens(config, policy, draft, "draft model", key, settings.model)
    return draft


def _check_draft_head(setting: str, path: Path, policy: PreTrainedConfig) -> None:
    """Errors: ConfigError for an EAGLE-3 head that the policy's hidden states are not for."""
    if policy.model_type not in POLICIES:
        others = "'ngram'" if policy.model_type in VISION else "'ngram' or 'draft_model'"
        raise ConfigError(
            f"{setting}: vLLM gives no hidden states of model type {policy.model_type!r} to a draft head; take {others}"
        )
    config = read_object(path / "config.json")
    for key in ("hidden_size", "target_hidden_size"):
        if (size := config.get(key, policy.hidden_size)) != policy.hidden_size:
            raise ConfigError(
                f"{setting}: its {key} = {size}, and the policy's hidden_size = {policy.hidden_size}: take the head of "
                f"this policy"
            )
    try:
        layers_read(config, policy.num_hidden_layers)
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}") from None


def _check_tokens(
    config: Config, policy: PreTrainedConfig, model: PreTrainedConfig, role: str, setting: str, place: str
) -> None:
    """Errors: ConfigError if a model reads other tokens than the policy. ``setting``, ``place``: its directory."""
    if model.vocab_size != policy.vocab_size:
        raise ConfigError(
            f"{setting} = {place!r} has vocab_size = {model.vocab_size}, the policy {policy.vocab_size}: the {role} "
            f"must read the policy's tokens"
        )
    try:
        own = vocabulary(Path(place))
        policy_path = config.model.path
        known = made_tokenizer(policy_path).get_vocab() if policy_path in MADE_MODELS else vocabulary(Path(policy_path))
    except ValueError as error:
        raise ConfigError(f"{setting} = {place!r}: {error}") from None
    if own is None or known is None:
        return
    if others := [token for token in known if own.get(token) != known[token]]:
        first = min(others, key=known.__getitem__)
        raise ConfigError(
            f"{setting} = {place!r}: token {known[first]} of the policy is {first!r:.60}, and {len(others)} of its "
            f"tokens are others there: the {role} must read the policy's tokens"
        )


def _check_model(config: Config, role: str, family: Family | None, words: int, setting: str, place: str) -> None:
    """``words``: how many of the likeliest the role is to give. ``setting``, ``place``: one of its directories."""
    policy = config_of(config.model.path, family)
    model = read_hf_config(place, family) if place else policy
    if place:
        _check_tokens(config, policy, model, role, setting, place)
        if policy.model_type in VISION and image_processor(place) != image_processor_at(config.model.path):
            raise ConfigError(
                f"{setting} = {place!r} does not see images as the policy does (preprocessor_config.json)"
            )
    _check_words(words, policy)
    titan, on_cpu = build_titan(config), is_on_cpu(config) if config.hosts.is_on else None
    try:
        check_products(model, replace(titan, float8=replace(titan.float8, filter_fqns=[])), family, on_cpu=on_cpu)
        if getattr(config, role).placement == "with_trainer":
            check_layout(model, titan.parallelism, family)
            return
    except ConfigError as error:
        raise ConfigError(f"{setting} = {place!r}: {error}" if place else str(error)) from None
    own_layout = role_titan(config, role).parallelism
    try:
        check_layout(model, own_layout, family)
    except ConfigError as error:
        raise ConfigError(str(error).replace("parallelism.", f"{role}.parallelism.", 1)) from None
