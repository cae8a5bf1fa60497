"""Engine and templates of random episodes."""

import random

import numpy as np
from chat_templates import (
    CHATML,
    LLAMA,
    LLAMA_3,
    NO_TOOLS,
    QWEN,
    SPECIAL,
)

from titan_rl.data.types import Completion

THINKING = (  # of earlier answers it shows what comes after the thoughts alone; without thoughts it begins with none
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% elif m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


NOT_THINKING = THINKING.replace("enable_thinking is defined and not enable_thinking", "true")


TEMPLATES = dict(
    chatml=CHATML, llama_2=LLAMA, llama_3=LLAMA_3, qwen=QWEN, no_tools=NO_TOOLS, thinking=THINKING, silent=NOT_THINKING
)


TEXTS = ["", "4", " again: 4\n\n", 'say "no"\\\n', "<think>", "</think>", "\n\n", "<tool_response>", *SPECIAL]


class Engine:
    """Samples any token at all, the template's own included, and remembers what it gave."""

    def __init__(self, draw: random.Random, tokenizer, end: int):
        self.draw, self.size, self.end = draw, len(tokenizer), end
        self.asked, self.gave = [], []

    async def ask(self, request):
        completions = [self._completion() for _ in request.seeds]
        self.asked += [request.tokens] * len(completions)
        self.gave += completions
        return completions

    def draw_tokens(self) -> list[int]:
        return [self.draw.randrange(self.size) for _ in range(self.draw.randint(0, 8))]

    def _completion(self) -> Completion:
        tokens = self.draw_tokens()
        reason = "length" if tokens and self.draw.random() < 0.1 else "stop"
        tokens = np.array(tokens + [self.end] * (reason == "stop"), np.int32)
        logprobs = np.array([-self.draw.random() for _ in tokens], np.float32)
        versions = np.sort([self.draw.randrange(5) for _ in tokens]).astype(np.int32)
        return Completion(tokens, logprobs, versions, reason)
