"""A box has the descriptors that are meant for it, however many there are where it is started."""

import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from boxes import need_boxes

from titan_rl.environments.sandbox.program import Limits, Program, SandboxFailed
from titan_rl.environments.sandbox.slot import Slot

COUNT = 1000
LIST = """
import os, subprocess, sys, time
LIST = '''
import os
def find(number):
    try: return bool(os.fstat(number))
    except OSError: return False
print([number for number in range(5000) if find(number)], flush=True)
'''
exec(LIST)
subprocess.run([sys.executable, "-S", "-c", LIST], close_fds=False)
"""


@pytest.fixture
def held():
    """So many descriptors that whatever is opened now has a high number, and would cross an exec."""
    need_boxes()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = COUNT + 3000
    if hard != resource.RLIM_INFINITY and hard < most:
        pytest.skip(f"no process may have {most} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    numbers = [number for _ in range(COUNT // 2) for number in os.pipe()]
    for number in numbers:
        os.set_inheritable(number, True)
    yield numbers
    for number in numbers:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def slot(held):
    one = Slot()
    assert one.start().control.fileno() > COUNT
    yield one
    one.close()


def test_a_program_has_its_own_and_what_it_starts_three(slot):
    mine, started = slot.run(Program(LIST, limits=Limits(seconds=20.0))).stdout.splitlines()
    assert mine.startswith("[0, 1, 2, ") and mine.count(",") == 3, mine
    assert started == "[0, 1, 2]"


def test_each_process_of_a_box_has_what_it_was_given_alone(slot):
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(slot.run, Program("import time\ntime.sleep(1e6)", limits=Limits(seconds=60.0)))
        while len(line := lineage(slot._process.pid)) < 4:
            assert not running.done()
            time.sleep(0.02)
        while len(descriptors(line[3])) > 4:  # it closes what is not its own
            time.sleep(0.02)
        *walls, zygote, program = map(descriptors, line)
        slot._process.kill()
        with pytest.raises(SandboxFailed):
            running.result()
    for each in walls:
        assert not [target for number, target in each.items() if number > 2 and target.startswith(("socket", "pipe"))]
    assert kinds(zygote) == ["anon_inode", "socket"], zygote  # the program's end, and the host
    assert kinds(program) == ["socket"], program
    assert not set(zygote.values()) & {target for number, target in program.items() if number > 0}


def lineage(pid: int) -> list[int]:
    """A process, its child, and so on."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(lineage(int(children[0])) if children else [])]


def descriptors(pid: int) -> dict[int, str]:
    return {int(each.name): os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}


def kinds(found: dict[int, str]) -> list[str]:
    """Of those beyond the three of each process."""
    return sorted(target.partition(":")[0] for number, target in found.items() if number > 2)
