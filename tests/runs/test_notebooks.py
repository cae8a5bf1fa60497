"""The notebooks: each is run anew in a real kernel, and what is committed is clean, whole and of its own cells; and a
kernel that is killed while a run is under way in it, which leaves nothing behind but a run that goes on.
"""

import asyncio
import json
import os
import random
import re
import signal
import socket
from pathlib import Path

import nbformat
import pytest
import run_notebooks
import running
from nbclient import NotebookClient

FILES = sorted(run_notebooks.FOLDER.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
NUM_KILLS = int(os.environ.get("TITAN_RL_KERNEL_KILLS", "2"))
NUM_OTHERS = 3
"""Of a run's processes at most, those that are no actors."""
MACHINE_PATH = re.compile(r"(?<![\w.])/(tmp|root|home|work|usr|opt|mnt|var|Users)/")


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shape(notebook) -> list[set[str]]:
    """Of each code cell: what kinds of output it gives, streams by name, the rest by mime types."""
    return [{kind for output in cell.outputs for kind in kinds_of(output)} for cell in code_cells(notebook)]


def kinds_of(output) -> list[str]:
    return [output.name] if output.output_type == "stream" else list(output.get("data", {"error": ""}))


def words(notebook) -> str:
    """All that a reader may read: sources, and outputs but for pictures."""
    found = [cell.source for cell in notebook.cells]
    for output in (output for cell in code_cells(notebook) for output in cell.outputs):
        found += [output.get("text", "")]
        found += [str(data) for mime, data in output.get("data", {}).items() if not mime.startswith("image/")]
    return "\n".join(found)


# as they are committed


def test_there_are_notebooks():
    assert len(FILES) == 4


@each_notebook
def test_it_opens_with_what_a_reader_will_know(path):
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ") and "At its end you" in first.source


@each_notebook
def test_its_outputs_are_of_its_cells(path):
    notebook = nbformat.read(path, as_version=4)
    assert run_notebooks.stamp(notebook) == run_notebooks.checksum(notebook), (
        f"cells were changed after they were run: python scripts/run_notebooks.py {path.stem}"
    )


@each_notebook
def test_it_was_run_once_from_top_to_bottom(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert sum(bool(cell.outputs) for cell in cells) >= 3


@each_notebook
def test_its_outputs_are_clean(path):
    """No error, no warning, and nothing of the machine that it was run on."""
    notebook = nbformat.read(path, as_version=4)
    kinds = set().union(*shape(notebook))
    assert kinds <= {"stdout", "text/plain", "text/html", "image/png"}
    text = words(notebook)
    assert not MACHINE_PATH.search(text) and socket.gethostname() not in text and "\x1b" not in text
    assert not re.search(r"<script|https?://[^\s)]*\.(js|css)|\bpip install\b", text)


def test_a_changed_cell_is_told(tmp_path):
    notebook = nbformat.read(FILES[0], as_version=4)
    before = run_notebooks.checksum(notebook)
    notebook.cells[0].source += " "
    assert run_notebooks.checksum(notebook) == before, "prose may be changed"
    code_cells(notebook)[0].source += " "
    assert run_notebooks.checksum(notebook) != before


# run anew


def execute(notebook, folder: Path) -> set[int]:
    """In place; all processes that it had below its kernel after any of its cells, and the kernel."""
    client, pids = run_notebooks.client_of(notebook, folder), set()

    def look(**_) -> None:
        kernel = client.km.provisioner.pid
        pids.update({kernel} | running.descendants(kernel))

    client.on_cell_executed = look
    try:
        client.execute(**run_notebooks.starting())
    finally:
        if client.km is not None:  # the test's own time limit came between, and nobody has ended the kernel
            os.kill(client.km.provisioner.pid, signal.SIGKILL)
    return pids


@pytest.mark.slow
@pytest.mark.confirms
@pytest.mark.timeout(1200)
@each_notebook
def test_it_runs_and_leaves_nothing(path, tmp_path):
    committed, notebook = (nbformat.read(path, as_version=4) for _ in range(2))
    pids = execute(notebook, tmp_path)
    assert shape(notebook) == shape(committed)
    assert pids and running.gone(pids)
    left = {file.name for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert not left, "a notebook removes what it has made"
    assert len(pids) > 4 or "titan_rl.launch" not in words(notebook), "its actors were seen"


# killed


LAUNCH = """
import titan_rl
session = await titan_rl.launch(None, {settings}, resume={resume}, run={{"dir": {root!r}}})
await session.run()
"""


async def launch_and_kill(root: Path, seconds: float, has_actors: bool) -> set[int]:
    """A run in a kernel that is killed after so long, counted from when ``has_actors``; the processes that it had."""
    dotted = running.SMALL | {"training.steps": running.STEPS}
    source = LAUNCH.format(settings=dotted, resume=(root / "config.json").is_file(), root=str(root))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    client: NotebookClient = run_notebooks.client_of(notebook, root.parent)
    async with client.async_setup_kernel(**run_notebooks.starting()):
        cell = asyncio.ensure_future(client.async_execute_cell(notebook.cells[0], 0))
        kernel = client.km.provisioner.pid
        while has_actors and len(running.descendants(kernel)) <= NUM_OTHERS and not cell.done():
            await asyncio.sleep(0.05)
        await asyncio.sleep(seconds)
        os.kill(kernel, signal.SIGSTOP)  # or it might start one more after they were listed
        pids = running.descendants(kernel)
        os.kill(kernel, signal.SIGKILL)
        cell.cancel()
        await asyncio.gather(cell, return_exceptions=True)
    return pids


@pytest.mark.slow
@pytest.mark.confirms
@pytest.mark.timeout(300 + 90 * NUM_KILLS)
def test_a_kernel_that_is_killed_leaves_a_run_that_goes_on(tmp_path):
    """``TITAN_RL_KERNEL_KILLS=10`` for more of them."""
    root, moments = tmp_path / "run", random.Random(7)
    for number in range(NUM_KILLS):
        has_actors = number % 2 == 0  # the others: anywhere, also while it starts
        pids = asyncio.run(launch_and_kill(root, moments.uniform(0, 30), has_actors))
        assert running.gone(pids, timeout=30)
        assert len(pids) > NUM_OTHERS or not has_actors
    assert running.train(root, "--resume", training__steps=running.STEPS) == 0, running.output(root)[-3000:]
    summary = json.loads((root / "summary.json").read_text())
    assert summary["why_ended"] == "completed" and summary["steps_done"] == running.STEPS


# what a run says


SAYING = [
    """
import asyncio
from titan_rl.controller.console.display import Display
display = Display(num_steps=5)
display.log("of the first")
async def later():
    await asyncio.sleep(0.5)
    display.log("a watcher speaks")
watching = asyncio.create_task(later())
""",
    "display.follow()\nawait watching",
]


def test_what_is_said_in_the_background_stands_below_the_cell_that_asked_last(tmp_path):
    """As plain text: the lines of a cell are one output."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in SAYING])
    execute(notebook, tmp_path)
    said = [[(output.name, output.text) for output in cell.outputs] for cell in notebook.cells]
    assert said == [[("stdout", "of the first\n")], [("stdout", "a watcher speaks\n")]]


FOLLOWING = """
import asyncio
from titan_rl.controller.interactive.live_plot import LivePlot
step, is_over = 1, False
following = LivePlot(lambda: f"at step {step}", lambda: step, lambda: is_over)

async def go_on():
    global step, is_over
    step = 2
    await asyncio.sleep(1.5)
    step, is_over = 3, True

going_on = asyncio.create_task(go_on())
following
"""


async def displays_of(source: str, count: int) -> list[tuple[str, str, str]]:
    """Kind, text and place of the first ones that a cell's code sends, as a notebook hears of them: nbclient passes on
    none that come after the cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    client, heard = run_notebooks.client_of(notebook, Path.cwd()), []
    async with client.async_setup_kernel(**run_notebooks.starting()):
        client.kc.execute(source)
        while len(heard) < count:
            message = await client.kc.get_iopub_msg(timeout=60)
            if "display" in message["msg_type"]:
                content = message["content"]
                heard.append((message["msg_type"], content["data"]["text/plain"], content["transient"]["display_id"]))
    return heard


def test_what_is_followed_changes_where_it_is_shown():
    """Until the run is over, and then once more."""
    kinds, texts, places = zip(*asyncio.run(displays_of(FOLLOWING, 3)), strict=True)
    assert kinds == ("display_data", "update_display_data", "update_display_data")
    assert texts == ("'at step 1'", "'at step 2'", "'at step 3'") and len(set(places)) == 1
