"""The house: who may import whom, how large a file may be, what lies in the root. Read from the sources."""

import ast
import functools
import graphlib
import statistics
import sys
from collections import deque
from pathlib import Path

import pytest
from docs_pages import ROOT, first_sentence, modules
from tree import PACKAGE, TREE

FLOORS = (
    {"compat", "kernels"},
    {"config"},
    {"data"},
    {"algorithms", "models"},
    {"mesh"},
    {"environments", "generator", "trainer"},
    {"actors", "records"},
    {"controller"},
    {"service", "train"},
    {"diagnostics"},
    {"cli"},
)
"""From the bottom up. A room imports from lower floors and from itself, never from its own floor's other rooms."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
MAX_LINES = 500
MAX_ENTRIES, MAX_ROOMS = 12, 15
MEDIAN_FUNCTION = 8
MAX_WORDS = 20
"""In the first sentence of a module's docstring."""
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts) + sorted(
    path for room in ("actors", "kernels") for path in (PACKAGE / room).resolve().glob("*.py")
)


def name_of(path: Path) -> str:
    """The dotted name under titan_rl: ``mesh.channel.plan``."""
    inside = path.relative_to(PACKAGE) if PACKAGE in path.parents else path.relative_to(PACKAGE.parent)
    return ".".join(inside.with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in FILES} | {name_of(path).rpartition(".")[0] for path in FILES}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function, type checks too."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("titan_rl.")
                is_module = node.module.startswith("titan_rl") and inner in NAMES
                found.add(f"titan_rl.{inner}" if is_module else node.module)
    return found


def ours(path: Path) -> set[str]:
    return {name.removeprefix("titan_rl.") for name in imported(path) if name.startswith("titan_rl.")}


def test_there_is_something_to_look_at():
    assert len(FILES) > 100 and any(ours(path) for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_import_runs_up(path):
    room = name_of(path).split(".")[0]
    if room == "__init__" or not room:
        assert not ours(path)
        return
    for name in ours(path):
        target = name.split(".")[0]
        assert target == room or FLOOR[target] < FLOOR[room], f"{name_of(path)} ({room}) imports {name} ({target})"


@functools.cache
def names_in(path: Path) -> set[str]:
    """All that a module's top level binds, inside ``if`` and ``try`` too."""
    found = set()
    nodes = deque(parsed(path).body)
    while nodes:
        node = nodes.popleft()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            found |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            nodes.extend(
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)
            )
    return found


def test_what_is_imported_is_there():
    """Inside functions, too, where only a run would find out."""
    files = {name_of(path): path for path in FILES}
    missing = [
        f"{path}:{node.lineno} {node.module}.{alias.name}"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (inner := (node.module or "").removeprefix("titan_rl.")) in files
        for alias in node.names
        if f"{inner}.{alias.name}" not in NAMES and alias.name not in names_in(files[inner])
    ]
    assert not missing


def test_vllm_and_torchtitan_stay_in_their_rooms():
    for path in FILES:
        packages = {name.split(".")[0] for name in imported(path)}
        name = name_of(path)
        is_bench = name.startswith("diagnostics.bench.")
        assert "vllm" not in packages or name.startswith(("generator.", "compat.vllm.")) or is_bench, name
        assert "torchtitan" not in packages or name.startswith(("models", "trainer.", "compat.torchtitan.")), name
        reaches_vllm = any(target.startswith("compat.vllm.") for target in ours(path))
        assert not reaches_vllm or name.startswith(("generator.", "compat.vllm.")) or is_bench, name


