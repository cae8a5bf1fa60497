"""Alarms: what in a run's metrics asks somebody to look. Pure.

A reward that looks gamed (reward_hacking.py), and a policy or a machinery that looks unwell (training_health.py). Most
compare the mean of the last WINDOW steps with that of every window of as many steps before it, without overlap, and are
raised if one of them differs by more than their thresholds *and* by more than chance: by SURE standard errors, which
come from how much the steps of the two windows differ among themselves. Scales are the run's own: a reward's range is
what samples earned so far, at most less at least.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from titan_rl.records.alarms import reward_hacking, training_health
from titan_rl.records.alarms.windows import WINDOW, Record, Records

REWARD_HACKING = tuple(reward_hacking.LOOKS)
"""Of the reward."""
NAMES = (*REWARD_HACKING, *training_health.LOOKS)
METRICS = tuple(f"alarm_{name}" for name in NAMES)
_LOOKS = reward_hacking.LOOKS | training_health.LOOKS
HISTORY = 10_000
"""Steps at most that ``history`` looks at, which takes seconds for so many and grows with their square."""


def standing(records: Sequence[Record], names: Collection[str] = NAMES) -> dict[str, str]:
    """The alarms that stand after the last of a run's records, by name, each in words."""
    return _standing(Records(records), names)


def _standing(records: Records, names: Collection[str]) -> dict[str, str]:
    messages = {name: _LOOKS[name](records) for name in names}
    return {name: text for name, text in messages.items() if text}


@dataclass(frozen=True)
class Alarm:
    """Raised alarm, with the steps of its beginning and end."""

    name: str
    first: int
    """Step after which it stood."""
    last: int
    """Step up to which it did."""
    says: str
    """In words, as it was then."""


def history(records: Iterable[dict[str, float]], names: Collection[str] = NAMES) -> list[Alarm]:
    """Alarms of a run's last steps, in the order of their beginnings; one that ended and came again is two."""
    rewarded = [record for record in records if "reward" in record][-HISTORY:]
    all_records = Records(rewarded)
    raised: list[Alarm] = []
    open_ones: dict[str, Alarm] = {}
    for count in range(2 * WINDOW, len(rewarded) + 1):
        step, now = int(rewarded[count - 1]["step"]), _standing(all_records.first(count), names)
        raised += [open_ones.pop(name) for name in list(open_ones) if name not in now]
        for name, message in now.items():
            before = open_ones.get(name, Alarm(name, step, step, message))
            open_ones[name] = Alarm(name, before.first, step, before.says)
    return sorted([*raised, *open_ones.values()], key=lambda alarm: (alarm.first, alarm.name))
