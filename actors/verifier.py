"""The verifier actor: it drives episodes and has them scored, so a slow tool or scorer never stalls the controller."""

import asyncio

from monarch.actor import Actor

from titan_rl.config.model_directory.directory import stop_token_ids
from titan_rl.config.sections.schema import Config
from titan_rl.data.text.tokenizer import load_tokenizer
from titan_rl.data.types import Group, Prompt, Rollout, Sampling
from titan_rl.environments.agents.endpoint import Endpoint
from titan_rl.environments.interfaces.task import Task, parts_of
from titan_rl.environments.rollout.demonstrations import demonstrate_all
from titan_rl.environments.rollout.group import Judge, run_group
from titan_rl.environments.rollout.suites import is_of_suite, make_all
from titan_rl.environments.scoring.reward_model import RewardModelScorer
from titan_rl.environments.scoring.scorer import GradedScorer
from titan_rl.mesh.members.asked_generator import AskedGenerator, ReplicaFailed
from titan_rl.mesh.processes.concurrent import concurrent_endpoint
from titan_rl.mesh.processes.fault_injection import inject_fault
from titan_rl.mesh.processes.remote_eval import run_examination
from titan_rl.mesh.resources.imports import import_all


class Verifier(Actor):
    """Drives many episodes at once; answers are scored in processes of their own."""

    IMPORTS = "verifier"

    def __init__(self, model_path: str):
        self.model_path = model_path
        self.scorer: GradedScorer | None = None
        self.judge: Judge | None = None
        self.task: Task | None = None
        self.endpoint: Endpoint | None = None
        self.asked: dict[str, AskedGenerator] = {}
        """Generator of each group under way, by prompts."""

    @concurrent_endpoint
    async def prepare(self) -> None:
        """Import everything in advance, in a standby."""
        await asyncio.to_thread(import_all, self.IMPORTS)

    @concurrent_endpoint
    async def start(self, config: Config) -> int:
        """Load the tokenizer and start the scorer; the scorer's process id. Again when a setting has changed, while
        nobody waits for a group."""
        self.config, task, folders = config, config.task, config.run.plugin_path
        await self._close_task()
        self.task = make_all(task, config.eval.suites, folders)
        if self.endpoint is None and any(part.has_agent for part in parts_of(self.task)):
            self.endpoint = Endpoint()
            await self.endpoint.start()
        self.tokenizer = await asyncio.to_thread(load_tokenizer, self.model_path, config)
        await asyncio.to_thread(self._prepare_episodes)
        if self.scorer is not None:
            await self.scorer.close()  # a group that nobody waits for any more may still be about to use it
        timeout, at_once = config.verifier.score_timeout, config.verifier.scoring_workers
        self.scorer = GradedScorer(task, config.eval.grader, folders, timeout, at_once, config.eval.suites)
        _, pid = await asyncio.gather(self._start_judge(), self.scorer.start())
        return pid

    async def _close_task(self) -> None:
        for part in parts_of(self.task) if self.task is not None else ():
            await part.close()

    def _prepare_episodes(self) -> None:
        for part in parts_of(self.task) if self.task is not None else ():
            part.prepare_episodes()

    async def _start_judge(self) -> None:
        """The reward model, if there is to be one and there is none, in a process of its own."""
        settings, verifier = self.config.reward_model, self.config.verifier
        if not settings.path or self.judge is not None:
            return
        ends = [] if settings.reads_end else stop_token_ids(self.model_path)
        scorer = RewardModelScorer(settings.path, verifier.score_timeout, self.config.mesh.start_timeout, ends)
        await scorer.start()
        self.judge = scorer.score_tokens

    @concurrent_endpoint
    async def run_group(self, prompt: Prompt, sampling: Sampling, reference: bytes) -> Group:
        """All samples of a prompt, scored, from one replica at a time (they share its prefix cache)."""
        inject_fault()
        task, scorer = self._started()
        patience = 0.8 * self.config.verifier.episode_timeout  # the dispatcher's own deadline must come later
        self.asked[prompt.id] = asked = AskedGenerator(reference, patience)
        try:
            return await run_group(
                prompt,
                task=task,
                tokenizer=self.tokenizer,
                ask=asked.ask,
                score=scorer.score,
                sampling=sampling,
                seed=self.config.run.seed,
                step_timeout=self.config.verifier.step_timeout,
                judge=None if is_of_suite(prompt) else self.judge,
                endpoint=self.endpoint,
            )
        except ReplicaFailed as failure:
            return Group(
                prompt_id=prompt.id,
                rollouts=[],
                refused="infra_error",
                replica_failure=str(failure.__cause__),
                is_request_refused=failure.is_request_refused,
            )
        finally:
            if self.asked[prompt.id] is asked:
                del self.asked[prompt.id]

    @concurrent_endpoint
    async def move_group(self, prompt_id: str, reference: bytes | None) -> None:
        """Send a group's requests to another generator, since its own has died or sleeps; None: another is to come."""
        if (asked := self.asked.get(prompt_id)) is not None:
            asked.move(reference)

    @concurrent_endpoint
    async def end_group(self, prompt_id: str) -> None:
        """End a group that nobody waits for any more."""
        if (asked := self.asked.get(prompt_id)) is not None:
            asked.end()

    def _started(self) -> tuple[Task, GradedScorer]:
        """What ``start`` has made."""
        assert self.task is not None and self.scorer is not None
        return self.task, self.scorer

    @concurrent_endpoint
    async def demonstrate(self, prompts: list[Prompt]) -> list[Rollout]:
        """Demonstrations of these prompts, as rollouts."""
        task, _ = self._started()
        return await demonstrate_all(prompts, task, self.tokenizer, self.config.verifier.step_timeout)

    @concurrent_endpoint
    async def examine(self, code: bytes) -> tuple[bytes, str]:
        """Result of a pickled function of this verifier; as ``Trainer.examine``."""
        return await asyncio.to_thread(run_examination, code, self)
