"""Joins of many ranks: over simulated channels and a store in one process, and over real process groups."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import stagereg
from stagereg.errors import JoinError, PeerFailedError, UnevenInputsError
from stagereg.kernel.membership import ActiveRanks, StoreMembership

from ..support.examples import examples
from ..support.simulated import SimulatedChannel, Simulation

SEVERAL = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
_names = itertools.count()


class Group:
    """A rank's process group, as far as a join knows it."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.simulation = simulation
        self.group_name = f"simulated {next(_names)}"
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.simulation.size

    def get_group_store(self) -> Any:
        return self.simulation.store


def channel_of(group: Group, purpose: str) -> SimulatedChannel:
    return group.simulation.channel(group.rank(), purpose)


class FailureDetector:
    """Makes an error of one rank one of all."""

    def __init__(self, group: Group, timeout_s: float, name: str, **_: Any) -> None:
        self._group = group
        self.wait = lambda ready, what, limit_s=0.0: group.simulation.waiting(ready, what)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check(self) -> None: ...

    def explain(self, error: BaseException) -> None: ...

    def report(self, error: BaseException) -> None:
        rank = self._group.rank()
        self._group.simulation.abort(lambda: PeerFailedError(f"rank {rank} failed: {error}", rank, str(error)))


@contextlib.contextmanager
def in_threads() -> Iterator[None]:
    """What a join takes of its process is per rank while this is on."""
    each = {
        "stagereg.join.peers.FailureDetector": FailureDetector,
        **{
            f"stagereg.join.{module}.control_channel": lambda group, purpose, waiting: channel_of(group, purpose)
            for module in ("session", "peers", "loop")
        },
        "stagereg.join.context.discard_channels": lambda group: None,
    }
    with contextlib.ExitStack() as all_of_them:
        for where, what in each.items():
            all_of_them.enter_context(mock.patch(where, what))
        yield


@dataclass(frozen=True)
class Script:
    """What one rank does in one loop: of its batches, which it takes and which it skips, and when it breaks out."""

    batches: tuple[bool, ...] = ()
    quits: bool = False  # it has one batch more, and breaks when it gets it
    stays: int = 99  # for so many empty batches, and then it breaks
    passes: bool = False  # over every empty batch
    announced: int | None = 0  # how many batches more, or fewer, than its loader's length; None: it has no length
    reads: bool = True  # who is active, in every step

    @property
    def steps(self) -> int:
        return sum(self.batches)

    @property
    def length(self) -> int:
        own = len(self.batches) + self.quits
        return max(0, own + (self.announced or 0)) if own else 0


Scripts = tuple[Script, ...]
"""Of all ranks, in one loop."""


def longest(scripts: Scripts) -> int:
    return max(script.steps for script in scripts)


@dataclass(frozen=True)
class Scenario:
    """All ranks' scripts, for each loop, and what they have alike."""

    loops: tuple[Scripts, ...]
    mode: str = "auto"
    way: str = "iterate"
    cycle: int = 1
    averages: bool = True
    throw: bool = False
    divide: bool = True
    odd: bool = False  # every second rank thinks of a step as the others do of the one before
    seed: int = 0

    @property
    def size(self) -> int:
        return len(self.loops[0])

    @property
    def can_be_followed(self) -> bool:
        """Whether no rank needs an example batch from another although all had announced as many batches."""
        return all(
            all(script.batches or script.quits or not script.length for script in scripts) for scripts in self.loops
        )

    def syncs(self, step: int, rank: int = 0) -> bool:
        return (step - self.odd * rank % 2) % self.cycle == self.cycle - 1

    def active_ranks(self, loop: int, step: int) -> ActiveRanks:
        ranks = tuple(rank for rank, script in enumerate(self.loops[loop]) if script.steps > step)
        return ActiveRanks(ranks, sum(self.syncs(step, rank) for rank in ranks))

    def totals(self, loops: int | None = None) -> list[float | None]:
        """What the gradients of each step are, if they are reduced, in the first ``loops``."""
        totals: list[float | None] = []
        for loop, scripts in enumerate(self.loops[:loops]):
            for step in range(longest(scripts)):
                active, syncing = self.active_ranks(loop, step)
                total = float(sum(rank + 1 for rank in active))
                if self.averages:
                    ranks = self.size if self.divide else len(active)
                    total = ranks * sum((rank + 1) * samples(rank) for rank in active) / sum(map(samples, active))
                totals.append(total if syncing else None)
        return totals


