"""Many ranks in one process: threads that take turns, over channels and a store that are lists and dicts.

One thread runs at a time, and the next one is drawn from a seed, so a failing run fails again. No thread waits for time
to pass: when none can go on, that is a deadlock at once, and the error shows where each rank is. The calls of the ranks
on a channel are matched by their order, and any two that do not match end the run.

The tests draw what the ranks do, and state the outcome.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist


class Stuck(AssertionError):
    """The calls of the ranks did not match, or no rank could go on."""


class _Actor:
    """A thread of one rank, and what it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: Callable[[], bool] = lambda: True
        self.waits = "its start"
        self.turn = threading.Semaphore(0)


class Simulation:
    """One run of some ranks.

    Args:
        size: how many ranks.
        seed: decides which thread runs next.

    Attributes:
        store: one for all ranks; ``torch.distributed.PrefixStore`` may be put before it.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self.store = _Store(self)
        self._random = random.Random(seed)
        self._favours = self._random.random() < 0.5  # some ranks are far ahead of the others, as far as they may be
        self._actors: list[_Actor] = []
        self._failure: Callable[[], Exception] | None = None
        self._stuck: Stuck | None = None
        self._finished = threading.Event()
        self._channels: dict[str, _ChannelState] = {}

    def run(self, act: Callable[[int], Any]) -> list[Any]:
        """Run ``act(rank)`` on all ranks; return what each returned or, as an object, raised.

        Raises:
            Stuck: see there. Also if some ranks made more calls on a channel than others, and all ended well.
        """
        results: list[Any] = [None] * self.size

        def attempt(rank: int) -> None:
            try:
                results[rank] = act(rank)
            except Exception as error:
                results[rank] = error

        for rank in range(self.size):
            self.enlist(f"rank {rank}", lambda rank=rank: attempt(rank))  # type: ignore[misc]
        self._random.shuffle(self._actors)
        self._pass_on()
        self._finished.wait()
        if self._stuck is not None:
            raise self._stuck
        if self._failure is None and not any(isinstance(result, Exception) for result in results):
            for state in self._channels.values():
                state.must_be_empty()
        return results

    def channel(self, rank: int, purpose: str) -> SimulatedChannel:
        """Return the end of a rank of a channel; the first one for this purpose makes the channel."""
        state = self._channels.setdefault(purpose, _ChannelState(self, purpose))
        return SimulatedChannel(state, rank)

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Give the turn to others until ``ready``, which any thread may ask and which does not wait."""
        actor: _Actor = _here.actor
        actor.ready, actor.waits = ready, what
        self._pass_on()
        actor.turn.acquire()
        if self._failure is not None:
            raise self._failure()

    def waiting(self, ready: Callable[[float], bool], what: str) -> None:
        """A ``stagereg.kernel.membership.Waiting``."""
        self.wait(lambda: ready(0.0), what)

    def pause(self) -> None:
        """Perhaps let others go first."""
        if self._random.random() < 0.5:
            self.wait(lambda: True, "its turn")

    def abort(self, failure: Callable[[], Exception]) -> None:
        """Have every rank raise this where it waits next; only the first such failure counts."""
        self._failure = self._failure or failure

    def stick(self, why: str) -> Stuck:
        """End the run; return what to raise."""
        if self._stuck is None:
            where = [f"{actor.name} waits for {actor.waits}" for actor in self._actors]
            self._stuck = Stuck("\n".join([why, *where]))
        stuck = self._stuck
        self._failure = lambda: Stuck(str(stuck))
        return stuck

    def enlist(self, name: str, target: Callable[[], None]) -> None:
        """Start a thread that takes turns with the others."""
        actor = _Actor(name)

        def live() -> None:
            _here.actor = actor
            actor.turn.acquire()
            try:
                target()
            finally:
                self._actors.remove(actor)
                self._pass_on()

        self._actors.append(actor)
        threading.Thread(target=live, name=name, daemon=True).start()

    def _pass_on(self) -> None:
        """Give the turn to a thread that can go on, be it the caller's."""
        actors = self._actors
        if not actors:
            self._finished.set()
            return
        if self._random.random() < 0.02:
            self._random.shuffle(actors)
        first = 0 if self._favours else self._random.randrange(len(actors))
        for i in range(len(actors)):
            actor = actors[first + i - len(actors)]
            if self._failure is not None or actor.ready():
                actor.turn.release()
                return
        self.stick("no thread can go on")
        actors[0].turn.release()


_here = threading.local()


class SimulatedCall:
    """One call of all ranks on a channel; a ``stagereg.kernel.channel.PendingSum``."""

    def __init__(self, state: _ChannelState, kind: tuple[Any, ...], caller: int) -> None:
        self.kind, self.caller = kind, caller
        self.things: dict[int, Any] = {}
        self._state = state
        self._sums: list[float] = []

    @property
    def full(self) -> bool:
        return len(self.things) == self._state.simulation.size

    def ready(self, seconds: float) -> bool:
        if seconds:
            self.await_all()  # if it takes longer, it takes forever
        return self.full

    def wait(self) -> list[float]:
        self.await_all()
        self._sums = self._sums or [sum(column) for column in zip(*self.things.values(), strict=True)]
        return list(self._sums)

    def await_all(self) -> None:
        if not self.full:
            self._state.simulation.wait(lambda: self.full, f"{self.kind} for {self._state.purpose}")


class _ChannelState:
    """The calls of one channel, shared by its ends."""

    def __init__(self, simulation: Simulation, purpose: str) -> None:
        self.simulation, self.purpose = simulation, purpose
        self.calls = [0] * simulation.size
        self._rounds: list[SimulatedCall] = []

    def enter(self, rank: int, kind: tuple[Any, ...], thing: Any) -> SimulatedCall:
        self.simulation.pause()
        number = self.calls[rank]
        self.calls[rank] += 1
        if number == len(self._rounds):
            self._rounds.append(SimulatedCall(self, kind, rank))
        found = self._rounds[number]
        if found.kind != kind:
            raise self.simulation.stick(
                f"call {number} on the channel for {self.purpose} is {kind} on rank {rank} and {found.kind} on rank "
                f"{found.caller}"
            )
        found.things[rank] = thing
        return found

    def must_be_empty(self) -> None:
        if len(set(self.calls)) > 1:
            raise Stuck(f"calls of each rank on the channel for {self.purpose}: {self.calls}")


class SimulatedChannel:
    """A ``stagereg.kernel.channel.ControlChannel``."""

    skips_reductions = False

    def __init__(self, state: _ChannelState, rank: int) -> None:
        self.rank, self.size = rank, state.simulation.size
        self.ranks = range(self.size)
        self._state = state

    def add(self, values: Sequence[float]) -> SimulatedCall:
        return self._state.enter(self.rank, ("sum", len(values)), list(values))

    def gather(self, thing: Any) -> list[Any]:
        call = self._state.enter(self.rank, ("gather",), thing)
        call.await_all()
        return [call.things[rank] for rank in range(self.size)]

    @property
    def thread(self) -> SimulatedChannel:
        return self

    def submit(self, job: Callable[[], None], wake: bool = True) -> None:
        rank: _Actor = _here.actor
        self._state.simulation.enlist(f"the thread for {self._state.purpose} of {rank.name}", job)


class _Store(dist.Store):
    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._simulation.pause()
        self._values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._simulation.pause()
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._simulation.pause()
        return self._values.setdefault(key, desired if isinstance(desired, bytes) else desired.encode())

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None
