"""The command line of this program, and the one of its ranks that is made from it.

Ranks run the same script in the same interpreter with the overrides of one job. What only the launcher uses, such as
Hydra's launcher and sweeper, is left out; the run directory is the launcher's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from stagereg.base.number_text import decimal

_NOT_THE_PROGRAM = re.compile(r"[+~]*(hydra|checkpoint)[./@:]")  # overrides that leave the program what it is
_HALF = 8  # characters of a key
_LAUNCHER_ONLY = {"run", "sweep", "mode", "output_subdir", "launcher", "sweeper"}
"""Keys and groups below ``hydra`` that ranks do not get."""
SWEEP_KEYS = ("sweep.repeats", "sweep.metric", "sweep.direction", "sweep.matters", "sweep.repeat", "sweep.again")
"""Options of a sweep, which change nothing in its jobs."""
_MARK = re.compile(r"\+{0,2}sweep\.(repeat|again)=(.*)")


class Identity(NamedTuple):
    """What tells one job of a sweep from another, in whatever order its overrides are."""

    combination: frozenset[tuple[str, str]]  # the overrides of the program, by key
    repeat: int = 0  # which run of its combination this is, from 0
    again: bool = False  # whether it is an A/A job

    @classmethod
    def of(cls, overrides: Iterable[str]) -> Identity:
        """Return the identity of the job with these overrides of the task."""
        own, repeat, again = split(overrides)
        return cls(frozenset(by_key(own).items()), repeat, again)

    def __str__(self) -> str:
        marks = [f"sweep.repeat={self.repeat}"] * bool(self.repeat) + ["sweep.again=true"] * self.again
        given = [f"{key}={value}".rstrip("=") for key, value in sorted(self.combination)]
        return " ".join([*given, *marks]) or "no override"


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


def raw(overrides: Any) -> list[str]:
    """Return the overrides that Hydra has composed a job from, as the command line has them.

    Hydra holds them in a config, which resolves an interpolation in them when it is iterated.
    """
    from omegaconf import OmegaConf

    return cast("list[str]", OmegaConf.to_container(overrides, resolve=False))


def number(cfg: Any, key: str, default: float) -> Any:
    """Return a number of the launcher's from a config, parsed if it is a text, as ``${oc.env:N}`` gives."""
    from omegaconf import OmegaConf

    value = OmegaConf.select(cfg, key, default=default)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def split(overrides: Iterable[str]) -> tuple[tuple[str, ...], int, bool]:
    """Part overrides into those of the combination, and which repeat of it this is and whether it is an A/A job."""
    kept = tuple(override for override in overrides if not _MARK.fullmatch(override))
    found = {mark[1]: mark[2] for mark in map(_MARK.fullmatch, overrides) if mark is not None}
    return kept, decimal(found.get("repeat", "")) or 0, found.get("again", "").lower() == "true"


def by_key(overrides: Iterable[str]) -> dict[str, str]:
    """Return overrides by what they change in the program; of two for one key, Hydra takes the last."""
    parts = (override.partition("=") for override in overrides)
    keys = {(key if key.startswith("~") else key.lstrip("+")): value for key, _, value in parts}
    return {key: value for key, value in keys.items() if key not in SWEEP_KEYS}


def gives_resume(overrides: Iterable[str]) -> bool:
    """Whether these name what to resume from, as ``checkpoint.resume=auto`` does."""
    return any(re.match(r"\+*([\w.]+\.)?resume=", each) for each in overrides)


def quoted(value: str) -> str:
    """A value as one quoted string of Hydra's override grammar."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text=value, quote=Quote.single).with_quotes()


def parsed(arguments: list[str]) -> Any:
    """What Hydra's parser makes of these arguments."""
    # Hydra offers its parser nowhere else, and one of ours would miss the flags of its other releases.
    from hydra._internal.utils import get_args_parser

    known, _ = get_args_parser().parse_known_args(arguments)
    return known


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
