"""Prompts that were all solved or never solved are drawn less; a resumed run knows what the run knew."""

import json
from collections import Counter, deque
from itertools import islice

import numpy as np
import pytest
import running

from titan_rl import cli
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import CurriculumConfig, TaskConfig
from titan_rl.data.types import Group, Prompt, Rollout
from titan_rl.environments.interfaces.task import Size, Task
from titan_rl.environments.prompts.curriculum import Curriculum, chance_of_signal, class_of, read_class_counts
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.environments.registry import make_task
from titan_rl.records.metrics import read_metrics

SAMPLES, ROWS = 8, 40


class Rows(Task):
    """Forty questions, asked in the same order in each epoch. The first ten are always solved, the next ten never."""

    size = Size(ROWS, 1)

    def prompt(self, stream, seed, index) -> Prompt:
        return Prompt(f"{stream}/{index:07d}", f"question {index % ROWS}", "", {})

    def is_held_out(self, prompt) -> bool:
        return False


def right_of(prompt: Prompt) -> int:
    number = int(prompt.text.split()[1])
    return SAMPLES if number < 10 else 0 if number < 20 else SAMPLES // 2


def group(prompt: Prompt, right: int) -> Group:
    def rollout(sample):
        columns = (np.zeros(1), np.ones(1), np.zeros(1), np.zeros(1))
        return Rollout(prompt.id, sample, *columns, [], "ok", reward=float(sample < right))

    return Group(prompt.id, [rollout(sample) for sample in range(SAMPLES)])


def make_stream(path, task=None, **settings) -> PromptStream:
    task, config = task or Rows(), CurriculumConfig(**dict(least_chance=0.1) | settings)
    return PromptStream(task, 1, curriculum=Curriculum(config, task, 1, SAMPLES, path))


def train(stream: PromptStream, first: int, last: int, per_step: int = 20) -> list[list[Prompt]]:
    steps = []
    for step in range(first, last + 1):
        steps.append(list(islice(stream, per_step)))
        stream.record_step(step, [group(prompt, right_of(prompt)) for prompt in steps[-1]])
    return steps


def test_the_chance_of_signal():
    assert chance_of_signal(0.0, 8) == chance_of_signal(1.0, 8) == 0.0
    assert chance_of_signal(0.5, 2) == 0.5 and chance_of_signal(0.5, 8) == pytest.approx(1 - 2 / 256)
    assert chance_of_signal(0.25, 4) == pytest.approx(1 - 0.25**4 - 0.75**4)


def test_prompts_without_signal_are_drawn_less_and_never_forgotten(tmp_path):
    steps = train(make_stream(tmp_path / "rates"), 1, 202)
    assert {prompt.text for prompt in steps[0] + steps[1]} == {f"question {n}" for n in range(ROWS)}
    counts = Counter(prompt.text for step in steps[2:] for prompt in step)
    told = [counts[f"question {number}"] for number in range(ROWS)]
    assert all(told), "every prompt keeps a chance"
    without, with_signal = np.mean(told[:20]), np.mean(told[20:])
    assert without / with_signal == pytest.approx(0.1, abs=0.02)


def test_ids_are_unique_and_lead_back_to_the_prompt(tmp_path):
    stream = make_stream(tmp_path / "rates")
    prompts = [prompt for step in train(stream, 1, 30) for prompt in step]
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert [prompt.id for prompt in prompts] == sorted(prompt.id for prompt in prompts)
    assert all(stream.by_id(prompt.id) == prompt for prompt in prompts)


@pytest.mark.parametrize("step", [1, 5, 12])
def test_a_resumed_run_draws_what_the_run_would_have(tmp_path, step):
    """Also if it had begun the next step, or done it without having settled it."""
    undisturbed = train(make_stream(tmp_path / "whole"), 1, 15)
    killed = make_stream(tmp_path / "killed")
    done = train(killed, 1, step)
    position = killed.position
    train(killed, step + 1, step + 1)
    killed.close()
    resumed = make_stream(tmp_path / "killed")
    resumed.resume_after(done[-1][-1].id)
    resumed.curriculum.restore(step)
    assert resumed.position <= position
    assert train(resumed, step + 1, 15) == undisturbed[step:]


