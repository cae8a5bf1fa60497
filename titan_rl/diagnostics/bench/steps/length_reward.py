"""The reward of runs that are timed beside TRL, which gets the same (trl_program.py): by an answer's length, so that
nearly every group has a signal and thus a gradient."""


def reward(prompt: str, completion: str, row: dict) -> float:
    return float(len(completion) % 7)
