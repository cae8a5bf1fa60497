"""Whether the roles beside the policy are as the algorithm needs them: checked before any process starts."""

from dataclasses import asdict

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from titan_rl.algorithms.base import Algorithm, Needs
from titan_rl.config.load import ConfigError
from titan_rl.config.schema import Config
from titan_rl.models.families import Family
from titan_rl.models.spec import read_hf_config
from titan_rl.models.tiny import tiny_config
from titan_rl.trainer.layout import check_layout
from titan_rl.trainer.lone_role import role_titan
from titan_rl.trainer.roles import FROZEN, num_words


def check_roles(config: Config, algorithm: Algorithm, family: Family | None) -> None:
    """Errors: ConfigError for a role that is described for nothing, that cannot be built or laid out, or that has
    other tokens than the policy."""
    for role in FROZEN:
        settings, said = getattr(config, role), f"algorithm.name = {config.algorithm.name!r}"
        if not getattr(algorithm.needs, role):
            if asdict(settings) != asdict(type(settings)()):
                raise ConfigError(f"[{role}] has no effect: {said}, as it is set, needs no {role}; leave it out")
            continue
        if role == "teacher" and not settings.path:
            raise ConfigError(f"{said} needs a teacher: give its Hugging Face directory as teacher.path")
        if settings.placement == "with_trainer" and settings.parallelism:
            raise ConfigError(
                f"{role}.parallelism is of processes of its own, and {role}.placement = 'with_trainer' has the "
                f"trainer's layout: set placement = 'own', or leave it out"
            )
        _check_model(config, role, family, algorithm.needs)


def check_reward_model(config: Config, algorithm: Algorithm, family: Family | None) -> None:
    """Errors: ConfigError if there is none where the algorithm needs one, or it reads other tokens."""
    path, said = config.reward_model.path, f"reward_model.path = {config.reward_model.path!r}"
    if not path:
        if algorithm.needs.reward_model:
            raise ConfigError(
                f"algorithm.name = {config.algorithm.name!r} needs a reward model: give its directory as "
                f"reward_model.path"
            )
        if config.reward_model.reads_end:
            raise ConfigError("reward_model.reads_end has no effect without reward_model.path: leave it out")
        return
    try:
        model = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
        raise ConfigError(f"{said}: {' '.join(str(error).split())}") from None
    policy = _policy_config(config, family)
    if model.get_text_config().vocab_size != policy.vocab_size:
        raise ConfigError(
            f"{said} has vocab_size = {model.get_text_config().vocab_size}, the policy {policy.vocab_size}: the reward "
            f"model must read the policy's tokens"
        )


def _policy_config(config: Config, family: Family | None) -> PreTrainedConfig:
    return tiny_config() if config.model.path == "tiny" else read_hf_config(config.model.path, family)


def _check_model(config: Config, role: str, family: Family | None, needs: Needs) -> None:
    own, policy = getattr(config, role).path, _policy_config(config, family)
    model = read_hf_config(own, family) if own else policy
    if model.vocab_size != policy.vocab_size:
        raise ConfigError(
            f"{role}.path = {own!r} has vocab_size = {model.vocab_size}, the policy {policy.vocab_size}: the {role} "
            f"must read the policy's tokens"
        )
    if num_words(role, needs) > policy.vocab_size:
        raise ConfigError(
            f"algorithm.top_k: {needs.teacher_words} words are wanted of a vocabulary of {policy.vocab_size}: "
            f"give no more than that"
        )
    try:
        check_layout(model, role_titan(config, role).parallelism)
    except ConfigError as error:
        raise ConfigError(str(error).replace("parallelism.", f"{role}.parallelism.", 1)) from None
