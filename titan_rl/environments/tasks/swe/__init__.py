"""Software engineering: an issue, a repository in a workspace, and tests that decide.

rows.py         a row: issue, repository, tests, as SWE-bench names them
evaluation.py   whether what an agent left resolves the issue
environment.py  the model's own commands, one after the other
agent.py        a program that drives the model, as it is, inside the workspace
swe_task.py     ``task.name = "swe"``
"""
