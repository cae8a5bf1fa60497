"""Evaluation on suites: n samples of each question, scored as its set is, and what is estimated of them.

A suite that could not be scored is recorded so, and takes no other suite's result and no training along.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict

from titan_rl.config.sections.schema import Config
from titan_rl.controller.loop.rollout_queue import sampled
from titan_rl.data.types import Group, Prompt, Rollout, Sampling, correct
from titan_rl.environments.rollout.decoding import suite_decoding
from titan_rl.environments.rollout.suites import Suite
from titan_rl.mesh.control.poison_prompts import ConsecutiveFailures, EveryPromptFails
from titan_rl.mesh.meshes import Meshes
from titan_rl.mesh.processes.deadlines import together
from titan_rl.records.evaluations.results import Answer, Question, SuiteResult

_ROUNDS_AHEAD = 2
"""Requests under way for each that the engines run at once: an engine never waits for a prompt, and a group's deadline
does not begin long before its answers do."""


async def evaluate_suites(
    meshes: Meshes, suites: Sequence[Suite], config: Config, record: Callable[[SuiteResult], None]
) -> None:
    """Evaluate all suites, one after the other. ``record`` takes each result as its suite ends.

    A question of which an answer could not be scored has no result; it is counted, with its reason. After three that
    failed for one reason, so are all others of its suite that have none yet.
    Errors: EveryPromptFails if prompts kill engines or verifiers.
    """
    for suite in suites:
        record(await _evaluate(meshes, suite, config))
    if suites:
        await meshes.take_statistics()  # so that the next step's speeds are its own


async def _evaluate(meshes: Meshes, suite: Suite, config: Config) -> SuiteResult:
    sampling, dispatcher = sampling_of(suite, config, meshes.max_tokens), meshes.dispatcher
    faults = ConsecutiveFailures()  # of this suite alone: what it needs may be away, and the run goes on
    engines = config.generator.replicas * config.generator.max_num_seqs
    places = asyncio.Semaphore(max(_ROUNDS_AHEAD * engines // sampling.num_samples, 1))

    async def run_group(prompt: Prompt, sampling: Sampling) -> Group:
        faults.check()
        group = await dispatcher.run_group(prompt, sampling)
        if any(rollout.status not in ("infra_error", "timeout") for rollout in group.rollouts):
            faults.record_success()
        return group

    async def ask(prompt: Prompt) -> Group:
        async with places:
            try:
                return await sampled(run_group, prompt, sampling, config.rollout.max_retries, faults)
            except EveryPromptFails as error:
                dispatcher.faults.check()
                return Group(prompt.id, [], refused=str(error))

    groups = await together(ask(prompt) for prompt in suite.prompts)
    return as_result(suite, groups, {"sampling": asdict(sampling), "generator": engine_settings(config)})


def engine_settings(config: Config) -> dict[str, object]:
    """Values of ``[generator]`` on which a model's answers depend."""
    generator = asdict(config.generator)
    return {name: generator[name] for name in ("dtype", "quantization", "tensor_parallel", "speculative")}


def sampling_of(suite: Suite, config: Config, max_tokens: int) -> Sampling:
    """How a suite's answers are sampled. ``max_tokens``: longest rollout, prompt included."""
    settings, longest = suite.config, suite.max_new_tokens(config.rollout.max_new_tokens)
    lengths = longest, settings.sampling_temperature, max_tokens, config.rollout.max_turns
    return Sampling(settings.num_samples, *lengths, suite_decoding(settings, config))


def as_result(suite: Suite, groups: Sequence[Group], settings: dict[str, object]) -> SuiteResult:
    """Result by the groups of a suite's prompts, in their order."""
    questions, unscored = [], {}
    for prompt, group in zip(suite.prompts, groups, strict=True):
        if why := _failure(group):
            unscored[prompt.id] = why
        else:
            answers = [_answer(suite, prompt, rollout) for rollout in group.rollouts]
            questions.append(Question(prompt.id, prompt.text, prompt.answer, answers))
    config = suite.config
    described = {"suite": asdict(config), "task": suite.task_config.name, **settings}
    counts = config.k, config.num_samples
    return SuiteResult(config.name, *counts, suite.has_votes, questions, unscored, described, suite.left_out)


def _failure(group: Group) -> str:
    """Why a group has no result; empty if it has. A timeout is the answer's own: it is wrong."""
    if group.refused:
        return ": ".join(filter(None, (group.refused, group.replica_failure)))
    failed = [rollout for rollout in group.rollouts if rollout.status in ("infra_error", "unasked")]
    return failed[0].failure or failed[0].status if failed else ""


def _answer(suite: Suite, prompt: Prompt, rollout: Rollout) -> Answer:
    scored = rollout.is_scored
    return Answer(
        sample=rollout.sample,
        text=rollout.text,
        final=suite.final(prompt, rollout.text),
        correct=scored and correct(rollout.true_reward),
        reward=rollout.true_reward if scored else 0.0,
        status=rollout.status,
        num_tokens=rollout.num_model_tokens,
        readings={name: scored and right for name, right in suite.readings(prompt, rollout.text).items()},
    )
