"""``checkpoint``: have all ranks take part in a save that any of them asked for, whether they still have data or not.

Once a step, before anything of it happens, the ranks exchange what was asked for: one small sum on a channel of its
own.
All of them have ended the same step then, so what they save together is the state after it. The sum also carries
whether a rank was told to leave (SIGTERM, SIGUSR1), with data or without: the ranks that still have some then
ask at the end of the step, and that save is the last.

A rank that has left the loop holds the current state only if the join steps its optimizers and schedules for it. So
before a save the ranks compare how often each was stepped, and refuse if they differ, rather than write stale values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stagereg.errors import JoinError
from stagereg.join.joinable import JoinHook
from stagereg.kernel.channel import ControlChannel
from stagereg.registry import register

__all__ = ["CheckpointHook", "Leaves", "Saves"]

_SIGNALS = 2


@runtime_checkable
class Leaves(Protocol):
    """What is needed of a checkpointer's ``leaving``, where it has one: how ranks hear that one of them is to leave.

    Attributes:
        exchanged_by_join: whether the join carries the words, as not all ranks call ``due``.
    """

    exchanged_by_join: bool

    def signal_flags(self) -> list[float]:
        """What this rank has to tell: two numbers."""

    def update(self, told: Sequence[float]) -> None:
        """Take up the sums over all ranks."""


class Saves(Protocol):
    """What is needed of a :class:`stagereg.Checkpointer`; also used where it has them: ``due`` and ``leaving``."""

    @property
    def every(self) -> int:
        """Steps from one checkpoint to the next."""

    def save(self, step: int, state: MutableMapping[str, Any]) -> None:
        """Save; called on all ranks with the same steps."""


@register("join_hook", "checkpoint")
class CheckpointHook(JoinHook):
    """Exchanges requests once a step, and saves what was requested; first of a join's hooks.

    Args:
        checkpointer: saves.
        state: what to save.
        channel: on which nothing else is summed or gathered.
        ended: called when the hook is of no use any more.

    Attributes:
        asked: the step that this rank asks to save; ``None`` if it does not.
        joined: whether this rank takes part by hooks.
    """

    def __init__(
        self,
        checkpointer: Saves,
        state: MutableMapping[str, Any],
        channel: ControlChannel,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.asked: int | None = None
        self.joined = False
        self._checkpointer = checkpointer
        self._state = state
        self._channel = channel
        self._ended = ended
        self._exchanged = False
        self._active: list[int] = []
        self._steps: dict[str, int] = {}
        leaving = getattr(checkpointer, "preemption", None)
        self._leaving: Leaves | None = leaving if isinstance(leaving, Leaves) else None
        if self._leaving is not None:
            self._leaving.exchanged_by_join = True
        self._handles = [
            value.register_step_post_hook(self._counts(name))
            for name, value in state.items()
            if isinstance(value, Optimizer)
        ]

    def detach(self) -> None:
        """Stop counting the optimizers' steps, and say that this has ended."""
        if self._leaving is not None:
            self._leaving.exchanged_by_join = False
        self._ended()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def exchange(self, active: bool) -> None:
        """Exchange requests with all ranks, and save if there is one; every rank once a step, and once at the end.

        Args:
            active: whether this rank runs the loop's body in the step that begins.

        Raises:
            JoinError: on all ranks: they ask for different steps, or some rank's optimizer or schedule is stale.
            CheckpointError: see :meth:`stagereg.Checkpointer.save`.
            SystemExit: on all ranks: they were told to leave, and this save was the last.
        """
        asked, self.asked = self.asked, None
        values = [0.0] * self._channel.size
        values[self._channel.rank] = float(active) if asked is None else 2.0 * (asked + 1) + active
        words = [0.0] * _SIGNALS if self._leaving is None else self._leaving.signal_flags()
        told = [int(value) for value in self._channel.add([*values, *words]).wait()]
        told, words = told[: len(values)], [float(word) for word in told[len(values) :]]
        if self._leaving is not None:
            self._leaving.update(words)
        # At the end nobody is active; those who were in the last step know best what it left.
        self._active = [rank for rank, value in enumerate(told) if value % 2] or self._active
        requests = {rank: value // 2 - 1 for rank, value in enumerate(told) if value > 1}
        if requests:
            self._save(requests)

    def before_step(self) -> None:
        """Exchange on a rank without data, ahead of the step's other hooks."""
        self.joined = True
        self.exchange(active=False)
        self._exchanged = True

    def main_hook(self) -> None:
        """Exchange, if :meth:`before_step` has not: torch's ``Join`` calls nothing but this."""
        if not self._exchanged:
            self.before_step()
        self._exchanged = False

    def post_hook(self, is_last_joiner: bool) -> None:
        """Exchange what was asked for after the last step."""
        self.exchange(active=False)
        self.detach()

    def _save(self, requests: Mapping[int, int]) -> None:
        steps = sorted(set(requests.values()))
        if len(steps) > 1:
            told = ", ".join(f"rank {rank} for step {step}" for rank, step in requests.items())
            raise JoinError(
                f"ranks asked for checkpoints of different steps at the same time: {told}. Count the steps that the "
                "ranks take together, not a rank's own batches."
            )
        posts = self._channel.gather((self._progress(), _plain(self._state)))
        self._refuse_stale(steps[0], [progress for progress, _ in posts])
        state = dict(self._state)
        if self._active and self._channel.rank not in self._active:
            current = posts[self._active[-1]][1]
            state.update((name, current[name]) for name in state if name in current)
        self._checkpointer.save(steps[0], state)

    def _progress(self) -> dict[str, int]:
        schedules = {name: value.last_epoch for name, value in self._state.items() if isinstance(value, LRScheduler)}
        return {**schedules, **self._steps}

    def _refuse_stale(self, step: int, progress: list[dict[str, int]]) -> None:
        for name in sorted({name for each in progress for name in each}):
            taken = [each.get(name, 0) for each in progress]
            if len(set(taken)) > 1:
                told = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(taken))
                raise JoinError(
                    f"step {step} was not saved, since {name!r} is not the same on all ranks: it has taken {told} "
                    "steps. Ranks that have left the loop step only what the join is told of: list the optimizer, the "
                    "schedule or the function that steps them, as in Join([model, optimizer, saver])."
                )

    def _counts(self, name: str) -> Any:
        self._steps[name] = 0

        def count(*_: Any) -> None:
            self._steps[name] += 1

        return count


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state that are numbers, text, and containers of them: stale on a rank that has left the loop."""
    return {name: value for name, value in state.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in (type(None), bool, int, float, complex, str, bytes)
