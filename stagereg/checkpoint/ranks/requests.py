"""The log of operations that all ranks perform: a rank that begins an operation appends it to a numbered list.

A rank that has left its loop, and shadows the steps of the others, performs the operations in the list at the same
steps. The list also detects a rank that has missed an operation, so that the others do not wait for it: all ranks run
the same collectives and joins in the same order, so a rank that has already run more of them than an entry records has
missed that entry. The end of a run is the last operation: :class:`ShutdownBarrier`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from stagereg.errors import CheckpointError, RankMismatchError, name_ranks
from stagereg.kernel.broken import collectives_of
from stagereg.kernel.channel import resources_of, wait_for_keys

_log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.1
_LONG_S = 5.0  # seconds until a waiting rank logs the ranks that it waits for
_GONE = b"gone"  # value of a rank that has left the run with an error
_ADVICE = (
    "If their inputs are uneven, put the loop into a join: `with join:` and `for batch in join.iterate(loader)`. All "
    "ranks must take the same steps, and leave the Checkpointer's `with` block together."
)


class OperationLog:
    """This rank's access to the list, which is in the rendezvous store of the process group.

    Args:
        group: the process group that trains; ``None`` for a single process, which has no list.
        name: the name of the list; the same on all ranks, and unique in the job.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str) -> None:
        self._group = group
        self._store: Any = None if group is None else PrefixStore(f"stagereg/{name}", group.get_group_store())
        self._lock = threading.Lock()
        self._number = 0  # number of entries that this rank has processed
        self._suspected = 0

    def post(self, what: str = "") -> None:
        """Append the operation ``what``, which this rank begins and all ranks must perform. On the training thread."""
        with self._lock:
            self._number += 1
            if self._store is not None:
                self._store.set(str(self._number), f"{position_in(self._group)} {what}")

    def take_next(self) -> str | None:
        """Return the next entry and mark it as processed, on a rank that has left its loop; ``None`` for none."""
        with self._lock:
            entry = self._next()
            if entry is None:
                return None
            self._number += 1
            return entry[1]

    def take_missed(self) -> str | None:
        """Return an entry that this rank has missed, and mark it as processed. Any thread, about once per second."""
        with self._lock:
            entry = self._next()
            if entry is None or entry[0] >= position_in(self._group):
                return None
            if self._suspected <= self._number:  # the rank may be about to begin: decide in the next call
                self._suspected = self._number + 1
                return None
            self._number += 1
            return entry[1]

    def _next(self) -> tuple[int, str] | None:
        if self._store is None or not self._store.check([str(self._number + 1)]):
            return None
        position, what = self._store.get(str(self._number + 1)).decode().split(" ", 1)
        return int(position), what


def position_in(group: dist.ProcessGroup | None) -> int:
    """Return the number of collectives that this rank has run plus the number of joins that it has entered."""
    return 0 if group is None else collectives_of(group) + resources_of(group).counts["join"]


class ShutdownBarrier:
    """The end of a run: each rank reports that it has reached the end, and waits for the others before the last save.

    A waiting rank takes no part in training. So a rank that has run more collectives than the first waiting rank cannot
    reach the end together with it. It reports that, and the waiting ranks raise an error.

    Args:
        group: the process group that trains; ``None`` for a single process.
        name: the name of the barrier; the same on all ranks, and unique in the job.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str) -> None:
        self._group = group
        self._store: Any = None if group is None else PrefixStore(f"stagereg/{name}", group.get_group_store())
        self._came = False

    def wait(self, step: int | None, meanwhile: Callable[[], None], limit_s: float) -> None:
        """Wait until all ranks have reached the end, and call ``meanwhile`` until then. On the training thread.

        Raises:
            CheckpointError: a rank has begun steps that this rank does not take, has left with an error, or has not
                reached the end within ``limit_s``; or the rendezvous store is gone.
        """
        if self._group is None:
            return
        self._came = True
        try:
            self._wait(self._group, step, meanwhile, limit_s)
        except dist.DistError as error:
            raise CheckpointError(
                f"The last step was not saved: the rendezvous store does not respond ({error}). The process that hosts "
                "the store (rank 0 or the launcher) has terminated: check the end of its output."
            ) from error

    def _wait(self, group: dist.ProcessGroup, step: int | None, meanwhile: Callable[[], None], limit_s: float) -> None:
        rank, ranks = dist.get_rank(), [str(each) for each in dist.get_process_group_ranks(group)]
        self._store.compare_set("first", "", f"{rank} {position_in(group)} {_text(step)}")
        self._store.set(str(rank), _text(step))
        started, warned = time.monotonic(), False
        while not wait_for_keys(self._store, ranks, _POLL_INTERVAL_S):
            meanwhile()
            if self._store.check(["beyond"]):
                raise RankMismatchError(self._store.get("beyond").decode())
            waited = time.monotonic() - started
            if (waited > _LONG_S and not warned) or waited > limit_s:
                came = [int(each) for each in ranks if self._store.check([each])]
                missing = name_ranks([int(each) for each in ranks if int(each) not in came])
                text = f"{name_ranks(came)} reached the end{_text(step)}, but {missing} did not. {_ADVICE}"
                if waited > limit_s:
                    raise RankMismatchError(text)
                if rank == came[0]:
                    _log.warning("stagereg: %s", text)
                warned = True
        meanwhile()
        gone = [int(each) for each, text in zip(ranks, self._store.multi_get(ranks), strict=True) if text == _GONE]
        if gone:
            raise CheckpointError(f"The last step was not saved: {name_ranks(gone)} left the run with an error.")

    def leave(self) -> None:
        """Report that this rank will not reach the end, unless it has, so that no other rank waits for it."""
        if self._group is not None and not self._came:
            self._came = True
            with contextlib.suppress(RuntimeError):  # if the rendezvous store is gone
                self._store.set(str(dist.get_rank()), _GONE)

    def look(self) -> None:
        """Check whether this rank trains after another rank reached the end and report it. On the background thread."""
        here = position_in(self._group)
        if self._group is None or self._came or not self._store.check(["first"]):
            return
        rank, there, ended = self._store.get("first").decode().split(" ", 2)
        if here > int(there):
            own = name_ranks([dist.get_rank()])
            text = f"rank {rank} reached the end{ended}, but {own} continued with another step. {_ADVICE}"
            self._store.compare_set("beyond", "", text)


def _text(step: int | None) -> str:
    return "" if step is None else f" after step {step}"
