"""Prints the last output line of a run that exits after a signal."""

from __future__ import annotations

import os

from stagereg.base.command import command_to_resume
from stagereg.base.output import warn
from stagereg.errors import Preempted, Stopped

KEEPS_CODE = "STAGEREG_KEEPS_CODE"
"""Environment variable with the process ID of the ``stagereg run`` that started a rank."""


def print_exit(error: Preempted | Stopped) -> None:
    """Print why a run exits, and the command that resumes it."""
    text = str(error)
    if isinstance(error, Preempted):
        command = command_to_resume(error.directory)
        if ".dir=" in command:
            text = f"preempted by {error.received.name}: step {error.step} is saved"
        text += f". To resume, run {command}.{torchrun_note()}"
    warn(text)


def torchrun_note() -> str:
    """Return a sentence on the exit code of ``torchrun`` after a preemption; empty under any other launcher."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or KEEPS_CODE in os.environ:
        return ""
    return " torchrun prints a traceback and exits with code 1; to exit with code 75, use `stagereg run` instead."
