"""``titan-rl doctor CONFIG``: checks for silent bugs before a run, with its own actors.

    checks.py ──▶ context.py ──▶ one finding a check ──▶ command.py
                  │  ▲
                  ▼  └── probes/rewards.py: what answers of known worth earn, by the run's own scorer
                actors_under_test.py: the actors, started once beside no run, and what can be asked of them

A check is a function of the context. It returns a summary, or raises ``CheckFailed`` or ``CheckSkipped``. Nothing here
mends.
"""
