"""Plain ``LLM.generate`` in a process of its own, for generate.py: a round number in, tokens per second out."""

import sys
import time

from vllm import LLM, SamplingParams

from titan_rl.config.sections.schema import GeneratorConfig
from titan_rl.diagnostics.bench.models.generate import NEW_TOKENS, prompts, seeds
from titan_rl.generator.engine_arguments import engine_arguments

_SETTINGS = (
    *("model", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"),
    *("enforce_eager", "kv_cache_memory_bytes", "block_size", "logprobs_mode", "skip_tokenizer_init", "hf_overrides"),
)
"""The actor's settings, without those that plain vLLM does not need (weight transfer) or has better defaults for
(asynchronous scheduling)."""


def main(path: str, dtype: str, max_len: int) -> None:
    assert dtype in ("auto", "float32", "bfloat16"), "it was checked by whoever asks"
    arguments = engine_arguments(GeneratorConfig(dtype=dtype), path, max_len)
    engine = LLM(**{name: getattr(arguments, name) for name in _SETTINGS})
    print("ready", flush=True)
    for line in sys.stdin:
        requests, parameters = [], []
        for index, tokens in enumerate(prompts()):
            for seed in seeds(int(line), index):
                requests.append(dict(prompt_token_ids=tokens))
                parameters.append(
                    SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=seed, logprobs=0, detokenize=False)
                )
        start = time.perf_counter()
        outputs = engine.generate(requests, parameters, use_tqdm=False)
        count = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"tokens/s {count / (time.perf_counter() - start)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
