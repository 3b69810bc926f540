"""The ranks of a checkpointer leave together when one of them is signalled."""

from __future__ import annotations

import datetime

from stagereg.checkpoint.extension import CheckpointExtension, Due, Saves, Setup
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.ranks.requests import OperationLog
from stagereg.errors import CheckpointError
from stagereg.extensions.preemption.consensus import PreemptionConsensus


class PreemptionExtension(CheckpointExtension):
    """Agrees with the other ranks on the step after which all exit, within the grace period of a signal.

    Args:
        grace: from a signal to the end of its process.
    """

    name = "preemption"

    def __init__(self, grace: datetime.timedelta) -> None:
        self.consensus: PreemptionConsensus | None = None  # once it is started
        self._grace = grace

    def start(self, setup: Setup, saves: Saves) -> None:
        self._dir = str(setup.dir)
        signals = OperationLog(setup.training, f"checkpoint/{setup.token}/signals")
        ranks, grace_s = RankGroup(setup.process_group), self._grace.total_seconds()
        # A bound method would keep the saves of a checkpointer that was dropped.
        self.consensus = PreemptionConsensus(ranks, grace_s, lambda: saves.describe_newest(), signals)

    def due(self, step: int) -> Due:
        return Due.LEAVE if self._known.agreed_at(step) else Due.NO

    def urges(self) -> bool:
        return self.consensus is not None and any(self.consensus.signal_flags())

    def exit(self, step: int, failure: CheckpointError | None, resume: str | None) -> None:
        if self._known.agreed is not None:
            self._known.exit(step, self._dir, failure, resume)

    def follow(self, over: bool) -> None:
        (self._known.loop_ended if over else self._known.follow)()

    def idle(self) -> None:
        self._known.look_for_missed()

    def close(self, in_time: bool) -> None:
        if self.consensus is not None:
            self.consensus.close()

    @property
    def _known(self) -> PreemptionConsensus:
        assert self.consensus is not None
        return self.consensus
