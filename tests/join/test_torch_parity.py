"""What was written against torch's join works with this one: names, messages, third-party joinables, and the wire."""

from __future__ import annotations

import inspect
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms import join as torch_join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import stagereg
from stagereg.testing import run_ranks

from ..support.reference import Case, batch, net
from .test_numbers import CASES, wrong


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(
    "name",
    ["Join.__init__", "Join.notify_join_context", "Joinable.join_hook", "JoinHook.main_hook", "JoinHook.post_hook"],
)
def test_signatures_are_torchs(name: str) -> None:
    owner, method = name.split(".")
    ours, theirs = (shape(getattr(getattr(library, owner), method)) for library in (stagereg, torch_join))
    assert [each for each in ours if each[1] != inspect.Parameter.KEYWORD_ONLY] == theirs


def test_a_joinable_is_what_is_one_in_torch() -> None:
    assert issubclass(DistributedDataParallel, stagereg.Joinable)
    assert issubclass(ZeroRedundancyOptimizer, stagereg.Joinable)
    assert stagereg.Joinable.__abstractmethods__ == torch_join.Joinable.__abstractmethods__
    with pytest.raises(TypeError):
        stagereg.Joinable()  # type: ignore[abstract]


def test_no_joinables_is_torchs_error_and_ours() -> None:
    with pytest.raises(ValueError) as theirs:  # noqa: PT011 (its message is compared below)
        torch_join.Join([])
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        stagereg.Join([])
    assert str(ours.value) == str(theirs.value)
    assert isinstance(ours.value, stagereg.StageregError)


class Sum:
    """A third-party joinable: adds up one number a step over the ranks that have one. Derives from nothing."""

    def __init__(self, join: Any, group: Any = None) -> None:
        self._join_config = SimpleNamespace(enable=False, throw_on_early_termination=False, is_first_joinable=False)
        self.join, self.group = join, group
        self.total = torch.zeros(())
        self.seen: list[dict[str, Any]] = []
        self.calls: list[Any] = []

    def __call__(self) -> None:
        self.join.notify_join_context(self)
        self.total = torch.ones(())
        dist.all_reduce(self.total, group=self.group)

    def join_hook(self, **kwargs: Any) -> Any:
        self.seen.append(kwargs)
        return SimpleNamespace(main_hook=self._main, post_hook=self.calls.append)

    def _main(self) -> None:
        self.calls.append("main")
        dist.all_reduce(torch.zeros(()), group=self.group)

    join_device = property(lambda self: torch.device("cpu"))
    join_process_group = property(lambda self: self.group)


class TorchSum(Sum, torch_join.Joinable):
    def __init__(self, join: Any, group: Any = None) -> None:
        torch_join.Joinable.__init__(self)
        Sum.__init__(self, join, group)


class OurSum(Sum, stagereg.Joinable):
    def __init__(self, join: Any, group: Any = None) -> None:
        self.announces_itself = join is torch_join.Join
        stagereg.Joinable.__init__(self)
        Sum.__init__(self, join, group)


class Unprepared(OurSum):
    def __init__(self) -> None:
        pass


def test_a_joinable_that_is_not_constructed_is_torchs_error() -> None:
    with pytest.raises(AssertionError) as theirs:
        torch_join.Join.notify_join_context(Unprepared())
    with pytest.raises(AssertionError) as ours:
        stagereg.Join.notify_join_context(Unprepared())
    assert str(ours.value) == str(theirs.value)
    assert isinstance(ours.value, stagereg.StageregError)


SUMS = {"of its own": Sum, "of torch's": TorchSum, "of ours": OurSum}
JOINS = {"ours": stagereg.Join, "torch's": torch_join.Join}
WHERES = [("ours", "ours"), ("ours", "torch's"), ("torch's", "ours")]
"""Whose join is entered, and whose ``notify_join_context`` is called."""


def all_sums(rank: int, world_size: int) -> dict[tuple[str, str, str], Any]:
    return {(base, *wheres): sums(rank, base, *wheres) for base in SUMS for wheres in WHERES}


def sums(rank: int, base: str, context: str, notifies: str) -> Any:
    first, second = SUMS[base](JOINS[notifies]), SUMS[base](JOINS[notifies])
    totals = []
    with JOINS[context]([first, second], colour="red", divide_by_initial_world_size=False):
        for _ in range((1, 3, 2)[rank]):
            first()
            second()
            totals.append((first.total.item(), second.total.item()))
    return totals, first.seen, second.calls


