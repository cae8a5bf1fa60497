"""One experiment: waits for each scheduled fault's moment and injects it; a run without a controller is resumed."""

import random
import signal
import time
from collections.abc import Callable

from titan_rl.diagnostics.chaos.injection import Injection, Witness, inject
from titan_rl.diagnostics.chaos.outcomes import is_repaired
from titan_rl.diagnostics.chaos.run_process import RunProcess
from titan_rl.diagnostics.chaos.schedule import BELOW_VERIFIERS, PHASES, Fault, phase_of, state_of
from titan_rl.diagnostics.chaos.targets import (
    GONE,
    Target,
    below_verifier,
    is_running,
    is_well,
    process_state,
    targets_of,
)

_CLOSE_SECONDS = 0.0005
"""Between two looks while the moment is near."""
_FAR_SECONDS = 0.02
_PROGRESS_SECONDS = 0.1
_LOOK_UP_SECONDS = 0.1
_PATIENCE_SECONDS = 30.0
_PATIENCE_STEPS = 4
"""How long a state is waited for; after that the fault is injected in any state."""
_ATTEMPTS = 3
"""A target may die for another reason before it carries out its order."""
_AFTERMATH_SECONDS = 30.0
"""A process is no target again for so long."""
_START_SECONDS = 15.0
"""A guess of how long a run takes to its first step, until it is known."""


class Ended(RuntimeError):
    """The run ended before all faults were injected."""


