"""The contract of an ``on_commit`` component: what is called on rank 0 for each checkpoint that is complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

from stagereg.base.option_text import option
from stagereg.base.spec import check
from stagereg.checkpoint.format.manifest import Manifest
from stagereg.errors import ConfigError, RegistryError


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A checkpoint that is complete and flushed.

    Attributes:
        step: the training step.
        path: its directory, or its URL as text in an object store. It is not deleted while a call for it runs.
        manifest: of its files, with their sizes and checksums.
        metrics: the values that rank 0 logged for that step (:func:`stagereg.log`) before the step was saved; values
            may be NaN or infinite.
    """

    step: int
    path: Path | str
    manifest: Manifest
    metrics: Mapping[str, float]


class OnCommit(Protocol):
    """What ``Checkpointer(on_commit=[...])`` takes, and ``checkpoint.on_commit`` in a config.

    All ranks construct it; ``committed`` is called on rank 0 alone, on a thread of the component's own, for one
    checkpoint after the other in the order of their commits. So it holds up neither training nor the next save, and
    must not use the process group. What it raises is logged and counted, and fails nothing.
    """

    def committed(self, checkpoint: CommittedCheckpoint, /) -> None:
        """Do what is to be done with a checkpoint. It must neither change nor delete it.

        A call that has not returned after ``checkpoint.failure.timeout`` is given up; its thread cannot be ended, so
        the component is not called again before it has returned.
        """


_SUCH = "stagereg.build('on_commit', 'wandb')"


def components(given: Any) -> dict[str, OnCommit]:
    """Return ``on_commit`` components by name, of a list, a mapping with names, or one; functions become components."""
    if not isinstance(given, (Mapping, list, tuple)):
        given = [] if given is None else [given]
    if not isinstance(given, Mapping):
        given = {f"{i} ({_name_of(each)})": each for i, each in enumerate(given)}
    return {str(name): _commit_component(name, each) for name, each in given.items() if each is not None}


def _commit_component(name: str, given: Any) -> OnCommit:
    if callable(given) and not isinstance(given, type) and not hasattr(given, "committed"):
        return SimpleNamespace(committed=given)
    try:
        if isinstance(given, type):
            raise RegistryError("a class is no component yet; call it")
        check("on_commit", _name_of(given), given)
    except RegistryError as error:
        raise ConfigError(
            f"{option('checkpoint.on_commit')}: {name} must be an on_commit component, such as {_SUCH}, or a function "
            f"of one argument, not {given!r:.100}. In a config: +on_commit@checkpoint.on_commit.NAME=COMPONENT"
        ) from error
    return cast("OnCommit", given)


def _name_of(given: Any) -> str:
    return getattr(given, "__name__", type(given).__name__)
