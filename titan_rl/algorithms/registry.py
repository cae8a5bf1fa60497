"""Algorithms by name: ours, and a user's own by ``pkg.module:name``. All mistakes in one are ConfigErrors of one line.

``make_algorithm`` is called in every process that needs the algorithm, ``check_algorithm`` once, before any starts.
"""

import inspect
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from titan_rl.algorithms import dry_run as probe
from titan_rl.algorithms.base import Algorithm, Needs
from titan_rl.algorithms.offline.base import OfflineAlgorithm
from titan_rl.algorithms.offline.dpo import DPO
from titan_rl.algorithms.offline.kto import KTO
from titan_rl.algorithms.offline.reference_free import ORPO, SimPO
from titan_rl.algorithms.offline.reward_model import RewardModel
from titan_rl.algorithms.offline.sft import SFT
from titan_rl.algorithms.policy_gradient.base import PolicyGradientSettings
from titan_rl.algorithms.policy_gradient.gdpo import GDPO
from titan_rl.algorithms.policy_gradient.gigpo import GiGPO
from titan_rl.algorithms.policy_gradient.grpo import GRPO, DrGRPO
from titan_rl.algorithms.policy_gradient.maxrl import MaxRL
from titan_rl.algorithms.policy_gradient.ppo import PPO
from titan_rl.algorithms.policy_gradient.prime import PRIME
from titan_rl.algorithms.policy_gradient.ratios.cispo import CISPO
from titan_rl.algorithms.policy_gradient.ratios.dapo import DAPO
from titan_rl.algorithms.policy_gradient.ratios.dppo import DPPO
from titan_rl.algorithms.policy_gradient.ratios.gspo import GSPO
from titan_rl.algorithms.policy_gradient.ratios.sapo import SAPO
from titan_rl.algorithms.policy_gradient.reinforce_pp import ReinforcePP
from titan_rl.algorithms.policy_gradient.rloo import RLOO
from titan_rl.algorithms.policy_gradient.teachers.distillation import Distillation, DistillationSettings
from titan_rl.algorithms.policy_gradient.teachers.sdpo import SDPO
from titan_rl.algorithms.policy_gradient.turn_grpo import TurnGRPO
from titan_rl.config.load import ConfigError, build_section, nearest
from titan_rl.config.plugins import check_signature, is_reference, meant_reference, resolve, what_happened
from titan_rl.config.sections.schema import AlgorithmConfig, Config

ALGORITHMS: dict[str, type[Algorithm]] = {
    "cispo": CISPO,
    "dapo": DAPO,
    "distillation": Distillation,
    "dpo": DPO,
    "dppo": DPPO,
    "dr_grpo": DrGRPO,
    "gdpo": GDPO,
    "gigpo": GiGPO,
    "grpo": GRPO,
    "gspo": GSPO,
    "kto": KTO,
    "maxrl": MaxRL,
    "orpo": ORPO,
    "ppo": PPO,
    "prime": PRIME,
    "reinforce_pp": ReinforcePP,
    "reward_model": RewardModel,
    "rloo": RLOO,
    "sapo": SAPO,
    "sdpo": SDPO,
    "sft": SFT,
    "simpo": SimPO,
    "turn_grpo": TurnGRPO,
}

_CORRECTION = {"decoupled": True, "importance": "token"}
"""Truncated importance sampling (Yao et al., On the Rollout-Training Mismatch in Modern RL Systems, 2025)."""
_COMMON_KEYS = {f.name for f in fields(AlgorithmConfig)} - {"options"}


