"""Software engineering: an issue, a repository in a workspace, and tests that decide.

    rows.py              a row: issue, repository, tests, as SWE-bench names them
    task_directories.py  rows of Harbor's directories of tasks
    workspaces.py        workspaces of a prompt's samples, all of which begin alike
    environment.py       the model's own commands, one after the other
    agent.py             a program that drives the model, as it is, inside the workspace
    evaluation.py        whether what was left there resolves the issue
    swe_task.py          ``task.name = "swe"``

An episode is either of the two in the middle; its end is the evaluation.
"""
