"""Plain ``LLM.generate`` in a process of its own, for bench/generate.py: a round number in, tokens a second out."""

import sys
import time
from dataclasses import fields

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

from titan_rl.bench.generate import _NEW_TOKENS, _prompts, _seeds
from titan_rl.config import GeneratorConfig
from titan_rl.generation import engine_arguments

_NOT_PLAIN = ("weight_transfer_config", "async_scheduling")


def main(path: str, dtype: str, max_len: int) -> None:
    arguments = engine_arguments(GeneratorConfig(dtype=dtype), path, max_len)
    # the actor's settings, but for what plain vLLM has no use for, or does better by default
    ours = {field.name: getattr(arguments, field.name) for field in fields(EngineArgs) if field.name not in _NOT_PLAIN}
    engine = LLM(**{name: value for name, value in ours.items() if value != getattr(EngineArgs(), name)})
    print("ready", flush=True)
    for line in sys.stdin:
        requests, parameters = [], []
        for index, tokens in enumerate(_prompts()):
            for seed in _seeds(int(line), index):
                requests.append(dict(prompt_token_ids=tokens))
                parameters.append(
                    SamplingParams(max_tokens=_NEW_TOKENS, temperature=1.0, seed=seed, logprobs=0, detokenize=False)
                )
        start = time.perf_counter()
        outputs = engine.generate(requests, parameters, use_tqdm=False)
        count = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"tokens/s {count / (time.perf_counter() - start)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
