"""A reward of one's own: ``[task] reward = "my_reward:reward"`` beside a TOML in the same folder.

It is called in the scorer process, once for each answer, under ``verifier.score_timeout``. ``async def`` works too.
"""


def reward(prompt: str, completion: str, row: dict) -> dict[str, float]:
    """Parts that add up: 1.0 in all counts as a right answer in held-out accuracy."""
    answer = completion.strip()
    return {
        "is_number": 0.1 * answer.isdecimal(),
        "right": 0.9 * (answer == row["answer"]),
    }
