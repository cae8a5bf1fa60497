"""A layer for multi-token prediction that learns beside the policy: what it computes, and where it is kept."""

from dataclasses import dataclass

import pytest
import test_draft_head as draft_heads
import torch
import torch.distributed as dist
from batches import batch_of
from family_models import add_prediction_layer, even, make
from layout_ranks import EPS, TOLERANCE, Layout, assert_same_tensors, parallelism, run_layouts, whole_tensors
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from titan_rl.config.load import load_config
from titan_rl.config.model_directory.draft_heads import weights_of_layers
from titan_rl.models.builtin.eagle3 import make_eagle3
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")
NUM_DRAFTS = 3
DRAFTS = {"generator": {"speculative": {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}}}
LEARNS = DRAFTS | {"drafter": {"train_mtp": True, "optimizer": {"lr": 1e-2, "eps": EPS}}}


def make_policy(path, **sizes) -> None:
    """Whose layer is so uneven that no part of it can be taken for another."""
    make(path, "glm4_moe", scale=0.1, **sizes)
    add_prediction_layer(path)
    weights, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(3)
    for name in [name for name in weights if ".layers.3." in name]:
        if weights[name].ndim == 1:
            weights[name].uniform_(0.5, 2.0, generator=generator)
        else:
            weights[name].normal_(0, 0.1, generator=generator)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "policy"
    make_policy(path)
    return path


def learner_of(path, learns: bool = True, **tables) -> Learner:
    tables = {"optimizer": {"lr": 1e-3, "eps": EPS}, "training": {"steps": 10}} | tables
    config = load_config(None, tables | (LEARNS if learns else {}))
    return Learner(config, build_titan(config), path)


