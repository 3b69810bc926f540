"""One joinable that keeps every promise, and for each promise some that break it by a likely mistake."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import stagereg
from stagereg.testing.join import JoinableContract, JoinHookContract


class Sum(stagereg.Joinable):
    """Adds up one number a step over the ranks, on all of them. The module is one that a joinable may observe."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros((), dtype=torch.float64)
        self.module = torch.nn.Linear(1, 1)
        self.steps = 0

    def add(self, value: float) -> None:
        self.announce()
        self.take(torch.tensor(value, dtype=torch.float64))

    def announce(self) -> None:
        stagereg.Join.notify_join_context(self)

    def take(self, mine: torch.Tensor) -> None:
        dist.all_reduce(mine)
        self.total += mine
        self.steps += 1

    def join_hook(self, **kwargs: Any) -> Any:
        return SumHook(self)

    @property
    def join_device(self) -> Any:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class SumHook(stagereg.JoinHook):
    """Takes part with zero."""

    def __init__(self, joinable: Sum) -> None:
        self.joinable = joinable

    def main_hook(self) -> None:
        self.joinable.take(torch.zeros((), dtype=torch.float64))


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


class Broken(SumContract):
    """Of a mutant: tries what one promise needs, and does not wait for long."""

    together = False
    timeout_s = 6.0


# -- same numbers


class LastCounts(Sum):
    def join_hook(self, **kwargs: Any) -> Any:
        hook = SumHook(self)
        hook.post_hook = lambda is_last_joiner: self.total.mul_(1.0 + is_last_joiner)
        return hook


class LastCountsContract(Broken):
    """Does something on the last joiner, which in even inputs is everybody."""

    kind = LastCounts


class Stale(Sum):
    def join_hook(self, **kwargs: Any) -> Any:
        hook = SumHook(self)
        hook.main_hook = lambda: dist.all_reduce(torch.zeros((), dtype=torch.float64))
        return hook


class StaleContract(Broken):
    """Throws away what the others computed while this rank had no data."""

    kind = Stale


class Lazy(Sum):
    def take(self, mine: torch.Tensor) -> None:
        dist.all_reduce(mine)
        self.total += mine if self.steps or self.active else 0.0
        self.steps += 1

    active = False

    def add(self, value: float) -> None:
        self.active = True
        super().add(value)


class LazyContract(Broken):
    """Begins with its first batch, and so never does on a rank that has none."""

    kind = Lazy


class HighestWins(Stale):
    def join_hook(self, **kwargs: Any) -> Any:
        hook = super().join_hook()
        hook.post_hook = lambda is_last_joiner: dist.broadcast(self.total, dist.get_world_size() - 1)
        return hook


class HighestWinsContract(Broken):
    """Takes the highest rank for the one with the most data."""

    kind = HighestWins


class OnlyOnce(Sum):
    joins = 0

    def join_hook(self, **kwargs: Any) -> Any:
        self.joins += 1
        return super().join_hook() if self.joins == 1 else stagereg_hook(self)


def stagereg_hook(joinable: Sum) -> Any:
    hook = SumHook(joinable)
    hook.main_hook = lambda: dist.all_reduce(torch.zeros((), dtype=torch.float64))
    return hook


class OnlyOnceContract(Broken):
    """Does its work in the first join only."""

    kind = OnlyOnce


class Drifting(Sum):
    def take(self, mine: torch.Tensor) -> None:
        super().take(mine)
        self.total += 1e-12 * dist.get_rank()


class DriftingContract(Broken):
    """Is a little different on each rank."""

    kind = Drifting


# -- ways to know who has data


class DividesByWork(Sum):
    """Knows the number of active ranks from the work of its announcement, as torch's DDP does."""

    def add(self, value: float) -> None:
        work = stagereg.Join.notify_join_context(self)
        active = dist.get_world_size()
        if work is not None:
            work.wait()
            active = int(work.get_future().value()[0].item())
        self.take(torch.tensor(value / active, dtype=torch.float64))


class DividesByWorkContract(Broken):
    """Is wrong where nothing is announced by a collective."""

    kind = DividesByWork

    def expected(self, steps: list[list[float]], world_size: int) -> Mapping[str, Any]:
        return {"total": sum(sum(values) / len(values) for values in steps)}


class Greedy(Sum):
    def take(self, mine: torch.Tensor) -> None:
        if self._join_config.enable:
            dist.all_reduce(torch.zeros(1))
        super().take(mine)


class GreedyContract(Broken):
    """Has one collective more in each step of a join."""

    kind = Greedy


# -- both ways


class OursOnly(Sum):
    def join_hook(self, **kwargs: Any) -> Any:
        hook = SumHook(self)
        hook.main_hook, hook.before_step = lambda: None, hook.main_hook
        return hook


