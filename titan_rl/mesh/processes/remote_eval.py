"""What a function finds out of an actor. It comes pickled from the controller, whose own code it is."""

import pickle
from typing import Any


def run_examination(code: bytes, subject: Any) -> tuple[bytes, str]:
    """What a pickled function says of the subject, pickled, or how it failed, which is no reason to die."""
    try:
        return pickle.dumps(pickle.loads(code)(subject)), ""
    except Exception as error:  # it is a person's function: whatever it raises is told to them
        return b"", f"{type(error).__name__}: {error}"
