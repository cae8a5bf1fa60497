"""Fault experiments: the schedule, which event belongs to which fault, the verdict; and a real one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import running
from tree import CONFIGS, TREE

from titan_rl.cli import main
from titan_rl.config.io.overrides import override_arguments, parse_overrides
from titan_rl.config.load import ConfigError, load_config
from titan_rl.diagnostics.chaos import report as reports
from titan_rl.diagnostics.chaos.audit import compare_records
from titan_rl.diagnostics.chaos.baseline import among_seeds, compare_prompts, compare_steps
from titan_rl.diagnostics.chaos.command import Options, _as_ctrl_c, _on_signals, chaos
from titan_rl.diagnostics.chaos.injection import Fault, Injection, Witness, inject
from titan_rl.diagnostics.chaos.outcomes import Outcome, is_repaired, outcome_of
from titan_rl.diagnostics.chaos.run_process import RunProcess
from titan_rl.diagnostics.chaos.schedule import (
    BELOW_VERIFIERS,
    KINDS,
    PHASES,
    STATES,
    WAYS,
    kinds_of,
    last_fault_step,
    phase_of,
    schedule_faults,
    state_of,
)
from titan_rl.diagnostics.chaos.targets import GONE, Members, Target, process_state

CONFIG = CONFIGS / "chaos/chaos.toml"

# the schedule


def test_the_documents_name_every_target():
    text = (TREE / "docs" / "operations" / "inspecting.md").read_text()
    [named] = re.findall(r"`--targets` takes some of\n`([a-z_,]+)`", text)
    assert sorted(named.split(",")) == sorted(KINDS)


def test_the_schedule_depends_on_the_seed_alone():
    assert schedule_faults(50, 3, 90, KINDS) == schedule_faults(50, 3, 90, KINDS) != schedule_faults(50, 4, 90, KINDS)


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_state_and_way_is_scheduled(seed):
    faults = schedule_faults(20 * len(KINDS), seed, 500, KINDS)
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(KINDS, 20)
    for kind in KINDS:
        of_kind = [fault for fault in faults if fault.kind == kind]
        assert {fault.state for fault in of_kind} == set(STATES[kind])
        assert {fault.way for fault in of_kind} == set(WAYS[kind])
    steps = [fault.after_step for fault in faults]
    assert steps == sorted(steps) and min(steps) >= 1 and max(steps) <= 500
    halves = Counter(step <= 250 for step in steps)
    assert halves[True] > 25 and halves[False] > 25


@pytest.mark.parametrize("seed", range(20))
def test_a_fault_in_a_start_follows_the_controllers_kill_directly(seed):
    faults = schedule_faults(10 * len(KINDS), seed, 100, KINDS)
    starts = [index for index, fault in enumerate(faults) if fault.state == "starting"]
    assert starts
    for index in starts:
        before = faults[index - 1]
        assert before.kind == "controller" and before.after_step == faults[index].after_step


def test_a_run_has_the_kinds_that_it_describes():
    usual = {"trainer", "generator", "verifier", "scorer", "controller"}
    assert set(kinds_of(load_config(None, {}))) == usual
    roles = ("reference", "teacher", "critic", "implicit_reward")
    own = {name: {"placement": "own"} for name in roles}
    everything = load_config(None, {"mesh": {"worker_loops": 1}, **own})
    everything.reward_model.path = "a"
    assert set(kinds_of(everything)) == usual | {"host", "reward_model", *roles} == set(KINDS)


@pytest.mark.parametrize("kind", ["host", "reward_model", "reference", "critic"])
def test_a_kind_that_the_run_lacks_is_no_target(kind):
    with pytest.raises(ConfigError, match=f"no {kind} in processes of its own: give --"):
        chaos(str(CONFIG), {"mesh": {"worker_loops": 0}}, Options(targets=("trainer", kind)))


def test_targets_can_be_chosen():
    faults = schedule_faults(30, 1, 50, ("controller", "scorer"))
    assert {fault.kind for fault in faults} == {"controller", "scorer"}
    assert all(fault.way == "kill" for fault in faults if fault.kind == "controller")
    assert schedule_faults(1, 1, 50, ("controller",))[0].state != "starting"


def test_the_end_of_a_run_is_left_alone():
    assert last_fault_step(100, 5) == 82 and last_fault_step(8, 5) < 1


def test_states_belong_to_phases_both_ways():
    for kind in KINDS:
        for state in STATES[kind]:
            phase, is_scoring = phase_of(kind, state), state == "scoring"
            assert state_of(kind, phase, is_scoring=is_scoring) == state or kind in BELOW_VERIFIERS
    assert state_of("trainer", "generating", is_writing=True) == "mid-checkpoint"
    assert state_of("controller", "") == state_of("controller", "starting") == "starting"
    assert {state_of("generator", phase) for phase in PHASES} == set(STATES["generator"])


# injecting


@pytest.fixture
def process():
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=os.environ | {"TITAN": "1"})
    yield sleeping
    sleeping.kill()
    sleeping.wait()


@pytest.mark.parametrize(("way", "after"), [("kill", GONE), ("stop", "T")])
def test_a_signal_is_witnessed(process, tmp_path, way, after):
    witness = inject(Target("verifier 0", process.pid), way, tmp_path, lambda: None)
    assert witness.after == after == process_state(process.pid) and injected_by(witness, way).is_witnessed
    again = inject(Target("verifier 0", process.pid), "kill", tmp_path, lambda: None)
    assert not injected_by(again, "kill").is_witnessed, "it was hit before, so this proves nothing"


def test_an_order_is_witnessed_by_the_process_that_obeys(tmp_path):
    obeying = (
        "import os, pathlib, time\n"
        f"order = pathlib.Path({str(tmp_path)!r}) / str(os.getpid())\n"
        "while not order.exists(): time.sleep(0.01)\n"
        "order.rename(order.with_suffix('.obeyed'))\n"
        "time.sleep(30)\n"
    )
    with subprocess.Popen([sys.executable, "-c", obeying]) as process:
        witness = inject(Target("verifier 0", process.pid), "raise", tmp_path, lambda: None)
        process.kill()
    assert witness.after == "obeyed" and injected_by(witness, "raise").is_witnessed
    assert not injected_by(Witness("S", GONE, 0.0, 0.0), "raise").is_witnessed, "it died, but did not raise"


def test_processes_of_a_run_are_found_by_their_marks(tmp_path):
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    member = subprocess.Popen(sleep, env={"TITAN_RL_CHAOS": str(tmp_path), "TITAN_RL_MESH": "a"})
    scorer = subprocess.Popen(sleep, env={"TITAN_RL_MESH": "a"})
    stranger = subprocess.Popen(sleep, env={"TITAN_RL_MESH": "b"})
    members = Members(tmp_path)
    try:
        deadline = time.monotonic() + 60  # until all have their own environment
        while sorted(members.pids()) != sorted([member.pid, scorer.pid]) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert sorted(members.pids()) == sorted([member.pid, scorer.pid])
        member.kill()
        member.wait()
        assert members.pids() == [scorer.pid], "its mark is known"
        members.kill()
        assert scorer.wait(60) == -signal.SIGKILL and members.pids() == [] and stranger.poll() is None
    finally:
        for process in (member, scorer, stranger):
            process.kill()
            process.wait()


# outcomes


def injected_by(witness: Witness, way: str) -> Injection:
    return Injection(Fault(1, "verifier", "idle", way), Target("verifier 0", 1), way, witness, "idle", 1)


def injected(kind: str, name: str, pid: int, moment: float, way: str = "kill", **fields) -> Injection:
    witness = Witness("S", "T" if way == "stop" else GONE, moment, moment)
    return Injection(Fault(1, kind, "idle", way), Target(name, pid), way, witness, "idle", 1, **fields)


EVENTS = [
    {"time": 10.1, "kind": "died", "name": "generator 1", "pid": 1, "why": "died"},
    {"time": 10.2, "kind": "died", "name": "generator 0", "pid": 2, "why": "hung"},
    {"time": 10.3, "kind": "died", "name": "trainer rank 1", "pid": 3, "why": "died"},
    {"time": 11.0, "kind": "generator_serves", "number": 0},
    {"time": 12.0, "kind": "trainer_repaired", "who": "trainer rank 10", "step": 4, "steps_redone": 7, "seconds": 1.0},
    {"time": 12.5, "kind": "trainer_repaired", "who": "trainer rank 0, trainer rank 1", "step": 4, "steps_redone": 2},
    {"time": 13.0, "kind": "generator_serves", "number": 1},
    {"time": 14.0, "kind": "died", "name": "verifier 0", "pid": 4, "why": "died"},
    {"time": 20.0, "kind": "resumed", "checkpoint_step": 3, "step": 6, "redone": 3, "seconds": 1.0},
    {"time": 21.0, "kind": "verifier_serves", "number": 0},
]


def test_faults_that_overlap_are_told_apart_by_name():
    first = outcome_of(injected("generator", "generator 1", 1, 10.0), EVENTS)
    second = outcome_of(injected("generator", "generator 0", 2, 10.0), EVENTS)
    assert first == Outcome(pytest.approx(0.1), 3.0, None, "died", "itself")
    assert (second.noticed_after, second.repaired_after, second.why) == (pytest.approx(0.2), 1.0, "hung")
    trainer = outcome_of(injected("trainer", "trainer rank 1", 3, 10.0), EVENTS)
    assert (trainer.repaired_after, trainer.steps_redone, trainer.repaired_by) == (2.5, 2, "itself"), (
        "rank 10 is another"
    )


def test_what_was_not_repaired_when_the_controller_died_is_repaired_by_the_resume():
    outcome = outcome_of(injected("verifier", "verifier 0", 4, 13.5), EVENTS)
    assert (outcome.noticed_after, outcome.repaired_after, outcome.repaired_by) == (0.5, 6.5, "resume")
    controller = outcome_of(injected("controller", "controller", 5, 15.0, orphans_gone_after=1.5), EVENTS)
    assert controller == Outcome(1.5, 5.0, 3, "killed", "resume")


def test_a_host_is_repaired_when_all_that_was_lost_with_it_is():
    events = [
        {"time": 1.1, "kind": "died", "name": "host 0", "pid": 9, "why": "died"},
        {"time": 1.2, "kind": "died", "name": "trainer rank 0", "pid": 8, "why": "lost host 0"},
        {"time": 1.3, "kind": "died", "name": "standby verifier", "pid": 7, "why": "lost host 0"},
        {"time": 1.3, "kind": "died", "name": "generator 1", "pid": 6, "why": "lost host 0"},
        {"time": 1.4, "kind": "started", "name": "host 0", "pid": 10},
        {"time": 3.0, "kind": "trainer_repaired", "who": "trainer rank 0", "step": 1, "steps_redone": 1},
    ]
    host = injected("host", "host 0", 9, 1.0)
    assert outcome_of(host, events) == Outcome(pytest.approx(0.1), None, None, "died", "")
    served = {"time": 9.0, "kind": "generator_serves", "number": 1}
    end = [
        {"time": 11.0, "kind": "died", "name": "host 0", "pid": 10, "why": "died"},
        {"time": 11.1, "kind": "died", "name": "generator 1", "pid": 11, "why": "lost host 0"},
    ]
    assert outcome_of(host, [*events, served, *end]) == Outcome(pytest.approx(0.1), 8.0, 1, "died", "itself")


def test_the_end_of_an_earlier_replacement_is_not_this_ones():
    """Rank 0 dies, and so does its replacement, just before the first repair is reported."""
    events = [
        {"time": 1.1, "kind": "trainer_repaired", "who": "trainer rank 0", "step": 1, "steps_redone": 0},
        {"time": 1.2, "kind": "died", "name": "trainer rank 0", "pid": 8, "why": "died"},
        {"time": 3.0, "kind": "trainer_repaired", "who": "trainer rank 0", "step": 1, "steps_redone": 1},
    ]
    assert outcome_of(injected("trainer", "trainer rank 0", 8, 1.0), events).repaired_after == 2.0


def test_what_is_not_known_stays_so():
    assert outcome_of(injected("generator", "generator 1", 9, 19.0), EVENTS[:8]) == Outcome()
    assert outcome_of(injected("scorer", "scorer 0", 9, 19.0, seen_repaired=19.5), EVENTS).repaired_after == 0.5
    order = Injection(
        Fault(1, "generator", "idle", "exit"), Target("generator 1", 1), "exit", Witness("S", GONE, 10.0, 10.2), "", 1
    )
    assert outcome_of(order, EVENTS).noticed_after == 0.0, "it was seen to be gone after the run knew"


def test_a_process_that_is_being_replaced_is_known():
    assert not is_repaired("generator", "generator 1", EVENTS[:4]) and is_repaired(
        "generator", "generator 0", EVENTS[:4]
    )
    assert is_repaired("generator", "generator 1", EVENTS) and is_repaired("verifier", "verifier 1", EVENTS[:8])
    assert not is_repaired("verifier", "verifier 0", EVENTS[:8]) and is_repaired("verifier", "verifier 0", EVENTS)
    spare = [{"time": 1.0, "kind": "died", "name": "generator spare"}, {"time": 2.0, "kind": "spare_waits", "pid": 7}]
    assert not is_repaired("generator", "generator spare", spare[:1])
    assert is_repaired("generator", "generator spare", spare)


# audit and comparisons


def test_ledger_and_records_are_compared():
    ledger = [("a", 0, "trained", 1, None), ("a", 1, "discarded", 1, "timeout")]
    ledger += [("b", 0, "trained", 2, None), ("b", 1, "trained", 2, None)]
    recorded = {1: {("a", 0), ("a", 1)}, 2: {("b", 0), ("b", 1)}}
    assert not any(compare_records(ledger, recorded, 2).values())
    assert compare_records(ledger, recorded, 3)["steps_without_record"] == 1
    twice = compare_records(ledger, recorded | {3: {("a", 0)}}, 3)
    assert twice["trained_twice"] == 1 and twice["recorded_at_another_step"] == 1
    assert compare_records(ledger, {1: recorded[1], 2: {("b", 0)}}, 2)["trained_but_not_recorded"] == 1


def test_runs_are_compared_by_prompts_and_bits():
    assert compare_prompts({"a": 1, "b": 2}, {"a": 1, "b": 2})["same_prompts"]
    found = compare_prompts({"a": 1, "b": 2}, {"a": 2, "c": 2})
    assert found == {"same_prompts": False, "prompts_that_differ": 2, "prompts_at_another_step": 1}
    found = compare_steps({1: 0.1, 2: 0.2, 3: 0.3}, {1: 0.1, 2: 0.2000001}, "losses")
    assert found == {"losses_equal": 1, "losses_compared": 3, "first_losses_that_differ": 2}


def test_an_accuracy_is_compared_with_other_seeds():
    """mean 0.5, s = 0.1, t = 4.303: 0.5 ± 4.303 x 0.1 x sqrt(4 / 3)."""
    found = among_seeds(0.9, [0.4, 0.5, 0.6])
    assert found["interval"] == [pytest.approx(0.5 - 0.49687, abs=1e-4), pytest.approx(0.99687, abs=1e-4)]
    assert found["inside"] and not found["inside_range"]
    assert not among_seeds(0.5, [0.4, None, 0.6])["inside"], "a seed failed"


# the verdict

SAMPLES = dict.fromkeys(
    (
        "discarded",
        "pending",
        "ledger_flaws",
        "prompts_lost",
        "steps_without_record",
        "trained_twice",
        "trained_but_not_recorded",
        "recorded_at_another_step",
    ),
    0,
) | {"issued": 8, "trained": 8}
GOOD = {
    "timed_out": False,
    "exit_code": 0,
    "why_ended": "completed",
    "steps_done": 9,
    "steps_asked": 9,
    "faults_asked": 2,
    "faults_witnessed": 2,
    "processes_left": [],
    "orphans_left": 0,
    "samples": SAMPLES,
    "samples_may_be_pending": False,
    "redone": 3,
    "redone_differently": 0,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"timed_out": True},
        {"exit_code": 1},
        {"exit_code": None},
        {"steps_done": 8},
        {"steps_done": None},
        {"faults_witnessed": 1},
        {"processes_left": [5]},
        {"orphans_left": 1},
        {"redone_differently": 1},
        {"samples": SAMPLES | {"trained": 7}},
        {"samples": SAMPLES | {"trained": 7, "pending": 1}},
        *({"samples": SAMPLES | {name: 1}} for name in SAMPLES if name not in ("issued", "trained", "discarded")),
    ],
)
def test_one_flaw_is_enough(wrong):
    assert reports.flaws(GOOD) == [] and reports.flaws(GOOD | wrong)


def test_a_report_counts_what_was_really_injected():
    hit = injected("generator", "generator 1", 1, 10.0)
    missed = injected("trainer", "trainer rank 0", 1, 10.0)
    missed.witness = Witness("S", "S", 10.0, 10.0)
    rows = [reports.row(hit, outcome_of(hit, EVENTS)), reports.row(missed, Outcome())]
    found = reports.tables(rows)
    assert found["by_state"]["generator"]["idle"] == 1 and not any(found["by_state"]["trainer"].values())
    assert found["by_kind"]["generator"]["repaired_after_median"] == 3.0 and found["by_way"]["generator"]["kill"] == 1
    assert "generator 1" in reports.line(rows[0]) and "NOT WITNESSED" in reports.line(rows[1])
    json.dumps(rows)


def test_redone_losses_are_counted():
    events = [{"kind": "redone", "same": True}, {"kind": "redone", "same": False}, {"kind": "died"}]
    assert reports.redone_losses(events) == {"redone": 2, "redone_differently": 1}


# the command


def test_overrides_reach_the_run():
    overrides = {"task": {"name": "gcd", "options": {"max_value": 60}}, "optimizer": {"lr": 1e-5, "betas": [0.9, 0.99]}}
    overrides |= {"compile": {"enable": False}}
    assert parse_overrides(override_arguments(overrides)) == overrides


def test_events_are_read_as_they_come(tmp_path):
    process = RunProcess(tmp_path, None, {}, 0.0)
    assert process.events() == []
    with open(tmp_path / "events.jsonl", "w", buffering=1) as file:
        file.write('{"kind": "died"}\n{"kind": "st')
        file.flush()
        assert [event["kind"] for event in process.events()] == ["died"], "the second is only half written"
        file.write('arted"}\n')
        assert [event["kind"] for event in process.events()] == ["died", "started"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--kills", "0"], "--kills"),
        (["--targets", "trainer,sorcerer"], "'sorcerer'"),
        (["--targets", ""], "--targets"),
        (["--targets", "trainer,trainer"], "once"),
        (["--training.steps", "3"], "--training.steps"),
        (["--checkpoint.every", "1200"], "checkpoint.every"),
        (["--fault-free-seeds", "1"], "--fault-free-seeds"),
        (["--fault-free-seeds", "11"], "--fault-free-seeds"),
        (["--timeout", "0"], "--timeout"),
        (["--recovery.snapshot_every", "0"], "snapshot_every"),
        (["--run.dir", "FULL"], "not empty"),
        (["--undisturbed", "--run.dir", "BESIDE"], "not empty"),
        (["--training.stepps", "30"], "stepps"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_started(arguments, word, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "titan_rl.diagnostics.chaos.run_process.subprocess.Popen", lambda *a, **k: pytest.fail("it was started")
    )
    for name in ("full", "run-undisturbed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    places = {"FULL": str(tmp_path / "full"), "BESIDE": str(tmp_path / "run")}
    assert main(["chaos", str(CONFIG), *(places.get(argument, argument) for argument in arguments)]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("titan-rl: ") and word in said and "\n" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whatever_ends_the_command_ends_its_run_first(number):
    """Each is an error, so that what ends the run's processes is reached; ``nohup`` keeps a closed terminal ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), _on_signals(_as_ctrl_c()):
            signal.raise_signal(number)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with _on_signals(_as_ctrl_c()):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


