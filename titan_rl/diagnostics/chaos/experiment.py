"""A training under fire: waits for each fault's moment, strikes, and starts a killed controller's run again."""

import random
import signal
import time
from collections.abc import Callable

from titan_rl.diagnostics.chaos.injection import Struck, Witness, strike
from titan_rl.diagnostics.chaos.outcomes import is_mended
from titan_rl.diagnostics.chaos.run_process import Training
from titan_rl.diagnostics.chaos.schedule import PHASES, Fault, phase_of, state_of
from titan_rl.diagnostics.chaos.targets import (
    GONE,
    Victim,
    is_running,
    is_well,
    process_state,
    scorer_below,
    victims_of,
)

_CLOSE_SECONDS = 0.0005
"""Between two looks while the moment is near."""
_FAR_SECONDS = 0.02
_FOLLOW_SECONDS = 0.1
_LOOK_UP_SECONDS = 0.1
_PATIENCE_SECONDS = 30.0
_PATIENCE_STEPS = 4
"""How long a state is waited for; then the victim is struck in any."""
_ATTEMPTS = 3
"""A victim may die of something else before it comes by its order."""
_AFTERMATH_SECONDS = 30.0
"""Whoever was struck so lately is not struck again."""
_START_SECONDS = 15.0
"""A guess of how long a run takes to its first step, until it is known."""


class Ended(RuntimeError):
    """The run is over before all faults were struck."""


