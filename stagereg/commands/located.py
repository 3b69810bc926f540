"""Which checkpoints a path or URL on the command line means: all of a directory, or one.

Looks and changes nothing; who trains into the directory is not disturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stagereg.checkpoint.damage import Condition
from stagereg.checkpoint.manifest import LATEST, MANIFEST, step_of
from stagereg.errors import CheckpointError

if TYPE_CHECKING:
    from stagereg.checkpoint.store.checkpoint_store import CheckpointStore

__all__ = ["Located", "located", "readable", "size", "state"]

_NAMED = 5
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Located:
    """What was asked for.

    Attributes:
        store: the directory of checkpoints.
        conditions: what is wrong with each by manifest and sizes, the highest step first; at least one.
        latest: path of the one that ``latest`` points to, if that is complete.
        one: whether a single checkpoint was asked for.
    """

    store: CheckpointStore
    conditions: Sequence[Condition]
    latest: str | None
    one: bool


def located(target: str, empty: bool = False) -> Located:
    """Return what ``target`` means: a directory of checkpoints, one of them, or ``latest``; a path or a URL.

    Args:
        target: as given by the user.
        empty: whether a directory may be one of checkpoints without having any.

    Raises:
        CheckpointError: there is nothing, or it cannot be looked at.
        ConfigError: it is a URL that cannot be read here.
    """
    try:
        return _located(target, empty)
    except OSError as error:
        raise CheckpointError(f"{target} could not be looked at: {error}") from error


def _located(target: str, empty: bool) -> Located:
    from stagereg.checkpoint.store.open_store import open_parent_store, open_store, store_path

    name = target.rstrip("/").rpartition("/")[2]
    if name != LATEST and step_of(name) is None:
        store = open_store(target)
        every = _conditions(store)
        if every or (empty and store.leftovers()):
            return Located(store, every, _latest(store, every), one=False)
    store = open_parent_store(target)
    condition = store.condition(store_path(target))
    there = any(each.name == condition.name for each in _conditions(store))
    if there or condition.manifest is not None or not _absent(condition):
        return Located(store, [condition], _latest(store, [condition]), one=True)
    raise CheckpointError(f"There is no checkpoint in {target}.{_below(target)}")


def size(condition: Condition) -> int | None:
    """Bytes of a checkpoint's files by its manifest; ``None`` if unknown."""
    files = None if condition.manifest is None else condition.manifest.files
    return None if files is None else sum(mark.bytes for mark in files.values())


def readable(nbytes: int | None) -> str:
    """A size as people read it."""
    if nbytes is None:
        return "-"
    amount = float(nbytes)
    for unit in _UNITS[:-1]:
        if amount < 1024:
            return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} {_UNITS[-1]}"


def state(condition: Condition, good: str) -> str:
    """The state of a checkpoint, ``good`` if nothing is wrong; what could not be looked at is not called damaged."""
    if not condition.damages:
        return good
    return "damaged" if any(damage.certain for damage in condition.damages) else "unclear"


def _conditions(store: CheckpointStore) -> list[Condition]:
    complete, refused = store.checkpoints()
    unfinished = set(store.leftovers())  # which in an object store lie among the others
    every = [Condition(one.path, one.manifest) for one in complete]
    every += [store.condition(path) for path in refused if path not in unfinished]
    return sorted(every, key=lambda each: -1 if each.step is None else each.step, reverse=True)


def _absent(condition: Condition) -> bool:
    """Whether there is nothing at a path: no manifest, or a ``latest`` that leads nowhere."""
    return any(each.file == LATEST or (each.file == MANIFEST and each.what == "missing") for each in condition.damages)


def _latest(store: CheckpointStore, conditions: Sequence[Condition]) -> str | None:
    """The path of the one that ``latest`` points to, which a directory reached by a link may spell otherwise."""
    found = store.latest()
    return next((each.path for each in conditions if found is not None and each.manifest == found.manifest), None)


def _below(target: str) -> str:
    """Directories of checkpoints in a local directory that is none itself, as that of a run."""
    from stagereg.checkpoint.store.open_store import is_url, open_store

    folder = Path(target).expanduser()
    if is_url(target) or not folder.is_dir():
        return "" if is_url(target) else f" There is no directory {target}."
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir())
        found = [str(path) for path in inside if any(open_store(path).checkpoints())]
    except OSError:
        found = []
    named = ", ".join(found[:_NAMED]) + ", …" * (len(found) > _NAMED)
    return f" There are some in {named}." if found else ""
