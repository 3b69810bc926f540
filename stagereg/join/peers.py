"""The other ranks of a join: waits for them, follows them, and publishes this rank's progress to them.

A :class:`Peers` object lives as long as its join, and does not depend on loops, joinables or hooks. A rank without data
follows the other ranks: it saves checkpoints and logs metrics when they do.
"""

from __future__ import annotations

import functools
import json
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from stagereg.base.followers import followers
from stagereg.base.option_text import option
from stagereg.errors import JoinError
from stagereg.join.failure import FailureDetector
from stagereg.join.progress import Progress
from stagereg.join.responder import Responder
from stagereg.kernel.channel import LIMIT_S, PendingSum, control_channel, resources_of, wait_for_keys
from stagereg.kernel.shadow import TorchWire

_POLL_INTERVAL_S = 0.0005


class Peers:
    """The other ranks of one join. All ranks construct their instances in the same order."""

    def __init__(self, wire: TorchWire, timeout_s: float, steps: Callable[[], int]) -> None:
        self.wire, self.group, self._steps = wire, wire.group, steps
        self.progress = Progress()
        self.responder: Responder | None = None
        self.announced: Any = None  # handle of this rank's last all-reduce with torch's protocol
        self.follows = self.failed = False
        self.keys = ["options", "entered", "lacking", "all left"]  # the join's keys in the rendezvous store
        self.name = resources_of(self.group).next_name("join")
        parts = self.group, timeout_s, self.name, lambda: steps() or None
        self.detector = FailureDetector(*parts, elsewhere=self._is_elsewhere, progress=lambda: self.progress)
        self.store: Any = PrefixStore(self.name, self.group.get_group_store()) if self.group.size() > 1 else HashStore()

    def _is_elsewhere(self) -> bool:
        """Return whether this rank is outside the loop body."""
        return self.follows or (self.responder is not None and self.responder.running)

    def expect_alike(self, options: Mapping[str, Any]) -> None:
        """Compare the join's options with the other ranks' options. Raises: ``JoinError`` if they differ."""
        own = json.dumps(options, default=str)
        others = json.loads(self.store.compare_set("options", "", own))
        for name, value in json.loads(own).items():
            if others[name] != value:
                error = JoinError(
                    f"{option(f'join.{name}')} is not the same on all ranks: this rank has {value}, another rank has "
                    f"{others[name]}. Pass the same options on all ranks."
                )
                self.detector.report(error)
                raise error

    def find_difference(self, name: str, value: Mapping[str, Any], ranks: int) -> list[Any]:
        """Compare the JSON values of ``ranks`` ranks. Waits for these ranks.

        Returns two ``[value, rank]`` pairs with different values, or an empty list if all values are equal.
        """
        first, count, known, differs = keys = [f"{name}/{each}" for each in ("first", "count", "known", "differs")]
        self.keys += keys
        own = [value, dist.get_rank()]
        others = json.loads(self.store.compare_set(first, "", json.dumps(own)))
        if others[0] != value:
            self.store.set(differs, json.dumps([others, own]))
        if self.store.add(count, 1) == ranks:
            self.store.set(known, "")
        self.wait(lambda seconds: wait_for_keys(self.store, [known], seconds), "the end of the join")
        return json.loads(self.store.get(differs)) if self.store.check([differs]) else []

    def count_forward(self, gathers: bool, trains: bool) -> None:
        """Count a forward, which may begin a step. If it gathers parameters and does not train, wait for all ranks."""
        progress = self.progress.begun(self._steps())
        if gathers:
            progress = progress.mark() if trains else progress
            progress = progress._replace(forwards=progress.forwards + 1)
        self.progress = progress
        if gathers and not trains and self.group.size() > 1:
            met = control_channel(self.group, "forward", self.detector.wait).add([0.0])
            self.wait(met.ready, "a forward under no_grad")

    def follow(self) -> None:
        """If this rank has left the loop, do the work that followers do in each step, such as saves and logs."""
        if self.follows:
            for follower in list(followers):
                follower.follow()

    def end_loop(self) -> None:
        """Called when no rank has data."""
        self.follow()
        self.follows = False
        for follower in list(followers):
            follower.loop_ended()

    def wait(self, ready: Callable[[float], bool], what: str) -> None:
        """Wait for other ranks like :meth:`FailureDetector.wait`, and follow them during the wait."""

        def ready_to_go_on(seconds: float) -> bool:
            self.follow()
            return ready(seconds)

        self.detector.wait(ready_to_go_on, what)

    def count_active(self) -> int:
        """Return the number of ranks that begin another step. Called on a rank without data, with torch's protocol.

        Waits for the other ranks, and follows them during the wait.
        """
        self.progress = self.progress._replace(waits=True)
        total = torch.zeros(1, dtype=torch.get_default_dtype(), device=self.wire.device)
        work = dist.all_reduce(total, group=self.group, async_op=True)
        # A wait with a short timeout polls gloo (CPU); accelerator backends may abort the group after a timeout.
        ready = PendingSum(array("d"), work).ready if total.is_cpu else functools.partial(_wait_for_work, work)
        self.wait(ready, "the next step")
        return int(total.item())

    def wait_for_ranks(self, ready: Callable[[float], bool], what: str) -> None:
        """Wait for ranks that may still prepare their data, as long as torch does. Raises if a rank has failed."""
        self.detector.wait(ready, what, LIMIT_S)


def _wait_for_work(work: Any, seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not work.is_completed() and time.monotonic() < ends:
        time.sleep(_POLL_INTERVAL_S)
    if work.is_completed():
        work.wait()  # raises the error of the collective, if it failed
    return bool(work.is_completed())
