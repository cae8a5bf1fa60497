"""What a person sees of a step's rollouts: prompts, answers and what they earned, and nothing that harms."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from made_rollouts import rollout_of

from titan_rl import cli
from titan_rl.config.io.printable import printable
from titan_rl.data.images import PlacedImage, sizes_in_words
from titan_rl.data.types import Group
from titan_rl.diagnostics.show import lines_of
from titan_rl.records.steps.rollouts import write_rollouts

NAME = "train/0000001"
EVIL = "\x1b[2J\x9b31mred\r\n[bold]x[/bold]\u202e"


def group_of(*answers: str, prompt_id: str = NAME) -> Group:
    rollouts = [
        rollout_of(prompt_id, i, text=text, reward=float(i), reward_parts={"form": 0.0, "right": float(i)})
        for i, text in enumerate(answers)
    ]
    return Group(prompt_id, rollouts, question="1 + 1 =\n", expected="2")


@pytest.fixture
def run(tmp_path):
    (tmp_path / "rollouts").mkdir()
    write_rollouts(tmp_path / "rollouts", 1, [group_of("2")])
    write_rollouts(tmp_path / "rollouts", 3, [group_of("3", "2"), group_of(EVIL, prompt_id="train/0000002")])
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def show(capsys, *arguments) -> str:
    assert cli.main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_last_step_is_shown(run, capsys):
    lines = show(capsys, run).splitlines()
    assert lines[0] == f"step 3 of {run}"
    assert lines[2] == "train/0000001  1 + 1 =\\n" and lines[3].split() == ["expected", "2"]
    assert lines[4].split() == ["1.000", "ok", "2", "(form", "0,", "right", "1)"]
    assert lines[5].split()[:3] == ["0.000", "ok", "3"]


def test_nothing_that_a_model_wrote_reaches_the_terminal_but_text(run, capsys):
    shown = show(capsys, run, "--prompt", "train/0000002")
    assert all(sign == "\n" or sign.isprintable() for sign in shown)
    assert r"\x1b[2J\x9b31mred\r\n[bold]x[/bold]\u202e" in shown
    assert printable("a é 中") == "a é 中"


def test_what_a_model_wrote_is_shown_where_the_locale_is_none(run):
    """Emoji, Chinese, flags, and half a character, which was decoded to U+FFFD."""
    answer = "😀 中文 🇩🇪 \ufffd"
    write_rollouts(run / "rollouts", 4, [group_of(answer)])
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))
    }
    program = f"import sys; from titan_rl import cli; sys.exit(cli.main(['show', {str(run)!r}]))"
    shown = subprocess.run(
        [sys.executable, "-c", program], env=environment | {"LC_ALL": "C"}, capture_output=True, check=True
    )
    assert answer in shown.stdout.decode()


def test_nothing_that_a_forged_run_holds_beside_answers_reaches_the_terminal_but_text(tmp_path, capsys):
    """Names of prompts, states and parts of rewards, too; and a mistake that quotes one."""
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.json").write_text("{}")
    name = "train/\x1b]0;owned\x07\x1b[2J[/]"
    group = group_of("2", prompt_id=name)
    group.expected = "\x1b]52;c;cm0=\x07"
    group.rollouts[0].reward_parts = {"\x9b31m": 0.0, "b\x1b[2J": 1.0}
    write_rollouts(tmp_path / "rollouts", 1, [group])
    shown = show(capsys, tmp_path)
    assert all(sign == "\n" or sign.isprintable() for sign in shown)
    assert r"train/\x1b]0;owned\x07\x1b[2J[/]" in shown and r"(\x9b31m 0, b\x1b[2J 1)" in shown
    assert cli.main(["show", str(tmp_path), "--prompt", "\x1b[2J"]) == 2
    assert all(sign == "\n" or sign.isprintable() for sign in capsys.readouterr().err)


def test_answers_that_are_alike_are_shown_once():
    group = group_of("7", "7", "8")
    for rollout in group.rollouts:
        rollout.reward, rollout.reward_parts = 0.0, {"right": 0.0}
    assert [str(line).split() for line in lines_of(group)][3:] == [
        ["2", "x", "0.000", "ok", "7"],
        ["0.000", "ok", "8"],
    ]


def test_images_of_a_prompt_are_told_by_their_sizes(tmp_path, capsys):
    group, text = group_of("2", "3"), group_of("2", prompt_id="train/0000002")
    image = PlacedImage(np.zeros((8, 16, 3), np.uint8), (1, 2), 0)
    for rollout in group.rollouts:
        rollout.images = (image, image.moved(2))
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.json").write_text("{}")
    write_rollouts(tmp_path / "rollouts", 1, [group, text])
    _, _, asked, images, expected, *others = show(capsys, tmp_path).splitlines()
    assert asked.startswith(NAME) and expected.split() == ["expected", "2"] and "pixels" not in str(others)
    assert images == "  images    16 x 8 pixels (2 tokens), 16 x 8 pixels (2 tokens)"
    seeing, plain = json.loads(show(capsys, tmp_path, "--json"))["groups"]
    assert seeing["images"] == [{"width": 16, "height": 8, "tokens": 2}] * 2 and plain["images"] == []
    assert sizes_in_words([image] * 10).endswith("(2 tokens), 2 more")


def test_a_step_and_a_number_of_prompts_can_be_chosen(run, capsys):
    assert show(capsys, run, "--step", 1).startswith("step 1 of")
    assert "train/0000002" not in show(capsys, run, "--count", 1)
    found = json.loads(show(capsys, run, "--json", "--count", 0))
    assert found["step"] == 3 and [group["prompt_id"] for group in found["groups"]] == [NAME, "train/0000002"]
    assert (
        found["groups"][0]["prompt"] == "1 + 1 =\n" and found["groups"][0]["samples"][1]["reward_parts"]["right"] == 1
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "2"], "step 2 is not recorded: give --step 1 to 3"),
        (["--prompt", "train/9"], "step 3 has no prompt 'train/9'"),
        (["--count", "-1"], "--count -1"),
        (["--run.seed", "1"], "show has nothing to override"),
    ],
)
def test_a_mistake_is_one_line(run, capsys, arguments, said):
    assert cli.main(["show", str(run), *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "none"])
def test_a_folder_without_a_run_is_said_to_hold_none(tmp_path, capsys, name):
    assert cli.main(["show", str(tmp_path / name)]) == 2
    assert f"{tmp_path / name} holds no run: give a run directory" in capsys.readouterr().err


def test_a_run_without_rollouts_is_one_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["show", str(tmp_path)]) == 2
    assert "holds no rollouts yet" in capsys.readouterr().err
