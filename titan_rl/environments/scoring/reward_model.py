"""Reward model in a process below the verifier, loaded as ``AutoModelForSequenceClassification`` with one label.

The other end is ``python -m titan_rl.environments.scoring.reward_model``, with the protocol of scoring_process.py: a
deadline for each answer, and a failure is never a reward. It reads the rollout's own tokens, one rollout at a time in
each worker and without padding, in fp32 on one thread: so the same rollout always gets the same reward. Of those in a
group that are alike it reads one."""

import json
import math
import resource
import sys
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.scoring.scoring_process import Answer, ScoringProcess, serve
from titan_rl.mesh.resources.cores import available_cores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PART = "reward_model"
"""Name of its reward in a rollout's ``reward_parts``."""


class RewardModelScorer(ScoringProcess):
    """Process of a reward model, restarted when it dies or is late."""

    def __init__(self, path: str, timeout: float, start_seconds: float, ends: Collection[int] = ()):
        """``ends``: end tokens, cut from a rollout before it is scored."""
        command = ("-m", "titan_rl.environments.scoring.reward_model", path, str(timeout))
        super().__init__(f"the reward model {path}", command, timeout, start_seconds)
        self.ends = ends

    async def score_tokens(self, rollouts: Sequence[np.ndarray]) -> tuple[list[Score], float]:
        """Score each rollout's tokens [T]; gives the scores, and the seconds for all."""
        lines = [json.dumps({"tokens": self._read(tokens)}) for tokens in rollouts]
        distinct = list(dict.fromkeys(lines))
        scores, seconds = await self.score_lines(distinct)
        score_of = dict(zip(distinct, scores, strict=True))
        return [score_of[line] for line in lines], seconds

    def _read(self, tokens_T: np.ndarray) -> list[int]:
        """Tokens without the end token."""
        tokens = tokens_T.tolist()
        return tokens[:-1] if len(tokens) > 1 and tokens[-1] in self.ends else tokens


def load_reward_model(path: str) -> "PreTrainedModel":
    """Load a reward model in fp32.

    Errors: whatever transformers raises. No code of the directory's is run, and nothing in it unpickled.
    """
    from transformers import AutoModelForSequenceClassification

    settings = {"trust_remote_code": False, "use_safetensors": True, "dtype": "float32", "local_files_only": True}
    model = AutoModelForSequenceClassification.from_pretrained(path, **settings).eval()
    model.config.pad_token_id = None  # nothing is padded: the last token is the last, whatever it is
    return model


def reward_of(model: "PreTrainedModel", tokens: list[int]) -> float:
    """Reward of these tokens: output of the model's head at the last one."""
    import torch

    with torch.inference_mode():
        return float(model(input_ids=torch.tensor([tokens])).logits[0, 0])


def _load(path: str) -> Answer:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return partial(_result, load_reward_model(path))


def _result(model: "PreTrainedModel", request: dict[str, Any]) -> dict[str, Any]:
    try:
        reward = reward_of(model, request["tokens"])
        if not math.isfinite(reward):
            return dict(status="infra_error", parts={}, message=f"the reward model gave {reward}")
        return dict(status="ok", parts={PART: reward}, message="")
    except Exception as error:  # whatever the model trips over is reported by name, never a reward
        return dict(status="infra_error", parts={}, message=f"the reward model: {type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    serve(partial(_load, sys.argv[1]), float(sys.argv[2]), max_workers=available_cores())
