"""What a process keeps although nothing is in it is given back when it has grown too much, and not before."""

import subprocess
import sys

import pytest

from titan_rl.trainer.memory import cpu_allocator
from titan_rl.trainer.memory.cpu_allocator import CpuAllocator

MIB = 2**20


@pytest.fixture
def held(monkeypatch):
    """What the process is said to hold; what is given back goes."""
    state = {"bytes": 0, "times": 0}

    def give_back() -> None:
        state["times"] += 1
        state["bytes"] = 500 * MIB

    monkeypatch.setattr(cpu_allocator, "_private_bytes", lambda: state["bytes"])
    monkeypatch.setattr(cpu_allocator, "give_back", give_back)
    return state


def test_growth_is_bounded_and_seldom_paid_for(held):
    one, largest = CpuAllocator(), 0
    for _ in range(100):
        held["bytes"] = max(held["bytes"], 2000 * MIB) + 100 * MIB  # what a step needs, and what it scatters
        largest = max(largest, held["bytes"])
        one.end_step()
    assert largest <= (2100 + 1024 + 100) * MIB
    assert held["times"] == 100 // 12


def test_what_does_not_grow_is_kept(held):
    one = CpuAllocator()
    for size in (3000, 3500, 2500, 4000, 2900):
        held["bytes"] = size * MIB
        one.end_step()
    assert not held["times"]


FREED = """
from titan_rl.trainer.memory import cpu_allocator

blocks = [bytearray(100_000) for _ in range(2000)]
pins = [bytearray(100) for _ in range(2000)]
before = cpu_allocator._private_bytes()
del blocks
cpu_allocator.give_back()
print(before - cpu_allocator._private_bytes())
"""


def test_what_is_freed_can_be_given_back():
    """In a process of its own: one that has run other tests has room between their remains."""
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 150 * MIB


MAPPED = """
import ctypes
from titan_rl.trainer.memory.cpu_allocator import large_blocks_mapped

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p


def is_mapped(size):
    address = libc.malloc(ctypes.c_size_t(size))
    with open("/proc/self/maps") as maps:
        places = [line.split() for line in maps]
    [name] = [place[5:] for place in places if _holds(place[0], address)]
    libc.free(ctypes.c_void_p(address))
    return name != ["[heap]"]


def _holds(place, address):
    start, stop = (int(number, 16) for number in place.split("-"))
    return start <= address < stop


with large_blocks_mapped():
    print(is_mapped(2**25), is_mapped(2**15))
print(is_mapped(2**25), is_mapped(2**15))
"""


def test_large_blocks_are_outside_of_the_heap_while_a_model_is_built():
    done = subprocess.run([sys.executable, "-c", MAPPED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False", "False"]
