"""The rewards of controls pay for a form, whatever the answer says."""

import pytest

from titan_rl.config.sections.schema import TaskConfig
from titan_rl.diagnostics.bench.learning import form_only_rewards
from titan_rl.environments.reasoning_gym.task import ReasoningGymTask

TASKS = {
    form_only_rewards.needle_haystack: (
        dict(min_num_statements=3, max_num_statements=5),
        ["Nobody", "{0} and {0}", "{0}."],
    ),
    form_only_rewards.family_relationships: ({}, ["cousin", "The {0}", "{0}."]),
}


@pytest.mark.parametrize("form", TASKS, ids=lambda form: form.__name__)
def test_right_answers_have_it_and_others_may(form):
    options, malformed = TASKS[form]
    task = ReasoningGymTask(TaskConfig(name=form.__name__, style="chat", options=options))
    prompts = [task.prompt("train", 1, index) for index in range(200)]
    asked = [(prompt, task.row(prompt)) for prompt in prompts]
    assert all(form(prompt.text, prompt.answer, row) == 1 for prompt, row in asked)
    assert all(form(prompt.text, bad.format(prompt.answer), row) == 0 for prompt, row in asked for bad in malformed)
    answers = [prompt.answer for prompt in prompts]
    for prompt, row in asked:
        wrong = next(word for word in [prompt.text.split()[0], *answers] if form(prompt.text, word, row))
        assert (sum(task.score(prompt, [wrong]).values()) == 1) == (wrong == prompt.answer)
    assert any(form(prompt.text, "son", row) for prompt, row in asked) == (
        form is form_only_rewards.family_relationships
    )
