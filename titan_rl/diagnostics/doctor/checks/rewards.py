"""Rewards: they tell right from wrong, and nothing but being right pays."""

from dataclasses import replace

from titan_rl.config.load import ConfigError
from titan_rl.diagnostics.doctor.check_errors import CheckFailed, CheckSkipped
from titan_rl.diagnostics.doctor.context import CheckContext
from titan_rl.diagnostics.doctor.probes.rewards import CONSTANTS, ECHOES, Earned
from titan_rl.environments.registry import make_task

_PAYS = 0.5
"""Share of a right answer's reward from which on something pays."""
_FORGED = ("empty", "repeated", "random", "guesses", *(f"constant {constant!r}" for constant in CONSTANTS))
_SHOWN = 40
READ_STRICTLY = "Compare the whole answer with the expected one, and read it strictly"


async def signal(context: CheckContext) -> str:
    """A right answer earns more than any other, and not all earn the same."""
    earned = await context.earned()
    wrong = {kind: earned.mean(kind) for kind in earned.by_kind if kind != "right"}
    if not wrong:
        raise CheckSkipped("every answer that was tried is right by chance")
    right, lowest = earned.mean("right"), min(wrong.values())
    if max(wrong.values()) == lowest == right:
        raise CheckFailed("the reward is constant", f"{len(wrong)} kinds of answers earn {right:g}, right ones too")
    if right <= lowest:
        kind = min(wrong, key=lambda kind: wrong[kind])
        raise CheckFailed(
            "a right answer earns no more than others", f"it earns {right:g}, {_named(earned, kind)} {lowest:g}"
        )
    return f"right answers earn {right:.3g}, others {lowest:.3g} to {max(wrong.values()):.3g}"


async def form(context: CheckContext) -> str:
    """The right answer to another prompt, whose form is right, earns little."""
    earned = await context.earned()
    if "form" not in earned.by_kind:
        raise CheckSkipped("all prompts have the same right answer")
    return _pays_little(earned, ("form",), "the reward pays for the form of an answer alone")


async def forged(context: CheckContext) -> str:
    """Empty, repeated, constant and random answers and lists of guesses earn little."""
    try:
        return _pays_little(await context.earned(), _FORGED, "the reward pays for answers that say nothing")
    except CheckFailed as wrong:
        exact = "; task.scoring = 'exact' does so" if _may_be_exact(context) else ""
        raise CheckFailed(wrong.message, wrong.evidence, f"{READ_STRICTLY}{exact}") from None


def _may_be_exact(context: CheckContext) -> bool:
    """Whether the task takes the setting, and does not have it."""
    config = context.checked.config
    if config.task.scoring == "exact":
        return False
    try:
        make_task(replace(config.task, scoring="exact"), config.run.plugin_path)
    except ConfigError:
        return False
    return True


async def leak(context: CheckContext) -> str:
    """Reward of answers that repeat the question."""
    return _pays_little(await context.earned(), ECHOES, "the prompt tells its answer")


def _pays_little(earned: Earned, kinds: tuple[str, ...], problem: str) -> str:
    shares = {kind: earned.share(kind) for kind in kinds if kind in earned.by_kind}
    if not shares:
        raise CheckSkipped("such answers are right by chance")
    kind = max(shares, key=lambda kind: shares[kind])
    if shares[kind] >= _PAYS:
        evidence = f"{_named(earned, kind)} earns {earned.mean(kind):.3g}, where a right answer earns "
        raise CheckFailed(problem, f"{evidence}{earned.mean('right'):.3g}")
    return f"at most {shares[kind]:.2f} of a right answer's reward ({_named(earned, kind)})"


def _named(earned: Earned, kind: str) -> str:
    text = repr(earned.shown[kind])
    return f"{kind.partition(' ')[0] if kind.startswith('constant') else kind}: {text[:_SHOWN]}"