@torch.no_grad()
def drafted(path, tokens_L: list[int]) -> torch.Tensor:
    """Mean of the log-probabilities of what is drafted at each token but the first, [L - 1, V].

    Of each draft by itself, by transformers' own block: DeepSeek-V3's report, section 2.2, without a token's embedding
    at the first place, as vLLM has it."""
    config = AutoConfig.from_pretrained(path)
    config.num_hidden_layers += 1
    how = dict(config=config, dtype=torch.float32, experts_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(path, **how).eval()
    block = model.model.layers.pop(-1)
    config.num_hidden_layers -= 1
    weights = load_file(path / "model.safetensors")
    enorm, hnorm, last, eh_proj = (
        weights[f"model.layers.3.{name}.weight"] for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj")
    )
    [states_LD] = model.model(torch.tensor([tokens_L]), use_cache=False).last_hidden_state
    embedded_LD = model.model.embed_tokens(torch.tensor(tokens_L))
    embedded_LD[1] = 0

    def norm(x_D, weight_D):
        return torch.nn.functional.rms_norm(x_D, x_D.shape[-1:], weight_D, config.rms_norm_eps)

    def joined(place, state_D):
        return torch.cat([norm(embedded_LD[place], enorm), norm(state_D, hnorm)]) @ eh_proj.T

    def found(inputs):
        inputs_1TD = torch.stack(inputs)[None]
        rotary = model.model.rotary_emb(inputs_1TD, torch.arange(len(inputs))[None])
        causal = torch.full((len(inputs), len(inputs)), -torch.inf).triu(1)[None, None]
        return block(inputs_1TD, attention_mask=causal, position_embeddings=rotary)[0, -1]

    means = []
    for place in range(1, len(tokens_L)):
        logprobs = []
        for number in range(NUM_DRAFTS):
            first = max(place - number, 0)  # the last token whose policy's state is there
            inputs = [joined(at, states_LD[at - 1]) for at in range(1, first + 1)]
            state_D = found(inputs) if inputs else states_LD[0]
            for at in range(first + 1, place + 1):
                inputs.append(joined(at, state_D))
                state_D = found(inputs)
            logprobs.append(model.lm_head(norm(state_D, last)).log_softmax(-1))
        means.append(torch.stack(logprobs).mean(0))
    return torch.stack(means)


@pytest.mark.parametrize("share_prefix", [True, False])
def test_it_computes_what_an_engine_drafts_of_each_text_by_itself(policy, share_prefix):
    """Packed, with shared prompts."""
    layer = learner_of(policy).learned.model
    rows = layer.fit(batch_of(0, share_prefix=share_prefix).rows[0])
    given, num_compared = [statistics[0] for statistics in layer.measure(rows)], 0
    for tokens, trained in draft_heads.texts_of(rows):
        if len(tokens) < 3 or not trained:
            continue
        wanted = drafted(policy, tokens)
        for place, row, number in trained:
            assert (layer.columns(rows[row])["weight_S"][number] != 0) == (
                place > 0 and rows[row].weight_S[number] != 0
            )
            if place:
                num_compared += 1
                target = int(rows[row].target_S[number])
                assert given[row][number] == pytest.approx(float(wanted[place - 1, target]), abs=5e-5)
        if num_compared > 20:
            return
    pytest.fail("too few tokens")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_learns_and_moves_the_policy_by_no_bit(policy, dtype):
    training = {"steps": 10, "mixed_precision_param": dtype}
    learner, alone = (learner_of(policy, learns, training=training) for learns in (True, False))
    sent = draft_heads.sent_by_what_learns(learner, alone)
    assert sent == {f"drafter.{name}" for name in weights_of_layers(policy)}, "what an engine asks for"


def test_it_is_saved_in_the_policys_directory(policy, tmp_path):
    """And the copies of embeddings and output head, which do not learn, are left out."""
    learner = learner_of(policy)
    learner.train_step([batch_of(0).rows[0]], [True])
    learner.save_hf(tmp_path / "model")
    given, saved = load_file(policy / "model.safetensors"), load_file(tmp_path / "model" / "model.safetensors")
    assert saved.keys() == given.keys()
    for shard in (*learner.shards(), *learner.learned.shards()):
        assert torch.equal(saved[shard.name], shard.tensor)
    assert not torch.equal(saved["model.layers.3.eh_proj.weight"], given["model.layers.3.eh_proj.weight"])
    assert len(learner_of(tmp_path / "model").learned.shards()) == len(weights_of_layers(policy))


@dataclass
class Trained:
    loaded: dict[str, torch.Tensor]
    trained: dict[str, torch.Tensor]
    losses: list[float]


def three_steps(layout: Layout, models, out) -> Trained:
    make_learner = {"policy": learner_of, "eagle3": draft_heads.learner_of}[layout.model]
    learner = make_learner(models / layout.model, parallelism=dict(layout.parallelism))
    shards = [*learner.shards(), *learner.learned.shards()]
    loaded, losses, (rank, ranks) = whole_tensors(shards), [], (dist.get_rank(), dist.get_world_size())
    for step in range(3):
        batch = batch_of(step, num_ranks=ranks)
        [metrics] = learner.train_step([batch.rows[rank]], [batch.has_signal])
        losses.append(metrics.loss_metrics["drafter_loss"])
    trained = whole_tensors(shards)
    learner.save_hf(out / "saved")
    return Trained(loaded, trained, losses)


@pytest.mark.slow
def test_ranks_share_what_drafts_as_they_share_the_policy(tmp_path):
    """By FSDP, and with experts of their own; an EAGLE-3 head, too."""
    make_policy(tmp_path / "policy", **even("glm4_moe"))
    make_tiny(tmp_path / "eagle3" / "policy", seed=1)
    (tmp_path / "eagle3" / "head").mkdir()
    make_eagle3(tmp_path / "eagle3" / "head", str(tmp_path / "eagle3" / "policy"), seed=2)
    dp2, ep2 = parallelism(dp=2), parallelism(dp=2, ep=2)
    layouts = {"dp2": Layout("policy", dp2), "ep2": Layout("policy", ep2), "dp2 eagle3": Layout("eagle3", dp2)}
    run_layouts(1, tmp_path, tmp_path, {name: Layout(name) for name in ("policy", "eagle3")}, three_steps)
    run_layouts(2, tmp_path, tmp_path, layouts, three_steps)
    for name, layout in layouts.items():
        study, one = (torch.load(tmp_path / f"{each}.pt") for each in (name, layout.model))
        assert_same_tensors(study["loaded"], one["loaded"])
        torch.testing.assert_close(study["trained"], one["trained"], atol=TOLERANCE, rtol=0)
        assert study["losses"] == pytest.approx(one["losses"], rel=1e-6)
        saved = load_file(tmp_path / name / "saved" / "model.safetensors")
        assert all(torch.equal(tensor, study["trained"][key]) for key, tensor in saved.items())
