"""A vLLM that knows nothing of titan_rl but the name of its backend takes weights from a region. For test_backend.py.

Prints the largest difference of a log-probability between vLLM and transformers, on the weights that were sent.
"""

import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from titan_rl.generator.weights.vllm_backend import transfer_engine
from titan_rl.generator.weights.vllm_recording import needs
from titan_rl.mesh.channel.plan import Interner, Plan
from titan_rl.mesh.channel.reader import ReaderSetup
from titan_rl.mesh.channel.writer import WeightWriter, holdings
from titan_rl.models.weights.shards import Shard

PROMPT = list(range(10, 30))


def main(path: str) -> None:
    llm = LLM(
        model=path,
        dtype="float32",
        max_model_len=64,
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 27,
        weight_transfer_config={"backend": "titan_rl"},
    )
    tensors = {name: 1.1 * tensor for name, tensor in load_file(f"{path}/model.safetensors").items()}
    shards = [Shard(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors.items()]
    checkpoint = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]

    [recorded] = llm.collective_rpc(lambda worker: transfer_engine(worker).record_needs(checkpoint))
    interner = Interner()
    plan = Plan([holdings(shards, interner)], [needs(recorded, interner)])
    writer = WeightWriter(0, shards, plan.slot(0), torch.device("cpu"))
    setup = ReaderSetup(plan.reads(0, 0), [writer.region.handle(over_rdma=False)], ["shared_memory"])
    llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"setups": {0: setup}}})

    writer.stage(7)
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": {"version": 7}})
    llm.collective_rpc("finish_weight_update")

    sampling = SamplingParams(max_tokens=16, temperature=1.0, seed=1, logprobs=0, detokenize=False)
    [answer] = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)[0].outputs
    sampled = torch.tensor([step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
        tokens = torch.tensor([[*PROMPT, *answer.token_ids]])
        logprobs = model(tokens).logits.log_softmax(-1)[0, len(PROMPT) - 1 : -1]
    print("difference", float((logprobs.gather(1, tokens[0, len(PROMPT) :, None])[:, 0] - sampled).abs().max()))


if __name__ == "__main__":
    main(sys.argv[1])
