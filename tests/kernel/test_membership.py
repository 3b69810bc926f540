"""Whatever ranks do with their data, all take part in the same steps, agree on who is active, and end together."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stagereg.errors import JoinError, UnevenInputsError
from stagereg.kernel.membership import ActiveRanks, AllReduceMembership, Membership, StoreMembership

from .simulated import Simulation, Stuck

SEVERAL = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@dataclass(frozen=True)
class Script:
    """What one rank does: for each of its batches, whether it takes a step or skips it, and then..."""

    batches: tuple[bool, ...] = ()
    bodies: tuple[bool, ...] = ()  # ... runs its body without data, where it may skip too, and then leaves the loop
    announced: int | None = 0  # how many batches more (or fewer) than it announced; None: it did not know
    reads: bool = True

    @property
    def steps(self) -> int:
        return sum(self.batches)

    @property
    def length(self) -> int:
        return max(0, len(self.batches) + (self.announced or 0))


@dataclass(frozen=True)
class Scenario:
    """All ranks' scripts, and what the ranks have in common."""

    scripts: tuple[Script, ...]
    mode: str = "counted"
    cycle: int = 1  # gradients are reduced in every such step
    throw: bool = False
    seed: int = 0

    def syncs(self, step: int) -> bool:
        return step % self.cycle == self.cycle - 1

    @property
    def steps(self) -> int:
        return max(script.steps for script in self.scripts)

    def active(self, step: int) -> tuple[bool, ...]:
        return tuple(script.steps > step for script in self.scripts)

    def total(self, step: int) -> float | None:
        if not self.syncs(step):
            return None
        return float(sum(gradient(rank, step) for rank, active in enumerate(self.active(step)) if active))

    def active_ranks(self, step: int) -> ActiveRanks:
        if self.mode == "planned":
            return ActiveRanks((), int(self.syncs(step)))
        ranks = tuple(rank for rank, active in enumerate(self.active(step)) if active)
        return ActiveRanks(ranks, len(ranks) if self.syncs(step) else 0)


def gradient(rank: int, step: int) -> int:
    return 1 + 1000 * step + rank


@dataclass
class Rank:
    """A rank that follows its script, and notes each step's gradients and active ranks."""

    scenario: Scenario
    simulation: Simulation
    rank: int
    totals: list[float | None] = field(default_factory=list)
    active_ranks: list[ActiveRanks] = field(default_factory=list)
    membership: Membership = field(init=False)
    raised: Exception | None = None

    def run(self) -> Rank:
        try:
            self.membership = self.enter()
            self.follow()
        except (JoinError, UnevenInputsError) as error:
            self.raised = error
        return self

    def enter(self) -> Membership:
        simulation, scenario = self.simulation, self.scenario
        self.gradients = simulation.channel(self.rank, "gradients")
        channel = simulation.channel(self.rank, "membership")
        if scenario.mode == "counted":
            script = scenario.scripts[self.rank]
            length = None if script.announced is None else script.length
            return AllReduceMembership(channel, scenario.throw, simulation.waiting, length)
        lengths = [script.length for script in scenario.scripts]
        return StoreMembership(channel, lengths, simulation.store, scenario.throw, simulation.waiting)

    def follow(self) -> None:
        script = self.scenario.scripts[self.rank]
        for takes in script.batches:
            if takes:
                self.step(self.membership.steps, gradient(self.rank, self.membership.steps))
        for takes in script.bodies:
            active = self.membership.wait_for_next_step()
            if active is None:
                break
            self.membership.expects_empty_step = True
            if takes:
                self.step(self.membership.steps - 1, 0.0)
            else:
                self.shadow(active)
        while (active := self.membership.wait_for_next_step()) is not None:
            self.shadow(active)

    def step(self, number: int, mine: float) -> None:
        self.membership.begin(self.syncs(number))
        if self.scenario.throw:
            self.membership.raise_if_exhausted()
        if self.scenario.scripts[self.rank].reads:
            self.active_ranks.append(self.membership.read())
        else:
            self.active_ranks.append(self.scenario.active_ranks(number))
        self.totals.append(self.gradients.meet(number, mine) if self.syncs(number) else None)

    def shadow(self, active: ActiveRanks) -> None:
        self.active_ranks.append(active)
        number = self.membership.steps - 1
        self.totals.append(self.gradients.meet(number, 0.0) if active.syncing else None)

    def syncs(self, number: int) -> bool:
        return self.scenario.syncs(number)


def play(scenario: Scenario, kind: type[Rank] = Rank) -> list[Rank]:
    simulation = Simulation(len(scenario.scripts), scenario.seed)
    return simulation.run(lambda rank: kind(scenario, simulation, rank).run())


