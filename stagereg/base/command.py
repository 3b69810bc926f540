"""The command line of this process: its key, which checkpoints contain, and the command line that resumes the run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

_NOT_THE_PROGRAM = re.compile(r"[+~]*(hydra|checkpoint)[./@:]")  # overrides that do not change the program
_HALF = 8  # characters in each half of a key
_RUN = "STAGEREG_RUN"
"""Environment variable with the directory and the :func:`resume_overrides` of the run."""
_CHECKPOINTS, _AUTO = "checkpoint.dir=", "checkpoint.resume=auto"


def command_key() -> str:
    """Return a short key that two processes share if they run the same program with the same arguments.

    The first half identifies the program (:func:`is_program`). Overrides of ``hydra`` and ``checkpoint`` do not change
    the key, since launchers add such overrides. The key is a hash, so it does not reveal arguments.
    """
    program, *arguments = sys.argv or [""]
    program = os.path.realpath(program)
    if not os.path.isfile(program):  # ``python -c``: use the code
        program = " ".join(sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)])
    arguments = [each for each in arguments if not _NOT_THE_PROGRAM.match(each)]
    return "".join(hashlib.sha256(json.dumps(part).encode()).hexdigest()[:_HALF] for part in (program, arguments))


def is_program(key: str) -> bool:
    """Return whether ``key`` identifies the program of this process, with any arguments. True for an empty key."""
    return not key or key[:_HALF] == command_key()[:_HALF]


def resume_overrides(hydra: Any, cfg: Any) -> list[str]:
    """Return the overrides to append to a run's command line to resume the run; empty if no override is needed."""
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    needed = [] if OmegaConf.select(cfg, "checkpoint.resume") in (None, "auto", "latest") else [_AUTO]
    single = hydra.mode == RunMode.RUN
    if "${now" not in str(OmegaConf.to_container(hydra.run if single else hydra.sweep, resolve=False)):
        return needed
    return [*needed, _CHECKPOINTS if single else f"hydra.sweep.dir={Path(hydra.runtime.cwd, hydra.sweep.dir)}"]


def publish_run(directory: str, overrides: list[str]) -> None:
    """Record the run's directory and :func:`resume_overrides` in the environment, for :func:`command_to_resume`."""
    os.environ[_RUN] = json.dumps([directory, overrides])


def command_to_resume(checkpoints: str) -> str:
    """Return "the same command" for a message, with the overrides that it needs to resume from ``checkpoints``."""
    directory, overrides = json.loads(os.environ.get(_RUN, '["", []]'))
    inside = Path(checkpoints).is_relative_to(directory)
    added = [each + checkpoints * (each == _CHECKPOINTS) for each in overrides if inside or each == _AUTO]
    return f"the same command{' with ' * bool(added)}{' '.join(added)}"
