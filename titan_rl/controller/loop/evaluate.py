"""Held-out accuracy: greedy answers to prompts that no run trains on."""

from titan_rl.config.errors import NamedFault
from titan_rl.config.sections.schema import Config
from titan_rl.controller.loop.rollout_queue import sampled
from titan_rl.data.types import Prompt, Sampling
from titan_rl.environments.registry import correct
from titan_rl.environments.rollout.decoding import held_out_decoding
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
    if refused := [group for group in groups if group.refused]:
        why = ": ".join(filter(None, (refused[0].refused, refused[0].replica_failure)))
        raise NamedFault(f"held-out prompt {refused[0].prompt_id} could not be sampled: {why}")
    rollouts = [group.rollouts[0] for group in groups]
    if failed := [rollout for rollout in rollouts if rollout.status == "infra_error"]:
        first = failed[0]
        why = f": {first.failure}" if first.failure else ""
        raise NamedFault(f"{len(failed)} held-out answers could not be scored, first that to {first.prompt_id}{why}")
    await meshes.take_statistics()  # so that the next step's speeds are its own
    right = [correct(rollout.true_reward) for rollout in rollouts]
    by_task: dict[str, list[bool]] = {}
    for prompt, is_right in zip(prompts, right, strict=True):
        by_task.setdefault(prompt.task, []).append(is_right)
    parts = {task: Proportion(sum(each), len(each)) for task, each in sorted(by_task.items()) if task}
    return Proportion(sum(right), len(right), parts, sum(rollout.status == "timeout" for rollout in rollouts))
