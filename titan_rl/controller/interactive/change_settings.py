"""Changes of settings between two steps of a running run, without a stop.

    checked ─▶ a checkpoint of the step ─▶ config.json, the one before under earlier/ ─▶ taken up (live_settings.py)

So every recorded step was trained under one configuration, no way back leads over a boundary, and what the run is after
a change is what a run that was resumed with it would be.
"""

import asyncio
import getpass
import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

from titan_rl.algorithms.base import Algorithm
from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.load import ConfigError, flat, with_overrides, written
from titan_rl.config.sections.schema import Config
from titan_rl.controller.preflight.checks import Checked, check, recheck_updates
from titan_rl.controller.preflight.live_settings import Effect, Effects, effects_of
from titan_rl.controller.preflight.setting_changes import Change, record_changes
from titan_rl.controller.recovery.checkpointing import SaveError
from titan_rl.controller.session import Session

_ROLES = ("reference", "critic", "implicit_reward", "reward_model", "teacher", "self_teacher")


async def change(session: Session, overrides: dict[str, dict[str, Any]]) -> list[Change]:
    """Change settings between two steps. ``overrides``: nested tables, as in a TOML.

    Errors: ConfigError, with nothing changed; SaveError if there can be no boundary; an actor's fault."""
    settings, effects = flat(overrides), _effects(session, flat(overrides))
    config = with_overrides(session.config, overrides)
    before, after = flat(written(session.config)), flat(written(config))
    # the same reward may be another by now: its file can have been written anew
    keys = [key for key in settings if before.get(key) != after.get(key) or key == "task.reward"]
    if not keys:
        return []
    of_updates = effects == {Effect.UPDATES}
    # what an earlier setting does nothing for now may stay: it cannot always change, too
    _check_roles(session.checked, config, keys[0])
    again = partial(recheck_updates, session.checked) if of_updates else check
    checked = await asyncio.to_thread(again, config, keys)
    if of_updates and not _are_in_the_updates(session.checked.algorithm, checked.algorithm):
        effects = frozenset({Effect.TRAINER})
    start = time.perf_counter()
    await _save(session)
    step, who = session.progress.step, _who()
    changes = [Change(key, before.get(key), after[key], step, who) for key in keys]
    session.run_dir.write_config(checked.as_dict(), step)
    record_changes(session.run_dir, changes)
    _take(session, checked)
    await session.controller.take_settings(checked.algorithm, effects)
    seconds = time.perf_counter() - start
    for each in changes:
        session.record_event("changed", **asdict(each), seconds=seconds)
        was = "not set" if each.before is None else each.before
        session.log(f"from step {step + 1} on: {each.key} = {each.after} (was {was})")
    return changes


def _effects(session: Session, keys: Mapping[str, Any]) -> Effects:
    on_data = session.checked.dataset is not None
    return frozenset().union(*(effects_of(key, on_data=on_data) for key in keys))


def _are_in_the_updates(before: Algorithm, after: Algorithm) -> bool:
    """Whether algorithms differ for the policy's updates alone: no model beside the policy reads their settings."""
    has_roles = any(getattr(after.needs, role) for role in _ROLES)
    return before.settings == after.settings or (before.needs == after.needs and not has_roles)


def _check_roles(checked: Checked, config: Config, key: str) -> None:
    """Errors: ConfigError if other models would have to be there."""
    before = checked.algorithm
    after = make_algorithm(config.algorithm, config.run.plugin_path, on_data=checked.dataset is not None)
    for role in _ROLES:
        if (needed := getattr(after.needs, role)) != getattr(before.needs, role):
            verb = "needs" if needed else "has no use for"
            raise ConfigError(
                f"{key}: with it the algorithm {verb} a {role}, and models come and go only when a run starts: close "
                f"it, and give it with resume=True"
            )
    if after.reprompt_template != before.reprompt_template:
        raise ConfigError(
            f"{key}: verifiers make what a self-teacher reads: close the run, and give it with resume=True"
        )
    if (before.head, before.trains_on) != (after.head, after.trains_on):
        raise ConfigError(f"{key}: the algorithm is one for another kind of run: start one of its own")


async def _save(session: Session) -> None:
    checkpointing, step = session.controller.checkpointing, session.progress.step
    await checkpointing.finish()
    if checkpointing.saved_step != step:
        await session.save()
        await checkpointing.finish()
    if checkpointing.saved_step != step:
        raise SaveError(f"step {step} could not be saved, and settings change only where a checkpoint is")


def _take(session: Session, checked: Checked) -> None:
    """All who read settings have the session's own configuration, so that is what changes."""
    for section in fields(Config):
        setattr(session.config, section.name, getattr(checked.config, section.name))
    session.checked, session.titan = replace(checked, config=session.config), checked.titan


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id without a name
        return "unknown"
