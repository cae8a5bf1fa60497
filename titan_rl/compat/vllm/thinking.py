"""vLLM's budget for thinking, in an engine that was started without one.

Model Runner V2, which vLLM has for GPUs, closes a section by what a request's tokens say. The older runner, which runs
on CPUs, keeps a state that closes some sections early (0.32: where another one came before); it is replaced by the same
rule. So which tokens were forced follows from the tokens alone (data/text/thinking.py). The GPU's kernel was run in
Triton's interpreter (tests/compat/test_vllm_gpu_thinking.py), and not on a GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config.reasoning import ReasoningConfig
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState

from titan_rl.compat.reach import VLLM, Reach

_HOLDER = "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder"
REACHES = (
    *(
        Reach(f"vllm.config.reasoning:ReasoningConfig._{name}_token_ids", "name the tags of thinking by their tokens")
        for name in ("reasoning_start", "reasoning_end", "natural_reasoning_end")
    ),
    Reach("vllm.v1.engine.llm_engine:LLMEngine.vllm_config", "let requests have a budget for thinking"),
    Reach("vllm.v1.worker.gpu.sample.sampler:Sampler.thinking_budget_state", "close thinking in a GPU's sampler"),
    Reach("vllm.v1.worker.gpu.sample.sampler:Sampler.req_states", "close thinking in a GPU's sampler"),
    Reach("vllm.v1.worker.gpu_model_runner:GPUModelRunner.input_batch", "close thinking in a CPU's sampler"),
    Reach(
        "vllm.v1.worker.gpu_input_batch:InputBatch.thinking_budget_state_holder", "close thinking in a CPU's sampler"
    ),
    Reach(f"{_HOLDER}._init_state_entry", "know where a request's thinking began"),
    Reach(f"{_HOLDER}._state", "know where a request's thinking began"),
)
VLLM.require(REACHES)
_FORCED = 1e9
"""Logit of a token that is forced, as vLLM has it."""


def limit_thinking(engine: LLMEngine, runner: Any, start: int, end: int) -> None:
    """Let requests have a budget for thinking, from now on.

    ``runner``: a worker's model runner. ``start``, ``end``: tokens of the tags. Errors: RuntimeError for the older
    model runner on a GPU, whose state is behind the tokens.
    """
    config = ReasoningConfig()
    config._reasoning_start_token_ids = [start]
    config._reasoning_end_token_ids = config._natural_reasoning_end_token_ids = [end]
    config.initialize_token_ids(engine.vllm_config.model_config)
    if isinstance(runner.sampler, SamplerV2):
        runner.sampler.thinking_budget_state = ThinkingBudgetState(runner.sampler.req_states, config)
    elif runner.device.type == "cpu":
        runner.input_batch.thinking_budget_state_holder = ClosedByTokens(config, 0, 0, runner.device, False)
    else:
        raise RuntimeError("vLLM has no thinking budget for a run with VLLM_USE_V2_MODEL_RUNNER=0 on a GPU: unset that")
    engine.vllm_config.reasoning_config = config


class ClosedByTokens(ThinkingBudgetStateHolder):
    """Budgets of a CPU's batch: a section is closed once as many tokens as its budget follow its start."""

    def _init_state_entry(self, prompt_tok_ids: list[int] | None, thinking_token_budget: int) -> dict[str, Any]:
        state = {"thinking_token_budget": thinking_token_budget, "open_at": -1, "num_read": 0, "num_output": 0}
        self._read(state, prompt_tok_ids or [])
        return state

    def _read(self, state: dict[str, Any], tokens: Sequence[int]) -> None:
        [start], [end] = self.think_start_token_ids, self.think_end_token_ids
        for place, token in enumerate(tokens, state["num_read"]):
            state["open_at"] = place if token == start else -1 if token == end else state["open_at"]
        state["num_read"] += len(tokens)

    def update_state(
        self,
        output_token_ids: list[list[int]],
        spec_token_ids: list[list[int]] | None,
        repeat_indices: torch.Tensor | None = None,
    ) -> None:
        for row, state in self._state.items():
            new = output_token_ids[row][state["num_output"] :]
            state["num_output"] += len(new)
            self._read(state, new)

    def apply_to_logits(
        self, logits: torch.Tensor, predict_bonus_token: bool, spec_token_ids: list[list[int]] | None
    ) -> torch.Tensor:
        for row, state in self._state.items():
            num_thought = state["num_read"] - state["open_at"] - 1
            if state["open_at"] >= 0 and num_thought >= state["thinking_token_budget"]:
                logits[row, self.think_end_token_ids[0]] = _FORCED
        return logits
