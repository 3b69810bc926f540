"""The named moments of a save, for tests that end a process there.

Each module that does a step of the commit calls :func:`failpoint` right after it; a test sets an observer by
:func:`watch`.
"""

from __future__ import annotations

from collections.abc import Callable

POINTS = {
    "locked": "the run holds the directory, and nothing in it has been touched",
    "swept": "what dead runs had left in the directory is gone",
    "staged": "this rank's copy is complete",
    "made": "the hidden directory of the save is there",
    "agreed": "all ranks have staged, and each knows what it writes; no file of the save is there",
    "writing": "a file has been written in part",
    "flushed": "one file is on the disk, and its size and checksum are known",
    "written": "this rank has written all of its files",
    "marked": "all ranks have written theirs, and size and checksum of every file are known",
    "held": "the run has made sure that it still holds the directory",
    "described": "the manifest lies beside the files, under the hidden name",
    "renamed": "the checkpoint has its name, which may not be on the disk yet",
    "committed": "the name, or the manifest in a remote directory, is durable: the checkpoint is complete",
    "pointed": "``latest`` points to it",
    "hidden": "an old checkpoint is none any more, and its files are still there",
    "named": "a step that was saved again lies under its plain name too, beside the one with a token",
    "repointed": "``latest`` points to the plain name",
    "retained": "the old checkpoints are deleted",
    "ended": "every rank knows that the save is complete",
}
"""What has just happened, in the order of a save; "locked", "swept", and "marked" to "retained" on rank 0 alone."""

TIER_POINTS = {
    "part": "the part of a rank is complete in a machine's folder",
    "sending": "half of a part's blocks have left for another machine",
    "receiving": "half of a part's blocks have come from another machine, and are right",
    "received": "all of them have, and the part is not complete here",
    "acknowledged": "the other machine says that it has the part, which is not noted here",
    "copied": "it is noted here",
}
"""The same of a save into a tier; "receiving", "received" and "part" on the machine that gets a copy."""

_observer: Callable[[str], None] | None = None  # of this process, since a test has no object of it


def failpoint(name: str) -> None:
    """Report the moment ``name``, one of :data:`POINTS` or :data:`TIER_POINTS`, to the observer.

    Any thread; passes on what that raises.
    """
    if _observer is not None:
        _observer(name)


def watch(observer: Callable[[str], None] | None) -> Callable[[str], None] | None:
    """Have ``observer`` called with each moment of this process, where it comes; return the one there was before."""
    global _observer
    before, _observer = _observer, observer
    return before
