"""A copy right after workers were forked, as a ``DataLoader`` does in every epoch, and one right before.

The copies are made in a process of its own: after a fork, each row of this process would find pages to be copied anew.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from stagereg.bench.measure import Case
from stagereg.registry import build

ROWS = ("before a fork", "after a fork")

_TENSORS = 16
_WORKERS = 2


class AfterFork(Case):
    """Two warm calls of ``pinned_cached`` for ``nbytes`` bytes, between which workers are forked that stay."""

    def __init__(self, nbytes: int, device: str) -> None:
        super().__init__(*ROWS)
        self._nbytes, self._device = nbytes, device
        self._process: ProcessPoolExecutor | None = None

    def turn(self) -> Iterator[float | None]:
        """Yield the seconds of both."""
        if self._process is None:
            self._process = ProcessPoolExecutor(1, get_context("spawn"))
            self._process.submit(_around_forks, self._nbytes, self._device).result()
        yield None
        yield from self._process.submit(_around_forks, self._nbytes, self._device).result()

    def close(self) -> None:
        """End the process; the next turn starts another one."""
        if self._process is not None:
            self._process.shutdown()
            self._process = None


def _around_forks(nbytes: int, device: str) -> tuple[float, float]:
    stage = _stage(nbytes, device)
    before = stage()
    away, here = os.pipe()
    workers = []
    try:
        for _ in range(_WORKERS):
            if (pid := os.fork()) == 0:
                os.close(here)
                os.read(away, 1)
                os._exit(0)
            workers.append(pid)
        return before, stage()
    finally:
        os.close(here)
        os.close(away)
        for pid in workers:
            os.waitpid(pid, 0)


@functools.cache
def _stage(nbytes: int, device: str) -> Callable[[], float]:
    """Return a call of a warm stager that returns the seconds it took."""
    stager: Any = build("stager", "pinned_cached")
    numbers = max(1, nbytes // 4 // _TENSORS)
    state = {str(i): torch.ones(numbers, dtype=torch.float32, device=device) for i in range(_TENSORS)}

    def stage() -> float:
        began = time.perf_counter()
        copy = stager.stage(state)
        seconds = time.perf_counter() - began
        del copy
        return seconds

    stage()
    return stage
