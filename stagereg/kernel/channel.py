"""Control channels: small collectives beside those of training, among the same ranks.

What a join exchanges goes over gloo connections of its own, on the CPU. So it is never paired with a collective of the
training step, and an accelerator's stream does not wait for it.

Connections and threads cost milliseconds to make. They are made once for a process group and kept on its
:class:`GroupResources` until the group is destroyed, or a join over it fails. The protocols of a join know a channel
only as :class:`ControlChannel`, so they also run on channels within one process.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

__all__ = [
    "ControlChannel",
    "GroupResources",
    "KeyValueStore",
    "PendingSum",
    "Waiting",
    "WorkerThread",
    "control_channel",
    "delete_keys",
    "resources_of",
    "wait_for_keys",
]

Waiting = Callable[[Callable[[float], bool], str], None]
"""Calls a function with seconds to wait, again and again until it returns True; the text says what is waited for."""
_TORCHS_LIMIT = timedelta(minutes=30)
"""Torch's own limit for an operation."""
_CLOSE_S = 1.0
"""Seconds that a thread gets to end; it needs them only if the store does not answer."""


class PendingSum(Protocol):
    """A sum that is under way."""

    def ready(self, seconds: float) -> bool:
        """Wait at most so long; return whether the sum is there. Raises what the collective failed with."""

    def wait(self) -> list[float]:
        """Wait for the sums, one for each of the values."""


class ControlChannel(Protocol):
    """Ranks that exchange small things. All of them make the same calls in the same order, one thread at a time.

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

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job``, which may use the channel, on the channel's own thread."""


class KeyValueStore(Protocol):
    """What a join needs of a store: torch's stores have it."""

    def set(self, key: str, value: str, /) -> Any:
        """Write a key. Does not wait for other ranks."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them are there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, and return the sum."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; return whether it was there."""


