"""The treasure game: houses that can be won, a player who is told what is seen and no more, and what is paid."""

import asyncio
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from titan_rl.algorithms.batches.batching import checked_advantages
from titan_rl.algorithms.policy_gradient.turn_grpo import TurnGRPO
from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.seeds import named_seed
from titan_rl.data.types import Completion, Provenance, Sampling, correct
from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.prompts.stream import PromptStream, held_out_prompts
from titan_rl.environments.registry import make_task
from titan_rl.environments.rewards.functions import in_turns
from titan_rl.environments.rollout.demonstrations import demonstrate
from titan_rl.environments.rollout.group import run_group
from titan_rl.environments.tasks.text.treasure_hunt import DIRECTIONS, House, State, draw_house
from titan_rl.models.builtin.tokenizer import character_tokenizer

POSITIONS = 256
"""Of the tiny model."""
STYLES = ("compact", "chat")
SMALL = dict(rooms=3, least_turns=1, max_turns=6)


def task_of(style: str = "compact", **options):
    return make_task(TaskConfig(name="treasure", style=style, options=options))


def houses(count: int, **options) -> list[House]:
    task = task_of(**options)
    return [House(**task.prompt("train", 1, index).entry) for index in range(count)]


def told(task, prompt, commands: list[str]) -> list[str]:
    """All that the model reads in a game of these answers, until it is over."""
    environment, read = task.environment(prompt), [json.dumps(task.messages(prompt))]
    for command in commands:
        messages = asyncio.run(environment.step(command)).messages
        if not messages:
            break
        assert [message["role"] for message in messages] == ["user"]
        read.append(messages[0]["content"])
    return read


def distances(house: House, start: int) -> dict[int, int]:
    """Doors to each room."""
    away, found = {start: 0}, [start]
    for room in found:
        new = [beyond for beyond in house.doors[room].values() if beyond not in away]
        away |= dict.fromkeys(new, away[room] + 1)
        found += new
    return away


def test_every_house_is_won_in_ten_turns_and_more():
    for house in houses(500):
        way, to = house.shortest_way(), distances(house, house.key)
        [before_it] = house.doors[house.treasure].values()
        assert len(way) == to[0] + to[before_it] + 4  # the key, the lock, the door and the treasure: one turn each
        assert 10 <= len(way) <= 16 and way.count("take") == 2 and way.count("open") == 1


def test_a_house_is_a_tree_of_rooms_on_a_grid():
    for house in houses(200):
        assert len(house.doors) == 8 and set(distances(house, 0)) == set(range(8))
        assert sum(map(len, house.doors)) == 2 * 7
        assert house.key not in (0, house.treasure) and house.treasure != 0
        places, found = {0: (0, 0)}, [0]
        for room in found:
            for way, beyond in house.doors[room].items():
                x, y = (a + b for a, b in zip(places[room], DIRECTIONS[way], strict=True))
                if beyond not in places:
                    places[beyond] = x, y
                    found.append(beyond)
                assert places[beyond] == (x, y)
        assert len(set(places.values())) == 8


@pytest.mark.parametrize("rooms", [3, 4, 7, 12, 16])
def test_houses_of_any_size_are_made_and_won(rooms):
    least = rooms + rooms // 2
    for house in houses(20, rooms=rooms, least_turns=least, max_turns=2 * rooms):
        assert least <= len(house.shortest_way()) <= 2 * rooms


def test_a_house_that_there_cannot_be_is_not_looked_for_for_ever():
    with pytest.raises(ValueError, match="none of 5000 houses of 3 rooms takes 7 turns: ask for fewer"):
        draw_house(random.Random(1), 3, 7)


def test_houses_hardly_ever_come_twice():
    assert len({house.name for house in houses(500)}) > 490


# what the player knows


