"""Which checkpoint a run resumes from, and which of those in a store are undamaged.

One rank lists the store, so that all ranks use the same list: complete checkpoints, newest first, and directories that
are none by their manifest or a size. No content is read for that. The content of a checkpoint is then compared with the
marks in its manifest by all ranks, each reading a share of the files.

A file that could not be looked at (no permission, a server that does not answer) is not damage but an error: passing
over it would give up steps that may be fine. :mod:`stagereg.checkpoint.restoring` decides what to do about a damaged
checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagereg.checkpoint.damage import Condition, Found, Unclear, differences
from stagereg.checkpoint.manifest import Checkpoint
from stagereg.checkpoint.rank_group import RankGroup
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.open_store import open_parent_store, store_path
from stagereg.errors import CheckpointError

__all__ = ["Choice", "choice", "compared", "newest_good"]


@dataclass(frozen=True)
class Choice:
    """What there is to go on from.

    Attributes:
        candidates: complete by manifest and sizes, in the order in which they are to be tried.
        damaged: step directories that are no complete checkpoints, and would come before or between the candidates.
        others: complete ones that are not to be tried, and may be offered; newest first.
        latest: path of the one that ``latest`` points to, if that is complete.
    """

    candidates: tuple[Checkpoint, ...]
    damaged: tuple[Condition, ...] = ()
    others: tuple[Checkpoint, ...] = ()
    latest: str | None = None

    def newer(self, than: Checkpoint) -> list[Condition]:
        """Return those of ``damaged`` that were committed after a checkpoint, as far as is known."""
        if than.path == self.latest:
            return []
        return [each for each in self.damaged if _is_newer(each, than)]


def choice(store: CheckpointStore, resume: str) -> Choice:
    """List what ``resume`` (``"auto"``, ``"latest"`` or the path of a checkpoint) stands for in ``store``. One rank.

    Raises:
        CheckpointError: a checkpoint that is to be there is not, or one could not be looked at.
    """
    if resume not in ("auto", "latest"):
        return _named(resume)
    complete, refused = store.checkpoints()
    unfinished = set(store.leftovers()) if refused else set()  # which in an object store lie among the others
    damaged = tuple(store.condition(path) for path in sorted(set(refused) - unfinished, reverse=True))
    for each in damaged:
        _check_certain(each)
    latest = store.latest()
    pointed = next((one.path for one in complete if latest is not None and one.manifest == latest.manifest), None)
    if resume == "auto":
        return Choice(tuple(complete), damaged, latest=pointed)
    if not complete and not damaged:
        raise CheckpointError(
            f"resume=latest, but there is no complete checkpoint in {store.root}; resume=auto starts from scratch."
        )
    everything = Choice(tuple(complete), damaged, latest=pointed)
    newer = everything.newer(complete[0]) if complete else list(damaged)
    if newer:
        return Choice((), tuple(newer), tuple(complete))
    return Choice(tuple(complete[:1]), others=tuple(complete[1:]))


def compared(store: CheckpointStore, chosen: Checkpoint, ranks: RankGroup) -> Condition:
    """Read all files of ``chosen``, each rank a share, and return what is wrong with them. Collective.

    Args:
        store: that it lies in.
        chosen: the checkpoint, complete by manifest and sizes.
        ranks: who reads.

    Raises:
        CheckpointError: on all ranks: a file could not be looked at, or not by every rank.
    """
    share = sorted(chosen.manifest.files)[ranks.rank :: ranks.size]
    failing = f"{chosen.path} could not be read"
    shares = ranks.run_on_all(failing, lambda: store.contents(chosen.path, share))
    unclear = [
        f"rank {rank}: {name}: {mark.why}"
        for rank, marks in enumerate(shares)
        for name, mark in marks.items()
        if isinstance(mark, Unclear)
    ]
    if unclear:
        raise CheckpointError(f"{failing}: {'; '.join(unclear[:3])}")
    _check_same_files(store, chosen, shares, ranks)
    found = {name: mark for marks in shares for name, mark in marks.items()}
    return Condition(chosen.path, chosen.manifest, differences(chosen.manifest, found))


def newest_good(
    store: CheckpointStore, offered: Sequence[Checkpoint], content: bool, ranks: RankGroup
) -> Checkpoint | None:
    """Return the first of ``offered`` with which nothing is wrong, by its content if that is to be read. Collective."""
    for each in offered:
        if not content or not compared(store, each, ranks).damages:
            return each
    return None


def _named(path: str) -> Choice:
    store = open_parent_store(path)
    condition = store.condition(store_path(path))
    _check_certain(condition)
    complete = store.checkpoints()[0]
    others = tuple(one for one in complete if one.manifest != condition.manifest)
    found = condition.checkpoint
    return Choice((), (condition,), others) if found is None else Choice((found,), others=others)


def _is_newer(damaged: Condition, than: Checkpoint) -> bool:
    if damaged.manifest is not None:
        return (damaged.manifest.serial, damaged.manifest.step) > (than.manifest.serial, than.manifest.step)
    return damaged.step is None or damaged.step > than.manifest.step


def _check_certain(condition: Condition) -> None:
    if not condition.certain:
        raise CheckpointError(
            f"{condition.path} may be a good checkpoint, and it could not be looked at: {condition}. "
            "To go on from another one, name it: checkpoint.resume=PATH."
        )


def _check_same_files(
    store: CheckpointStore, chosen: Checkpoint, shares: Sequence[dict[str, Found]], ranks: RankGroup
) -> None:
    """A file that one rank misses and another sees is not lost: the ranks see different file systems. Collective."""
    missed = [(rank, name) for rank, marks in enumerate(shares) for name, mark in marks.items() if mark == "missing"]
    if not missed:
        return
    complete = ranks.run_on_all(f"{chosen.path} could not be read", lambda: not store.condition(chosen.path).damages)
    if any(complete):
        rank, name = missed[0]
        raise CheckpointError(
            f"Rank {rank} does not find {chosen.path}/{name}, which rank {complete.index(True)} does: all ranks have "
            f"to see the same files in {store.root}."
        )
