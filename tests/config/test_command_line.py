"""How a command ends: whatever tells it to, it lets go of its temporary folders."""

import signal
import subprocess
import sys

import pytest

from titan_rl.config.command_line import EXIT_FAULT, EXIT_STOPPED, answer
from titan_rl.config.errors import NamedFault

COMMAND = """
import asyncio, signal, sys, tempfile, time
from titan_rl.config.command_line import answer

async def wait():
    print("waits", flush=True)
    await asyncio.sleep(60)

def command(arguments):
    with tempfile.TemporaryDirectory():
        if "runs" in arguments:
            asyncio.run(wait())
        print("waits", flush=True)
        for _ in range(600):
            time.sleep(0.1)  # a signal right before the system call does not end it

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which a suite below nohup has ignored
signal.signal(signal.SIGINT, signal.SIG_IGN if "background" in sys.argv else signal.default_int_handler)
sys.exit(answer(command, sys.argv[1:]))
"""


INTERRUPTED = [(signal.SIGINT, "plainly"), (signal.SIGINT, "runs")]
"""In the background it is ignored."""
TOLD = [
    (number, how)
    for number in (signal.SIGTERM, signal.SIGHUP)
    for how in ("plainly", "runs", "background", "runs background")
]


@pytest.mark.parametrize(("number", "how"), INTERRUPTED + TOLD)
def test_a_command_that_is_told_to_end_leaves_no_folder(tmp_path, number, how):
    command = [sys.executable, "-c", COMMAND, *how.split()]
    piped = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env={"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}, **piped) as process:
        assert process.stdout.readline() == "waits\n" and list(tmp_path.iterdir())
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err, list(tmp_path.iterdir())) == (EXIT_STOPPED, "titan-rl: stopped\n", [])


def test_signals_are_as_they_were_when_a_command_is_over():
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    during = []
    assert answer(lambda arguments: during.extend(map(signal.getsignal, numbers)) or 0, []) == 0
    assert [signal.getsignal(number) for number in numbers] == before
    assert during != before


def test_a_fault_that_names_its_cause_is_one_line_and_another_has_its_traceback(capsys):
    def fail(arguments: list[str]) -> int:
        raise NamedFault("my:reward: KeyError: 'x'\n(my.py, line 2)") if arguments else RuntimeError("ours")

    assert answer(fail, ["named"]) == EXIT_FAULT
    assert capsys.readouterr().err == "titan-rl: my:reward: KeyError: 'x' (my.py, line 2)\n"
    with pytest.raises(RuntimeError, match="ours"):
        answer(fail, [])