@pytest.mark.parametrize("style", STYLES)
def test_the_player_is_told_nothing_of_rooms_that_were_not_seen(style):
    """Wherever else the key lies, whatever is behind doors that were not gone through: the same is said."""
    task, moved = task_of(style), 0
    for prompt in held_out_prompts(task, 50):
        draw, house, state = random.Random(prompt.id), House(**prompt.entry), State()
        walk, seen = [], {0}
        for _ in range(5):
            walk.append(draw.choice([way for way in "nesw" if house.after(state, way)]))
            state = house.after(state, walk[-1])
            seen.add(state.room)
        if house.key in seen:
            continue
        for key in set(range(8)) - seen - {house.key, house.treasure}:
            other = replace(prompt, text="house 0", answer="", entry=asdict(replace(house, key=key)))
            assert told(task, other, walk) == told(task, prompt, walk)
            moved += 1
    assert moved > 50


def test_houses_that_look_alike_from_the_start_are_asked_alike():
    task = task_of()
    prompts = [task.prompt("train", 1, index) for index in range(200)]
    alike = [
        (one, other)
        for one, other in combinations(prompts, 2)
        if set(one.entry["doors"][0]) == set(other.entry["doors"][0])
        and all(house.treasure not in house.doors[0].values() for house in (House(**one.entry), House(**other.entry)))
    ]
    assert len(alike) > 100 and all(one.text != other.text for one, other in alike)
    for style in STYLES:
        asked = task_of(style)
        assert all(asked.messages(one) == asked.messages(other) for one, other in alike)


@pytest.mark.parametrize("style", STYLES)
def test_names_seeds_and_ways_are_never_said(style):
    task = task_of(style)
    for prompt in held_out_prompts(task, 20):
        said = " ".join(told(task, prompt, task.demonstration(prompt)))
        assert prompt.text.split()[1] not in said and prompt.answer not in said and prompt.id not in said


@pytest.mark.parametrize("style", STYLES)
def test_what_cannot_be_done_is_told_costs_its_turn_and_changes_nothing(style):
    task = task_of(style)
    for prompt in held_out_prompts(task, 20):
        house, [_, *others] = House(**prompt.entry), told(task, prompt, ["take", "open", "fly", *"nesw", "t"])
        [blocked, *_] = [way for way in "nesw" if house.after(State(), way) is None]
        refused = "!" if style == "compact" else "You can't do that. "
        first = task.environment(prompt).game.observation()
        assert others[:3] == [refused + first] * 3
        assert told(task, prompt, [blocked])[1] == refused + first


def test_no_way_leads_to_the_treasure_but_through_the_lock():
    for house in houses(50):
        [before_it] = house.doors[house.treasure].values()
        [way] = [way for way, beyond in house.doors[before_it].items() if beyond == house.treasure]
        at_lock = State(room=before_it)
        assert house.after(at_lock, way) is None and house.after(at_lock, "open") is None
        assert house.after(at_lock, "take treasure") is None
        opened = house.after(at_lock._replace(has_key=True), "open")
        assert opened.is_open and house.after(opened, "open") is None
        inside = house.after(opened, way)
        assert inside.room == house.treasure and house.after(inside, "take key") is None
        assert house.after(inside, "take treasure") == house.after(inside, "take") == inside._replace(has_treasure=True)


@pytest.mark.parametrize(
    ("written", "way"), [("n", "n"), ("go north", "n"), (" North.\n", "n"), ("GO N", "n"), ("go to the north", "!")]
)
def test_a_command_is_read_however_it_is_spelled(written, way):
    task = task_of()
    prompt = next(p for p in held_out_prompts(task, 50) if "n" in p.entry["doors"][0] and "N" not in task.messages(p))
    after = told(task, prompt, [written])[1]
    assert after.startswith("!") if way == "!" else after == told(task, prompt, [way])[1]


# what is paid