class Siege:
    """Strikes one training, one fault after the other. ``struck`` grows as it goes."""

    def __init__(
        self,
        training: Training,
        faults: list[Fault],
        seed: int,
        checkpoint_every: int,
        follow: Callable[[list[Struck]], None] = lambda struck: None,
    ):
        """``follow`` is called with what was struck so far, about every tenth of a second."""
        self.training, self.faults, self.follow = training, faults, follow
        self.chosen = random.Random(f"siege {seed}")
        self.struck: list[Struck] = []
        self._patience_steps = {"mid-checkpoint": checkpoint_every + 1}
        self._followed = self._looked_up = 0.0
        self._looked_up_kind = ""
        self._scorers_known: list[tuple[Victim, int | None]] = []

    def run(self) -> int:
        """The training's exit code. Errors: TimedOut."""
        self.training.start()
        try:
            for fault in self.faults:
                self._do(fault)
        except Ended:
            pass
        return self.training.await_end(self._look_around)

    def _do(self, fault: Fault) -> None:
        for _ in range(_ATTEMPTS):
            one = self._strike_controller(fault) if fault.kind == "controller" else self._strike(fault)
            if one.is_witnessed:
                break
        self.struck.append(one)

    def _strike(self, fault: Fault) -> Struck:
        victim, is_as_drawn = self._await_moment(fault)
        step, state = self.training.position()[0], fault.state
        if not is_as_drawn or state != "scoring":  # which lasts a millisecond: there is no time for a second look
            step, state = self._state_now(victim, fault.kind)
        way, orders = fault.way, self.training.orders
        witness = strike(victim, way, orders, self._look_on)
        if way in ("exit", "raise"):  # it took a while to come by the order, if it did
            if is_well(victim.pid) and witness.after != "obeyed":
                way, witness = "kill", strike(victim, "kill", orders, self._look_on)
            step, state = self._state_now(victim, fault.kind)
        return Struck(fault, victim, way, witness, state, step)

    def _strike_controller(self, fault: Fault) -> Struck:
        """The run goes on from its records afterwards. Errors: Ended, if it was over by itself."""
        if fault.state == "starting":
            self._await_start()
        else:
            self._await_moment(fault)
        process = self.training.process
        before = process_state(process.pid)
        victim = Victim("controller", process.pid)
        step, state = self._state_now(victim, "controller")
        now = time.time()
        process.kill()
        process.wait()
        after = GONE if process.returncode == -signal.SIGKILL else f"exit {process.returncode}"
        gone_after = self.training.await_orphans_gone(now)
        one = Struck(fault, victim, "kill", Witness(before, after, now, now), state, step, gone_after)
        if not one.is_witnessed:
            raise Ended
        self.training.start()
        return one

    # waiting

    def _look_on(self) -> None:
        """Errors: Ended; TimedOut."""
        self._look_around()
        if self.training.has_ended:
            raise Ended

    def _look_around(self) -> None:
        if time.monotonic() > self._followed + _FOLLOW_SECONDS:
            self._followed = time.monotonic()
            self._watch_restarts()
            self.follow(self.struck)

    def _watch_restarts(self) -> None:
        """What no event tells: a new scorer is there; a run that was resumed is in a step."""
        for one in self.struck:
            if one.seen_whole is not None:
                continue
            if one.kind == "scorer":
                pid = scorer_below(self.training.root, one.victim.name)
                if pid not in (None, one.victim.pid) and is_well(pid):
                    one.seen_whole = time.time()
            elif one.kind == "controller" and self.training.position()[1] in PHASES:
                one.seen_whole = time.time()

    def _await_start(self) -> None:
        """A random moment of the start that is under way."""
        seconds = self.training.seconds_to_first_step or _START_SECONDS
        end = time.monotonic() + self.chosen.uniform(0.0, seconds)
        while time.monotonic() < end:
            self._look_on()
            time.sleep(_FAR_SECONDS)
        self.training.learn_marks()

    def _await_moment(self, fault: Fault) -> tuple[Victim, bool]:
        """Whoever is met in the state that was drawn, and true; in any, if nobody is for too long."""
        patience = None
        while True:
            self._look_on()
            step, phase = self.training.position()
            if step < fault.after_step or phase not in PHASES:
                time.sleep(_FAR_SECONDS)
                continue
            if patience is None:
                self.training.learn_marks()
                patience = self._patience(fault, step)
            is_patient = step <= patience[0] and time.monotonic() < patience[1]
            if victims := self._met(fault, phase, is_patient):
                return self.chosen.choice(victims), is_patient
            time.sleep(_CLOSE_SECONDS)

    def _patience(self, fault: Fault, step: int) -> tuple[int, float]:
        """The last step, and the last moment, at which the state is waited for."""
        return (
            step + self._patience_steps.get(fault.state, _PATIENCE_STEPS),
            time.monotonic() + _PATIENCE_SECONDS,
        )

    def _met(self, fault: Fault, phase: str, is_patient: bool) -> list[Victim]:
        wanted = phase_of(fault.kind, fault.state)
        is_near = phase == wanted or (wanted == "saving" and self.training.is_writing_checkpoint)
        if is_patient and not is_near:
            return []
        if fault.kind == "controller":
            return [Victim("controller", self.training.process.pid)]
        if is_patient and fault.state == "scoring":
            return [victim for victim, scorer in self._scorers(fault.kind) if is_running(scorer)]
        victims = self._victims(fault.kind)
        return [one for one in victims if not self._is_starting(one, fault.kind)] if is_patient else victims

    def _victims(self, kind: str) -> list[Victim]:
        lately = time.time() - _AFTERMATH_SECONDS
        already = {one.victim.pid for one in self.struck if one.witness.happened > lately}
        return [one for one in victims_of(self.training.root, kind) if one.pid not in already]

    def _scorers(self, kind: str) -> list[tuple[Victim, int | None]]:
        """Those that serve, with their scorer's process: looked up only now and then, since scoring is short."""
        if time.monotonic() > self._looked_up + _LOOK_UP_SECONDS or self._looked_up_kind != kind:
            ready = [one for one in self._victims(kind) if not self._is_starting(one, kind)]
            self._looked_up, self._looked_up_kind = time.monotonic(), kind
            self._scorers_known = [(one, scorer_below(self.training.root, one.name)) for one in ready]
        return self._scorers_known

    # what a victim does

    def _is_starting(self, victim: Victim, kind: str) -> bool:
        since = [event for event in self.training.events() if event["time"] > self.training.started]
        return kind not in ("scorer", "controller") and not is_mended(kind, victim.name, since)

    def _is_scoring(self, victim: Victim, kind: str) -> bool:
        if kind == "scorer":
            return is_running(victim.pid)
        return kind == "verifier" and is_running(scorer_below(self.training.root, victim.name))

    def _state_now(self, victim: Victim, kind: str) -> tuple[int, str]:
        step, phase = self.training.position()
        if self._is_starting(victim, kind):
            return step, "starting"
        is_scoring, is_writing = self._is_scoring(victim, kind), self.training.is_writing_checkpoint
        return step, state_of(kind, phase, is_scoring=is_scoring, is_writing=is_writing)
