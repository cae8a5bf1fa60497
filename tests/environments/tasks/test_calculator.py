"""The calculator's task: what is asked, what the tool does, what is paid, and that a right conversation is possible."""

import asyncio

import pytest

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Provenance
from titan_rl.environments.interfaces.tool import ToolError
from titan_rl.environments.prompts.stream import PromptStream, held_out_prompts
from titan_rl.environments.registry import make_task
from titan_rl.environments.rollout.demonstrations import demonstrate, worked_answers
from titan_rl.environments.tasks.calculator import calculate
from titan_rl.models.builtin.tokenizer import character_tokenizer


def task_of(style: str = "compact", **options):
    return make_task(TaskConfig(name="calculator", style=style, options=options))


@pytest.mark.parametrize(
    ("text", "wanted"), [("12*34", "408"), (" 7 - 9 ", "-2"), ("-2*-3", "6"), ("9*9" + "0" * 39, "81" + "0" * 39)]
)
def test_one_operation_at_a_time(text, wanted):
    assert calculate(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "0", "nan", "1+2+3", "1/2", "2**9", "9" * 41 + "*2", "__import__('os')", "1e9*2", "٣*٤", "(1)*2"]
)
def test_all_else_it_refuses(text):
    with pytest.raises(ToolError):
        calculate(text)


@pytest.mark.parametrize("style", ["compact", "chat"])
@pytest.mark.parametrize("operands", [2, 3, 5])
def test_its_worked_examples_come_true(style, operands):
    """Each call is answered as the next answer wants it, and all earn the full reward."""
    task = task_of(style, operands=operands, digits=2, operators="+-*", credit_for_calls=0.4)
    for prompt in [*held_out_prompts(task, 20), next(PromptStream(task, 1))]:
        answers, environment = worked_answers(task, prompt), task.environment(prompt)
        results = []
        for answer in answers[:-1]:
            [message] = asyncio.run(environment.step(answer)).messages
            results.append(message["content"].strip("=\n"))
        assert results[-1] == answers[-1] == prompt.answer and len(results) == operands - 1
        assert str(eval(prompt.text.removesuffix("="))) == prompt.answer  # which is ours, and not a model's
        assert not asyncio.run(environment.step(answers[-1])).messages
        parts = task.score(prompt, answers)
        assert parts["exact"] + sum(parts["calls"]) == pytest.approx(1.0) and len(parts["calls"]) == len(answers)


def test_a_worked_example_is_a_conversation_of_which_the_models_words_are_learned():
    task, tokenizer = task_of(), character_tokenizer()
    prompt = next(PromptStream(task, 1))
    rollout = asyncio.run(demonstrate(prompt, task, tokenizer, 60))
    [call, answer] = worked_answers(task, prompt)
    assert tokenizer.decode(rollout.tokens) == f"{prompt.text}{call}<eos>={answer}\n{answer}<eos>"
    learned = tokenizer.decode(rollout.tokens[rollout.provenance == Provenance.MODEL])
    assert learned == f"{call}<eos>{answer}<eos>" and [turn.stop_reason for turn in rollout.turns] == ["stop", "stop"]


def test_a_share_of_the_worked_examples_calls():
    task = task_of(digits=2, shown_calls=0.25)
    shown = [worked_answers(task, prompt) for prompt in held_out_prompts(task, 400)]
    assert 70 < sum(len(answers) == 2 for answers in shown) < 130
    assert shown == [worked_answers(task, prompt) for prompt in held_out_prompts(task, 400)]


@pytest.mark.parametrize("answer", ["", "0", "nan", "408 or 409", "calc(12*34)", " ".join(map(str, range(10000)))])
def test_it_pays_for_the_number_alone(answer):
    task = task_of(digits=2)
    prompt = next(PromptStream(task, 1))
    for text in (answer, prompt.text):
        assert task.score(prompt, [text]) == {"exact": 0.0}
    assert task.score(prompt, [prompt.answer + "\n"]) == {"exact": 1.0}


def test_calls_are_paid_in_their_turn_and_only_the_right_ones():
    task = task_of(digits=2, operands=3, credit_for_calls=0.5)
    prompt = next(PromptStream(task, 1))
    first, second, last = worked_answers(task, prompt)
    assert task.score(prompt, [first, "calc(1+1)", last]) == {"exact": 0.5, "calls": [0.25, 0, 0]}
    assert task.score(prompt, ["calc(1+1)", second, "7"]) == {"exact": 0.0, "calls": [0, 0.25, 0]}
    assert task.score(prompt, [last]) == {"exact": 0.5, "calls": [0]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(operators="/"), "task.options.operators = '/'"),
        (dict(operators=""), "task.options.operators = ''"),
        (dict(digits=0), "task.options.digits"),
        (dict(operand=2), "task.options.operand"),
    ],
)
def test_mistakes_are_one_line(options, words):
    with pytest.raises(ConfigError) as caught:
        task_of(**options)
    [line] = str(caught.value).splitlines()
    assert words in line


def test_there_is_no_family_of_its_name():
    with pytest.raises(ConfigError, match="of reasoning-gym families alone"):
        make_task(TaskConfig(name="calculator", scoring="exact"))
