"""Parse Hydra overrides, as written on the command line, and identify the job of a sweep by its overrides."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

from stagereg.base.number_text import decimal

SWEEP_KEYS = ("sweep.repeats", "sweep.metric", "sweep.direction", "sweep.matters", "sweep.repeat", "sweep.again")
"""Options of a sweep that do not change its jobs."""
_MARK = re.compile(r"\+{0,2}sweep\.(repeat|again)=(.*)")


class Identity(NamedTuple):
    """The identity of one job of a sweep, independent of the order of its overrides."""

    combination: frozenset[tuple[str, str]]  # key and value of each override of the program
    repeat: int = 0  # the number of the run among the runs of its combination, from 0
    again: bool = False  # whether the job is an A/A job: a repeated run that measures the noise between equal runs

    @classmethod
    def of(cls, overrides: Iterable[str]) -> Identity:
        """Return the identity of the job with these task overrides."""
        own, repeat, again = split(overrides)
        return cls(frozenset(by_key(own).items()), repeat, again)

    def __str__(self) -> str:
        marks = [f"sweep.repeat={self.repeat}"] * bool(self.repeat) + ["sweep.again=true"] * self.again
        given = [f"{key}={value}".rstrip("=") for key, value in sorted(self.combination)]
        return " ".join([*given, *marks]) or "no override"


def raw(overrides: Any) -> list[str]:
    """Return the overrides of a job as written on the command line.

    Hydra stores the overrides in a config. Iterating over that config would resolve interpolations in the overrides.
    """
    from omegaconf import OmegaConf

    return cast("list[str]", OmegaConf.to_container(overrides, resolve=False))


def split(overrides: Iterable[str]) -> tuple[tuple[str, ...], int, bool]:
    """Return the program's overrides, the repeat number, and whether the job is an A/A job (a noise test)."""
    kept = tuple(override for override in overrides if not _MARK.fullmatch(override))
    found = {mark[1]: mark[2] for mark in map(_MARK.fullmatch, overrides) if mark is not None}
    return kept, decimal(found.get("repeat", "")) or 0, found.get("again", "").lower() == "true"


def by_key(overrides: Iterable[str]) -> dict[str, str]:
    """Map each config key that overrides change to its new value. As in Hydra, the last override of a key wins."""
    parts = (override.partition("=") for override in overrides)
    keys = {(key if key.startswith("~") else key.lstrip("+")): value for key, _, value in parts}
    return {key: value for key, value in keys.items() if key not in SWEEP_KEYS}


def gives_resume(overrides: Iterable[str]) -> bool:
    """Return whether the overrides set the option ``resume``, such as ``checkpoint.resume=auto``."""
    return any(re.match(r"\+*([\w.]+\.)?resume=", each) for each in overrides)


def quoted(value: str) -> str:
    """Return a value as a quoted string in Hydra's override grammar."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text=value, quote=Quote.single).with_quotes()
