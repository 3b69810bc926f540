"""The end of a checkpointer: what is logged of what there is to go on from, and what is refused afterwards."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from stagereg.checkpoint.hold import DirectoryLock
from stagereg.checkpoint.save.save_thread import SaveThread
from stagereg.checkpoint.save.saver import Saver
from stagereg.errors import CheckpointError, ClosedError
from stagereg.launch.rank import command_to_go_on

_log = logging.getLogger(__name__)

_NO_STEP = (
    "stagereg: NO STEP WAS TAKEN: this run resumed from step %d, in %s, and had none left. To train anew, give it "
    "another checkpoint.dir, or checkpoint.resume=never; to train on, more steps."
)


def describe_end(background: SaveThread, dir: Path | str, finished: bool, skipped: str = "") -> str:
    """Return which checkpoint there is to resume from, and how; ``skipped``, if the next start skips it."""
    newest = background.describe_newest()
    if skipped:
        return f"{newest} {skipped}"
    if background.newest is None and (background.ahead is None or background.ahead.newest is None):
        return newest
    command = command_to_go_on(str(dir))
    if command == "the same command":
        return f"{newest} The same command goes on from there{', if it has more steps to take' * finished}."
    return f"{newest} The same command would start anew, in a directory of its own; to go on, run {command}."


def expect_usable(closed: bool, pid: int) -> None:
    """Raise ``ClosedError`` for a checkpointer that is closed, ``CheckpointError`` for one of another process."""
    if closed:
        raise ClosedError("This checkpointer is closed; construct another one.")
    if os.getpid() != pid:
        raise CheckpointError(
            f"This checkpointer is of process {pid}; a forked child, such as a worker of a DataLoader, can neither "
            "save nor restore through it."
        )


def log_end(
    background: SaveThread, dir: Path | str, finished: bool, stayed: tuple[int, Path | str] | None, skipped: str
) -> None:
    """Log how to resume, on a rank that has the lock.

    ``stayed`` is the step that the run resumed from, and its path, if the run has come no further; ``skipped`` as of
    :func:`describe_end`.
    """
    if finished and stayed is not None:
        _log.warning(_NO_STEP, *stayed)
    else:
        level = logging.WARNING if skipped else logging.INFO
        _log.log(level, "stagereg: %s", describe_end(background, dir, finished, skipped))


def warn_of_unclosed(dir: Path | str, saver: Saver, hold: DirectoryLock, pid: int) -> None:
    """Log that a program that saves has dropped a checkpointer, or has ended by itself, without ``close()``."""
    own = hold.acquired and os.getpid() == pid  # and not a forked child's
    if own and not saver.leaving and getattr(sys, "last_value", None) is None:  # which has what ended the program
        _log.warning(
            "stagereg: the Checkpointer of %s was not closed: its last step is saved only if that was one to save. Put "
            "the loop into `with Checkpointer(...) as checkpointer:`, whose end saves it; or call close() at the end.",
            dir,
        )
