"""``metrics``: sums and counts over all ranks, in and after a join, so that means are over samples and exact.

A mean of the ranks' means is wrong where they have unequal numbers of samples, and a collective in the loop hangs where
some have left it. Here every rank adds up by itself, and ranks that have left answer from a thread.
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
    """Answers for as long as this rank is in the join without data."""

    def on_exhausted(self) -> None:
        self.joinable.responder.start()

    def main_hook(self) -> None:
        """Begin to answer, if that has not happened yet: torch's ``Join`` calls nothing before this."""
        self.joinable.responder.start()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.joinable.in_use = False
        self.joinable.responder.close()


@register("joinable", "metrics")
class MetricsJoinable(BuiltInJoinable):
    """Adds up metrics on each rank, and over the ranks when asked to.

    List it after the model, in stagereg's ``Join`` or in torch's; it announces nothing. Without ``torch.distributed``
    it is this process's metrics alone.

    Args:
        process_group: the ranks to add over; ``None`` is the default group.
        hook: another hook in the place of ``metrics``.

    Example::

        metrics = stagereg.build("joinable", "metrics")
        with stagereg.Join([model, optimizer, metrics]):
            for x, y in loader:
                loss = train_one_step(x, y)                      # a sum over the batch
                metrics.add(loss=(loss.detach(), len(x)))        # no collective, no wait for the device
                if step % 100 == 0:
                    log(metrics.compute(reset=True))             # all ranks that still have data
        print(metrics.compute())                                 # all ranks
    """

    has_no_collectives = True
    own_hook = MetricsHook

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, hook: Callable[..., JoinHook] | None = None
    ) -> None:
        super().__init__(hook, process_group)  # on the CPU: what is exchanged are a few numbers
        self._totals: dict[str, tuple[Number, Number]] = {}
        self._lock = threading.Lock()
        self._responder: Responder | None = None
        self.in_use = False  # in a join that has not ended, where some rank may wait at the responder

    def add(self, **metrics: tuple[Number, Number]) -> None:
        """Add to this rank's totals; no collective.

        Args:
            **metrics: for each name a sum and the number of samples (or of whatever the mean is over) that it is of:
                numbers, or tensors of one element, which stay on their device and are added there in float64. On an
                empty batch of ``join.iterate``, a sum of zero whose count is a number in the batch counts as none,
                since the number is of an earlier batch; this waits for the device.

        Raises:
            JoinError: something else was given.
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
        """Return the mean of every metric over the samples of all ranks, by name; of what has samples on some rank.

        In a join, all ranks that still have data call it at the same point of the loop; those that have left it answer
        by themselves, and must not call it. Before, after and in ``join.iterate``, all ranks call it. In torch's
        ``Join`` call it after the forward of a step, since ranks do not answer before they know that the step is on.

        Args:
            reset: start anew afterwards, on all ranks; also on those that have left the loop, which a :meth:`reset` of
                the others would not reach.

        Raises:
            JoinError: a rank without data called it, or a rank has ended the join already.
        """
        shares = [self._own()]
        if dist.is_available() and dist.is_initialized():
            if self.responder.running:
                raise JoinError(
                    "this rank has no data any more, so it gives its metrics when the others ask, and cannot ask "
                    "itself. Call compute() in the loop or after the join, not in a function that the join calls on "
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
        """Start anew on this rank alone. In a join use ``compute(reset=True)``, which reaches all ranks."""
        with self._lock:
            self._totals.clear()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook. Collective where it is the first time."""
        self.detach()
        _ = self.responder
        self.in_use = True
        return super().join_hook(**kwargs)

    def detach(self) -> None:
        """Leave a responder behind that was not closed, as the join failed; some rank may still wait for it."""
        if self.in_use:
            self.in_use, self._responder = False, None
        super().detach()

    @property
    def responder(self) -> Responder:
        """Asks the other ranks, or answers them. Collective where it is the first time."""
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
        """Return the totals of all ranks, and start anew if one of them is to ``reset``."""
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
            f"the metric {name!r} takes a sum and a count, as in metrics.add({name}=(loss_sum, len(batch))): numbers "
            f"or tensors of one element, not {given!r}"
        ) from None


def _number(value: Any) -> Number:
    return value.detach().to(torch.float64).reshape(()) if isinstance(value, torch.Tensor) else float(value)
