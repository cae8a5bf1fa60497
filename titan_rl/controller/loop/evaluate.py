"""Held-out accuracy: greedy answers to prompts that no run trains on."""

from titan_rl.config.errors import NamedFault
from titan_rl.config.sections.schema import Config
from titan_rl.controller.loop.rollout_queue import sampled
from titan_rl.data.types import Prompt, Sampling
from titan_rl.environments.registry import correct
from titan_rl.environments.rollout.decoding import held_out_decoding
from titan_rl.environments.rollout.prompt_checks import place
from titan_rl.mesh.meshes import Meshes
from titan_rl.mesh.processes.deadlines import together
from titan_rl.records.statistics import Proportion


async def evaluate(meshes: Meshes, prompts: list[Prompt], config: Config) -> Proportion:
    """Share of right answers, as the task scores them, whatever else rewards them in training.

    An answer that the machinery failed to score is an error, not a wrong answer. A timeout may be the answer's own: it
    is wrong, and counted beside.

    Errors: NamedFault if a prompt leaves no room for an answer, or an answer could not be scored; EveryPromptFails.
    """
    rollout = config.rollout
    lengths = meshes.max_tokens, rollout.max_turns
    sampling = Sampling(1, rollout.max_new_tokens, 0.0, *lengths, held_out_decoding(config))
    dispatcher, retries = meshes.dispatcher, rollout.max_retries
    samples = (sampled(dispatcher.run_group, prompt, sampling, retries, dispatcher.faults) for prompt in prompts)
    groups = await together(samples)
    for prompt, group in zip(prompts, groups, strict=True):
        if group.refused:
            why = ": ".join(filter(None, (group.refused, group.replica_failure)))
            raise NamedFault(f"the held-out {place(prompt)} could not be sampled: {why}")
    rollouts = [group.rollouts[0] for group in groups]
    if failed := [number for number, each in enumerate(rollouts) if each.status == "infra_error"]:
        failure = rollouts[failed[0]].failure
        count = f"{len(failed)} held-out answers" if len(failed) > 1 else "1 held-out answer"
        first = f"the first is that to {place(prompts[failed[0]])}{failure and f': {failure}'}"
        raise NamedFault(f"{count} could not be scored, {first}")
    await meshes.take_statistics()  # so that the next step's speeds are its own
    right = [correct(rollout.true_reward) for rollout in rollouts]
    by_task: dict[str, list[bool]] = {}
    for prompt, is_right in zip(prompts, right, strict=True):
        by_task.setdefault(prompt.task, []).append(is_right)
    parts = {task: Proportion(sum(each), len(each)) for task, each in sorted(by_task.items()) if task}
    return Proportion(sum(right), len(right), parts, sum(rollout.status == "timeout" for rollout in rollouts))
