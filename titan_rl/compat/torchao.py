"""What torchao has logged while it is imported, as transformers imports it wherever it is installed.

It warns of each of its kernels that this build of torch cannot load, and torch of two of torchao's types: eight lines
for each command on a CPU. A layer that needs such a kernel has an error of its own.
"""

import logging

_LEFT_OUT = {
    "torchao": ("Failed to load ",),
    "torch.utils._pytree": ("KernelPreference", "ScaleCalculationMode"),
}
"""By logger, parts of the messages."""


def leave_out_import_warnings() -> None:
    """Have this process not log them."""
    for name, parts in _LEFT_OUT.items():
        logging.getLogger(name).addFilter(lambda record, parts=parts: not any(p in record.getMessage() for p in parts))