GARBAGE = [
    "",
    "0",
    "nan",
    "nesw",
    "n e s w t o",
    "n\ne\ns\nw\nt\no",
    "go north, go east, take key, open door, take treasure",
]
GARBAGE += [
    "take treasure",
    "t",
    "take",
    "open",
    "o" * 10**6,
    "n" * 81,
    "\x00",
    "treasure",
    "ｔａｋｅ",
    "{'take'}",
    "take key treasure",
]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("answer", GARBAGE, ids=lambda answer: repr(answer[:20]))
def test_garbage_earns_nothing_and_the_game_ends(style, answer):
    task, whole = task_of(style, credit_for_progress=0.5), task_of(style)
    for prompt in held_out_prompts(task, 20):
        answers = [answer] * 24
        assert len(told(task, prompt, [*answers, "n"])) == 24
        parts = task.score(prompt, answers)
        assert all(part == [0.0] * 24 for part in parts.values()) and set(parts) == {"key", "door", "treasure"}
        assert whole.score(prompt, answers) == {"treasure": 0.0}


@pytest.mark.parametrize("style", STYLES)
def test_to_say_the_prompt_or_the_replies_again_earns_nothing(style):
    task = task_of(style)
    for prompt in held_out_prompts(task, 20):
        asked = task.messages(prompt)
        said = [asked if style == "compact" else asked[-1]["content"], prompt.text, prompt.answer]
        assert task.score(prompt, [*said, *told(task, prompt, ["n", "e", "s", "w"])] * 3) == {"treasure": 0.0}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("options", [{}, dict(credit_for_progress=0.5), SMALL])
def test_worked_examples_earn_it_all_and_only_when_they_are_played_to_the_end(style, options):
    task = task_of(style, **options)
    for prompt in held_out_prompts(task, 8 if options is SMALL else 30):
        shown = task.demonstration(prompt)
        parts, turns = in_turns(task.score(prompt, shown))
        assert sum(parts.values()) == pytest.approx(1.0, abs=1e-12) and len(turns) in (0, len(shown))
        assert task.score(prompt, shown[:-1])["treasure"] in (0.0, [0.0] * (len(shown) - 1))
        assert len(told(task, prompt, shown)) == len(shown)  # the last has no reply


def test_the_key_and_the_door_are_paid_once_and_in_their_turn():
    task = task_of(credit_for_progress=0.4)
    prompt = held_out_prompts(task, 1)[0]
    shown = task.demonstration(prompt)
    taken, opened = shown.index("t"), shown.index("o")
    answers = [*shown[: opened + 1], "o", "t", *shown[opened + 1 :], "t", "n"]
    parts = task.score(prompt, answers)
    paid = {name: [(turn, reward) for turn, reward in enumerate(part) if reward] for name, part in parts.items()}
    assert paid == {"key": [(taken, 0.2)], "door": [(opened, 0.2)], "treasure": [(len(shown) + 1, 0.6)]}


def test_a_treasure_that_comes_after_the_last_turn_is_none():
    task = task_of()
    prompt = held_out_prompts(task, 1)[0]
    shown = task.demonstration(prompt)
    waited = ["fly"] * (24 - len(shown))
    assert task.score(prompt, waited + shown) == {"treasure": 1.0}
    assert task.score(prompt, ["fly", *waited, *shown]) == {"treasure": 0.0}


# episodes


def chat_tokenizer():
    tokenizer = character_tokenizer()
    message = "[{{ 'bot' if m.role == 'assistant' else m.role }}]{{ m.content }}<eos>"
    beginning = "{% if add_generation_prompt %}[bot]{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + message + "{% endfor %}" + beginning
    return tokenizer


