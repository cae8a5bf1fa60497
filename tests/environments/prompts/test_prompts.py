"""Training never sees a held-out text, and a stream goes on where it stopped."""

import hashlib
import json
from itertools import islice

import pytest

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.seeds import is_held_out, named_seed
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.task import Task
from titan_rl.environments.prompts.stream import PromptStream, held_out_prompts, sft_stream
from titan_rl.environments.registry import make_task


class FewTexts(Task):
    """A task with 500 different texts, so that any two streams meet often."""

    size = None

    def __init__(self, num_texts: int = 500):
        self.num_texts = num_texts

    def is_held_out(self, prompt: Prompt) -> bool:
        return is_held_out(prompt.text)

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        return Prompt(f"{stream}/{index:07d}", f"text {named_seed(seed, index) % self.num_texts}", "", {"seed": seed})


@pytest.mark.parametrize("name", ["train", "warmup"])
@pytest.mark.parametrize("seed", range(5))
def test_training_and_held_out_share_no_text(seed, name):
    trained = {prompt.text for prompt in islice(PromptStream(FewTexts(), seed, name), 2000)}
    held_out = {prompt.text for prompt in held_out_prompts(FewTexts(), 60)}
    assert len(trained) > 300 and len(held_out) == 60
    assert not trained & held_out
    assert not any(map(is_held_out, trained))


def test_held_out_prompts_are_the_first_of_any_larger_set():
    ids = [prompt.id for prompt in held_out_prompts(FewTexts(), 60)]
    assert [prompt.id for prompt in held_out_prompts(FewTexts(), 20)] == ids[:20]
    assert len(set(ids)) == 60


def test_about_a_fifth_is_held_out():
    assert 0.17 < sum(is_held_out(f"text {n}") for n in range(2000)) / 2000 < 0.23


def test_stream_goes_on_from_its_position():
    stream = PromptStream(FewTexts(), seed=3)
    first = list(islice(stream, 20))
    resumed = PromptStream(FewTexts(), seed=3, position=stream.position)
    assert [next(resumed) for _ in range(10)] == [next(stream) for _ in range(10)]
    assert [next(PromptStream(FewTexts(), seed=3))] == first[:1]


def test_ids_are_unique_and_lead_back_to_the_prompt():
    stream = PromptStream(FewTexts(), seed=3)
    prompts = list(islice(stream, 100))
    assert len({prompt.id for prompt in prompts}) == 100
    assert [stream.by_id(prompt.id) for prompt in prompts] == prompts


def test_seeds_and_names_give_different_streams():
    streams = [PromptStream(FewTexts(), 1), PromptStream(FewTexts(), 2), PromptStream(FewTexts(), 1, "warmup")]
    texts = [tuple(prompt.text for prompt in islice(stream, 10)) for stream in streams]
    assert len(set(texts)) == 3


def test_task_with_too_few_held_out_prompts():
    num_held_out = sum(is_held_out(f"text {n}") for n in range(100))
    assert len(held_out_prompts(FewTexts(100), num_held_out)) == num_held_out
    with pytest.raises(ConfigError, match=f"eval.prompts = 50, .* only about {num_held_out} "):
        held_out_prompts(FewTexts(100), 50)


def test_named_seeds_tell_their_names_apart():
    assert named_seed(1, "train", 2) == 3273768033216683414, "in every process and every release"
    names = [("a",), ("b",), ("a", "b"), ("ab",), (1, 12), (11, 2), (12, 1), ("a", "", "b"), ("a", "b", "")]
    assert len({named_seed(*name) for name in names}) == len(names)
    assert all(0 <= named_seed(n) < 2**63 for n in range(1000))


@pytest.mark.parametrize(
    ("name", "style", "options", "digests"),
    [
        ("gcd", "compact", {}, ["7c519f9a27b4afeb", "281d6138cb6acd06", "1c116fa2d5fcb293"]),
        ("gcd", "compact", {"max_value": 30}, ["01aa5573fec7198f", "74ed88c31d28b5a9", "233f8b95b32689e2"]),
        ("chain_sum", "compact", {"max_terms": 3}, ["cb1ad6ccefd74bf5", "5bc7f222b20b44ee", "edf85aa1c61ef781"]),
        ("letter_counting", "chat", {"shots": 2}, ["e5142f138ebb1c59", "467670c88ecaeef5", "2446d4f722d58e28"]),
    ],
)
def test_streams_and_held_out_sets_are_those_of_earlier_releases(name, style, options, digests):
    """Taken before tasks could come from data files. A run that is resumed or replayed needs the same prompts."""
    task = make_task(TaskConfig(name=name, style=style, options=options))

    def digest(prompts) -> str:
        lines = [json.dumps([p.id, p.text, p.answer, p.entry, task.messages(p)]) for p in prompts]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()

    streams = islice(PromptStream(task, 1), 50), islice(sft_stream(task, 7), 50), held_out_prompts(task, 40)
    assert [digest(stream) for stream in streams] == digests
