"""A step of the tier as a checkpoint of the store: what ranks do with it that are left when others are lost.

What they hold themselves comes first (:mod:`.survivors`). Where that is no whole step, as with FSDP2, the machines left
may have one in the tier. The next start on these machines would go on from it; one on other machines has the store
alone. The files are copied as they are, each block compared with the checksum of when it was staged. Plain torch does
not read such a checkpoint, since a tier has no ``.metadata``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial

from torch.distributed.checkpoint.planner import SavePlan

from stagereg.checkpoint.format.manifest import Checkpoint, new_token
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.storage.aligned import BLOCK_BYTES
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.keep import Keep
from stagereg.checkpoint.store.open_store import is_url
from stagereg.checkpoint.store.retry import retrying
from stagereg.checkpoint.tiers.inventory import NearStep
from stagereg.checkpoint.tiers.near import NearCopies
from stagereg.errors import CheckpointError, DamagedError

ALL = Keep(newest=1 << 62)
"""Every checkpoint stays."""
_FAILING = "The tier's step was not saved"

_log = logging.getLogger(__name__)


def store_newest(
    near: NearCopies, store: CheckpointStore, ranks: RankGroup, lost: Mapping[str, Sequence[str]]
) -> Checkpoint | None:
    """Commit the newest step that the machines of ``ranks`` have, if it is newer than what ``store`` has.

    Collective among ``ranks``, of which the first one holds the lock of the store. A step that proves damaged is
    passed over for the one before.

    Args:
        near: the tier.
        store: where it goes; nothing in it is replaced or deleted.
        ranks: who is left.
        lost: for the manifest.

    Returns:
        The checkpoint; ``None`` if there is no such step.

    Raises:
        CheckpointError: on all ranks: a step that is newer could not be read, or not be written.
    """

    def look() -> tuple[tuple[int, int], str]:
        there = store.checkpoints()[0] if ranks.rank == 0 else []
        newest = max(((near.branch_of(each.manifest.serial), each.manifest.step) for each in there), default=(-1, -1))
        return newest, new_token()

    [(newest, token), *_] = ranks.run_on_all(_FAILING, look)
    failure: CheckpointError | None = None
    for step in near.steps(ranks):
        if (step.save.branch, step.save.step) > newest:
            try:
                return _store(near, step, store, ranks, token, lost)
            except CheckpointError as error:  # on all ranks
                failure = failure or error
    if failure is not None:
        raise failure
    return None


def _store(
    near: NearCopies,
    step: NearStep,
    store: CheckpointStore,
    ranks: RankGroup,
    token: str,
    lost: Mapping[str, Sequence[str]],
) -> Checkpoint:
    path = store.temporary(step.save.step, token)
    manifest = dataclasses.replace(step.manifest, serial=0, lost={rank: [*missing] for rank, missing in lost.items()})

    def commit(_: Sequence[None]) -> list[Checkpoint]:
        return [store.publish(path, manifest, ALL)] * ranks.size

    try:
        return ranks.round_trip(_FAILING, partial(_copy, near, step, path, ranks), commit, ranks.limit)
    except CheckpointError:
        if ranks.rank == 0:
            store.backend.discard(path)
        raise


def _copy(near: NearCopies, step: NearStep, path: str, ranks: RankGroup) -> None:
    """Copy this rank's share of the parts of a step."""
    storage = DcpStorage(path)
    storage.prepare_local_plan(SavePlan([]))
    for rank in near.parts_of(ranks, step):
        copy = partial(_copy_part, near, step, rank, storage)
        retrying("writing", path, copy) if is_url(path) else copy()
    failpoint("written")


def _copy_part(near: NearCopies, step: NearStep, rank: int, storage: DcpStorage) -> None:
    with near.reading(step) as reader:
        for name, mark in step.parts[rank][0].files:
            reader.fetch(name, [range(mark.bytes)])
            with storage.create(name) as file:
                for at in range(0, mark.bytes, BLOCK_BYTES):
                    block = bytearray(min(BLOCK_BYTES, mark.bytes - at))
                    reader.read_into(name, at, memoryview(block))
                    file.write(memoryview(block))
            if storage.marks[name] != mark:
                raise DamagedError(f"{name} is not what was staged")
