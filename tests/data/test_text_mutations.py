"""Models' texts with something changed, as found in the field: refused in one line, or every path right."""

import random
from dataclasses import replace

import numpy as np
import pytest
from model_texts import MODELS, ModelText, byte_pairs, sentence_pieces
from tokenizers import AddedToken, normalizers

from titan_rl.config.load import ConfigError
from titan_rl.data.rows.examples import make_example
from titan_rl.data.rows.row_shapes import read_row
from titan_rl.data.text.checks import TextUse, check_chat
from titan_rl.data.text.control_tokens import control_tokens, may_hold
from titan_rl.data.text.tokenizer import set_text
from titan_rl.data.text.turns import encode_answer, encode_messages, encode_reply
from titan_rl.data.types import Provenance

SEEDS = 80


def in_template(model: ModelText, old: str, new: str) -> ModelText:
    template = model.template
    assert template is not None
    if isinstance(template, dict):
        return replace(model, template={name: text.replace(old, new) for name, text in template.items()})
    return replace(model, template=template.replace(old, new))


CHANGES = {
    "other pieces": lambda m: replace(m, make=sentence_pieces if m.make is byte_pairs else byte_pairs),
    "no beginning in the template": lambda m: in_template(m, "{{ bos_token }}", ""),
    "no beginning": lambda m: replace(m, bos=""),
    "other end of sequence": lambda m: replace(m, named=(("eos_token", m.special[0]),)),
    "end twice": lambda m: in_template(m, m.end, m.end + m.end),
    "other stops": lambda m: replace(m, end=m.special[0]),
    "no end": lambda m: in_template(m, m.end, ""),
    "no generation prompt": lambda m: in_template(m, "{% if add_generation_prompt %}", "{% if false %}"),
    "trimmed": lambda m: in_template(m, "{{ m.content }}", "{{ m.content | trim }}"),
    "upper case": lambda m: in_template(m, "{{ m.content }}", "{{ m.content | upper }}"),
    "JSON": lambda m: in_template(m, "{{ m.content }}", "{{ m.content | tojson }}"),
    "no system": lambda m: in_template(m, "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"),
    "opens thinking": lambda m: in_template(m, "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
    "chance": lambda m: in_template(m, "{% for m in messages %}", "{{ range(9) | random }}{% for m in messages %}"),
    "clock": lambda m: in_template(m, "{% for m in messages %}", "{{ strftime_now('%f') }}{% for m in messages %}"),
    "content twice": lambda m: in_template(m, "{{ m.content }}", "{{ m.content }}{{ m.content }}"),
    "a space before answers": lambda m: in_template(m, "{{ m.content }}", " {{ m.content }}"),
    "special words are words": "words",
    "read in lower case": "lower",
}


def changed(seed: int):
    """A tokenizer, the ids that stop its engine, and the settings that it has."""
    draw = random.Random(seed)
    model = MODELS[draw.choice(sorted(MODELS))]
    names = draw.sample(sorted(CHANGES), draw.choice([1, 1, 2]))
    stops = model.stops
    for name in names:
        model = change(model) if callable(change := CHANGES[name]) else model
    tokenizer = model.tokenizer()
    if "special words are words" in names:
        tokenizer = model.make(list(model.special), bos=model.bos, is_special=False, **dict(model.named))
        tokenizer.chat_template = model.template
        set_text(tokenizer, model.settings)
    if "read in lower case" in names:
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|x|>", normalized=True)]})
    ids = tokenizer.convert_tokens_to_ids([model.end, *stops])
    return f"{seed}: {', '.join(names)}", model, tokenizer, [number for number in ids if number is not None]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_text_that_spells_out_no_control_token_holds_none(seed):
    said, _, tokenizer, _ = changed(seed)
    draw, control = random.Random(seed), control_tokens(tokenizer)
    words = [*control.values(), "hello", " ", "\n", "<", "|", "\u2581", "é"]
    changes = (str, str.upper, str.lower, str.title, lambda word: word.replace("|", "｜"), lambda word: word[:-1])
    num_spelled = 0
    for _ in range(100):
        text = draw.choice(["", " "]).join(draw.choice(changes)(draw.choice(words)) for _ in range(draw.randrange(6)))
        holds = any(token in control for token in tokenizer.encode(text, add_special_tokens=False))
        assert may_hold(tokenizer, text) or not holds, (said, text)
        num_spelled += holds
    assert num_spelled and not may_hold(tokenizer, "hello there"), said


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_changed_model_is_refused_in_one_line_or_right(seed):
    said, model, tokenizer, stops = changed(seed)
    use = TextUse(stops, learns=True, demonstrates=True, replies=True)
    try:
        check_chat(tokenizer, use)
        check_paths(model, tokenizer, stops)
    except ConfigError as error:
        assert "\n" not in str(error), said


def check_paths(model: ModelText, tokenizer, stops: list[int]) -> None:
    asked = [dict(role="user", content="ask")]
    told = model.settings.template_kwargs | {"strftime_now": model.settings.strftime}
    prompt = encode_messages(tokenizer, asked).tolist()
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **told)
    assert prompt == tokenizer.encode(text, add_special_tokens=False)
    answer = encode_answer(tokenizer, "hello", is_chat=True)
    assert answer[-1] in stops and np.isin(answer, stops).sum() == 1
    row = read_row("x", {"messages": [*asked, dict(role="assistant", content="hello")]}, "demonstrations", "auto")
    [sample] = make_example(row, tokenizer, as_chat=False).samples
    assert sample.tokens.tolist() == [*prompt, *answer]
    assert sample.tokens[sample.provenance == Provenance.MODEL].tolist() == answer.tolist()
    reply, provenance = encode_reply(tokenizer, asked, int(answer[-1]), is_chat=True)
    if model.end * 2 not in str(model.template):
        assert not np.isin(reply[:1], stops).any(), "one end"
    assert "ask" in tokenizer.decode(reply[provenance == Provenance.TOOL]).lower()
    for token in model.special:
        check_hostile(tokenizer, prompt, f"ask{token}\n{token.upper()}ask")


def check_hostile(tokenizer, prompt: list[int], hostile: str) -> None:
    def count(tokens) -> int:
        return sum(int(token) in control_tokens(tokenizer) for token in tokens)

    assert count(encode_messages(tokenizer, [dict(role="user", content=hostile)])) == count(prompt)
    plain, odd = (
        encode_reply(tokenizer, [dict(role="tool", content=text)], 0, is_chat=True)[0] for text in ("ask", hostile)
    )
    assert count(odd) == count(plain)


def test_some_changed_models_are_played_and_some_refused():
    refused = 0
    for seed in range(SEEDS):
        _, _, tokenizer, stops = changed(seed)
        try:
            check_chat(tokenizer, TextUse(stops, learns=True, demonstrates=True, replies=True))
        except ConfigError:
            refused += 1
    assert SEEDS / 5 < refused < SEEDS * 4 / 5
