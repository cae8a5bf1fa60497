"""Pages that people read: links lead somewhere, table cells are short, the README is, too."""

import re
from itertools import takewhile
from pathlib import Path

import pytest
import yaml
from docs_pages import ROOT_PAGES, modules, root_page, tree_page
from tree import TREE

from titan_rl.config.shipped import find_config
from titan_rl.diagnostics.doctor.catalogue import CHECKS

MAX_CELL = 120
"""Characters."""
MAX_README = 1200
"""Words."""
PAGES = sorted([*(TREE / "docs").rglob("*.md"), *TREE.glob("*.md"), TREE / "tests" / "README.md"])
WRITTEN = [path for path in PAGES if path.name not in ("CHANGELOG.md",) and "tests" not in path.parts]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CELL_EDGE = re.compile(r"(?<!\\)\|")


def of_tree(path: Path) -> str:
    return str(path.relative_to(TREE))


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub and mkdocs make them."""
    lines = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines()
    titles = [line.lstrip("#").strip().replace("`", "").lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=of_tree)
def test_links_lead_to_files_and_headings(page):
    for link in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in headings(target), link


@pytest.mark.parametrize("page", WRITTEN, ids=of_tree)
def test_table_cells_are_short(page):
    rows = [line.strip().strip("|") for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in CELL_EDGE.split(row)]
    assert [cell for cell in cells if len(cell) > MAX_CELL and "::test_" not in cell] == []


def test_the_table_of_the_doctors_checks_is_the_catalogue():
    lines = (TREE / "docs" / "operations" / "inspecting.md").read_text().splitlines()
    begin = lines.index("| check | passes if |") + 2
    rows = [line.split("|")[1].strip(" `") for line in takewhile(lambda line: line.startswith("|"), lines[begin:])]
    assert sorted(rows) == sorted(check.name for check in CHECKS)
    for page in WRITTEN:
        for count in re.findall(r"(\d+) checks", page.read_text()) if "doctor" in page.read_text() else ():
            assert int(count) == len(CHECKS), page


def test_the_readme_is_short():
    assert len((TREE / "README.md").read_text().split()) <= MAX_README


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/operations/index.md"])
def test_first_commands_name_configurations_that_come_with_the_package(page, monkeypatch):
    monkeypatch.chdir(TREE)
    command = re.compile(r"^titan-rl (?:train|doctor|plan|serve|chaos) (\w[\w./]*)", re.MULTILINE)
    names = command.findall((TREE / page).read_text())
    assert names and [name for name in names if not find_config(name).is_file()] == []


def test_an_example_from_python_waits_for_the_run_that_it_closes():
    for page in WRITTEN:
        assert not re.search(r"^session\.run\(\)", page.read_text(), re.MULTILINE), page


def test_every_page_is_in_the_sites_navigation():
    """mkdocs warns of a page that is not there, and of a link to none (``make docs``)."""

    def pages(entry: object) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        return set().union(*(pages(each) for each in (entry.values() if isinstance(entry, dict) else entry)))

    generated = {"reference/files.md", "reference/other_names.md", "changelog.md", "security.md"}
    named = pages(yaml.safe_load((TREE / "mkdocs.yml").read_text())["nav"])
    assert named - generated == {str(path.relative_to(TREE / "docs")) for path in (TREE / "docs").rglob("*.md")}


def test_generated_pages_hold_every_module_and_pages_of_the_root():
    page = tree_page()
    assert all(f"| `{path.name}` |" in page and f"`{path.parent}/`" in page for path in modules())
    assert "0.1.0" in root_page("CHANGELOG.md")
    assert all("](docs/" not in (page := root_page(name)) and "](tests/" not in page for name in ROOT_PAGES.values())


def test_glossary_names_modules_that_are_there():
    """Whole paths, relative to titan_rl/, in the tables of today's terms."""
    page = (TREE / "docs" / "glossary.md").read_text().partition("## Old words")[0]
    paths = re.findall(r"`([a-z_0-9]+/[a-z_0-9/]+(?:\.py|/))`", page)
    assert len(paths) > 50 and [path for path in paths if not (TREE / "titan_rl" / path).exists()] == []


DIALECT = re.compile(
    r"numbers that are none|foretell|foretold|whom it asks|it speaks for|waited for in vain|generators are wanted|"
    r"[Ww]hoever was there at a death|an epoch that nobody asks for|only stands for the actor|his own devices|"
    r"in what they are worth|hung or stopped process can withstand|What is found out about"
)
"""Phrases for which the glossary has a term."""


def test_no_circumlocution_for_a_term_of_the_glossary():
    sources = [TREE / path for path in modules()]
    found = [(of_tree(path), match[0]) for path in [*WRITTEN, *sources] if (match := DIALECT.search(path.read_text()))]
    assert found == []


NAMED = re.compile(r"(?<![\w/.\-])((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b(?!::)")
OF_USERS = {
    "app.py",
    "make_pictures.py",
    "my_agent.py",
    "my_family.py",
    "my_launcher.py",
    "my_task.py",
    "ppo2/model.py",
    "reverse.py",
    "sums.py",
}
"""Files of the reader's, or of other projects."""


def test_files_that_pages_and_modules_name_are_there():
    """By the end of their path: ``loop/controller.py`` or ``controller.py``."""
    files = [path for path in TREE.rglob("*.py") if not {".venv", "build", "node_modules"} & set(path.parts)]
    parts = [path.relative_to(TREE).parts for path in files]
    known = {"/".join(each[start:]) for each in parts for start in range(len(each))} | OF_USERS
    sources = [path for room in ("titan_rl", "actors", "scripts", "kernels") for path in (TREE / room).rglob("*.py")]
    gone = {
        f"{of_tree(path)}: {name}"
        for path in (*WRITTEN, *sources)
        for line in path.read_text().splitlines()
        for name in NAMED.findall(line)
        if name not in known
    }
    assert not gone
