"""Two players take one to three stones in turn; who takes the last one wins. The model plays both, and learns of it.

An agent (docs/extending.md) that asks the model for each move, as white or as black. In held-out games black plays
perfectly instead, from heaps that white can win, so that the accuracy is the share of games that the model wins.
"""

import random

import httpx

from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.agent import ModelAccess, Outcome

MOVES = (1, 2, 3)
SEATS = ("white", "black")


class SelfPlay:
    seats = SEATS

    def __init__(self, task):
        self.heap = task.options.get("heap", 20)

    def prompt(self, stream, seed, index):
        draw = random.Random(f"{stream} {seed} {index}")
        against = "perfect" if stream == "held_out" else "itself"
        heaps = [heap for heap in range(2, self.heap + 1) if against == "itself" or heap % 4]
        heap = draw.choice(heaps)
        return Prompt(f"{stream}/{index:07d}", f"{heap}=", "", {"heap": heap, "against": against})

    def is_held_out(self, prompt):
        return prompt.entry["against"] == "perfect"  # the heaps are the same: it is another opponent that tells

    def messages(self, prompt):
        return prompt.text

    def demonstration(self, prompt):
        """Any legal move, so that no more than the form is learned of it."""
        return str(random.Random(prompt.id).choice(MOVES[: prompt.entry["heap"]]))

    def agent(self, prompt):
        return Game(prompt.entry["heap"], prompt.entry["against"])

    def score(self, prompt, answers):
        return {}  # the game gives each seat its reward


class Game:
    timeout = 60.0

    def __init__(self, heap, against):
        self.heap, self.against = heap, against

    async def run(self, model: ModelAccess) -> Outcome:
        headers = {"Authorization": f"Bearer {model.api_key}"}
        async with httpx.AsyncClient(headers=headers, trust_env=False, verify=False) as client:
            mover, other = SEATS
            while True:
                taken = await self.move(client, model, mover)
                if taken not in MOVES[: self.heap]:
                    return won_by(other)  # what is no move loses
                self.heap -= taken
                if not self.heap:
                    return won_by(mover)
                mover, other = other, mover

    async def move(self, client, model, mover):
        if mover == "black" and self.against == "perfect":
            return self.heap % 4 or 1
        asked = {"model": model.model, "prompt": f"{self.heap}="}
        answered = await client.post(f"{model.base_url}/completions", json=asked, headers={"X-Session-ID": mover})
        said = answered.raise_for_status().json()["choices"][0]["text"]
        return int(said) if said.isdecimal() else 0


def won_by(seat: str) -> Outcome:
    return Outcome(rewards={each: float(each == seat) for each in SEATS})
