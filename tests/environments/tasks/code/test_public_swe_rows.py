"""Rows of SWE-bench and task directories of Harbor, as they are published."""

import json
from pathlib import Path

import pytest
from boxes import own_images
from swe_tasks import Check, with_swe_task

from titan_rl.config.load import ConfigError
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.environments.tasks.swe.swe_task import SweTask

SUMS = "def total(numbers):\n    return sum(numbers[1:])\n"
TEST = "import unittest\nimport sums\n\n\nclass T(unittest.TestCase):\n    def test(self):\n        {}\n"
OLD = TEST.format("self.assertEqual(sums.total([]), 0)")
FIX = "sed -i 's/numbers.1:./numbers/' sums.py"
TEST_PATCH = """\
diff --git a/tests/test_total.py b/tests/test_total.py
--- a/tests/test_total.py
+++ b/tests/test_total.py
@@ -5,3 +5,3 @@
 class T(unittest.TestCase):
     def test(self):
-        self.assertEqual(sums.total([]), 0)
+        self.assertEqual(sums.total([5]), 5)
diff --git a/tests/old.py b/tests/old.py
deleted file mode 100644
--- a/tests/old.py
+++ /dev/null
@@ -1 +0,0 @@
-1
diff --git a/tests/one.py b/tests/two.py
similarity index 100%
rename from tests/one.py
rename to tests/two.py
"""
SWE_BENCH = {
    "repo": "made/sums",
    "base_commit": "0" * 40,
    "patch": "",
    "test_patch": TEST_PATCH,
    "hints_text": "",
    "created_at": "2026-01-01T00:00:00Z",
    "version": "1.0",
    "FAIL_TO_PASS": '["tests.test_total"]',
    "PASS_TO_PASS": '["tests.two"]',
    "environment_setup_commit": "0" * 40,
}


@pytest.fixture(scope="module", autouse=True)
def _store(tmp_path_factory):
    with own_images(tmp_path_factory):
        yield


def with_task(folder: Path, check: Check, **options) -> None:
    with_swe_task(folder, check, **{"protocol": "line"} | options)


async def reward_of(task: SweTask, prompt: Prompt, *commands: str) -> float | None:
    """Reward of an episode of these commands."""
    environment = task.environment(prompt)
    try:
        *_, last = [await environment.step(command) for command in (*commands, "submit")]
        assert not last.messages
        return last.reward
    finally:
        await environment.close()


def repository(folder: Path) -> None:
    (folder / "tests").mkdir(parents=True)
    (folder / "sums.py").write_text(SUMS)
    for name, text in (("__init__", ""), ("test_total", OLD), ("old", "1\n"), ("one", OLD)):
        (folder / "tests" / f"{name}.py").write_text(text)


def swe_bench(folder: Path, **changes) -> dict:
    """Options of a file of SWE-bench's rows, whose images lie by their names."""
    rows = [
        SWE_BENCH | {"instance_id": f"made__sums-{number}", "problem_statement": f"{number}"} for number in range(4)
    ]
    for row in rows:
        repository(folder / "images" / row["instance_id"])
    (folder / "rows.jsonl").write_text("".join(json.dumps(row | changes) + "\n" for row in rows))
    defaults = {"workspace": "images/{instance_id}", "test_command": "python3 -m unittest"}
    return {"file": "rows.jsonl", "defaults": defaults}


def test_rows_of_swe_bench_are_judged_by_the_tests_of_their_patch(tmp_path):
    """Whatever the agent has done to the files that the patch touches, and to git."""
    forged = "printf 'import unittest\\n' > tests/test_total.py; rm tests/one.py; echo 2 > tests/old.py; mkdir .git"
    closed = "printf 'import unittest\\n' > tests/test_total.py; chmod 444 tests/*; chmod 555 tests"
    linked = f"{closed}; mv tests t2; ln -s t2 tests"
    deep = (
        "rm tests/test_total.py; for i in $(seq 300); do mkdir -p tests/test_total.py/a; cd tests/test_total.py; done"
    )

    async def check(task: SweTask, prompt: Prompt) -> None:
        attacks = (
            forged,
            closed,
            linked,
            "chmod 555 tests",
            deep,
            "rm -rf tests; ln -s /usr tests",
            "rm -rf /workspace",
        )
        assert [await reward_of(task, prompt, attack) for attack in attacks] == [0.0] * len(attacks)
        assert [await reward_of(task, prompt, *before, FIX) for before in ([], [forged], [closed])] == [1.0] * 3
        assert await reward_of(task, prompt, FIX, "echo 'raise OSError' > tests/one.py") == 1.0, "renamed: it is gone"

    with_task(tmp_path, check, **swe_bench(tmp_path))


def test_a_file_of_the_patch_is_as_executable_as_it_says(tmp_path):
    run = "diff --git a/run.sh b/run.sh\nnew file mode 100755\n--- /dev/null\n+++ b/run.sh\n@@ -0,0 +1 @@\n"
    link = "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n"

    async def check(task: SweTask, prompt: Prompt) -> None:
        assert await reward_of(task, prompt, FIX) == 1.0

    options = swe_bench(tmp_path / "run", test_patch=f"{run}+python3 -c 'import sums; assert sums.total([5]) == 5' #\n")
    options["defaults"]["test_command"] = "./run.sh"
    with_task(tmp_path / "run", check, **options)

    async def refuse(task: SweTask, prompt: Prompt) -> None:
        with pytest.raises(EnvironmentFailed, match="makes the link l"):
            await reward_of(task, prompt, FIX)

    with_task(tmp_path / "link", refuse, **swe_bench(tmp_path / "link", test_patch=link))


