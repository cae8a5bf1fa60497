"""Calculator task: large sums, and a tool for one operation at a time.

An expression of ``operands`` numbers needs ``operands - 1`` calls, each of which takes the last one's result:

    (482*395)-77=    calc(482*395)  =190390    calc(190390-77)  =190313    190313

Without the tool a small model has nothing to go by, so what it earns it earns by calling, reading and copying.
"""

import random
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.sections.kinds import Style
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.seeds import is_held_out
from titan_rl.data.text.messages import Message, message
from titan_rl.data.types import Prompt
from titan_rl.environments.conversation.tool_calls import Call, read_calls
from titan_rl.environments.conversation.tools import ToolEnvironment
from titan_rl.environments.interfaces.task import RewardParts, Task
from titan_rl.environments.interfaces.tool import Tool, ToolError

_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
_EXPRESSION = re.compile(r"\s*(-?\d{1,40})\s*([-+*])\s*(-?\d{1,40})\s*", re.ASCII)


def calculate(expression: str) -> str:
    """Evaluate one operation.

    Errors: ToolError for anything but two whole numbers of up to 40 digits and one of ``+ - *``.
    """
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        raise ToolError("give two whole numbers and one of + - * between them, as in 12*34")
    return str(_OPERATIONS[match[2]](int(match[1]), int(match[3])))


CALCULATOR = Tool(
    name="calc",
    description="One operation on two whole numbers.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "such as 12*34"}},
        "required": ["expression"],
        "additionalProperties": False,
    },
    run=calculate,
)


@dataclass(kw_only=True)
class CalculatorOptions:
    """``[task.options]`` of the calculator."""

    operands: Annotated[int, Field(ge=2, le=8)] = 2
    """Numbers in an expression."""
    digits: Annotated[int, Field(ge=1, le=12)] = 3
    """Of each number."""
    operators: str = "*"
    """Those that an expression may have, of ``+-*``."""
    shown_calls: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the worked examples that call; the others give the answer at once, as if they knew it by heart."""
    credit_for_calls: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """How much of the reward the right calls earn, each in its own turn (``turn_grpo``); the rest is the answer's."""


class CalculatorTask(Task):
    """Endless task of expressions; one in five is held out, by a hash of its text. Errors: ConfigError."""

    ABOUT = "sums too large for a model's head, in several turns with a tool: task.options.operands, digits, operators"
    style: Style

    def __init__(self, task: TaskConfig):
        self.style, self.system_prompt = task.style, task.system_prompt
        self.options = build_section(CalculatorOptions, task.options, "task.options")
        if not self.options.operators or not set(self.options.operators) <= set(_OPERATIONS):
            raise ConfigError(f"task.options.operators = {self.options.operators!r}: take some of '+-*'")
        self.tools = [CALCULATOR.schema]

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        draw, options = random.Random(f"{stream} {seed} {index}"), self.options
        text, value, calls = "", 0, []
        for number in range(options.operands):
            operand = draw.randrange(10 ** (options.digits - 1), 10**options.digits)
            if not number:
                text, value = str(operand), operand
                continue
            operator = draw.choice(options.operators)
            calls.append(f"{value}{operator}{operand}")
            text = f"({text}){operator}{operand}" if number > 1 else f"{text}{operator}{operand}"
            value = _OPERATIONS[operator](value, operand)
        return Prompt(f"{stream}/{index:07d}", f"{text}=", str(value), {"calls": calls})

    def is_held_out(self, prompt: Prompt) -> bool:
        return is_held_out(prompt.text)

    def messages(self, prompt: Prompt) -> str | list[Message]:
        if self.style == "compact":
            return prompt.text
        question = f"What is {prompt.text.removesuffix('=')}? Let calc do each operation; then give the number alone."
        system = [message("system", self.system_prompt)] if self.system_prompt else []
        return [*system, message("user", question)]

    def demonstration(self, prompt: Prompt) -> list[str]:
        if random.Random(f"shown {prompt.text}").random() >= self.options.shown_calls:
            return [prompt.answer]
        return [self._written(expression) for expression in prompt.entry["calls"]] + [prompt.answer]

    def _written(self, expression: str) -> str:
        if self.style == "compact":
            return f"calc({expression})"
        return f'<tool_call>{{"name": "calc", "arguments": {{"expression": "{expression}"}}}}</tool_call>'

    def environment(self, prompt: Prompt) -> ToolEnvironment:
        return ToolEnvironment([CALCULATOR], self.style)

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        is_right, credit = float(answers[-1].strip() == prompt.answer), self.options.credit_for_calls
        if not credit:
            return {"exact": is_right}
        expected_calls = prompt.entry["calls"]
        credit_per_call = credit / len(expected_calls)
        paid = [
            credit_per_call * self._calls(answer, call) for answer, call in zip(answers, expected_calls, strict=False)
        ]
        return {"exact": (1 - credit) * is_right, "calls": paid + [0.0] * (len(answers) - len(paid))}

    def _calls(self, answer: str, expression: str) -> bool:
        """Whether the answer is this call, however it is spaced."""
        match read_calls(answer, self.style, {CALCULATOR.name: CALCULATOR}):
            case [Call(name=CALCULATOR.name, arguments={"expression": str(argument)})]:
                return "".join(argument.split()) == expression
        return False