class Experiment:
    """Injects the scheduled faults into one run, one after the other. ``injections`` grows as it goes."""

    def __init__(
        self,
        process: RunProcess,
        faults: list[Fault],
        seed: int,
        checkpoint_every: int,
        on_progress: Callable[[list[Injection]], None] = lambda injections: None,
    ) -> None:
        """``on_progress`` is called with the injections so far, about ten times a second."""
        self.process, self.faults, self.on_progress = process, faults, on_progress
        self.chosen = random.Random(f"siege {seed}")  # its first name, so that a seed hits the same targets
        self.injections: list[Injection] = []
        self._patience_steps = {"mid-checkpoint": checkpoint_every + 1}
        self._reported = self._looked_up = 0.0
        self._looked_up_kind = ""
        self._scorers_known: list[tuple[Target, int | None]] = []

    def run(self) -> int:
        """The run's exit code. Errors: TimedOut."""
        self.process.start()
        try:
            for fault in self.faults:
                self._attempt(fault)
        except Ended:
            pass
        return self.process.await_end(self._observe)

    def _attempt(self, fault: Fault) -> None:
        attempt = self._kill_controller if fault.kind == "controller" else self._inject
        one = attempt(fault)
        for _ in range(_ATTEMPTS - 1):
            if one.is_witnessed:
                break
            one = attempt(fault)
        self.injections.append(one)

    def _inject(self, fault: Fault) -> Injection:
        target, is_as_scheduled = self._await_moment(fault)
        step, state = self.process.position()[0], fault.state
        if not is_as_scheduled or state != "scoring":  # which lasts a millisecond: no time for a second look
            step, state = self._state_now(target, fault.kind)
        way, orders = fault.way, self.process.orders
        witness = inject(target, way, orders, self._observe_running)
        if way in ("exit", "raise"):  # an order takes a while, and may not be carried out
            if is_well(target.pid) and witness.after != "obeyed":
                way, witness = "kill", inject(target, "kill", orders, self._observe_running)
            step, state = self._state_now(target, fault.kind)
        return Injection(fault, target, way, witness, state, step)

    def _kill_controller(self, fault: Fault) -> Injection:
        """Afterwards the run is resumed. Errors: Ended, if the run had ended by itself."""
        if fault.state == "starting":
            self._await_start()
        else:
            self._await_moment(fault)
        controller = self.process.process
        before = process_state(controller.pid)
        target = Target("controller", controller.pid)
        step, state = self._state_now(target, "controller")
        now = time.time()
        controller.kill()
        controller.wait()
        after = GONE if controller.returncode == -signal.SIGKILL else f"exit {controller.returncode}"
        gone_after = self.process.await_orphans_gone(now)
        one = Injection(fault, target, "kill", Witness(before, after, now, now), state, step, gone_after)
        if not one.is_witnessed:
            raise Ended
        self.process.start()
        return one

    # waiting

    def _observe_running(self) -> None:
        """Errors: Ended; TimedOut."""
        self._observe()
        if self.process.has_ended:
            raise Ended

    def _observe(self) -> None:
        if time.monotonic() > self._reported + _PROGRESS_SECONDS:
            self._reported = time.monotonic()
            self._watch_restarts()
            self.on_progress(self.injections)

    def _watch_restarts(self) -> None:
        """What no event says: a scorer was replaced; a resumed run is in a step."""
        for one in self.injections:
            if one.seen_repaired is None and self._has_restarted(one):
                one.seen_repaired = time.time()

    def _has_restarted(self, one: Injection) -> bool:
        if one.kind in BELOW_VERIFIERS:
            pid = below_verifier(self.process.root, one.target.name, one.kind)
            return pid is not None and pid != one.target.pid and is_well(pid)
        return one.kind == "controller" and self.process.position()[1] in PHASES

    def _await_start(self) -> None:
        """Wait for a random moment of the run's start."""
        seconds = self.process.seconds_to_first_step or _START_SECONDS
        end = time.monotonic() + self.chosen.uniform(0.0, seconds)
        while time.monotonic() < end:
            self._observe_running()
            time.sleep(_FAR_SECONDS)
        self.process.learn_marks()

    def _await_moment(self, fault: Fault) -> tuple[Target, bool]:
        """A target in the scheduled state, and true; or, if none was for too long, one in any state, and false."""
        patience = None
        while True:
            self._observe_running()
            step, phase = self.process.position()
            if step < fault.after_step or phase not in PHASES:
                time.sleep(_FAR_SECONDS)
                continue
            if patience is None:
                self.process.learn_marks()
                patience = self._patience(fault, step)
            is_patient = step <= patience[0] and time.monotonic() < patience[1]
            if targets := self._candidates(fault, phase, is_patient):
                return self.chosen.choice(targets), is_patient
            time.sleep(_CLOSE_SECONDS)

    def _patience(self, fault: Fault, step: int) -> tuple[int, float]:
        """The last step, and the last moment, at which the state is waited for."""
        return (
            step + self._patience_steps.get(fault.state, _PATIENCE_STEPS),
            time.monotonic() + _PATIENCE_SECONDS,
        )

    def _candidates(self, fault: Fault, phase: str, is_patient: bool) -> list[Target]:
        fault_phase = phase_of(fault.kind, fault.state)
        is_near = phase == fault_phase or (fault_phase == "saving" and self.process.is_writing_checkpoint)
        if is_patient and not is_near:
            return []
        if fault.kind == "controller":
            return [Target("controller", self.process.process.pid)]
        if is_patient and fault.state == "scoring":
            return [target for target, scorer in self._scorers(fault.kind) if is_running(scorer)]
        targets = self._targets(fault.kind)
        return [one for one in targets if not self._is_starting(one, fault.kind)] if is_patient else targets

    def _targets(self, kind: str) -> list[Target]:
        recently = time.time() - _AFTERMATH_SECONDS
        already = {one.target.pid for one in self.injections if one.witness.happened > recently}
        return [one for one in targets_of(self.process.root, kind) if one.pid not in already]

    def _scorers(self, kind: str) -> list[tuple[Target, int | None]]:
        """Ready targets with their scorer's process id: not looked up at every look, since scoring is short."""
        if time.monotonic() > self._looked_up + _LOOK_UP_SECONDS or self._looked_up_kind != kind:
            ready = [one for one in self._targets(kind) if not self._is_starting(one, kind)]
            self._looked_up, self._looked_up_kind = time.monotonic(), kind
            below = "scorer" if kind == "verifier" else kind
            self._scorers_known = [(one, below_verifier(self.process.root, one.name, below)) for one in ready]
        return self._scorers_known

    # what a target does

    def _is_starting(self, target: Target, kind: str) -> bool:
        since = [event for event in self.process.events() if event["time"] > self.process.started]
        return kind not in (*BELOW_VERIFIERS, "controller") and not is_repaired(kind, target.name, since)

    def _is_scoring(self, target: Target, kind: str) -> bool:
        if kind in BELOW_VERIFIERS:
            return is_running(target.pid)
        return kind == "verifier" and is_running(below_verifier(self.process.root, target.name, "scorer"))

    def _state_now(self, target: Target, kind: str) -> tuple[int, str]:
        step, phase = self.process.position()
        if self._is_starting(target, kind):
            return step, "starting"
        is_scoring, is_writing = self._is_scoring(target, kind), self.process.is_writing_checkpoint
        return step, state_of(kind, phase, is_scoring=is_scoring, is_writing=is_writing)
