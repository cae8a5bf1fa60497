"""Speculative decoding of a real engine: what is trained is what was sampled."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import add_prediction_layer, make
from safetensors.torch import load_file, save_file
from started_meshes import batch_of, learn, meshes_of, worst_difference

from titan_rl.config import load
from titan_rl.data.text.tokenizer import read_tokenizer
from titan_rl.data.types import Decoding, Request
from titan_rl.models.builtin.eagle3 import make_eagle3
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.trainer.titan_config import build_titan

PROMPT = np.tile(np.arange(10, 20, dtype=np.int32), 4)
"""It says the same again and again, so that there are drafts from the first token on."""
TEMPERATURE = 0.05
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
DRAFT_MODEL = {"method": "draft_model"}


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [NGRAM, DRAFT_MODEL], ids=["ngram", "draft_model"])
def test_answers_of_drafts_are_trained_as_they_were_sampled(tmp_path, monkeypatch, drafts):
    """The draft model is the trainer's: engines begin with the file of another, by which hardly a draft is accepted."""
    policy = make_tiny(tmp_path / "model", seed=1, architecture="qwen3", num_layers=2, tie_word_embeddings=False)
    shutil.copytree(tmp_path / "model", tmp_path / "draft")
    with torch.no_grad():
        policy.lm_head.weight.mul_(1 + 0.1 * torch.randn(policy.lm_head.weight.shape, generator=torch.manual_seed(0)))
    policy.save_pretrained(tmp_path / "draft")
    make_tiny(tmp_path / "other", seed=2, architecture="qwen3", num_layers=2, tie_word_embeddings=False)
    monkeypatch.setattr(load, "_with_drafter", lambda config: config)

    async def run():
        speculative = drafts | {"num_speculative_tokens": 3, "adaptive": False}
        learned = drafts is DRAFT_MODEL
        speculative |= {"model": str(tmp_path / "other")} if learned else {}
        tables = {
            "rollout": {"temperature": TEMPERATURE},
            "generator": {"speculative": speculative},
            "drafter": {"path": str(tmp_path / "draft") if learned else "", "optimizer": {"lr": 0.0}},
        }
        async with meshes_of(str(tmp_path / "model"), tmp_path, **tables, optimizer={"lr": 0.0}) as meshes:
            await meshes.trainer.begin_at(0)
            await meshes.weights.stage(0)
            await meshes.weights.announce(0)
            leader = meshes.generators.replicas[0].leader
            seeds = list(range(8))
            answers = await leader.generate.call_one(Request(PROMPT, seeds, 48, TEMPERATURE))
            again = await leader.generate.call_one(Request(PROMPT, seeds, 48, TEMPERATURE))
            assert [a.tokens.tolist() for a in answers] == [a.tokens.tolist() for a in again], "by their seeds alone"
            statistics = await leader.take_statistics.call_one()
            print(f"{statistics.num_drafted} drafted, {statistics.num_accepted} accepted, {statistics.num_steps} steps")
            assert 0 < statistics.num_accepted < statistics.num_drafted
            assert statistics.num_accepted > statistics.num_drafted / 2 or not learned
            longest = max(len(answer.tokens) for answer in answers)
            assert statistics.num_steps < 2 * longest, "several tokens came of a step"
            assert await worst_difference(meshes, (PROMPT, answers)) < 1e-5
            greedy, plain = [
                await leader.generate.call_one(Request(PROMPT, [1], 24, temperature)) for temperature in (0.0, 0.0)
            ]
            assert greedy[0].tokens.tolist() == plain[0].tokens.tolist()
            tokenizer = read_tokenizer(tmp_path / "model")
            text = tokenizer.decode(answers[0].tokens[20:23])
            [stopped] = await leader.generate.call_one(
                Request(PROMPT, seeds[:1], 48, TEMPERATURE, Decoding(stop=(text,)))
            )
            assert stopped.stop_reason == "stop_string" and tokenizer.decode(stopped.tokens).endswith(text)
            assert len(stopped.tokens) == len(stopped.logprobs) <= 23, "what was drafted behind it is dropped"
            with pytest.raises(Exception, match="drafts are checked without top-p"):
                await leader.generate.call_one(Request(PROMPT, [1], 4, TEMPERATURE, Decoding(top_p=0.9)))

    asyncio.run(run())


