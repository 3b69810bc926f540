"""One joinable that keeps every promise, and for each promise some that break it by a likely mistake."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import stagereg
from stagereg.testing.join import JoinableContract, JoinHookContract

K = TypeVar("K", bound="type[Sum] | type[SumHook]")


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


class SumHook(stagereg.JoinHook):
    """Takes part with zero."""

    def __init__(self, joinable: Sum) -> None:
        self.joinable = joinable

    def main_hook(self) -> None:
        self.joinable.take(number(0))


class Sum(stagereg.Joinable):
    """Adds up one number a step over the ranks, on all of them. The module is one that a joinable may observe."""

    hook_kind: type[SumHook] = SumHook
    join_device: Any = torch.device("cpu")
    join_process_group: Any = property(lambda self: self.group or dist.group.WORLD)

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group
        self.total = number(0)
        self.module = torch.nn.Linear(1, 1)
        self.steps = 0
        self.run_hooks, self.n_hooks = True, 3  # they have no hooks, whatever their names end in

    def add(self, value: float) -> None:
        self.announce()
        self.take(number(value))

    def announce(self) -> None:
        stagereg.Join.notify_join_context(self)

    def take(self, mine: torch.Tensor) -> None:
        dist.all_reduce(mine, group=self.group)
        self.total += mine
        self.steps += 1

    def join_hook(self, **kwargs: Any) -> Any:
        return self.hook_kind(self)


class SumContract(JoinableContract):
    """Of the joinable that keeps them all, and base of those that do not."""

    kind: type[Sum] = Sum

    def build(self) -> Sum:
        return self.kind()

    def step(self, subject: Sum, value: float) -> None:
        subject.add(value)

    def state(self, subject: Sum) -> Mapping[str, Any]:
        return {"total": subject.total}

    def expected(self, steps: list[list[float]], world_size: int) -> Mapping[str, Any]:
        return {"total": sum(map(sum, steps))}


class HookContract(JoinHookContract, SumContract):
    """Of the hook that keeps them all."""

    hook_kind: type[SumHook] = SumHook

    def hook(self, subject: Sum) -> Any:
        return self.hook_kind(subject)

    def step(self, subject: Sum, value: float) -> None:
        subject.take(number(value))


CAUGHT_BY: dict[str, dict[type[JoinableContract], str]] = {}
"""By promise: the contracts of the mutants that break it, and a part of each one's report."""


def breaks(seen: str, *promises: str, timeout_s: float = 6.0, **more: Any) -> Any:
    """Make the contract of a mutant: it does not wait for long."""

    def registered(kind: K) -> K:
        base, name = (SumContract, "kind") if issubclass(kind, Sum) else (HookContract, "hook_kind")
        facts = {name: kind, "timeout_s": timeout_s, "__module__": __name__, **more}
        contract = type(f"{kind.__name__}Contract", (base,), facts)
        globals()[contract.__name__] = contract  # ranks find it by its name
        for promise in promises:
            CAUGHT_BY.setdefault(f"test_{promise}", {})[contract] = seen
        return kind

    return registered


class Inert(SumHook):
    """Throws away what the others compute while this rank has no data."""

    def main_hook(self) -> None:
        dist.all_reduce(number(0))


# -- same numbers


@breaks("differs from a single process", "even_inputs")
class LastCounts(Sum):
    """Does something on the last joiner, which in even inputs is everybody."""

    class hook_kind(SumHook):
        def post_hook(self, is_last_joiner: bool) -> None:
            self.joinable.total.mul_(1.0 + is_last_joiner)


@breaks("differs from a single process", "uneven_inputs")
class Stale(Sum):
    hook_kind = Inert


@breaks("after join 2", "join_after_join")
class OnlyOnce(Sum):
    """Does its work in the first join only."""

    joins = 0

    def join_hook(self, **kwargs: Any) -> Any:
        self.joins += 1
        return SumHook(self) if self.joins == 1 else Inert(self)


@breaks("and rank 0 differ after join 1", "replicas_do_not_drift")
class Drifting(Sum):
    """Is a little different on each rank."""

    def take(self, mine: torch.Tensor) -> None:
        super().take(mine)
        self.total += 1e-12 * dist.get_rank()


# -- ways to know who has data


def mean_of_active(self: Any, steps: list[list[float]], world_size: int) -> Mapping[str, Any]:
    return {"total": sum(sum(values) / len(values) for values in steps)}


