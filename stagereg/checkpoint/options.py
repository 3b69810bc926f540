"""What a checkpointer may be asked for: each option checked where it comes in, before anything is made."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Any

from stagereg.errors import ConfigError, RegistryError, nearest
from stagereg.spec import check

__all__ = ["at_least_one", "check_dir", "check_every", "check_resume", "component", "duration", "one_of"]


def check_dir(given: object) -> None:
    """Raise ``ConfigError`` if ``given`` cannot be the directory of checkpoints."""
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise ConfigError(f"checkpoint.dir must be the path or URL of a directory, not {given!r}.")


def check_resume(given: object) -> None:
    """Raise ``ConfigError`` if ``given`` is no value of ``resume``."""
    if not isinstance(given, str) or not given:
        raise ConfigError(f"resume must be 'auto', 'never', 'latest' or the path of a checkpoint, not {given!r}.")


def check_every(every: object, mtbf: object) -> None:
    """Raise ``ConfigError`` if ``every`` is no number of steps or ``"auto"``, or ``mtbf`` no duration."""
    if isinstance(every, str) and every != "auto":
        raise ConfigError(f"every is {every!r}.{nearest(every, ['auto'])} It is a number of steps or 'auto'.")
    if every != "auto":
        at_least_one("every", every)
    duration("mtbf", mtbf)


def duration(name: str, given: Any) -> datetime.timedelta:
    """Return a duration above 0. Raises: ``ConfigError``."""
    if not isinstance(given, datetime.timedelta) or given <= datetime.timedelta(0):
        raise ConfigError(f"{name} must be a duration above 0, such as datetime.timedelta(hours=6), not {given!r}.")
    return given


def at_least_one(name: str, value: Any) -> int:
    """Return a whole number from 1 on. Raises: ``ConfigError``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")
    return value


def one_of(name: str, given: Any, choices: Sequence[str]) -> str:
    """Return one of ``choices``. Raises: ``ConfigError``."""
    if given not in choices:
        close = nearest(given, choices) if isinstance(given, str) else ""
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {given!r}.{close}")
    return str(given)


def component(kind: str, given: Any) -> Any:
    """Return a component of a kind. Raises: ``ConfigError`` for what is none, such as its class."""
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