def make_bigrams(path: Path) -> None:
    """A policy whose words follow the one before, which a layer can learn of few texts: its blocks give nothing."""
    weights = load_file(path / "model.safetensors")
    outputs = [name for name in weights if name.endswith(("o_proj.weight", "down_proj.weight"))]
    weights |= {name: torch.zeros_like(weights[name]) for name in outputs}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("learns", [False, True])
def test_the_policys_own_layer_drafts(tmp_path, learns):
    """Its output head and embeddings are the policy's, whatever version that has."""
    heads = dict(head_dim=32, num_attention_heads=4, num_key_value_heads=2)  # which vLLM has kernels for on a CPU
    make(tmp_path, "glm4_moe", **heads, hidden_size=64, vocab_size=128)
    add_prediction_layer(tmp_path)
    if learns:
        make_bigrams(tmp_path)
    told, rates = [], []

    async def run():
        speculative = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
        tables = {"rollout": {"temperature": 1.0}, "generator": {"speculative": speculative}}
        if learns:
            tables["drafter"] = {"train_mtp": True, "optimizer": {"lr": 1e-2}}
        async with meshes_of(str(tmp_path), tmp_path, **tables, optimizer={"lr": 0.0 if learns else 0.05}) as meshes:
            await meshes.trainer.begin_at(0)
            for version in range(2):
                await meshes.weights.stage(version)
                await meshes.weights.announce(version)
                leader = meshes.generators.replicas[0].leader
                answers = await leader.generate.call_one(Request(PROMPT, list(range(8)), 48, 1.0))
                again = await leader.generate.call_one(Request(PROMPT, list(range(8)), 48, 1.0))
                assert [a.tokens.tolist() for a in answers] == [a.tokens.tolist() for a in again]
                statistics = await leader.take_statistics.call_one()
                assert 0 < statistics.num_accepted < statistics.num_drafted
                rates.append(statistics.num_accepted / statistics.num_drafted)
                assert await worst_difference(meshes, (PROMPT, answers)) < 2e-4, "of large logits, as without drafts"
                groups = [batch_of([(PROMPT, answers)], build_titan(meshes.config), None)]
                for step in range(25):
                    await (meshes.trainer.train(groups, 25 * version + step + 1) if learns else learn(meshes, version))
                told.append(answers[0].tokens.tolist())
        print(f"accepted {rates}")
        if learns:
            assert rates[0] < 0.1 and rates[1] > 0.2
        else:
            assert told[0] != told[1], "the second version is another one"

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("architecture, mode", [("qwen3", "disaggregated"), ("llama", "colocated")])
def test_a_head_learns_to_draft_what_the_policy_says(tmp_path, architecture, mode):
    """The engine begins with a head that has the policy's own output head, of which each is updated by itself."""
    make_tiny(tmp_path / "model", seed=1, architecture=architecture)
    (tmp_path / "head").mkdir()
    make_eagle3(tmp_path / "head", str(tmp_path / "model"), seed=2)

    async def run():
        tables = {
            "rollout": {"temperature": TEMPERATURE},
            "placement": {"mode": mode},
            "generator": {"speculative": {"method": "eagle3", "num_speculative_tokens": 3, "adaptive": False}},
            "drafter": {"path": str(tmp_path / "head"), "optimizer": {"lr": 1e-2}},
        }
        async with meshes_of(str(tmp_path / "model"), tmp_path, **tables, optimizer={"lr": 0.0}) as meshes:
            request, accepted = Request(PROMPT, list(range(8)), 48, TEMPERATURE), []
            await meshes.trainer.begin_at(0)
            for version in range(2):
                await meshes.weights.stage(version)
                await meshes.weights.announce(version)
                leader = meshes.generators.replicas[0].leader
                await leader.take_statistics.call_one()
                answers = await leader.generate.call_one(request)
                statistics = await leader.take_statistics.call_one()
                accepted.append(statistics.num_accepted / statistics.num_drafted)
                groups = [batch_of([(PROMPT, answers)], build_titan(meshes.config), None)]
                losses = [
                    metrics.loss_metrics["drafter_loss"]
                    for step in range(25)
                    for metrics in await meshes.trainer.train(groups, 25 * version + step + 1)
                ]
                assert await worst_difference(meshes, (PROMPT, answers)) < 1e-4, "of logits over 0.05"
            print(f"accepted {accepted}, losses {losses[0]} to {losses[-1]}")
            assert accepted[0] < 0.2 and accepted[1] > 0.4

    asyncio.run(run())
