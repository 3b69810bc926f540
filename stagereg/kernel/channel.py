"""Control channels: small collectives beside those of training, among the same ranks.

A join exchanges its numbers over gloo connections of its own, on the CPU. So no exchange is paired with a collective of
the training step, and an accelerator's stream does not wait for an exchange.

Connections and threads are made once for a process group, and kept on its :class:`GroupResources` until the group is
destroyed, or a join over it fails.
"""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from stagereg.errors import JoinError

HEARTBEAT_S = 0.25  # seconds after which a thread notices at the latest what has come without waking it

Waiting = Callable[[Callable[[float], bool], str], None]
"""Calls a function with seconds to wait, again and again until it returns True; the text says what is waited for."""

LIMIT_S = 1800.0  # torch waits as long for other ranks, if nobody says otherwise


def wait_until(ready: Callable[[float], bool], what: str) -> None:
    """Wait for as long as torch does. Raises: ``JoinError`` after that."""
    ends = time.monotonic() + LIMIT_S
    while not ready(60.0):
        if time.monotonic() > ends:
            raise JoinError(f"other ranks did not come to {what} within {LIMIT_S / 60:g} min")


class WorkerThread:
    """A daemon thread that runs jobs in the order in which they were submitted, from the first one on."""

    def __init__(self, name: str) -> None:
        self.closing = False  # as :meth:`close` was called; a job that runs for long ends then
        self.wake = threading.Event()  # ends the thread's wait for jobs, or that of a job which waits for it
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, job: Callable[[], None], wake: bool = True) -> None:
        """Run ``job`` after those before it, at once or within :data:`HEARTBEAT_S`. It handles its own errors."""
        self._jobs.append(job)
        if wake:
            self.wake.set()
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """End the thread after the job that runs; waits a second at most, as where the store does not answer."""
        self.closing = True
        self.wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self.closing:
            while self._jobs and not self.closing:
                self._jobs.popleft()()
            self.wake.wait(HEARTBEAT_S)
            self.wake.clear()


class PendingSum:
    """A sum that is under way: the work of a collective, which puts the sum into ``values``."""

    def __init__(self, values: array[float], work: Any) -> None:
        self._values = values
        self._work = work

    def ready(self, seconds: float) -> bool:
        """Wait at most so long; return whether the sum is there. Raises what the collective failed with."""
        try:
            self._work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:
            if self._work.is_completed():
                self._work.wait()  # raises what it failed with
            return False  # the sum goes on
        return True

    def wait(self) -> list[float]:
        """Wait for the sums, one for each of the values."""
        self._work.wait()
        return self._values.tolist()


class ControlChannel:
    """Ranks that exchange small things. All of them make the same calls in the same order, one thread at a time.

    Attributes:
        rank, size: this rank among them, and how many there are.
        thread: of the channel alone, for jobs that wait on it.
        backend: a gloo backend, which ``destroy_process_group`` leaves alone. Its collectives have no time limit, since
            callers wait in turns of their own.
        skips_reductions: whether this rank has been in a step that reduces no gradients, in any join.
    """

    skips_reductions = False

    def __init__(self, group: dist.ProcessGroup, key: str, waiting: Waiting) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.thread = WorkerThread(f"stagereg-{key.rpartition('/')[2]}")
        store: Any = PrefixStore(key, group.get_group_store())
        # Gloo's constructor waits too, but keeps the store busy meanwhile, and another rank's error does not end it.
        store.set(f"here/{self.rank}", "")
        here = [f"here/{rank}" for rank in range(self.size)]
        waiting(lambda seconds: wait_for_keys(store, here, seconds), "the join")
        self.backend: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=LIMIT_S))
        self.backend._set_default_timeout(timedelta(days=999))

    def add(self, values: Sequence[float]) -> PendingSum:
        """Begin to sum ``values`` over the ranks; returns at once. All ranks give as many."""
        mine = array("d", values)
        return PendingSum(mine, self.backend.allreduce([torch.frombuffer(mine, dtype=torch.float64)]))

    def gather(self, thing: Any) -> list[Any]:
        """Return what all ranks gave, in rank order; it is pickled. Waits for all of them."""
        mine = pickle.dumps(thing)
        lengths = [0.0] * self.size
        lengths[self.rank] = len(mine)
        longest = int(max(self.add(lengths).wait()))
        buffers = [bytearray(longest) for _ in lengths]
        tensors = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
        padded = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
        self.backend.allgather([tensors], [padded]).wait()
        return [pickle.loads(buffer) for buffer in buffers]  # what comes after the pickle is not read


class GroupResources:
    """What joins over one process group keep from one to the next. See :func:`resources_of`."""

    def __init__(self, number: int) -> None:
        self.prefix = f"stagereg/{number}"  # of all its keys in the store
        self.counts: Counter[str] = Counter()  # of the names that were given, by kind
        self.aborted = False  # on this rank
        self.heartbeat = WorkerThread("stagereg-heartbeat")  # of the failure detector
        self.watched = False  # by a failure detector, on that thread
        self.channels: dict[str, ControlChannel] = {}  # by purpose
        self.expired: list[Callable[[], None]] = []  # delete keys of former loops, once all ranks are in another one

    def next_name(self, kind: str) -> str:
        """A prefix for keys in the store; the same on all ranks, which ask for those of a kind in the same order."""
        self.counts[kind] += 1
        return f"{self.prefix}/{kind}/{self.counts[kind]}"

    def backends(self) -> list[Any]:
        """The backends of all channels."""
        return [each.backend for each in self.channels.values()]

    def drop(self, purpose: str) -> None:
        """Let go of a channel that this rank does not use again."""
        if purpose in self.channels:
            self.channels.pop(purpose).thread.close()

    def close(self) -> None:
        """End all threads and let go of the channels. What is asked for afterwards is made anew."""
        self.counts["closed"] += 1
        for purpose in list(self.channels):
            self.drop(purpose)
        before, self.heartbeat = self.heartbeat, WorkerThread("stagereg-heartbeat")
        before.close()


def resources_of(group: dist.ProcessGroup) -> GroupResources:
    """Return the resources of a process group. They are closed when the group is destroyed, and at exit."""
    if (found := _resources.get(group)) is None:
        found = _resources[group] = GroupResources(_numbers[group.group_name])
        _numbers[group.group_name] += 1
        weakref.finalize(group, found.close)
    return found


def control_channel(group: dist.ProcessGroup, purpose: str, waiting: Waiting) -> ControlChannel:
    """Return the channel of ``group``'s ranks for ``purpose``. The first call connects the ranks, so it is collective.

    ``waiting`` is how to wait for the other ranks to connect.
    """
    resources = resources_of(group)
    if purpose not in resources.channels:
        # In a join that failed some ranks may have come without this channel; afterwards all have closed theirs.
        key = f"{resources.prefix}/channel/{resources.counts['closed']}/{purpose}"
        resources.channels[purpose] = ControlChannel(group, key, waiting)
    return resources.channels[purpose]


def wait_for_keys(store: Store, keys: list[str], seconds: float) -> bool:
    """Wait so many seconds at most for keys, looking less and less often; return whether they are there."""
    started = time.monotonic()
    while not store.check(keys):
        if (waited := time.monotonic() - started) > seconds:
            return False
        time.sleep(min(waited / 8, 0.002))
    return True


_resources: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupResources] = weakref.WeakKeyDictionary()
"""Global because a process group is not ours to put an attribute on."""
_numbers: Counter[str] = Counter()
"""How many groups had this name. Global because a later group of the same name finds the keys of an earlier one."""
