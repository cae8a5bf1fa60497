"""Rewards of answers of known quality, by the run's own environment and scorer.

    right      the task's worked example; of a function of one's own, in the form that it pays for
    form       that of another prompt: looks right, and is not
    empty ...  nothing, constants, one thing over and over, letters by chance
    guesses    the right answer among others: first, in the middle, last
    question   what was asked, its last line, its last word: pays where the prompt tells the answer

Earnings are told as shares: 0 is what the worst of these earns on average, 1 what a right answer earns.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.config.mixture import all_tasks
from titan_rl.config.sections.schema import TASKS_OF_OTHERS
from titan_rl.controller.preflight.checks import Checked
from titan_rl.data.text.messages import content_of
from titan_rl.data.types import Prompt
from titan_rl.diagnostics.doctor.check_errors import CheckFailed, CheckSkipped
from titan_rl.environments.interfaces.task import Task, parts_of, task_of
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.environments.rollout.demonstrations import worked_answers
from titan_rl.environments.scoring.scorer import Scorer
from titan_rl.environments.scoring.scripted import FORMS, ScriptedEpisodes

_PROMPTS, _MOST_TURNS = 8, 8
ECHOES = ("question", "last line", "last word")
CONSTANTS = ("0", "1", "-1", "nan", "True", "yes", "[]", "{}")


@dataclass(frozen=True)
class Earned:
    """Rewards by kind of answer at each prompt where it is not the right one by chance."""

    by_kind: dict[str, list[float]]
    shown: dict[str, str]
    """One answer of each kind."""
    seconds: float
    """That the slowest batch of right answers took to score."""

    def mean(self, kind: str) -> float:
        """Mean reward of a kind over all prompts."""
        return float(np.mean(self.by_kind[kind]))

    @property
    def others(self) -> list[float]:
        """Means of all kinds but the right one."""
        return [self.mean(kind) for kind in self.by_kind if kind != "right"]

    @property
    def has_signal(self) -> bool:
        """Whether a right answer earns more than some other."""
        return self.mean("right") > min(self.others, default=0.0)

    def share(self, kind: str) -> float:
        """Mean reward of a kind between the lowest kind (0) and right answers (1)."""
        floor = min(map(self.mean, self.by_kind))
        room = self.mean("right") - floor
        return (self.mean(kind) - floor) / room if room > 0 else 0.0


async def probe_rewards(checked: Checked) -> Earned:
    """Rewards of right and of worthless answers.

    Errors: CheckSkipped where no answer can be made up; CheckFailed if right answers cannot be scored.
    """
    config = checked.config
    _check_probed(checked)
    prompts = list(islice(PromptStream(checked.task, config.run.seed), _PROMPTS))
    try:
        right = [worked_answers(task_of(checked.task, prompt), prompt) for prompt in prompts]
    except ConfigError as error:
        raise CheckSkipped(f"the task shows no right answer: {error}") from None
    verifier = config.verifier
    scorer = Scorer(config.task, config.run.plugin_path, verifier.score_timeout, verifier.scoring_workers)
    await scorer.start()
    try:
        earned = await _earned(checked, scorer, prompts, right)
        if config.task.scores_itself or len(right[0]) > 1 or earned.has_signal:
            return earned
        return await _formed(checked, scorer, prompts, right, earned)
    finally:
        await scorer.close()


def _check_probed(checked: Checked) -> None:
    config = checked.config
    if config.data.file:
        raise CheckSkipped("a run on data.file has no reward")
    if config.reward_model.path:
        raise CheckSkipped("a reward model rewards: its answers are looked at by eval.grader and the alarms")
    if any(task.name in TASKS_OF_OTHERS for task in all_tasks(config.task).values()):
        raise CheckSkipped("the task is played in an environment of others, which rewards")
    if any(part.has_agent for part in parts_of(checked.task)):
        raise CheckSkipped("agents of the task's own drive the model")


async def _earned(checked: Checked, scorer: Scorer, prompts: list[Prompt], right: list[list[str]]) -> Earned:
    by_kind: dict[str, list[float]] = {}
    shown: dict[str, str] = {}
    play = _Play(checked, scorer)
    for number, prompt in enumerate(prompts):
        for kind, answers in _answers(checked.task, prompt, right, number):
            if kind not in ("right", *ECHOES) and answers[-1].strip() in (
                right[number][-1].strip(),
                prompt.answer.strip(),
            ):
                continue
            by_kind.setdefault(kind, []).append(await play(prompt, answers, is_right=kind == "right"))
            shown.setdefault(kind, answers[-1])
    return Earned(by_kind, shown, play.seconds)


async def _formed(
    checked: Checked, scorer: Scorer, prompts: list[Prompt], right: list[list[str]], bare: Earned
) -> Earned:
    """The same with right answers in a form that pays, where they earn nothing as they are. Errors: CheckSkipped where
    nothing that was tried earns anything."""
    play = _Play(checked, scorer)
    for form in FORMS:
        formed = [[form.format(answer) for answer in answers] for answers in right]
        paid = [await play(prompt, answers, is_right=False) for prompt, answers in zip(prompts, formed, strict=True)]
        if np.mean(paid) > max(bare.others, default=0.0):
            return await _earned(checked, scorer, prompts, formed)
    if max(bare.others) == min(bare.others) == bare.mean("right") <= 0:
        summary = f"every answer that was tried earns {bare.mean('right'):g}, the rows' own in {len(FORMS)} forms, too"
        raise CheckSkipped(f"{summary}: see by hand what the reward pays for")
    return bare


def _answers(task: Task, prompt: Prompt, right: list[list[str]], number: int) -> Iterator[tuple[str, list[str]]]:
    """Kinds and answers, one for each turn."""
    chance = random.Random(f"doctor {number}")
    own, others = right[number][-1], [answers for answers in right if answers[-1].strip() != right[number][-1].strip()]
    yield "right", right[number]
    if others:
        yield "form", others[number % len(others)]
        wrong = list(dict.fromkeys(each[-1] for each in others))
        wrong *= 2 if len(wrong) == 1 else 1
        for place in (0, 1, len(wrong)):  # who reads one of them alone pays for one in three
            yield "guesses", [", ".join([*wrong[:place], own, *wrong[place:]])]
    yield "empty", [""]
    for constant in CONSTANTS:
        yield f"constant {constant!r}", [constant]
    letters = [own[:1]] * (len(own.strip()) > 1) + [each[-1][:1] for each in others]
    yield "repeated", [" ".join([next(filter(str.strip, letters), "a")] * 40)]
    yield "random", ["".join(chance.choice("abcdefghij klmnop.,;") for _ in range(40))]
    question = task_of(task, prompt).messages(prompt)
    text = question if isinstance(question, str) else content_of(question[-1])
    for kind, echo in zip(ECHOES, (text, text.splitlines()[-1], text.split()[-1]), strict=True):
        yield kind, [echo]


class _Play:
    """Reward of scripted answers. Errors: CheckFailed for a right answer that cannot be scored."""

    def __init__(self, checked: Checked, scorer: Scorer) -> None:
        config = checked.config
        most = min(config.rollout.max_turns, _MOST_TURNS)
        self._episodes = ScriptedEpisodes(checked.task, scorer, config.verifier.step_timeout, most)
        self.seconds = 0.0

    async def __call__(self, prompt: Prompt, answers: list[str], *, is_right: bool) -> float:
        played = await self._episodes.play(prompt, answers)
        if is_right:
            if (score := played.score).status != "ok":
                raise CheckFailed("a right answer cannot be scored", f"{prompt.id}: {score.status}: {score.message}")
            self.seconds = max(self.seconds, played.seconds)
        return played.reward
