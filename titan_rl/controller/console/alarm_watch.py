"""Alarms of a running run (records/alarms/alarms.py): logged when raised, and a metric of every step."""

from pathlib import Path

from titan_rl.data.callbacks import Log, RecordEvent
from titan_rl.records.alarms.alarms import NAMES, REWARD_HACKING, standing
from titan_rl.records.metrics import read_metrics


class AlarmWatch:
    """Owns what the steps so far measured."""

    def __init__(self, root: Path, *, log: Log, record_event: RecordEvent):
        """``root``: of the run, which may have steps already."""
        self.log, self.record_event = log, record_event
        self._records = {record["step"]: record for record in read_metrics(root) if "reward" in record}
        self._standing: set[str] = set()

    def evaluated(self, step: int, accuracy: float) -> None:
        """Held-out accuracy after a step."""
        if step in self._records:
            self._records[step] = self._records[step] | {"held_out_accuracy": accuracy}

    def update(self, record: dict[str, float]) -> dict[str, float]:
        """Alarm columns of a step's record, 1 for each active alarm. A step may be repeated."""
        step = record["step"]
        for again in [number for number in reversed(self._records) if number >= step]:
            del self._records[again]
        self._records[step] = record
        alarms = standing(list(self._records.values()))
        for name in alarms.keys() - self._standing:
            more = "; `titan-rl hack-check` tells more" if name in REWARD_HACKING else ""
            self.log(f"step {step}: ALARM {name}: {alarms[name]}{more}")
            self.record_event("alarm", name=name, step=step, says=alarms[name])
        self._standing = set(alarms)
        return {f"alarm_{name}": float(name in alarms) for name in NAMES}
