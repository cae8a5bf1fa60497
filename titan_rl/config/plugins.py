"""``pkg.module:name`` becomes the object that it names: the one door for what is not in this tree.

An algorithm, a task, a reward function, a model family and a launcher are all named so. They are looked for in the
folders of ``run.plugin_path`` and among the installed packages, in every process; the controller resolves them before
anything starts, so that a mistake is one line.
"""

import difflib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from titan_rl.config.load import ConfigError, nearest

_FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_MESSAGE_CHARACTERS = 300
_NEAR = 0.82
"""Likeness of two names from which one is taken for a misspelling of the other."""

_SHOWN_CHARACTERS = 80


def is_reference(name: str) -> bool:
    """Whether a setting names something outside the tree."""
    return ":" in name


def meant_reference(name: str) -> str:
    """Hint for a name that was meant as a reference, with a dot for the colon, or a file for its module; else empty."""
    file, colon, path = name.partition(":")
    if colon and file.endswith(".py"):
        folder, module = str(Path(file).parent), Path(file).stem
        if not _FORM.fullmatch(f"{module}:{path}"):
            return ""
        return f"give {module}:{path}" + (f", and --run.plugin_path {folder}" if folder != "." else "")
    module, dot, last = name.rpartition(".")
    return f"did you mean '{module}:{last}'?" if dot and not colon and _FORM.fullmatch(f"{module}:{last}") else ""


def resolve(setting: str, reference: str, folders: Sequence[str]) -> Any:
    """Object that ``reference`` names. ``setting``: its key, for messages. Errors: ConfigError."""
    label = f"{setting} = {reference!r}"
    if hint := meant_reference(reference):
        raise ConfigError(f"{label} is no 'module:name': {hint}")
    if not _FORM.fullmatch(reference):
        raise ConfigError(f"{label} must look like 'module:name', such as 'my_reward:reward'")
    module_name, _, path = reference.partition(":")
    target: Any = _import(label, module_name, folders)
    for name in path.split("."):
        if not hasattr(target, name):
            public = [public_name for public_name in vars(target) if not public_name.startswith("_")] or ["nothing"]
            raise ConfigError(f"{label}: there is no {name!r} in {_where(target)}: {nearest(name, public)}")
        target = getattr(target, name)
    return target


def reference_to(setting: str, function: Callable) -> str:
    """Reference to a function of a module. Errors: ConfigError for one that no other process could import, such as
    a function of a cell."""
    module, name = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", "<lambda>")
    if module == "__main__" or not _FORM.fullmatch(f"{module}:{name}"):
        raise ConfigError(
            f"{setting}: {name} is of no module, so no other process and no resumed run would find it: write it into a "
            f"file (%%writefile rewards.py) and give 'rewards:{name.rpartition('.')[2].strip('<>')}'"
        )
    return f"{module}:{name}"


def forget(reference: str, folders: Sequence[str]) -> None:
    """Unload a module of these folders, so that its next use imports it again."""
    name = reference.partition(":")[0]
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is not None and any(Path(folder).resolve() in Path(file).resolve().parents for folder in folders):
        del sys.modules[name]


def _where(thing: Any) -> str:
    return getattr(thing, "__file__", None) or getattr(thing, "__name__", repr(thing))


def _import(label: str, name: str, folders: Sequence[str]) -> ModuleType:
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    importlib.invalidate_caches()  # the file may be younger than the last look at its folder
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            places = ", ".join(folders) or "no folder"
            raise ConfigError(
                f"{label}: there is no module {error.name!r} in {places}, nor is it installed: correct the name, or "
                f"add its folder to run.plugin_path"
            ) from None
        raise ConfigError(f"{label}: importing it failed: {what_happened(error)}") from None
    except (Exception, SystemExit) as error:  # it is somebody else's program: whatever it raises is their mistake
        raise ConfigError(f"{label}: importing it failed: {what_happened(error)}") from None
    _check_not_shadowed(label, module, folders)
    return module


def _check_not_shadowed(label: str, module: ModuleType, folders: Sequence[str]) -> None:
    """Errors: ConfigError if a file that was meant is hidden by a package of the same name."""
    first = module.__name__.partition(".")[0]
    file = Path(getattr(module, "__file__", None) or "").resolve()
    for folder in map(Path, folders):
        meant = folder / f"{first}.py"
        if meant.is_file() and folder.resolve() not in file.parents:
            raise ConfigError(f"{label}: {meant} is hidden by {file}, which has the same name: rename your file")


def what_happened(error: BaseException, file: str = "") -> str:
    """An exception in one line, with the place that raised it: the last line of ``file`` on the way there, if any."""
    text = " ".join(str(error).split())[:_MESSAGE_CHARACTERS]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if file and frame.filename == file] or frames
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


def check_signature(label: str, function: object, parameters: Sequence[str], keywords: Sequence[str] = ()) -> None:
    """Errors: ConfigError unless ``function`` is a callable that takes these arguments, by place and by keyword."""
    parameter_list = ", ".join([*parameters, *(["*", *keywords] if keywords else [])])
    if not callable(function):
        raise ConfigError(f"{label} is of type {type(function).__name__}: name a function ({parameter_list})")
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C: it does not tell
        return
    try:
        signature.bind(*parameters, **dict.fromkeys(keywords))
    except TypeError:
        raise ConfigError(f"{label} must take ({parameter_list}), but it takes {signature}") from None


def is_overridden(thing: object, name: str, base: type) -> bool:
    """Whether an object or class has this method or attribute, and not as the default of ``base``."""
    kind = thing if isinstance(thing, type) else type(thing)
    if base not in kind.__mro__:
        return hasattr(thing, name)
    return inspect.getattr_static(thing, name, None) is not inspect.getattr_static(base, name, None)


def is_method(thing: object, name: str) -> bool:
    """Whether this is called, and no value or property. No property is asked for its value."""
    attribute = inspect.getattr_static(thing, name, None)
    return callable(attribute) or isinstance(attribute, classmethod | staticmethod)


def check_spelling(
    label: str, thing: object, base: type, methods: Collection[str], attributes: Collection[str] = ()
) -> None:
    """Errors: ConfigError for a public name that is nearly one of these hooks, which the object or class itself lacks.

    ``base``: what has the hooks' defaults; its names are known. A method is taken for a method alone.
    """
    names = {*methods, *attributes, *dir(base)}
    for name in (name for name in dir(thing) if not name.startswith("_") and name not in names):
        hooks = methods if is_method(thing, name) else attributes
        missing = [hook for hook in hooks if not is_overridden(thing, hook, base)]
        if near := difflib.get_close_matches(name.lower(), missing, n=1, cutoff=_NEAR):
            raise ConfigError(
                f"{label} with {name}, which nothing calls: did you mean {near[0]!r}? If not, begin its name with _"
            )


def source_file(thing: Any) -> str:
    """Source file of a function, class or object; empty if unknown."""
    module = inspect.getmodule(thing) or inspect.getmodule(type(thing))
    return getattr(module, "__file__", None) or ""


def shown(value: Any) -> str:
    """Value in a message: one line, cut to 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
