"""A request that only the ranks in a loop make together, while ranks that have left it answer with what they have.

A rank that has left cannot know when the others request, or how often. So it answers on its channel's own thread until
no rank is left that may request; then it can begin anew, as for another loop. A request costs one small all-reduce.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from stagereg.errors import JoinError
from stagereg.kernel.channel import ControlChannel, Waiting


class Responder:
    """One rank's end of sums of ``width`` numbers, on a ``channel`` of its own. Every rank closes it once a loop.

    ``follow`` is what a rank that answers does after each request, on the channel's thread. ``call`` is what the
    program calls to request, for messages. After a failed join it is not closed, and not used again.
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
        self._ended: threading.Event | None = None  # while this rank answers
        self._failure: Exception | None = None

    @property
    def running(self) -> bool:
        """Whether this rank answers, and cannot request."""
        return self._ended is not None

    def request(self, *values: float) -> list[float]:
        """Return the sums over all ranks; called by every rank that does not answer, in the same order."""
        if self.running:
            raise JoinError(
                "the loop body passed over an empty batch, and now calls join.mean on another one; it must do the "
                "same on every empty batch: remove what looks at whether there are samples"
            )
        pending = self.channel.add([*values, 0.0])
        self._waiting(pending.ready, self._call)
        return pending.wait()[:-1]

    def start(self) -> None:
        """Answer from now on, until all ranks do. Twice is harmless."""
        if not self.running:
            ended = self._ended = threading.Event()
            self.channel.thread.submit(lambda: self._answer(ended))

    def close(self) -> None:
        """End: answer until all ranks do. Raises: what answering failed with."""
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
