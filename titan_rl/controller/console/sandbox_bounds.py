"""Limits on programs that the model writes: logged, and recorded as an event."""

from titan_rl.data.callbacks import Log, RecordEvent
from titan_rl.environments.sandbox.pool import bounds_of_boxes

BOX_BOUNDS = "sandbox"
"""The kind of event."""


def log_sandbox_bounds(log: Log, record_event: RecordEvent) -> None:
    """Log and record this machine's sandbox limits, if a task of the run uses a sandbox."""
    if limits := bounds_of_boxes():
        log(f"on this machine, programs that the model writes are bounded by {limits}")
        record_event(BOX_BOUNDS, bounds=limits)
