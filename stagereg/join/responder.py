"""Sums over ranks, requested by the ranks in a loop. Ranks that have left the loop add zeros.

A rank that has left the loop cannot predict when the other ranks send requests. So the thread of its channel responds
to requests until all ranks have left the loop. The thread can start again for another loop. Each request runs one
all-reduce.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from stagereg.errors import JoinError
from stagereg.kernel.channel import ControlChannel, Waiting


class Responder:
    """One rank's endpoint for sums of ``width`` numbers, on its own ``channel``. Every rank closes it once per loop.

    The channel's thread calls ``follow`` after each request that this rank responds to. ``waiting`` waits for other
    ranks. ``call`` is the name of the program's call in messages. After a failed join, do not close or reuse it.
    """

    def __init__(
        self,
        channel: ControlChannel,
        width: int,
        waiting: Waiting,
        follow: Callable[[], object] = lambda: None,
        call: str = "join.mean",
    ) -> None:
        self.channel = channel
        self._nothing = [0.0] * width
        self._waiting = waiting
        self._follow = follow
        self._call = call
        self._ended: threading.Event | None = None  # not None while this rank responds
        self._failure: Exception | None = None

    @property
    def running(self) -> bool:
        """Whether this rank responds to requests. Such a rank cannot send requests."""
        return self._ended is not None

    def request(self, *values: float) -> list[float]:
        """Return the sums over all ranks. Collective: ranks that do not respond make all requests in the same order."""
        if self.running:
            raise JoinError(
                "the loop body skipped an empty batch and now calls join.mean on another empty batch, but it must do "
                "the same on every empty batch. Remove the code that checks whether there are samples."
            )
        pending = self.channel.add([*values, 0.0])
        self._waiting(pending.ready, self._call)
        return pending.wait()[:-1]

    def start(self) -> None:
        """Start responding to requests, until all ranks respond. Idempotent."""
        if not self.running:
            ended = self._ended = threading.Event()
            self.channel.thread.submit(lambda: self._answer(ended))

    def close(self) -> None:
        """Respond to requests until all ranks respond. Raises an error if the thread that responds has failed."""
        self.start()
        assert self._ended is not None
        self._waiting(self._ended.wait, "the end of the join")
        self._ended = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _answer(self, ended: threading.Event) -> None:
        try:
            while self.channel.add([*self._nothing, 1.0]).wait()[-1] < self.channel.size:
                self._follow()
        except Exception as error:
            self._failure = error
        ended.set()
