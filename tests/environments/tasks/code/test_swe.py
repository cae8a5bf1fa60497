"""Issues of repositories: what resolves them, what does not, and programs that ask the model for it."""

import asyncio
import json
import tarfile
from collections.abc import Awaitable, Callable, Iterator

import pytest
from boxes import own_images
from swe_agents import mini_swe_agent
from swe_tasks import Check, with_swe_task

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.agents.endpoint import Endpoint
from titan_rl.environments.agents.openai_requests import ModelRequest
from titan_rl.environments.interfaces.agent import Outcome
from titan_rl.environments.interfaces.environment import EnvironmentFailed, Reply
from titan_rl.environments.registry import make_task
from titan_rl.environments.sandbox.program import SandboxFailed
from titan_rl.environments.tasks.swe.rows import read_row
from titan_rl.environments.tasks.swe.swe_task import SweTask
from titan_rl.environments.tasks.swe.workspaces import PreparedWorkspaces

BUGGY = "def total(numbers):\n    return sum(numbers[1:])\n\n\ndef twice(x):\n    return 2 * x\n"
TESTS = "import unittest\nimport sums\n\nclass T(unittest.TestCase):\n    def test(self):\n        {}\n"
ROW = {
    "problem_statement": "total([1, 2]) gives 2 instead of 3",
    "files": {"sums.py": BUGGY, "tests/test_twice.py": TESTS.format("self.assertEqual(sums.twice(2), 4)")},
    "test_files": {"tests/test_total.py": TESTS.format("self.assertEqual(sums.total([5]), 5)")},
    "FAIL_TO_PASS": '["tests.test_total"]',
    "PASS_TO_PASS": ["tests.test_twice"],
    "calls": [
        {"function": "sums:total", "arguments": [[1, 2]], "expected": 3, "when": "FAIL_TO_PASS"},
        {"function": "sums:twice", "arguments": ["ab"], "expected": "abab", "when": "PASS_TO_PASS"},
    ],
    "solution": ["sed -i 's/numbers.1:./numbers/' sums.py"],
}
FIX = ROW["solution"][0]
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


@pytest.fixture(scope="module", autouse=True)
def _store(tmp_path_factory):
    with own_images(tmp_path_factory):
        yield


def with_task(folder, row: dict, check: Check, style: str = "chat", **options) -> None:
    file = folder / "rows.jsonl"
    rows = [row | {"problem_statement": f"{row['problem_statement']} ({number})"} for number in range(8)]
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    with_swe_task(folder, check, style, **{"file": str(file)} | options)


async def play(task: SweTask, prompt: Prompt, *commands: str) -> list[Reply]:
    """Replies to answers, each with one command."""
    environment = task.environment(prompt)
    try:
        return [await environment.step(f"So:\n```bash\n{command}\n```") for command in commands]
    finally:
        await environment.close()


