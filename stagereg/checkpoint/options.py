"""What a checkpointer may be asked for: each option is checked before anything is made. Each raises ``ConfigError``."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Any

from stagereg.errors import ConfigError, RegistryError, nearest
from stagereg.spec import check

__all__ = ["at_least_one", "check_dir", "check_duration", "check_every", "check_resume", "component", "one_of"]


def check_dir(given: object) -> None:
    """Check the directory of checkpoints."""
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise ConfigError(f"checkpoint.dir must be the path or URL of a directory, not {given!r}.")


def check_resume(given: object) -> None:
    """Check what is to be restored."""
    if not isinstance(given, str) or not given:
        raise ConfigError(f"resume must be 'auto', 'never', 'latest' or the path of a checkpoint, not {given!r}.")


def check_every(given: object) -> None:
    """Check a number of steps, or ``"auto"``."""
    if isinstance(given, str) and given != "auto":
        raise ConfigError(f"every is {given!r}.{nearest(given, ['auto'])} It is a number of steps or 'auto'.")
    if given != "auto":
        at_least_one("every", given)


def check_duration(name: str, given: object) -> None:
    """Check a duration above 0."""
    if not isinstance(given, datetime.timedelta) or given <= datetime.timedelta(0):
        raise ConfigError(f"{name} must be a duration above 0, such as datetime.timedelta(hours=6), not {given!r}.")


def at_least_one(name: str, given: object) -> int:
    """Return a whole number from 1 on."""
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, not {given!r}.")
    return given


def one_of(name: str, given: object, choices: Sequence[str]) -> str:
    """Return one of ``choices``."""
    if given not in choices:
        close = nearest(given, choices) if isinstance(given, str) else ""
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {given!r}.{close}")
    return str(given)


def component(kind: str, given: Any) -> Any:
    """Return a component of a kind; what is none, such as its class, is refused."""
    try:
        if isinstance(given, type):
            raise RegistryError("a class is no component yet; call it")
        check(kind, type(given).__name__, given)
    except RegistryError as error:
        example = {"stager": "blocking", "storage": "dcp"}[kind]
        raise ConfigError(
            f"{kind} must be a {kind}, such as stagereg.build({kind!r}, {example!r}), not {given!r}"
        ) from error
    return given
