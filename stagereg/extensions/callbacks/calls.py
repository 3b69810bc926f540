"""Call the ``on_commit`` components of a checkpointer for each complete checkpoint, on rank 0.

Each component has its own thread, so neither training nor saves wait for it (docs/guarantees.md). Each call runs on a
separate thread, since Python cannot end a thread that hangs. All failures, including a ``SystemExit``, are logged and
counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from typing import Any

import stagereg.base.record as record
import stagereg.base.shutdown as shutdown
from stagereg.base.crash_report import summarize_exception
from stagereg.base.option_text import option
from stagereg.checkpoint.extension import CheckpointExtension, Saves, Setup
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.store.located import path_of
from stagereg.checkpoint.store.open_store import path_or_url
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint, OnCommit, components

_log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.05
_DELETED = (
    "was not called, since the checkpoint was already deleted: the component is slower than the saves. Retain more "
    "checkpoints ({keep}), or save less often"
)


class CommitCalls(CheckpointExtension):
    """Calls the ``on_commit`` components of a checkpointer. Only rank 0 calls components."""

    name = "callbacks"

    def __init__(self, given: Any) -> None:
        self._components = components(given)
        self._callers: list[_Caller] = []
        self._process, self._leaving = os.getpid(), False

    def start(self, setup: Setup, saves: Saves) -> None:
        if setup.ranks.rank == 0 and self._components:
            self._saves, self._setup, self.limit_s = saves, setup, setup.timeout.total_seconds()
            self._callers = [_Caller(name, each, setup, saves) for name, each in self._components.items()]
            shutdown.wait_for(self)

    def committed(self, step: int, where: str, checkpoint: Checkpoint | None) -> None:
        """Queue one call per component for a checkpoint. Returns immediately."""
        if self._leaving and self._callers:
            _log.warning("stagereg: on_commit is not called for step %d: the run is preempted.", step)
            return
        for caller in self._callers if checkpoint is not None else ():
            caller.add(checkpoint)

    def leaving(self) -> None:
        """Start no more calls, and do not wait for running calls, since the run is preempted."""
        self._leaving = True
        for caller in self._callers:
            caller.abort("the run is preempted")

    def finish(self) -> bool:
        """Wait for the last save and all calls, within the timeout. Return False if preempted during a call."""
        if os.getpid() != self._process or not self._callers:
            return True
        with contextlib.suppress(ReferenceError):  # the program has deleted the checkpointer
            self._saves.finish()
        until = time.monotonic() + self.limit_s
        while any(caller.busy for caller in self._callers):
            if time.monotonic() > until or self._setup.is_urged():
                for caller in self._callers:
                    caller.abort("the run ends")
            time.sleep(_POLL_INTERVAL_S)
        return not (self._leaving and any(caller.calling for caller in self._callers))

    def close(self, in_time: bool) -> None:
        self.finish()
        for caller in self._callers:
            caller.add(None)


class _Caller:
    def __init__(self, name: str, component: OnCommit, setup: Setup, saves: Saves) -> None:
        self.limit_s = setup.timeout.total_seconds()  # the timeout of a call
        self._stopped = ""  # reason why no further call starts
        self._name, self._component = name, component
        self._store, self._saves, self._stats = setup.store, saves, saves.stats
        self._queue: queue.SimpleQueue[Checkpoint | None] = queue.SimpleQueue()
        self._added = self._done = 0
        self._thread = threading.Thread(target=self._work, name=f"stagereg-on-commit-{name}", daemon=True)
        self._thread.start()  # started here, since an exiting process cannot start threads
        self._call: threading.Thread | None = None
        self._called_for = -1  # step of the last call

    @property
    def busy(self) -> bool:
        """Whether a call is running or queued, and has not been aborted."""
        return self._done < self._added and not self._stopped

    @property
    def calling(self) -> bool:
        """Whether a call is still running, including an aborted call."""
        return self._call is not None and self._call.is_alive()

    def add(self, checkpoint: Checkpoint | None) -> None:
        """Queue a call of the component for a checkpoint. ``None`` ends the thread after all queued calls."""
        if checkpoint is not None:
            self._added += 1
        self._queue.put(checkpoint)

    def abort(self, why: str) -> None:
        """Start no further call, and do not wait for a running call."""
        if self.busy:
            self._fail(self._called_for, f"was aborted, since {why}: the call has not returned, or has not begun")
        self._stopped = why

    # -- on the component's thread

    def _work(self) -> None:
        while (checkpoint := self._queue.get()) is not None:
            try:
                self._take(checkpoint)
            except Exception as error:  # for example an error of the checkpoint storage
                self._fail(checkpoint.manifest.step, f"was not called: {error}")
            self._done += 1

    def _take(self, checkpoint: Checkpoint) -> None:
        step = checkpoint.manifest.step
        if self._stopped:
            return
        if self.calling:
            self._fail(step, f"was not called: its call for step {self._called_for} has not returned")
            return
        failures: list[BaseException | str] = []
        self._called_for, began = step, record.now()
        self._call = threading.Thread(target=self._run, args=(checkpoint, failures), daemon=True)
        try:
            self._call.start()
            self._call.join(self.limit_s)
        except RuntimeError:  # Python 3.12 cannot start threads while a process exits: call it here, without a timeout
            self._run(checkpoint, failures)
        failure = failures[0] if failures else None
        if isinstance(failure, str):  # the component was not called
            self._fail(step, failure)
            return
        self._stats.on_commit_calls += 1
        record.emit("on_commit", step=step, name=self._name, start=began, seconds=record.now() - began)
        if self.calling:
            limit = f"{self.limit_s:g} s ({option('checkpoint.failure.timeout')})"
            self._fail(step, f"has not returned for {limit}, and is not called again before it returns")
        elif failure is not None:
            self._fail(step, f"failed: {summarize_exception(failure, __file__)}", failure)
        if path_of(self._store, checkpoint) is None:
            newest = ""
            with contextlib.suppress(ReferenceError):
                valid = self._store.checkpoints()[0]
                if self._saves.newest == step:
                    self._saves.note_newest(valid[0].manifest.step if valid else None)
                newest = self._saves.describe_newest()
            self._fail(step, f"deleted or changed {checkpoint.path}, but must not change checkpoints. {newest}")

    def _run(self, checkpoint: Checkpoint, failures: list[BaseException | str]) -> None:
        store, manifest = self._store, checkpoint.manifest
        try:
            while (path := path_of(store, checkpoint)) is not None:
                with store.readers.read_lease(path):
                    if path_of(store, checkpoint) == path:  # otherwise the checkpoint was just renamed
                        given = CommittedCheckpoint(manifest.step, path_or_url(path), manifest, manifest.metrics)
                        self._component.committed(given)
                        return
            failures.append(_DELETED.format(keep=option("checkpoint.keep")))
        except BaseException as error:  # SystemExit too: it would end only this thread, without a message
            failures.append(error)

    def _fail(self, step: int, what: str, error: BaseException | None = None) -> None:
        self._stats.on_commit_failures += 1
        _log.error("stagereg: on_commit %s %s (step %d). Training continues.", self._name, what, step)
        _log.debug("A call of on_commit failed.", exc_info=error)
