"""What a process prints is written line by line, so that a process that is killed loses none of it."""

import os
import subprocess
import sys

import pytest

KILLED_ACTOR = """
import os, signal, sys
from titan_rl.mesh.processes.logs import send_output_to
send_output_to(sys.argv[1], "verifier")
print("SEEN")
os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED_FORK = """
import os, signal
from titan_rl.mesh.processes import parallel_map
parallel_map._ALONE_SECONDS = parallel_map._WORTH_SECONDS = 0.0
here = os.getpid()

def check(item):
    if os.getpid() != here:
        print("SEEN")
        os.kill(os.getpid(), signal.SIGKILL)

try:
    list(parallel_map.parallel_map(check, range(1000), "counting"))
except ChildProcessError:
    os._exit(0)
"""


@pytest.mark.parametrize(("program", "log"), [(KILLED_ACTOR, "verifier.txt"), (KILLED_FORK, "stdout")])
def test_a_killed_process_loses_no_printed_line(tmp_path, program, log):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    with open(tmp_path / "stdout", "w") as stdout:
        subprocess.run(command, stdout=stdout, env=environment, timeout=60)
    assert "SEEN\n" in (tmp_path / log).read_text()
