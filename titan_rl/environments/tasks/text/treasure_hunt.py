"""Treasure hunt, a text game of ten turns and more: key, locked door, treasure.

One command a turn, and each reply tells what is seen from the room, and no more: the house is known to the
game alone. A command that cannot be read or done is told, costs its turn, and the game goes on.

    compact   nw>  n  Nsw>  o  !Nsw>  w  ek>  t  e*>  e  Nsw*>  o  nsw*>  n  s$*>  t
              doors, in capitals what is locked; k and $, where the key and the treasure lie; * for the key in hand;
              ! for what could not be done
    chat      Doors: north, west.  go north  Doors: north (locked), south, west.  open door  You can't do that. ...

Looking for the way is what has to be learned: worked examples know the house and go straight, a player cannot.
"""

import hashlib
import json
import random
from collections import deque
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

from pydantic import Field

from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.sections.kinds import Style
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.text.messages import Message, message
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.environment import OVER, OneAnswer, Reply
from titan_rl.environments.interfaces.task import RewardParts, Task

DIRECTIONS = {"n": (0, 1), "e": (1, 0), "s": (0, -1), "w": (-1, 0)}
_OPPOSITE = dict(zip("nesw", "swne", strict=True))
_STRAIGHT = 0.5
"""How often a new room is put beside the newest one instead of beside any: what makes corridors."""
_MAX_DRAWS = 5000


class State(NamedTuple):
    """State of a game: all that commands change."""

    room: int = 0
    has_key: bool = False
    is_open: bool = False
    has_treasure: bool = False


@dataclass(frozen=True)
class House:
    """Layout of a house, with its commands and the shortest way to the treasure.

    Rooms lie on a grid and are joined into a tree, so that each is reached in one way. The treasure's room is a leaf
    behind the locked door; the key is in another room than the one where the game starts.

        · ── start ── · ── key
                      │
                      · ─╳─ treasure          go to the key, take it, go to the locked door, open it, go through, take

    Of N rooms the treasure's has no other door, so each of the two ways goes through N - 2 doors at most, and the whole
    takes no more than 2 (N - 2) + 4 turns. Rooms are numbered in the order in which they are reached from where the
    game starts, room 0. Plain values, so that a prompt can carry it.
    """

    doors: list[dict[str, int]]
    """Of each room: the room behind the door in that direction."""
    key: int
    """The room where it lies."""
    treasure: int
    """The room with the treasure. Its only door is the locked one."""

    @property
    def name(self) -> str:
        """Hash of the layout."""
        return hashlib.blake2b(json.dumps(asdict(self)).encode(), digest_size=8).hexdigest()

    def has_lock(self, state: State, direction: str) -> bool:
        return not state.is_open and self.treasure in (state.room, self.doors[state.room][direction])

    def thing(self, state: State) -> str:
        """Thing in the room: ``key``, ``treasure`` or nothing."""
        if state.room == self.key and not state.has_key:
            return "key"
        return "treasure" if state.room == self.treasure and not state.has_treasure else ""

    def after(self, state: State, command: str) -> State | None:
        """State after a command (direction, ``take``, ``take key``, ``take treasure``, ``open``); None: impossible."""
        if command in self.doors[state.room] and not self.has_lock(state, command):
            return state._replace(room=self.doors[state.room][command])
        thing = self.thing(state)
        if thing and command in ("take", f"take {thing}"):
            return state._replace(has_key=True, has_treasure=thing == "treasure")
        is_at_lock = any(self.has_lock(state, direction) for direction in self.doors[state.room])
        return state._replace(is_open=True) if command == "open" and state.has_key and is_at_lock else None

    def shortest_way(self) -> list[str]:
        """Shortest list of commands to the treasure."""
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
    """Upper bound on the shortest way in any house with ``num_rooms`` rooms."""
    return 2 * num_rooms


