"""Tool calls, reasoning, tools and a row's own options, from a row of data to tokens: as transformers renders them."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import SCHEMA
from model_texts import MODELS, byte_pairs

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import DataConfig, TaskConfig
from titan_rl.data.rows.datasets import read_files
from titan_rl.data.rows.examples import make_example
from titan_rl.data.rows.row_messages import messages, template_options, tools, without_filled
from titan_rl.data.rows.row_shapes import read_row
from titan_rl.data.text.checks import TextUse, check_chat
from titan_rl.data.text.message_forms import call_form
from titan_rl.data.text.messages import with_images
from titan_rl.data.text.rendering import with_options
from titan_rl.data.text.tokenizer import TextSettings, set_text, settings_of
from titan_rl.data.text.turns import encode_messages
from titan_rl.data.types import Provenance
from titan_rl.environments.prompts.jsonl_task import RowsTask
from titan_rl.environments.rollout.group import encode_prompt

HEAD = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
)
THOUGHT = (  # an answer that others follow has no thoughts without reasoning; one before the last question never
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
)
CALLS = (
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
TAIL = (
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN_3 = HEAD + THOUGHT + CALLS + TAIL
AS_TEXT = CALLS.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
BARE = CALLS.replace("c.function.", "c.")
BESIDE_NONE = "{% if m.content is none %}" + CALLS + "{% endif %}"
FORMS = {"object": CALLS, "text": AS_TEXT, "bare": BARE, "beside none": BESIDE_NONE}

CALL = {"id": "abcdef123", "type": "function", "function": {"name": "shout", "arguments": {"a": "ho", "n": 1}}}
USER, CALLING = {"role": "user", "content": "ask"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "again", "name": "shout", "tool_call_id": "abcdef123"}
ANSWER = {"role": "assistant", "content": "hello"}
CALLED = [USER, CALLING, RESULT, ANSWER]
THINKING = ANSWER | {"reasoning_content": "no, ho"}


def tokenizer_of(template: str = QWEN_3, **options):
    tokenizer = byte_pairs(["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return set_text(tokenizer, TextSettings(options))


def by_transformers(tokenizer, conversation, **options) -> list[int]:
    text = tokenizer.apply_chat_template(conversation, tokenize=False, **options)
    return tokenizer.encode(text, add_special_tokens=False)


def sample_of(tokenizer, columns, kind="demonstrations"):
    return make_example(read_row("f line 3", columns, kind, "auto"), tokenizer, as_chat=False).samples[0]


def learned(tokenizer, sample) -> str:
    return tokenizer.decode(sample.tokens[sample.provenance == Provenance.MODEL])


def refusal(use) -> str:
    with pytest.raises(ConfigError) as caught:
        use()
    [line] = str(caught.value).splitlines()
    return line


# rows


@pytest.mark.parametrize("own", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("run", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("given", [None, [SCHEMA]], ids=["no tools", "tools"])
@pytest.mark.parametrize("conversation", [[USER, ANSWER], [USER, THINKING], CALLED, [USER, ANSWER, USER, THINKING]])
def test_tokens_are_those_of_apply_chat_template_with_the_same_arguments(conversation, given, run, own):
    tokenizer, options = tokenizer_of(**run), run | own
    columns = {"tools": given, "chat_template_kwargs": own}
    asked = [USER, *conversation[1:-1], USER]
    prompt = read_row("x", {**columns, "prompt": asked, "completion": [ANSWER]}, "demonstrations", "auto").prompt
    view = with_options(tokenizer, own)
    wanted = by_transformers(tokenizer, asked, tools=given, add_generation_prompt=True, **options)
    assert encode_messages(view, prompt, given or ()).tolist() == wanted
    if conversation[-1] is THINKING and options.get("enable_thinking") is False:
        line = refusal(lambda: sample_of(tokenizer, {**columns, "messages": conversation}))
        assert "asks for the last answer with" in line and "without thinking" in line
        return
    sample = sample_of(tokenizer, {**columns, "messages": conversation})
    whole = by_transformers(tokenizer, conversation, tools=given, **options)
    assert sample.tokens.tolist() == whole[: len(sample.tokens)] and len(whole) - len(sample.tokens) <= 1
    pair = {
        **columns,
        "prompt": conversation[:-1],
        "chosen": conversation[-1:],
        "rejected": [{**ANSWER, "content": "no"}],
    }
    assert sample_of(tokenizer, pair, "pairs").tokens.tolist() == whole[: len(sample.tokens)]


@pytest.mark.parametrize("beside", [{"tools": [SCHEMA]}, {"chat_template_kwargs": {"enable_thinking": False}}])
@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"prompt": "a", "completion": "b"}, "demonstrations"),
        ({"text": "a b"}, "demonstrations"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "pairs"),
    ],
)
def test_what_a_template_reads_is_refused_beside_text_without_one(columns, kind, beside):
    line = refusal(lambda: sample_of(tokenizer_of(), columns | beside, kind))
    assert line.startswith(f"f line 3: {next(iter(beside))!r} needs data.chat = true")
    row = read_row("f line 3", {"prompt": "a", "completion": "b"} | beside, "demonstrations", "auto")
    assert len(make_example(row, tokenizer_of(), as_chat=True).samples) == 1


def test_calls_are_learned_and_results_are_not():
    tokenizer = tokenizer_of()
    text = '<tool_call>\n{"name": "shout", "arguments": {"a": "ho", "n": 1}}\n</tool_call><|im_end|>'
    sample = sample_of(tokenizer, {"messages": CALLED, "tools": [SCHEMA]})
    assert learned(tokenizer, sample) == f"{text}<think>\n\n</think>\n\nhello<|im_end|>"
    only = sample_of(tokenizer, {"prompt": CALLED[:3], "completion": [ANSWER], "tools": [SCHEMA]})
    assert learned(tokenizer, only) == "<think>\n\n</think>\n\nhello<|im_end|>"
    assert only.tokens.tolist() == sample.tokens.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_arguments_are_given_in_the_form_that_the_template_writes(form):
    tokenizer = tokenizer_of(HEAD + THOUGHT + FORMS[form] + TAIL)
    wanted = sample_of(tokenizer_of(), {"messages": CALLED}).tokens.tolist()
    as_text = CALL | {"function": {"name": "shout", "arguments": json.dumps(CALL["function"]["arguments"])}}
    for call in (CALL, as_text, {"name": "shout", "arguments": CALL["function"]["arguments"]}):
        for content in (None, ""):
            called = [USER, {"role": "assistant", "content": content, "tool_calls": [call]}, RESULT, ANSWER]
            assert sample_of(tokenizer, {"messages": called}).tokens.tolist() == wanted


@pytest.mark.parametrize("name", MODELS)
def test_what_a_template_does_not_write_is_refused_by_its_line(name):
    tokenizer = MODELS[name].tokenizer()
    assert call_form(tokenizer, False) is None
    line = refusal(lambda: sample_of(tokenizer, {"messages": CALLED}))
    assert line.startswith("f line 3: ") and "tool_calls" in line and "model.chat_template.file" in line
    line = refusal(lambda: sample_of(tokenizer, {"messages": [USER, THINKING]}))
    assert line.startswith("f line 3: ") and "'reasoning_content'" in line


def test_reasoning_goes_by_the_templates_name_and_is_refused_where_it_would_be_lost():
    tokenizer = tokenizer_of()
    wanted = sample_of(tokenizer, {"messages": [USER, THINKING]}).tokens.tolist()
    for name in ("thinking", "reasoning"):
        assert sample_of(tokenizer, {"messages": [USER, ANSWER | {name: "no, ho"}]}).tokens.tolist() == wanted
    line = refusal(lambda: sample_of(tokenizer, {"messages": [USER, THINKING, USER, ANSWER]}))
    assert "leaves out 'reasoning_content'" in line and "a row for each answer" in line


def test_a_call_cannot_write_control_tokens():
    tokenizer = tokenizer_of()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for arguments in ({"a": "<|im_end|>"}, '{"a": "\\u003c|im_end|>"}', {"<|im_end|>": 1}):
        call = {"function": {"name": "shout", "arguments": arguments}}
        hostile = messages("x", "messages", [USER, {"role": "assistant", "tool_calls": [call]}, RESULT])
        plain = messages("x", "messages", [USER, CALLING, RESULT])
        counts = [np.count_nonzero(encode_messages(tokenizer, each) == end) for each in (hostile, plain)]
        assert counts[0] == counts[1]
        line = refusal(lambda hostile=hostile: sample_of(tokenizer, {"messages": [*hostile, ANSWER]}))
        assert "takes for more than text" in line


def test_text_parts_are_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "sk"}]
    assert messages("x", "messages", [{"role": "user", "content": parts}]) == [USER]


def test_images_stand_where_parts_or_marks_say_or_before_the_first_users_text():
    image, ask = {"type": "image"}, {"type": "text", "text": "ask"}
    rows = [{"role": "user", "content": [ask, image, ask]}], [{"role": "assistant", "content": [image]}]
    [shown] = messages("x", "messages", rows[0], has_images=True)
    with pytest.raises(ConfigError, match="a part of type 'image'"):
        messages("x", "messages", rows[1], has_images=True)
    assert shown["content"] == "ask<image>ask"
    assert with_images([shown], 1) == [{"role": "user", "content": [ask, image, ask]}]
    system = {"role": "system", "content": "be"}
    assert with_images([system, USER], 2) == [system, {"role": "user", "content": [image, image, ask]}]
    assert with_images([shown], 0) == [shown]
    with pytest.raises(ConfigError, match="<image> 1 times, and there are 2 images"):
        with_images([shown], 2)
    with pytest.raises(ConfigError, match="a user's message"):
        with_images([system], 1)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image"}]}, "a part of type 'image'"),
        ({"role": "user", "content": None}, "no content"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "belongs to the assistant's"),
        ({"role": "assistant", "content": "a", "weight": 1}, "'weight', which no message has"),
        ({"role": "user", "content": "a", "": 1}, "has '', which no message has"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}, "not JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}, "an object"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "name": "a"}]}, "of type"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "{function: {name, arguments}}"),
        (THINKING | {"thinking": "other"}, "keep one of them"),
    ],
)
def test_a_message_that_is_none_is_refused_by_its_number(message, words):
    line = refusal(lambda: messages("f line 3", "messages", [USER, message]))
    assert line.startswith("f line 3: message 2") and words in line


def test_tools_and_options_are_taken_as_json_too():
    assert tools("x", {"tools": json.dumps([SCHEMA])}) == tools("x", {"tools": [json.dumps(SCHEMA)]}) == [SCHEMA]
    assert template_options("x", {"chat_template_kwargs": '{"a": false, "b": null}'}) == {"a": False}
    for column in ("word", {"a": 1}, [1], [{"a": 1}]):
        assert refusal(lambda column=column: tools("f line 3", {"tools": column})).startswith("f line 3: ")
    assert "f line 3" in refusal(lambda: template_options("f line 3", {"chat_template_kwargs": [1]}))


def test_nulls_that_arrow_adds_to_calls_are_left_out():
    struct = {"role": "assistant", "content": None, "tool_calls": [CALL | {"function": {"name": "a", "b": None}}]}
    cleaned = without_filled({"messages": [struct], "nested": {"messages": [struct]}})
    assert cleaned["messages"] == cleaned["nested"]["messages"]
    assert cleaned["messages"][0]["tool_calls"][0]["function"] == {"name": "a"}


# options


def test_an_option_that_no_template_reads_is_refused_with_the_nearest():
    row = {"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinkin": False}}
    line = refusal(lambda: sample_of(tokenizer_of(), row))
    assert line.startswith("f line 3: chat_template_kwargs.enable_thinkin") and "'enable_thinking'?" in line
    for name in ("tokenize", "chat_template", "add_generation_prompt"):
        line = refusal(lambda name=name: with_options(tokenizer_of(), {name: "x"}))
        assert "is set by the run" in line
    line = refusal(lambda: check_chat(tokenizer_of(enable_thinkin=False), TextUse()))
    assert "model.chat_template.options.enable_thinkin" in line and "'enable_thinking'?" in line


def test_a_template_of_ones_own_is_read_beside_the_toml_and_written_in_its_place(tmp_path):
    (tmp_path / "own.jinja").write_text(QWEN_3)
    toml = tmp_path / "run.toml"
    toml.write_text('[model.chat_template]\nfile = "own.jinja"\noptions = { enable_thinking = false }\n')
    config = load_config(toml, with_models=False)
    assert config.model.chat_template.text == QWEN_3 and not config.model.chat_template.file
    tokenizer = set_text(MODELS["smollm2"].tokenizer(), settings_of(config))
    wanted = by_transformers(tokenizer_of(), [USER], add_generation_prompt=True, enable_thinking=False)
    assert len(encode_messages(tokenizer, [USER])) == len(wanted)
    assert tokenizer.decode(encode_messages(tokenizer, [USER])).endswith("</think>\n\n")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"file": "other.jinja"}, "there is no file"),
        ({"file": "empty.jinja"}, "holds no template"),
        ({"file": "empty.jinja", "text": "{{ messages }}"}, "both give the template: leave one out"),
        ({"fil": "a"}, "unknown key model.chat_template.fil: did you mean 'file'?"),
        ({"options": 1}, "model.chat_template.options = 1"),
    ],
)
def test_settings_of_a_template_that_cannot_be_are_one_line(tmp_path, table, words):
    (tmp_path / "empty.jinja").write_text("\n")
    tables = {"model": {"chat_template": table}, "run": {"plugin_path": [str(tmp_path)]}}
    assert words in refusal(lambda: load_config(None, tables, with_models=False))


# prompts


def test_a_prompts_row_has_its_tools_and_options(tmp_path):
    rows = [
        {"messages": CALLED[:3], "answer": "1", "tools": [SCHEMA], "chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": [USER], "answer": "1"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"file": "rows.jsonl", "held_out_file": "held.jsonl"}
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "else", "answer": "2"}))
    task = RowsTask(TaskConfig(name="jsonl", style="chat", options=options), [str(tmp_path)])
    tokenizer = tokenizer_of()
    encoded = {tuple(encode_prompt(task, tokenizer, task.prompt("train", 1, n)).tolist()) for n in range(2)}
    first = by_transformers(tokenizer, CALLED[:3], tools=[SCHEMA], add_generation_prompt=True, enable_thinking=False)
    assert encoded == {tuple(first), tuple(by_transformers(tokenizer, [USER], add_generation_prompt=True))}
    compact = RowsTask(TaskConfig(name="jsonl", options=options), [str(tmp_path)])
    assert "rows.jsonl line 1: 'messages' need task.style" in refusal(lambda: compact.prompt("train", 1, 0))


# rows as others write them


TEXT = {"type": "object", "properties": {"b": {"type": "string"}}}
OTHER = {"type": "function", "function": {"name": "add", "parameters": TEXT}}
OPTIONS = {"enable_thinking": False}
ASKING = {
    "verl": ({"prompt": CALLED[:3], "reward_model": {"style": "rule", "ground_truth": "1"}}, {}),
    "verl, its own places": (
        {"prompt": CALLED[:3], "reward_model": {"ground_truth": "1"}, "extra_info": {"tools": [SCHEMA, OTHER]}},
        {"tools": "extra_info.tools"},
    ),
    "trl": ({"prompt": CALLED[:3], "solution": "1"}, {}),
    "openrlhf": ({"input": CALLED[:3], "label": "1"}, {}),
}
LEARNED = {
    "trl": {"prompt": CALLED[:1], "completion": CALLED[1:]},
    "trl, messages": {"messages": CALLED},
    "verl": {"prompt": CALLED[:3], "reward_model": {"ground_truth": ANSWER["content"]}},
    "tulu": {"messages": [*CALLED, USER], "ground_truth": ANSWER["content"]},
}


def write_rows(folder, rows: list[dict]) -> list[str]:
    """The same rows as JSON lines and as Parquet, in which each row has all keys."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return ["rows.jsonl", "rows.parquet"]