@pytest.mark.parametrize(
    ("commands", "reward"),
    [
        ([FIX, "submit"], 1.0),
        ([FIX, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"], 1.0),
        (["submit"], 0.0),
        ([FIX, "sed -i 's/2 . x/x/' sums.py", "submit"], 0.0),
        (["rm -r tests; mkdir tests; echo > tests/test_total.py; ln -s /dev/null tests/test_twice.py", "submit"], 0.0),
        (["printf 'import os\\nos._exit(0)\\n' >> sums.py", "submit"], 0.0),
        (["printf 'import unittest\\nunittest.TestCase.run = lambda *a: None\\n' >> sums.py", "submit"], 0.0),
        (['printf \'import sys\\nprint([["3"], ["6"]])\\nsys.exit()\\n\' > json.py', "submit"], 0.0),
        (
            ["printf 'class A(int):\\n  __eq__ = lambda *a: True\\ntotal = twice = lambda *a: A(7)\\n' >> sums.py"],
            0.0,
        ),
    ],
)
def test_what_resolves_an_issue(tmp_path, commands, reward):
    async def check(task: SweTask, prompt: Prompt) -> None:
        *before, last = await play(task, prompt, *commands)
        assert all(reply.reward is None and reply.messages for reply in before)
        assert (last.reward, last.messages) == (reward, [])

    with_task(tmp_path, ROW, check, max_commands=len(commands))


@pytest.mark.parametrize(
    "command",
    [
        "rm /bin; mkdir /bin; printf '#!/usr/bin/env true\n' > /bin/bash; chmod 755 /bin/bash; cp /bin/{bash,python3}",
        "mv /etc /other; mkdir -p /etc; echo /workspace/x.so > /etc/ld.so.preload",
        "mkdir -p ~/.local/lib/python3.11/site-packages; cd $_; printf 'import os\nos._exit(0)\n' > usercustomize.py",
        "rm -r /workspace; ln -s /etc /workspace",
        "cd /; mv workspace other; echo > workspace",
        "rm -rf /workspace/* /workspace; mkdir /workspace",
        "mkdir -p x/x/x; cd x/x/x; for i in $(seq 500); do mkdir x; cd x; done; chmod 0 /workspace",
    ],
)
def test_no_change_outside_of_the_repository_counts(tmp_path, command):
    """Also where tests are judged by an exit code alone; and what is destroyed is wrong, and no fault of ours."""

    async def check(task: SweTask, prompt: Prompt) -> None:
        replies = await play(task, prompt, command, "submit")
        assert replies[-1].reward == 0.0

    with_task(tmp_path, ROW | {"calls": []}, check)


def test_the_model_is_shown_what_its_commands_say(tmp_path):
    async def check(task: SweTask, prompt: Prompt) -> None:
        assert prompt.text.startswith("total([1, 2]) gives 2")
        assert "```bash block" in prompt.text
        environment = task.environment(prompt)
        shown = [
            (await environment.step(answer)).messages[0]["content"]
            for answer in (
                "```bash\nls; echo oh >&2; exit 3\n```",
                "no command",
                "```bash\ncd tests && pwd\n```",
                "```sh\nseq 1000\n```",
                "```bash\n```",
            )
        ]
        await environment.close()
        assert shown[:3] == [
            "sums.py\ntests\noh\nexit code 3",
            "Give one ```bash block with the next command.",
            "/workspace/tests",
        ]
        assert "characters are left out here" in shown[3]
        assert len(shown[3]) < 150
        assert shown[4] == "(no output)"

    with_task(tmp_path, ROW, check, output_characters=100)


@pytest.mark.parametrize("protocol", ["block", "tool", "line"])
def test_the_worked_example_resolves_it(tmp_path, protocol):
    async def check(task: SweTask, prompt: Prompt) -> None:
        environment = task.environment(prompt)
        *_, last = [await environment.step(answer) for answer in task.demonstration(prompt)]
        await environment.close()
        assert last.reward == 1.0

    with_task(tmp_path, ROW, check, protocol=protocol, max_commands=3)


def test_a_patch_is_a_worked_example_too(tmp_path):
    patch = "--- a/sums.py\n+++ b/sums.py\n@@ -1,3 +1,3 @@\n def total(numbers):\n"
    patch += "-    return sum(numbers[1:])\n+    return sum(numbers)\n \n"
    row = {key: value for key, value in ROW.items() if key != "solution"} | {"patch": patch}

    async def check(task: SweTask, prompt: Prompt) -> None:
        environment = task.environment(prompt)
        *_, last = [await environment.step(answer) for answer in task.demonstration(prompt)]
        await environment.close()
        assert last.reward == 1.0

    with_task(tmp_path, row, check)


def test_setup_runs_once_for_all_samples_of_a_prompt(tmp_path):
    row = ROW | {"setup": "head -c 8 /dev/urandom | base64 > built"}

    async def check(task: SweTask, prompt: Prompt) -> None:
        both = await asyncio.gather(*(play(task, prompt, "cat built; echo mine >> built") for _ in range(4)))
        assert len({replies[0].messages[0]["content"] for replies in both}) == 1

    with_task(tmp_path, row, check)


def test_a_setup_that_fails_is_no_answer_of_the_models(tmp_path):
    async def check(task: SweTask, prompt: Prompt) -> None:
        with pytest.raises(EnvironmentFailed, match="setup ended with 7: no"):
            await play(task, prompt, "true")

    with_task(tmp_path, ROW | {"setup": "echo no; exit 7"}, check)


class FakeWorkspace:
    """Prepared workspace that counts what is done with it."""

    def __init__(self) -> None:
        self.num_forks, self.is_closed, self.fails = 0, False, False

    async def fork(self, port: int | None) -> "FakeWorkspace":
        await asyncio.sleep(0)
        if self.is_closed or self.fails:
            raise SandboxFailed("gone")
        self.num_forks += 1
        return self

    async def close(self) -> None:
        self.is_closed = True


def test_prepared_workspaces_are_kept_while_samples_wait_and_prepared_again_after_a_failure():
    async def check() -> None:
        prepared, made, slow = PreparedWorkspaces(), dict[str, list[FakeWorkspace]](), asyncio.Event()

        def preparing(prompt: str) -> Callable[[], Awaitable]:
            async def prepare() -> FakeWorkspace:
                made.setdefault(prompt, []).append(FakeWorkspace())
                if prompt == "slow":
                    await slow.wait()
                if prompt == "broken" and len(made[prompt]) == 1:
                    raise SandboxFailed("setup ended with 7")
                return made[prompt][-1]

            return prepare

        async def fork(prompt: str) -> None:
            await prepared.fork(prompt, preparing(prompt), None)

        waiting = [asyncio.create_task(fork("slow")) for _ in range(3)]
        for number in range(20):
            await asyncio.gather(*(fork(f"p{number}") for _ in range(2)))
        assert all(len(each) == 1 and each[0].num_forks == 2 for name, each in made.items() if name != "slow")
        assert [made[f"p{number}"][0].is_closed for number in range(20)] == [True] * 13 + [False] * 7
        slow.set()
        await asyncio.gather(*waiting)
        assert made["slow"][0].num_forks == 3
        failed = await asyncio.gather(*(fork("broken") for _ in range(2)), return_exceptions=True)
        assert [str(error) for error in failed] == ["setup ended with 7"] * 2
        await fork("broken")
        made["p19"][0].fails = True
        with pytest.raises(SandboxFailed):
            await fork("p19")
        await fork("p19")
        assert [each.is_closed for each in made["p19"]] == [True, False]

    asyncio.run(check())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem_statement": None}, "problem_statement"),
        ({"files": None}, "give one of them"),
        ({"workspace": "repository"}, "give one of them"),
        ({"files": {"../x": "1"}}, "outside of it"),
        ({"files": {"/x": "1"}}, "outside of it"),
        ({"FAIL_TO_PASS": [], "calls": []}, "nothing has to turn green"),
        ({"FAIL_TO_PASS": ["--help"]}, "taken for an option"),
        ({"FAIL_TO_PASS": "[1"}, "is no JSON"),
        (
            {"calls": [ROW["calls"][0] | {"function": "os.system"}]},
            "one of 'calls'",
        ),
        ({"calls": [{"function": "a:b"}]}, "each of 'calls'"),
        ({"test_command": 3}, "'test_command' is 3: give text"),
    ],
)
def test_a_row_that_cannot_be_meant_is_refused_by_its_place(change, message):
    with pytest.raises(ConfigError, match=f"rows.jsonl line 3: .*{message}"):
        read_row("rows.jsonl line 3", ROW | change)


