"""Shapes of rows in public data sets become columns of ours. Pure.

    prompts          prompt | question | messages, and answer; of MATH problem, of OpenRLHF input
    verl             prompt (a list of messages), reward_model.ground_truth
    Tulu, NeMo-RL    messages, ground_truth; messages that end with the answer, task_name
    demonstrations   question, answer (GSM8K, verifiers); problem, solution (MATH); input, output (OpenRLHF); ...
    Alpaca, Dolly    instruction, and what input or context adds to it, are one text; output or response
    ShareGPT         conversations, by from (human, gpt) and value
    pairs, labels    of OpenRLHF with input; a prompt as text before conversations; of NeMo-RL context, completions

A row that can be read in two ways is a ConfigError that names both. What columns hold is checked by whoever reads them.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.data.rows.column_names import Columns, at
from titan_rl.data.rows.row_fields import names, shown, written
from titan_rl.data.rows.splits import key

SOURCES = ("data_source", "task_name", "dataset")
"""Columns that say which set a row is of: verl's, NeMo-RL's, Tulu's."""
_ANSWERS = {
    "prompt": ("answer", "reward_model.ground_truth", "ground_truth"),
    "question": ("answer", "reward_model.ground_truth", "ground_truth"),
    "messages": ("answer", "reward_model.ground_truth", "ground_truth"),
    "problem": ("answer", "ground_truth"),
    "input": ("answer", "label"),
    "instruction": ("answer", "label"),
}
"""What asks, by the column's name, and where its expected answer may be."""
_WORKED = {
    "prompt": ("solution", "completion"),
    "question": ("solution",),
    "problem": ("solution",),
    "input": ("output",),
    "instruction": ("output",),
}
"""Where a worked answer may be, which is the expected one if there is no other."""
_HASHES = "####"
_NUMBER = re.compile(r"-?\$?[0-9][0-9,]*(\.[0-9]+)?\.?")
_WITH_COMMAS = re.compile(r"-?\$?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True)
class Question:
    """Row of a prompt."""

    column: str
    """Column that asks: of these ``messages`` is a list, and all others are text."""
    columns: Columns
    """All of the row's, with ``messages``, ``question`` and ``answer`` of ours where another column has them."""
    answer: Any
    """Expected answer; None: there is none."""
    worked: str = ""
    """Answer with its derivation, where the row has one."""


def as_question(place: str, columns: Columns, mapped: Collection[str], section: str) -> Question:
    """Row of a prompt in any public shape.

    ``mapped``: columns that the user named, which count before all others. Errors: ConfigError.
    """
    column = _asking(place, columns, mapped, section)
    asked = columns[column]
    answer, worked = _answers(place, columns, column, mapped, section)
    if isinstance(asked, list):  # verl, TRL; OpenRLHF's input
        column, columns = "messages", columns | {"messages": asked}
    elif column == "instruction":
        column, columns = "question", columns | {"question": _instructed(columns)}
    of_nemo_rl = column == "messages" and at(columns, "task_name") is not None
    if of_nemo_rl and answer is None and "answer" not in mapped:
        asked, answer = _without_answer(columns["messages"])
        columns = columns | {"messages": asked}
    if columns.get("answer") is None and answer is not None:
        columns = columns | {"answer": answer}
    final = _final(answer)
    return Question(column, columns, final, worked or (str(answer) if final != answer else ""))


def _asking(place: str, columns: Columns, mapped: Collection[str], section: str) -> str:
    candidates = [name for name in _ANSWERS if name in mapped] or list(_ANSWERS)
    present = _without_alpaca([name for name in candidates if columns.get(name) is not None])
    if not present:
        raise ConfigError(
            f"{place}: no 'prompt', 'question' or 'messages'; {names(columns, list(_ANSWERS))}; name the column that "
            f"asks: {section}.columns = {{ question = ... }}"
        )
    if len(present) > 1:
        raise ConfigError(
            f"{place}: {' and '.join(map(repr, present))}: keep one of them, or say which is meant: "
            f"{section}.columns = {{ {_ours(present[0])} = '{present[0]}' }}"
        )
    return present[0]


def _without_alpaca(present: list[str]) -> list[str]:
    """Columns that ask: an instruction is one of them beside its input alone, and asks for both."""
    others = [name for name in present if name != "instruction"]
    return ["instruction"] if "instruction" in present and set(others) <= {"input"} else others


def _instructed(columns: Columns, added: str = "input") -> Any:
    """Instruction, and what is added to it: Alpaca's ``input``, Dolly's ``context``."""
    instruction, more = columns["instruction"], columns.get(added)
    return f"{instruction}\n\n{more}" if isinstance(more, str) and more.strip() else instruction


def _ours(name: str) -> str:
    return name if name in ("prompt", "question", "messages") else "question"


def _answers(place: str, columns: Columns, column: str, mapped: Collection[str], section: str) -> tuple[Any, str]:
    """Expected and worked answer. Errors: ConfigError for two expected ones that differ."""
    worked = next((text for name in _WORKED.get(column, ()) if isinstance(text := columns.get(name), str)), "")
    if "answer" in mapped:
        return columns.get("answer"), worked
    present = [(name, value) for name in _ANSWERS[column] if (value := at(columns, name)) is not None]
    readable = [(name, value) for name, value in present if name == "answer" or _is_answer(value)]
    if len({_as_text(value) for _, value in readable}) > 1:
        (first, _), (second, _) = readable[:2]
        raise ConfigError(
            f"{place}: {first!r} and {second!r} are different answers: say which is meant: "
            f"{section}.columns = {{ answer = '{first}' }}"
        )
    return (readable[0][1] if readable else worked or None), worked


def _is_answer(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _as_text(value: Any) -> str:
    try:
        return written(value) if isinstance(value, int | float) else str(_final(value)).strip()
    except ValueError:
        return str(value)


def _without_answer(messages: Any) -> tuple[Any, Any]:
    """Messages before the last, and its text, if it is the assistant's."""
    last = messages[-1] if isinstance(messages, list) and len(messages) > 1 else None
    if isinstance(last, dict) and last.get("role") == "assistant" and isinstance(last.get("content"), str):
        return messages[:-1], last["content"]
    return messages, None


def _final(answer: Any) -> Any:
    """Number behind ``####`` in the last line, as GSM8K writes it; else the answer itself."""
    last = answer.rstrip().rpartition("\n")[2].strip() if isinstance(answer, str) else ""
    final = last.removeprefix(_HASHES).strip()
    if not last.startswith(_HASHES) or not _NUMBER.fullmatch(final):
        return answer
    return final.replace(",", "") if _WITH_COMMAS.fullmatch(final) else final


def source_of(columns: Columns) -> str | None:
    """Name of the set that a row is of; None without."""
    return next((value for name in SOURCES if isinstance(value := columns.get(name), str)), None)


_USUAL_REWARDS = {
    "gsm8k": ("openai/gsm8k", "gsm8k"),
    "math": (
        *("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_dapo", "MATH"),
        *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc"),
        *("numina_cn_k12", "numina_olympiads"),
    ),
}


def usual_reward(set_name: str) -> str | None:
    """Reward that a public set is scored by (verl's ``default_compute_score``, Tulu's verifiers); None: unknown."""
    if set_name.startswith("aime"):
        return "math"
    return next((reward for reward, names in _USUAL_REWARDS.items() if set_name in names), None)


# rows to learn from


@dataclass(frozen=True)
class Shape:
    """Columns that make a row one of a public kind."""

    name: str
    needs: tuple[str, ...]
    become: Callable[[Columns], Columns]
    """Columns of ours."""
    unless: tuple[str, ...] = ()
    """Columns with which the row is of another kind."""

    def fits(self, columns: Columns) -> bool:
        has = [at(columns, name) is not None for name in self.needs]
        return all(has) and not any(at(columns, name) is not None for name in self.unless)


def _pick(**paths: str) -> Callable[[Columns], Columns]:
    return lambda columns: {ours: at(columns, path) for ours, path in paths.items()}


def _messages(columns: Columns) -> Columns:
    """Of Tulu's verifiable rewards the truth is the answer."""
    conversation, truth = columns["messages"], columns.get("ground_truth")
    last = conversation[-1] if isinstance(conversation, list) and conversation else None
    if isinstance(truth, str) and isinstance(last, dict) and last.get("role") == "user":
        return {"messages": [*conversation, {"role": "assistant", "content": truth}]}
    return {}


def _verl(columns: Columns) -> Columns:
    """The worked answer of ``extra_info`` where it is text, else the truth."""
    worked = at(columns, "extra_info.answer")
    answer = worked if isinstance(worked, str) and worked.strip() else at(columns, "reward_model.ground_truth")
    is_chat = isinstance(columns["prompt"], list) and isinstance(answer, str)
    return {"completion": [{"role": "assistant", "content": answer}] if is_chat else answer}


def _alpaca(columns: Columns) -> Columns:
    return {"prompt": _instructed(columns), "completion": columns["output"]}


def _dolly(columns: Columns) -> Columns:
    return {"prompt": _instructed(columns, "context"), "completion": columns["response"]}


def _share_gpt(columns: Columns) -> Columns:
    said = columns["conversations"]
    if not _is_chat(said) or not all("from" in each and "value" in each for each in said):
        return {"messages": said}
    return {
        "messages": [{"role": _SPEAKERS.get(each["from"], each["from"]), "content": each["value"]} for each in said]
    }


def _responded(prompt: str, completion: str) -> Callable[[Columns], Columns]:
    return lambda columns: (
        {"prompt": columns[prompt]} | _answered({"prompt": columns[prompt], "completion": columns[completion]})
    )


def _with_prompt(place: str, columns: Columns, mapped: Collection[str]) -> Columns:
    """Row of an answer, or of a pair, with its prompt. Errors: ConfigError for columns that ask differently."""
    asking = [
        name
        for name in ("prompt", "question", "problem", "query", "input", "instruction")
        if columns.get(name) not in (None, "")
    ]
    if "prompt" in mapped or not (asking := _without_alpaca(asking)):
        return columns
    first = asking[0]
    other = next((name for name in asking if columns[name] != columns[first]), None)
    if other:
        raise ConfigError(
            f"{place}: {first!r} and {other!r}: keep one of them, or say which is meant: data.columns = "
            f"{{ prompt = {first!r} }}"
        )
    return columns | {"prompt": _instructed(columns) if first == "instruction" else columns[first]}


def _pair(columns: Columns) -> Columns:
    """A prompt as text is a user's message in both conversations, or the one that they answer. Errors: ConfigError."""
    prompt, conversations = columns.get("prompt"), [columns["chosen"], columns["rejected"]]
    if not isinstance(prompt, str) or not all(_is_chat(each) for each in conversations):
        return {}
    if all(any(_asks(message, prompt) for message in each) for each in conversations):
        return {"prompt": None}
    if all(each[0].get("role") == "assistant" for each in conversations):
        return {"prompt": [{"role": "user", "content": prompt}]}
    raise ConfigError(
        f"no user message of both 'chosen' and 'rejected' is the prompt {shown(prompt)}: leave that column out, or "
        f"write it as the messages before both"
    )


def _asks(message: Columns, prompt: str) -> bool:
    said = message.get("content")
    return message.get("role") == "user" and isinstance(said, str) and key(said) == key(prompt)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _ranked(columns: Columns) -> Columns:
    """NeMo-RL's pair: two completions, of which the one of the lower rank is chosen. Errors: ConfigError."""
    both = columns["completions"]
    if not _is_chat(both) or len(both) != 2:
        return {}
    ranks = [each.get("rank") for each in both]
    if not all(map(_is_number, ranks)) or ranks[0] == ranks[1]:
        said = " and ".join(map(shown, ranks))
        raise ConfigError(f"the ranks of 'completions' are {said}: give two different numbers, the better one's lower")
    chosen, rejected = sorted(both, key=lambda each: each["rank"])
    return {"prompt": columns["context"], "chosen": chosen.get("completion"), "rejected": rejected.get("completion")}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _number_as_text(shape: Callable[[Columns], Columns]) -> Callable[[Columns], Columns]:
    """A number as a completion is written out."""

    def become(columns: Columns) -> Columns:
        ours = shape(columns)
        return ours | {"completion": _answer_as_text(ours["completion"])}

    return become


def _answer_as_text(answer: Any) -> Any:
    try:
        return written(answer) if _is_answer(answer) and answer != str(answer) else answer
    except ValueError:
        return answer


def _question(prompt: str, completion: str) -> Callable[[Columns], Columns]:
    return _number_as_text(_pick(prompt=prompt, completion=completion))


_SPEAKERS = {"human": "user", "gpt": "assistant"}
_RESPONDED = [
    Shape("", (prompt, completion), _responded(prompt, completion), ("answer", "solution", "output", "reward_model"))
    for prompt, completion in product(("prompt", "question", "problem", "query"), ("completion", "response"))
    if (prompt, completion) != ("prompt", "completion")
]
"""Of no set in particular: a column that asks, and one that answers."""

_SHAPES: dict[str, Sequence[Shape]] = {
    "demonstrations": (
        Shape("", ("messages",), _messages),
        Shape("", ("prompt", "completion"), _pick()),
        Shape("", ("text",), _pick()),
        Shape("verl", ("prompt", "reward_model.ground_truth"), _number_as_text(_verl), ("completion",)),
        Shape("GSM8K or verifiers", ("question", "answer"), _question("question", "answer")),
        Shape("MATH", ("problem", "solution"), _question("problem", "solution")),
        Shape("MATH", ("problem", "answer"), _question("problem", "answer"), ("solution",)),
        Shape("OpenRLHF", ("input", "output"), _question("input", "output"), ("instruction",)),
        Shape("OpenRLHF", ("input", "label"), _question("input", "label"), ("instruction", "output")),
        Shape("Alpaca", ("instruction", "output"), _alpaca),
        Shape("Dolly", ("instruction", "response"), _dolly, ("output",)),
        Shape("ShareGPT", ("conversations",), _share_gpt, ("messages",)),
        *_RESPONDED,
    ),
    "pairs": (
        Shape("", ("chosen", "rejected"), _pair),
        Shape("NeMo-RL", ("context", "completions"), _ranked),
    ),
    "labels": (
        Shape("", ("prompt", "completion", "label"), _pick()),
        Shape("OpenRLHF", ("input", "output", "label"), _pick(prompt="input", completion="output"), ("instruction",)),
        Shape("GSM8K or verifiers", ("question", "answer", "label"), _pick(prompt="question", completion="answer")),
    ),
}
"""By what an algorithm is trained on (row_shapes.py)."""
_OURS = ("messages", "prompt", "completion", "text", "chosen", "rejected")
"""Names of ours that shapes give."""


def as_example(place: str, columns: Columns, kind: str, mapped: Collection[str]) -> Columns:
    """Row to learn from, in any public shape, with columns of ours; one in none of them as it is.

    ``mapped``: columns that the user named, which count before all others. Errors: ConfigError for two shapes.
    """
    if kind == "pairs" and columns.get("chosen") is not None:
        columns = _with_prompt(place, columns, mapped)
    fitting = [shape for shape in _SHAPES[kind] if shape.fits(columns)]
    named = [shape for shape in fitting if set(shape.needs) & set(mapped)] or fitting
    readings = [_as_ours(place, columns, shape, fitting, mapped) for shape in named]
    second = next((shape for shape, reading in zip(named, readings, strict=True) if reading != readings[0]), None)
    if second:
        first = named[0]
        raise ConfigError(
            f"{place}: {_said(first)}, and {_said(second)}: set data.format to say which is meant, or data.columns, as "
            f"in {{ {', '.join(f'{ours} = {path!r}' for ours, path in _mend(second))} }}"
        )
    if readings:
        others = {*_OURS, *(name for shape in fitting for name in shape.needs)} - set(named[0].needs)
        columns = {name: value for name, value in columns.items() if name not in others} | readings[0]
    if "completion" not in mapped:
        return columns
    columns = _with_prompt(place, columns, mapped)
    return columns | _answered(columns)


def _as_ours(place: str, columns: Columns, shape: Shape, fitting: Sequence[Shape], mapped: Collection[str]) -> Columns:
    """Columns of ours as a shape has them, without those of other shapes that fit; mapped ones stay as they are."""
    try:
        made = shape.become(columns)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    if shape.name:
        made = {name: value for name, value in made.items() if name not in mapped}
    others = {name for other in fitting for name in other.needs}.difference(shape.needs, mapped)
    ours = {name: columns.get(name) for name in _OURS if name not in others} | made
    return {name: value for name, value in ours.items() if value is not None}


def _answered(columns: Columns) -> Columns:
    """A mapped completion: a number is written out, and text after messages is the assistant's."""
    completion = _answer_as_text(columns.get("completion"))
    is_chat = isinstance(columns.get("prompt"), list) and isinstance(completion, str)
    return {"completion": [{"role": "assistant", "content": completion}] if is_chat else completion}


def _said(shape: Shape) -> str:
    columns = " and ".join(map(repr, shape.needs))
    return f"{columns} ({shape.name})" if shape.name else columns


def _mend(shape: Shape) -> list[tuple[str, str]]:
    """Mapping that would choose a shape."""
    ours = {"question": "prompt", "problem": "prompt", "input": "prompt", "instruction": "prompt"}
    ours |= {"answer": "completion", "solution": "completion", "output": "completion", "label": "completion"}
    ours |= {"reward_model.ground_truth": "completion", "context": "prompt"}
    return [(ours.get(path, path), path) for path in shape.needs]
