"""Client of the bench: samples by the Tinker SDK, a round for each line of input.

It is a process of its own. Each line is JSON with ``prompts`` and ``max_tokens``; each round prints its seconds and its
tokens as JSON.
"""

import json
import sys
import time


def main(model: str) -> None:
    import tinker
    from tinker import types

    sampler = tinker.ServiceClient().create_sampling_client(base_model=model).result()
    for line in sys.stdin:
        asked = json.loads(line)
        parameters = types.SamplingParams(max_tokens=asked["max_tokens"], temperature=1.0, stop=[])
        start = time.perf_counter()
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), 1, parameters) for prompt in asked["prompts"]]
        tokens = sum(len(sequence.tokens) for future in futures for sequence in future.result().sequences)
        print(json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