def draw_house(draw: random.Random, num_rooms: int, least_turns: int) -> House:
    """Random house whose shortest way has ``least_turns`` or more.

    With 16 rooms, one house of a hundred needs 24 turns, and almost none ``most_turns``. Errors: ValueError after too
    many draws.
    """
    for _ in range(_MAX_DRAWS):
        house = _random_house(draw, num_rooms)
        if len(house.shortest_way()) >= least_turns:
            return house
    raise ValueError(f"none of {_MAX_DRAWS} houses of {num_rooms} rooms takes {least_turns} turns: ask for fewer")


def _random_house(draw: random.Random, num_rooms: int) -> House:
    grid = _grid(draw, num_rooms)
    treasure = draw.choice([place for place, beside in grid.items() if len(beside) == 1])
    start, key = draw.sample([place for place in grid if place != treasure], 2)
    numbers = {start: 0}
    waiting = deque(numbers)
    while waiting:
        beside = grid[waiting.popleft()]
        unnumbered = [beside[way] for way in DIRECTIONS if way in beside and beside[way] not in numbers]
        numbers |= {place: len(numbers) + number for number, place in enumerate(unnumbered)}
        waiting.extend(unnumbered)
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
        neighbour = x + dx, y + dy
        if neighbour not in grid:
            grid[x, y][direction], grid[neighbour] = neighbour, {_OPPOSITE[direction]: (x, y)}
            places.append(neighbour)
    return grid


_NAMES = dict(zip(DIRECTIONS, ("north", "east", "south", "west"), strict=True))
_COMMANDS = {
    **{word: way for way, name in _NAMES.items() for word in (way, name, f"go {way}", f"go {name}")},
    **dict.fromkeys(("t", "take"), "take"),
    **{text: text for text in ("take key", "take treasure")},
    **dict.fromkeys(("o", "open", "open door"), "open"),
}
"""From a model's command to that of ``House.after``."""
_ASKED = (
    "Find the treasure of this house. It lies behind a locked door, and the key to it lies in another room. You have "
    "{turns} turns. In each, answer with one command and nothing else: go north, go east, go south, go west, take key, "
    "open door or take treasure."
)


@dataclass(kw_only=True)
class TreasureOptions:
    """``[task.options]`` of the treasure game."""

    rooms: Annotated[int, Field(ge=3, le=16)] = 8
    """Of a house, the treasure's among them."""
    least_turns: Annotated[int, Field(ge=1)] = 10
    """Of the shortest way that wins; the longest takes twice as many turns as there are rooms."""
    max_turns: Annotated[int, Field(ge=1, le=200)] = 24
    """After which the game is lost."""
    credit_for_progress: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """How much of the reward the key and the opened door earn, half of it each in its own turn (``turn_grpo``); the
    rest is the treasure's."""