@pytest.mark.parametrize("files", [{"a": "", "a/b": ""}, {"x" * 300: ""}, {"\udcff\ud800": ""}])
def test_files_that_no_file_system_has_are_one_line(files):
    with pytest.raises(ConfigError, match="cannot be laid out|is no text"):
        read_row("line 1", ROW | {"files": files}).image([])


def test_an_archive_must_say_where_its_repository_is(tmp_path):
    with tarfile.open(tmp_path / "system.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("code/repository/empty"))
        link = tarfile.TarInfo("testbed")
        link.type, link.linkname = tarfile.SYMTYPE, "/code/repository"
        archive.addfile(link)
    row = {key: value for key, value in ROW.items() if key != "files"} | {"workspace": "system.tar"}
    with pytest.raises(ConfigError, match="does not say where in it the repository is"):
        read_row("line 1", row).image([str(tmp_path)])
    assert read_row("line 1", row | {"folder": "/code/"}).image([str(tmp_path)]).folder == "/code"
    behind_link = read_row("line 1", row | {"folder": "/testbed"}).image([str(tmp_path)])
    assert behind_link.folder == "/code/repository", "the folder itself is judged, and not what links to it"
    with tarfile.open(tmp_path / "hostile.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("a:/w/empty"))
        link = tarfile.TarInfo("t")
        link.type, link.linkname = tarfile.SYMTYPE, "/a:/w"
        archive.addfile(link)
    with pytest.raises(ConfigError, match="folder '/a:/w' is none"):  # it would be two layers of a mount
        read_row("line 1", row | {"workspace": "hostile.tar", "folder": "/t"}).image([str(tmp_path)])
    with pytest.raises(ConfigError, match="folder '/other': it is not there"):
        read_row("line 1", row | {"folder": "/other"}).image([str(tmp_path)])
    with pytest.raises(ConfigError, match="folder '/a:/b' is none"):
        read_row("line 1", row | {"folder": "/a:/b"})


def test_a_workspace_is_below_the_runs_folders(tmp_path):
    row = {key: value for key, value in ROW.items() if key != "files"}
    for path, message in (("../x", "outside of it"), ("/etc", "outside of it"), ("nowhere", "is not there")):
        with pytest.raises(ConfigError, match=message):
            read_row("line 1", row | {"workspace": path}).image([str(tmp_path)])


# programs


AGENT = """
import json, os, subprocess, sys, urllib.request
said = sys.stdin.read()
assert said.strip() == os.environ["ISSUE"].strip()
while True:
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": said}]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    if answer == "done":
        break
    said = subprocess.run(answer, shell=True, capture_output=True, text=True).stdout or "nothing"
"""


class Answered:
    """Answer of a policy that has its answers by heart."""

    def __init__(self, text: str, request: ModelRequest):
        self.text, self.request = text, request

    def body(self, model: str) -> dict:
        choice = {"index": 0, "message": {"role": "assistant", "content": self.text}, "finish_reason": "stop"}
        return {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": model,
            "choices": [choice],
            "usage": USAGE,
        }


async def drive(task: SweTask, prompt: Prompt, said: Callable[[int], Iterator[str]]) -> tuple[Outcome, list[str]]:
    """Outcome of an agent to whom a policy says what it has by heart, and what it was asked last each time.

    ``said``: of the endpoint's port."""
    endpoint = Endpoint()
    await endpoint.start()
    answers, asked = said(int(endpoint.base_url.rpartition(":")[2].partition("/")[0])), list[str]()

    async def answer(request: ModelRequest) -> Answered:
        asked.append(request.messages[-1].content)
        return Answered(next(answers, "no more"), request)

    try:
        with endpoint.open(answer) as model:  # pyright: ignore[reportArgumentType]
            outcome = await task.agent(prompt).run(model)
    finally:
        await endpoint.close()
    assert isinstance(outcome, Outcome)
    return outcome, asked


def test_a_program_in_the_workspace_asks_the_model_and_nobody_else(tmp_path):
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "agent.py").write_text(AGENT)

    async def check(task: SweTask, prompt: Prompt) -> None:
        def said(port: int) -> Iterator[str]:
            yield from (FIX, f"echo tried; exec 3<>/dev/tcp/127.0.0.1/{port} && echo reached", "done")

        outcome, asked = await drive(task, prompt, said)
        assert outcome.reward == 1.0
        assert asked[0].startswith("total([1, 2])")
        assert asked[1:] == ["nothing", "tried\n"]

    agent = {"command": "python3 /agent/agent.py", "shows": {"/agent": str(tmp_path / "agent")}, "timeout": 60}
    with_task(tmp_path, ROW, check, agent=agent)


def test_mini_swe_agent_as_it_is(tmp_path):
    """Of a policy that knows the fix. (That others earn nothing does not depend on who gives their commands.)"""
    commands = [FIX, "cat sums.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]

    async def check(task: SweTask, prompt: Prompt) -> None:
        said = (f"So:\n\n```mswea_bash_command\n{command}\n```" for command in commands)
        outcome, asked = await drive(task, prompt, lambda port: said)
        assert outcome.reward == 1.0
        assert len(asked) == 3 and "sum(numbers)" in asked[2]

    with_task(tmp_path, ROW, check, agent=mini_swe_agent())


def test_a_program_that_is_not_there_is_no_answer_of_the_models(tmp_path):
    async def check(task: SweTask, prompt: Prompt) -> None:
        endpoint = Endpoint()
        await endpoint.start()
        try:
            with (
                endpoint.open(lambda request: None) as model,  # pyright: ignore[reportArgumentType]
                pytest.raises(EnvironmentFailed, match="agent.command cannot be run: .*no_such_agent"),
            ):
                await task.agent(prompt).run(model)
        finally:
            await endpoint.close()

    with_task(tmp_path, ROW, check, agent={"command": "no_such_agent"})


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"command": "x", "shows": {"/usr": "."}}, "no free folder"),
        ({"command": "x", "shows": {"agent": "."}}, "no free folder"),
        ({"command": "x", "shows": {"/agent": "nowhere"}}, "is no folder"),
        ({"shows": {}}, "command"),
    ],
)
def test_settings_of_an_agent_are_checked(tmp_path, agent, message):
    with pytest.raises(ConfigError, match=message):
        make_task(TaskConfig(name="swe", style="chat", options={"file": "x.jsonl", "agent": agent}), [str(tmp_path)])