def make_algorithm(config: AlgorithmConfig, folders: Sequence[str], *, on_data: bool = False) -> Algorithm:
    """Build the algorithm of a config, with all checks but the dry run.

    ``folders``: ``run.plugin_path``; ``on_data``: whether it trains on ``[data]`` instead of rollouts.
    Errors: ConfigError for a wrong name, class, key or need."""
    prefix = f"algorithm.name = {config.name!r}"
    cls = _find(prefix, config.name, folders)
    _check_class(prefix, cls)
    _check_source(prefix, cls, on_data)
    settings = _build_settings(prefix, cls, config.options)
    _check_updates(settings, config.updates_per_batch)
    try:
        algorithm = cls(settings)
    except Exception as error:  # a user's algorithm may raise anything
        raise ConfigError(f"{prefix}: making it failed: {what_happened(error)}") from None
    check_signature(f"{prefix}: advantages", algorithm.advantages, ("rollouts",))
    check_signature(f"{prefix}: group_terms", algorithm.group_terms, ("inputs",))
    check_signature(f"{prefix}: refine", algorithm.refine, ("inputs",))
    check_signature(f"{prefix}: loss", algorithm.loss, ("inputs",))
    _check_needs(prefix, algorithm)
    _check_shaping(prefix, algorithm, config)
    return algorithm


def with_correction(config: Config) -> Config:
    """Configuration in which rollouts are weighed by truncated importance sampling by default.

    So it is with FP8: the policy that samples is not quite the trainer's. An algorithm of somebody's own that has no
    such keys stays as it is, and so does the exact form of one that learns a teacher's ``top_k`` words. Errors:
    ConfigError."""
    algorithm, options = config.algorithm, config.algorithm.options
    is_off = options.get("decoupled") is False or options.get("importance") == "none"
    if not config.uses_fp8 or config.data.file or is_off:
        return config
    cls = _find(f"algorithm.name = {algorithm.name!r}", algorithm.name, config.run.plugin_path)
    settings = getattr(cls, "Settings", None)
    if not isinstance(settings, type) or not issubclass(settings, PolicyGradientSettings):
        return config
    if issubclass(settings, DistillationSettings) and options.get("top_k", settings.top_k):
        return config
    return replace(config, algorithm=replace(algorithm, options=_CORRECTION | options))


def check_algorithm(algorithm: Algorithm, prefix: str) -> None:
    """Dry run of advantages, refine and loss on synthetic data. ``prefix``: of messages. Errors: ConfigError."""
    probe.check_advantages(algorithm, prefix)
    probe.check_refine(algorithm, prefix)
    probe.check_loss(algorithm, prefix)
    if algorithm.is_token_sum:
        probe.check_token_sum(algorithm, prefix)


def _find(prefix: str, name: str, folders: Sequence[str]) -> Any:
    if is_reference(name):
        return resolve("algorithm.name", name, folders)
    if name == "supervised":
        raise _supervised(prefix)
    if name not in ALGORITHMS:
        hint = meant_reference(name) or nearest(name, ALGORITHMS, "pkg.module:name of your own")
        raise ConfigError(f"{prefix} is unknown: {hint}")
    return ALGORITHMS[name]


def _supervised(prefix: str) -> ConfigError:
    """On sampled answers it would make every one more likely, whatever it earned: 26.6 % of right ones became 0."""
    return ConfigError(
        f"{prefix} is no reinforcement-learning algorithm: take grpo, and set [sft] steps for supervised steps "
        f"before it, or set data.file to train 'sft' on demonstrations alone"
    )


def _check_class(prefix: str, cls: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, Algorithm):
        raise ConfigError(f"{prefix} must name a subclass of titan_rl.algorithms.base.Algorithm, not {cls!r:.80}")
    if inspect.isabstract(cls):
        raise ConfigError(f"{prefix} has no {' and no '.join(sorted(cls.__abstractmethods__))}: write the method")
    check_signature(prefix, cls, ("settings",))
    if not isinstance(cls.Settings, type) or not is_dataclass(cls.Settings):
        raise ConfigError(f"{prefix}: its Settings must be a dataclass: write @dataclass(kw_only=True) above it")
    if cls.group_terms is not Algorithm.group_terms and cls.refine is Algorithm.refine:
        raise ConfigError(f"{prefix} has group_terms, which nobody asks for without refine: write that, too")
    if reserved := _COMMON_KEYS & {f.name for f in fields(cls.Settings)}:
        raise ConfigError(f"{prefix}: Settings.{min(reserved)} is a key that every algorithm has: rename yours")


