"""Describes at the end of a run how the next run can resume, and warns of a checkpointer that was not closed."""

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

_log = logging.getLogger(__name__)


def describe_end(threads: SaveThreads, dir: Path | str, finished: bool, resume: str | None, skipped: str = "") -> str:
    """Return a message that names the newest checkpoint and explains how to resume from it.

    ``resume``: the option of this run, or ``None`` if the run did not call ``restore()``. ``skipped``: a sentence about
    checkpoints that the next start will skip, or ``""``.
    """
    newest = threads.describe_newest()
    if skipped:
        return f"{newest} {skipped}"
    if all(each.newest is None for each in threads.all):
        return newest
    if resume is None:
        return f"{newest} To resume from this checkpoint, call restore(state) before the loop."
    command = command_to_resume(str(dir))
    if ".dir=" in command:
        return f"{newest} The same command would start from scratch in a new directory. To resume, run {command}."
    if resume not in ("auto", "latest"):
        return f"{newest} To resume from this checkpoint, start the run with {option('checkpoint.resume', 'auto')}."
    return f"{newest} The same command resumes from there{', if it has more steps to take' * finished}."


def warn_of_unclosed(dir: Path | str, saver: Saver, hold: DirectoryLock, pid: int) -> None:
    """Warn that ``close()`` was not called before the checkpointer was garbage collected or the program ended."""
    own = hold.acquired and os.getpid() == pid  # a forked child does not own the lock
    if own and not saver.leaving and getattr(sys, "last_value", None) is None:  # no uncaught exception
        _log.warning(
            "stagereg: The Checkpointer of %s was not closed: its last step is saved only if it was due for a save. "
            "Use `with Checkpointer(...) as checkpointer:` around the loop, or call close() at the end.",
            dir,
        )
