"""``titan-rl eval`` as JSON: everything that was found, and nothing beside it."""

import json
from types import SimpleNamespace

import pytest

from titan_rl.cli import main
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import Config, GeneratorConfig
from titan_rl.controller.preflight.engine_checks import check_suite_decoding
from titan_rl.diagnostics.evaluation import command as evaluation
from titan_rl.environments.rollout.decoding import suite_decoding
from titan_rl.environments.rollout.suites import make_suites
from titan_rl.models.builtin.tiny import tiny_config
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.records.evaluations.results import Answer, Question, SuiteResult
from titan_rl.records.statistics import Proportion

SCORED = SuiteResult("a", 1, 1, False, [Question("q", "1?", "1", [Answer(0, "1", None, True, 1.0, "ok", 1)])], {}, {})
FP8 = Config(generator=GeneratorConfig(dtype="bfloat16", quantization="fp8_per_channel"))
UNSCORED = SuiteResult("b", 1, 1, False, [], {"q": "the judge is away"}, {})


@pytest.fixture
def command(monkeypatch, tmp_path):
    """A command on a TOML with suites, whose results are those that are given."""
    toml = tmp_path / "run.toml"
    toml.write_text("[[eval.suites]]\nname = 'gsm8k'\n")
    monkeypatch.setattr("titan_rl.train.evaluate_directory", lambda *arguments: Proportion(1, 2))
    monkeypatch.setattr(evaluation, "checked_suites", lambda *arguments: SimpleNamespace(config=FP8))
    monkeypatch.setattr(evaluation, "find_sources", lambda config: {})

    def run(*results: SuiteResult, fails: bool = False) -> int:
        async def evaluate(checked, record):
            for result in results:
                record(result)
            if fails:
                raise OSError("the machine went away")

        monkeypatch.setattr(evaluation, "_evaluate", evaluate)
        return main(["eval", "tiny", "--config", str(toml), "--json", "--out", str(tmp_path / "out")])

    return run


def test_json_holds_the_held_out_accuracy_beside_all_suites(command, capsys, tmp_path):
    assert command(SCORED) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["held_out"]["accuracy"] == 0.5 and not said.err
    [suite] = found["suites"]
    assert suite["suite"] == "a" and suite["metrics"]["avg@1"]["value"] == 1
    record = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert record["held_out"] == found["held_out"] and record["suites"] == found["suites"]
    assert (record["generator"]["dtype"], record["generator"]["quantization"]) == ("bfloat16", "fp8_per_channel")


def test_a_suite_that_could_not_be_scored_is_an_error_behind_all_results(command, capsys, tmp_path):
    assert command(UNSCORED, SCORED) == 1
    said = capsys.readouterr()
    assert [suite["suite"] for suite in json.loads(said.out)["suites"]] == ["b", "a"]
    assert said.err == "no answer to the suite b could be scored, first q: the judge is away\n"


def test_results_are_written_as_their_suites_end(command, tmp_path):
    with pytest.raises(OSError, match="went away"):
        command(SCORED, fails=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.json", "a.parquet"]


def test_one_budget_of_the_command_line_is_for_suites_of_any_length():
    """It goes before each suite's own, and short suites do not refuse it."""
    tables = [{"name": "gsm8k"}, {"name": "aime", "thinking_budget": 4096}]
    config = load_config(None, {"eval": {"suites": tables}})
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    for budget in (1024, 0):
        given = evaluation._with_budget(config, budget)
        suites = make_suites(given)
        assert [suite_decoding(suite.config, given).thinking_budget for suite in suites] == [budget] * 2
        for suite in suites:
            check_suite_decoding(suite, given, tiny_config(), tokenizer)
    with pytest.raises(ConfigError, match="--thinking-budget -1"):
        evaluation._with_budget(config, -1)


def test_two_evaluations_do_not_write_into_one_folder(command, capsys, tmp_path):
    with evaluation._reserved(tmp_path / "out"):
        assert command(SCORED) == 2
        assert "another evaluation writes into" in capsys.readouterr().err
        assert (tmp_path / "out").is_dir(), "which the other one has yet to write into"
    assert not (tmp_path / "out").exists(), "nothing was written"
    assert command(SCORED) == 0 and json.loads(capsys.readouterr().out)["suites"]
