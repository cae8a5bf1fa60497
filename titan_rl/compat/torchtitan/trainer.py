"""``torchtitan.trainer`` left unimported: models ask it for one type, and it brings datasets and pandas with it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

_NAME = "torchtitan.trainer"


@contextmanager
def without_trainer() -> Iterator[None]:
    """Give models a ``Trainer.Config`` that nothing is an instance of, unless TorchTitan's own is imported already.

    ``Decoder.Config.update_from_config`` imports it for one ``isinstance`` of its caller's config.
    """
    if _NAME in sys.modules:
        yield
        return
    stand_in = ModuleType(_NAME)
    vars(stand_in)["Trainer"] = SimpleNamespace(Config=type("Config", (), {}))
    sys.modules[_NAME] = stand_in
    try:
        yield
    finally:
        del sys.modules[_NAME]
