"""What a checkpointer has of its tier; nothing is done where that is ``none``."""

from __future__ import annotations

import logging
import os
from functools import partial

import torch.distributed as dist

from stagereg.base.option_text import choice, option
from stagereg.checkpoint.extension import RestoreExtension
from stagereg.checkpoint.hold import DirectoryLock
from stagereg.checkpoint.options import Failure
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.save.save_threads import SaveThreads
from stagereg.checkpoint.save.schedule import schedule_of
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.config.no_tier import NoTier
from stagereg.errors import CheckpointError, ConfigError
from stagereg.extensions.recovery.crashes import CrashCounter
from stagereg.extensions.tiers.folder import make_private
from stagereg.extensions.tiers.near import LocalTier
from stagereg.extensions.tiers.source import TierRestores
from stagereg.extensions.tiers.target import TierTarget
from stagereg.extensions.tiers.tier import Tier

_NOTES = "notes"

_log = logging.getLogger(__name__)


class Tiering:
    """The tier of one checkpointer. Constructing it is collective. Raises as :class:`.LocalTier`.

    Args:
        tier: what was chosen.
        process_group: as of the checkpointer.
        store: the store of the run, or what stands in its place.
        stores: whether steps go there too.
        failure: as of the checkpointer.
    """

    def __init__(
        self,
        tier: Tier,
        process_group: dist.ProcessGroup | None,
        store: CheckpointStore,
        stores: bool,
        failure: Failure,
    ) -> None:
        self.near: LocalTier | None = None  # what the ranks share
        self.target: TierTarget | None = None  # where saves go
        self.restores: list[RestoreExtension] = []  # what restores from there
        if isinstance(tier, NoTier):
            return
        ranks = RankGroup(process_group, failure.timeout)
        self.near = LocalTier(tier, ranks, store, stores)
        schedule = schedule_of(tier.every, failure.mtbf, process_group, "the tier ", in_tier=True)
        self.restores, self.target = [TierRestores(self.near)], TierTarget(self.near, ranks, schedule)
        if ranks.rank == 0:
            _log_what_it_survives(self.near, stores)

    def counter(
        self, store: CheckpointStore, max_crashes: int | None, first: bool, background: SaveThreads, token: str
    ) -> CrashCounter:
        """Return what counts crashes: for rank 0, the ``first``, or for one of each machine if none has the store.

        It hears of what ``background`` saves.
        """
        alone = self.near is not None and not self.near.shared
        counts = self.near.leads if alone and self.near is not None else first
        holds = self.near is not None  # the constructor locks the folder of the tier, and the store
        counter = CrashCounter(store, max_crashes, counts, shared=not alone, token=token, holds=holds)
        for each in background.all:
            near = each.target is self.target
            each.listeners.append(partial(counter.committed, near=True) if near else counter.committed)
        return counter

    def names(self, path: str) -> bool:
        """Whether a path is that of a step in the tier."""
        return self.near is not None and self.near.names(path)

    def finish(self, newest: int | None, stored: int | None) -> None:
        """The run has come to its end: delete what is in the tier, if the store has come as far; else have it copied.

        Collective. ``newest`` and ``stored`` are the newest steps in the tier and in the store. Nothing is done if the
        tier has saved nothing.
        """
        if self.near is None or newest is None:
            return
        if stored is not None and newest <= stored:
            self.near.clear()
            return
        try:
            self.near.wait_for_copies()
        except CheckpointError as error:
            _log.warning("stagereg: %s", error)

    def close(self) -> None:
        """End the threads and release the folder. Idempotent."""
        if self.near is not None:
            self.near.close()


def notes_of(tier: Tier) -> str:
    """Return where a run without a store notes what it has to. Raises: ``ConfigError`` if it has no tier either."""
    if isinstance(tier, NoTier):
        raise ConfigError(
            f"{option('checkpoint.dir')} must be the path or URL of a directory, unless a tier keeps the steps: choose "
            f"{choice('tier', 'disk', dir='PATH')}, or {choice('tier', 'memory')}."
        )
    return os.path.join(tier.dir, _NOTES)


def acquire_with_tier(tier: Tier, hold: DirectoryLock, ranks: RankGroup, stores: bool) -> None:
    """Take the lock that a run with a tier has from its start. Collective. Raises: ``CheckpointError``, on all ranks.

    A run that ``stores`` nowhere else gets its folder of :func:`notes_of` first, for this user alone.
    """
    if isinstance(tier, NoTier):
        return
    if not stores:
        failing = f"{option('tier.dir', tier.dir)} cannot be used"
        ranks.run_on_all(failing, lambda: make_private(os.path.join(tier.prepare(), _NOTES)))
    hold.acquire_on_all()


def _log_what_it_survives(near: LocalTier, stores: bool) -> None:
    tier, others = near.tier, len(near.machines) - 1
    copies = min(tier.copies, others)
    lost = "a machine that is lost" if copies == 0 else f"{copies + 1} machines that are lost at once"
    reboot = "" if tier.durable else ", or a reboot of all that have them"
    if not stores:
        _log.warning(
            "stagereg: %s: steps are in %s alone, and do not survive %s%s, or what clears that folder. For checkpoints "
            "that last, give a directory, %s.",
            *(option("checkpoint.dir", None), tier.dir, lost, reboot, option("checkpoint.dir", "PATH")),
        )
    elif copies < tier.copies:
        there = "is one machine" if others == 0 else f"are {others + 1} machines"
        text = "stagereg: %s, and there %s: what the tier has does not survive %s."
        _log.warning(text, option("tier.copies", tier.copies), there, lost)
