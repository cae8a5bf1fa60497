"""Sections of a TOML about models: what the policy reads, what of it is trained, and other models."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from titan_rl.config.sections.kinds import Count, Whole

Placement = Literal["with_trainer", "own"]


@dataclass(kw_only=True)
class ChatTemplateConfig:
    """``[model.chat_template]``: for prompts, worked examples, rows of data, evaluation and agents alike."""

    file: str = ""
    """A Jinja file in the place of the model's own template; a relative path is looked for in the folders of
    run.plugin_path."""
    text: str = ""
    """The template itself: what ``file`` held, in a run's record."""
    options: dict[str, Any] = field(default_factory=dict)
    """The template's own options: ``{ enable_thinking = false }``; a row's ``chat_template_kwargs`` count before
    them."""
    date: str = "2026-01-01"
    """What a template that writes the date is told, so that a run's prompts do not follow the clock."""


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """``[model.images]``: limits between which images are resized, in training, evaluation and engines alike."""

    min_pixels: Whole = 0
    """Pixels of an image at least: a smaller one is enlarged; 0: as the model's preprocessor_config.json has it."""
    max_pixels: Whole = 0
    """Pixels of an image at most: a larger one is made smaller; 0: as there."""


@dataclass(kw_only=True)
class LoraConfig:
    rank: Whole = 0
    """Of the adapters that are trained in place of the weights; 0: none, the whole model is trained."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """An adapter's product counts alpha / rank times."""
    targets: list[str] = field(default_factory=list)
    """Projections by Hugging Face's names, such as ``q_proj``; empty: all but experts."""
    adapter: str = ""
    """A directory of PEFT's with the adapter to begin with; empty: a new one, which changes nothing at first."""
    sync: Literal["auto", "adapter", "merged"] = "auto"
    """What generators are sent: the adapter alone, which they merge into the base weights of the model's directory, or
    merged weights; auto: the adapter where there are ``[hosts]``."""


@dataclass(kw_only=True)
class ReferenceConfig:
    """The model that the policy is kept near to, where the algorithm needs one. It never learns."""

    path: str = ""
    """A Hugging Face directory; empty: the policy as it is when reinforcement learning begins."""
    placement: Placement = "with_trainer"
    """In the trainer's processes and in its layout, or in processes of its own."""
    parallelism: dict[str, Any] = field(default_factory=dict)
    """Of processes of its own, as ``[parallelism]`` is the trainer's; empty: one process."""


@dataclass(kw_only=True)
class TeacherConfig:
    """Model, or one for each task of a mixture, that a student learns from, where the algorithm needs one. Teachers
    never learn."""

    path: str = ""
    """A Hugging Face directory with the policy's tokens."""
    by_task: dict[str, str] = field(default_factory=dict)
    """Of tasks of a mixture, by their names, the directory of each one's own teacher; ``path`` teaches the others."""
    placement: Placement = "with_trainer"
    """As the reference's."""
    parallelism: dict[str, Any] = field(default_factory=dict)
    """As the reference's."""


@dataclass(kw_only=True)
class RewardModelConfig:
    """A model whose score of a rollout is its reward, in place of the task's own. The task's is what held-out accuracy
    is told by, and is recorded beside it."""

    path: str = ""
    """A Hugging Face directory of a model for sequence classification with one label, and with the policy's tokens;
    empty: there is none."""
    reads_end: bool = False
    """Whether it reads the token that ends an answer; those that are trained here (``reward_model``) do not."""


@dataclass(kw_only=True)
class LearnedRoleConfig:
    """A model that learns beside the policy."""

    path: str = ""
    """A Hugging Face directory; empty: the policy as it is when reinforcement learning begins."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Its own, such as ``[critic.optimizer]``, with the keys of ``[optimizer]``."""
    lr_scheduler: dict[str, Any] = field(default_factory=dict)
    """Its own, such as ``[critic.lr_scheduler]``, with the keys of ``[lr_scheduler]``; it counts as the policy's."""
    updates: Count = 1
    """Its optimizer steps for each of the policy's, all on the same rows."""


@dataclass(kw_only=True)
class ScoringRoleConfig(LearnedRoleConfig):
    """A learned model whose outputs are part of the policy's advantages."""

    placement: Placement = "with_trainer"
    """As the reference's."""
    parallelism: dict[str, Any] = field(default_factory=dict)
    """As the reference's."""
    warmup_steps: Whole = 0
    """Steps at the beginning in which it learns alone, and the policy stays as it is."""


@dataclass(kw_only=True)
class ImplicitRewardConfig(ScoringRoleConfig):
    """The language model that learns the outcomes of answers and by that rewards their tokens, where the algorithm
    needs one."""

    beta: Annotated[float, Field(gt=0, le=1e6)] = 0.05
    """A token's reward is this times the log of how much likelier it is under the model than under the reference."""
    update: Literal["before", "after"] = "before"
    """Whether the model learns a step's outcomes before it rewards that step's tokens, or after."""


@dataclass(kw_only=True)
class DrafterConfig(LearnedRoleConfig):
    """What engines draft by, where it learns beside the policy, in the trainer's processes: the model of ``path``, or
    the policy's own layer; nothing without either."""

    train_mtp: bool = False
    """Whether the policy's own layer for multi-token prediction learns (``generator.speculative.method = "mtp"``)."""

    placement: ClassVar[Placement] = "with_trainer"
    parallelism: ClassVar[dict[str, Any]] = {}
    warmup_steps: ClassVar[int] = 0

    @property
    def learns(self) -> bool:
        return bool(self.path) or self.train_mtp


@dataclass(kw_only=True)
class CriticConfig(ScoringRoleConfig):
    """Value model, where the algorithm needs one. Its ``path`` may have a value head (``score.weight``) or none; a
    missing head predicts 0 at first."""

    value_clip: Annotated[float, Field(ge=0, le=1e6)] = 0.2
    """How far values may move from those before the step, for the loss to reward it; 0: as far as they like."""
