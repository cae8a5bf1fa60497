"""Curriculum: prompts whose latest samples were all right or all wrong are drawn less.

A prompt of the stream is passed over by chance, and its chance of being asked is that of a group of G samples to differ
at all, by what was seen of its class: 1 - p^G - (1 - p)^G, and never less than ``curriculum.least_chance``. What was
never seen is asked. A class is

    one prompt            where there is an end to them (rows of a file): they come again in each epoch
    a difficulty          where the task says one: ``difficulty(prompt)`` of a task of your own
    a length of the text  else, in steps of a fifth or so: prompts without end do not come again

Passing over leaves ids as they are, so each stays unique, and the draw is named by the id. What was seen counts from
the next step on, and is written down before the step is settled: so a resumed run knows what the run knew at that step.
"""

import hashlib
import json
import math
from pathlib import Path

from titan_rl.config.io.bounded_files import read_lines
from titan_rl.config.sections.schema import CurriculumConfig
from titan_rl.data.seeds import named_seed
from titan_rl.data.storage.files import LineFile
from titan_rl.data.types import Group, Prompt, correct
from titan_rl.environments.interfaces.task import Task

ClassCounts = dict[str, tuple[int, int]]
"""Right samples and scored samples of each class in one step."""


def chance_of_signal(pass_rate: float, group_size: int) -> float:
    """Probability that a group is neither all right nor all wrong: 1 - p^G - (1 - p)^G."""
    return 1.0 - pass_rate**group_size - (1.0 - pass_rate) ** group_size


def class_of(task: Task, prompt: Prompt) -> str:
    """Class of prompts with a common pass rate: difficulty, row or length."""
    if (level := task.difficulty(prompt)) is not None:
        return f"difficulty {level}"
    if task.size is not None:
        return hashlib.blake2b(prompt.question_key.encode(), digest_size=8).hexdigest()
    return f"length {round(4 * math.log2(max(len(prompt.text), 1)))}"


class Curriculum:
    """Owner of a run's pass rates, in memory and in its file."""

    def __init__(self, config: CurriculumConfig, task: Task, seed: int, group_size: int, path: Path):
        self.config, self.task, self.seed, self.group_size, self.path = config, task, seed, group_size, path
        self.num_passed_over = 0
        """Prompts passed over since the last step."""
        self._rates: dict[str, float] = {}
        self._file: LineFile | None = None

    def accepts(self, prompt: Prompt) -> bool:
        """Whether to sample the prompt now. A function of the prompt's id and of the steps that are done."""
        rate = self._rates.get(class_of(self.task, prompt))
        if rate is None:
            return True
        chance = max(self.config.least_chance, chance_of_signal(rate, self.group_size))
        is_accepted = named_seed(self.seed, "curriculum", prompt.id) < chance * 2**63
        self.num_passed_over += not is_accepted
        return is_accepted

    def record(self, step: int, groups: list[tuple[Prompt, Group]]) -> None:
        """Record right and scored samples of a step's groups. Errors: DiskFull."""
        counts: ClassCounts = {}
        for prompt, group in groups:
            rewards = [r.true_reward for r in group.rollouts if r.is_scored]
            right, count = counts.get(name := class_of(self.task, prompt), (0, 0))
            counts[name] = (right + sum(map(correct, rewards)), count + len(rewards))
        if self._file is None:
            self._file = LineFile(self.path)
        self._file.write(json.dumps({"step": step, "seen": counts}))
        self._update_rates(counts)
        self.num_passed_over = 0

    def restore(self, step: int) -> None:
        """Restore the state after a step from the file."""
        self._rates, self.num_passed_over = {}, 0
        steps = read_class_counts(self.path)
        for number in sorted(number for number in steps if number <= step):
            self._update_rates(steps[number])

    def _update_rates(self, counts: ClassCounts) -> None:
        for name, (right, count) in counts.items():
            if count:
                before, memory = self._rates.get(name, right / count), self.config.memory
                self._rates[name] = memory * before + (1 - memory) * right / count

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_class_counts(path: Path) -> dict[int, ClassCounts]:
    """Class counts by step; the last line of a step counts, and unreadable lines are skipped."""
    steps: dict[int, ClassCounts] = {}
    for line in read_lines(path) if path.exists() else ():
        try:
            record = json.loads(line)
            steps[_whole(record["step"])] = {str(name): _checked(*counts) for name, counts in record["seen"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return steps


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise ValueError(value)
    return value


def _checked(right: object, count: object) -> tuple[int, int]:
    checked = _whole(right), _whole(count)
    if checked[0] > checked[1]:
        raise ValueError(right, count)
    return checked
