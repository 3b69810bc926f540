"""Host memory: no more than the copies in flight need, and the same after two hundred saves as after twenty.

Each program runs in a process that has imported torch and done nothing else.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import pytest

from ..support.fork_server import ForkServer
from .states import OPTIONS

pytestmark = pytest.mark.timeout(300)

STAGERS = {
    kind: {**options, **({"frozen": ["frozen.*"]} if kind == "incremental" else {})}
    for kind, options in OPTIONS.items()
}

COMMON = """
import gc, os, threading
from concurrent.futures import Future
import torch, stagereg

MIB = 2**20

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

def settled(staged):
    return staged.result(timeout=60) if isinstance(staged, Future) else staged

def build():
    return stagereg.build("stager", {name!r}, **{options})

"""

PEAK = """
parts = [torch.ones(8 * MIB // 4) for _ in range(24)] + [torch.ones(1000) for _ in range(300)]
state = {"frozen": dict(enumerate(parts[:12])), "free": dict(enumerate(parts[12:]))}
nbytes = sum(x.nbytes for x in parts)
first = build()  # whose threads leave their stacks to those to come
for _ in range(2):
    settled(first.stage({"frozen": {"x": torch.ones(5)}, "warm": [torch.ones(3 * MIB) for _ in range(2)]}))
first.close()
del first
gc.collect()
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
before = status("VmRSS")
stager, held = build(), []
for step in range(7):
    for x in parts[12:]:
        x.fill_(step)
    if len(held) == 2:
        held.pop(0)
    held.append(settled(stager.stage(state)))
peak = status("VmHWM") - before
assert all(x.eq(6).all() for x in held[1]["free"].values())
assert all(x.eq(5).all() for x in held[0]["free"].values())
print(nbytes, sum(x.nbytes for x in parts[:12]), peak)
held.clear()
stager.close()
"""

GROWTH = """
parts = [torch.ones(30_000) for _ in range(30)]
state = {"frozen": {"w": torch.ones(100_000)}, "free": dict(enumerate(parts))}

def now():
    gc.collect()
    return status("VmRSS"), len(os.listdir("/proc/self/fd")), len(threading.enumerate())

stager, held = build(), []
for step in range(200):
    parts[step % 30].add_(1)
    if step % 7 == 0:
        state["free"]["ragged"] = torch.ones(1 + step % 5 * 1000)
    held.append(settled(stager.stage(state)))
    if len(held) == 2:
        held.pop(step % 2)
    if step == 20:
        early = now()
late = now()
print(*(b - a for a, b in zip(early, late)))
held.clear()
stager.close()
del stager
print(*now()[1:])
"""

RAGGED = """
parts = [torch.ones(4 * MIB // 4) for _ in range(20)]
nbytes = sum(x.nbytes for x in parts)
stager = build()
stager.stage({"all": parts})
before = status("VmRSS")
for kept in range(20):  # each call copies all but those that have settled
    for x in parts[kept:]:
        x.add_(1)
    staged = stager.stage({"all": parts})
    assert all(torch.equal(a, b) for a, b in zip(staged["all"], parts))
    del staged
print(nbytes, status("VmRSS") - before)
"""


@functools.cache
def reports() -> dict[str, list[list[int]]]:
    """What the programs of all stagers printed, a list for each line; run once for the tests of the outcome."""
    cases = [(kind, kind, PEAK + GROWTH) for kind in STAGERS] + [("bit by bit", "incremental_content", RAGGED)]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        server = ForkServer(Path(folder, "printed"), {**os.environ, "OMP_NUM_THREADS": "1"})
        for label, kind, program in cases:
            common = COMMON.replace("{name!r}", repr(kind.removesuffix("_content")))
            text = common.replace("{options}", repr(STAGERS[kind])) + program
            code, printed = server.run(["-c", text], Path(folder))
            assert code == 0, printed
            lines = [line.split() for line in printed.splitlines()]
            found[label] = [[int(number) for number in line] for line in lines if line[0].lstrip("-").isdigit()]
        server.close()
    return found


@pytest.mark.parametrize("kind", STAGERS)
def test_two_copies_in_flight_take_the_memory_of_two_copies(kind: str) -> None:
    nbytes, still, peak = reports()[kind][0]
    blocks = 2 * nbytes - (still if kind.startswith("incremental") else 0)
    assert peak <= 1.05 * blocks


@pytest.mark.parametrize("kind", STAGERS)
def test_two_hundred_saves_take_no_more_than_twenty(kind: str) -> None:
    _, (rss, descriptors, threads), (descriptors_after, threads_after) = reports()[kind]
    assert rss < 4 * 2**20
    assert descriptors <= 0
    assert threads <= 0
    assert threads_after == 1
    assert descriptors_after < 20


def test_tensors_that_settle_singly_leave_no_half_used_memory() -> None:
    ((nbytes, grown),) = reports()["bit by bit"]
    assert grown < 0.2 * nbytes
