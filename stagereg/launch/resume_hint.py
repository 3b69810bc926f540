"""What a user reads when a run has ended because it was signalled: how it ended, and how to go on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stagereg.errors import Preempted, Stopped

__all__ = ["print_exit"]


def print_exit(error: Preempted | Stopped, hydra: Any) -> None:
    """Print how the run has ended, and the command that goes on.

    Args:
        error: that it has ended with.
        hydra: the ``hydra`` node of the job's composed config.
    """
    print(_with_hint(error, hydra) if isinstance(error, Preempted) else error, file=sys.stderr, flush=True)


def _with_hint(error: Preempted, hydra: Any) -> str:
    from hydra.types import RunMode

    single = hydra.mode == RunMode.RUN
    inside = Path(error.directory).is_relative_to(Path(hydra.runtime.output_dir))
    if not inside or not _has_a_time(hydra.run if single else hydra.sweep):
        return f"{error}; the same command goes on from there"
    override = f"checkpoint.dir={error.directory}"
    if not single:
        override = f"hydra.sweep.dir={Path(hydra.runtime.cwd, hydra.sweep.dir)}"
    saved = f"preempted by {error.received.name}: step {error.step} is saved"
    return f"{saved}; the same command with {override} goes on from there"


def _has_a_time(run: Any) -> bool:
    """Whether the directory of a run, or of a sweep, has the time in its name and so is another one each time."""
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(run, resolve=False)
    return not isinstance(raw, dict) or "${now" in str(raw.get("dir"))
