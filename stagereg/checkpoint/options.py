"""The values of options, checked before anything is made. Each function raises ``ConfigError``."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any

from stagereg.checkpoint.keep import Keep
from stagereg.errors import ConfigError, RegistryError, nearest
from stagereg.registry import build
from stagereg.spec import check

__all__ = ["at_directory", "at_least", "check_all", "component", "expect_alike", "one_of"]

_RESUME = ("auto", "latest", "never", "the path of a checkpoint")
_CHOICES = {
    "verify": ("full", "fast"),
    "on_error": ("raise", "warn"),
    "replicas": ("share", "first"),
    "read": ("auto", "each", "once"),
}


def check_all(given: Mapping[str, Any]) -> None:
    """Check those of a checkpointer, by name."""
    dir, every, resume = given["dir"], given["every"], given["resume"]
    at_directory(dir)
    if not isinstance(resume, str) or not resume:
        raise ConfigError(f"checkpoint.resume is one of {', '.join(_RESUME)}, not {resume!r}.")
    if resume.isidentifier() and not os.path.exists(resume):
        one_of("checkpoint.resume", resume, _RESUME)
    for name, choices in _CHOICES.items():
        one_of(f"checkpoint.{name}", given[name], choices)
    if isinstance(every, str):
        one_of("checkpoint.every", every, ("auto", "a number of steps"))
    at_least(1, "checkpoint.every", 1 if every == "auto" else every)
    if not isinstance(given["keep"], Keep):
        at_least(1, "checkpoint.keep", given["keep"])
    at_least(0, "checkpoint.verify_replicas", given["verify_replicas"])
    if given["give_up_after"] is not None:
        at_least(1, "checkpoint.give_up_after", given["give_up_after"])
    for name in ("mtbf", "timeout", "grace"):
        duration = given[name]
        if name == "grace" and duration is None:
            continue
        if not isinstance(duration, datetime.timedelta) or duration <= datetime.timedelta(0):
            such = "such as datetime.timedelta(hours=6)"
            raise ConfigError(f"checkpoint.{name} must be a duration above 0, {such}, not {duration!r}.")


def at_directory(given: object) -> None:
    """Check what is to be the path or URL of a directory."""
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise ConfigError(f"checkpoint.dir must be the path or URL of a directory, not {given!r}.")


def at_least(least: int, name: str, given: object) -> int:
    """Return a whole number from ``least`` on."""
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {given!r}.")
    return given


def one_of(name: str, given: object, choices: Sequence[str]) -> str:
    """Return one of ``choices``."""
    if given not in choices:
        close = nearest(given, choices) if isinstance(given, str) else ""
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {given!r}.{close}")
    return str(given)


def expect_alike(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Check that all ranks have the same options; each gives its own."""
    for name, first in ranks[0].items():
        for rank, others in enumerate(ranks):
            if others[name] != first:
                how = (
                    "Each rank has made a path of its own, as of the time (${now:...}): use stagereg.main, which gives "
                    "all ranks one, or a fixed path: checkpoint.dir=PATH"
                    if name == "dir"
                    else f"Give all ranks the same checkpoint.{name}"
                )
                raise ConfigError(
                    f"checkpoint.{name} is not the same on all ranks: rank 0 has {first}, rank {rank} has "
                    f"{others[name]}. {how}."
                )


def component(kind: str, given: Any, usual: str) -> Any:
    """Return a component of a kind, the ``usual`` one for ``None``; what is none, such as its class, is refused."""
    if given is None:
        return build(kind, usual)
    try:
        if isinstance(given, type):
            raise RegistryError("a class is no component yet; call it")
        check(kind, type(given).__name__, given)
    except RegistryError as error:
        raise ConfigError(
            f"{kind} must be a {kind}, such as stagereg.build({kind!r}, {usual!r}), not {given!r}"
        ) from error
    return given
