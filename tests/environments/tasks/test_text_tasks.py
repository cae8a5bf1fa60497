"""Tasks on words, names and sentences: what they ask, what a worked example earns, and what a wrong answer does not."""

import asyncio
import statistics

import pytest

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import BUILT_IN_TASKS, TaskConfig
from titan_rl.data.seeds import is_held_out
from titan_rl.environments.prompts.stream import PromptStream, held_out_prompts
from titan_rl.environments.registry import BUILT_IN, make_task
from titan_rl.environments.rollout.demonstrations import demonstrate, worked_answers
from titan_rl.environments.tasks.text.wordle import consistent, feedback, secret_words
from titan_rl.models.builtin.tokenizer import character_tokenizer

NAMES, STYLES = ("alphabet_sort", "reverse_text", "wordle"), ("compact", "chat")


def task_of(name: str, style: str = "compact", **options):
    return make_task(TaskConfig(name=name, style=style, options=options))


def prompts(task, count: int = 40) -> list:
    stream = PromptStream(task, 1)
    return [next(stream) for _ in range(count)]


def replies(task, prompt, answers: list[str]) -> list[str]:
    """What the environment says to these answers."""
    environment = task.environment(prompt)
    told = [asyncio.run(environment.step(answer)).messages for answer in answers]
    return [messages[0]["content"] if messages else "" for messages in told]


def total(parts) -> float:
    return sum(value if isinstance(value, float) else sum(value) for value in parts.values())


def test_the_configuration_knows_every_built_in_task():
    assert set(BUILT_IN) == set(BUILT_IN_TASKS) and set(NAMES) < set(BUILT_IN)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", NAMES)
def test_a_worked_example_earns_all_and_the_episode_is_over_with_it(name, style):
    task = task_of(name, style)
    for prompt in prompts(task):
        answers = worked_answers(task, prompt)
        assert total(task.score(prompt, answers)) == pytest.approx(1.0)
        said = replies(task, prompt, answers)
        assert all(said[:-1]) and not said[-1]


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_its_stream_s_and_held_out_ones_are_trained_on_nowhere(name):
    task = task_of(name)
    assert task.prompt("train", 1, 7) == task_of(name).prompt("train", 1, 7) != task.prompt("train", 2, 7)
    held_out = held_out_prompts(task, 30)
    assert all(map(task.is_held_out, held_out)) and not any(map(task.is_held_out, prompts(task, 200)))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_written_in_characters_that_the_tiny_model_knows(name):
    task, tokenizer = task_of(name), character_tokenizer()
    for prompt in prompts(task, 20):
        rollout = asyncio.run(demonstrate(prompt, task, tokenizer, 5.0))
        assert len(rollout.turns) == len(worked_answers(task, prompt)) and len(rollout.tokens) < 256


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("answer", ["", "nan", "0", "a" * 5000, "\n".join(map(str, range(400)))])
def test_nothing_is_paid_for_an_answer_that_says_nothing(name, answer):
    for style in STYLES:
        task = task_of(name, style)
        assert statistics.mean(total(task.score(prompt, [answer])) for prompt in prompts(task)) < 0.15


# reversed text


