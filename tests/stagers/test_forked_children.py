"""A forked child, such as a worker of a DataLoader, costs the copies of its parent nothing and breaks none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.forks import run_forked

ROOT = Path(__file__).parents[2]
STAGERS = (pytest.param("pinned_cached", marks=pytest.mark.slow), "overlapped", "blocking")

# Programs of their own, which fork before torch has run any thread.
BEGIN = """
import gc, os, sys
import torch
import stagereg
from concurrent.futures import Future
from tests.support.forked import forked

def settled(copy):
    return copy.result(10) if isinstance(copy, Future) else copy

def state(value):
    return {"w": torch.full((2**21,), float(value)), "n": {"b": torch.full((3,), value)}}

def expect(copy, value):
    assert all(bool((x == value).all()) for x in (copy["w"], copy["n"]["b"])), copy

kind = sys.argv[1]
stager = stagereg.build("stager", kind)
"""

STAGES = """
kept, held = (settled(stager.stage(state(1))) for _ in range(2))
del kept  # its block waits for the next copy

def child():
    expect(held, 1)
    for promised in (False, True):
        if promised:
            stager.expect_release()
        copies = [settled(stager.stage(state(value))) for value in (2, 3)]
        for copy, value in zip(copies, (2, 3)):
            expect(copy, value)
        del copy, copies
    expect(held, 1)
    stager.close()

assert forked(child) == 0
expect(held, 1)
expect(settled(stager.stage(state(1))), 1)
stager.close()
"""

DROPS = """
stager.expect_release()
held = settled(stager.stage(state(1)))
kept = settled(stager.stage(state(1)))
del kept

def child():
    global held, stager
    new = [bytearray(2**24) for _ in range(4)]  # memory where the parent has its blocks, if that were free
    stager.release(held)
    del held
    expect(settled(stager.stage(state(1))), 1)
    stager.close()
    del stager
    gc.collect()
    assert not any(map(any, new))

assert forked(child) == 0
expect(held, 1)
expect(settled(stager.stage(state(1))), 1)
"""

UNDER_WAY = """
import threading
from stagereg.stagers.deferred_copy import DeferredCopy

source = state(1)
stager.expect_release()
stager._guard.owned = lambda is_known: {(-1, 0): 2**62}  # as if an optimizer wrote all: it is copied in the background
begun, run, go = threading.Event(), DeferredCopy.run, threading.Event()
def late(copy):
    begun.set()
    go.wait(10)
    return run(copy)
DeferredCopy.run = late
future = stager.stage(source)
assert begun.wait(10)

def child():
    model = torch.nn.Linear(2, 2)
    model.load_state_dict(model.state_dict())  # before which the copies of this process are completed
    try:
        future.result(10)
    except stagereg.errors.StagingError as error:
        assert "was not complete when this process was forked" in str(error), error
    else:
        raise AssertionError("a copy that nobody has made")
    DeferredCopy.run = run
    expect(settled(stager.stage(state(2))), 2)
    stager.close()

assert forked(child) == 0
go.set()
expect(future.result(10), 1)
"""

FAULTS = """
import resource

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def flags(address):
    at, found = 0, ""
    for line in open("/proc/self/smaps"):
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(x, 16) for x in first.split("-"))
            at = begin <= address < end
        elif first == "VmFlags:" and at:
            found = rest
    return found

source = state(1)
for _ in range(3):
    copy = settled(stager.stage(source))
    address = copy["w"].data_ptr()
    assert "dc" in flags(address), flags(address)
    del copy
    if hasattr(stager, "_thread"):  # it refers to the memory until it is idle
        stager._thread.submit(int).result(60)
away, here = os.pipe()
if not (worker := os.fork()):
    os.close(here)
    os.read(away, 1)
    os._exit(0)
before = faults()
copy = settled(stager.stage(source))
print(faults() - before)
assert copy["w"].data_ptr() == address and "dc" in flags(address)
os.close(here)
os.waitpid(worker, 0)
"""


def run(program: str, kind: str) -> str:
    environment = {"PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": str(2**20), "GLOO_SOCKET_IFNAME": "lo"}
    done = run_forked(BEGIN + program, kind, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", STAGERS)
def test_a_child_reads_copies_that_are_held_and_stages_into_memory_of_its_own(kind: str) -> None:
    run(STAGES, kind)


@pytest.mark.parametrize("kind", STAGERS)
def test_a_child_drops_what_it_has_of_its_parent_and_unmaps_nothing_else(kind: str) -> None:
    run(DROPS, kind)


def test_a_child_waits_for_no_copy_that_only_a_thread_of_its_parent_makes() -> None:
    run(UNDER_WAY, "overlapped")


@pytest.mark.parametrize("kind", [STAGERS[0], "overlapped"])
def test_the_first_copy_after_a_fork_finds_its_memory_as_it_was(kind: str) -> None:
    pages = 2**21 * 4 // 4096  # a copy that the child had inherited would cost a fault for each of them
    assert int(run(FAULTS, kind)) < pages / 2, "the interpreter's own objects cost a few hundred"