class OursOnlyContract(Broken):
    """Does its work in ``before_step``, which torch's Join does not call."""

    kind = OursOnly
    timeout_s = 3.0


class SendsMore(Sum):
    def take(self, mine: torch.Tensor) -> None:
        if self.session is not None:
            dist.all_reduce(mine.clone())
        super().take(mine)


class SendsMoreContract(Broken):
    """Sends more where its own rank runs stagereg's join."""

    kind = SendsMore
    timeout_s = 3.0


class Picky(Sum):
    def join_hook(self, divide_by_initial_world_size: bool = True, **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(f"unexpected keyword arguments {sorted(kwargs)}")
        return SumHook(self)


class PickyContract(Broken):
    """Refuses keyword arguments that are for others."""

    kind = Picky


# -- hooks


class TwiceHook(SumHook):
    done = False

    def before_step(self) -> None:
        self.main_hook()

    def main_hook(self) -> None:
        self.done = not self.done
        if self.done:
            super().main_hook()


class Twice(Sum):
    def join_hook(self, **kwargs: Any) -> Any:
        return TwiceHook(self)


class TwiceContract(Broken):
    """Calls its own main hook."""

    kind = Twice


class HastyHook(SumHook):
    def main_hook(self) -> None:
        super().main_hook()
        self.post_hook(False)


class Hasty(Sum):
    def join_hook(self, **kwargs: Any) -> Any:
        return HastyHook(self)


class HastyContract(Broken):
    """Calls its own post hook."""

    kind = Hasty


class Text(Sum):
    join_device = property(lambda self: "cpu")


class TextContract(Broken):
    """Returns a device's name for the device."""

    kind = Text


class Apart(Sum):
    def __init__(self) -> None:
        super().__init__()
        self.own, _ = dist.new_subgroups(1)

    join_process_group = property(lambda self: self.own)


class ApartContract(Broken):
    """Returns a group in which each rank is alone."""

    kind = Apart


# -- no hang


class Stubborn(Sum):
    def take(self, mine: torch.Tensor) -> None:
        while True:
            try:
                return super().take(mine)
            except RuntimeError:
                time.sleep(0.01)


class StubbornContract(Broken):
    """Tries again for ever when a collective fails."""

    kind = Stubborn
    timeout_s = 4.0


class OwnCollectiveError(Sum):
    def take(self, mine: torch.Tensor) -> None:
        try:
            super().take(mine)
        except RuntimeError:
            raise ValueError("the sum did not work") from None


class OwnCollectiveErrorContract(Broken):
    """Replaces the error of a failed collective by one of its own."""

    kind = OwnCollectiveError


# -- throw


class OwnThrowError(Sum):
    def announce(self) -> None:
        try:
            super().announce()
        except stagereg.UnevenInputsError:
            raise StopIteration("no more data") from None


class OwnThrowErrorContract(Broken):
    """Replaces the error of a throw by one of its own."""

    kind = OwnThrowError


class Late(Sum):
    def add(self, value: float) -> None:
        self.total += 0.5
        super().add(value)
        self.total -= 0.5


class LateContract(Broken):
    """Changes something before it announces."""

    kind = Late


class Eager(Sum):
    added = 0.0

    def needs_active_ranks(self, divide_by_initial_world_size: bool) -> bool:
        self.added = 1.0
        self.total += self.added
        return super().needs_active_ranks(divide_by_initial_world_size)

    def join_hook(self, **kwargs: Any) -> Any:
        hook = SumHook(self)
        hook.post_hook = lambda is_last_joiner: self.total.sub_(self.added)
        return hook


class EagerContract(Broken):
    """Changes something when a join is entered, and takes it back at its regular end."""

    kind = Eager


class Thrower(Sum):
    def take(self, mine: torch.Tensor) -> None:
        super().take(mine)
        if self._join_config.throw_on_early_termination and self.steps == 3:
            raise stagereg.UnevenInputsError("that was the last one")


class ThrowerContract(Broken):
    """Throws for even inputs too."""

    kind = Thrower


# -- leaves no trace


class Bound(Sum):
    def take(self, mine: torch.Tensor) -> None:
        if self._join_config.enable:
            super().take(mine)


class BoundContract(Broken):
    """Does nothing outside a join."""

    kind = Bound


class Expectant(Sum):
    def take(self, mine: torch.Tensor) -> None:
        if self._join_config.is_first_joinable and not self._join_config.enable:
            raise AssertionError("in a join that is off")
        super().take(mine)


class ExpectantContract(Broken):
    """Takes being the first joinable for being in a join that is on."""

    kind = Expectant


class Flagged(Sum):
    def __init__(self) -> None:
        super().__init__()
        self.joined = False

    def join_hook(self, **kwargs: Any) -> Any:
        self.joined = True
        return SumHook(self)


class FlaggedContract(Broken):
    """Leaves a flag of its own set."""

    kind = Flagged


class Watching(Sum):
    def join_hook(self, **kwargs: Any) -> Any:
        hook = SumHook(self)
        handle = self.module.register_forward_hook(lambda *_: None)
        hook.post_hook = lambda is_last_joiner: handle.remove()
        return hook


class WatchingContract(Broken):
    """Leaves a hook on a module, where the join does not come to its regular end."""

    kind = Watching


class SetsWarnings(Sum):
    def join_hook(self, **kwargs: Any) -> Any:
        warnings.simplefilter("once", UserWarning)
        return SumHook(self)


class SetsWarningsContract(Broken):
    """Sets the warning filters, as torch's Join does."""

    kind = SetsWarnings


class Patching(Sum):
    def join_hook(self, **kwargs: Any) -> Any:
        self.module.extra_repr = lambda: "joined"
        return SumHook(self)


class PatchingContract(Broken):
    """Replaces a method of a module."""

    kind = Patching


class AftermathContract(SumContract):
    """Takes the process with it when the next process group is made, or the run ends."""

    def build(self) -> Sum:
        dist.destroy_process_group = lambda: os._exit(3)
        return Sum()


CAUGHT_BY: dict[str, dict[type[Broken], str]] = {
    "test_even_inputs": {LastCountsContract: "in a single process"},
    "test_uneven_inputs": {StaleContract: "in a single process"},
    "test_rank_without_data": {LazyContract: "0, 2 batches"},
    "test_any_order_of_running_out": {HighestWinsContract: "3, 1 batches"},
    "test_join_after_join": {OnlyOnceContract: "after join 2"},
    "test_replicas_do_not_drift": {DriftingContract: "on rank 0 after join 1"},
    "test_planned": {DividesByWorkContract: "mode=planned"},
    "test_counted": {DividesByWorkContract: "mode=counted"},
    "test_iterate": {DividesByWorkContract: "join.iterate"},
    "test_planned_sends_nothing_more": {GreedyContract: "had 2 collectives; without a join it has 1"},
    "test_torchs_join": {OursOnlyContract: "torch's Join"},
    "test_ranks_with_torchs_join": {SendsMoreContract: "mode=torch"},
    "test_unknown_keywords": {PickyContract: "unexpected keyword arguments ['colour']"},
    "test_main_hook": {TwiceContract: "ran 4 times on rank 0, which missed 2"},
    "test_post_hook": {HastyContract: "the post hook of Hasty"},
    "test_device_and_group": {TextContract: "no torch.device", ApartContract: "1 of the 2 ranks"},
    "test_failing_rank": {StubbornContract: "hung in", OwnCollectiveErrorContract: "the sum did not work"},
    "test_throw": {OwnThrowErrorContract: "not UnevenInputsError", LateContract: "in a single process"},
    "test_planned_throw": {EagerContract: "mode=planned"},
    "test_even_inputs_do_not_throw": {ThrowerContract: "that was the last one"},
    "test_training_after_the_join": {BoundContract: "in a single process"},
    "test_disabled": {ExpectantContract: "in a join that is off"},
    "test_leaves_no_trace": {
        FlaggedContract: "Flagged.joined: was False, is True",
        WatchingContract: "forward hooks",
        SetsWarningsContract: "Python's warning filters: changed",
        PatchingContract: "now also extra_repr",
    },
}
"""By promise: the mutants that break it, and a part of each one's report."""


# -- hooks


class Mismatched(SumHook):
    def main_hook(self) -> None:
        dist.all_reduce(torch.zeros((), dtype=torch.float32))


class MissingOne(SumHook):
    def main_hook(self) -> None:
        self.joinable.steps += 1


class HookContract(JoinHookContract):
    """Of the hook that keeps them all."""

    kind: type[SumHook] = SumHook

    def build(self) -> Sum:
        return Sum()

    def hook(self, subject: Sum) -> Any:
        return self.kind(subject)

    def step(self, subject: Sum, value: float) -> None:
        subject.take(torch.tensor(value, dtype=torch.float64))

    def state(self, subject: Sum) -> Mapping[str, Any]:
        return {"total": subject.total}

    def expected(self, steps: list[list[float]], world_size: int) -> Mapping[str, Any]:
        return {"total": sum(map(sum, steps))}


class MismatchedContract(HookContract):
    """Sends another dtype than the active ranks: gloo ends the process."""

    kind = Mismatched
    together = False
    timeout_s = 4.0


class MissingOneContract(HookContract):
    """Leaves out a collective: the active ranks wait for it."""

    kind = MissingOne
    together = False
    timeout_s = 4.0
