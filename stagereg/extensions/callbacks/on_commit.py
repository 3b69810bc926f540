"""The contract of an ``on_commit`` component, which is called on rank 0 for each complete checkpoint."""

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
    """A checkpoint that is complete and flushed to storage.

    Attributes:
        step: the training step.
        path: the directory as a ``Path``, or the URL as a ``str``. During a call, retention does not delete it.
        manifest: the manifest, which lists the files of the checkpoint with sizes and checksums.
        metrics: the values that rank 0 logged for that step (:func:`stagereg.log`) before the step was saved; values
            may be NaN or infinite.
    """

    step: int
    path: Path | str
    manifest: Manifest
    metrics: Mapping[str, float]


class OnCommit(Protocol):
    """The protocol of components in ``Checkpointer(on_commit=[...])``, or ``checkpoint.on_commit`` in a config.

    All ranks construct the component. ``committed`` is called only on rank 0, on a thread of the component, for one
    checkpoint at a time, in the order of commits. A call delays neither training nor the next save, and must not
    use the process group. Exceptions are logged and counted; they do not fail the run or the save.
    """

    def committed(self, checkpoint: CommittedCheckpoint, /) -> None:
        """Process a checkpoint. Must neither change nor delete the checkpoint.

        After ``checkpoint.failure.timeout``, a call counts as failed. Its thread cannot be ended, so the component is
        not called again before the call has returned.
        """


_SUCH = "stagereg.build('on_commit', 'wandb')"


def components(given: Any) -> dict[str, OnCommit]:
    """Convert one component, a list or a mapping to a dict of components by name. Functions become components."""
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
            raise RegistryError("a class is not a component; pass an instance")
        check("on_commit", _name_of(given), given)
    except RegistryError as error:
        raise ConfigError(
            f"{option('checkpoint.on_commit')}: {name} must be an on_commit component, such as {_SUCH}, or a function "
            f"of one argument, not {given!r:.100}. In a config: +on_commit@checkpoint.on_commit.NAME=COMPONENT"
        ) from error
    return cast("OnCommit", given)


def _name_of(given: Any) -> str:
    return getattr(given, "__name__", type(given).__name__)
