"""Python's own private names: its unpickler in Python, and what it does as it ends."""

import atexit
import pickle
import threading
from typing import Any

from titan_rl.compat.reach import PYTHON, Reach

REACHES = (
    Reach("pickle:_Unpickler", "read a pickle that may not set attributes"),
    Reach("pickle:_Unpickler.dispatch", "read a pickle that may not set attributes"),
    Reach("pickle:_Unpickler.load_build", "read a pickle that may not set attributes"),
    Reach("threading:_shutdown", "end a forked process in good order"),
    Reach("atexit:_run_exitfuncs", "end a forked process in good order"),
)
PYTHON.require(REACHES)


class BuildCheckedUnpickler(pickle._Unpickler):
    """The unpickler in Python, since the one in C cannot be kept from setting attributes of a class it may make.

    A subclass says which names it finds (``find_class``) and what a pickle may set attributes of (``check_build``).
    """

    dispatch = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def check_build(self, target: Any) -> None:
        """Errors: whatever is to end the reading, if this may not be given attributes."""
        raise NotImplementedError

    def _checked_build(self) -> None:
        self.check_build(self.stack[-2])
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)  # pyright: ignore[reportArgumentType]

    # typeshed has the class in C for what the one in Python dispatches to
    dispatch[pickle.BUILD[0]] = _checked_build  # pyright: ignore[reportArgumentType]


def run_exit_functions() -> None:
    """End other threads and run what is due at exit, as Python does when its main program ends."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
