"""Episodes with scripted answers, in a run's own environment and by its own scorer."""

from contextlib import nullcontext
from dataclasses import dataclass

from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.interfaces.task import Task, task_of
from titan_rl.environments.scoring.scorer import Scorer
from titan_rl.mesh.processes.deadlines import within

FORMS = (
    "\\boxed{{{}}}",
    "#### {}",
    "<answer>{}</answer>",
    "<think>\nLet me see.\n</think>\n<answer>{}</answer>",
    "<think>\nLet me see.\n</think>\n\\boxed{{{}}}",
    "<think>\nLet me see.\n</think>\n{}",
    "The answer is {}",
    "Answer: {}",
)
"""In which rewards of people's own want an answer, where the rows have it bare."""


@dataclass(frozen=True)
class Played:
    """Outcome of a scripted episode."""

    score: Score
    paid: float
    """By the environment."""
    seconds: float
    """For the score."""

    @property
    def reward(self) -> float:
        """Reward of the answers; 0 without a score."""
        return self.score.reward + self.paid if self.score.status == "ok" else 0.0


@dataclass(frozen=True)
class ScriptedEpisodes:
    """Player of scripted episodes."""

    task: Task
    scorer: Scorer
    step_timeout: float
    max_turns: int
    """After which an environment that would go on is closed."""

    async def play(self, prompt: Prompt, answers: list[str]) -> Played:
        """Play an episode until its environment ends it, the last answer again and again.

        Errors: the environment's; DeadlineError."""
        said, paid = await self._turns(prompt, answers)
        [score], seconds = await self.scorer.score(prompt, [said])
        return Played(score, paid, seconds)

    async def _turns(self, prompt: Prompt, answers: list[str]) -> tuple[list[str], float]:
        task = task_of(self.task, prompt)
        said: list[str] = []
        paid = 0.0
        async with task.sessions or nullcontext():
            environment = task.environment(prompt)
            try:
                await within(self.step_timeout, f"a reset for {prompt.id}", environment.reset())
                while len(said) < max(self.max_turns, len(answers)):
                    said.append(answers[min(len(said), len(answers) - 1)])
                    reply = await within(self.step_timeout, f"a reply to {prompt.id}", environment.step(said[-1]))
                    paid += reply.reward or 0.0
                    if not reply.messages:
                        break
            finally:
                await environment.close()
        return said, paid