def _check_source(prefix: str, cls: type[Algorithm], on_data: bool) -> None:
    """Errors: ConfigError for an algorithm that cannot learn from what the run has. A subclass of a supervised one
    that has advantages of its own may learn from rollouts."""
    if on_data and cls.trains_on == "rollouts":
        names = ", ".join(name for name, each in ALGORITHMS.items() if each.trains_on != "rollouts")
        raise ConfigError(f"{prefix} learns from rollouts: leave out data.file, or take one of {names}")
    if on_data:
        return
    if cls.advantages is SFT.advantages:
        raise _supervised(prefix)
    if cls.advantages is OfflineAlgorithm.advantages:
        raise ConfigError(f"{prefix} learns from {cls.trains_on} that others wrote: set data.file")


def _check_shaping(prefix: str, algorithm: Algorithm, config: AlgorithmConfig) -> None:
    """Errors: ConfigError for punishments that the algorithm cannot learn from."""
    if config.overlong_penalty != AlgorithmConfig.overlong_penalty and not config.overlong_buffer:
        raise ConfigError("algorithm.overlong_penalty has no effect without algorithm.overlong_buffer: set that, too")
    if not config.overlong_buffer or algorithm.rewards == "any":
        return
    is_unused = algorithm.rewards == "unused"
    why = "which learns nothing from rewards" if is_unused else "whose rewards must not be negative"
    raise ConfigError(f"algorithm.overlong_buffer takes from rewards, and {prefix}, {why}: leave it out, or take dapo")


def _build_settings(prefix: str, cls: type[Algorithm], options: dict[str, Any]) -> Any:
    try:
        return build_section(cls.Settings, options, "algorithm", also_known=_COMMON_KEYS)
    except ConfigError:
        raise
    except Exception as error:  # a type that cannot be checked, or what a user's __post_init__ raises
        raise ConfigError(f"{prefix}: its Settings cannot be made: {what_happened(error)}") from None


def _check_updates(settings: Any, updates_per_batch: int) -> None:
    """Errors: ConfigError for settings that have no effect with so many updates."""
    if isinstance(settings, PolicyGradientSettings):
        try:
            settings.check_updates(updates_per_batch)
        except ValueError as error:
            raise ConfigError(f"algorithm.{error}") from None


def _check_needs(prefix: str, algorithm: Algorithm) -> None:
    """Errors: ConfigError for what this release does not serve."""
    needs: Any = algorithm.needs
    if not isinstance(needs, Needs):
        raise ConfigError(f"{prefix}: its needs must be a titan_rl.algorithms.base.Needs, not {needs!r:.80}")
    if needs.teacher_words and not (needs.teacher or needs.self_teacher):
        raise ConfigError(f"{prefix}: its needs name teacher_words and no teacher: set teacher = True, too")
    if needs.teacher and needs.self_teacher:
        raise ConfigError(f"{prefix}: its needs name a teacher and a self_teacher: leave one out")
    if needs.self_teacher == "initial" and not needs.reference:
        raise ConfigError(f"{prefix}: its needs name the initial policy as self_teacher: set reference = True, too")
    if needs.self_teacher and not algorithm.reprompt_template:
        raise ConfigError(f"{prefix}: its needs name a self_teacher: set reprompt_template, too")
    if needs.implicit_reward and not needs.reference:
        raise ConfigError(f"{prefix}: its needs name implicit_reward and no reference: set reference = True, too")
    if needs.implicit_reward and needs.critic:
        raise ConfigError(
            f"{prefix} needs a critic and an implicit reward model: this release trains one model beside the policy"
        )
    if needs.rewards not in ("sample", "turn"):
        raise ConfigError(f"{prefix} needs a reward for each {needs.rewards}, which this release cannot serve yet")
