"""The checkpointer extension that saves to a local tier and restores from it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from stagereg.base.option_text import option
from stagereg.checkpoint.extension import Candidate, CheckpointExtension, CheckpointSource, RestoreRequest, Saves, Setup
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.targets import Schedule
from stagereg.errors import CheckpointError
from stagereg.extensions.tiers.folder import make_private
from stagereg.extensions.tiers.near import LocalTier
from stagereg.extensions.tiers.source import TierSource
from stagereg.extensions.tiers.target import TierTarget
from stagereg.extensions.tiers.tier import Tier

_NOTES = "notes"

_log = logging.getLogger(__name__)


class Tiering(CheckpointExtension):
    """Adds a local tier to one checkpointer. :meth:`targets` raises the errors of :class:`.LocalTier`.

    ``tier`` is the tier of the config. ``schedule`` selects the steps to save in the tier.
    """

    name = "tiers"

    def __init__(self, tier: Tier, schedule: Schedule) -> None:
        self.options = {"tier": str(tier)}
        self.near: LocalTier | None = None  # set by targets()
        self._tier, self._schedule = tier, schedule

    def targets(self, setup: Setup) -> list[TierTarget]:
        """Lock the run's directory from the start of the run, and create the tier. Collective."""
        tier, stores = self._tier, setup.stores
        if not stores:
            failing = f"{option('tier.dir', tier.dir)} cannot be used"
            setup.ranks.run_on_all(failing, lambda: make_private(os.path.join(tier.prepare(), _NOTES)))
        setup.lock()
        ranks = RankGroup(setup.process_group, setup.timeout)
        self.near = LocalTier(tier, ranks, setup.store, stores)
        self._schedule.start(setup.process_group)
        if ranks.rank == 0:
            _log_what_it_survives(self.near, stores)
        return [TierTarget(self.near, ranks, self._schedule)]

    def start(self, setup: Setup, saves: Saves) -> None:
        self._stores, self._saves = setup.stores, saves
        self._newest: int | None = None  # the newest step in the tier

    def leads(self) -> bool:
        """Whether this rank is the lowest rank of its machine."""
        return self.near is not None and self.near.leads

    def committed(self, step: int, where: str, checkpoint: Checkpoint | None) -> None:
        if where == "tier":
            self._newest = step

    def sources(self, request: RestoreRequest) -> Sequence[CheckpointSource]:
        reads = self.near is not None and request.own and (not request.is_path or self.near.names(request.resume))
        return [TierSource(self.near, request)] if reads and self.near is not None else ()

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        step = None if candidate is None else candidate.step
        if request.own and self.near is not None:
            self.near.resume_from(step)
        if candidate is not None and candidate.source == TierSource.name:
            self._newest = step

    def completed(self) -> None:
        """Delete the steps of the tier if the checkpoint directory has the last step; otherwise wait for peer copies.

        Does nothing if the tier has no step of this run.
        """
        stored = self._saves.newest if self._stores else None
        if self.near is None or self._newest is None:
            return
        if stored is not None and self._newest <= stored:
            self.near.clear()
            return
        try:
            self.near.wait_for_copies()
        except CheckpointError as error:
            _log.warning("stagereg: %s", error)

    def close(self, in_time: bool) -> None:
        """Stop the threads and release the lock of the folder. Idempotent."""
        if self.near is not None:
            self.near.close()


def notes_of(tier: Tier) -> str:
    """Return the folder in which a run without a checkpoint directory stores its records."""
    return os.path.join(tier.dir, _NOTES)


def _log_what_it_survives(near: LocalTier, stores: bool) -> None:
    tier, others = near.tier, len(near.machines) - 1
    copies = min(tier.copies, others)
    lost = "the failure of a machine" if copies == 0 else f"the simultaneous failure of {copies + 1} machines"
    reboot = "" if tier.durable else ", a reboot of all machines that have them"
    if not stores:
        _log.warning(
            "stagereg: %s: steps are stored in %s only. They do not survive %s%s, or the deletion of that folder. For "
            "durable checkpoints set %s.",
            *(option("checkpoint.dir", None), tier.dir, lost, reboot, option("checkpoint.dir", "PATH")),
        )
    elif copies < tier.copies:
        there = "1 machine" if others == 0 else f"{others + 1} machines"
        text = "stagereg: %s, but the run has %s: the steps of the local tier do not survive %s."
        _log.warning(text, option("tier.copies", tier.copies), there, lost)