# the real thing


def chaos_command(root, *flags: str, **settings) -> list[str]:
    file = root.parent / "tiny.toml"
    file.write_text("[checkpoint]\nevery = 3\n")
    flags = ["--run.dir", str(root), *flags, *running.overrides(**settings)]
    return [sys.executable, "-m", "titan_rl.cli", "chaos", str(file), *flags]


@pytest.mark.slow
@pytest.mark.confirms
@pytest.mark.timeout(600)
def test_a_run_with_faults_completes(tmp_path):
    """A trainer, a verifier and the controller, which is resumed; nothing is lost, no process is left."""
    root, steps = tmp_path / "run", 24
    flags = ("--kills", "3", "--seed", "2", "--targets", "trainer,verifier,controller", "--timeout", "500", "--json")
    command = chaos_command(root, *flags, training__steps=steps)
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + running.output(root)[-3000:]
    report = json.loads(done.stdout)
    assert report["ok"] and report["steps_done"] == steps and report["faults_witnessed"] == 3
    assert report["controller_starts"] == 2 and report["processes_left"] == []
    assert {fault["kind"] for fault in report["faults"]} == {"trainer", "verifier", "controller"}
    [controller] = [fault for fault in report["faults"] if fault["kind"] == "controller"]
    assert controller["noticed_after"] is not None and controller["repaired_after"] > controller["noticed_after"]
    assert done.stderr.count("fault ") == 3, "a line for each"


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(tmp_path):
    root = tmp_path / "run"
    command = chaos_command(root, "--kills", "1", training__steps=5000)
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        running.wait_for_step(root, 1)
        pids = running.descendants(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, process.stderr.read().decode()[-2000:]
    assert len(pids) > 3 and running.gone(pids)