scripts = st.builds(
    Script,
    batches=st.lists(st.sampled_from([True, True, True, False]), max_size=8).map(tuple),
    bodies=st.lists(st.sampled_from([True, True, True, False]), max_size=8).map(tuple),
    announced=st.one_of(st.just(0), st.none(), st.integers(-3, 3)),
    reads=st.booleans(),
)


@st.composite
def scenarios(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Up to 80 ranks, of at most six kinds."""
    kinds = draw(st.lists(scripts, min_size=1, max_size=6))
    size = draw(st.one_of(st.just(len(kinds)), st.integers(1, 80)))
    seed = draw(st.integers(0, 2**16))
    return crowd(kinds, size, seed, draw(st.integers(1, 4)), **fixed)


def crowd(kinds: list[Script], size: int, seed: int = 0, cycle: int = 1, **fixed: Any) -> Scenario:
    drawn = random.Random(seed)
    everyone = (kinds + [drawn.choice(kinds) for _ in range(size - len(kinds))])[:size]
    drawn.shuffle(everyone)
    return Scenario(tuple(everyone), cycle=cycle, seed=seed, **fixed)


def steps(count: int, **more: Any) -> Script:
    return Script((True,) * count, **more)


MANY = [
    Script((True, False, True, True), announced=2),
    steps(0),
    steps(8, announced=-2),
    steps(3, bodies=(True, False, True)),
    steps(1, bodies=(True,) * 8),
]


@pytest.mark.parametrize("mode", ["planned", "counted"])
@SEVERAL
@given(scenario=scenarios())
@example(scenario=crowd([steps(3)], 1))
@example(scenario=crowd(MANY, 64))
@example(scenario=crowd(MANY, 128, cycle=3))
def test_all_ranks_take_part_in_exactly_the_steps_with_data(mode: str, scenario: Scenario) -> None:
    scenario = replace(scenario, mode=mode)
    for script, rank in zip(scenario.scripts, play(scenario), strict=True):
        assert rank.raised is None
        assert rank.totals == [scenario.total(step) for step in range(scenario.steps)]
        assert rank.active_ranks == [scenario.active_ranks(step) for step in range(scenario.steps)]
        assert rank.membership.over
        assert rank.membership.wait_for_next_step() is None
        assert rank.membership.steps == scenario.steps
        assert rank.membership.shadowed == scenario.steps - script.steps
        assert not rank.membership.expects_empty_step


def thrown(scenario: Scenario) -> tuple[int, list[int], int] | None:
    """After how many steps a counted join throws, which ranks are the reason, and how many steps others have begun."""
    size = len(scenario.scripts)
    announced = ["unsure"] * size
    for step in range(scenario.steps + 1):
        absent = [rank for rank in range(size) if announced[rank] == "absent"]
        last = [rank for rank in range(size) if announced[rank] == "last"]
        if absent or (last and "more" in announced):
            return step, absent or last, step
        all_had_more = set(announced) == {"more"}
        announced = [presence(script, step) for script in scenario.scripts]
        absent = [rank for rank in range(size) if announced[rank] == "absent"]
        if 0 < len(absent) < size and not all_had_more:
            return step, absent, step + 1
    return None


def presence(script: Script, step: int) -> str:
    if step >= script.steps:
        return "absent"
    if script.announced is None:
        return "unsure"
    return "more" if step + 1 < script.length else "last"


@SEVERAL
@given(scenario=scenarios(throw=True))
@example(scenario=crowd([steps(5), steps(4, announced=None)], 64, throw=True))
@example(scenario=crowd([steps(6), steps(4, announced=2)], 64, throw=True))
def test_a_counted_throw_reaches_all_ranks_in_the_same_step(scenario: Scenario) -> None:
    expected = thrown(scenario)
    shortest = min(script.steps for script in scenario.scripts)
    if all(script.announced is None or script.length == script.steps for script in scenario.scripts):
        assert expected is None if shortest == scenario.steps else expected is not None and expected[0] == shortest
    elif shortest < scenario.steps:
        assert expected is not None
        assert expected[0] <= shortest + 1
    for number, rank in enumerate(play(scenario)):
        taken, gone, begun = expected or (scenario.steps, [], scenario.steps)
        assert rank.totals == [scenario.total(step) for step in range(taken)]
        if expected is None:
            assert rank.raised is None
            continue
        assert isinstance(rank.raised, UnevenInputsError)
        if number in gone:
            assert rank.raised.rank == number
            assert f"after {taken} steps" in str(rank.raised)
        else:
            assert str(rank.raised).startswith(f"Rank {', '.join(map(str, gone))} exhausted all inputs")
            assert f"after step {taken}." in str(rank.raised)
            assert rank.membership.steps == begun


@SEVERAL
@given(scenario=scenarios(mode="planned", throw=True))
@example(scenario=crowd([steps(1), steps(0, announced=1)], 64, mode="planned", throw=True))
def test_a_planned_throw_comes_first_and_names_all_lengths(scenario: Scenario) -> None:
    lengths = [script.length for script in scenario.scripts]
    if len(set(lengths)) == 1:
        honest = tuple(replace(script, batches=(True,) * lengths[0], announced=0) for script in scenario.scripts)
        for rank in play(replace(scenario, scripts=honest)):
            assert rank.raised is None
            assert len(rank.totals) == lengths[0]
        return
    for rank in play(scenario):
        assert isinstance(rank.raised, UnevenInputsError)
        assert rank.raised.rank == lengths.index(min(lengths))
        assert rank.totals == []
        for number, length in enumerate(lengths):
            assert f"rank {number} has {length}" in str(rank.raised)


@SEVERAL
@given(kinds=st.lists(st.integers(0, 6), min_size=2, max_size=9), seed=st.integers(0, 999))
@example(kinds=[6, 5, 6, 6] * 16, seed=0)
def test_a_rank_that_leaves_an_even_plan_early_raises(kinds: list[int], seed: int) -> None:
    """In a join, the failure detector brings that rank's error to the others."""
    scripts = tuple(steps(count, announced=6 - count) for count in kinds)
    scenario = Scenario(scripts, "planned", cycle=1, throw=True, seed=seed)
    ranks = play(scenario, Reporting)
    for script, rank in zip(scripts, ranks, strict=True):
        assert (rank.raised is None) == (min(kinds) == max(kinds))
        if script.steps == scenario.steps:
            assert not isinstance(rank.raised, UnevenInputsError)
    if min(kinds) < max(kinds):
        assert any(isinstance(rank.raised, UnevenInputsError) for rank in ranks)
        assert all(len(rank.totals) <= min(kinds) for rank in ranks)


class Reporting(Rank):
    """A rank whose errors end the others."""

    def follow(self) -> None:
        try:
            super().follow()
        except UnevenInputsError:
            self.simulation.abort(lambda: JoinError("another rank has failed"))
            raise


class Odd(Rank):
    """Ranks do not agree which steps reduce gradients: some think of a step as the others do of the one before."""

    def syncs(self, number: int) -> bool:
        return self.scenario.syncs(number - self.rank % 2)


class ReadsLate(Odd):
    """... and none reads who is active before the next step begins."""

    def step(self, number: int, mine: float) -> None:
        self.membership.begin(self.syncs(number))
        self.totals.append(None)

    def shadow(self, active: ActiveRanks) -> None:
        self.totals.append(None)


@pytest.mark.parametrize("kind", [Odd, ReadsLate])
@SEVERAL
@given(scenario=scenarios())
@example(scenario=crowd([steps(5)], 64, cycle=2))
def test_schedules_that_differ_are_an_error_on_every_rank(kind: type[Rank], scenario: Scenario) -> None:
    scripts = tuple(replace(script, reads=True, bodies=()) for script in scenario.scripts)
    scenario = replace(scenario, scripts=scripts)
    differ = [step for step in range(scenario.steps) if differs(scenario, step)]
    for script, rank in zip(scripts, play(scenario, kind), strict=True):
        if not differ:
            assert rank.raised is None
            assert len(rank.totals) == scenario.steps
            continue
        assert isinstance(rank.raised, JoinError)
        assert f"in step {differ[0] + 1}, " in str(rank.raised)
        assert "Decide by the number of the step" in str(rank.raised)
        assert len(rank.totals) == differ[0] + (kind is ReadsLate and script.steps > differ[0])


def differs(scenario: Scenario, step: int) -> bool:
    active = [rank for rank, is_active in enumerate(scenario.active(step)) if is_active]
    return len({scenario.syncs(step - rank % 2) for rank in active}) > 1


@pytest.mark.parametrize(
    ("meetings", "stuck"),
    [
        ([[0], []], r"no thread can go on\nrank 0 waits for \('sum', 0\) for gradients"),
        ([[0], [1]], r"call 0 on the channel for gradients is .* on rank"),
        ([[], [None]], r"calls of each rank on the channel for gradients: \[0, 1\]"),
    ],
)
def test_the_simulation_reports_calls_that_do_not_match(meetings: list[list[int | None]], stuck: str) -> None:
    def act(rank: int) -> None:
        for at in meetings[rank]:
            channel = simulation.channel(rank, "gradients")
            channel.add([1.0]) if at is None else channel.meet(at, 1.0)

    simulation = Simulation(2)
    with pytest.raises(Stuck, match=stuck):
        simulation.run(act)
