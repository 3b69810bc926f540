"""Sums requested by the ranks in a loop, in which ranks that have left the loop take part.

A rank that has left cannot predict when, or how often, the others send requests. So its channel's thread responds until
all ranks have left the loop, and can start again for another loop. A request costs one small all-reduce.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from stagereg.errors import JoinError
from stagereg.kernel.channel import ControlChannel, Waiting


class Responder:
    """One rank's endpoint for sums of ``width`` numbers, on its own ``channel``. Every rank closes it once per loop.

    ``follow`` is called on the channel's thread after each request that this rank responds to. ``call`` names the
    program's call in messages. After a failed join, do not close or reuse the endpoint.
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
        self._ended: threading.Event | None = None  # set while this rank responds
        self._failure: Exception | None = None

    @property
    def running(self) -> bool:
        """Whether this rank responds, and cannot send requests."""
        return self._ended is not None

    def request(self, *values: float) -> list[float]:
        """Return the sums over all ranks. Called in the same order by every rank that does not respond."""
        if self.running:
            raise JoinError(
                "the loop body skipped an empty batch and now calls join.mean on another empty batch, but it must do "
                "the same on every empty batch. Remove the code that checks whether there are samples."
            )
        pending = self.channel.add([*values, 0.0])
        self._waiting(pending.ready, self._call)
        return pending.wait()[:-1]

    def start(self) -> None:
        """Start responding, until all ranks do. Idempotent."""
        if not self.running:
            ended = self._ended = threading.Event()
            self.channel.thread.submit(lambda: self._answer(ended))

    def close(self) -> None:
        """Respond until all ranks do. Raises: the error of the responding thread."""
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