def test_a_third_partys_joinables_are_joined() -> None:
    ranks = run_ranks(all_sums, 3, timeout_s=60)
    assert len(ranks[0]) == len(SUMS) * len(WHERES)
    for which in ranks[0]:
        outcomes = [outcome[which] for outcome in ranks]
        totals = [totals for totals, _, _ in outcomes]
        assert totals == [[(3, 3)], [(3, 3), (2, 2), (1, 1)], [(3, 3), (2, 2)]], which
        assert [calls for _, _, calls in outcomes] == [["main", "main", False], [True], ["main", False]], which
        assert [seen for _, seen, _ in outcomes] == [[{"colour": "red", "divide_by_initial_world_size": False}]] * 3


def groups(rank: int, world_size: int) -> list[str]:
    other = dist.new_group([0, 1])
    messages = []
    for kind in (torch_join.Join, stagereg.Join):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            kind([TorchSum(kind, dist.group.WORLD), TorchSum(kind, other)])
        messages.append(str(error.value))
    assert isinstance(error.value, stagereg.StageregError)
    with stagereg.Join([Sum(stagereg.Join, None), Sum(stagereg.Join, dist.group.WORLD)]):
        pass  # None is the default group
    model = DistributedDataParallel(net(Case()), process_group=other)
    stagereg.Join([model, torch.optim.SGD(model.parameters(), lr=1.0)])  # an optimizer has no group
    return messages


def test_different_process_groups_are_torchs_error_and_ours() -> None:
    for theirs, ours in run_ranks(groups, 2, timeout_s=30):
        assert ours == theirs


MIXED = (
    *("adam", "even", "divided by the active ranks", "a function that zeroes", "zero", "gradients never zeroed, zero"),
    *("a join for every epoch", "out of data inside an accumulation, active ranks", "buffers"),
    *("buckets rebuilt without a rank", "a rank that never sees a second step"),
)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["mixed", "torch", "mixed iterate"])
def test_our_joinables_bring_the_numbers_into_torchs_join(library: str) -> None:
    assert wrong({name: (CASES[name], library) for name in MIXED if name in CASES}) == {}


def traces(rank: int, world_size: int) -> dict[tuple[str, str], Any]:
    return {(name, library): trace(rank, library, case) for name, case in WIRES.items() for library in LIBRARIES}


def trace(rank: int, library: str, case: Case) -> Any:
    """What this rank sends in a join of torch's own objects: how often each operation of each size."""
    ddp = DistributedDataParallel(net(case), **case.wrap)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ours = library == "ours" or (library == "mixed" and rank == 1)
    # The profiler sees the reducer's own collectives too, but by the time at which threads take them up.
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    with profiler, (stagereg.Join if ours else torch_join.Join)([ddp]):
        for step in range(case.lengths[rank]):
            sgd.zero_grad()
            ddp(batch(rank, 0, step)).sum().backward()
            sgd.step()
    events = profiler.profiler.kineto_results.events()  # of which ``profiler.events()`` would make a tree, in seconds
    sent = Counter(f"{e.name()} {e.shapes()}" for e in events if e.name().startswith("gloo:"))
    return sent, [p.detach().clone() for p in ddp.parameters()], [b.clone() for b in ddp.buffers()]


LIBRARIES = ("torch", "ours", "mixed")
WIRES = {
    "plain": Case(lengths=(1, 2, 4)),
    "buffers": Case(lengths=(1, 2, 4), net="norm"),
    "buckets": Case(lengths=(1, 2, 4), wrap={"bucket_cap_mb": 1e-5}),
    "unused": Case(lengths=(1, 2, 4), net="mlp", wrap={"find_unused_parameters": True}),
}


def test_the_wire_is_torchs() -> None:
    for rank, traced in enumerate(run_ranks(traces, 3, timeout_s=60)):
        assert len(traced) == len(WIRES) * len(LIBRARIES)
        for (name, library), (sent, params, buffers) in traced.items():
            they_sent, their_params, their_buffers = traced[name, "torch"]
            assert sum(sent.values()) > 10
            assert sent == they_sent, (name, library, rank)
            assert all(map(torch.equal, params, their_params)), (name, library, rank)
            assert all(map(torch.equal, buffers, their_buffers)), (name, library, rank)