def test_the_reward_grows_with_similarity_and_only_the_exact_text_has_it_all():
    task = task_of("reverse_text", min_words=4)
    for prompt in prompts(task):
        first, half = prompt.answer[:-1], prompt.answer[: len(prompt.answer) // 2]
        scores = [total(task.score(prompt, [answer])) for answer in ("", half, first, prompt.answer)]
        assert scores == sorted(scores) and scores[0] == 0 and scores[2] < 1 == scores[3]


@pytest.mark.parametrize(
    "written", ["{0}", "<reversed_text>{0}", "<reversed_text>x</reversed_text> <reversed_text>{0}</reversed_text>"]
)
def test_a_chat_s_answer_is_between_one_pair_of_tags(written):
    task = task_of("reverse_text", "chat")
    prompt = prompts(task, 1)[0]
    assert total(task.score(prompt, [written.format(prompt.answer)])) == 0


@pytest.mark.parametrize(
    ("answer_of", "low", "high"),
    [
        (lambda prompt: " eht fo dna", 0.2, 0.35),
        (lambda prompt: prompt.text, 0.15, 0.3),
        (lambda prompt: " ".join(word[::-1] for word in prompt.text.split()), 0.35, 0.5),
    ],
)
def test_the_floor_of_the_reward_is_as_documented(answer_of, low, high):
    task = task_of("reverse_text")
    assert low < statistics.mean(total(task.score(each, [answer_of(each)])) for each in prompts(task, 200)) < high


def test_single_words_are_short_and_held_out_by_themselves():
    task = task_of("reverse_text", min_words=1, max_words=1, max_characters=6)
    trained, held_out = ({each.text for each in some} for some in (prompts(task, 300), held_out_prompts(task, 60)))
    assert not trained & held_out and all(len(text) <= 6 and " " not in text for text in trained | held_out)


def test_random_words_are_endless_and_split_by_their_text():
    task = task_of("reverse_text", min_words=1, max_words=2, max_characters=6, random_words=True)
    prompts = [task.prompt("train", 1, index) for index in range(500)]
    words = [word for prompt in prompts for word in prompt.text.split()]
    assert {len(word) for word in words} == {1, 2, 3, 4, 5, 6} and all(word.islower() for word in words)
    long = [word for word in words if len(word) > 3]
    assert len(set(long)) > 0.99 * len(long)
    assert 60 < sum(task.is_held_out(prompt) for prompt in prompts) < 140
    assert all(prompt.answer == prompt.text[::-1] for prompt in prompts)


def test_spaced_characters_are_compared_one_by_one():
    task = task_of("reverse_text", min_words=1, max_words=1, max_characters=6, spaced=True)
    for prompt in prompts(task, 50):
        assert prompt.text[1::2].strip() == "" and prompt.answer == prompt.text[::-1]
        letters = prompt.answer.split(" ")
        scores = [total(task.score(prompt, [each])) for each in (prompt.answer, "".join(letters), " " * len(letters))]
        assert scores[0] == 1 and (len(letters) == 1 or scores[1:] == [0, 0])


# Wordle


@pytest.mark.parametrize(
    ("guess", "secret", "expected"),
    [
        ("crane", "crane", "ggggg"),
        ("speed", "abide", "--y-y"),
        ("allee", "apple", "gy--g"),
        ("geese", "those", "---gg"),
        ("eerie", "those", "----g"),
        ("llama", "hello", "yy---"),
    ],
)
def test_a_letter_counts_as_often_as_the_secret_has_it(guess, secret, expected):
    assert feedback(guess, secret) == expected


def test_consistent_words_hold_the_secret_and_shrink():
    left, secret = [secret_words()], "those"
    for guess in ("crane", "moist"):
        left.append(consistent(left[-1], guess, secret))
        assert secret in left[-1] and len(left[-1]) < len(left[-2])
    assert consistent(left[0], secret, secret) == ["those"] and len(left[0]) > 2000


@pytest.mark.parametrize("candidates", [0, 10])
def test_held_out_words_are_in_no_game_that_is_trained_on(candidates):
    task = task_of("wordle", candidates=candidates)
    games = [(task.messages(prompt), *worked_answers(task, prompt)) for prompt in prompts(task, 300)]
    words = {word for game in games for text in game for word in text.strip(">").split()}
    assert len(words) > 500 and not any(map(is_held_out, words))


def test_candidates_are_listed_with_the_secret_among_them():
    for style in STYLES:
        task = task_of("wordle", style, candidates=10)
        for prompt in [*prompts(task), *held_out_prompts(task, 20)]:
            candidates = prompt.entry["candidates"]
            assert len(set(candidates)) == 10 and prompt.answer in candidates
            assert all(word in str(task.messages(prompt)) for word in candidates)
            guesses = [task.guess(answer) for answer in worked_answers(task, prompt)]
            assert set(guesses) <= set(candidates) and guesses[-1] == prompt.answer


def test_a_game_ends_when_it_is_won_or_lost_and_what_is_no_word_costs_its_turn():
    task = task_of("wordle", max_turns=3)
    prompt = next(each for each in prompts(task) if each.answer not in ("crane", "moist"))
    assert replies(task, prompt, ["crane", "no word", "moist"])[1:] == ["?????\n", ""]
    assert replies(task, prompt, ["crane", prompt.answer])[-1] == ""
    assert task.score(prompt, ["crane", "moist", "crane", prompt.answer])["won"] == 0, "a fourth guess came too late"


def test_the_best_guess_of_a_lost_game_earns_a_part():
    task = task_of("wordle", credit_for_letters=0.5)
    prompt = prompts(task, 1)[0]
    near = prompt.answer[:4] + next(letter for letter in "abc" if letter != prompt.answer[4])
    assert task.score(prompt, ["zzzzz", near, "zzzzz"]) == {"won": 0.0, "letters": pytest.approx(0.4)}


def test_the_secret_is_in_nothing_that_the_model_reads():
    for style in STYLES:
        task = task_of("wordle", style)
        for prompt in prompts(task):
            read = [str(task.messages(prompt)), *replies(task, prompt, ["<guess>zzzzz</guess>"] * 5)]
            assert not any(prompt.answer in text for text in read) or prompt.answer == "crane"


# names in order


@pytest.mark.parametrize(("power", "most"), [(4.0, 0.3), (8.0, 0.15)])
def test_lists_in_the_order_of_insertion_earn_little(power, most):
    task = task_of("alphabet_sort", "chat", power=power)

    def inserted(prompt, turn: int) -> str:
        lines = [
            f"{''.join(name)}{' // new' * (turn == at > 0)}"
            for at, names in enumerate(prompt.entry["names"][: turn + 1])
            for name in names
        ]
        return "<sorted>\n" + "\n".join(lines) + "\n</sorted>"

    scores = [total(task.score(prompt, [inserted(prompt, turn) for turn in range(3)])) for prompt in prompts(task, 100)]
    assert statistics.mean(scores) < most


def test_first_names_alone_are_sorted_by_themselves():
    task = task_of("alphabet_sort", "chat", has_last_names=False, turns=1, min_names=3, max_names=3)
    for prompt in prompts(task):
        assert prompt.answer.split("\n") == sorted(name for [name] in prompt.entry["names"][0])


def test_lists_are_sorted_by_the_name_that_is_asked_for_and_mark_what_is_new():
    task = task_of("alphabet_sort", "chat")
    entry = {"names": [[["Ben", "Adams"], ["Ada", "Zorn"]], [["Cal", "Brook"]]], "by": 1}
    assert task._written(entry, 0) == "BenAdams\nAdaZorn"
    assert task._written(entry, 1) == "BenAdams\nCalBrook // new\nAdaZorn"
    assert task._written(entry | {"by": 0}, 1) == "AdaZorn\nBenAdams\nCalBrook // new"


def test_each_turn_counts_and_a_turn_that_was_not_reached_is_empty():
    task = task_of("alphabet_sort", power=1.0)
    prompt = prompts(task, 1)[0]
    answers = worked_answers(task, prompt)
    assert task.score(prompt, answers[:2])["order"] == pytest.approx(2 / 3)
    shuffled = [*answers[:2], " ".join(reversed(answers[2].split()))]
    assert 2 / 3 < task.score(prompt, shuffled)["order"] < 1
    strict = task_of("alphabet_sort", power=8.0)
    assert strict.score(prompt, shuffled)["order"] < task.score(prompt, shuffled)["order"]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("reverse_text", dict(min_words=9, max_words=8), "min_words = 9"),
        ("reverse_text", dict(max_characters=1), "max_characters = 1"),
        ("alphabet_sort", dict(min_names=5), "min_names = 5"),
        ("wordle", dict(max_turns=0), "task.options.max_turns"),
        ("wordle", dict(turns=6), "task.options.turns"),
    ],
)
def test_mistakes_are_one_line(name, options, words):
    with pytest.raises(ConfigError) as caught:
        task_of(name, **options)
    [line] = str(caught.value).splitlines()
    assert words in line
