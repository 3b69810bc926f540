"""What a join goes over: which ranks, which wire, and for each loop over the data, how to know who still has some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable as TorchJoinable
from torch.distributed.distributed_c10d import PrefixStore

from stagereg.errors import JoinError, nearest
from stagereg.join.failure import FailureDetector
from stagereg.join.joinable import Joinable
from stagereg.join.responder import SumResponder
from stagereg.kernel.channel import ControlChannel, control_channel, resources_of
from stagereg.kernel.membership import AllReduceMembership, Membership, StoreMembership

__all__ = ["Mode", "Wiring", "common_group", "known_mode", "length_of", "unknown"]

Mode = Literal["planned", "counted", "torch", "auto"]


def known_mode(mode: str | None) -> str | None:
    """Return ``mode``. Raises: ``JoinError`` if there is none of that name."""
    if mode is not None and mode not in get_args(Mode):
        raise JoinError(f"there is no mode {mode!r}.{unknown(str(mode), get_args(Mode))}")
    return mode


def unknown(name: str, choices: Sequence[str]) -> str:
    """Say which name was meant, and which there are."""
    return f"{nearest(name, choices)} One of: {', '.join(choices)}"


def common_group(joinables: Sequence[Any], given: dist.ProcessGroup | None) -> Any:
    """Return the process group of the joinables. Raises: ``JoinError`` if they have different ones."""
    own = [joinable for joinable in joinables if not getattr(joinable, "silent", False)]  # the others talk to nobody
    groups: list[Any] = [joinable.join_process_group or dist.group.WORLD for joinable in own]
    if any(group != groups[0] for group in groups):
        raise JoinError("Using join context manager with multiple process groups")
    return groups[0] if given is None else given


def length_of(loader: Any) -> int | None:
    """Return how many batches a loader says that it has, or ``None`` if it does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return None


class Wiring:
    """One join's, from its entry to its exit. Constructed by all ranks in the same order.

    Args:
        group: the ranks.
        joinables: what takes part.
        mode: as the user chose it.
        throw: whether uneven inputs are an error.
        counts: whether what a step does depends on who is active, so that a plan is not enough.
        timeout: seconds after which a rank that does not come is an error.

    Attributes:
        loops: how many loops there were.
        detector: by which ranks hear of each other's failures.
        store: of this join alone.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        joinables: Sequence[Any],
        mode: str | None,
        throw: bool,
        counts: bool,
        timeout: float,
    ) -> None:
        name = resources_of(group).next_join()
        self._group = group
        self._mode = mode
        self._throw = throw
        self._counts = counts
        self._foreign = _speaks_torch(joinables[0])
        self.loops = 0
        self._memberships: list[Membership] = []
        self.detector = FailureDetector(group, timeout, name, self._step)
        self.store = PrefixStore(name, group.get_group_store()) if group.size() > 1 else None
        self.sum_responder: SumResponder | None = None

    def plain(self, loader: Any) -> Membership | None:
        """For a loop that ranks leave when they run out of data; ``None`` if it goes over torch's wire. Collective."""
        if self._mode == "torch" or (self._mode is None and loader is None):
            return None
        if self._foreign:
            if self._mode in (None, "auto"):
                return None
            raise JoinError(
                f"join.mode={self._mode} needs a first joinable that announces through stagereg's Join, but "
                f"{self._foreign} does so through torch's. Put a DDP module first, or use join.mode=torch."
            )
        if loader is None and self._mode == "planned":
            return _NoPlan(self._group.rank(), self._group.size())
        return self._membership(loader)

    def looped(self, loader: Any) -> Membership:
        """For a loop whose body runs on all ranks. Collective."""
        if self._foreign:
            raise JoinError(
                f"join.iterate needs a first joinable that announces through stagereg's Join, but {self._foreign} "
                "does so through torch's. Put the model first."
            )
        return self._membership(loader)

    def _membership(self, loader: Any) -> Membership:
        if self.sum_responder is None:
            self.sum_responder = SumResponder(
                control_channel(self._group, "mean", self._patiently), 2, self.detector.wait
            )
        channel = control_channel(self._group, "membership", self._patiently)
        number = self.loops
        self.loops += 1
        length = length_of(loader)
        made = self._made(channel, loader, length, number)
        self._memberships.append(made)
        return made

    def _step(self) -> int | None:
        """The step that this rank is in, for the messages of others."""
        return self._memberships[-1].steps if self._memberships else None

    @property
    def steps(self) -> int:
        """How many steps have begun beside torch's wire, in all loops so far."""
        return sum(membership.steps for membership in self._memberships)

    @property
    def shadowed(self) -> int:
        """How many of them came while this rank had no data."""
        return sum(membership.shadowed for membership in self._memberships)

    def _made(self, channel: ControlChannel, loader: Any, length: int | None, number: int) -> Membership:
        if self._mode != "counted" and (loader is not None or self._mode == "planned"):
            lengths = self._lengths(self._told_lengths(channel, length))
            if lengths is not None:
                planned = StoreMembership(
                    self._group.rank(), lengths, self._words(number), self._throw, self.detector.wait
                )
                if not self._counts:
                    return planned
        return AllReduceMembership(channel, self._throw, self.detector.wait, length)

    def _told_lengths(self, channel: ControlChannel, length: int | None) -> list[int | None]:
        """Return every rank's length."""
        mine = [0.0] * channel.size
        mine[channel.rank] = 0.0 if length is None else length + 1.0
        pending = channel.add(mine)
        self._patiently(pending.ready, "the join")
        return [int(told) - 1 if told else None for told in pending.wait()]

    def _patiently(self, ready: Callable[[float], bool], what: str) -> None:
        """Wait for as long as it takes, but not for a rank that has failed: others may still prepare their data."""
        while not ready(0.5):
            self.detector.check()

    def _lengths(self, told: list[int | None]) -> list[int] | None:
        known = [length for length in told if length is not None]
        if len(known) == len(told):
            return known
        if self._mode == "planned":
            silent = ", ".join(str(rank) for rank, length in enumerate(told) if length is None)
            raise JoinError(
                f"join.mode=planned needs the length of every rank's loader, and that of rank {silent} has none. Give "
                "it a __len__, or use join.mode=counted, or auto, which counts where lengths are missing."
            )
        return None

    def _words(self, number: int) -> Any:
        return _InMemoryStore() if self.store is None else PrefixStore(f"loop/{number}", self.store)


class _NoPlan(Membership):
    """Of a planned join that was not told of any loader, and is used without ``iterate``."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, False, lambda ready, what: None)

    def read(self) -> Any:
        raise self._error()

    def _begin(self, syncing: bool) -> None:
        raise self._error()

    def _wait_for_next_step(self) -> Any:
        return None  # the join may have been used with iterate

    def _error(self) -> JoinError:
        return JoinError(
            "join.mode=planned has to know how many batches there are: loop over join.iterate(loader), or give the "
            "loader to the join, as in stagereg.instantiate(cfg.join, [model, optimizer], loader=loader)."
        )


class _InMemoryStore:
    """The store of a rank that is alone: it is the last to leave, and finds its own word."""

    def __init__(self) -> None:
        self._words: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self._words[key] = value.encode()
        if len(self._words) > 8:
            del self._words[next(iter(self._words))]

    def get(self, key: str, /) -> bytes:
        return self._words[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._words for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        return amount


def _speaks_torch(joinable: Any) -> str:
    """Return the name of a joinable's type if it notifies through torch's ``Join``; empty if not."""
    kind = type(joinable)
    return "" if Joinable in kind.__mro__ and TorchJoinable not in kind.__mro__ else kind.__name__