def about(totals: list[float | None]) -> list[Any]:
    return [None if total is None else pytest.approx(total) for total in totals]


def samples(rank: int) -> int:
    return 1 + rank % 3


class Loader:
    """A rank's batches, for all of which the loss of a sample is the rank's number plus one."""

    def __init__(self, rank: int, script: Script) -> None:
        self._batch = torch.full((samples(rank),), rank + 1.0, dtype=torch.float64)
        self._script = script

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(len(self._script.batches) + self._script.quits):
            yield self._batch.clone()

    def __len__(self) -> int:
        if self._script.announced is None:
            raise TypeError
        return self._script.length


class Gradients(stagereg.Joinable):
    """One sum a step over all ranks, which goes by the number of the loop and the step."""

    def __init__(self, group: Group, scenario: Scenario) -> None:
        super().__init__()
        self.totals: list[float | None] = []
        self.was_last: bool | None = None
        self._group, self._scenario = group, scenario
        self._channel = channel_of(group, "gradients")

    def join_hook(self, **kwargs: Any) -> Any:
        return Shadow(self)

    def needs_active_ranks(self, divide: bool) -> bool:
        return not divide

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self._group

    def begin(self) -> None:
        membership = self.session.membership
        step = membership.steps - membership.expects_empty_step
        self.session.begin(self._scenario.syncs(step, self._group.rank()))
        if self._scenario.throw:
            membership.raise_if_exhausted()

    def reduce(self, mine: float, reads: bool) -> None:
        membership = self.session.membership
        loop, step = len(self.session._loops) - 1, membership.steps - 1
        right = self._scenario.active_ranks(loop, step)
        if isinstance(membership, StoreMembership):
            right = ActiveRanks((), int(right.syncing > 0))
        reduces = self._scenario.syncs(step, self._group.rank())
        if reads:
            active = membership.read()
            assert active == right
            reduces = active.syncing > 0
        self.totals.append(self._channel.meet((loop, step), mine) if reduces else None)


class Shadow(stagereg.JoinHook):
    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients

    def main_hook(self) -> None:
        self._gradients.reduce(0.0, reads=True)

    def post_hook(self, is_last_joiner: bool) -> None:
        self._gradients.was_last = is_last_joiner


def train(scenario: Scenario, group: Group) -> tuple[list[float | None], Any]:
    """What a training script does, on one rank; returns its totals and whether it was last, or what it raised."""
    rank = group.rank()
    gradients = Gradients(group, scenario)
    loaders = [Loader(rank, scripts[rank]) for scripts in scenario.loops]
    join = stagereg.Join(
        [gradients],
        throw_on_early_termination=scenario.throw,
        mode=scenario.mode,
        loader=loaders[0] if scenario.way == "plain" else None,
        divide_by_initial_world_size=scenario.divide,
    )
    try:
        with join:
            for scripts, loader in zip(scenario.loops, loaders, strict=True):
                loop(scenario, join, gradients, scripts[rank], loader)
    except (UnevenInputsError, JoinError) as error:
        return gradients.totals, error
    return gradients.totals, gradients.was_last


def loop(scenario: Scenario, join: Any, gradients: Gradients, script: Script, loader: Loader) -> None:
    own = len(script.batches)
    for i, x in enumerate(join.iterate(loader) if scenario.way == "iterate" else loader):
        if (len(x) and i == own) or i - own - script.quits == script.stays:
            break
        if not script.batches[i] if len(x) else script.passes:
            continue
        gradients.begin()
        if scenario.averages:
            weight = torch.ones((), requires_grad=True)
            join.mean(weight * x.sum(), len(x)).backward()
            assert weight.grad is not None
            gradients.reduce(weight.grad.item(), script.reads)
        else:
            gradients.reduce(x.mean().item() if len(x) else 0.0, script.reads)


def play(*scenarios: Scenario) -> list[list[tuple[list[float | None], Any]]]:
    """Return what comes of a job that goes through the scenarios, for each of them and rank."""

    def act(rank: int) -> list[tuple[list[float | None], Any]]:
        group = Group(simulation, rank)
        return [train(scenario, group) for scenario in scenarios]

    simulation = Simulation(scenarios[0].size, scenarios[0].seed)
    with in_threads():
        results = simulation.run(act)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [list(each) for each in zip(*results, strict=True)]


