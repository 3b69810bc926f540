"""The ranks that save and restore together, and the exchanges between them.

Every action that can fail on one rank alone is followed by an exchange, so that all ranks raise together, with the rank
and the reason, and none waits for another that has given up. The exchanges go over a gloo group of their own: they
never mix with the collectives of training, and one thread at a time uses the group.

A rank whose storage hangs keeps the others waiting; when it comes back, they go on together. Gloo gives up a group for
good when one operation takes too long, so the group itself has a time-out of days, and each caller sets its own limit.
A rank that dies is noticed at once, by the end of its connections.
"""

from __future__ import annotations

import copy
import datetime
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from stagereg.errors import CheckpointError

__all__ = ["RankGroup", "portable", "reason", "reasons"]

T = TypeVar("T")

_LONGEST = 1000
"""Characters of the text of one error; some print what they could not handle."""
_PATIENCE = datetime.timedelta(days=30)
"""Longer than any storage is waited for."""
_USUAL = datetime.timedelta(minutes=30)
"""What torch's own groups have."""
_SHOWN = 4
"""Ranks whose errors a message has."""


def reason(error: BaseException) -> str:
    """Return one line on an error: its type and message, or the message of an error of the project, as it is."""
    if isinstance(error, CheckpointError):
        return str(error).strip()
    try:
        text = " ".join(str(error).split("\n")).strip()
    except Exception:
        text = "(its message cannot be made)"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ... ({len(text)} characters)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def reasons(errors: Mapping[int, BaseException], alone: bool) -> str:
    """Return one line on the errors of some ranks, of many for the first ones; names them unless one is ``alone``."""
    shown = [reason(error) if alone else f"rank {rank}: {reason(error)}" for rank, error in errors.items()]
    more = len(shown) - _SHOWN
    return "; ".join(shown if more <= 0 else [*shown[:_SHOWN], f"and {more} more rank{'s' if more > 1 else ''}"])


def portable(error: BaseException) -> BaseException:
    """Return an error as it can be sent to another rank or process: itself, or a ``RuntimeError`` of its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(reason(error))
    return error


class RankGroup:
    """The ranks that save together; a process alone where ``torch.distributed`` is not initialised.

    Constructing it is collective: every rank of ``process_group`` does so, in the same order as its other groups.

    Args:
        process_group: the ranks, ``None`` for all of them.
        timeout: how long to wait for the other ranks, at least half an hour; see :attr:`without_timeout`.

    Attributes:
        group: the gloo group, or ``None`` for a process alone.
        rank: this process within the group.
        size: how many ranks there are.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, timeout: datetime.timedelta | None = None
    ) -> None:
        self.group: dist.ProcessGroup | None = None
        self._limit: datetime.timedelta | None = min(max(timeout or _USUAL, _USUAL), _PATIENCE)
        self.rank, self.size = 0, 1
        if not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_rank(process_group) < 0:
            raise CheckpointError(
                "This rank is not in the process_group given to the Checkpointer; construct it inside."
            )
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self.group = dist.new_group(
            ranks, timeout=_PATIENCE, backend="gloo", use_local_synchronization=process_group is not None
        )
        self.rank, self.size = dist.get_rank(self.group), len(ranks)

    @property
    def without_timeout(self) -> RankGroup:
        """The same ranks without a time limit, for a thread whose callers wait for it with one."""
        without_timeout = copy.copy(self)
        without_timeout._limit = None
        return without_timeout

    def check_still_all(self) -> None:
        """Raise ``CheckpointError`` if other ranks have come up since a process alone constructed this."""
        if self.group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise CheckpointError("The Checkpointer was constructed before init_process_group; construct it after.")

    def check_still_there(self, failing: str = "") -> None:
        """Raise ``CheckpointError`` if ``torch.distributed`` has ended: torch then takes each rank for one alone.

        Args:
            failing: how the message begins; empty if the caller adds that.
        """
        if self.group is not None and not dist.is_initialized():
            text = "the process group is gone; close() the Checkpointer before destroy_process_group()"
            raise CheckpointError(f"{failing}: {text}" if failing else text)

    def exchange(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order. Collective; values are pickled.

        Raises:
            CheckpointError: the other ranks have not come in time; the group is of no use any more then.
        """
        if self.group is None:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._await(dist.all_gather(sizes, torch.tensor([len(data)]), self.group, async_op=True))
        longest = max(int(size) for size in sizes)
        padded = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(data)] = data
        self._await(dist.all_gather(padded, own, self.group, async_op=True))
        return [pickle.loads(each[: int(size)].numpy().tobytes()) for each, size in zip(padded, sizes, strict=True)]

    def max_async(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Begin to find the greatest of each value among all ranks; does not wait. Collective.

        Returns:
            A function that waits for the values, which are the same on all ranks, and raises ``CheckpointError`` if the
            ranks could not exchange them.
        """
        greatest = torch.tensor(values, dtype=torch.float64)
        work = None if self.group is None else dist.all_reduce(greatest, dist.ReduceOp.MAX, self.group, async_op=True)

        def wait() -> list[float]:
            try:
                if work is not None:
                    work.wait(self._limit or _USUAL)
            except RuntimeError as error:
                raise CheckpointError(f"The ranks could not agree when to save: {reason(error)}") from error
            found: list[float] = greatest.tolist()
            return found

        return wait

    def _await(self, work: dist.Work | None) -> None:
        assert work is not None
        try:
            work.wait() if self._limit is None else work.wait(self._limit)
        except RuntimeError as error:
            if self._limit is None or "timed out" not in str(error).lower():
                raise
            raise CheckpointError(
                f"Rank {self.rank} has waited {self._limit} for the other ranks: one of them hangs."
            ) from error

    def run_on_all(self, failing: str, act: Callable[[], T]) -> list[T]:
        """Let every rank act, then raise on all of them if any of them failed. Collective.

        Args:
            failing: how the message begins, such as ``"step 100 was not saved"``.
            act: what this rank does; must not be collective itself.

        Returns:
            What ``act`` returned on each rank, in rank order.

        Raises:
            CheckpointError: on every rank, naming the ranks that failed, chained to the error of this rank if it is one
                of them, else to the first one's.
            BaseException: on the rank where ``act`` raised one that is no ``Exception``; the others raise for it.
        """
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = act()
        except BaseException as error:  # the others wait, whatever it is
            failure = error
        self.check_still_there(failing)
        posts = self.exchange((value, None if failure is None else portable(failure)))
        errors = {rank: error for rank, (_, error) in enumerate(posts) if error is not None}
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if errors:
            cause = next(iter(errors.values())) if failure is None else failure
            raise CheckpointError(f"{failing}: {reasons(errors, alone=self.group is None)}") from cause
        return [value for value, _ in posts]  # type: ignore[misc]
