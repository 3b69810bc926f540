"""One copy on its way to one target, and what the thread of a target keeps from one save to the next."""

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
    """The last save of one target, so that ranks need not send again what has not changed. For the target's thread."""

    def __init__(self, repeats: bool) -> None:
        self.plans, self.results = Exchange(repeats), Exchange(repeats)
        self.planner = StatePlanner()
        self.plan: SavePlan | None = None  # what this rank would have written
        self.sent: list[SavePlan] = []  # the same, as it is sent
        self.nbytes = 0  # of the tensors in it, without the states of generators
        self.dealt: SavePlan | None = None  # what it was told to write
        self.entries: Structures = {}  # on rank 0: those that ranks had
        self.described = ""  # on rank 0: the tensors in the index
        self.readable = Readable()  # on rank 0: the index, as far as it is known that the reader accepts it
        self.was_read_back = False  # a save was read back before it was committed

    def forget(self) -> None:
        """Send everything in the next save: this one has failed."""
        self.plans.forget()
        self.results.forget()
        self.entries = {}


class Write:
    """The write of one copy to one target, which has a thread of its own.

    Attributes:
        is_first: whether it prepares the copy for all targets.
        is_last: whether it reports why the copy could not be prepared, and counts its bytes.
    """

    def __init__(
        self, request: Request, copy: StagedCopy, target: SaveTarget, number: int = 0, until: float = math.inf
    ) -> None:
        self.request, self.copy, self.target = request, copy, target
        self.is_first, self.is_last = number == request.targets[0], number == request.targets[-1]
        # Written by the thread of the target.
        self.at = "waiting for its turn"  # what this rank is doing for it, for messages
        self.agreed = False  # all ranks have staged, and know what each of them writes
        self.over = threading.Event()  # it has ended, well or not
        self._reads = True
        # Written under the lock of the thread: when it has to be complete, as ``time.monotonic``; infinite before its
        # turn; and whether it was reported to take too long.
        self.until = until
        self.late = False
        self.abandoned = False  # not to be committed; written by the training thread, which closes the checkpointer

    def leave_copy(self) -> None:
        """Read the copy no more. Idempotent."""
        if self._reads:
            self._reads = False
            self.copy.leave()
