"""The command line of this program, and the one of its ranks that is made from it.

Ranks run the same script in the same interpreter with the overrides of one job. What only the launcher uses, such as
Hydra's launcher and sweeper, is left out; the run directory is the launcher's.
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
"""Keys and groups below ``hydra`` that ranks do not get."""


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
        known = parsed(arguments)
        given = {f"--config-{each}": getattr(known, f"config_{each}") for each in ("path", "name", "dir")}
        flags = [argument for flag, value in given.items() if value is not None for argument in (flag, value)]
        return cls(tuple(start), tuple(flags))

    def for_ranks(self, hydra: Any) -> list[str]:
        """The command of the ranks of one job; ``hydra`` is the ``hydra`` node of its composed config."""
        from omegaconf import OmegaConf

        hydras = [each for each in raw(hydra.overrides.hydra) if re.split("[./=@]", each)[1] not in _LAUNCHER_ONLY]
        job = [
            f"hydra.job.{key}={quoted(hydra.job[key]) if key == 'id' else hydra.job[key]}"
            for key in ("id", "num")
            if not OmegaConf.is_missing(hydra.job, key)
        ]
        if job:  # of a sweep
            job.append(f"hydra.sweep.dir={quoted(os.path.join(hydra.runtime.cwd, str(hydra.sweep.dir)))}")
        return [*self.start, *self.flags, *raw(hydra.overrides.task), *hydras, "hydra.mode=RUN", *job]


def number(cfg: Any, key: str, default: float) -> Any:
    """Return a number of the launcher's from a config, parsed if it is a text, as ``${oc.env:N}`` gives."""
    from omegaconf import OmegaConf

    value = OmegaConf.select(cfg, key, default=default)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def parsed(arguments: list[str]) -> Any:
    """What Hydra's parser makes of these arguments."""
    # Hydra offers its parser nowhere else, and one of ours would miss the flags of its other releases.
    from hydra._internal.utils import get_args_parser

    known, _ = get_args_parser().parse_known_args(arguments)
    return known
