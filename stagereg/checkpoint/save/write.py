"""The write of one copy to one target, and a cache of the target's last save for its thread."""

from __future__ import annotations

import math
import threading

from torch.distributed.checkpoint.planner import SavePlan

from stagereg.checkpoint.format.index import Readable
from stagereg.checkpoint.ranks.merging import Structures
from stagereg.checkpoint.ranks.unchanged import Exchange
from stagereg.checkpoint.save.staged_copy import Request, StagedCopy
from stagereg.checkpoint.save.state_planner import StatePlanner
from stagereg.checkpoint.targets import SaveTarget


class ExchangeCache:
    """The results of a target's last save, so that ranks send only changes. Used by the target's thread."""

    def __init__(self, repeats: bool) -> None:
        self.plans, self.results = Exchange(repeats), Exchange(repeats)
        self.planner = StatePlanner()
        self.plan: SavePlan | None = None  # the plan of this rank
        self.sent: list[SavePlan] = []  # the same plan, in the form that is sent to rank 0
        self.nbytes = 0  # bytes of the rank's tensors, without random number generators
        self.dealt: SavePlan | None = None  # the plan that rank 0 assigned to this rank
        self.entries: Structures = {}  # on rank 0: the entries of all ranks
        self.described = ""  # on rank 0: the tables of the index, as JSON
        self.readable = Readable()  # on rank 0: the validated parts of the index
        self.was_read_back = False  # whether a save was read back before its commit

    def forget(self) -> None:
        """Clear the cache after a save that was skipped or has failed, so that the next save sends everything."""
        self.plans.forget()
        self.results.forget()
        self.entries = {}


class Write:
    """The write of one copy to one target, which has its own thread.

    Attributes:
        is_first: whether this write prepares the copy for all targets.
        is_last: whether this write reports why the copy could not be prepared, and counts its bytes.
    """

    def __init__(
        self, request: Request, copy: StagedCopy, target: SaveTarget, number: int = 0, until: float = math.inf
    ) -> None:
        self.request, self.copy, self.target = request, copy, target
        self.is_first, self.is_last = number == request.targets[0], number == request.targets[-1]
        # Written by the thread of the target.
        self.at = "waiting for its turn"  # the current action of this rank, for messages
        self.agreed = False  # whether all ranks have staged and have got their plans
        self.over = threading.Event()  # set when the write has ended or failed
        self._reads = True
        # Written under the lock of the thread: the deadline (``time.monotonic``), infinite until the write begins, and
        # whether a timeout was reported.
        self.until = until
        self.late = False
        self.abandoned = False  # whether the write must not commit; set by the training thread when it stops saving

    def leave_copy(self) -> None:
        """Stop reading the copy. Idempotent."""
        if self._reads:
            self._reads = False
            self.copy.leave()
