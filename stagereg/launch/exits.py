"""What a run prints when a signal has ended it in order."""

from __future__ import annotations

import os

from stagereg.base.command import command_to_resume
from stagereg.base.output import warn
from stagereg.errors import Preempted, Stopped

KEEPS_CODE = "STAGEREG_KEEPS_CODE"
"""The environment variable with the process number of the ``stagereg run`` that has started a rank."""


def print_exit(error: Preempted | Stopped) -> None:
    """Print how a run has ended, and the command that resumes."""
    text = str(error)
    if isinstance(error, Preempted):
        command = command_to_resume(error.directory)
        if ".dir=" in command:
            text = f"preempted by {error.received.name}: step {error.step} is saved"
        text += f"; {command} resumes from there{torchrun_note()}"
    warn(text)


def torchrun_note() -> str:
    """Return what a run that has saved and exits says of ``torchrun``; empty below any other launcher."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or KEEPS_CODE in os.environ:
        return ""
    return "; torchrun shows a traceback and ends with 1 all the same, `stagereg run` in its place with 75"
