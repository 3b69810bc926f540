"""Control channels: small collectives among the ranks of a training job, separate from the collectives of training.

The ranks of a join exchange numbers over separate gloo connections, on the CPU. So an exchange is never paired with a
collective of the training step, and an accelerator's stream never waits for an exchange.

Each process group has one :class:`GroupResources`, which stores its connections and threads until the group is
destroyed or a join on the group fails.
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

HEARTBEAT_S = 0.25  # maximum seconds until a sleeping thread checks for new work

Waiting = Callable[[Callable[[float], bool], str], None]
"""Waits until a function returns True, calling it with the seconds to wait. The string names the event in messages."""

LIMIT_S = 1800.0  # seconds to wait for other ranks, as in torch by default


def wait_until(ready: Callable[[float], bool], what: str) -> None:
    """Wait until ``ready``, at most as long as torch waits by default. Raises: ``JoinError`` after this time."""
    ends = time.monotonic() + LIMIT_S
    while not ready(60.0):
        if time.monotonic() > ends:
            raise JoinError(f"other ranks did not reach {what} within {LIMIT_S / 60:g} min")


class WorkerThread:
    """A daemon thread that runs jobs in the order of submission. The first job starts the thread."""

    def __init__(self, name: str) -> None:
        self.closing = False  # set by :meth:`close`; long jobs check this attribute
        self.wake = threading.Event()  # set to end a wait of the thread
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, job: Callable[[], None], wake: bool = True) -> None:
        """Run ``job``, which must not raise, after earlier jobs. Without ``wake``, it starts within ``HEARTBEAT_S``."""
        self._jobs.append(job)
        if wake:
            self.wake.set()
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop the thread after its current job. Waits for at most one second, because the job may hang."""
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
    """The result of an asynchronous sum over ranks. The collective writes it into ``values``."""

    def __init__(self, values: array[float], work: Any) -> None:
        self._values = values
        self._work = work

    def ready(self, seconds: float) -> bool:
        """Wait for at most ``seconds``. Return whether the sum is complete. Raises the error of the collective."""
        try:
            self._work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:
            if self._work.is_completed():
                self._work.wait()  # raises the error of the collective
            return False  # the sum is still pending
        return True

    def wait(self) -> list[float]:
        """Wait for the result, and return it."""
        self._work.wait()
        return self._values.tolist()


class ControlChannel:
    """Small exchanges among ranks. All ranks make the same calls in the same order, one thread at a time.

    Attributes:
        rank, size: this rank's number in the group, and the number of ranks.
        ranks: the global ranks of the group, in order, for messages.
        thread: the channel's own thread, for jobs that wait on the channel.
        backend: a gloo backend, which ``destroy_process_group`` does not affect. Its collectives have no time limit,
            because each caller waits with a limit.
        skips_reductions: whether this rank has taken a step without a gradient reduction, in any join.
    """

    skips_reductions = False

    def __init__(self, group: dist.ProcessGroup, key: str, waiting: Waiting) -> None:
        self.rank, self.size, self.ranks = group.rank(), group.size(), dist.get_process_group_ranks(group)
        self.thread = WorkerThread(f"stagereg-{key.rpartition('/')[2]}")
        store: Any = PrefixStore(key, group.get_group_store())
        # Gloo's constructor also waits, but occupies the store during the wait, and continues if another rank fails.
        store.set(f"here/{self.rank}", "")
        here = [f"here/{rank}" for rank in range(self.size)]
        waiting(lambda seconds: wait_for_keys(store, here, seconds), "the join")
        self.backend: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=LIMIT_S))
        self.backend._set_default_timeout(timedelta(days=999))

    def add(self, values: Sequence[float]) -> PendingSum:
        """Start to sum ``values`` over the ranks. Does not block. All ranks pass the same number of values."""
        mine = array("d", values)
        return PendingSum(mine, self.backend.allreduce([torch.frombuffer(mine, dtype=torch.float64)]))

    def gather(self, thing: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order. They are transferred with pickle. Waits for all ranks."""
        mine = pickle.dumps(thing)
        lengths = [0.0] * self.size
        lengths[self.rank] = len(mine)
        longest = int(max(self.add(lengths).wait()))
        buffers = [bytearray(longest) for _ in lengths]
        tensors = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
        padded = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
        self.backend.allgather([tensors], [padded]).wait()
        return [pickle.loads(buffer) for buffer in buffers]  # pickle ignores the padding


class GroupResources:
    """The resources that all joins on one process group share. See :func:`resources_of`."""

    def __init__(self, number: int) -> None:
        self.prefix = f"stagereg/{number}"  # prefix of all its keys in the rendezvous store
        self.counts: Counter[str] = Counter()  # number of names returned so far, by kind
        self.aborted = False  # whether this rank has aborted the group
        self.heartbeat = WorkerThread("stagereg-heartbeat")  # thread of the failure detector
        self.watched = False  # whether a failure detector runs on the heartbeat thread
        self.channels: dict[str, ControlChannel] = {}  # channels by purpose
        self.expired: list[Callable[[], None]] = []  # functions that delete store keys of finished loops

    def next_name(self, kind: str) -> str:
        """Return a new prefix for store keys. The n-th call with a ``kind`` returns the same prefix on all ranks."""
        self.counts[kind] += 1
        return f"{self.prefix}/{kind}/{self.counts[kind]}"

    def backends(self) -> list[Any]:
        """Return the backends of all channels."""
        return [each.backend for each in self.channels.values()]

    def drop(self, purpose: str) -> None:
        """Close the channel for a purpose. This rank must not use it again."""
        if purpose in self.channels:
            self.channels.pop(purpose).thread.close()

    def close(self) -> None:
        """Stop all threads and close all channels. A later request creates new ones."""
        self.counts["closed"] += 1
        for purpose in list(self.channels):
            self.drop(purpose)
        before, self.heartbeat = self.heartbeat, WorkerThread("stagereg-heartbeat")
        before.close()


def resources_of(group: dist.ProcessGroup) -> GroupResources:
    """Return the resources of a process group. They are closed when the group is destroyed, or at exit."""
    if (found := _resources.get(group)) is None:
        found = _resources[group] = GroupResources(_numbers[group.group_name])
        _numbers[group.group_name] += 1
        weakref.finalize(group, found.close)
    return found


def control_channel(group: dist.ProcessGroup, purpose: str, waiting: Waiting) -> ControlChannel:
    """Return the channel of a process group for ``purpose``. The first call connects the ranks: it is collective.

    ``waiting``: waits for the other ranks to connect.
    """
    resources = resources_of(group)
    if purpose not in resources.channels:
        # A failed join may have opened the channel only on some ranks. Each rank closes it then, and counts this.
        key = f"{resources.prefix}/channel/{resources.counts['closed']}/{purpose}"
        resources.channels[purpose] = ControlChannel(group, key, waiting)
    return resources.channels[purpose]


def wait_for_keys(store: Store, keys: list[str], seconds: float) -> bool:
    """Wait for at most ``seconds`` until all keys exist. Return whether they exist. The poll interval increases."""
    started = time.monotonic()
    while not store.check(keys):
        if (waited := time.monotonic() - started) > seconds:
            return False
        time.sleep(min(waited / 8, 0.002))
    return True


_resources: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupResources] = weakref.WeakKeyDictionary()
"""Global, because stagereg must not add attributes to a process group."""
_numbers: Counter[str] = Counter()
"""Number of groups by name. Global, because a later group with the same name finds the keys of an earlier group."""
