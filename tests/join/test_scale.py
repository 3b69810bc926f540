"""The memberships of many ranks, over simulated channels and a store in one process: who is active in which step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stagereg.errors import JoinError, PeerFailedError, UnevenInputsError
from stagereg.kernel.membership import ActiveRanks, AllReduceMembership, Membership, StoreMembership

from ..support.examples import examples
from ..support.simulated import Simulation

SEVERAL = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Script:
    """What one rank does: so many steps, of which it had announced some more or fewer; ``None``: no number."""

    steps: int
    more: int | None = 0
    reads: bool = True  # who is active, in each of its steps

    @property
    def length(self) -> int | None:
        return None if self.more is None else max(0, self.steps + self.more)


@dataclass(frozen=True)
class Scenario:
    scripts: tuple[Script, ...]  # of all ranks
    planned: bool = False
    throw: bool = False
    cycle: int = 1  # every so many steps reduce gradients
    odd: bool = False  # every second rank decides about a step as the others do about the step before
    seed: int = 0

    @property
    def longest(self) -> int:
        return max(script.steps for script in self.scripts)

    def syncs(self, step: int, rank: int) -> bool:
        return (step - self.odd * rank % 2) % self.cycle == self.cycle - 1

    def active(self, step: int) -> ActiveRanks:
        ranks = tuple(rank for rank, script in enumerate(self.scripts) if script.steps > step)
        syncing = sum(self.syncs(step, rank) for rank in ranks)
        return ActiveRanks((), int(syncing > 0)) if self.planned else ActiveRanks(ranks, syncing)


def play(scenario: Scenario) -> list[tuple[Membership, list[ActiveRanks | None], Exception | None]]:
    """Return, for each rank, its membership, what it read in each step, and how it ended."""
    simulation = Simulation(len(scenario.scripts), scenario.seed)

    def member(rank: int) -> Membership:
        channel: Any = simulation.channel(rank, "membership")
        if not scenario.planned:
            length = scenario.scripts[rank].length
            return AllReduceMembership(channel, scenario.throw, simulation.waiting, length)
        lengths = [script.length or 0 for script in scenario.scripts]
        return StoreMembership(channel, lengths, simulation.store, scenario.throw, simulation.waiting)

    def act(rank: int) -> Any:
        script, read, membership = scenario.scripts[rank], list[ActiveRanks | None](), None
        try:
            membership = member(rank)
            for step in range(script.steps):
                membership.begin(scenario.syncs(step, rank))
                membership.raise_if_exhausted() if scenario.throw else None
                read.append(membership.read() if script.reads else None)
            while (active := membership.wait_for_next_step()) is not None:
                read.append(active)
        except (UnevenInputsError, JoinError) as error:
            if isinstance(membership, StoreMembership) or not isinstance(error, UnevenInputsError):
                message = str(error)  # the failure detector of a join reports the error to the others
                simulation.abort(lambda: PeerFailedError(f"rank {rank} failed: {message}", rank, message))
            return membership, read, error
        return membership, read, None

    return simulation.run(act)


SCRIPTS = st.builds(Script, st.integers(0, 6), st.just(0) | st.none() | st.integers(-2, 2), st.booleans())


@st.composite
def scenarios(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Up to 70 ranks, of at most five kinds."""
    kinds = draw(st.lists(SCRIPTS, min_size=1, max_size=5))
    size = draw(st.integers(1, 5) | st.integers(1, 70))
    scripts = draw(st.lists(st.sampled_from(kinds), min_size=size, max_size=size))
    options = {"planned": draw(st.booleans()), "cycle": draw(st.integers(1, 3)), **fixed}
    return Scenario(tuple(scripts), seed=draw(st.integers(0, 2**16)), **options)


def crowd(*kinds: Script, **options: Any) -> Scenario:
    return Scenario((kinds * 64)[:64], **options)


@SEVERAL
@given(scenario=scenarios())
@example(scenario=crowd(Script(3), Script(2), Script(0), planned=True))
@example(scenario=crowd(Script(5, more=-2), Script(3, more=1), planned=True, cycle=2))
def test_every_rank_reads_who_is_active_in_every_step(scenario: Scenario) -> None:
    right = [scenario.active(step) for step in range(scenario.longest)]
    is_even = len({script.steps for script in scenario.scripts}) == 1
    for script, (membership, read, error) in zip(scenario.scripts, play(scenario), strict=True):
        assert error is None
        assert [one or other for one, other in zip(read, right, strict=True)] == right
        assert (membership.steps, membership.shadowed) == (scenario.longest, scenario.longest - script.steps)
        assert membership.all_took_every_step == is_even


@SEVERAL
@given(scenario=scenarios(throw=True))
@example(scenario=crowd(Script(3, reads=False), Script(2, reads=False), throw=True))
@example(scenario=crowd(Script(2), Script(3, more=-1), throw=True, planned=True))
@example(scenario=crowd(Script(1), Script(0, more=1), throw=True, planned=True))
def test_a_throw_lets_no_rank_pass_that_has_not_taken_every_step(scenario: Scenario) -> None:
    """Of ranks whose plans were wrong, one may raise first, and its detector stops the others."""
    is_honest = all(script.more == 0 for script in scenario.scripts)
    is_uneven = len({script.steps for script in scenario.scripts}) > 1
    results = play(scenario)
    errors = [error for _, _, error in results if error is not None]
    if is_uneven:
        assert len(errors) == len(scenario.scripts)
        assert any(isinstance(error, UnevenInputsError) for error in errors)
    if is_honest:
        assert all(isinstance(error, UnevenInputsError) for error in errors)
        assert bool(errors) == is_uneven
        assert len({len(read) for _, read, _ in results}) == 1
        shortest = min(script.steps for script in scenario.scripts)
        assert len(results[0][1]) == (0 if is_uneven and scenario.planned else shortest)


@SEVERAL
@given(scenario=scenarios(odd=True, planned=False))
@example(scenario=crowd(Script(5), odd=True, cycle=2))
@example(scenario=crowd(Script(5, reads=False), odd=True, cycle=2))
def test_schedules_that_differ_are_an_error_on_every_rank(scenario: Scenario) -> None:
    """It comes when a rank reads who is active: in this step, or at the beginning of the next."""
    active = [scenario.active(step) for step in range(scenario.longest)]
    differing = [step for step, each in enumerate(active) if each.syncing not in (0, len(each.ranks))]
    for script, (_, read, error) in zip(scenario.scripts, play(scenario), strict=True):
        if differing:
            assert isinstance(error, JoinError)
            assert f"in step {differing[0] + 1}, " in str(error)
            assert "Choose no_sync() by the number of the step" in str(error)
        assert len(read) <= (differing[0] + (not script.reads) if differing else scenario.longest)
