"""An EAGLE-3 head that learns beside the policy: what it reads, what it gives, and what is kept of it."""

import json

import pytest
import torch
import torch.nn.functional as F
from batches import batch_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from titan_rl.cli import main
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.model_directory import hub
from titan_rl.config.model_directory.draft_heads import find_draft_head, layers_read
from titan_rl.controller.preflight.checks import check
from titan_rl.data.types import Segment
from titan_rl.models.builtin.eagle3 import make_eagle3
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.trainer.model.draft_head import tokens_before, without_first_tokens
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")
DRAFTS = {"generator": {"speculative": {"method": "eagle3", "num_speculative_tokens": 3}}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_tiny(folder / "policy", seed=1)
    (folder / "head").mkdir()
    make_eagle3(folder / "head", str(folder / "policy"), seed=2)
    return folder


def learner_of(models, head: str = "head", **tables) -> Learner:
    """``head``: its folder, beside the policy's or anywhere."""
    tables = {"model": {"path": str(models / "policy")}, "optimizer": {"lr": 1e-3}, "training": {"steps": 10}} | tables
    config = load_config(None, tables | DRAFTS | {"drafter": {"path": str(models / head), "optimizer": {"lr": 1e-2}}})
    return Learner(config, build_titan(config), models / "policy")


@pytest.mark.parametrize(("arguments", "policy"), [([], "tiny"), (["--model.path={policy}"], "{policy}")])
def test_its_maker_tells_which_policy_it_is_for(models, tmp_path, capsys, arguments, policy):
    paths = {"policy": models / "policy"}
    assert main(["model", "eagle3", str(tmp_path / "head"), *(text.format(**paths) for text in arguments)]) == 0
    told = f"wrote {tmp_path / 'head'}, a draft head for the policy {policy.format(**paths)!r} (--model.path)"
    assert capsys.readouterr().out.splitlines() == [told]


@torch.no_grad()
def drafted_logits(models, tokens_L: list[int], num_drafts: int) -> torch.Tensor:
    """Of a text's tokens but the first, each time that one more token is drafted: [drafts, L - 1, V].

    Written down after arXiv 2503.01840, section 3, with transformers' policy. Keys and values are those that an engine
    has: of the policy's states up to a draft's first token, and the draft's own behind that."""
    policy = AutoModelForCausalLM.from_pretrained(models / "policy", dtype=torch.float32)
    weights = load_file(models / "head" / "model.safetensors")
    layer = {name.removeprefix("midlayer."): weight for name, weight in weights.items()}
    config = policy.config
    found = policy.model(torch.tensor([tokens_L]), output_hidden_states=True).hidden_states
    chosen = layers_read(json.loads((models / "head" / "config.json").read_text()), config.num_hidden_layers)
    hidden_LD = torch.cat([found[number][0] for number in chosen], dim=-1) @ weights["fc.weight"].T
    first_1D = hidden_LD[:1]
    embedded_LD, logits, caches = found[0][0, 1:], [], []
    rotary = policy.model.rotary_emb(embedded_LD[None], torch.arange(len(embedded_LD))[None])

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], layer[f"{name}.weight"], config.rms_norm_eps)

    for number in range(num_drafts):
        before_LD = hidden_LD[:-1]
        inputs_LD = torch.cat([norm(embedded_LD, "input_layernorm"), norm(before_LD, "hidden_norm")], dim=-1)
        q, k, v = (
            (inputs_LD @ layer[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
            for name in "qkv"
        )
        q, k = apply_rotary_pos_emb(q[None], k[None], *rotary)
        groups = config.num_attention_heads // config.num_key_value_heads
        caches.append((repeat_kv(k, groups), repeat_kv(v[None], groups)))
        attended = []
        for place in range(len(embedded_LD)):
            drafted = [(made, place - number + made) for made in range(1, number + 1) if place >= number - made]
            k_1NKH, v_1NKH = (
                torch.cat(
                    [caches[0][part][:, :, : max(place - number + 1, 0)]]
                    + [caches[made][part][:, :, at : at + 1] for made, at in drafted],
                    dim=2,
                )
                for part in range(2)
            )
            attended.append(F.scaled_dot_product_attention(q[:, :, place : place + 1], k_1NKH, v_1NKH))
        attended_LD = torch.cat(attended, dim=2)[0].transpose(0, 1).flatten(1)
        middle_LD = before_LD + attended_LD @ layer["self_attn.o_proj.weight"].T
        normal_LD = norm(middle_LD, "post_attention_layernorm")
        gate, up, down = (layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        drafted_LD = middle_LD + (F.silu(normal_LD @ gate) * (normal_LD @ up)) @ down
        hidden_LD = torch.cat([first_1D, drafted_LD])
        logits.append(norm(drafted_LD, "norm") @ weights["lm_head.weight"].T)
    return torch.stack(logits)


def texts_of(rows) -> list[tuple[list[int], list[tuple[int, int, int]]]]:
    """Tokens of each segment with its prefix; and (place in it, row, number) of each trained token."""
    texts = []
    for number, row in enumerate(rows):
        for segment in row.segments:
            places = [place for start, length in segment.prefix for place in range(start, start + length)]
            places += range(segment.start, segment.start + segment.length)
            own = range(segment.start, segment.start + segment.length)
            trained = [(places.index(s), number, i) for i, s in enumerate(row.source_S.tolist()) if s in own]
            texts.append((row.tokens_T[places].tolist(), trained))
    return texts


@pytest.mark.parametrize("share_prefix", [True, False])
def test_it_computes_what_a_head_drafts_of_each_text_by_itself(models, share_prefix):
    """Packed, with shared prompts; the first token of a text is read by nobody, and what follows it is not drafted."""
    rows = batch_of(0, share_prefix=share_prefix).rows[0]
    head = learner_of(models).learned.model
    rows = head.fit(rows)
    given = [statistics[0] for statistics in head.measure(rows)]
    num_compared = 0
    for tokens, trained in texts_of(rows):
        if len(tokens) < 3 or not trained:
            continue
        wanted = drafted_logits(models, tokens, 3).log_softmax(-1).mean(0)
        for place, row, number in trained:
            weight = head.columns(rows[row])["weight_S"][number]
            assert (weight != 0) == (place > 0 and rows[row].weight_S[number] != 0)
            if place:
                num_compared += 1
                target = int(rows[row].target_S[number])
                assert given[row][number] == pytest.approx(float(wanted[place - 1, target]), abs=2e-5)
    assert num_compared > 20


def test_a_token_before_is_the_prefixs_last_or_the_one_to_the_left():
    """A prompt of three tokens, two samples of it, and a text of one token."""
    prompt, samples = Segment(0, 3), [Segment(3, 2, ((0, 3),)), Segment(5, 1, ((0, 3),))]
    segments = [prompt, *samples, Segment(6, 1), Segment(7, 2, ((6, 1),))]
    before, has_before = tokens_before(segments, 9)
    assert before.tolist() == [0, 0, 1, 2, 3, 2, 6, 6, 7]
    assert has_before.tolist() == [False, True, True, True, True, True, False, True, True]
    assert without_first_tokens(segments) == [
        *(Segment(0, 1), Segment(1, 2), Segment(3, 2, ((1, 2),)), Segment(5, 1, ((1, 2),))),
        *(Segment(6, 1), Segment(7, 2)),
    ]


def sent_by_what_learns(learner: Learner, alone: Learner) -> set[str]:
    """Names of the tensors of what drafts, after steps in which it learns and moves the policy by no bit."""
    rows, told = batch_of(0).rows[0], []
    for _ in range(8):
        [metrics] = learner.train_step([rows], [True])
        alone.train_step([rows], [True])
        told.append(metrics.loss_metrics["drafter_loss"])
    assert told[-1] < told[0] - 0.5
    pairs = zip(learner.shards(), alone.shards(), strict=True)
    assert all(torch.equal(one.tensor, other.tensor) for one, other in pairs)
    return {shard.name for shard in learner.sent()} - {shard.name for shard in alone.sent()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_learns_and_moves_the_policy_by_no_bit(models, dtype):
    """Nor does the policy compute with weights that FSDP gathered for it before an update."""
    training = {"steps": 10, "mixed_precision_param": dtype}
    config = load_config(None, {"optimizer": {"lr": 1e-3}, "training": training})
    learner, alone = learner_of(models, training=training), Learner(config, build_titan(config), models / "policy")
    sent = sent_by_what_learns(learner, alone)
    assert {"drafter.midlayer.hidden_norm.weight", "drafter.fc.weight", "drafter.lm_head.weight"} < sent


@pytest.fixture(scope="module")
def smaller(models):
    """A head of the policy's last 60 tokens alone."""
    tensors = load_file(models / "head" / "model.safetensors")
    number = len(tensors["lm_head.weight"])
    tensors["lm_head.weight"] = tensors["lm_head.weight"][-60:].clone()
    tensors |= {"d2t": torch.full((60,), number - 60), "t2d": torch.arange(number) >= number - 60}
    (models / "smaller").mkdir()
    config = json.loads((models / "head" / "config.json").read_text()) | {"draft_vocab_size": 60}
    (models / "smaller" / "config.json").write_text(json.dumps(config))
    save_file(tensors, models / "smaller" / "model.safetensors")
    return number - 60


def test_tokens_beyond_a_smaller_vocabulary_have_no_weight(models, smaller, tmp_path):
    """And it is saved with its tables."""
    learner, rows = learner_of(models, "smaller"), batch_of(0).rows[0]
    head = learner.learned.model
    for row in head.fit(rows):
        columns, is_known = head.columns(row), row.target_S >= smaller
        assert is_known.any() and not is_known.all()
        assert (columns["target_S"].numpy()[is_known] == row.target_S[is_known] - smaller).all()
        assert not columns["weight_S"].numpy()[~is_known].any()
    learner.train_step([rows], [True])
    head.save(tmp_path / "saved", "auto")
    saved, given = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", models / "smaller"))
    assert saved.keys() == given.keys() and all(torch.equal(saved[name], given[name]) for name in ("d2t", "t2d"))
    assert not torch.equal(saved["fc.weight"], given["fc.weight"])
    assert find_draft_head(str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"generator": {"speculative": {"method": "draft_model"}}},
            "it is a draft head, which writes no words by itself",
        ),
        ({"drafter": {"path": "{policy}"}}, "architectures = ['LlamaForCausalLM'] in config.json is no EAGLE-3 head"),
        ({"parallelism": {"tensor_parallel_degree": 2}}, "= 2 cannot cut a draft head that learns, nor its policy"),
        ({"algorithm": {"name": "ppo"}}, "needs a model that learns, too (critic), and one"),
        ({"drafter": {"path": ""}}, "'eagle3' needs a model: give its Hugging Face directory as"),
        ({"model": {"path": "{head}"}}, "it is a draft head, which writes no words by itself"),
    ],
)
def test_what_it_cannot_go_with_is_one_line(models, tables, said):
    paths = {"policy": models / "policy", "head": models / "head"}
    tables = {"model": {"path": "{policy}"}, "drafter": {"path": "{head}"}} | DRAFTS | tables
    for section in ("model", "drafter"):
        tables[section] = {"path": tables[section]["path"].format(**paths)}
    with pytest.raises(ConfigError) as caught:
        check(load_config(None, tables))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_size": 256}, "fc.weight in model.safetensors is (128, 384), and (256, 768) reads 3 hidden states"),
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2 in config.json: a head has one layer"),
        ({"norm_before_residual": True}, "norm_before_residual = True in config.json: heads of this kind"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc = True in config.json: heads of this kind"),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "use_aux_hidden_state = False in config.json: heads of this",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, "move it out of eagle_config"),
        ({"layer_types": 3}, "layer_types = 3 in config.json: a head sees all"),
        ({"layer_types": [["full_attention"]]}, "layer_types = [['full_attention']] in config.json: a head sees all"),
        ({"target_hidden_size": {}}, "target_hidden_size = {} in config.json must be a whole number"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5 in config.json: heads of this kind"),
        ({"layer_types": ["sliding_attention"]}, "layer_types = ['sliding_attention'] in config.json: a head sees all"),
        ({"target_hidden_size": 64}, "fc.weight in model.safetensors is (128, 384), and (128, 192) reads 3 hidden"),
        ({"eagle_config": 3}, "eagle_config = 3 in config.json must be an object"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}, "= [1, 1, 3] in config.json, of a policy of 4 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "of a policy of 4 layers: 3 of their numbers in ascending"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "eagle_aux_hidden_state_layer_ids = (2, 2, 1)"),
        (
            {"max_position_embeddings": 8},
            "has 8 positions (max_position_embeddings), and drafts for rollouts of up to",
        ),
        (
            {"draft_vocab_size": 50},
            "draft_vocab_size = 50 and vocab_size = 99 in config.json, and there is no d2t: a head of fewer has one",
        ),
        ({"draft_vocab_size": 0.5}, "draft_vocab_size = 0.5 and vocab_size = 99 in config.json: a head drafts some"),
        (
            {"intermediate_size": 256},
            "midlayer.mlp.gate_proj.weight in model.safetensors is (384, 128), and config.json",
        ),
        ({"model_type": "qwen3"}, "model_type = 'qwen3' in config.json of an EAGLE-3 head must be 'llama'"),
    ],
)
def test_another_policys_head_is_one_line(models, tmp_path, changed, said):
    config = json.loads((models / "head" / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    (tmp_path / "model.safetensors").symlink_to(models / "head" / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        tables = {"model": {"path": str(models / "policy")}, "drafter": {"path": str(tmp_path)}}
        check(load_config(None, tables | DRAFTS))
    assert said in str(caught.value).splitlines()[0]


@pytest.mark.parametrize("path", ["nowhere", "models/nowhere"])
def test_a_head_that_is_not_there_is_told_with_how_one_is_made(monkeypatch, path):
    """The second may be a name of the Hub."""
    monkeypatch.setattr(hub, "_newest_revision", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        load_config(None, DRAFTS | {"drafter": {"path": path}})
    assert str(caught.value).endswith("; `titan-rl model eagle3 DIR --model.path POLICY` makes one")


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        (torch.full((60,), 40), "names tokens that the policy has not, or one twice"),
        (torch.full((60,), -1), "names tokens that the policy has not, or one twice"),
        (-torch.arange(60), "names tokens that the policy has not, or one twice"),
        (torch.zeros(59, dtype=torch.int64), "is I64 (59,), and I64 (60,) fits"),
        (torch.zeros(60), "is F32 (60,), and I64 (60,) fits"),
    ],
)
def test_a_mapping_that_names_no_token_is_refused(models, smaller, tmp_path, mapping, said):
    """vLLM would write beyond its logits."""
    tensors = load_file(models / "smaller" / "model.safetensors") | {"d2t": mapping}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((models / "smaller" / "config.json").read_text())
    with pytest.raises(ValueError) as caught:
        find_draft_head(str(tmp_path))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_head_with_embeddings_of_its_own_does_not_learn(models, tmp_path):
    tensors = load_file(models / "head" / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": torch.zeros(99, 128)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((models / "head" / "config.json").read_text())
    policy = {"model": {"path": str(models / "policy")}}
    with pytest.raises(ConfigError, match="it holds embed_tokens.weight, and a head that learns reads the policy's"):
        check(load_config(None, policy | DRAFTS | {"drafter": {"path": str(tmp_path)}}))
    speculative = DRAFTS["generator"]["speculative"] | {"model": str(tmp_path)}
    check(load_config(None, policy | {"generator": {"speculative": speculative}}))


def test_a_head_whose_embeddings_are_called_tied_has_an_output_head_of_its_own(models, tmp_path):
    (tmp_path / "model.safetensors").symlink_to(models / "head" / "model.safetensors")
    config = json.loads((models / "head" / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sent = {shard.name for shard in learner_of(models, str(tmp_path)).sent()}
    assert "drafter.lm_head.weight" in sent