def play(task, prompt, tokenizer, says: list[list[str]], max_tokens: int = 4096, max_new_tokens: int = 40):
    """The rollouts of a model that says in each sample what stands there, turn by turn."""
    asked = {
        named_seed(1, prompt.id, sample, turn): text for sample, of in enumerate(says) for turn, text in enumerate(of)
    }

    async def ask(request):
        said = [tokenizer.encode(asked[seed], add_special_tokens=False) for seed in request.seeds]
        tokens = [np.array([*text, tokenizer.eos_token_id], np.int32)[: request.max_new_tokens] for text in said]
        return [
            Completion(
                t, np.full(len(t), -0.5), np.zeros(len(t)), "stop" if t[-1] == tokenizer.eos_token_id else "length"
            )
            for t in tokens
        ]

    async def score(prompt, rollouts):
        parts = [in_turns(task.score(prompt, answers)) for answers in rollouts]
        return [Score("ok", part, turn_rewards=turns) for part, turns in parts], 0.0

    sampling = Sampling(len(says), max_new_tokens, 1.0, max_tokens)
    played = run_group(
        prompt, task=task, tokenizer=tokenizer, ask=ask, score=score, sampling=sampling, seed=1, step_timeout=60
    )
    return asyncio.run(played).rollouts


TOKENIZERS = {"compact": character_tokenizer, "chat": chat_tokenizer}


@pytest.mark.parametrize("style", STYLES)
def test_a_worked_example_played_as_an_episode_is_right(style):
    task, tokenizer = task_of(style, credit_for_progress=0.5), TOKENIZERS[style]()
    for prompt in held_out_prompts(task, 3):
        shown = task.demonstration(prompt)
        [rollout] = play(task, prompt, tokenizer, [shown])
        assert rollout.status == "ok" and correct(rollout.reward) and len(rollout.turns) == len(shown) >= 10
        taught = asyncio.run(demonstrate(prompt, task, tokenizer, 60))
        assert taught.tokens.tolist() == rollout.tokens.tolist()
        assert taught.provenance.tolist() == rollout.provenance.tolist()


@pytest.mark.parametrize("style", STYLES)
def test_in_a_long_episode_the_models_tokens_are_its_own_and_no_others(style):
    """Whatever it says: commands at random, and what is none."""
    task, tokenizer, draw = task_of(style), TOKENIZERS[style](), random.Random(7)
    words = [*"nesw", "take", "open door", "go north", "?", "", ">", "Doors: east."]
    prompt = held_out_prompts(task, 1)[0]
    says = [[draw.choice(words) for _ in range(24)] for _ in range(4)]
    for said, rollout in zip(says, play(task, prompt, tokenizer, says), strict=True):
        mine = rollout.provenance == Provenance.MODEL
        assert len(rollout.turns) == 24 and rollout.status == "ok" and rollout.reward == 0.0
        for text, turn in zip(said, rollout.turns, strict=True):
            assert tokenizer.decode(rollout.tokens[turn.start : turn.stop]) == f"{text}<eos>"
            assert mine[turn.start : turn.stop].all()
        assert mine.sum() == sum(turn.stop - turn.start for turn in rollout.turns)
        assert ((rollout.logprobs != 0) == mine).all() and ((rollout.versions >= 0) == mine).all()
        read = told(task, prompt, said)
        assert len(read) == 24
        between = [rollout.tokens[a.stop : b.start] for a, b in pairwise(rollout.turns)]
        assert all(reply in tokenizer.decode(tokens) for reply, tokens in zip(read[1:], between, strict=True))


def test_the_longest_game_of_single_letters_has_room_in_the_tiny_model():
    """Were all that it reads as long as it gets: four doors, a refusal, a thing and the key."""
    task, tokenizer = task_of(), character_tokenizer()
    longest = max(len(text) for prompt in held_out_prompts(task, 50) for text in told(task, prompt, ["t"]))
    assert longest <= len("!nesw$*>") and 24 * (len("!nesw$*>") + len("t") + 1) < POSITIONS
    [rollout] = play(
        task, held_out_prompts(task, 1)[0], tokenizer, [["t"] * 24], max_tokens=POSITIONS, max_new_tokens=2
    )
    assert len(rollout.turns) == 24 and rollout.status == "ok"


