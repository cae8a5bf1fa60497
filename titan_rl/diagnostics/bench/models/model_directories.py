"""Wrong model directories, each given to ``titan-rl train`` in a process of its own: refused, and how soon?"""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.config.shipped import shipped
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.models.wrong_models import WRONG_MODELS, WrongModel

_BAR_SECONDS = 5.0
_CONFIG = shipped()["quickstart"]


@dataclass(frozen=True)
class Refusal:
    """Result of ``titan-rl train`` on a wrong model directory."""

    code: int
    printed: str
    has_run_dir: bool
    seconds: float

    def is_right(self, wrong: WrongModel) -> bool:
        """Exit code 2, one line that says what is wrong, and nothing made."""
        one_line = len(self.printed.splitlines()) == 1 and all(word in self.printed for word in wrong.words)
        return self.code == 2 and one_line and not self.has_run_dir


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        good = make_good(Path(folder))
        refusals = {wrong.name: refuse(wrong, good, Path(folder)) for wrong in WRONG_MODELS}
    slowest = max(refusals, key=lambda name: refusals[name].seconds)
    not_right = [wrong.name for wrong in WRONG_MODELS if not refusals[wrong.name].is_right(wrong)]
    return [
        row(
            "wrong directories that were not refused in one line with exit code 2",
            len(not_right),
            "",
            0,
            which=not_right,
        ),
        row("slowest refusal", refusals[slowest].seconds, "s", _BAR_SECONDS, which=slowest, of=len(refusals)),
        row("median refusal", statistics.median(refusal.seconds for refusal in refusals.values()), "s"),
    ]


def make_good(folder: Path) -> dict[bool, Path]:
    """The tiny model as it should be, by whether it is untied."""
    from titan_rl.models.builtin.tiny import make_tiny

    good = {is_untied: folder / f"untied-{is_untied}" for is_untied in (False, True)}
    for is_untied, path in good.items():
        make_tiny(path, seed=1, tie_word_embeddings=not is_untied)
    return good


def spoiled(wrong: WrongModel, good: dict[bool, Path], out: Path) -> Path:
    shutil.copytree(good[wrong.is_untied], out)
    wrong.spoil(out)
    return out


def refuse(wrong: WrongModel, good: dict[bool, Path], folder: Path) -> Refusal:
    """Refusal of a spoiled directory. ``folder``: where the directory, and the run if there is one, are made."""
    place = Path(tempfile.mkdtemp(dir=folder))
    path, root = spoiled(wrong, good, place / "model"), place / "run"
    command = [sys.executable, "-m", "titan_rl.cli", "train", str(_CONFIG), "--model.path", str(path)]
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "--run.dir", str(root), *wrong.arguments], capture_output=True, text=True, timeout=300
    )
    return Refusal(done.returncode, done.stdout + done.stderr, root.exists(), time.perf_counter() - start)
