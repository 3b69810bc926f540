"""What ranks do together with all others, in a numbered list: each rank that does something puts it there first.

So a rank that has left its loop, and shadows the steps of the others, can do the same at the same step. And a rank that
has passed over something is found, in place of the others' waiting for it: all ranks run the same collectives, and
enter the same joins, in the same order, so one that has come to more of them than another had when it made an entry
will never come to that entry. The end of a run is the last of these: :class:`ShutdownBarrier`.
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
_LONG_S = 5.0  # after which a rank that waits for others says so
_GONE = b"gone"  # of a rank that has left by an error
_ADVICE = (
    "If their inputs are uneven, put the loop into a join: `with join:` and `for batch in join.iterate(loader)`. All "
    "ranks take the same steps, and leave the Checkpointer's `with` together."
)


class OperationLog:
    """This rank's end of the list, in the store of the process group.

    Args:
        group: of the ranks that train together; ``None`` for a process alone, where nothing is listed.
        name: the same on all ranks, and of nothing else in the job.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str) -> None:
        self._group = group
        self._store: Any = None if group is None else PrefixStore(f"stagereg/{name}", group.get_group_store())
        self._lock = threading.Lock()
        self._number = 0  # of entries that this rank has met
        self._suspected = 0

    def post(self, what: str = "") -> None:
        """This rank does ``what`` now; all others are to. On the training thread."""
        with self._lock:
            self._number += 1
            if self._store is not None:
                self._store.set(str(self._number), f"{position_in(self._group)} {what}")

    def take_next(self) -> str | None:
        """Return the next entry that this rank has not met, as it has left its loop, and count it as met."""
        with self._lock:
            entry = self._next()
            if entry is None:
                return None
            self._number += 1
            return entry[1]

    def take_missed(self) -> str | None:
        """Return an entry that this rank has passed over, and count it as met. On any thread, about once a second."""
        with self._lock:
            entry = self._next()
            if entry is None or entry[0] >= position_in(self._group):
                return None
            if self._suspected <= self._number:  # it may be about to do it: look once more
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
    """Return how many collectives this rank has run, and how many joins it has entered."""
    return 0 if group is None else collectives_of(group) + resources_of(group).counts["join"]


class ShutdownBarrier:
    """The end of a run, to which all ranks come: each says so, and waits for the others, so they save the last step.

    A rank that waits here takes part in nothing that others still train with. So one that has come to more collectives
    than the first to end had run will never come to the end with it: it says so, and those that wait raise.

    Args:
        group: of the ranks that train together; ``None`` for a process alone.
        name: the same on all ranks, and of nothing else in the job.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str) -> None:
        self._group = group
        self._store: Any = None if group is None else PrefixStore(f"stagereg/{name}", group.get_group_store())
        self._came = False

    def wait(self, step: int | None, meanwhile: Callable[[], None], limit_s: float) -> None:
        """Wait until all ranks have come, and call ``meanwhile`` as long as that takes. On the training thread.

        Raises:
            CheckpointError: a rank has gone on to steps that this one does not take, has left by an error, or has not
                come within ``limit_s``; or the store is gone.
        """
        if self._group is None:
            return
        self._came = True
        try:
            self._wait(self._group, step, meanwhile, limit_s)
        except dist.DistError as error:
            raise CheckpointError(
                f"The last step was not saved: the job's store does not answer ({error}). The process that has it, "
                "rank 0 or the launcher, has ended: look at the end of its output."
            ) from error

    def _wait(self, group: dist.ProcessGroup, step: int | None, meanwhile: Callable[[], None], limit_s: float) -> None:
        rank, ranks = dist.get_rank(group), [str(each) for each in range(group.size())]
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
                missing = name_ranks([each for each in range(len(ranks)) if each not in came])
                text = f"{name_ranks(came)} came to the end{_text(step)}, {missing} did not. {_ADVICE}"
                if waited > limit_s:
                    raise RankMismatchError(text)
                if rank == came[0]:
                    _log.warning("stagereg: %s", text)
                warned = True
        meanwhile()
        gone = [int(each) for each, text in zip(ranks, self._store.multi_get(ranks), strict=True) if text == _GONE]
        if gone:
            raise CheckpointError(f"The last step was not saved: {name_ranks(gone)} left with an error.")

    def leave(self) -> None:
        """This rank does not come, unless it has come; no other one is to wait for it."""
        if self._group is not None and not self._came:
            self._came = True
            with contextlib.suppress(RuntimeError):  # the store is gone
                self._store.set(str(dist.get_rank(self._group)), _GONE)

    def look(self) -> None:
        """Say that this rank has gone on where another has ended, if so. On the background thread."""
        here = position_in(self._group)
        if self._group is None or self._came or not self._store.check(["first"]):
            return
        rank, there, ended = self._store.get("first").decode().split(" ", 2)
        if here > int(there):
            own = name_ranks([dist.get_rank(self._group)])
            text = f"rank {rank} came to the end{ended}, {own} went on with another step. {_ADVICE}"
            self._store.compare_set("beyond", "", text)


def _text(step: int | None) -> str:
    return "" if step is None else f" after step {step}"