def test_a_step_on_the_way_is_credited_to_its_own_turns():
    """Who took the key did better up to that turn than who did not, and no better or worse from then on."""
    task, tokenizer = task_of(credit_for_progress=0.5), character_tokenizer()
    prompt = held_out_prompts(task, 1)[0]
    shown = task.demonstration(prompt)
    taken = shown.index("t")
    says = [[*shown[: taken + 1], *["?"] * (23 - taken)], ["?"] * 24]
    rollouts = play(task, prompt, tokenizer, says)
    assert [rollout.turn_rewards for rollout in rollouts] == [
        [0.25 * (turn == taken) for turn in range(24)],
        [0.0] * 24,
    ]
    first, second = checked_advantages(TurnGRPO(), rollouts)
    two = 2  # tokens of an answer
    assert (first[: two * (taken + 1)] > 0).all() and (second[: two * (taken + 1)] < 0).all()
    assert not first[two * (taken + 1) :].any() and not second[two * (taken + 1) :].any()


# streams


def test_a_fifth_is_held_out_by_the_house_alone():
    compact, chat = task_of(max_turns=30, credit_for_progress=0.5), task_of("chat")
    prompts = [compact.prompt("train", 1, index) for index in range(500)]
    held_out = [prompt for prompt in prompts if compact.is_held_out(prompt)]
    assert 60 < len(held_out) < 140 and held_out == [prompt for prompt in prompts if chat.is_held_out(prompt)]
    trained, stream = set(), PromptStream(compact, 1)
    for _ in range(300):
        trained.add(next(stream).text)
    assert trained.isdisjoint(prompt.text for prompt in held_out_prompts(compact, 100))


MAKE = """
import json, sys
from dataclasses import asdict
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.environments.registry import make_task

task = make_task(TaskConfig(name="treasure"))
prompts = [task.prompt("train", 5, index) for index in range(30)]
print(json.dumps([[asdict(p), task.messages(p), task.demonstration(p), task.difficulty(p)] for p in prompts]))
"""


def test_games_are_the_same_in_every_process():
    made = [
        subprocess.run(
            [sys.executable, "-c", MAKE], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert made[0] == made[1]
    task = task_of()
    for prompt, asked, shown, difficulty in json.loads(made[0]):
        again = task.prompt("train", 5, int(prompt["id"].split("/")[1]))
        assert asdict(again) == prompt and task.messages(again) == asked
        assert task.demonstration(again) == shown and difficulty == str(len(shown))


def test_a_house_is_drawn_from_its_seed_alone():
    one, same, other = (draw_house(random.Random(seed), 8, 10) for seed in ("a", "a", "b"))
    assert one == same and one.name == same.name and one.name != other.name


def test_a_system_prompt_begins_the_chat():
    task = make_task(TaskConfig(name="treasure", style="chat", system_prompt="Be brief."))
    [system, user] = task.messages(task.prompt("train", 1, 1))
    assert system == {"role": "system", "content": "Be brief."} and "You have 24 turns." in user["content"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(rooms=2), "task.options.rooms"),
        (dict(rooms=6), "task.options.least_turns = 10 is too much to ask of 6 rooms: at most 9"),
        (dict(max_turns=15), "task.options.max_turns = 15 is not enough for 8 rooms"),
        (dict(credit_for_progress=1.0), "task.options.credit_for_progress"),
        (dict(room=8), "task.options.room"),
    ],
)
def test_mistakes_are_one_line(options, words):
    with pytest.raises(ConfigError) as caught:
        task_of(**options)
    [line] = str(caught.value).splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("settings", "words"),
    [(dict(reward="my:reward"), "leave task.reward out"), (dict(scoring="exact"), "of reasoning-gym families alone")],
)
def test_it_is_scored_by_its_game_alone(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_task(TaskConfig(name="treasure", **settings))
