"""``[[eval.suites]]``: what an evaluation asks, how often, and how answers are sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from titan_rl.config.sections.kinds import MOST_TEMPERATURE, Count, Files, Penalty, Repetition, Share, Style, Whole


@dataclass(kw_only=True)
class SuiteConfig:
    """One suite. Left out, a key is as the set's preset has it."""

    name: str
    """A set's name, or any other with ``suite`` or ``task``: metrics and files are named by it."""
    suite: str = ""
    """The set, where ``name`` is another: two settings of one set are two suites."""
    file: Files = ""
    """Rows in the set's own schema, as ``task.options.file`` has them; empty: the set's data set of the Hub. All are
    asked."""
    task: dict[str, Any] = field(default_factory=dict)
    """Any task instead of a set, as ``[task]`` has it."""
    prompts: Whole = 0
    """Questions, from the first on; 0: all of a file, ``eval.prompts`` held-out ones of a task without one."""
    k: Count = 1
    """Of pass@k."""
    samples: Whole = 0
    """Answers to each question; 0: as many as ``k``."""
    temperature: Annotated[float, Field(ge=0, le=MOST_TEMPERATURE)] | None = None
    """0 is greedy; left out: 0 with one sample, else 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """As in ``[rollout]``, and so the next two; nothing is cut away by default."""
    top_k: Whole = 0
    min_p: Share = 0.0
    repetition_penalty: Repetition = 1.0
    """As in ``[rollout]``, and so the next two, of greedy answers, too; none by default."""
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    thinking_budget: Whole | None = None
    """Most tokens of a section of thinking; left out: ``eval.thinking_budget``, or the run's; 0: no limit."""
    stop: list[Annotated[str, Field(min_length=1)]] | None = None
    """Texts after which an answer ends; left out: as ``[rollout]`` has them."""
    max_new_tokens: Whole = 0
    """Longest answer; 0: as the preset has it, or ``rollout.max_new_tokens``."""
    style: Style | None = None
    """``chat`` or ``compact``; left out: as ``[task]`` has it."""
    system_prompt: str = ""
    """What a chat begins with."""
    options: dict[str, Any] = field(default_factory=dict)
    """The set's own settings, such as ``instruction``."""

    @property
    def num_samples(self) -> int:
        return self.samples or self.k

    @property
    def sampling_temperature(self) -> float:
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.num_samples == 1 else 1.0


class Preset(NamedTuple):
    """Public set: where its rows are, and how long answers are."""

    hub: str
    """Data set, configuration and split of the Hugging Face Hub."""
    max_new_tokens: int

    @property
    def data_set(self) -> str:
        return self.hub.partition(":")[0]


PRESETS = {
    "gsm8k": Preset("openai/gsm8k:main:test", 512),
    "math500": Preset("HuggingFaceH4/MATH-500::test", 2048),
    "aime": Preset("HuggingFaceH4/aime_2024::train", 8192),
    "mmlu_pro": Preset("TIGER-Lab/MMLU-Pro::test", 1024),
    "ifeval": Preset("google/IFEval::train", 1280),
    "humaneval": Preset("openai/openai_humaneval::test", 1024),
    "mbpp": Preset("google-research-datasets/mbpp:full:test", 1024),
}
"""Sets by name; each is a task of that name, too."""


def have_chats(suites: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a suite of ``eval.suites``, or its task, says that it is written as a chat."""
    tables = [table for suite in suites for table in (suite, suite.get("task"))]
    return any(isinstance(table, Mapping) and table.get("style") == "chat" for table in tables)
