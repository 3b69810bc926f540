"""The end of a checkpointer: the log of what a next run resumes from, and the refusals afterwards."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from stagereg.base.command import command_to_resume
from stagereg.base.option_text import option
from stagereg.checkpoint.hold import DirectoryLock
from stagereg.checkpoint.save.save_threads import SaveThreads
from stagereg.checkpoint.save.saver import Saver
from stagereg.errors import CheckpointError, ClosedError

_log = logging.getLogger(__name__)

_NO_STEP = (
    "stagereg: NO STEP WAS TAKEN: this run resumed from step %d, in %s, and had none left. To train from "
    "scratch, give the run another directory, %s, or add %s; to train on, give it more steps."
)


def describe_end(
    background: SaveThreads, dir: Path | str, finished: bool, resume: str | None, skipped: str = ""
) -> str:
    """Return which checkpoint the next run can resume from, and how.

    ``resume`` is the option of the run that ends, ``None`` if the run has not called ``restore()``. ``skipped`` says
    what the next start skips, if it skips something.
    """
    newest = background.describe_newest()
    if skipped:
        return f"{newest} {skipped}"
    if all(each.newest is None for each in background.all):
        return newest
    if resume is None:
        return f"{newest} To resume from there, have the program call restore(state) before its loop."
    command = command_to_resume(str(dir))
    if ".dir=" in command:
        return (
            f"{newest} The same command would start from scratch, in a directory of its own; to resume, run {command}."
        )
    if resume not in ("auto", "latest"):
        return f"{newest} To resume from there, start the run with {option('checkpoint.resume', 'auto')}."
    return f"{newest} The same command resumes from there{', if it has more steps to take' * finished}."


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
    background: SaveThreads,
    dir: Path | str,
    finished: bool,
    resume: str | None,
    stayed: tuple[int, Path | str] | None,
    skipped: str,
) -> None:
    """Log how to resume, on a rank that has the lock.

    ``stayed`` is the step that the run resumed from, and its path, if the run has come no further. The other arguments
    are as of :func:`describe_end`.
    """
    if finished and stayed is not None:
        _log.warning(_NO_STEP, *stayed, option("checkpoint.dir", "PATH"), option("checkpoint.resume", "never"))
    else:
        level = logging.WARNING if skipped else logging.INFO
        _log.log(level, "stagereg: %s", describe_end(background, dir, finished, resume, skipped))


def warn_of_unclosed(dir: Path | str, saver: Saver, hold: DirectoryLock, pid: int) -> None:
    """Log that a program that saves has dropped a checkpointer, or has ended, without ``close()``."""
    own = hold.acquired and os.getpid() == pid  # and not a forked child's
    if own and not saver.leaving and getattr(sys, "last_value", None) is None:  # which has what ended the program
        _log.warning(
            "stagereg: the Checkpointer of %s was not closed: its last step is saved only if that was one to save. Put "
            "the loop into `with Checkpointer(...) as checkpointer:`, whose end saves it; or call close() at the end.",
            dir,
        )