class WorkerThread:
    """A daemon thread that runs jobs in the order in which they were submitted, from the first one on.

    Attributes:
        closing: whether :meth:`close` was called; a job that runs for long ends then.
    """

    def __init__(self, name: str) -> None:
        self.closing = False
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` after those before it. It handles its own errors."""
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread after the job that runs; waits a second at most."""
        self.closing = True
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self.closing:
            job()
            del job  # what it refers to, such as the process group, is not kept while the thread waits


class GroupResources:
    """What joins over one process group keep from one to the next. See :func:`resources_of`.

    Attributes:
        aborted: whether the group was aborted on this rank.
        heartbeat: the thread of the failure detector.
        expired: what deletes keys of former loops from the store, once all ranks have entered another one.
    """

    def __init__(self, number: int) -> None:
        self.aborted = False
        self._number = number
        self._joins = 0
        self.expired: list[Callable[[], None]] = []
        self._fresh()

    def _fresh(self) -> None:
        self.heartbeat = WorkerThread("stagereg-heartbeat")
        self._channels: dict[str, _GlooChannel] = {}

    def next_join(self) -> str:
        """A prefix for the store's keys of one join; the same on all ranks, which enter joins in the same order."""
        self._joins += 1
        return f"stagereg/{self._number}/join/{self._joins}"

    def channel(self, group: dist.ProcessGroup, purpose: str, waiting: Waiting | None) -> ControlChannel:
        """See :func:`control_channel`."""
        channel = self._channels.get(purpose)
        if channel is None:
            key = f"stagereg/{self._number}/channel/{self._joins}/{purpose}"
            channel = self._channels[purpose] = _GlooChannel(group, key, waiting)
        return channel

    def backends(self, polled: bool = True) -> list[Any]:
        """The gloo backends of the channels; with ``polled=False`` without those on which no rank waits for long."""
        channels = [channel for channel in self._channels.values() if polled or not channel.polled]
        return [channel.backend for channel in channels if channel.backend is not None]

    def close(self) -> None:
        """End all threads and let go of the channels. What is asked for afterwards is made anew."""
        heartbeat, channels = self.heartbeat, self._channels
        self._fresh()
        for thread in (heartbeat, *(channel.thread for channel in channels.values())):
            thread.close()


def resources_of(group: dist.ProcessGroup) -> GroupResources:
    """Return the resources of a process group. They are closed when the group is destroyed, and at exit."""
    found = _resources.get(group)
    if found is None:
        found = _resources[group] = GroupResources(_numbers[group.group_name])
        _numbers[group.group_name] += 1
        weakref.finalize(group, found.close)
    return found


def control_channel(group: dist.ProcessGroup, purpose: str, waiting: Waiting | None = None) -> ControlChannel:
    """Return the channel of ``group``'s ranks for ``purpose``. The first call connects the ranks, so it is collective.

    Args:
        group: the ranks.
        purpose: what is exchanged; a channel for one never meets another's.
        waiting: how to wait for the other ranks to connect; the channel is then one whose sums are only polled.
            ``None``: waits for as long as torch does.
    """
    return resources_of(group).channel(group, purpose, waiting)


class _SumDone:
    def __init__(self, values: Sequence[float]) -> None:
        self._values = list(values)

    def ready(self, seconds: float) -> bool:
        return True

    def wait(self) -> list[float]:
        return self._values


class _GlooSum:
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
                return False  # the sum goes on
            self._there = True
        return True

    def wait(self) -> list[float]:
        if not self._there:
            self._work.wait()
        return self._values.tolist()


class _GlooChannel:
    """A channel over a gloo backend that no torch registry knows, so destroying groups elsewhere does not touch it."""

    def __init__(self, group: dist.ProcessGroup, key: str, waiting: Waiting | None) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.polled = waiting is not None
        self.thread = WorkerThread(f"stagereg-{key.rpartition('/')[2]}")
        self.backend: Any = None
        self._options = dist.AllreduceOptions()
        if self.size == 1:
            return
        store: Any = PrefixStore(key, group.get_group_store())
        if waiting is not None:
            # Gloo waits for the others inside a call of the store, where an error of another rank does not reach this
            # thread, and where it keeps the store's connection from this process's other threads.
            store.set(f"here/{self.rank}", "")
            ranks = [f"here/{rank}" for rank in range(self.size)]
            waiting(lambda seconds: wait_for_keys(store, ranks, seconds), "the join")
        self.backend = dist.ProcessGroupGloo(store, self.rank, self.size, _TORCHS_LIMIT)

    def add(self, values: Sequence[float]) -> PendingSum:
        if self.backend is None:
            return _SumDone(values)
        mine = array("d", values)
        return _GlooSum(mine, self.backend.allreduce([torch.frombuffer(mine, dtype=torch.float64)], self._options))

    def gather(self, thing: Any) -> list[Any]:
        if self.backend is None:
            return [thing]
        mine = pickle.dumps(thing)
        lengths = [0.0] * self.size
        lengths[self.rank] = len(mine)
        lengths = self.add(lengths).wait()
        longest = int(max(lengths))
        buffers = [bytearray(longest) for _ in lengths]
        tensors = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
        padded = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
        self.backend.allgather([tensors], [padded]).wait()
        return [pickle.loads(buffer) for buffer in buffers]  # what comes after the pickle is not read

    def submit(self, job: Callable[[], None]) -> None:
        self.thread.submit(job)


def wait_for_keys(store: KeyValueStore, key: str | Sequence[str], seconds: float) -> bool:
    """Wait for a key, or several, so many seconds at most; return whether they are there.

    It looks less and less often: first it is a matter of microseconds, later of a long forward pass.
    """
    keys = [key] if isinstance(key, str) else list(key)
    started = time.monotonic()
    while not store.check(keys):
        waited = time.monotonic() - started
        if waited > seconds:
            return False
        time.sleep(min(waited / 8, 0.002))
    return True


def delete_keys(store: KeyValueStore, keys: Iterable[str]) -> None:
    """Delete keys, as far as the store is still there."""
    with contextlib.suppress(RuntimeError):
        for key in keys:
            store.delete_key(key)


_resources: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupResources] = weakref.WeakKeyDictionary()
"""Global because a process group is not ours to put an attribute on."""
_numbers: Counter[str] = Counter()
"""How many groups had this name. Global because a later group of the same name finds the keys of an earlier one."""
