"""What torchao says while it is imported, as transformers does wherever it is installed.

It warns of each of its kernels that this build of torch cannot load, and torch of two of torchao's types. A layer that
needs such a kernel has an error of its own.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("torchao", "torch.utils._pytree")


@contextmanager
def import_warnings_left_out() -> Iterator[None]:
    """Errors alone are logged inside the context."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
