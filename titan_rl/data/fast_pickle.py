"""Messages that travel as one piece of bytes."""

import pickle
from typing import Any


class FastPickle:
    """Base of dataclasses that are pickled into bytes at once. Monarch's pickler and unpickler call Python for each
    array of a message, which a group has dozens of."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), pickle.dumps(vars(self), pickle.HIGHEST_PROTOCOL))


def _unpickled(kind: type, fields: bytes) -> Any:
    instance = object.__new__(kind)
    vars(instance).update(pickle.loads(fields))
    return instance
