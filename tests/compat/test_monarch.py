"""Monarch 0.7's private names, and which faults its hook hears of."""

import os
import sys

import monarch.actor
import pytest
from reaches import check_forms, check_page, rows_of

from titan_rl.compat.monarch import actors, library
from titan_rl.compat.reach import MONARCH

MODULES = (library, actors)
FORMS = {
    "monarch._rust_bindings:__file__": "str",
    "monarch._rust_bindings.monarch_hyperactor.supervision:SupervisionError": "class",
    "monarch._rust_bindings.monarch_hyperactor.supervision:MeshFailure.mesh_name": "getset_descriptor",
    "monarch._rust_bindings.monarch_hyperactor.supervision:MeshFailure.report": "(self)",
    "monarch._rust_bindings.monarch_hyperactor.host_mesh:BootstrapCommand": "class",
    "monarch._src.actor.proc_mesh:_get_bootstrap_args": "()",
    "monarch._src.actor.endpoint:EndpointProperty": "class",
    "monarch.actor:unhandled_fault_hook": "(failure)",
}


UNDELIVERABLE = """The actor <monarch._src.actor.actor_mesh.RootClientActor client> and all its descendants have failed:
  undeliverable message for {actor}.hi() (call_one):
  \tdescription: delivery of message from sender to dest failed
  \tsender: client.local<5LTyuP2CvwR>@ipc://@AYuDNeIT4qST2IuBXg2Jrh7d
  \tdest: {actor}<ys5G1EFGudP>.{process}<61LicMaR3nf>:<fth3VPi8YCK>@{process}<61LicMaR3nf>.ipc://@AYuDNeIT4qST2Iu
  \tmessage type: monarch_hyperactor::actor::PythonMessage
"""
"""Monarch 0.7's report of a call that arrived after the actor had stopped."""


NOT_STOPPED = """The actor proc_mesh_controller_{mesh}-cs7vc8y8og6<41PkpdQBT88>.local<yAVjbDgoeFZ>@ipc:///241.1 \
and all its descendants have failed:
  error stopping proc mesh: statuses: Timeout(30.000774123s)=0..1
"""
"""Monarch 0.7's report of a mesh that was told to stop and did not say that it has."""


class Failure:
    def __init__(self, mesh_name: str, report: str = ""):
        self.mesh_name, self._report = mesh_name, report

    def report(self) -> str:
        return self._report


@pytest.fixture
def heard(monkeypatch):
    """What Monarch's own hook hears of, behind ours."""
    heard = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: heard.append(failure.mesh_name))
    monkeypatch.setattr(actors, "_known", {"logger"})
    actors.pass_on_unknown_faults()
    return heard


def test_names_are_there_in_their_form(monkeypatch):
    # a run of this process, in an earlier test, has put its filter before the hook
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", monarch._src.actor.supervision.unhandled_fault_hook)
    check_forms(MONARCH, MODULES, FORMS)


def test_the_page_lists_them():
    check_page(MONARCH, MODULES, "tests/compat/test_monarch.py")
    [bind] = [row for row in rows_of(MONARCH) if row[2] == "`mesh/resources/listeners/sockets.py`"]
    assert bind[0] == "`bind`, in the library's table of what it calls"


def test_a_process_is_started_by_this_python():
    program, arguments, environment = actors.bootstrap_command()
    assert (program, arguments[0], environment) == (sys.executable, "-m", {})
    actors.BootstrapCommand("/bin/sh", None, [program, *arguments], environment | {"A": "B"})


def test_the_library_is_a_file_that_is_loaded():
    assert library.is_loaded() and os.path.isfile(library.library_file())


def test_a_fault_that_no_owner_knows_is_monarchs(heard):
    for name in ("trainer_1-2GUiPq3wYvs", "trainer_10-2GUiPq3wYvs", "logger-ya2xrDEv2JW", "stranger-eTEG52gDQaV"):
        monarch.actor.unhandled_fault_hook(Failure(name))
    assert heard == ["trainer_1-2GUiPq3wYvs", "trainer_10-2GUiPq3wYvs", "stranger-eTEG52gDQaV"]


def test_a_fault_that_an_owner_knows_is_not(heard):
    actors.know_faults_of("trainer_1", "trainer_1_sidecar")
    for name in ("trainer_1-2GUiPq3wYvs", "trainer_1_sidecar-45xg8eyrNV9", "trainer_1", "trainer_10-2GUiPq3wYvs"):
        monarch.actor.unhandled_fault_hook(Failure(name))
    assert heard == ["trainer_10-2GUiPq3wYvs"]


@pytest.mark.parametrize(
    ("actor", "process", "is_heard"),
    [
        ("trainer_1_sidecar", "elsewhere-0", False),
        ("proc_agent", "trainer_1-0", False),
        ("stranger", "elsewhere-0", True),
    ],
)
def test_a_message_to_a_known_actor_that_has_stopped_ends_no_program(heard, actor, process, is_heard):
    actors.know_faults_of("trainer_1", "trainer_1_sidecar")
    monarch.actor.unhandled_fault_hook(Failure("<none>", UNDELIVERABLE.format(actor=actor, process=process)))
    assert heard == ["<none>"] * is_heard


@pytest.mark.parametrize(
    ("mesh", "is_heard"), [("generator_0_6", False), ("generator_0_61", True), ("strangers", True)]
)
def test_a_mesh_of_ours_that_does_not_say_that_it_stopped_ends_no_program(heard, mesh, is_heard):
    """It would end a notebook's kernel half a minute after its session was closed."""
    actors.know_faults_of("generator_0_6", "generator_0_6_sidecar")
    monarch.actor.unhandled_fault_hook(Failure("<none>", NOT_STOPPED.format(mesh=mesh)))
    assert heard == ["<none>"] * is_heard


def test_what_the_hook_raises_ends_the_program_as_ever(monkeypatch):
    """Monarch takes a fault for handled unless its hook raises."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", monarch._src.actor.supervision.unhandled_fault_hook)
    actors.pass_on_unknown_faults()
    with pytest.raises(SystemExit):
        monarch.actor.unhandled_fault_hook(Failure("stranger-eTEG52gDQaV"))


def test_while_all_stops_a_fault_is_told_and_ends_no_program(heard):
    told = []
    with actors.unknown_faults_logged(told.append):
        monarch.actor.unhandled_fault_hook(Failure("stranger-eTEG52gDQaV", "it has gone"))
        monarch.actor.unhandled_fault_hook(Failure("logger-ya2xrDEv2JW"))
    assert told == ["while the actors stop, Monarch reports a fault of stranger-eTEG52gDQaV: it has gone"] and not heard
    monarch.actor.unhandled_fault_hook(Failure("stranger-eTEG52gDQaV"))
    assert heard == ["stranger-eTEG52gDQaV"]


def test_a_second_run_of_a_process_adds_no_second_filter(heard):
    hook = monarch.actor.unhandled_fault_hook
    actors.pass_on_unknown_faults()
    assert monarch.actor.unhandled_fault_hook is hook