scripts = st.builds(
    Script,
    batches=st.lists(st.sampled_from([True, True, True, False]), max_size=6).map(tuple),
    quits=st.booleans(),
    stays=st.one_of(st.just(99), st.integers(0, 3)),
    passes=st.booleans(),
    announced=st.one_of(st.just(0), st.none(), st.integers(-2, 2)),
    reads=st.booleans(),
)


@st.composite
def scenarios(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Up to 70 ranks, of at most five kinds."""
    way = draw(st.sampled_from(["iterate", "plain"]))
    loops = draw(st.lists(st.lists(scripts, min_size=1, max_size=5), min_size=1, max_size=1 if way == "plain" else 3))
    size = draw(st.one_of(st.integers(1, 5), st.integers(1, 70)))
    seed = draw(st.integers(0, 2**16))
    options = {
        "mode": draw(st.sampled_from(["auto", "planned", "counted"])),
        "cycle": draw(st.integers(1, 3)),
        "averages": draw(st.booleans()),
        "divide": draw(st.booleans()),
        "way": way,
        **fixed,
    }
    scenario = crowd(loops, size, seed, **options)
    assume(scenario.can_be_followed or way == "plain")
    return scenario


def crowd(loops: list[list[Script]], size: int, seed: int = 0, **options: Any) -> Scenario:
    drawn = random.Random(seed)
    everyone = [tuple(drawn.choice(kinds) for _ in range(size)) for kinds in loops]
    if options.get("mode") == "planned":  # it needs all lengths
        everyone = [tuple(replace(each, announced=each.announced or 0) for each in ranks) for ranks in everyone]
    return Scenario(tuple(everyone), seed=seed, **options)


def steps(count: int, **more: Any) -> Script:
    return Script((True,) * count, **more)


@SEVERAL
@given(scenario=scenarios(throw=True))
@example(scenario=crowd([[steps(3), steps(2)]], 64, throw=True, way="plain", mode="counted"))
@example(scenario=crowd([[steps(2), steps(3, announced=-1)]], 64, throw=True, mode="planned"))
@example(scenario=crowd([[steps(1), steps(0, announced=1)]], 64, throw=True, mode="planned", way="plain"))
def test_a_throw_lets_no_rank_pass_that_has_not_taken_every_step(scenario: Scenario) -> None:
    """Of ranks whose plans were wrong, one may raise first, and its detector stops the others."""
    honest = all(
        script.announced == 0 and not script.quits and all(script.batches)
        for scripts in scenario.loops
        for script in scripts
    )
    uneven = [loop for loop, scripts in enumerate(scenario.loops) if len({script.steps for script in scripts}) > 1]
    (results,) = play(scenario)
    raised = [result for _, result in results if isinstance(result, Exception)]
    if uneven:
        assert len(raised) == scenario.size
        assert any(isinstance(error, UnevenInputsError) for error in raised)
        for totals, _ in results:
            assert totals == about(scenario.totals())[: len(totals)]
        if honest:
            assert all(isinstance(error, UnevenInputsError) for error in raised)
            assert len({len(totals) for totals, _ in results}) == 1
    elif honest:
        assert not raised
        assert all(len(totals) == len(scenario.totals()) for totals, _ in results)


@SEVERAL
@given(scenario=scenarios(odd=True, mode="counted"))
@example(scenario=crowd([[steps(5)]], 64, odd=True, mode="counted", cycle=2))
@example(scenario=crowd([[steps(5, reads=False)]], 64, odd=True, mode="counted", cycle=2, averages=False))
def test_schedules_that_differ_are_an_error_on_every_rank(scenario: Scenario) -> None:
    """It comes when a rank reads who is active: in this step, or at the beginning of the next."""
    differing = [
        (loop, step)
        for loop, scripts in enumerate(scenario.loops)
        for step in range(longest(scripts))
        if scenario.active_ranks(loop, step).syncing not in (0, len(scenario.active_ranks(loop, step).ranks))
    ]
    (results,) = play(scenario)
    for rank, (totals, result) in enumerate(results):
        if not differing:
            assert totals == about(scenario.totals())
            continue
        loop, step = differing[0]
        reads = scenario.loops[loop][rank].reads
        assert isinstance(result, JoinError)
        assert f"in step {step + 1}, " in str(result)
        assert "Decide by the number of the step" in str(result)
        assert len(totals) <= len(scenario.totals(loop)) + step + (not reads)