def test_names_too_long_for_one_line_are_run_in_parts(tmp_path):
    names = ["tests.two"] * 9_000  # 90 kB

    async def check(task: SweTask, prompt: Prompt) -> None:
        assert await reward_of(task, prompt, FIX) == 1.0

    options = swe_bench(tmp_path, PASS_TO_PASS=json.dumps(names))
    options["defaults"]["test_command"] = "echo >> ran; test $(wc -l < ran) -le 3 && python3 -m unittest tests.two #"
    with_task(tmp_path, check, **options)


@pytest.mark.parametrize(
    "patch", ["no patch", TEST_PATCH.replace("total([])", "total()"), TEST_PATCH.replace("to tests/two", "to ../two")]
)
def test_a_patch_that_does_not_fit_is_no_answer_of_the_models(tmp_path, patch):
    async def check(task: SweTask, prompt: Prompt) -> None:
        with pytest.raises(EnvironmentFailed, match="test_patch"):
            await reward_of(task, prompt, FIX)

    with_task(tmp_path, check, **swe_bench(tmp_path, test_patch=patch))


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"workspaces": "x"}, "did you mean 'workspace'"),
        ({"workspace": "images/nowhere"}, "rows.jsonl line .*'images/nowhere' is not there"),
        ({"workspace": "x" * 5000}, "is not there"),
        ({"workspace": "images/{instance_id}", "reward_file": "/"}, "rows.jsonl line 1: .*paths of the tests' own"),
        ({"workspace": "images/{instance_id}", "setup": "a\0"}, "rows.jsonl line 1: 'setup' has a NUL"),
        ({"workspace": "images/{instance_id}", "test_command": "x" * 90_000}, "more bytes than a command"),
        ({"workspace": "images/{instance}"}, "rows.jsonl line 1: the row has no text in the column 'instance'"),
        ({"workspace": "images/{instance_id}", "folder": "a,b"}, "rows.jsonl line 1: .*folder 'a,b'"),
    ],
)
def test_defaults_that_cannot_be_meant_are_one_line(tmp_path, defaults, message):
    async def check(task: SweTask, prompt: Prompt) -> None: ...

    with pytest.raises(ConfigError, match=message):
        with_task(tmp_path, check, **swe_bench(tmp_path) | {"defaults": defaults})


def harbor(folder: Path, test: str) -> dict:
    for number in range(4):
        task, image = folder / "tasks" / f"sums-{number}", folder / "images" / f"sums-{number}"
        repository(image)
        for name in ("tests", "solution", "environment"):
            (task / name).mkdir(parents=True)
        (task / "task.toml").write_text(
            'schema_version = "1.1"\n[metadata]\ndifficulty = "easy"\n[environment]\ncpus = 1\n'
        )
        (task / "instruction.md").write_text(f"Mend total, {number}.\n")
        (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
        (task / "tests" / "test.sh").write_text(test)
        (task / "tests" / "check.py").write_text("import sums\nassert sums.total([5]) == 5\n")
        (task / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{FIX}\n")
    return {"file": "tasks", "defaults": {"workspace": "images/{instance_id}"}}


SCORES = "#!/bin/bash\nif PYTHONPATH=. python3 /tests/check.py; then {}; else echo 0 > /logs/verifier/reward.txt; fi\n"


@pytest.mark.parametrize(
    ("left", "reward"),
    [
        ("echo 1 > /logs/verifier/reward.txt", 1.0),
        ("echo '{\"reward\": 0.5}' > /logs/verifier/reward.json", 0.5),
        ("echo 7 > /logs/verifier/reward.txt", 1.0),
        ("echo nan > /logs/verifier/reward.txt", 0.0),
        ("true", 0.0),
    ],
)
def test_directories_of_harbor_are_judged_by_what_their_tests_leave(tmp_path, left, reward):
    forged = "mkdir -p /tests /logs/verifier; echo 1 | tee /logs/verifier/reward.txt; echo > /tests/check.py"

    async def check(task: SweTask, prompt: Prompt) -> None:
        assert prompt.text.startswith("Mend total")
        assert await reward_of(task, prompt, *task.demonstration(prompt)[:-1]) == reward
        in_the_way = "chmod 555 /logs /tests /tests/x /logs/verifier"
        attacks = (
            forged,
            f"{forged}; mkdir /tests/x; touch /tests/x/y; {in_the_way}",
            "rm -rf /workspace /logs /tests",
        )
        assert [await reward_of(task, prompt, attack) for attack in attacks] == [0.0] * 3
        fixed = (*task.demonstration(prompt)[:-1], attacks[1])
        assert await reward_of(task, prompt, *fixed) == reward

    with_task(tmp_path, check, **harbor(tmp_path, SCORES.format(left)))


def test_a_task_is_no_folder_of_tasks(tmp_path):
    async def check(task: SweTask, prompt: Prompt) -> None: ...

    options = harbor(tmp_path, "") | {"file": "tasks/sums-1"}
    with pytest.raises(ConfigError, match="sums-1 is one task: give the folder"):
        with_task(tmp_path, check, **options)
    (tmp_path / "tasks" / "sums-1" / "task.toml").unlink()
    with pytest.raises(ConfigError, match="sums-1/task.toml cannot be read"):
        with_task(tmp_path, check, **options | {"file": "tasks"})


def test_a_directory_without_its_tests_is_one_line(tmp_path):
    options = harbor(tmp_path, "")
    (tmp_path / "tasks" / "sums-2" / "tests" / "test.sh").unlink()

    async def check(task: SweTask, prompt: Prompt) -> None: ...

    with pytest.raises(ConfigError, match="sums-2/tests must have test.sh"):
        with_task(tmp_path, check, **options)
