"""Pages of the documentation site that are generated: every module, other systems' names, and pages of the root.

A hook of mkdocs (mkdocs.yml). Sources are parsed, never imported, but for the table of names, which is plain data.
"""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
ROOMS = ("actors", "kernels")
"""Folders beside the package, to which links inside it lead."""
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`0-9\[])")
ROOT_PAGES = {"changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}
"""Pages of the site that are files of the root."""
LINK_INTO_DOCS = re.compile(r"\]\(docs/")
LINK_ELSEWHERE = re.compile(r"\[([^\]]+)\]\((?!docs/|https?:|#)[^)]+\)")


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Adds the generated pages to the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference/files.md", content=tree_page()))
    files.append(File.generated(config, "reference/other_names.md", content=names_page()))
    for page, name in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=root_page(name)))
    return files


def first_sentence(path: Path) -> str:
    """First sentence of a module's docstring, on one line; empty if there is none."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = docstring.partition("\n\n")[0].replace("\n", " ").strip()
    return SENTENCE_END.split(paragraph)[0]


def modules() -> Iterator[Path]:
    """Every module of the package that says something, and of the folders beside it; relative to the root."""
    for folder in ("titan_rl", *ROOMS):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "__pycache__" not in path.parts and path.read_text().strip():
                yield path.relative_to(ROOT)


def tree_page() -> str:
    """A table for each folder: module, first sentence."""
    folders: dict[Path, list[Path]] = {}
    for path in modules():
        folders.setdefault(path.parent, []).append(path)
    page = ["# Every file", "", "Modules by folder, each with the first sentence of its docstring."]
    for folder, paths in folders.items():
        page += ["", f"## `{folder}/`", "", "| module | subject |", "| --- | --- |"]
        page += [f"| `{path.name}` | {_cell(first_sentence(ROOT / path))} |" for path in paths]
    return "\n".join(page) + "\n"


def names_page() -> str:
    """A table of keys of other systems, and one of their sections, with what they are here."""
    names = runpy.run_path(str(ROOT / "titan_rl" / "config" / "other_names.py"))
    page = [
        "# Names of other systems",
        "",
        "Keys of verl, TRL, prime-rl, OpenRLHF, NeMo-RL and torchtitan, by the last part of their name, and ours.",
        "An unknown key is refused with the same hint: `--actor_rollout_ref.rollout.n 8` names `rollout.group_size`.",
    ]
    tables = {"key": (names["KEYS"], names["NOT_HERE"]), "section": (names["SECTIONS"], names["SECTIONS_NOT_HERE"])}
    for what, (here, not_here) in tables.items():
        rows = {theirs: _own_names(ours) for theirs, ours in here.items()}
        rows |= {theirs: f"none: {why}" for theirs, why in not_here.items()}
        page += ["", f"| {what} there | here |", "| --- | --- |"]
        page += [f"| `{theirs}` | {_cell(rows[theirs])} |" for theirs in sorted(rows)]
    return "\n".join(page) + "\n"


def _own_names(text: str) -> str:
    """A hint with its settings as code."""
    return re.sub(r"\b[a-z_]+\.[a-z_.]+[a-z]\b", r"`\g<0>`", text) if "." in text else f"`[{text}]`"


def root_page(name: str) -> str:
    """A page of the root as seen from docs/: links out of docs/ become text."""
    return LINK_INTO_DOCS.sub("](", LINK_ELSEWHERE.sub(r"\1", (ROOT / name).read_text()))


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")
