"""What bounds the programs that a run's model writes: said, and in the run's records."""

from titan_rl.data.callbacks import Log, RecordEvent
from titan_rl.environments.sandbox.pool import bounds_of_boxes

BOX_BOUNDS = "sandbox"
"""The kind of event."""


def note_box_bounds(log: Log, record_event: RecordEvent) -> None:
    """Of this machine. Nothing where no task of the run has looked for boxes."""
    if said := bounds_of_boxes():
        log(f"on this machine, programs that the model writes are bounded by {said}")
        record_event(BOX_BOUNDS, bounds=said)
