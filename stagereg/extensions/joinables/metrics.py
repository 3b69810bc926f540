"""``metrics``: sums and counts over all ranks, in and after a join. Means are means over the samples of all ranks.

A mean of the ranks' means is wrong if ranks have different numbers of samples. A collective in the loop hangs if some
ranks have left the loop. With this joinable, ranks accumulate locally, and ranks that have left respond from a thread.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from stagereg.errors import JoinError
from stagereg.join.joinable import BuiltInHook, BuiltInJoinable, JoinHook
from stagereg.join.responder import Responder
from stagereg.kernel.channel import ControlChannel, control_channel, resources_of, wait_until
from stagereg.registry import register

Number = float | torch.Tensor


@register("join_hook", "metrics")
class MetricsHook(BuiltInHook["MetricsJoinable"]):
    """Responds to other ranks that request the totals of this rank, while this rank has no more data."""

    def on_exhausted(self) -> None:
        self.joinable.responder.start()

    def main_hook(self) -> None:
        """Start the responder if it is not running yet, because torch's ``Join`` does not call :meth:`on_exhausted`."""
        self.joinable.responder.start()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.joinable.in_use = False
        self.joinable.responder.close()


@register("joinable", "metrics")
class MetricsJoinable(BuiltInJoinable):
    """Accumulates metrics on each rank, and sums them over the ranks on request.

    It does not announce steps to other ranks, so list it after the model, in stagereg's or torch's ``Join``. Without
    ``torch.distributed``, the sums include only this process.

    Args:
        process_group: the ranks to sum over; ``None`` is the default group.
        hook: a hook to use instead of ``metrics``.

    Example::

        metrics = stagereg.build("joinable", "metrics")
        with stagereg.Join([model, optimizer, metrics]):
            for x, y in loader:
                loss = train_one_step(x, y)                      # a sum over the batch
                metrics.add(loss=(loss.detach(), len(x)))        # no collective, no wait for the device
                if step % 100 == 0:
                    log(metrics.compute(reset=True))             # called by all ranks that still have data
        print(metrics.compute())                                 # called by all ranks
    """

    has_no_collectives = True
    own_hook = MetricsHook

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, hook: Callable[..., JoinHook] | None = None
    ) -> None:
        super().__init__(hook, process_group)  # on the CPU: only a few numbers are exchanged
        self._totals: dict[str, tuple[Number, Number]] = {}
        self._lock = threading.Lock()
        self._responder: Responder | None = None
        self.in_use = False  # whether a join is running, in which other ranks may wait for the responder

    def add(self, **metrics: tuple[Number, Number]) -> None:
        """Add to this rank's totals. Not collective.

        Args:
            **metrics: by name, a sum and the number of samples (or other units) in the sum: numbers, or one-element
                tensors, which stay on their device and are accumulated there in float64. On an empty batch of
                ``join.iterate``, a sum of zero whose count is a number in the batch is ignored, because that number
                belongs to an earlier batch; this check synchronizes with the device.

        Raises:
            JoinError: a metric is not a sum and a count.
        """
        added = {name: _pair(name, given) for name, given in metrics.items()}
        loop = None if self.session is None else self.session.loop
        if loop is not None and loop.counter is not None and loop.counter.is_empty:
            stale = {0.0, *loop.counter.kept.values()}
            added = {name: each for name, each in added.items() if each[0] or float(each[1]) not in stale}
        with self._lock:
            for name, (total, count) in added.items():
                before = self._totals.get(name, (0.0, 0.0))
                self._totals[name] = (before[0] + total, before[1] + count)

    def compute(self, reset: bool = False) -> dict[str, float]:
        """Return the mean of each metric over the samples of all ranks, by name. Omits metrics without samples.

        Collective. In a plain loop, all ranks with data call this method at the same point of the loop. Ranks that have
        left the loop respond from a thread, and must not call it. Before and after a join, and in a loop over
        ``join.iterate``, all ranks call it. In torch's ``Join``, call it after the forward of a step, because ranks
        respond only after that forward.

        Args:
            reset: whether to reset the totals afterwards, on all ranks. :meth:`reset` resets only this rank, and so
                cannot reset ranks that have left the loop.

        Raises:
            JoinError: a rank without data called this method, or a rank has already ended the join.
        """
        shares = [self._own()]
        if dist.is_available() and dist.is_initialized():
            if self.responder.running:
                raise JoinError(
                    "this rank has no more data, so it only responds to metrics.compute() of other ranks and cannot "
                    "call it. Call compute() in the loop or after the join, not in a function that the join calls on "
                    "ranks without data."
                )
            self.responder.request()
            shares = self._exchange(self.responder.channel, reset)
        elif reset:
            self.reset()
        means = {}
        for name in sorted({name for share in shares for name in share}):
            totals, counts = zip(*(share[name] for share in shares if name in share), strict=True)
            if count := math.fsum(counts):
                means[name] = math.fsum(totals) / count
        return means

    def reset(self) -> None:
        """Reset the totals of this rank only. In a join use ``compute(reset=True)``, which resets all ranks."""
        with self._lock:
            self._totals.clear()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook. The first call is collective."""
        self.detach()
        _ = self.responder
        self.in_use = True
        return super().join_hook(**kwargs)

    def detach(self) -> None:
        """After a failed join, drop the responder without closing it, because another rank may still wait for it."""
        if self.in_use:
            self.in_use, self._responder = False, None
        super().detach()

    @property
    def responder(self) -> Responder:
        """Sends requests to other ranks, or responds to their requests. The first access is collective."""
        if self._responder is None:
            group = self.join_process_group
            resources = resources_of(group)
            name = resources.next_name("metrics")
            channel = control_channel(group, name, self._wait)
            answer = partial(self._exchange, channel, False)
            self._responder = Responder(channel, 0, self._wait, answer, "metrics.compute")
            weakref.finalize(self, resources.drop, name).atexit = False
        return self._responder

    def _wait(self, ready: Callable[[float], bool], what: str) -> None:
        (wait_until if self.session is None else self.session.peers.detector.wait)(ready, what)

    def _own(self) -> dict[str, tuple[float, float]]:
        with self._lock:
            return {name: (float(total), float(count)) for name, (total, count) in self._totals.items()}

    def _exchange(self, channel: ControlChannel, reset: bool) -> list[dict[str, tuple[float, float]]]:
        """Return the totals of all ranks, and reset them if any rank requested ``reset``."""
        answers = channel.gather((reset, self._own()))
        if any(reset for reset, _ in answers):
            self.reset()
        return [totals for _, totals in answers]


def _pair(name: str, given: Any) -> tuple[Number, Number]:
    try:
        total, count = map(_number, given)
        return total, count
    except (TypeError, ValueError, RuntimeError):
        raise JoinError(
            f"the metric {name!r} takes a sum and a count, which are numbers or one-element tensors, got {given!r}. "
            f"Call for example metrics.add({name}=(loss_sum, len(batch)))."
        ) from None


def _number(value: Any) -> Number:
    return value.detach().to(torch.float64).reshape(()) if isinstance(value, torch.Tensor) else float(value)
