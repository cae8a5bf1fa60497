"""``titan-rl chaos CONFIG --kills N --seed S``: faults are injected into a training run, and what follows is measured.

    schedule ──▶ experiment ──▶ injection ──▶ outcomes ──▶ report ──▶ verdict
    (by seed)    (who, when)    (witness)     (events)       ▲
                                audit, baseline ─────────────┘
                                (ledger and records, read independently; runs without faults)

Targets, times and ways come from the seed: trainer ranks, generators, verifiers, their scorers and reward models,
references and teachers of their own, hosts and the controller itself, in every state, by SIGKILL, SIGSTOP, exceptions
and exits. After its controller was killed, the run is resumed. Each fault has a witness that it happened, and the time
until it was noticed and until it was repaired.
Standbys and spares are never targets.
"""

from titan_rl.diagnostics.chaos.command import Options, chaos

__all__ = ["Options", "chaos"]