@breaks("mode=planned", "every_mode", expected=mean_of_active)
class DividesByWork(Sum):
    """Knows the number of active ranks from its announcement, as torch's DDP does: wrong without a collective."""

    def add(self, value: float) -> None:
        work = stagereg.Join.notify_join_context(self)
        active = dist.get_world_size()
        if work is not None:
            work.wait()
            active = int(work.get_future().value()[0].item())
        self.take(number(value / active))


@breaks("ran 2 collectives; without a join it runs 1", "planned_sends_nothing_more")
class Greedy(Sum):
    """Has one collective more in each step of a join."""

    def take(self, mine: torch.Tensor) -> None:
        if self._join_config.enable:
            dist.all_reduce(torch.zeros(1))
        super().take(mine)


# -- both ways


@breaks("torchs=(True, True)", "torchs_join", timeout_s=3.0)
class OursOnly(Sum):
    """Does its work in ``before_step``, which torch's Join does not call."""

    class hook_kind(stagereg.JoinHook):
        def __init__(self, joinable: Sum) -> None:
            self.before_step = SumHook(joinable).main_hook


@breaks("unexpected keyword arguments ['colour']", "uneven_inputs")
class Picky(Sum):
    """Refuses keyword arguments that are for others."""

    def join_hook(self, divide_by_initial_world_size: bool = True, **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(f"unexpected keyword arguments {sorted(kwargs)}")
        return SumHook(self)


# -- no hang


@breaks("hung in", "failing_rank", timeout_s=4.0)
class Stubborn(Sum):
    """Tries again for ever when a collective fails."""

    def take(self, mine: torch.Tensor) -> None:
        while True:
            try:
                return super().take(mine)
            except RuntimeError:
                time.sleep(0.01)


@breaks("the sum did not work", "failing_rank")
class OwnCollectiveError(Sum):
    """Replaces the error of a failed collective by one of its own."""

    def take(self, mine: torch.Tensor) -> None:
        try:
            super().take(mine)
        except RuntimeError:
            raise ValueError("the sum did not work") from None


# -- throw


@breaks("not UnevenInputsError", "throw")
class OwnThrowError(Sum):
    """Replaces the error of a throw by one of its own."""

    def announce(self) -> None:
        try:
            super().announce()
        except stagereg.UnevenInputsError:
            raise StopIteration("no more data") from None


# -- leaves no trace


@breaks("differs from a single process", "training_without_a_join")
class Bound(Sum):
    """Does nothing outside a join."""

    def take(self, mine: torch.Tensor) -> None:
        if self._join_config.enable:
            super().take(mine)


@breaks("forward hooks", "leaves_no_trace")
class Watching(Sum):
    """Leaves a hook on a module, where the join does not come to its regular end."""

    class hook_kind(SumHook):
        def __init__(self, joinable: Sum) -> None:
            super().__init__(joinable)
            self.handle = joinable.module.register_forward_hook(lambda *_: None)

        def post_hook(self, is_last_joiner: bool) -> None:
            self.handle.remove()


@breaks("Python's warning filters: changed", "leaves_no_trace")
class SetsWarnings(Sum):
    """Sets the warning filters, as torch's Join does."""

    def join_hook(self, **kwargs: Any) -> Any:
        warnings.simplefilter("once", UserWarning)
        return SumHook(self)


@breaks("now also 'extra_repr'", "leaves_no_trace", keeps=("cache",))
class Patching(Sum):
    """Leaves what it says, and a method of a module replaced."""

    def join_hook(self, **kwargs: Any) -> Any:
        self.cache = True
        self.module.extra_repr = lambda: "joined"
        return SumHook(self)


# -- alone


@breaks("of another rank's collective, but expected", "uneven_inputs", timeout_s=4.0)
class MissingOne(SumHook):
    """Leaves out a collective: the active ranks wait for it."""

    def main_hook(self) -> None:
        self.joinable.steps += 1


@breaks("of another rank's collective, but expected", "uneven_inputs", timeout_s=4.0)
class OneTooMany(SumHook):
    """Has one collective more than a step of the active ranks, which are a collective behind from then on."""

    def main_hook(self) -> None:
        dist.all_reduce(number(0))
        super().main_hook()


@breaks("rank 0 hung in main_hook", "uneven_inputs", timeout_s=3.0)
class NeverReturns(SumHook):
    """Waits for what does not come."""

    def main_hook(self) -> None:
        threading.Event().wait()
