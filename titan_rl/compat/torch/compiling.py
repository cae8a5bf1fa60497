"""torch's compiler: imported only once something is compiled, and as deterministic as the rest."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from titan_rl.compat.reach import TORCH, Reach

_PARTITIONER, _OPERATORS = "torch._functorch.partitioners", "get_default_op_list"
REACHES = (
    Reach("torch._inductor.config:deterministic", "choose compiled kernels by something else than the clock"),
    Reach("torch._inductor.config:emulate_precision_casts", "round in compiled FP8 layers as without compilation"),
    Reach(f"{_PARTITIONER}:{_OPERATORS}", "list the operators that selective checkpoints keep, when it is needed"),
)
_patching = threading.RLock()


@contextmanager
def compiled_at_first_call() -> Iterator[None]:
    """Meanwhile what this thread gives to ``torch.compile`` is compiled at its first call, if there ever is one.

    For imports of modules that compile as they are imported, which costs a second or more and no setting of torch
    spares. Other threads compile as ever; one block at a time, and ``torch.compile`` is what it was behind it.
    """
    thread, compile_now = threading.get_ident(), torch.compile

    def compile_later(function: Callable | None = None, **options: Any) -> Callable:
        if threading.get_ident() != thread:
            return compile_now(function, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
        if function is None:  # a decorator is wanted
            return partial(compile_later, **options)
        return _later(partial(compile_now, function, **options))

    with _patching:
        compile_now = torch.compile
        torch.compile = compile_later  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            torch.compile = compile_now


def _later(make: Callable[[], Callable]) -> Callable:
    made = cache(make)

    def call(*arguments: Any, **keywords: Any) -> Any:
        return made()(*arguments, **keywords)

    return call


@contextmanager
def partitioner_at_first_call() -> Iterator[None]:
    """Meanwhile whoever imports the compiler's list of operators gets it at its first call.

    TorchTitan asks for it where selective checkpoints are wanted, and importing it takes a fifth of a second.
    """
    if _PARTITIONER in sys.modules:
        yield
        return
    stand_in = sys.modules[_PARTITIONER] = ModuleType(_PARTITIONER)
    setattr(stand_in, _OPERATORS, _default_operators)
    try:
        yield
    finally:
        del sys.modules[_PARTITIONER]


def _default_operators() -> Any:
    """Errors: DependencyChanged."""
    TORCH.require(REACHES)
    return getattr(import_module(_PARTITIONER), _OPERATORS)()


def is_compiler_disabled() -> bool:
    """Whether ``torch.compile`` returns what it is given, for which it imports the compiler all the same."""
    return os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def import_no_disabled_compiler() -> None:
    """From now on import no compiler for what ``torch.compile`` is given, if it is disabled. Once in a process."""
    if not is_compiler_disabled():
        return
    compile_now: Any = torch.compile

    def compile_if_enabled(model: Callable | None = None, **options: Any) -> Callable:
        """``model``: as torch names what it compiles."""
        if model is None:  # a decorator is wanted
            return partial(compile_if_enabled, **options)
        return model if is_compiler_disabled() else compile_now(model, **options)

    torch.compile = compile_if_enabled  # pyright: ignore[reportAttributeAccessIssue]


def set_compiler_determinism(wanted: bool) -> None:
    """Whether compiled kernels are chosen without the clock. Imports the compiler's settings, which takes a second.

    Errors: DependencyChanged.
    """
    TORCH.require(REACHES)
    import torch._inductor.config as inductor

    inductor.deterministic = wanted


def emulate_precision_casts() -> None:
    """Have compiled kernels round where the model does (pytorch issue 150859). Errors: DependencyChanged."""
    TORCH.require(REACHES)
    import torch._inductor.config as inductor

    inductor.emulate_precision_casts = True
