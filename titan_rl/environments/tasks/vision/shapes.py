"""Shapes and digits: a picture, and a question about the one thing that it shows.

    compact   <image>shape>            circle
    chat      <image> ... shape ...    <answer>circle</answer>

Things differ in place, size, color and brightness, so that no two pictures need be alike; one picture in five is held
out, by a hash. A constant answer earns the share of its commonest answer: a third of shapes, a quarter of colors, a
tenth of digits.
"""

import io
import random
import re
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.sections.kinds import Style
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.text.messages import Message, message
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.task import RewardParts, Task

SHAPES = ("circle", "square", "triangle")
COLORS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0)}
QUESTIONS = ("shape", "color", "digit")
_ASKED = {
    "shape": f"Which shape does the picture show: {', '.join(SHAPES)}?",
    "color": f"Which color has the thing in the picture: {', '.join(COLORS)}?",
    "digit": "Which digit does the picture show?",
}
_FORM = "Give the answer alone, within <answer> tags."
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(kw_only=True)
class ShapesOptions:
    """``[task.options]`` of shapes and digits."""

    size: Annotated[int, Field(ge=16, le=1024)] = 32
    """Pixels of a picture's side."""
    questions: list[str] = field(default_factory=lambda: list(QUESTIONS))
    """What is asked, one of these at a time."""


@dataclass(frozen=True)
class Scene:
    """What a picture shows."""

    thing: str
    """One of SHAPES, or a digit."""
    color: str
    center: tuple[int, int]
    radius: int
    brightness: int

    def __str__(self) -> str:
        x, y = self.center
        return f"{self.color} {self.thing} at {x}, {y} of {self.radius}, brightness {self.brightness}"

    def draw(self, size: int) -> bytes:
        """The picture, as PNG."""
        from PIL import Image, ImageDraw, ImageFont  # which no other task waits for

        image = Image.new("RGB", (size, size))
        pen, (x, y), radius = ImageDraw.Draw(image), self.center, self.radius
        red, green, blue = (self.brightness * part for part in COLORS[self.color])
        box = (x - radius, y - radius, x + radius, y + radius)
        if self.thing == "circle":
            pen.ellipse(box, fill=(red, green, blue))
        elif self.thing == "square":
            pen.rectangle(box, fill=(red, green, blue))
        elif self.thing == "triangle":
            corners = [(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)]
            pen.polygon(corners, fill=(red, green, blue))
        else:
            font = ImageFont.load_default(size=2.6 * radius)
            pen.text((x, y), self.thing, fill=(red, green, blue), font=font, anchor="mm")
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()


def _scene(draw: random.Random, question: str, size: int) -> Scene:
    is_digit = question == "digit" or question == "color" and draw.random() < 0.5
    radius = draw.randint(size // 5, size // 3)
    place = range(radius, size - radius)
    thing = str(draw.randrange(10)) if is_digit else draw.choice(SHAPES)
    return Scene(
        thing, draw.choice([*COLORS]), (draw.choice(place), draw.choice(place)), radius, draw.randint(128, 255)
    )


class ShapesTask(Task):
    """Endless task of pictures. Errors: ConfigError."""

    ABOUT = "pictures of a shape or a digit, for models that see: task.options.size, questions"
    style: Style

    def __init__(self, task: TaskConfig):
        self.style, self.system_prompt = task.style, task.system_prompt
        self.options = build_section(ShapesOptions, task.options, "task.options")
        if not self.options.questions or not set(self.options.questions) <= set(QUESTIONS):
            raise ConfigError(f"task.options.questions = {self.options.questions}: give some of {', '.join(QUESTIONS)}")

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        draw = random.Random(f"{stream} {seed} {index}")
        question = draw.choice(self.options.questions)
        scene = _scene(draw, question, self.options.size)
        answer = scene.color if question == "color" else scene.thing
        picture = scene.draw(self.options.size)
        return Prompt(
            f"{stream}/{index:07d}", f"{question}: {scene}", answer, {"question": question}, images=(picture,)
        )

    def messages(self, prompt: Prompt) -> str | list[Message]:
        question = prompt.entry["question"]
        if self.style == "compact":
            return f"{question}>"
        system = [message("system", self.system_prompt)] if self.system_prompt else []
        return [*system, message("user", f"{_ASKED[question]} {_FORM}")]

    def demonstration(self, prompt: Prompt) -> str:
        return prompt.answer if self.style == "compact" else f"<answer>{prompt.answer}</answer>"

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        answer = answers[-1]
        if self.style == "chat":
            tagged = _TAGGED.findall(answer)
            answer = tagged[0].strip() if len(tagged) == 1 else ""
        return {"right": float(answer == prompt.answer)}
