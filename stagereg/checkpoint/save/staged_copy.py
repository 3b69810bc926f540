"""A request for a save, the staged copy of the state, and the write of this copy to each target of the request."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import stagereg.base.record as record
from stagereg.checkpoint.ranks.merging import RankEntries
from stagereg.checkpoint.save.structure import Outline
from stagereg.checkpoint.targets import ReplicaSave, SaveTarget, Shards
from stagereg.errors import CheckpointError, WrittenWhileSavedError, WrittenWhileStagedError
from stagereg.stagers.async_stager import UnconfirmedCopy

_TakesCopy: TypeAlias = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Request:
    """A save that this rank's training loop has requested, or that only the other ranks have requested (``missed``)."""

    step: int
    targets: tuple[int, ...] = (0,)  # numbers of the targets, in order; the first one prepares the copy for all
    lasts: bool = True  # whether one of these targets is required
    called: float = field(default_factory=lambda: record.now())  # time of the call, as ``record.now``
    missed: bool = False  # other ranks have called save, and this rank has not
    follows: bool = False  # this rank has left its loop, and saves because other ranks save
    taken: Mapping[str, int] = field(default_factory=dict)  # steps that each optimizer and schedule has taken
    number: int = 0  # number of the save in this run; only saves to a required target count
    again: bool = False  # this save replaces a save that was discarded because the state changed during the copy

    @property
    def tags(self) -> dict[str, bool]:
        """The additional fields in the recorded events of this save; empty if one of the targets is required."""
        return {} if self.lasts else {"tier": True}


class StagedCopy:
    """The staged copy of the state, which all targets of a request read."""

    def __init__(self, request: Request, replicas: ReplicaSave) -> None:
        # Used by the training thread before the request is submitted, then by the thread of the first target.
        self.replicas = replicas
        # The entries that this rank writes (empty once all targets have written), and its values of all entries. Set
        # by the thread of the first target after its own save; or the error that prevented a rank from staging.
        self.prepared: Future[tuple[Shards, RankEntries]] = Future()
        self.nbytes: int | None = None  # bytes of tensor data; written by the thread of the first target
        self._step, self._tags = request.step, request.tags
        # Written by the training thread, before the request is submitted.
        self.stager = ""  # name of the stager's class
        self.outline: Outline = None  # outline of the stager's input; ``None`` if the copy is not compared with it
        self.inspect: _TakesCopy = lambda copy: None  # called with the complete copy
        self.began = 0.0  # when the stager was called
        self._release: _TakesCopy = lambda copy: None  # called when all targets have written
        self._future: Future[dict[str, Any]] | None = None  # the future that the stager has returned
        # Written by the training thread before it sets ``settled``: why this rank could not stage. A string, because
        # the training loop raises the error itself.
        self.failure: str | None = None
        self.settled = threading.Event()
        self._completed = 0.0  # when the copy was complete, 0 if not known; written by the thread that first gets it
        # Written by the training thread after a synchronous copy, otherwise by the thread of the first target.
        self._staged: dict[str, Any] = {}
        self._readers, self._lock = len(request.targets), threading.Lock()  # readers: written under the lock

    # -- on the training thread

    def begin(self, stager: str, outline: Outline, inspect: _TakesCopy, release: _TakesCopy | None) -> None:
        """Record that the stager begins to copy. ``release`` gets the copy when all targets have written the copy."""
        self.stager, self.outline, self.inspect = stager, outline, inspect
        self._release = release or self._release
        self.began = record.now()

    def put(self, staged: dict[str, Any] | Future[dict[str, Any]]) -> None:
        """Store the result of the stager."""
        if isinstance(staged, Future):
            self._future = staged
        else:
            self._staged = staged

    def fail(self, why: str) -> None:
        """Record that this rank could not stage."""
        self.failure = why

    # -- on any thread

    def complete(self) -> None:
        """Record the time at which the copy is complete. Only the first call has an effect."""
        self._completed = self._completed or record.now()

    # -- on threads of targets

    def get(self) -> dict[str, Any]:
        """Wait for the copy and return it. Called on the first target's thread. Raises: the error of the stager."""
        self._expect_staged()
        if self._future is not None and not self._staged:
            future = self._future
            self._staged = _result_of(future.copied if isinstance(future, UnconfirmedCopy) else future.result)
            self.complete()
        return self._staged

    def confirmation(self) -> Callable[[], object]:
        """Return a function that waits for the proof that the state did not change during the copy.

        It raises ``WrittenWhileSavedError`` if the state has changed. Call this method before :meth:`leave`.
        """
        return partial(_result_of, self._future.result) if self._future is not None else lambda: None

    def leave(self) -> None:
        """Record that a target has finished with the copy. After the last target, the stager may reuse the memory."""
        with self._lock:
            self._readers -= 1
            if self._readers > 0:
                return
        if self.prepared.done() and self.prepared.exception() is None:
            self.prepared.result()[0].entries.clear()
        staged, self._staged, self._future = self._staged, {}, None
        if staged:
            self._release(staged)

    def expect_complete(self) -> None:
        """Wait until the training loop has finished staging. Raises: ``CheckpointError`` if staging failed."""
        self.settled.wait()
        self._expect_staged()

    def record(self) -> None:
        """Record the event ``stage`` if the copy is complete. Called once, on the thread of the last target."""
        if self._completed and self.nbytes is not None:
            seconds = self._completed - self.began
            record.emit("stage", step=self._step, start=self.began, seconds=seconds, bytes=self.nbytes, **self._tags)

    def _expect_staged(self) -> None:
        if self.failure is not None:
            raise CheckpointError(self.failure)


class Write:
    """The write of one copy to one target, which has its own thread."""

    def __init__(
        self, request: Request, copy: StagedCopy, target: SaveTarget, number: int = 0, until: float = math.inf
    ) -> None:
        self.request, self.copy, self.target = request, copy, target
        self.is_first = number == request.targets[0]  # whether this write prepares the copy for all targets
        # Whether this write reports why the copy could not be prepared, and counts its bytes.
        self.is_last = number == request.targets[-1]
        # Written by the thread of the target.
        self.at = "waiting for its turn"  # the current action of this rank, for messages
        self.agreed = False  # whether all ranks have staged and have got their plans
        self.over = threading.Event()  # set when the write has ended or failed
        self._reads = True
        # Written under the lock of the thread: the deadline (``time.monotonic``), infinite until the write begins, and
        # whether a timeout was reported.
        self.until = until
        self.late = False
        self.abandoned = False  # whether the write must not commit; set by the training thread when it stops saving

    def leave_copy(self) -> None:
        """Stop reading the copy. Idempotent."""
        if self._reads:
            self._reads = False
            self.copy.leave()


def _result_of(wait: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return wait()
    except WrittenWhileStagedError as error:
        raise WrittenWhileSavedError(
            f"{'.'.join(map(str, error.path))!r} was written, freed or resized while it was copied, by code that is "
            "neither a torch optimizer nor load_state_dict"
        ) from error
