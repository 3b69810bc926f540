"""The command line of this program, and the one of its ranks that is made from it.

Ranks run the same script in the same interpreter with the overrides of one job. What only the launcher uses, such as
Hydra's launcher, sweeper and callbacks, is left out; the run directory is the launcher's.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["CommandLine", "overrides", "quoted", "wants_no_job", "wants_sweep", "without_logging"]

_LAUNCHER_ONLY = {"run", "sweep", "mode", "output_subdir", "launcher", "sweeper"}
"""Keys and groups below ``hydra`` that ranks do not get."""
_LOGGING = ("hydra.job_logging", "hydra.hydra_logging", "hydra/job_logging", "hydra/hydra_logging")


@dataclass(frozen=True)
class CommandLine:
    """How this program was started: ``start`` up to its script or module, and Hydra's own ``flags``."""

    start: tuple[str, ...]
    flags: tuple[str, ...]

    @classmethod
    def of_this_process(cls) -> CommandLine:
        """Read it off the interpreter; to be called before anything changes ``sys.argv``."""
        arguments = sys.argv[1:]
        split = len(sys.orig_argv) - len(arguments)
        if sys.orig_argv[split:] == arguments:
            start = [sys.executable, *sys.orig_argv[1:split]]
        else:
            start = [sys.executable, os.path.abspath(sys.argv[0])]
        known = _parsed(arguments)
        given = {
            "--config-path": known.config_path,
            "--config-name": known.config_name,
            "--config-dir": known.config_dir,
        }
        flags = [argument for flag, value in given.items() if value is not None for argument in (flag, value)]
        return cls(tuple(start), tuple(flags))

    def for_ranks(self, hydra: Any) -> list[str]:
        """The command of the ranks of one job; ``hydra`` is the ``hydra`` node of its composed config."""
        from omegaconf import OmegaConf

        hydras = [each for each in hydra.overrides.hydra if re.split("[./=@]", each)[1] not in _LAUNCHER_ONLY]
        job = [
            f"hydra.job.{key}={quoted(hydra.job[key]) if key == 'id' else hydra.job[key]}"
            for key in ("id", "num")
            if not OmegaConf.is_missing(hydra.job, key)
        ]
        return [*self.start, *self.flags, *hydra.overrides.task, *hydras, "hydra.mode=RUN", *job]


def wants_sweep(arguments: list[str]) -> bool:
    """Whether Hydra would take these arguments for several jobs."""
    known = _parsed(arguments)
    return bool(known.multirun) or "hydra.mode=MULTIRUN" in known.overrides


def wants_no_job(arguments: list[str]) -> bool:
    """Whether Hydra would only show something and leave."""
    known = _parsed(arguments)
    return any((known.help, known.hydra_help, known.cfg, known.info, known.shell_completion))


def overrides(arguments: list[str]) -> list[str]:
    """The overrides among these arguments; those on the line that is being completed, where that is what they ask."""
    known = _parsed(arguments)
    return os.environ.get("COMP_LINE", "").split() if known.shell_completion else list(known.overrides)


def without_logging(arguments: list[str]) -> list[str]:
    """The arguments without overrides of Hydra's logging: rank 0 alone logs, the others have none to override."""
    return [argument for argument in arguments if not argument.lstrip("+~").startswith(_LOGGING)]


def quoted(value: str) -> str:
    """A value as one quoted string of Hydra's override grammar."""
    return "'" + value.replace("'", "\\'") + "'"


def _parsed(arguments: list[str]) -> Any:
    # Hydra offers its parser nowhere else, and one of ours would miss the flags of its other releases.
    from hydra._internal.utils import get_args_parser

    known, _ = get_args_parser().parse_known_args(arguments)
    return known
