"""Streams of training prompts and of held-out prompts, which share no text.

A task says by a prompt's text alone whether it is held out, whatever seed it came from. So no prompt of any run's
training stream is ever in a held-out set, and all runs of a task are measured on the same held-out prompts.
"""

from collections.abc import Iterator

from titan_rl.config.load import ConfigError
from titan_rl.data.seeds import named_seed
from titan_rl.data.types import Group, Prompt
from titan_rl.environments.interfaces.task import Task
from titan_rl.environments.prompts.curriculum import Curriculum

_MAX_HELD_OUT_RUN = 10_000
_MAX_WITHOUT_NEW = 5_000
"""Prompts in a row without a new held-out one, after which a task is taken to have no more."""
EACH_ROW = "each_row"
"""Name of the stream that has every training row of a finite task once in ``size.train`` prompts."""
_DATASET_SEEDS = 2**30
"""reasoning-gym adds the index to the seed, so seeds stay small; each stream has its own."""


class PromptStream:
    """Endless, seeded stream of training prompts. Its state is ``position``, and the curriculum's."""

    def __init__(
        self, task: Task, seed: int, name: str = "train", position: int = 0, curriculum: Curriculum | None = None
    ):
        self.task, self.name, self.position, self.curriculum = task, name, position, curriculum
        self.dataset_seed = named_seed(seed, name) % _DATASET_SEEDS

    def __next__(self) -> Prompt:
        for _ in range(_MAX_HELD_OUT_RUN):
            prompt = self.at(self.position)
            self.position += 1
            if not self.task.is_held_out(prompt) and (self.curriculum is None or self.curriculum.accepts(prompt)):
                return prompt
        raise ConfigError(f"the task's last {_MAX_HELD_OUT_RUN} prompts were all held out: widen task.options")

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def at(self, index: int) -> Prompt:
        """Prompt number ``index``, held-out ones included."""
        return self.task.prompt(self.name, self.dataset_seed, index)

    def resume_after(self, prompt_id: str | None) -> None:
        """Continue behind an earlier prompt of this stream."""
        if prompt_id is not None:
            self.position = max(self.position, self._index(prompt_id) + 1)

    def record_step(self, step: int, groups: list[Group]) -> dict[str, float]:
        """Record a finished step's groups in the curriculum; gives ``passed_over`` for the step's metrics."""
        if self.curriculum is None:
            return {}
        passed_over = self.curriculum.num_passed_over
        self.curriculum.record(step, [(self.by_id(group.prompt_id), group) for group in groups])
        return {"passed_over": float(passed_over)}

    def close(self) -> None:
        if self.curriculum is not None:
            self.curriculum.close()

    def by_id(self, prompt_id: str) -> Prompt:
        """Prompt of this stream by its id."""
        return self.at(self._index(prompt_id))

    def _index(self, prompt_id: str) -> int:
        name, _, index = prompt_id.rpartition("/")
        assert name == self.name, f"{prompt_id} is of another stream than {self.name}"
        return int(index)


def sft_stream(task: Task, seed: int) -> PromptStream:
    """Stream of SFT prompts. No step of reinforcement learning meets them, unless the task has a finite number of rows:
    then they are the same training rows in another order. The stream keeps its first name, which seeds it."""
    return PromptStream(task, seed, "warmup")


def held_out_prompts(task: Task, count: int) -> list[Prompt]:
    """Distinct held-out prompts, ``count`` of them; of a finite task with fewer, all.

    Errors: ConfigError if an endless task has fewer, or a finite one none.
    """
    if task.size is None:
        return _search_held_out(task, count)
    if task.size.held_out < 1:
        raise ConfigError("the task has no held-out prompts: give it some")
    seed = named_seed("held out") % _DATASET_SEEDS
    return [task.prompt("held_out", seed, index) for index in range(min(count, task.size.held_out))]


def _search_held_out(task: Task, count: int) -> list[Prompt]:
    dataset_seed = named_seed("held out") % _DATASET_SEEDS
    prompts: dict[str, Prompt] = {}
    index = last_new = 0
    while len(prompts) < count and index - last_new < _MAX_WITHOUT_NEW:
        prompt = task.prompt("held_out", dataset_seed, index)
        if task.is_held_out(prompt) and prompt.question_key not in prompts:
            prompts[prompt.question_key], last_new = prompt, index
        index += 1
    if len(prompts) == count:
        return list(prompts.values())
    raise ConfigError(
        f"eval.prompts = {count}, but the task has only about {len(prompts)} different held-out prompts: "
        f"ask for fewer, or widen task.options"
    )
