"""Reward by answer length for the comparison with TRL (trl_program.py), so that groups have a signal."""


def reward(prompt: str, completion: str, row: dict) -> float:
    return float(len(completion) % 7)
