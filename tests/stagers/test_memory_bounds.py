"""Host memory: no more than the copies in flight need, and the same after two hundred saves as after twenty.

Each stager is measured in a process that has done nothing else.
"""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from stagereg.testing import run_ranks

from ..support.states import KINDS, build, settled

MIB = 2**20
QUICK = ("overlapped",)


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def held_now() -> list[int]:
    """Resident bytes, descriptors and threads."""
    gc.collect()
    return [status("VmRSS"), len(os.listdir("/proc/self/fd")), len(threading.enumerate())]


def peak_of_two_copies(kind: str) -> float:
    """The most memory that a stager with two copies in flight ever takes, by what two copies have to take."""
    parts = [torch.ones(8 * MIB // 4) for _ in range(24)] + [torch.ones(1000) for _ in range(300)]
    state = dict(enumerate(parts))
    first = build(kind)  # whose threads leave their stacks to those to come
    for _ in range(2):
        settled(first.stage({"warm": [torch.ones(3 * MIB) for _ in range(2)]}))
    first.close()
    del first
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    stager, held = build(kind), []
    for step in range(7):
        for x in parts:
            x.fill_(step)
        del held[:-1]
        held.append(settled(stager.stage(state)))
    peak = status("VmHWM") - before
    for step, copy in zip((5, 6), held, strict=True):
        assert all(x.eq(step).all() for x in copy.values())
    stager.close()
    return peak / (2 * sum(x.nbytes for x in parts))


def growth(kind: str) -> list[int]:
    """What 180 saves of a state whose shapes change leave behind beside what the first 20 did."""
    parts = [torch.ones(30_000) for _ in range(30)]
    state: dict[Any, torch.Tensor] = dict(enumerate(parts))
    unused = held_now()
    stager, held = build(kind), []
    for step in range(200):
        parts[step % 30].add_(1)
        if step % 7 == 0:
            state["ragged"] = torch.ones(1 + step % 5 * 1000)
        held.append(settled(stager.stage(state)))
        if len(held) == 2:
            held.pop(step % 2)
        if step == 20:
            early = held_now()
    grown = [late - soon for soon, late in zip(early, held_now(), strict=True)]
    held.clear()
    stager.close()
    _, *after = held_now()
    assert all(left <= before for left, before in zip(after, unused[1:], strict=True)), "close() ends threads and files"
    return grown


def on_a_rank(rank: int, world_size: int, kind: str) -> tuple[float, list[int]]:
    return peak_of_two_copies(kind), growth(kind)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_memory_is_that_of_the_copies_in_flight_however_often(kind: str) -> None:
    ((peak, (resident, descriptors, threads)),) = run_ranks(on_a_rank, 1, args=(kind,), timeout_s=200)
    assert peak <= 1.05
    assert resident < 4 * MIB
    assert descriptors <= 0
    assert threads <= 0
