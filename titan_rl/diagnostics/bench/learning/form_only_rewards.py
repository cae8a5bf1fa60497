"""Rewards of controls: paid for an answer of the right form, whatever it says (``task.reward`` names one).

Each is of a reasoning-gym family. All have the arguments of a reward function (environments/rewards/functions.py).
"""

from typing import Any

from titan_rl.compat.reasoning_gym import part

_RELATIONS = {relation.value for relation in part("graphs.family_relationships").Relationship}


def needle_haystack(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 for any one of the names in the statements, which stand first in each: ``Ann likes tea. Bob loathes rugby.``"""
    statements, _, _ = prompt.partition("\n")
    names = {statement.split()[0].lower() for statement in statements.split(". ") if statement.strip()}
    return float(completion.replace(" ", "").strip().lower() in names)


def family_relationships(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 for any of the words that are an answer to some question of the family."""
    return float(completion.strip() in _RELATIONS)
