"""The sandbox's wires: what a program, a box or a server says of a program is an outcome or SandboxFailed."""

import array
import json
import os
import socket
import threading

import pytest
from fuzzing import ANY_TEXT, VALUES, as_json, fuzz, mutated, spoilt
from hypothesis import strategies as st

from titan_rl.environments.sandbox.inside import main_module
from titan_rl.environments.sandbox.program import Call, Limits, Outcome, Program, SandboxFailed
from titan_rl.environments.sandbox.program_report import BEGUN, ExitReport, outcome_of
from titan_rl.environments.sandbox.remote import _outcome
from titan_rl.environments.sandbox.slot import _Run
from titan_rl.environments.sandbox.values import decode, encode, same

LIMITS = Limits(seconds=2.0, output=300)
PROGRAMS = [Program("", calls=(Call("f", (1,)), Call("g")), limits=LIMITS), Program("", limits=LIMITS)]
GAVE = [["value", {"list": [{"int": "3"}, {"float": "2.5"}, {"dict": [["a", {"tuple": []}]]}]}], ["error", "no"]]
SAID = st.just(GAVE).flatmap(spoilt).map(as_json).map(str.encode).map(BEGUN.__add__)
SAID |= st.binary(max_size=40) | SAID.flatmap(mutated)
BYTES = st.binary(max_size=60) | st.just(b"x" * 400)


def is_sound(outcome: Outcome, program: Program) -> None:
    assert outcome.ending in ("ok", "error", "timeout", "memory", "output")
    for text in (outcome.stdout, outcome.stderr):
        assert len(text) <= program.limits.output and text.encode() is not None
    assert type(outcome.exit_code) is int and type(outcome.memory) is int and type(outcome.seconds) is float
    if outcome.results is not None:
        assert outcome.ending == "ok" and len(outcome.results) == len(program.calls)
        for given in outcome.results:
            same(given.value, given.value)
            json.dumps([encode(given.value), given.error])


@fuzz(said=SAID, stdout=BYTES, stderr=BYTES, code=st.integers(-64, 255), program=st.sampled_from(PROGRAMS))
def test_what_a_program_says_is_an_outcome(said, stdout, stderr, code, program):
    try:
        outcome = outcome_of(program, ExitReport(None, code, 0.1, 1), said, stdout, stderr)
    except SandboxFailed:
        assert not said.startswith(BEGUN)
        return
    is_sound(outcome, program)


REPORT = {"exit": 0, "why": "", "seconds": 0.1, "memory": 4096}
REPORTS = st.just(REPORT).flatmap(spoilt).map(as_json).map(str.encode) | st.binary(max_size=30)


def box(control: socket.socket, report: bytes, said: bytes, stdout: bytes, stderr: bytes) -> None:
    """One that takes a program, and says this of it."""
    numbers = array.array("i")
    _, ancillary, _, _ = control.recvmsg(4096, socket.CMSG_SPACE(3 * numbers.itemsize))
    if not ancillary:
        return  # no program was sent
    numbers.frombytes(ancillary[0][2])
    task = socket.socket(fileno=numbers[0])
    task.sendall(said)
    for number, text in zip(numbers[1:], (stdout, stderr), strict=True):
        os.write(number, text)
        os.close(number)
    control.send(report[:4096])
    task.close()


@fuzz(
    examples=[dict(report=b"[]", said=BEGUN, stdout=b"", stderr=b"", program=PROGRAMS[1])],
    report=REPORTS,
    said=SAID,
    stdout=BYTES,
    stderr=BYTES,
    program=st.sampled_from(PROGRAMS),
)
def test_whatever_a_box_reports_is_an_outcome_or_its_failure(report, said, stdout, stderr, program):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        thread = threading.Thread(target=box, args=(theirs, report, said, stdout, stderr))
        thread.start()
        try:
            outcome = _Run(ours, program, None).outcome()
        except (SandboxFailed, OSError):
            return
        finally:
            ours.close()
            thread.join()
    is_sound(outcome, program)


RECEIVED = ["YmVndW4K", "", "eA=="]
TOLD = {"nonce": "n", "why": "", "exit": 0, "seconds": 0.5, "memory": 1, "received": RECEIVED}


@fuzz(
    report=st.just(TOLD).flatmap(spoilt).map(as_json) | ANY_TEXT,
    around=st.just({"status": "Success", "run_result": {"stdout": "@", "return_code": 0}}).flatmap(spoilt),
    program=st.sampled_from(PROGRAMS),
)
def test_whatever_a_server_answers_is_an_outcome_or_its_failure(report, around, program):
    text = as_json(around).replace('"@"', json.dumps(report))
    try:
        outcome = _outcome(program, "n", text)
    except SandboxFailed as error:
        assert str(error).isprintable() and len(str(error)) < 1000
        return
    is_sound(outcome, program)


HASHABLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
KEYS = st.recursive(
    HASHABLE, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3), max_leaves=4
)
PLAIN = st.recursive(
    KEYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=10,
)


def has_nan(value) -> bool:
    return '"float": "nan"' in json.dumps(encode(value))


@fuzz(
    examples=[dict(value={float("nan"): 1}), dict(value={frozenset({8, 0})}), dict(value={(frozenset({0, 8}),): 1})],
    value=PLAIN,
)
def test_a_value_is_the_same_on_either_side(value):
    travelled = decode(json.loads(json.dumps(encode(value))))
    given = main_module._decoded(json.loads(json.dumps(encode(value))))
    returned = decode(json.loads(json.dumps(main_module._encoded(value))))
    for other in (travelled, given, returned):
        assert same(value, other) is same(other, value) is not has_nan(value)


@fuzz(value=VALUES, other=PLAIN)
def test_whatever_is_said_of_a_value_is_one_or_none(value, other):
    try:
        decoded = decode(json.loads(as_json(value)))
    except (ValueError, RecursionError):
        return
    assert type(same(decoded, other)) is bool


def test_values_that_are_alike_and_ordered_otherwise_are_the_same():
    one, other = frozenset({8, 0}), frozenset({0, 8})
    assert list(one) != list(other), "the order in which they were made shows"
    assert same({one}, {other}) and same({one: 1}, {other: 1}) and not same({one}, {frozenset({8, 0.0})})


def test_a_key_that_is_no_number_is_equal_to_none():
    assert not same({float("nan"): 1}, {float("nan"): 1})


@pytest.mark.parametrize("report", [b"[]", b"3", b"null", b'{"why": []}', b"{}"])
def test_a_report_that_is_none_is_the_boxes_failure(report):
    run = _Run.__new__(_Run)
    run.program, run.why, run.group, run.received = PROGRAMS[1], None, None, {0: BEGUN, 1: b"", 2: b""}
    with pytest.raises(SandboxFailed, match="no report"):
        run._outcome(json.loads(report))
