"""TorchTitan's attention, imported without torch's compiler, whose import takes a second or more in every process.

TorchTitan has FlexAttention compiled as its class is made. Nothing here calls it (attention.py has its own), so it is
compiled at its first call, if there ever is one. To be imported before anything else of ``torchtitan.models``.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch

_compile = torch.compile


def _compile_later(function: Callable | None = None, **options: Any) -> Callable:
    if function is None:  # a decorator is wanted
        return partial(_compile_later, **options)

    @cache
    def compiled() -> Callable:
        return _compile(function, **options)

    def call(*arguments: Any, **keywords: Any) -> Any:
        return compiled()(*arguments, **keywords)

    return call


with patch.object(torch, "compile", _compile_later):
    import torchtitan.models.common.attention  # noqa: F401