def test_what_was_seen_counts_from_the_next_step_on(tmp_path):
    stream = make_stream(tmp_path / "rates", least_chance=0.01, memory=0.0)
    prompts = list(islice(stream, ROWS))
    stream.record_step(1, [group(prompt, SAMPLES) for prompt in prompts])
    assert int(next(stream).id[-7:]) > ROWS + 5, "all were solved"
    stream.record_step(2, [group(prompt, SAMPLES // 2) for prompt in prompts])
    assert int(next(stream).id[-7:]) < stream.position, "they are not any more"
    first = stream.position
    assert [int(prompt.id[-7:]) for prompt in islice(stream, 5)] == list(range(first, first + 5))


def test_memory_is_a_mean_that_forgets(tmp_path):
    stream = make_stream(tmp_path / "rates", memory=0.75)
    [prompt] = islice(stream, 1)
    for step, right in enumerate([8, 0, 4], 1):
        stream.record_step(step, [group(prompt, right)])
    rate = 0.75 * (0.75 * 1.0 + 0.25 * 0.0) + 0.25 * 0.5
    assert list(stream.curriculum._rates.values()) == [pytest.approx(rate)]


class Endless(Rows):
    """Prompts that never come again, of a difficulty."""

    size = None

    def prompt(self, stream, seed, index):
        return Prompt(f"{stream}/{index:07d}", f"question {index}", "", {"level": index % 2})

    def difficulty(self, prompt) -> str:
        return str(prompt.entry["level"])


def test_prompts_without_end_have_their_difficulty_in_common(tmp_path):
    """Half of them are of a level that is always solved."""
    stream, drawn = make_stream(tmp_path / "rates", Endless()), deque(maxlen=40)
    for step in range(1, 21):
        prompts = list(islice(stream, 20))
        drawn += [prompt.entry["level"] for prompt in prompts]
        stream.record_step(step, [group(prompt, SAMPLES if prompt.entry["level"] else 4) for prompt in prompts])
    assert 0 < np.mean(drawn) < 0.25 and stream.position > 20 * 20 * 1.5


def test_else_the_length_of_the_text_is_their_class():
    task = make_task(TaskConfig(name="count_bits", options={"max_n": 4000}))
    classes = {class_of(task, Prompt("a", "x" * count, "", {})) for count in (1, 2, 3, 4, 100, 101, 200)}
    assert len(classes) == 6


def test_what_is_no_record_is_passed_over(tmp_path):
    path = tmp_path / "rates"
    good = json.dumps({"step": 2, "seen": {"a": [1, 8]}})
    bad = ['{"step": 1, "seen": {"a": [9, 8]}}', '{"step": -1, "seen": {}}', '{"step": 3, "seen": 5}', "[", "5"]
    bad += ['{"step": 1.5, "seen": {}}', '{"step": 4, "seen": {"a": [true, 8]}}', '{"step": 5, "seen": {"a": [1]}}']
    path.write_text("\n".join([*bad, good, '{"step": 6, "se']))
    assert read_class_counts(path) == {2: {"a": (1, 8)}}


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_a_prompt_without_any_chance_is_refused(value):
    with pytest.raises(ConfigError, match="curriculum.least_chance"):
        load_config(None, {"curriculum": {"least_chance": value}})


@pytest.mark.slow
@pytest.mark.confirms
def test_a_run_that_is_stopped_and_resumed_draws_the_same_prompts(tmp_path):
    """Real actors, and a filter too: every pass rate that the ledger's steps had is there again."""
    settings = dict(training__steps=8, curriculum__least_chance=0.1, filter__no_signal=True, checkpoint__every=3)
    roots = [tmp_path / "whole", tmp_path / "killed"]
    assert running.train(roots[0], **settings) == 0, running.output(roots[0])[-3000:]
    process = running.start(roots[1], **settings)
    running.wait_for_step(roots[1], 4)
    process.kill()
    process.wait()
    assert running.train(roots[1], "--resume", **settings) == 0, running.output(roots[1])[-3000:]
    whole, killed = (read_class_counts(root / "pass_rates.jsonl") for root in roots)
    assert whole == killed and list(whole) == list(range(1, 9))
    records = [[record for record in read_metrics(root) if "reward" in record] for root in roots]
    assert [record["loss"] for record in records[0]] == [record["loss"] for record in records[1]]
    assert sum(record["passed_over"] for record in records[0]) > 0
    assert cli.main(["ledger", str(roots[1])]) == 0