class TreasureTask(Task):
    """Endless task of houses; one in five is held out, by a hash of its layout. Errors: ConfigError."""

    ABOUT = "a text game of ten turns and more: task.options.rooms, least_turns, max_turns, credit_for_progress"

    style: Style

    def __init__(self, task: TaskConfig):
        if not task.scores_itself:
            raise ConfigError("task.name = 'treasure' is scored by its game: leave task.reward out")
        self.style, self.system_prompt = task.style, task.system_prompt
        self.options = build_section(TreasureOptions, task.options, "task.options")
        rooms, least, most = self.options.rooms, self.options.least_turns, self.options.max_turns
        if least > rooms + rooms // 2:
            raise ConfigError(
                f"task.options.least_turns = {least} is too much to ask of {rooms} rooms: at most {rooms + rooms // 2}"
            )
        if most < most_turns(rooms):
            raise ConfigError(
                f"task.options.max_turns = {most} is not enough for {rooms} rooms, whose shortest way may take "
                f"{most_turns(rooms)}: give as many, or fewer rooms"
            )

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        """Prompt of a random house; its text is a hash, hidden from the model."""
        draw = random.Random(f"{stream} {seed} {index}")
        house = draw_house(draw, self.options.rooms, self.options.least_turns)
        way = ", ".join(house.shortest_way())
        return Prompt(f"{stream}/{index:07d}", f"house {house.name}", way, asdict(house))

    def messages(self, prompt: Prompt) -> str | list[Message]:
        observation = self._game(prompt).observation()
        if self.style == "compact":
            return observation
        question = f"{_ASKED.format(turns=self.options.max_turns)}\n\n{observation}"
        system = [message("system", self.system_prompt)] if self.system_prompt else []
        return [*system, message("user", question)]

    def demonstration(self, prompt: Prompt) -> list[str]:
        house, state, commands = House(**prompt.entry), State(), list[str]()
        for command in house.shortest_way():
            commands.append(command[0] if self.style == "compact" else _in_words(command, house.thing(state)))
            after = house.after(state, command)
            assert after is not None, "the shortest way has no command that cannot be done"
            state = after
        return commands

    def difficulty(self, prompt: Prompt) -> str:
        """Turns of the shortest way, for the curriculum."""
        return str(len(House(**prompt.entry).shortest_way()))

    def environment(self, prompt: Prompt) -> "TreasureEnvironment":
        return TreasureEnvironment(self._game(prompt))

    def _game(self, prompt: Prompt) -> "Game":
        return Game(House(**prompt.entry), self.options.max_turns, self.style)

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        """Score by a replay of the answers."""
        game, credit = self._game(prompt), self.options.credit_for_progress
        states = [game.state, *(game.play(answer) for answer in answers)]
        if not credit:
            return {"treasure": float(states[-1].has_treasure)}
        return {
            "key": [credit / 2 * reached for reached in _turned([state.has_key for state in states])],
            "door": [credit / 2 * reached for reached in _turned([state.is_open for state in states])],
            "treasure": [(1 - credit) * reached for reached in _turned([state.has_treasure for state in states])],
        }


def _turned(states: list[bool]) -> list[bool]:
    """Whether something that stays was done, by turns."""
    return [after and not before for before, after in pairwise(states)]


def _in_words(command: str, thing: str) -> str:
    if command in _NAMES:
        return f"go {_NAMES[command]}"
    return f"take {thing}" if command == "take" else "open door"


@dataclass
class Game:
    """Game in progress; the player does not see the house."""

    house: House
    max_turns: int
    style: Style
    state: State = State()
    num_turns: int = 0
    was_refused: bool = False

    @property
    def is_over(self) -> bool:
        return self.state.has_treasure or self.num_turns >= self.max_turns

    def play(self, answer: str) -> State:
        """Apply one command; after the end it has no effect."""
        if self.is_over:
            return self.state
        self.num_turns += 1
        command = _command(answer)
        after = None if command is None else self.house.after(self.state, command)
        self.was_refused = after is None
        self.state = self.state if after is None else after
        return self.state

    def observation(self) -> str:
        """Observation of the player: doors and things in the room."""
        house, state = self.house, self.state
        locks = {way: house.has_lock(state, way) for way in house.doors[state.room]}
        if self.style == "compact":
            doors = "".join(way.upper() if is_locked else way for way, is_locked in locks.items())
            things = {"": "", "key": "k", "treasure": "$"}[house.thing(state)] + "*" * state.has_key
            return f"{'!' * self.was_refused}{doors}{things}>"
        doors = ", ".join(f"{_NAMES[way]}{' (locked)' * is_locked}" for way, is_locked in locks.items())
        sentences = ["You can't do that."] * self.was_refused + [f"Doors: {doors}."]
        sentences += [f"The {thing} lies here." for thing in (house.thing(state),) if thing]
        return " ".join(sentences + ["You carry the key."] * state.has_key)


def _command(answer: str) -> str | None:
    words = answer.strip().rstrip(".!").lower().split()
    return _COMMANDS.get(" ".join(word for word in words if word != "the"))


@dataclass
class TreasureEnvironment(OneAnswer):
    """Environment of one game; each answer is a command."""

    game: Game

    async def step(self, answer: str) -> Reply:
        self.game.play(answer)
        return OVER if self.game.is_over else Reply([{"role": "user", "content": self.game.observation()}])