@pytest.mark.parametrize("name", ASKING)
def test_prompts_of_public_shapes_have_their_tools_options_and_calls(tmp_path, name):
    row, columns = ASKING[name]
    beside = {"chat_template_kwargs": OPTIONS} | ({} if columns else {"tools": [SCHEMA, OTHER]})
    wanted = by_transformers(tokenizer_of(), CALLED[:3], tools=[SCHEMA, OTHER], add_generation_prompt=True, **OPTIONS)
    for file in write_rows(tmp_path, [row | beside, row | beside | {_asking(row): [USER]}]):
        options = {"file": file, "columns": columns}
        task = RowsTask(TaskConfig(name="jsonl", style="chat", options=options), [str(tmp_path)])
        prompts = task.every_prompt()
        assert encode_prompt(task, tokenizer_of(), prompts[0]).tolist() == wanted, file
        assert [prompt.answer for prompt in prompts] == ["1", "1"]
        json.dumps(prompts[0].entry)


def _asking(row: dict) -> str:
    return "input" if "input" in row else "prompt"


@pytest.mark.parametrize("name", LEARNED)
def test_demonstrations_of_public_shapes_have_their_tools_options_and_calls(tmp_path, name):
    row, beside = LEARNED[name], {"tools": [SCHEMA, OTHER], "chat_template_kwargs": OPTIONS}
    conversation = [*row["messages"], ANSWER] if name == "tulu" else CALLED
    whole = by_transformers(tokenizer_of(), conversation, tools=[SCHEMA, OTHER], **OPTIONS)
    (tmp_path / "held.jsonl").write_text('{"text": "else"}')
    for file in write_rows(tmp_path, [row | beside]):
        rows = read_files(DataConfig(file=file, held_out_file="held.jsonl"), "demonstrations", [str(tmp_path)])
        tokens = make_example(rows.train[0], tokenizer_of(), as_chat=False).samples[0].tokens.tolist()
        assert tokens == whole[: len(tokens)] and len(whole) - len(tokens) <= 1, file
