"""The command that this process runs: a key by which checkpoints name the command, and how the command resumes them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

_NOT_THE_PROGRAM = re.compile(r"[+~]*(hydra|checkpoint)[./@:]")  # overrides that leave the program what it is
_HALF = 8  # characters of a key
_RUN = "STAGEREG_RUN"
"""The environment variable with directory and :func:`resume_overrides` of the run."""
_CHECKPOINTS, _AUTO = "checkpoint.dir=", "checkpoint.resume=auto"


def command_key() -> str:
    """Return a short text that is the same for two processes of one command: one program with the same arguments.

    The first half is that of the program (:func:`is_program`). Overrides of ``hydra`` and ``checkpoint`` do not matter:
    launchers add some. It reveals no argument.
    """
    program, *arguments = sys.argv or [""]
    program = os.path.realpath(program)
    if not os.path.isfile(program):  # of ``python -c`` the code
        program = " ".join(sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)])
    arguments = [each for each in arguments if not _NOT_THE_PROGRAM.match(each)]
    return "".join(hashlib.sha256(json.dumps(part).encode()).hexdigest()[:_HALF] for part in (program, arguments))


def is_program(key: str) -> bool:
    """Whether this process runs the program of a key, with whatever arguments; true of an empty one."""
    return not key or key[:_HALF] == command_key()[:_HALF]


def resume_overrides(hydra: Any, cfg: Any) -> list[str]:
    """Return the overrides with which the command of a run resumes its checkpoints; none if it does so anyway."""
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    needed = [] if OmegaConf.select(cfg, "checkpoint.resume") in (None, "auto", "latest") else [_AUTO]
    single = hydra.mode == RunMode.RUN
    if "${now" not in str(OmegaConf.to_container(hydra.run if single else hydra.sweep, resolve=False)):
        return needed
    return [*needed, _CHECKPOINTS if single else f"hydra.sweep.dir={Path(hydra.runtime.cwd, hydra.sweep.dir)}"]


def publish_run(directory: str, overrides: list[str]) -> None:
    """Have this process know the run that it belongs to, for :func:`command_to_resume`."""
    os.environ[_RUN] = json.dumps([directory, overrides])


def command_to_resume(checkpoints: str) -> str:
    """Return what resumes from a directory of checkpoints: the same command, with the overrides that it needs."""
    directory, overrides = json.loads(os.environ.get(_RUN, '["", []]'))
    inside = Path(checkpoints).is_relative_to(directory)
    added = [each + checkpoints * (each == _CHECKPOINTS) for each in overrides if inside or each == _AUTO]
    return f"the same command{' with ' * bool(added)}{' '.join(added)}"
