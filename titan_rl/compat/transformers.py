"""transformers, imported in less time.

As it is imported it asks which packages are installed, and reads all files of its models, twice, for the names in them.
"""

import importlib.metadata
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from titan_rl.compat.reach import TRANSFORMERS, Reach

_SCANNING = "transformers.utils.import_utils"
REACHES = (
    Reach(f"{_SCANNING}:create_import_structure_from_path", "read the files of its models once"),
    Reach(f"{_SCANNING}:fetch__all__", "read the names of a file from where they are"),
)


@contextmanager
def imported_faster() -> Iterator[None]:
    """Meanwhile transformers is imported with the same result in less time. Errors: DependencyChanged."""
    slow, importlib.metadata.packages_distributions = importlib.metadata.packages_distributions, packages_distributions
    finder = _ScanFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        importlib.metadata.packages_distributions = slow


def packages_distributions() -> dict[str, list[str]]:
    """As ``importlib.metadata`` has it, from the same files, in a tenth of the time.

    That parses them line by line into paths."""
    found = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        packages = (distribution.read_text("top_level.txt") or "").split()
        if not packages:
            files = (distribution.read_text("RECORD") or "").splitlines()
            first = {file.partition(",")[0].partition("/")[0] for file in files if ".py," in file}
            packages = {name.removesuffix(".py") for name in first}
        metadata = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        for name in re.findall(r"^Name: (.+)$", metadata, re.MULTILINE)[:1]:
            for package in packages:
                found[package].append(name.strip())
    return dict(found)


class _ScanFinder(MetaPathFinder):
    """Finder of the module that reads the files, whose functions are replaced as soon as they are there."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None):
        if fullname != _SCANNING:
            return None
        spec: ModuleSpec | None = PathFinder.find_spec(fullname, path, target)
        if spec is not None and (loader := spec.loader) is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                TRANSFORMERS.require(REACHES)
                scan_once(module)

            loader.exec_module = exec_module
        return spec


def scan_once(module: Any) -> None:
    """Have the module read each folder once, and of a file's lines only those from its names on."""
    scan, names = module.create_import_structure_from_path, module.fetch__all__
    of_folder = cache(scan)

    def of_path(module_path: str | os.PathLike[str]) -> dict:
        return of_folder(os.path.dirname(module_path) if os.path.isfile(module_path) else os.fspath(module_path))

    def of_content(file_content: str) -> list[str]:
        return names(file_content[file_content.rfind("\n__all__") + 1 :])

    module.create_import_structure_from_path = of_path
    module.fetch__all__ = of_content
