"""What an option or a field says reaches every path on which a model's text is made, or is refused on it.

Paths: a prompt, a worked example, a row of data, a pair and an agent's request. What a row trains an answer behind is
what the model is asked with.
"""

import pytest
from model_texts import byte_pairs

from titan_rl.config.load import ConfigError
from titan_rl.data.rows.examples import make_example
from titan_rl.data.rows.row_shapes import read_row
from titan_rl.data.text.rendering import with_options
from titan_rl.data.text.tokenizer import TextSettings, set_text
from titan_rl.data.text.turns import encode_answer, encode_messages
from titan_rl.data.types import Provenance

NO_THOUGHT = "<think>\n\n</think>\n\n"
OPENING = "{% if enable_thinking is defined and enable_thinking is false %}" + repr(NO_THOUGHT)[1:-1] + "{% endif %}"
"""What an option writes where the model is asked."""


def template(*, answer: str = "{{ m.content or '' }}", marks: bool = False, opening: str = "") -> str:
    """``answer``: how an assistant's message is written; ``opening``: behind the generation prompt."""
    before, behind = ("{% generation %}", "{% endgeneration %}") if marks else ("", "")
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + f"{before}{answer}<|im_end|>{behind}\n"
        + "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}<|im_start|>assistant\n"
        + opening.replace("\\n", "\n")
        + "{% endif %}"
    )


def tokenizer_of(source: str, **options):
    tokenizer = byte_pairs(["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    tokenizer.chat_template = source
    return set_text(tokenizer, TextSettings(options))


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields) -> dict:
    return {"role": "assistant", "content": text, **fields}


def samples_of(tokenizer, kind: str = "demonstrations", **columns) -> list:
    return list(make_example(read_row("f line 3", columns, kind, "auto"), tokenizer, as_chat=False).samples)


def refusal(use) -> str:
    with pytest.raises(ConfigError) as caught:
        use()
    [line] = str(caught.value).splitlines()
    return line


# what an answer is asked with


ASKED, OTHER, ANSWER = [user("ask"), assistant("first"), user("more")], assistant("no"), assistant("hello")
ROWS = {
    "messages": ("demonstrations", {"messages": [*ASKED, ANSWER]}),
    "prompt and completion": ("demonstrations", {"prompt": ASKED, "completion": [ANSWER]}),
    "one turn": ("demonstrations", {"messages": [user("ask"), ANSWER]}),
    "pair": ("pairs", {"prompt": ASKED, "chosen": [ANSWER], "rejected": [OTHER]}),
    "pair of whole conversations": ("pairs", {"chosen": [*ASKED, ANSWER], "rejected": [*ASKED, OTHER]}),
    "label": ("labels", {"prompt": ASKED, "completion": [ANSWER], "label": True}),
}
LAST = (
    "{% if loop.last and enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
WRITES = {  # how a template writes what its option opens an answer with, and whether it can be trained
    "nowhere else": ("{{ m.content }}", False),
    "before the last answer": (LAST + "{{ m.content }}", True),
    "before every answer": (LAST.replace("loop.last and ", "") + "{{ m.content }}", True),
}


@pytest.mark.parametrize("marks", [False, True], ids=["cut", "marks"])
@pytest.mark.parametrize("own", [False, True], ids=["the run's option", "the row's option"])
@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("row", ROWS)
def test_the_last_answer_is_trained_behind_what_the_model_is_asked_with(row, writes, own, marks):
    kind, columns = ROWS[row]
    answer, is_trained = WRITES[writes]
    option = {"enable_thinking": False}
    tokenizer = tokenizer_of(template(answer=answer, opening=OPENING, marks=marks), **({} if own else option))
    columns = columns | ({"chat_template_kwargs": option} if own else {})
    view = with_options(tokenizer, option if own else {})
    asked = [user("ask")] if row == "one turn" else ASKED
    prompt = encode_messages(view, asked).tolist()
    assert tokenizer.decode(prompt).endswith(NO_THOUGHT)
    if not is_trained:
        line = refusal(lambda: samples_of(tokenizer, kind, **columns))
        assert line.startswith("f line 3: ") and repr(NO_THOUGHT)[1:-1] in line and "chat_template_kwargs" in line
        assert "asks for an answer with" in refusal(lambda: encode_answer(view, "hello", is_chat=True))
        return
    for sample, said in zip(samples_of(tokenizer, kind, **columns), ("hello", "no"), strict=False):
        assert sample.tokens[: len(prompt)].tolist() == prompt
        assert sample.tokens[len(prompt) :].tolist() == encode_answer(view, said, is_chat=True).tolist()
        assert (sample.provenance[len(prompt) :] == Provenance.MODEL).all()
        opening = len(tokenizer.encode(NO_THOUGHT, add_special_tokens=False))
        assert (sample.provenance[len(prompt) - opening : len(prompt)] == Provenance.TEMPLATE).all()


THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
FORGETS = {
    "reasoning_content": "{% if loop.last %}" + THOUGHT + "{% endif %}{{ m.content }}",
    "content": THOUGHT + "{{ m.content if loop.last else m.content[:2] }}",
}


@pytest.mark.parametrize("marks", [False, True], ids=["cut", "marks"])
@pytest.mark.parametrize("field", FORGETS)
def test_what_an_earlier_answer_says_is_trained_or_refused(field, marks):
    tokenizer = tokenizer_of(template(answer=FORGETS[field], marks=marks))
    first, last = (assistant(f"answer {n}", reasoning_content=f"thought {n}") for n in range(2))
    rows = [
        ("demonstrations", {"messages": [user("ask"), first, user("more"), last]}),
        ("demonstrations", {"prompt": [user("ask")], "completion": [first, user("more"), last]}),
        ("pairs", {"prompt": [user("ask")], "chosen": [first, user("more"), last], "rejected": [last]}),
    ]
    for kind, columns in rows:
        assert f"leaves out {field!r}" in refusal(
            lambda kind=kind, columns=columns: samples_of(tokenizer, kind, **columns)
        )
    [sample] = samples_of(tokenizer, prompt=[user("ask"), first, user("more")], completion=[last])
    text = tokenizer.decode(sample.tokens[sample.provenance == Provenance.MODEL])
    assert text == "<think>thought 1</think>answer 1<|im_end|>"
