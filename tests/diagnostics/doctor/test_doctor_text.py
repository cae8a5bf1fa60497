"""Bugs of text, each planted by itself: the doctor's check of text names it. No actors."""

import pytest
from chat_templates import SCHEMA
from model_texts import BASE, MODELS

from titan_rl.data.text import chat_template, control_tokens, turns
from titan_rl.data.text.tokenizer import beginning, encode, text_settings
from titan_rl.diagnostics.doctor.check_errors import CheckFailed
from titan_rl.diagnostics.doctor.checks.text import Written


def examine(name: str) -> None:
    """As the doctor looks at a run with tools, SFT and prompts of both styles."""
    model = (MODELS | BASE)[name]
    tokenizer = model.tokenizer()
    text = Written(tokenizer, model.stop_ids(tokenizer))
    text.check_prompt("1+1=")
    text.check_hostile(is_chat=False)
    if name in MODELS:
        text.check_prompt([dict(role="user", content="1+1=")])
        text.check_prompt([dict(role="user", content="1+1=")], [SCHEMA])
        text.check_reply(())
        text.check_reply([SCHEMA])
        text.check_hostile(is_chat=True)
        text.check_answer(is_chat=True)


@pytest.mark.parametrize("name", [*MODELS, *BASE])
def test_a_healthy_model_raises_no_alarm(name):
    examine(name)


def _no_clock(tokenizer, messages, *, tokenize=False, **asked):
    told = {"add_generation_prompt": True, "return_dict": False} | text_settings(tokenizer).template_kwargs
    return tokenizer.apply_chat_template(messages, tokenize=tokenize, **(told | asked))


_REPLY_TEMPLATE = chat_template.reply_template
PLANTED = {
    "a prompt without its beginning": (turns, "encode_from_start", encode, "mistral"),
    "a beginning twice": (turns, "encode_from_start", lambda t, text: [*beginning(t) * 2, 5], "mistral"),
    "control tokens of a row": (turns, "plain", lambda tokenizer, text, role="user": text, "smollm2"),
    "replies by another variant": (
        turns,
        "reply_template",
        lambda tokenizer, role, count, tools: _REPLY_TEMPLATE(tokenizer, role, count),
        "command_r",
    ),
    "an answer with a space of its own": (
        turns,
        "encode_behind",
        lambda tokenizer, context, text: encode(tokenizer, text),
        "phi3",
    ),
    "an end that does not stop the engine": (
        turns,
        "with_end",
        lambda tokenizer, tokens, following: ([*tokens, tokenizer.eos_token_id + 1], following),
        "qwen3",
    ),
    "the end written twice": (turns, "end_of_answer", lambda tokenizer: None, "gpt_oss"),
    "a template that follows the clock": (chat_template, "render", _no_clock, "gpt_oss"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_named(bug, monkeypatch):
    module, name, wrong, model = PLANTED[bug]
    examine(model)
    for each in (module, control_tokens) if name == "render" else (module,):
        monkeypatch.setattr(each, name, wrong)
    with pytest.raises(CheckFailed):
        examine(model)