def imported_at_once(name: str, files: dict[str, Path]) -> set[str]:
    """All that the import of one of our modules brings along: not what functions, or type checks alone, import."""
    found, queue = set(), deque([name])
    while queue:
        for node in parsed(files[queue.popleft()]).body:
            if isinstance(node, ast.ImportFrom):
                new = {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                new = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            new = {each.removeprefix("titan_rl.") for each in new} - found
            found |= new
            queue.extend(new & files.keys())
    return found


def test_engines_start_without_torchtitan():
    """Its import takes two seconds, which only batch-invariant engines need to spend."""
    files = {name_of(path): path for path in FILES}
    rooms = {name.split(".")[0] for name in imported_at_once("generator.engine", files)}
    assert {"vllm", "config"} <= rooms and not rooms & {"torchtitan", "models"}
    assert "torchtitan" in {name.split(".")[0] for name in imported_at_once("generator.batch_invariance", files)}


DEPENDENCIES = ("vllm", "torch", "torchtitan", "transformers", "monarch")
OUTSIDE_COMPAT = {
    "kernels.packed_attention": {"torch.ops.torch_attn._varlen_attn", "torch.ops.torch_attn._varlen_attn_backward"}
}
"""Kernels import torch and triton alone."""


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


def modules_in(tree: ast.AST) -> dict[str, str]:
    """What each imported name of a file stands for, wherever it is imported."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                modules |= {alias.asname: alias.name} if alias.asname else {first: first, alias.name: alias.name}
        elif isinstance(node, ast.ImportFrom):
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def private_names(path: Path) -> set[str]:
    """Those of dependencies that a file imports, or reads from what it imports."""
    tree = parsed(path)
    modules = modules_in(tree)
    found = set(modules.values())
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in modules:
            found.add(".".join([modules[node.id], *parts]))
    return {name for name in found if name.split(".")[0] in DEPENDENCIES and is_private(name)}


@pytest.mark.parametrize("path", [path for path in FILES if not name_of(path).startswith("compat")], ids=name_of)
def test_private_names_of_dependencies_are_in_compat_alone(path):
    assert private_names(path) == OUTSIDE_COMPAT.get(name_of(path), set())


def test_private_names_are_found_however_they_are_reached(tmp_path):
    file = tmp_path / "reaches.py"
    file.write_text(
        "import torch\nimport torch._dynamo.config as settings\nfrom vllm import _custom_ops as ops\n"
        "from torch.nn import Module\n"
        "def f(): return torch._C.x, ops.y, Module._parameters, torch.__version__, settings.z\n"
    )
    assert private_names(file) == {
        *("torch._C.x", "torch._C", "torch._dynamo.config", "torch._dynamo.config.z"),
        *("vllm._custom_ops", "vllm._custom_ops.y", "torch.nn.Module._parameters"),
    }


GRAPH = {name_of(path): ours(path) & NAMES for path in FILES}
"""Imports of each file: at its top, inside its functions, and for types alone."""


def entry_graph(folder: str) -> dict[str, set[str]]:
    """Which files and folders of a folder import which others of it."""
    prefix, graph = f"{folder}." if folder else "", {}
    for name, targets in GRAPH.items():
        if name.startswith(prefix):
            entry = name.removeprefix(prefix).split(".")[0]
            others = {target.removeprefix(prefix).split(".")[0] for target in targets if target.startswith(prefix)}
            graph.setdefault(entry, set()).update(others - {entry})
    return graph


def test_no_circle():
    graphlib.TopologicalSorter(GRAPH).prepare()


@pytest.mark.parametrize("folder", sorted({name.rpartition(".")[0] for name in GRAPH}))
def test_no_circle_of_folders(folder):
    graphlib.TopologicalSorter(entry_graph(folder)).prepare()


def test_a_circle_of_folders_is_seen(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "GRAPH", {"room.a.one": {"room.b.two"}, "room.b.three": {"room.a.four"}})
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(entry_graph("room")).prepare()


def test_files_are_small():
    too_long = {
        name_of(path): lines
        for path in FILES
        if "kernels" not in path.parts and (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not too_long


def test_functions_are_small():
    """Lines of their bodies, the docstring left out; the median over all of the house."""
    sizes = []
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                sizes.append(body[-1].end_lineno - body[0].lineno + 1 if body else 0)
    assert statistics.median(sizes) <= MEDIAN_FUNCTION


def entries(folder: Path) -> list[str]:
    """Without the marks of a package, and links to folders beside it."""
    marks = {"__pycache__", "__init__.py", "py.typed"}
    return sorted(path.name for path in folder.iterdir() if path.name not in marks and not path.is_symlink())


def test_folders_have_at_most_a_dozen_entries():
    """The package itself has one for each room, and tests/ mirrors that, with what belongs to all tests beside."""
    roots = [
        TREE / name
        for name in ("titan_rl", "actors", "kernels", "scripts", "tests", "docs", "configs", "recipes", "examples")
    ]
    below = [path for root in roots for path in root.rglob("*") if path.is_dir() and "__pycache__" not in path.parts]
    folders = {path: MAX_ENTRIES for path in [*roots, *below] if not path.is_symlink()}
    folders |= {PACKAGE: MAX_ROOMS, TREE / "tests": MAX_ROOMS + 8}
    many = {str(path.relative_to(TREE)): found for path, most in folders.items() if len(found := entries(path)) > most}
    assert not many


def test_actors_and_kernels_are_no_packages():
    """A top-level package of one of these names would hide Hugging Face's ``kernels`` from transformers and vLLM."""
    for room in ("actors", "kernels"):
        assert (PACKAGE / room).is_symlink() and not (PACKAGE / room / "__init__.py").exists()


def test_every_module_has_a_short_first_sentence():
    """The site's page of every file prints them."""
    sentences = {str(path): first_sentence(ROOT / path) for path in modules()}
    assert [path for path, text in sentences.items() if not 0 < len(text.split()) <= MAX_WORDS] == []
