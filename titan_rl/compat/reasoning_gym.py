"""reasoning-gym, of which those parts are imported that a run asks for: all of it takes half a second.

Its cellular automata are imported with their first use: for plots they import matplotlib.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reasoning_gym.factory import ProceduralDataset

_PACKAGE, _AUTOMATA = "reasoning_gym", "cellpylib"
_OWN_NAMES = ("__all__", "__version__")
_importing = RLock()
_begun: set[ModuleType] = set()
"""Packages that are being imported."""


def part(name: str) -> Any:
    """A module of it, such as ``data.wordle_words``, imported with its category alone."""
    with _importing, _automata_on_first_use():
        if _PACKAGE not in sys.modules:
            sys.modules[_PACKAGE] = _whole_on_first_use()
        import_module(_PACKAGE)  # which another thread may be importing, all of it
        import_module(f"{_PACKAGE}.coaching")  # which all categories import, in a circle with their factory
        return import_module(f"{_PACKAGE}.{name}")


def families() -> dict[str, tuple[type["ProceduralDataset"], type]]:
    """Dataset and options of each family; all of them are imported."""
    known = part("factory").DATASETS
    sys.modules[_PACKAGE].create_dataset  # noqa: B018  (its first use)
    return known


def family(name: str) -> tuple[type["ProceduralDataset"], type]:
    """Dataset and options of a family, with its category alone where a file is named like it. Errors: KeyError."""
    factory = part("factory")
    for path in () if name in factory.DATASETS else Path(factory.__file__).parent.glob(f"*/{name}.py"):
        part(path.parent.name)
    return factory.DATASETS[name] if name in factory.DATASETS else families()[name]


def create_dataset(name: str, **options: Any) -> "ProceduralDataset":
    """Entries of a family by index. Errors: KeyError; whatever the family raises over its options."""
    family(name)
    return part("factory").create_dataset(name, **options)


class _OnFirstUse(ModuleType):
    """Stands for a module, which is imported once something is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


class _WholeOnFirstUse(ModuleType):
    """A package with parts that can be imported, which imports all of them once something is asked of itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _OWN_NAMES:
            raise AttributeError(name)
        with _importing, _automata_on_first_use():  # other threads wait
            if type(self) is _WholeOnFirstUse:  # no other has imported it meanwhile
                _import_whole(self, name)
        return getattr(self, name)


def _import_whole(package: _WholeOnFirstUse, name: str) -> None:
    """``name``: that is wanted. Errors: AttributeError for one that the package asks for before it has it."""
    if package in _begun:
        raise AttributeError(name)
    assert package.__spec__ is not None and package.__spec__.loader is not None, "it was made from them"
    _begun.add(package)
    try:
        package.__spec__.loader.exec_module(package)
    finally:
        _begun.discard(package)
    package.__class__ = ModuleType  # pyright: ignore[reportAttributeAccessIssue]


def _whole_on_first_use() -> ModuleType:
    spec = find_spec(_PACKAGE)
    assert spec is not None, "reasoning-gym is installed"
    package = module_from_spec(spec)
    package.__class__ = _WholeOnFirstUse
    return package


@contextmanager
def _automata_on_first_use() -> Iterator[None]:
    module = _OnFirstUse(_AUTOMATA)
    is_ours = sys.modules.setdefault(_AUTOMATA, module) is module
    try:
        yield
    finally:
        if is_ours and sys.modules.get(_AUTOMATA) is module:
            del sys.modules[_AUTOMATA]
