"""A training under fire, ``titan-rl chaos CONFIG --kills N --seed S``, and what became of it.

    drawing ──▶ siege ──▶ strike ──▶ matching ──▶ report ──▶ verdict
    (by seed)   (when)    (witness)  (events)      ▲
                                     account ──────┘  (ledger and records, read independently)

Victims, moments and ways are drawn by seed: trainer ranks, generators, verifiers, their scorers and the controller
itself, in every state, by SIGKILL, SIGSTOP, exceptions and exits. A killed controller's run is resumed. For each fault
there is a witness that it happened, and how soon it was noticed and all was whole again. Standbys and spares are not
struck.
"""

from titan_rl.diagnostics.chaos.command import Options, chaos

__all__ = ["Options", "chaos"]
