"""The whole algorithm on one page: prompts, samples, rewards, advantages, packed rows, loss, update, and round again.

    python examples/rl_loop.py --training.steps 30

No actors: one process samples from the very model that it trains. The model is TorchTitan's, task, advantages, packing
and loss are those of a real run; what a real run adds is vLLM, other processes, weights that travel, and records.

Dimensions: G samples of a prompt, L tokens of each, V words.
"""

import asyncio
import sys
import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from titan_rl.algorithms.batches.batching import sft_batches, step_batches
from titan_rl.config.io.overrides import parse_overrides
from titan_rl.config.load import load_config
from titan_rl.controller.preflight.checks import resolve
from titan_rl.data.types import Completion, Group, Prompt, Segment
from titan_rl.environments.conversation.episode import Episode
from titan_rl.environments.prompts.stream import PromptStream, sft_stream
from titan_rl.environments.rollout.demonstrations import demonstrate_all
from titan_rl.environments.rollout.group import encode_prompt
from titan_rl.environments.scoring.scorer import Score
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.layers.attention import plan_attention
from titan_rl.trainer.step.learner import Learner

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"


@torch.no_grad()
def next_logprobs(model, tokens_GL: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of each sample's next token, [G, V]. The samples lie in one packed row, a segment each."""
    num_samples, length = tokens_GL.shape
    plan = plan_attention(
        [Segment(i * length, length) for i in range(num_samples)], tokens_GL.numel(), torch.device("cpu")
    )
    positions = torch.arange(length).repeat(num_samples)[None]
    last_G = torch.arange(1, num_samples + 1) * length - 1
    logits_GV = model(tokens_GL.reshape(1, -1), positions=positions, attention_masks=plan, logit_index_S=last_G)
    return logits_GV.log_softmax(-1)


def sample(model, prompt_tokens: np.ndarray, config, stop: int, version: int) -> list[Completion]:
    """G answers to one prompt, a token at a time, with the log-probability of each token."""
    tokens_GL = torch.from_numpy(np.tile(prompt_tokens, (config.rollout.group_size, 1))).long()
    logprobs = []
    for _ in range(config.rollout.max_new_tokens):
        logprobs_GV = next_logprobs(model, tokens_GL)
        next_G1 = torch.multinomial(logprobs_GV.exp(), 1)
        logprobs.append(logprobs_GV.gather(1, next_G1))
        tokens_GL = torch.cat([tokens_GL, next_G1], 1)
    answers = tokens_GL[:, len(prompt_tokens) :].numpy().astype(np.int32)
    return [
        cut(answer, row, stop, version) for answer, row in zip(answers, torch.cat(logprobs, 1).numpy(), strict=True)
    ]


def cut(tokens: np.ndarray, logprobs: np.ndarray, stop: int, version: int) -> Completion:
    """An answer ends with its first end-of-sequence token, which counts as sampled."""
    ends = np.flatnonzero(tokens == stop)
    length = ends[0] + 1 if len(ends) else len(tokens)
    versions = np.full(length, version, np.int32)
    return Completion(tokens[:length], logprobs[:length], versions, "stop" if len(ends) else "length")


def roll_out(model, task, tokenizer, prompt: Prompt, config, version: int) -> Group:
    """A prompt's samples, each scored."""
    prompt_tokens, rollouts = encode_prompt(task, tokenizer, prompt), []
    for number, completion in enumerate(sample(model, prompt_tokens, config, tokenizer.eos_token_id, version)):
        episode = Episode(prompt_tokens)
        text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
        episode.add_completion(completion, text)
        rollouts.append(episode.finish(prompt, number, Score("ok", task.score(prompt, [text]))))
    return Group(prompt.id, rollouts)


def main(arguments: list[str]) -> list[float]:
    """The mean reward of each step."""
    config = load_config(CONFIG, parse_overrides(arguments))
    checked, rewards = resolve(config), []
    task, layout = checked.task, checked.titan.layout
    torch.manual_seed(config.run.seed)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(folder, seed=config.run.seed)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        learner, tokenizer = Learner(config, checked.titan, folder), AutoTokenizer.from_pretrained(folder)

        # a few supervised steps, so that there is something to reinforce
        examples = islice(sft_stream(task, config.run.seed), config.sft.steps * config.sft.examples_per_step)
        demonstrations = asyncio.run(demonstrate_all(examples, task, tokenizer, config.verifier.step_timeout))
        learner.sft([batch.rows[0] for batch in sft_batches(demonstrations, config, layout)], config.sft.lr)

        prompts = PromptStream(task, config.run.seed)
        for step in range(1, checked.titan.training.steps + 1):
            groups = [
                roll_out(learner.model_parts[0], task, tokenizer, prompt, config, step - 1)
                for prompt in islice(prompts, config.rollout.prompts_per_step)
            ]
            batches = step_batches(groups, checked.algorithm, config, layout)
            metrics = learner.train_step([b.rows[0] for b in batches], [b.has_signal for b in batches])[-1]
            rewards.append(float(np.mean([rollout.reward for group in groups for rollout in group.rollouts])))
            print(f"step {step:>4}  reward {rewards[-1]:.3f}  agreement {metrics.agreement_mean:.6f}")
        dist.destroy_process_group()
    return rewards


if __name__ == "__main__":
    main(sys.argv[1:])
