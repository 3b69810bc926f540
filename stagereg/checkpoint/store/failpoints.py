"""Named crash points of a save. Tests kill a process at each of these points.

The code of a save calls :func:`failpoint` after each action of the commit. Tests register an observer by :func:`watch`.
"""

from __future__ import annotations

from collections.abc import Callable

POINTS = {
    "locked": "the run has locked the directory and changed nothing else",
    "swept": "leftovers of killed runs are deleted",
    "staged": "this rank's staged copy is complete",
    "made": "the hidden directory of the save exists",
    "agreed": "all ranks have staged and know which tensors they write; no file of the save exists",
    "writing": "a file is partly written",
    "flushed": "one file is flushed to disk; its size and checksum are known",
    "written": "this rank has written all of its files",
    "marked": "all ranks have written all files; all sizes and checksums are known",
    "held": "the run has checked that it still holds the directory lock",
    "described": "the manifest is written, in the hidden directory",
    "renamed": "the checkpoint has its name; the rename may not be durable yet",
    "committed": "the rename, or the manifest in an object store, is durable: the checkpoint is complete",
    "pointed": "``latest`` points to the checkpoint",
    "hidden": "an old checkpoint has a hidden name; its files still exist",
    "named": "a step that was saved again has its plain name, next to the name with the token",
    "repointed": "``latest`` points to the plain name",
    "retained": "old checkpoints are deleted",
    "ended": "every rank knows that the save is complete",
}
"""The crash points in order, with the last event before each. Only rank 0 reaches "locked", "swept", and "marked" to
"retained"."""

TIER_POINTS = {
    "part": "a rank's part is complete in the folder of one machine",
    "sending": "half of a part's blocks are sent to another machine",
    "receiving": "half of a part's blocks have arrived from another machine, with correct checksums",
    "received": "all blocks have arrived; the part is not complete on the receiving machine yet",
    "acknowledged": "the receiving machine has confirmed the part; the sender has not recorded the confirmation",
    "copied": "the sender has recorded the confirmation",
}
"""The crash points of a save to a tier. The receiving machine reaches "receiving", "received" and "part"."""

_observer: Callable[[str], None] | None = None  # one per process: tests have no access to the save


def failpoint(name: str) -> None:
    """Call the observer, if any, with the name of a crash point in :data:`POINTS` or :data:`TIER_POINTS`.

    Any thread. Exceptions of the observer propagate.
    """
    if _observer is not None:
        _observer(name)


def watch(observer: Callable[[str], None] | None) -> Callable[[str], None] | None:
    """Set the observer of this process, which is called on the thread of the save. Return the previous observer."""
    global _observer
    before, _observer = _observer, observer
    return before
