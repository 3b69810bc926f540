"""A shared log of operations, such as saves, that all ranks must perform at the same step.

A rank that begins an operation appends it to the log. A rank without data has left its training loop, but takes part in
the steps of the others, and reads from the log which operations to perform. The log also detects a rank that has missed
an operation, so that the others do not wait: all ranks run the same collectives and joins in the same order. If a rank
has run more of them than a log entry records, it has missed the entry. :class:`ShutdownBarrier` is the last operation.
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
_GONE = b"gone"  # value that a rank writes if it leaves the run with an error
_ADVICE = (
    "If their inputs are uneven, put the loop into a join: `with join:` and `for batch in join.iterate(loader)`. All "
    "ranks must take the same steps, and leave the Checkpointer's `with` block together."
)


class OperationLog:
    """Reads and writes the log, which is in the rendezvous store of the process group.

    ``group``: the process group that trains; ``None`` for a single process, which has no log. ``name``: the name of the
    log, which is the same on all ranks, and unique in the job.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str) -> None:
        self._group = group
        self._store: Any = None if group is None else PrefixStore(f"stagereg/{name}", group.get_group_store())
        self._lock = threading.Lock()
        self._number = 0  # number of log entries that this rank has processed
        self._suspected = 0  # number of the entry that this rank may have missed

    def post(self, what: str = "") -> None:
        """Append the operation ``what``, which this rank begins now. Called on the training thread."""
        with self._lock:
            self._number += 1
            if self._store is not None:
                self._store.set(str(self._number), f"{position_in(self._group)} {what}")

    def take_next(self) -> str | None:
        """Take the next operation from the log, or return ``None``. Called on a rank that has left its loop."""
        with self._lock:
            entry = self._next()
            if entry is None:
                return None
            self._number += 1
            return entry[1]

    def take_missed(self) -> str | None:
        """Take an operation that this rank has missed, or return ``None``. Called about once per second, any thread."""
        with self._lock:
            entry = self._next()
            if entry is None or entry[0] >= position_in(self._group):
                return None
            if self._suspected <= self._number:  # not certain: this rank may be about to begin
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
    """Return the number of collectives that this rank has run in ``group``, plus the number of joins it has entered."""
    return 0 if group is None else collectives_of(group) + resources_of(group).counts["join"]


class ShutdownBarrier:
    """The barrier at the end of a run: each rank waits there for all others before the last save.

    A waiting rank does not take part in training. If a rank that still trains has run more collectives than the first
    waiting rank, these two ranks cannot reach the end after the same step. The training rank then reports this, and the
    waiting ranks raise an error. ``group`` and ``name`` are those of :class:`OperationLog`.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str) -> None:
        self._group = group
        self._store: Any = None if group is None else PrefixStore(f"stagereg/{name}", group.get_group_store())
        self._came = False

    def wait(self, step: int | None, meanwhile: Callable[[], None], limit_s: float) -> None:
        """Wait until all ranks have reached the end; call ``meanwhile`` while waiting. Called on the training thread.

        Raises: ``CheckpointError`` if another rank has begun a further step, has left with an error, or has not reached
        the end within ``limit_s`` seconds; or if the rendezvous store does not respond.
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
        """Report that this rank leaves without reaching the end, so that other ranks do not wait for it."""
        if self._group is not None and not self._came:
            self._came = True
            with contextlib.suppress(RuntimeError):  # the rendezvous store may be gone
                self._store.set(str(dist.get_rank()), _GONE)

    def look(self) -> None:
        """Report an error if this rank still trains while another rank waits at the end. On the background thread."""
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
