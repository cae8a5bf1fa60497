"""A reward that never comes, for the check that it is given up."""

import time


def reward(prompt: str, completion: str, row: dict) -> float:
    while True:
        time.sleep(1.0)
