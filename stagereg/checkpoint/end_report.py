"""Logs at the end of a run how the next run can resume, and rejects calls to a closed checkpointer."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from stagereg.base.command import command_to_resume
from stagereg.base.option_text import option
from stagereg.checkpoint.hold import DirectoryLock
from stagereg.checkpoint.save.save_thread import SaveThreads
from stagereg.checkpoint.save.saver import Saver
from stagereg.errors import CheckpointError, ClosedError

_log = logging.getLogger(__name__)

_NO_STEP = (
    "stagereg: NO STEP WAS TAKEN: this run resumed from step %d, in %s, and had no steps left. To train from "
    "scratch, give the run another directory, %s, or add %s. To train longer, give the run more steps."
)


def describe_end(
    background: SaveThreads, dir: Path | str, finished: bool, resume: str | None, skipped: str = ""
) -> str:
    """Return a message that names the newest checkpoint and explains how to resume from it.

    ``resume``: the option of this run, or ``None`` if the run did not call ``restore()``. ``skipped``: a sentence about
    checkpoints that the next start will skip, or ``""``.
    """
    newest = background.describe_newest()
    if skipped:
        return f"{newest} {skipped}"
    if all(each.newest is None for each in background.all):
        return newest
    if resume is None:
        return f"{newest} To resume from this checkpoint, call restore(state) before the loop."
    command = command_to_resume(str(dir))
    if ".dir=" in command:
        return f"{newest} The same command would start from scratch in a new directory. To resume, run {command}."
    if resume not in ("auto", "latest"):
        return f"{newest} To resume from this checkpoint, start the run with {option('checkpoint.resume', 'auto')}."
    return f"{newest} The same command resumes from there{', if it has more steps to take' * finished}."


def expect_usable(closed: bool, pid: int) -> None:
    """Raise ``ClosedError`` if the checkpointer is closed, or ``CheckpointError`` in a forked child."""
    if closed:
        raise ClosedError("This checkpointer is closed. Construct another one.")
    if os.getpid() != pid:
        raise CheckpointError(
            f"This checkpointer belongs to process {pid}. A forked child, such as a worker of a DataLoader, can "
            "neither save nor restore with it."
        )


def log_end(
    background: SaveThreads,
    dir: Path | str,
    finished: bool,
    resume: str | None,
    stayed: tuple[int, Path | str] | None,
    skipped: str,
) -> None:
    """Log how to resume. Called on the rank that holds the directory lock.

    ``stayed``: the step and the path that the run resumed from, if the run took no step after that. The other arguments
    are those of :func:`describe_end`.
    """
    if finished and stayed is not None:
        _log.warning(_NO_STEP, *stayed, option("checkpoint.dir", "PATH"), option("checkpoint.resume", "never"))
    else:
        level = logging.WARNING if skipped else logging.INFO
        _log.log(level, "stagereg: %s", describe_end(background, dir, finished, resume, skipped))


def warn_of_unclosed(dir: Path | str, saver: Saver, hold: DirectoryLock, pid: int) -> None:
    """Warn that ``close()`` was not called before the checkpointer was garbage collected or the program ended."""
    own = hold.acquired and os.getpid() == pid  # a forked child does not own the lock
    if own and not saver.leaving and getattr(sys, "last_value", None) is None:  # no uncaught exception
        _log.warning(
            "stagereg: The Checkpointer of %s was not closed: its last step is saved only if it was due for a save. "
            "Use `with Checkpointer(...) as checkpointer:` around the loop, or call close() at the end.",
            dir,
        )
