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

from stagereg.base import record
from stagereg.base.option_text import option
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.errors import CheckpointError, reason
from stagereg.extensions.tiers.folder import MachineFolder
from stagereg.extensions.tiers.part import Part
from stagereg.extensions.tiers.peer import Peer

_log = logging.getLogger(__name__)

_END_S = 2.0  # that a transfer takes to notice that it was ended
_MANY = 5  # saves


class _Copying(NamedTuple):
    """The arguments of :meth:`CopyThread.submit`."""

    part: Part
    directory: str
    machines: Sequence[str]
    have: Sequence[str] | None


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

    def submit(self, part: Part, directory: str, machines: Sequence[str], have: Sequence[str] | None = None) -> None:
        """Have a part copied; does not wait.

        Args:
            part: which; complete on this machine, with its files in ``directory``.
            machines: where it may go, the best first; as many as there should be copies, if they all work.
            have: if copies of it were lost, the machines that still have one; ``None`` for an own part that is new.
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
                if copying.have is None and all(each.have is not None for each in self._waiting):
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
            self._folder.note_copied(part, [*(copying.have or ()), *done, machine])
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


class CopyLag:
    """Logs on rank 0 if the copies of a run do not keep up with its saves, and if they do again."""

    def __init__(self) -> None:
        self._late, self._newest = 0, "no step of the tier is copied yet"

    def note_late(self, why: str) -> None:
        """Another save begins, and the previous one is not copied, or none can begin, for this reason."""
        self._late += 1
        if self._late == _MANY:
            _log.warning(
                "stagereg: %s, and %d saves have begun since: %s. A machine that is lost now costs all steps since. "
                "Look after the machines that have no copy, or raise %s.",
                *(self._newest, self._late, why, option("tier.every")),
            )

    def note_copied(self, step: int | None) -> None:
        """Another save begins, and this step is copied as often as it should be; ``None`` for the first save."""
        if self._late >= _MANY:
            _log.info("stagereg: the copies of the tier keep up again: step %s is copied.", step)
        self._late = 0
        if step is not None:
            self._newest = f"step {step} is the newest that is copied in the tier"
