"""Small collectives beside those of training: sums of a few numbers, and objects gathered, among the same ranks.

What a join has to say each step goes over a gloo group of its own, on the CPU. It can never be paired with a collective
of the training step, whatever the step does; and it costs an accelerator nothing, since nobody waits for a stream.

A :class:`ControlChannel` is all that the join's protocol knows of the network, so the protocol also runs on a channel
that lies within one process.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

__all__ = [
    "ControlChannel",
    "KeyValueStore",
    "PendingSum",
    "Waiting",
    "control_channel",
    "control_groups",
    "wait_for_keys",
]

Waiting = Callable[[Callable[[float], bool], str], None]
"""Calls a function with seconds to wait, again and again until it returns True; the text says what is waited for."""


class PendingSum(Protocol):
    """A sum that is under way."""

    def ready(self, seconds: float) -> bool:
        """Wait so long at most; return whether the sum is there. Raises what the collective failed with."""

    def wait(self) -> list[float]:
        """Wait for the sum, of all ranks' values place by place."""


class ControlChannel(Protocol):
    """Some ranks that exchange small things. All of them make the same calls in the same order, one thread at a time.

    Attributes:
        rank: this rank among them.
        size: how many there are.
    """

    rank: int
    size: int

    def add(self, values: Sequence[float]) -> PendingSum:
        """Begin to sum ``values`` over the ranks; returns at once. All ranks give as many."""

    def gather(self, thing: Any) -> list[Any]:
        """Return what all ranks gave, in rank order; it is pickled. Waits for all of them."""


def control_channel(group: dist.ProcessGroup, purpose: str, waiting: Waiting | None = None) -> ControlChannel:
    """Return the channel of ``group``'s ranks for ``purpose``. The first call makes a group, so it is collective.

    Channels are kept for as long as their group: another join over the same ranks has the same one.

    Args:
        group: the ranks.
        purpose: what is exchanged; a channel for one never meets another's.
        waiting: how to wait for the other ranks to make the group too; ``None``: for as long as torch does.
    """
    if group.size() == 1:
        return _SingleRankChannel()
    channel = _channels.get((group.group_name, purpose))
    if channel is None or channel.of is not group:  # a group that came after one of the same name was destroyed
        channel = _channels[group.group_name, purpose] = _GlooChannel(group, _made(group, purpose, waiting))
    return channel


def control_groups(group: dist.ProcessGroup, but: Sequence[str]) -> list[dist.ProcessGroup]:
    """The process groups that have been made for lines of ``group``'s ranks, for other purposes than these."""
    return [channel.group for (_, purpose), channel in _channels.items() if channel.of is group and purpose not in but]


class _Done:
    def __init__(self, values: Sequence[float]) -> None:
        self._values = list(values)

    def ready(self, seconds: float) -> bool:
        return True

    def wait(self) -> list[float]:
        return self._values


class _SingleRankChannel:
    """The channel of a rank that is alone."""

    rank = 0
    size = 1

    def add(self, values: Sequence[float]) -> PendingSum:
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


class _GlooChannel:
    def __init__(self, of: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
        self.of, self.group = of, group
        self.rank, self.size = of.rank(), of.size()
        # Past what torch does around a collective for users: a sum a step is to be lost beside the step.
        self._gloo: Any = group._get_backend(torch.device("cpu"))
        self._options = dist.AllreduceOptions()

    def add(self, values: Sequence[float]) -> PendingSum:
        mine = array("d", values)
        return _Sum(mine, self._gloo.allreduce([torch.frombuffer(mine, dtype=torch.float64)], self._options))

    def gather(self, thing: Any) -> list[Any]:
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing, group=self.group)
        return things


def _made(of: dist.ProcessGroup, purpose: str, waiting: Waiting | None) -> dist.ProcessGroup:
    """Make a group of the same ranks, once all of them are about to.

    Torch waits for the others in the store, where nothing reaches this thread, and where it keeps the store's
    connection from the process's other threads.
    """
    if waiting is not None:
        number = _made_before[of.group_name, purpose]
        _made_before[of.group_name, purpose] += 1
        store: Any = PrefixStore(f"stagereg/side/{of.group_name}/{purpose}/{number}", of.get_group_store())
        store.set(str(of.rank()), "here")
        ranks = [str(rank) for rank in range(of.size())]
        waiting(lambda seconds: wait_for_keys(store, ranks, seconds), "the join")
    return dist.new_group(dist.get_process_group_ranks(of), backend="gloo", use_local_synchronization=True)


class KeyValueStore(Protocol):
    """What a join needs of a store: torch's stores have it."""

    def set(self, key: str, value: str, /) -> Any:
        """Leave a word; waits for nobody."""

    def get(self, key: str, /) -> bytes:
        """Return a word that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them are there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, and return what it has become."""


def wait_for_keys(words: KeyValueStore, key: str | Sequence[str], seconds: float) -> bool:
    """Wait for a key, or several, so many seconds at most; return whether they are there.

    It looks less and less often: first it is a matter of microseconds, later of a long forward pass.
    """
    keys = [key] if isinstance(key, str) else list(key)
    started = time.monotonic()
    while not words.check(keys):
        waited = time.monotonic() - started
        if waited > seconds:
            return False
        time.sleep(min(waited / 8, 0.002))
    return True


_made_before: Counter[tuple[str, str]] = Counter()
_channels: dict[tuple[str, str], _GlooChannel] = {}
