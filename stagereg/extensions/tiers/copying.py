"""The background thread of a process that copies parts to peer machines, one part at a time.

A part is the set of files that one rank writes in one save (:mod:`.part`). The thread runs while parts wait to be
copied. If a peer machine fails or rejects a part, the thread tries another machine. Failures never stop training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stagereg.base import record
from stagereg.base.option_text import option
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.errors import CheckpointError, reason
from stagereg.extensions.tiers.folder import MachineFolder
from stagereg.extensions.tiers.part import Part
from stagereg.extensions.tiers.peer import Peer

_log = logging.getLogger(__name__)

_END_S = 2.0  # seconds to wait for an aborted transfer to return
_MANY = 5  # a warning is logged after this number of saves without a completely copied step


class _Copying(NamedTuple):
    """One part in the queue, with the other arguments of :meth:`CopyThread.submit`."""

    part: Part
    directory: str
    machines: Sequence[str]
    have: Sequence[str] | None


class CopyThread:
    """Copies the parts of one process to peer machines. The saver thread calls the methods, which do not raise.

    ``connect`` opens a connection to the machine with a given name. ``folder`` records which machines have acknowledged
    a part. ``copies`` is the number of peer copies of each part. ``copied``: whether the newest part of this rank has
    all its peer copies. True before the first part is submitted.
    """

    def __init__(self, connect: Callable[[str], Peer], folder: MachineFolder, copies: int) -> None:
        self._connect, self._folder, self._copies = connect, folder, copies
        self._changed = threading.Condition()
        self._waiting: deque[_Copying] = deque()
        self._thread: threading.Thread | None = None  # None if no part waits to be copied
        self._peers: dict[str, Peer] = {}
        self._failing: set[str] = set()
        self.copied = True
        self._closed = self._ended = False

    @property
    def busy(self) -> bool:
        """Whether the thread still has a submitted part to copy."""
        return self._thread is not None

    def submit(self, part: Part, directory: str, machines: Sequence[str], have: Sequence[str] | None = None) -> None:
        """Queue a part for copying, and return immediately.

        ``part``: a part that is complete on this machine, with its files in ``directory``. ``machines``: the candidate
        machines, the preferred ones first. ``have``: ``None`` for a new part of this rank. To replace lost copies, the
        machines that still have a copy.
        """
        copying = _Copying(part, directory, machines, have)
        with self._changed:
            if have is None:
                self.copied = not self._wanted(copying)
            if self._closed or not self._wanted(copying):
                return
            self._waiting.append(copying)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="stagereg-tier-copy", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # Python cannot start a thread while the process exits
                    self._waiting.clear()
                    _log.warning("stagereg: step %d was not copied to peer machines: %s", part.save.step, error)
                    return
                self._thread = thread

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until all submitted parts are copied or have failed. Return False on a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, seconds)

    def close(self, wait_s: float = 5.0) -> None:
        """Wait at most ``wait_s`` seconds for pending copies, then cancel the rest and stop the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._thread is None, wait_s)
            self._waiting.clear()
            self._ended = True
            for peer in self._peers.values():
                peer.close()
            self._changed.wait_for(lambda: self._thread is None, _END_S)

    def _wanted(self, copying: _Copying) -> int:
        return min(self._copies, len(copying.machines))

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    for peer in self._peers.values():
                        peer.close()
                    self._peers.clear()
                    self._thread = None
                    self._changed.notify_all()
                    return
                copying = self._waiting.popleft()
            copied = self._copy(copying)
            with self._changed:
                if copying.have is None and all(each.have is not None for each in self._waiting):
                    self.copied = copied

    def _copy(self, copying: _Copying) -> bool:
        """Copy a part to the first machines that accept the part. Return whether enough machines accepted it."""
        done: list[str] = []
        for machine in copying.machines:
            if len(done) < self._wanted(copying) and self._send(copying, machine, done):
                done.append(machine)
        return len(done) == self._wanted(copying)

    def _send(self, copying: _Copying, machine: str, done: Sequence[str]) -> bool:
        part, error = copying.part, ""
        start, began = record.now(), time.monotonic()
        try:
            self._peer(machine).put(part, copying.directory)
            failpoint("acknowledged")
            self._folder.note_copied(part, [*(copying.have or ()), *done, machine])
            failpoint("copied")
            self._failing.discard(machine)
        except Exception as why:
            error = reason(why)
            if machine not in self._failing and not self._closed:
                _log.warning("stagereg: cannot copy step %d to %s: %s", part.save.step, machine, error)
            self._failing.add(machine)
        record.emit(
            "copy",
            **{"step": part.save.step, "rank": part.rank, "to": machine, "bytes": part.nbytes},
            **{"start": start, "seconds": time.monotonic() - began, **({"error": error} if error else {})},
        )
        return not error

    def _peer(self, machine: str) -> Peer:
        with self._changed:
            if self._ended:
                raise CheckpointError("this process is shutting down")
            if machine not in self._peers:
                self._peers[machine] = self._connect(machine)
            return self._peers[machine]


class CopyLag:
    """Logs on rank 0 when the peer copies of a run fall behind its saves, and when they catch up."""

    def __init__(self) -> None:
        self._late, self._newest = 0, "no step of the local tier has all peer copies yet"

    def note_late(self, why: str) -> None:
        """Record that a save began before the previous step had all peer copies; ``why`` is the reason."""
        self._late += 1
        if self._late == _MANY:
            _log.warning(
                "stagereg: %s, and %d saves have begun since: %s. If a machine fails now, the run repeats all later "
                "steps. Check the machines without copies, or increase %s.",
                *(self._newest, self._late, why, option("tier.every")),
            )

    def note_copied(self, step: int | None) -> None:
        """Record that a save begins and that the previous step has all peer copies; ``None``: no previous step."""
        if self._late >= _MANY:
            _log.info("stagereg: the peer copies have caught up with the saves: step %s is copied.", step)
        self._late = 0
        if step is not None:
            self._newest = f"step {step} is the newest step of the local tier with all peer copies"
