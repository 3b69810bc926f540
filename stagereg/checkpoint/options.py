"""The values of options, checked before anything is made. Each function raises ``ConfigError``."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from stagereg.checkpoint.save.on_commit import CommittedCheckpoint, OnCommit
from stagereg.checkpoint.store.keep import Keep
from stagereg.errors import ConfigError, RegistryError, at_least, one_of
from stagereg.registry import build
from stagereg.spec import check

RESUME = ("auto", "latest", "never")
"""What ``resume`` may be beside the path of a checkpoint."""
_SUCH = "stagereg.build('on_commit', 'wandb')"
_LEAST = {"every": 1, "keep": 1, "verify_replicas": 0, "give_up_after": 1}
_CHOICES = {
    "verify": ("full", "fast"),
    "on_error": ("raise", "warn"),
    "replicas": ("share", "first"),
    "read": ("auto", "each", "once"),
}


def check_all(given: Mapping[str, Any]) -> None:
    """Check those of a checkpointer, by name; some of them, where the others are not known yet."""
    for name, value in given.items():
        if value is None and name in ("grace", "give_up_after"):
            continue
        if name == "dir":
            at_directory(value)
        elif name == "resume":
            _resumable(value, given.get("dir", ""))
        elif name in _CHOICES:
            one_of(f"checkpoint.{name}", value, _CHOICES[name])
        elif name in _LEAST and not (name == "keep" and isinstance(value, Keep)):
            if name == "every" and isinstance(value, str):
                one_of("checkpoint.every", value, ("auto", "a number of steps"))
            at_least(_LEAST[name], f"checkpoint.{name}", 1 if (name, value) == ("every", "auto") else value)
        elif name == "fresh" and (isinstance(value, str) or not all(isinstance(each, str) for each in value)):
            raise ConfigError(f"checkpoint.fresh must be a list of names of the state, not {value!r}.")
        elif name in ("mtbf", "timeout", "grace"):
            _duration(name, value)


def at_directory(given: object) -> None:
    """Check what is to be the path or URL of a directory."""
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise ConfigError(f"checkpoint.dir must be the path or URL of a directory, not {given!r}.")
    for each in (Path(given), *Path(given).parents):
        if os.path.isfile(each):
            raise ConfigError(f"checkpoint.dir={given} must be the path or URL of a directory, and {each} is a file.")


def _resumable(given: object, dir: str | os.PathLike[str]) -> None:
    choices = (*RESUME, "the path of a checkpoint")
    if not isinstance(given, str) or not given:
        raise ConfigError(f"checkpoint.resume is one of {', '.join(choices)}, not {given!r}.")
    if given.isidentifier() and not any(map(os.path.exists, (given, os.path.join(dir, given)))):
        one_of("checkpoint.resume", given, choices)


def _duration(name: str, given: object) -> None:
    if not isinstance(given, datetime.timedelta) or given <= datetime.timedelta(0):
        such = "such as datetime.timedelta(hours=6)"
        raise ConfigError(f"checkpoint.{name} must be a duration above 0, {such}, not {given!r}.")


def on_commit(given: Any) -> dict[str, OnCommit]:
    """Return ``on_commit`` components by name, of a list, a mapping with names, or one; functions become components."""
    if not isinstance(given, (Mapping, list, tuple)):
        given = [] if given is None else [given]
    if not isinstance(given, Mapping):
        given = {f"{i} ({_name_of(each)})": each for i, each in enumerate(given)}
    return {str(name): _commit_component(name, each) for name, each in given.items() if each is not None}


def _commit_component(name: str, given: Any) -> OnCommit:
    if callable(given) and not isinstance(given, type) and not hasattr(given, "committed"):
        return _Function(given)
    try:
        if isinstance(given, type):
            raise RegistryError("a class is no component yet; call it")
        check("on_commit", _name_of(given), given)
    except RegistryError as error:
        raise ConfigError(
            f"checkpoint.on_commit: {name} must be an on_commit component, such as {_SUCH}, or a function of one "
            f"argument, not {given!r:.100}. In a config: +on_commit@checkpoint.on_commit.NAME=COMPONENT"
        ) from error
    return cast("OnCommit", given)


class _Function:
    """A function in the place of a component."""

    def __init__(self, function: Callable[[CommittedCheckpoint], object]) -> None:
        self._function = function

    def committed(self, checkpoint: CommittedCheckpoint, /) -> None:
        self._function(checkpoint)


def _name_of(given: Any) -> str:
    return getattr(given, "__name__", type(given).__name__)


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
    """Return a component of a kind, built where its name is given, the ``usual`` one for ``None``."""
    if given is None or isinstance(given, str):
        return build(kind, usual if given is None else given)
    try:
        if isinstance(given, type):
            raise RegistryError("a class is no component yet; call it")
        check(kind, type(given).__name__, given)
    except RegistryError as error:
        such = f"a {kind} or the name of one, such as {usual!r}"
        raise ConfigError(f"{kind} must be {such}, not {given!r:.100}: {error}") from None
    return given
