"""How far trainer and generator differ about tokens that the generator drew: pure.

The mean of exp|difference| has the run's own limit (records/metrics.py). Two more find what a mean hides: a difference
that leans to one side, as that of a distribution which was cut or reshaped does, and one token that is far off where
rounding alone is tiny.

Dimensions: S tokens.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from titan_rl.diagnostics.doctor.check_errors import CheckFailed
from titan_rl.records.metrics import agreement_limit

_CUT = 20.0
"""As the loss cuts differences."""
_SURE = 6.0
"""Standard errors beyond which a lean is no chance."""


@dataclass(frozen=True)
class Limits:
    mean: float
    """Of the mean of exp|difference|."""
    lean: float
    """Of the mean difference."""
    token: float
    """Of one token's difference."""

    @property
    def is_exact(self) -> bool:
        """Whether no token may be off by what bf16 rounds away, which depends on what is computed beside it."""
        return self.token < _CUT


def limits(generator_dtype: str, trainer_dtype: str, *, fp8: bool = False, batch_invariant: bool = False) -> Limits:
    """In fp32 what was seen is 1.000001 on average and 1e-3 at a token; in bf16 a token may be off by 1.

    With ``batch_invariant`` no token may differ in its last bit."""
    if batch_invariant:
        return Limits(agreement_limit(generator_dtype, trainer_dtype, batch_invariant=True), 0.0, 0.0)
    is_exact = generator_dtype == trainer_dtype == "float32" and not fp8
    mean = agreement_limit(generator_dtype, trainer_dtype, fp8=fp8)
    return Limits(mean, 1e-3, 0.05) if is_exact else Limits(mean, 0.02, _CUT)


def difference(tokens: pd.DataFrame) -> np.ndarray:
    """Generator less trainer, float64 [S]; NaN counts as the largest difference."""
    difference_S = tokens["generator"].to_numpy(np.float64) - tokens["trainer"].to_numpy(np.float64)
    return np.clip(np.nan_to_num(difference_S, nan=_CUT, posinf=_CUT, neginf=-_CUT), -_CUT, _CUT)


def compare(tokens: pd.DataFrame, allowed: Limits, whose: str) -> str:
    """Summary of the trainer-generator difference. Errors: CheckFailed. ``whose``: of which tokens, for the message."""
    difference_S = difference(tokens)
    mean, lean = float(np.exp(np.abs(difference_S)).mean()), float(difference_S.mean())
    doubt = float(difference_S.std()) / np.sqrt(len(difference_S))
    worst = int(np.abs(difference_S).argmax())
    how = "the same, bit for bit" if not difference_S.any() else f"mean of exp|difference| {mean:.6f}"
    stats = f"{len(difference_S)} tokens, {how}"
    leans = abs(lean) > allowed.lean + _SURE * doubt
    if mean > allowed.mean or leans or abs(difference_S[worst]) > allowed.token:
        row = tokens.iloc[worst]
        raise CheckFailed(
            f"trainer and generator disagree about {whose}",
            f"{stats} (at most {allowed.mean:g}), the generator's log-probabilities are {lean:+.4f} higher on average; "
            f"most at token {int(row.place)} of {row.prompt_id} sample {int(row['sample'])} (id {int(row.token)}): "
            f"generator {row.generator:.9g}, trainer {row.trainer:.9g}",
        )
    return stats
