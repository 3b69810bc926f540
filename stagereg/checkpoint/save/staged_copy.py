"""A request of the training loop, and the copy of the state that is written for it, once for each target."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import stagereg.base.record as record
from stagereg.checkpoint.ranks.merging import RankEntries
from stagereg.checkpoint.save.structure import Outline
from stagereg.checkpoint.targets import Part, ReplicaSave
from stagereg.errors import CheckpointError, WrittenWhileSavedError, WrittenWhileStagedError
from stagereg.stagers.async_stager import UnconfirmedCopy


@dataclass(frozen=True)
class Request:
    """What the training loop of this rank has asked for, or has missed."""

    step: int
    targets: tuple[int, ...] = (0,)  # their numbers, in order; the first one prepares the copy for all of them
    lasts: bool = True  # a target of these is required
    called: float = field(default_factory=lambda: record.now())  # when, as ``record.now``
    missed: bool = False  # other ranks have called save, and this one has not
    follows: bool = False  # this rank has left its loop, and saves since others do
    taken: Mapping[str, int] = field(default_factory=dict)  # steps that each optimizer and schedule has taken
    number: int = 0  # among those of this run that are made again if they are discarded
    again: bool = False  # in place of a save that was discarded, since the state was written while it was copied

    @property
    def tags(self) -> dict[str, bool]:
        """What events have of where it goes: nothing if a target is required."""
        return {} if self.lasts else {"tier": True}


@dataclass(frozen=True)
class PreparedCopy:
    """A copy that is taken apart: what this rank writes of it, as all ranks have agreed."""

    entries: dict[str, Any]  # what this rank writes; empty once all have written
    own: RankEntries  # what this rank has of each entry
    parts: Mapping[str, Part | None]  # where tensors that are shards of a whole lie in it


class StagedCopy:
    """The copy of the state, which all targets of a request read, and its readers.

    Attributes:
        prepared: the copy taken apart. The thread of the first target sets the result when all ranks have agreed on it
            and that target has got its save, or the error that kept a rank from staging.
    """

    def __init__(self, request: Request, replicas: ReplicaSave) -> None:
        # Used by the training thread before the request is submitted, then by the thread of the first target.
        self.replicas = replicas
        self.prepared: Future[PreparedCopy] = Future()
        self.nbytes: int | None = None  # of its tensor data; written by the thread of the first target
        self._step, self._tags = request.step, request.tags
        # Written by the training thread, before the request is submitted.
        self.stager = ""  # its class
        self.outline: Outline = None  # of the state that it was given; ``None`` if the copy is not compared with that
        self.inspect: Callable[[dict[str, Any]], object] = lambda copy: None  # called with the copy when it is complete
        self.began = 0.0  # when the stager was asked to copy
        self._release: Callable[[dict[str, Any]], None] = lambda copy: None  # called when all have written the copy
        self._future: Future[dict[str, Any]] | None = None  # of the stager
        # Written by the training thread, before it sets ``settled``: why this rank could not stage, which its loop has
        # raised. Text, as the loop still has the error itself.
        self.failure: str | None = None
        self.settled = threading.Event()
        self._completed = 0.0  # when the copy was complete, 0 while unknown: written by the first thread to find out
        # Written by the training thread if the stager has copied at once, otherwise by the thread of the first target.
        self._staged: dict[str, Any] = {}
        self._readers, self._lock = len(request.targets), threading.Lock()  # readers: written under the lock

    # -- on the training thread

    def begin(
        self,
        stager: str,
        outline: Outline,
        inspect: Callable[[dict[str, Any]], object] | None,
        release: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        """The stager is about to copy. ``release`` is called with the copy when all have written it."""
        self.stager, self.outline, self.inspect = stager, outline, inspect or self.inspect
        self._release = release or self._release
        self.began = record.now()

    def put(self, staged: dict[str, Any] | Future[dict[str, Any]]) -> None:
        """Take what the stager has returned."""
        if isinstance(staged, Future):
            self._future = staged
        else:
            self._staged = staged

    def fail(self, why: str) -> None:
        """This rank could not stage."""
        self.failure = why

    # -- on any thread

    def complete(self) -> None:
        """Note that the copy is complete now, unless that is known already."""
        self._completed = self._completed or record.now()

    # -- on threads of targets

    def get(self) -> dict[str, Any]:
        """Return the copy, once it exists. On the thread of the first target. Raises: what kept this rank from it."""
        self._expect_staged()
        if self._future is not None and not self._staged:
            future = self._future
            with _as_save_error():
                self._staged = future.copied() if isinstance(future, UnconfirmedCopy) else future.result()
            self.complete()
        return self._staged

    def confirmation(self) -> Callable[[], None]:
        """Return what waits until nothing can have written the state while it was copied; to be got before leaving.

        It raises ``WrittenWhileSavedError`` if something has written the state: the copy must not be committed.
        """
        future = self._future

        def confirm() -> None:
            if future is not None:
                with _as_save_error():
                    future.result()

        return confirm

    def leave(self) -> None:
        """A target has written the copy, or never will; after the last one the next ``stage`` may use its memory."""
        with self._lock:
            self._readers -= 1
            if self._readers > 0:
                return
        if self.prepared.done() and self.prepared.exception() is None:
            self.prepared.result().entries.clear()
        staged, self._staged, self._future = self._staged, {}, None
        if staged:
            self._release(staged)

    def expect_good(self) -> None:
        """Wait until the training loop is done with the copy, and raise what it has proved bad with."""
        self.settled.wait()
        self._expect_staged()

    def record(self) -> None:
        """Record the copy, if there has been a complete one. Once, on the thread of the last target."""
        if self._completed and self.nbytes is not None:
            seconds = self._completed - self.began
            record.emit("stage", step=self._step, start=self.began, seconds=seconds, bytes=self.nbytes, **self._tags)

    def _expect_staged(self) -> None:
        if self.failure is not None:
            raise CheckpointError(self.failure)


@contextlib.contextmanager
def _as_save_error() -> Iterator[None]:
    try:
        yield
    except WrittenWhileStagedError as error:
        raise WrittenWhileSavedError(
            f"{'.'.join(map(str, error.path))!r} was written, freed or resized while it was copied, by something that "
            "is neither a torch optimizer nor load_state_dict"
        ) from error
