"""Monarch's actors: how their processes are started, what their calls raise, and who hears of their faults."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import monarch.actor

from titan_rl.compat.reach import MONARCH, Reach

_BINDINGS = "monarch._rust_bindings.monarch_hyperactor"
REACHES = (
    Reach(f"{_BINDINGS}.supervision:SupervisionError", "know that an actor is gone"),
    Reach(f"{_BINDINGS}.supervision:MeshFailure.mesh_name", "know whose fault an owner hears of by itself"),
    Reach(f"{_BINDINGS}.supervision:MeshFailure.report", "know to whom a message was that came too late"),
    Reach(f"{_BINDINGS}.host_mesh:BootstrapCommand", "start a process behind a shell"),
    Reach("monarch._src.actor.proc_mesh:_get_bootstrap_args", "start a process as Monarch itself does"),
    Reach("monarch._src.actor.endpoint:EndpointProperty", "give concurrent endpoints types"),
    Reach("monarch.actor:unhandled_fault_hook", "pass on faults that no owner knows"),
)
MONARCH.require(REACHES)

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch._rust_bindings.monarch_hyperactor.supervision import MeshFailure, SupervisionError
from monarch._src.actor.endpoint import EndpointProperty
from monarch._src.actor.proc_mesh import _get_bootstrap_args

__all__ = ["BootstrapCommand", "EndpointProperty", "MeshFailure", "SupervisionError"]

_MONARCHS_OWN = "logger"
"""The actor that Monarch puts into each process, which falls with the process's other actors."""
_RECIPIENT = re.compile(r"undeliverable message.*?dest: ([\w-]+)<\w+>\.([\w-]+)<", re.DOTALL)
"""Actor and process in Monarch's report of a message that was not delivered."""
_CONTROLLED = re.compile(r"The actor (?:proc|actor)_mesh_controller_([\w-]+)<")
"""Mesh whose controller failed in this process, in Monarch's report of it."""
_known: set[str] = {_MONARCHS_OWN}


def bootstrap_command() -> tuple[str, list[str], dict[str, str]]:
    """Program, arguments and environment by which Monarch starts a process."""
    program, arguments, environment = _get_bootstrap_args()
    return program, arguments or [], environment


def know_faults_of(*names: str) -> None:
    """Faults of meshes of these names are known to their owners: Monarch's hook need not hear of them."""
    _known.update(names)


def pass_on_unknown_faults() -> None:
    """Have this process's hook for faults hear only of those that nobody knows. A second call changes nothing."""
    before = monarch.actor.unhandled_fault_hook
    if isinstance(before, _Unknown):
        return
    monarch.actor.unhandled_fault_hook = _Unknown(before)


@contextmanager
def unknown_faults_logged(log: Callable[[str], None]) -> Iterator[None]:
    """A context in which a fault that nobody knows is logged, and ends no program: all that could fail is stopping."""
    hook = monarch.actor.unhandled_fault_hook
    if not isinstance(hook, _Unknown):
        yield
        return
    before, hook.log = hook.log, log
    try:
        yield
    finally:
        hook.log = before


class _Unknown:
    """Monarch's hook behind a filter; unless somebody replaced it, it reports the fault and ends the program."""

    def __init__(self, hook: Callable[[MeshFailure], None]):
        self._hook = hook
        self.log: Callable[[str], None] | None = None
        """What hears of faults in place of the hook."""

    def __call__(self, failure: MeshFailure) -> None:
        if any(map(is_known, (failure.mesh_name, *meshes_behind(failure)))):
            return
        if self.log is None:
            self._hook(failure)
        else:
            self.log(f"while the actors stop, Monarch reports a fault of {failure.mesh_name}: {failure.report()}")


def meshes_behind(failure: MeshFailure) -> tuple[str, ...]:
    """Names of the actors and processes that a failure without a mesh of its own is about.

    Monarch counts as a fault of this process a message to an actor that has stopped, whose call fails of itself, and
    a mesh that does not say within 30 s that it has stopped, whose processes its owner has killed by then."""
    found = [form.search(failure.report()) for form in (_RECIPIENT, _CONTROLLED)]
    return tuple(name for match in found if match for name in match.groups())


def is_known(mesh_name: str) -> bool:
    """Whether a mesh has a known name, or that with Monarch's suffix (``trainer_1-2GUiPq3wYvs``)."""
    return mesh_name in _known or mesh_name.rpartition("-")[0] in _known
