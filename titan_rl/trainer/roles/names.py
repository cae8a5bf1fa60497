"""Names of the models beside the policy, their columns, and the paths of their weights."""

from pathlib import Path

import numpy as np

from titan_rl.algorithms.base import Needs
from titan_rl.config.mixture import teachers_of
from titan_rl.config.sections.schema import Config

FROZEN = {"reference": "reference_logprob_S", "teacher": "teacher_logprob_S"}
"""Role, which is also its section of the TOML, to the column that it gives."""
TEACHER_MASK = "teacher_mask_S"
"""The column, float32 [S], of whether a self-teacher has read another sample's right answer."""
WORDS = "teacher_words_SK"
"""The column, int64 [S, K], of the teacher's likeliest words."""

SCORING = ("critic", "implicit_reward")
"""Roles that learn, by the algorithm's needs, and whose outputs are part of the policy's advantages."""
DRAFTER = "drafter"
"""What engines draft by, which no algorithm asks for: it learns where the run says so."""
LEARNED = (*SCORING, DRAFTER)
"""Roles that learn beside the policy (trainer/roles/learned/role.py), which are sections of the TOML, too."""
MAY_BE_OWN = (*FROZEN, *SCORING)
"""Roles that may have processes of their own."""
BASE = "base model"
"""Name of a LoRA policy's frozen weights, beside the names of roles."""


def needed_roles(needs: Needs) -> list[str]:
    """Frozen roles of an algorithm."""
    return [role for role in FROZEN if getattr(needs, role)]


def configured_paths(config: Config, role: str) -> list[str]:
    """Directories of a role's models, of which teachers are one or several; "" for the policy as it was at first."""
    return list(teachers_of(config).paths) if role == "teacher" else [getattr(config, role).path]


def role_paths(config: Config, role: str, model_path: str | Path, initial_policy: str) -> list[str | Path]:
    """The directories of the weights of a role's models.

    ``initial_policy``: directory of the policy at the start of reinforcement learning (controller/initial_policy.py);
    until then, and where that is what the run starts from, the model that it starts from is the same.
    """
    first = initial_policy if initial_policy and Path(initial_policy).exists() else model_path
    return [path or first for path in configured_paths(config, role)]


def learned_roles(config: Config, needs: Needs) -> list[str]:
    """Learned roles that a run asks for, of which it can have one (controller/preflight/role_checks.py)."""
    return [role for role in SCORING if getattr(needs, role)] + ([DRAFTER] if config.drafter.learns else [])


def learned_role(config: Config, needs: Needs) -> str | None:
    """Learned role of a run, or None."""
    return next(iter(learned_roles(config, needs)), None)


def own_learned(config: Config, needs: Needs) -> str | None:
    """Learned role with its own processes, or None."""
    role = learned_role(config, needs)
    return role if role is not None and getattr(config, role).placement == "own" else None


def num_words(role: str, needs: Needs) -> int:
    """Number of most likely words at each token that a role returns."""
    return needs.teacher_words if role == "teacher" else 0


def found_columns(needs: Needs, num_tokens: int) -> dict[str, np.ndarray]:
    """Zeros for all columns of frozen roles, for ``num_tokens`` tokens."""
    names = [FROZEN[role] for role in needed_roles(needs)]
    names += [FROZEN["teacher"], TEACHER_MASK] if needs.self_teacher else []
    columns = {name: np.zeros(num_tokens, np.float32) for name in names}
    if needs.teacher_words:
        shape = num_tokens, needs.teacher_words
        columns |= {WORDS: np.zeros(shape, np.int64), "teacher_word_logprob_SK": np.zeros(shape, np.float32)}
    return columns
