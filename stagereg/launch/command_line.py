"""Derives the command line of the ranks from the command line of this program.

Ranks run the same script in the same interpreter with the overrides of one job. Options that only the launcher uses,
such as Hydra's launcher and sweeper, are omitted. Ranks use the launcher's run directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from stagereg.base.overrides import quoted, raw

_LAUNCHER_ONLY = {"run", "sweep", "mode", "output_subdir", "launcher", "sweeper"}
"""Keys and groups in the config node ``hydra`` that the launcher does not pass to ranks."""


@dataclass(frozen=True)
class CommandLine:
    """The command that started this program: ``start`` up to the script or module, and the ``flags`` for Hydra."""

    start: tuple[str, ...]
    flags: tuple[str, ...]

    @classmethod
    def of_this_process(cls) -> CommandLine:
        """Return the command line of this process. Must be called before ``sys.argv`` changes."""
        arguments = sys.argv[1:]
        split = len(sys.orig_argv) - len(arguments)
        if sys.orig_argv[split:] == arguments:
            start = [sys.executable, *sys.orig_argv[1:split]]
        else:
            start = [sys.executable, os.path.abspath(sys.argv[0])]
        known = parsed(arguments)
        given = {f"--config-{each}": getattr(known, f"config_{each}") for each in ("path", "name", "dir")}
        flags = [argument for flag, value in given.items() if value is not None for argument in (flag, value)]
        return cls(tuple(start), tuple(flags))

    def for_ranks(self, hydra: Any) -> list[str]:
        """Return the command for the ranks of one job; ``hydra`` is the ``hydra`` node of its composed config."""
        from omegaconf import OmegaConf

        hydras = [each for each in raw(hydra.overrides.hydra) if re.split("[./=@]", each)[1] not in _LAUNCHER_ONLY]
        job = [
            f"hydra.job.{key}={quoted(hydra.job[key]) if key == 'id' else hydra.job[key]}"
            for key in ("id", "num")
            if not OmegaConf.is_missing(hydra.job, key)
        ]
        if job:  # the job belongs to a sweep
            job.append(f"hydra.sweep.dir={quoted(os.path.join(hydra.runtime.cwd, str(hydra.sweep.dir)))}")
        return [*self.start, *self.flags, *raw(hydra.overrides.task), *hydras, "hydra.mode=RUN", *job]


def number(cfg: Any, key: str, default: float) -> Any:
    """Return a number from a config, such as ``nproc``. Parses strings, such as the value of ``${oc.env:N}``."""
    from omegaconf import OmegaConf

    value = OmegaConf.select(cfg, key, default=default)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def parsed(arguments: list[str]) -> Any:
    """Parse the arguments with Hydra's parser."""
    # Hydra has no public parser, and a parser here would miss the flags of other Hydra releases.
    from hydra._internal.utils import get_args_parser

    known, _ = get_args_parser().parse_known_args(arguments)
    return known
