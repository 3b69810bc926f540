"""What a user reads when a run has ended because it was signalled: how it ended, and how to go on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stagereg.errors import Preempted, Stopped

__all__ = ["print_exit", "resume_override"]

_DIRECTORY = "checkpoint.dir="


def resume_override(hydra: Any) -> str:
    """What the command needs to come to the same directory again; empty where no time is in the directory's name.

    Args:
        hydra: the ``hydra`` node of the job's composed config.
    """
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    single = hydra.mode == RunMode.RUN
    if "${now" not in str(OmegaConf.to_container(hydra.run if single else hydra.sweep, resolve=False)):
        return ""
    return _DIRECTORY if single else f"hydra.sweep.dir={Path(hydra.runtime.cwd, hydra.sweep.dir)}"


def print_exit(error: Preempted | Stopped, directory: str, override: str) -> None:
    """Print how a run in ``directory`` has ended, and the command that goes on: with ``override``, if it needs one."""
    text = str(error)
    if isinstance(error, Preempted):
        if override and Path(error.directory).is_relative_to(directory):
            more = override + error.directory if override == _DIRECTORY else override
            text = f"preempted by {error.received.name}: step {error.step} is saved; the same command with {more}"
        else:
            text = f"{error}; the same command"
        text += " goes on from there"
    print(text, file=sys.stderr, flush=True)
