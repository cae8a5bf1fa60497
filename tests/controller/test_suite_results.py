"""What becomes of suites' results: each is recorded as its suite ends, and what fails in one ends nothing else."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from made_rollouts import rollout_of

from titan_rl.config.load import load_config
from titan_rl.controller.loop.suites import as_result, evaluate_suites
from titan_rl.data.types import Group, Prompt
from titan_rl.environments.rollout.suites import Suite, make_suites
from titan_rl.mesh.control.poison_prompts import ConsecutiveFailures, EveryPromptFails
from titan_rl.records.evaluations.results import SuiteResult
from titan_rl.records.evaluations.tables import table

STATUSES = "ok", "infra_error", "infra_error"


@pytest.fixture
def evaluation(tmp_path):
    """Two suites of eight questions each."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": f"{n}?", "answer": f"#### {n}"}) + "\n" for n in range(8)))
    first = {"name": "first", "suite": "gsm8k", "file": str(file)}
    tables = {"eval": {"suites": [first, first | {"name": "second"}]}, "rollout": {"max_retries": 0}}
    config = load_config(None, tables | {"generator": {"max_num_seqs": 1}})
    return config, [suite.with_prompts(4) for suite in make_suites(config)]


def answered(prompt: Prompt, status: str = "ok", text: str = "#### 1") -> Group:
    right = float(status == "ok" and text == f"#### {prompt.answer}")
    failure = "" if status == "ok" else f"the judge is away from {prompt.id}"
    return Group(prompt.id, [rollout_of(prompt.id, 0, status=status, reward=right, text=text, failure=failure)])


def results(evaluation, run_group) -> list[SuiteResult]:
    config, suites = evaluation
    found, faults = [], ConsecutiveFailures()

    async def take_statistics():
        return []

    async def run(prompt, sampling):
        faults.check()
        return run_group(prompt, faults)

    meshes = SimpleNamespace(
        dispatcher=SimpleNamespace(run_group=run, faults=faults), max_tokens=64, take_statistics=take_statistics
    )
    asyncio.run(evaluate_suites(meshes, suites, config, found.append))
    assert not faults._prompts, "the run's own prompts have not failed"
    return found


def test_a_suite_that_cannot_be_scored_is_recorded_so_beside_the_other(evaluation):
    def run_group(prompt, faults):
        return answered(prompt, "infra_error" if prompt.task == "eval/first" else "ok")

    first, second = results(evaluation, run_group)
    assert not first.questions and len(first.unscored) == 8 and "the judge is away" in first.first_failure
    assert "nothing scored" in str(first) and first.metrics == {"eval/first/unscored": 8}
    assert len(second.questions) == 8 and second.metrics["eval/second/pass@1"] == 1 / 8
    engine = second.as_dict()["settings"]["generator"]
    assert {"dtype", "quantization"} < engine.keys() and engine["tensor_parallel"] == 1
    assert "not scored" in table([first, second])


def test_a_suite_asks_no_more_once_three_questions_failed_for_one_reason(evaluation):
    asked = []

    def run_group(prompt, faults):
        asked.append(prompt.id)
        return answered(prompt, "ok" if prompt.id.endswith(("0", "1")) else "infra_error")

    for result in results(evaluation, run_group):
        assert len(result.questions) == 2 and len(result.unscored) == 6
    assert len(asked) < 16
    asked.clear()
    found = results(evaluation, lambda prompt, faults: answered(prompt, STATUSES[int(prompt.id[-1]) % 3]))
    assert [len(result.questions) for result in found] == [3, 3], "an answer between them is enough to go on"


def test_what_was_recorded_before_engines_die_stays_and_their_fault_is_raised(evaluation):
    found: list[SuiteResult] = []

    def run_group(prompt, faults):
        if prompt.task == "eval/second":
            faults._ended = EveryPromptFails("three prompts killed an engine")
            faults.check()
        return answered(prompt)

    config, suites = evaluation
    faults = ConsecutiveFailures()

    async def run(prompt, sampling):
        return run_group(prompt, faults)

    meshes = SimpleNamespace(dispatcher=SimpleNamespace(run_group=run, faults=faults), max_tokens=64)
    with pytest.raises(EveryPromptFails, match="killed an engine"):
        asyncio.run(evaluate_suites(meshes, suites, config, found.append))
    assert [result.name for result in found] == ["first"]


@pytest.mark.parametrize(("status", "right"), [("ok", 1.0), ("truncated", 1.0), ("timeout", 0.0)])
def test_an_answer_that_was_not_scored_is_right_by_no_reading(evaluation, status, right):
    suite: Suite = evaluation[1][0]
    groups = [answered(prompt, status, text=f"It is {prompt.answer}") for prompt in suite.prompts]
    found = as_result(suite, groups, {})
    assert found.metrics["eval/first/flexible/pass@1"] == right and found.metrics["eval/first/pass@1"] == 0


def test_rows_that_were_left_out_are_recorded(tmp_path):
    file, rows = tmp_path / "rows.jsonl", []
    for name, arguments in (("language:response_language", {"language": "hi"}), ("punctuation:no_comma", {})):
        rows.append({"prompt": name, "instruction_id_list": [name], "kwargs": [arguments]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [suite] = make_suites(load_config(None, {"eval": {"suites": [{"name": "ifeval", "file": str(file)}]}}))
    suite = suite.with_prompts(4)
    found = as_result(suite, [answered(prompt) for prompt in suite.prompts], {})
    assert found.as_dict()["left_out"] == 1 and "1 rows left out" in str(found) and "left out" in table([found])
