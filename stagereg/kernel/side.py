"""Small collectives beside those of training: sums of a few numbers, and objects gathered, among the same ranks.

What a join has to say each step goes over a gloo group of its own, on the CPU. It can never be paired with a collective
of the training step, whatever the step does; and it costs an accelerator nothing, since nobody waits for a stream.

A :class:`Line` is all that the join's protocol knows of the network, so the protocol also runs on a line that lies
within one process.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["Line", "Pending", "side_line"]


class Pending(Protocol):
    """A sum that is under way."""

    def ready(self, seconds: float) -> bool:
        """Wait so long at most; return whether the sum is there. Raises what the collective failed with."""

    def wait(self) -> list[float]:
        """Wait for the sum, of all ranks' values place by place."""


class Line(Protocol):
    """Some ranks that exchange small things. All of them make the same calls in the same order, one thread at a time.

    Attributes:
        rank: this rank among them.
        size: how many there are.
    """

    rank: int
    size: int

    def add(self, values: Sequence[float]) -> Pending:
        """Begin to sum ``values`` over the ranks; returns at once. All ranks give as many."""

    def gather(self, thing: Any) -> list[Any]:
        """Return what all ranks gave, in rank order; it is pickled. Waits for all of them."""


def side_line(group: dist.ProcessGroup, purpose: str) -> Line:
    """Return the line of ``group``'s ranks for ``purpose``; collective where it is the first time, which makes a group.

    Lines are kept for as long as their group: another join over the same ranks has the same one.
    """
    if group.size() == 1:
        return _Alone()
    line = _lines.get((group.group_name, purpose))
    if line is None or line.of is not group:  # a group that came after one of the same name was destroyed
        line = _lines[group.group_name, purpose] = _GlooLine(group)
    return line


class _Done:
    def __init__(self, values: Sequence[float]) -> None:
        self._values = list(values)

    def ready(self, seconds: float) -> bool:
        return True

    def wait(self) -> list[float]:
        return self._values


class _Alone:
    """The line of a rank that is alone."""

    rank = 0
    size = 1

    def add(self, values: Sequence[float]) -> Pending:
        return _Done(values)

    def gather(self, thing: Any) -> list[Any]:
        return [thing]


class _Sum:
    def __init__(self, values: array[float], work: Any) -> None:
        self._values = values
        self._work = work
        self._there = False

    def ready(self, seconds: float) -> bool:
        if not self._there:
            try:
                self._work.wait(timedelta(seconds=max(seconds, 0.001)))
            except RuntimeError:
                if self._work.is_completed():
                    self._work.wait()  # raises what it failed with
                return False  # it goes on, whoever waits
            self._there = True
        return True

    def wait(self) -> list[float]:
        if not self._there:
            self._work.wait()
        return self._values.tolist()


class _GlooLine:
    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.of = group
        self.rank, self.size = group.rank(), group.size()
        self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        # Past what torch does around a collective for users: a sum a step is to be lost beside the step.
        self._gloo = self._group._get_backend(torch.device("cpu"))
        self._options = dist.AllreduceOptions()

    def add(self, values: Sequence[float]) -> Pending:
        mine = array("d", values)
        return _Sum(mine, self._gloo.allreduce([torch.frombuffer(mine, dtype=torch.float64)], self._options))

    def gather(self, thing: Any) -> list[Any]:
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing, group=self._group)
        return things


_lines: dict[tuple[str, str], _GlooLine] = {}
