"""House of the treasure hunt: its layout, possible actions, and the shortest path.

Rooms lie on a grid and are joined into a tree, so that each is reached in one way. The treasure's room is a leaf behind
the locked door; the key is in another room than the one where the game starts.

    · ── start ── · ── key
                  │
                  · ─╳─ treasure          go to the key, take it, go to the locked door, open it, go through it, take

Of N rooms the treasure's has no other door, so each of the two ways goes through N - 2 doors at most, and the whole
takes no more than 2 (N - 2) + 4 turns.
"""

import hashlib
import json
import random
from collections import deque
from dataclasses import asdict, dataclass
from typing import NamedTuple

DIRECTIONS = {"n": (0, 1), "e": (1, 0), "s": (0, -1), "w": (-1, 0)}
_OPPOSITE = dict(zip("nesw", "swne", strict=True))
_STRAIGHT = 0.5
"""How often a new room is put beside the newest one instead of beside any: what makes corridors."""
_MAX_DRAWS = 5000


class State(NamedTuple):
    """Of a game: all that the player's commands change."""

    room: int = 0
    has_key: bool = False
    is_open: bool = False
    has_treasure: bool = False


@dataclass(frozen=True)
class House:
    """Rooms by number, in the order in which they are reached from where the game starts, room 0. Plain values, so that
    a prompt can carry it."""

    doors: list[dict[str, int]]
    """Of each room: the room behind the door in that direction."""
    key: int
    """The room where it lies."""
    treasure: int
    """The room with the treasure. Its only door is the locked one."""

    @property
    def name(self) -> str:
        """A hash of all there is: the same for the same house, and it tells nothing of it."""
        return hashlib.blake2b(json.dumps(asdict(self)).encode(), digest_size=8).hexdigest()

    def has_lock(self, state: State, direction: str) -> bool:
        return not state.is_open and self.treasure in (state.room, self.doors[state.room][direction])

    def thing(self, state: State) -> str:
        """What lies in the room: ``key``, ``treasure`` or nothing."""
        if state.room == self.key and not state.has_key:
            return "key"
        return "treasure" if state.room == self.treasure and not state.has_treasure else ""

    def after(self, state: State, command: str) -> State | None:
        """``command``: a direction, ``take``, ``take key``, ``take treasure`` or ``open``. None: it cannot be done."""
        if command in self.doors[state.room] and not self.has_lock(state, command):
            return state._replace(room=self.doors[state.room][command])
        thing = self.thing(state)
        if thing and command in ("take", f"take {thing}"):
            return state._replace(has_key=True, has_treasure=thing == "treasure")
        is_at_lock = any(self.has_lock(state, direction) for direction in self.doors[state.room])
        return state._replace(is_open=True) if command == "open" and state.has_key and is_at_lock else None

    def shortest_way(self) -> list[str]:
        """Commands of a game that no other wins in fewer."""
        ways: dict[State, list[str]] = {State(): []}
        waiting = deque(ways)
        while not (state := waiting.popleft()).has_treasure:
            for command in (*DIRECTIONS, "take", "open"):
                after = self.after(state, command)
                if after is not None and after not in ways:
                    ways[after] = [*ways[state], command]
                    waiting.append(after)
        return ways[state]


def most_turns(num_rooms: int) -> int:
    """Of a shortest way in any house of so many rooms."""
    return 2 * num_rooms


def draw_house(draw: random.Random, num_rooms: int, least_turns: int) -> House:
    """One whose shortest way takes ``least_turns`` or more: half as many turns again as there are rooms are found in
    one house of a hundred (16 rooms), ``most_turns`` in almost none. Errors: ValueError if there seems to be none."""
    for _ in range(_MAX_DRAWS):
        house = _any_house(draw, num_rooms)
        if len(house.shortest_way()) >= least_turns:
            return house
    raise ValueError(f"none of {_MAX_DRAWS} houses of {num_rooms} rooms takes {least_turns} turns: ask for fewer")


def _any_house(draw: random.Random, num_rooms: int) -> House:
    grid = _grid(draw, num_rooms)
    treasure = draw.choice([place for place, beside in grid.items() if len(beside) == 1])
    start, key = draw.sample([place for place in grid if place != treasure], 2)
    numbers = {start: 0}
    waiting = deque(numbers)
    while waiting:
        beside = grid[waiting.popleft()]
        new = [beside[way] for way in DIRECTIONS if way in beside and beside[way] not in numbers]
        numbers |= {place: len(numbers) + number for number, place in enumerate(new)}
        waiting.extend(new)
    doors = [{way: numbers[grid[place][way]] for way in DIRECTIONS if way in grid[place]} for place in numbers]
    return House(doors, numbers[key], numbers[treasure])


def _grid(draw: random.Random, num_rooms: int) -> dict[tuple[int, int], dict[str, tuple[int, int]]]:
    """Of each place with a room: the places that its doors lead to."""
    grid: dict[tuple[int, int], dict[str, tuple[int, int]]] = {(0, 0): {}}
    places = list(grid)
    while len(places) < num_rooms:
        x, y = places[-1] if draw.random() < _STRAIGHT else draw.choice(places)
        direction = draw.choice(list(DIRECTIONS))
        dx, dy = DIRECTIONS[direction]
        new = x + dx, y + dy
        if new not in grid:
            grid[x, y][direction], grid[new] = new, {_OPPOSITE[direction]: (x, y)}
            places.append(new)
    return grid
