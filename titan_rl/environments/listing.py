"""What ``titan-rl tasks`` lists: everything that can be trained on, by name."""

from collections.abc import Iterator

from titan_rl.environments.reasoning_gym.families import described_families as families
from titan_rl.environments.registry import BUILT_IN

_OF_OTHERS = (
    "jsonl  (rows of a file of your own: task.options.file)",
    "code  (programs to write, from a file of your own; they run in a sandbox, against each row's tests)",
    "math  (rows of your own, whose answers are mathematics: what equals the expected one is right)",
    "mixture  (several of these in one run: a table [task.options.NAME] for each, with its weight)",
    "openenv  (an environment behind an OpenEnv server: task.options.url, action, observation, prompt)",
    "nemo_gym  (rows, tools and rewards of a NeMo Gym resources server: task.options.url, file)",
    "verifiers  (environments of the verifiers library, with their own harness: task.options.env, python)",
    "gymnasium  (an environment of gymnasium.make, in text: task.options.id, prompt)",
)


def lines() -> Iterator[str]:
    """One for each."""
    yield from _OF_OTHERS
    for name, task in BUILT_IN.items():
        yield f"{name}  ({task.ABOUT})"
    for family in families():
        yield _family_line(**family)


def _family_line(name: str, styles: list[str], scoring: str, constant_answer: dict | None) -> str:
    also = "compact (exact) too" if "compact" in styles else ""
    pay = "unknown what"
    if constant_answer:
        pay = "{family:.2f} by its scorer, {exact:.2f} exact".format(**constant_answer)
    return f"{name:<24} {also:<20} scored {scoring + ';':<8} the best constant answer earns {pay}"
