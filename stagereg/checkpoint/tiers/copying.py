"""The thread of a process that copies parts to other machines, one after the other, beside training.

It is there while there is something to copy. A machine that fails or refuses is passed over for the next candidate; too
few copies are a warning and an event, and never stop training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stagereg import record
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.tiers.folder import MachineFolder
from stagereg.checkpoint.tiers.part import Part
from stagereg.checkpoint.tiers.peer import Peer
from stagereg.errors import CheckpointError, reason

_log = logging.getLogger(__name__)

_END_S = 2.0  # that a transfer takes to notice that it was ended


class _Copying(NamedTuple):
    """What is to be copied, and to which machines; those in ``have`` have it already."""

    part: Part
    directory: str
    machines: tuple[str, ...]
    have: tuple[str, ...]
    again: bool


class CopyThread:
    """Makes the copies of one process. Its methods are for the thread that saves, and raise nothing.

    ``connect`` takes the name of a machine; ``folder`` notes which machines have acknowledged a part, and ``copies`` is
    how many others are to have each.

    Attributes:
        copied: whether the last own part has as many copies as it should, or as there are machines, or is none.
    """

    def __init__(self, connect: Callable[[str], Peer], folder: MachineFolder, copies: int) -> None:
        self._connect, self._folder, self._copies = connect, folder, copies
        self._changed = threading.Condition()
        self._waiting: deque[_Copying] = deque()
        self._thread: threading.Thread | None = None  # while there is something to do
        self._peers: dict[str, Peer] = {}
        self._failing: set[str] = set()
        self.copied = True
        self._closed = self._ended = False

    @property
    def busy(self) -> bool:
        """Whether something that was submitted has not ended, well or badly."""
        return self._thread is not None

    def submit(
        self, part: Part, directory: str, machines: Sequence[str], first: bool = False, have: Sequence[str] = ()
    ) -> None:
        """Have a part copied; does not wait.

        Args:
            part: which; complete on this machine, with its files in ``directory``.
            machines: where it may go, the best first; as many as there should be copies, if they all work.
            first: whether it is a copy that was lost, which is made before all others; else it is an own part.
            have: the machines that have a copy already, not counted.
        """
        copying = _Copying(part, directory, tuple(machines), tuple(have), first)
        with self._changed:
            if not first:
                self.copied = not self._wanted(copying)
            if self._closed or not self._wanted(copying):
                return
            places = sum(each.again for each in self._waiting) if first else len(self._waiting)
            self._waiting.insert(places, copying)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="stagereg-tier-copy", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # while a process ends no thread can be started
                    self._waiting.clear()
                    _log.warning("stagereg: step %d is not copied: %s", part.save.step, error)
                    return
                self._thread = thread

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is left to copy, no longer than that; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, seconds)

    def close(self, wait_s: float = 5.0) -> None:
        """End: what was submitted has so long to be copied, then it is given up. Twice is harmless."""
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
                # A later own part, if there is one, is still waiting, and says what is copied.
                if not copying.again and all(each.again for each in self._waiting):
                    self.copied = copied

    def _copy(self, copying: _Copying) -> bool:
        """Return whether there are as many copies as there should be."""
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
            self._folder.note_copied(part, [*copying.have, *done, machine])
            failpoint("copied")
            self._failing.discard(machine)
        except Exception as why:
            error = reason(why)
            if machine not in self._failing and not self._closed:
                _log.warning("stagereg: %s has no copy of step %d: %s", machine, part.save.step, error)
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
                raise CheckpointError("the run has ended")
            if machine not in self._peers:
                self._peers[machine] = self._connect(machine)
            return self._peers[machine]
