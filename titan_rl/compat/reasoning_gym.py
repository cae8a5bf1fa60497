"""reasoning-gym, of which those parts are imported that a run asks for: all of it takes half a second.

Its cellular automata are imported with their first use: for plots they import matplotlib.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import InspectLoader, Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reasoning_gym.factory import ProceduralDataset

_PACKAGE, _AUTOMATA = "reasoning_gym", "cellpylib"
_OWN_NAMES = ("__all__", "__version__")
_importing = RLock()
"""Whoever waits for it must hold none of Python's locks of the package's modules, which its holder may wait for."""


def part(name: str) -> Any:
    """A module of it, such as ``data.wordle_words``, imported with its category alone."""
    with _importing, _automata_on_first_use():
        with _parts_first():
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
            sys.modules.pop(self.__name__, None)  # which another thread may have done
        return getattr(import_module(self.__name__), name)


class _WholeOnFirstUse(ModuleType):
    """A package with parts that can be imported, which imports all of them once something else is asked of itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _OWN_NAMES:
            raise AttributeError(name)
        if find_spec(f"{self.__name__}.{name}") is not None:  # a part, by whoever may be importing another
            with _automata_on_first_use():
                return import_module(f"{self.__name__}.{name}")
        with _importing, _automata_on_first_use():  # other threads wait
            if type(self) is _WholeOnFirstUse:  # no other has imported it meanwhile
                assert isinstance(loader := self.__loader__, _PartsFirst), "it is its own"
                loader.load(self, name)
        return getattr(self, name)


class _PartsFirst(Loader):
    """Loader of such a package. ``whole``: its own."""

    def __init__(self, whole: InspectLoader):
        self._whole, self._has_begun = whole, False

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _WholeOnFirstUse(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing of it yet."""

    def load(self, package: _WholeOnFirstUse, name: str) -> None:
        """All of it, for a ``name`` that is wanted. Errors: AttributeError where that is in the middle of this."""
        if self._has_begun:
            raise AttributeError(name)
        self._has_begun = True
        try:
            self._whole.exec_module(package)
        finally:
            self._has_begun = False
        assert package.__spec__ is not None, "it was imported"
        package.__loader__ = package.__spec__.loader = self._whole
        package.__class__ = ModuleType  # pyright: ignore[reportAttributeAccessIssue]


class _PartsFirstFinder:
    """Finder of the package alone."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _PACKAGE else None
        if spec is not None:
            assert isinstance(spec.loader, InspectLoader), "a package of files"
            spec.loader = _PartsFirst(spec.loader)
        return spec


@contextmanager
def _parts_first() -> Iterator[None]:
    """Whoever imports the package meanwhile, in whichever thread, gets it with its parts first."""
    sys.meta_path.insert(0, _PartsFirstFinder)
    try:
        yield
    finally:
        sys.meta_path.remove(_PartsFirstFinder)


@contextmanager
def _automata_on_first_use() -> Iterator[None]:
    module = _OnFirstUse(_AUTOMATA)
    is_ours = sys.modules.setdefault(_AUTOMATA, module) is module
    try:
        yield
    finally:
        if is_ours and sys.modules.get(_AUTOMATA) is module:
            sys.modules.pop(_AUTOMATA, None)
