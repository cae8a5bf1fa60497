"""What a function finds out of an actor. It comes pickled from the controller, whose own code it is."""

import pickle
from typing import Any


def run_examination(code: bytes, subject: Any) -> tuple[bytes, str]:
    """Result of a pickled function of the subject, pickled, and its error or an empty text."""
    try:
        return pickle.dumps(pickle.loads(code)(subject)), ""
    except Exception as error:  # it is a person's function: whatever it raises is told to them
        return b"", f"{type(error).__name__}: {error}"
