"""Ranks that run the same program never contradict each other, at whatever moment each is looked at; others do."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from stagereg.join.progress import Progress

STEP = st.lists(st.sampled_from(["train", "other", "backward", "reduce"]), max_size=6)


def moments(program: list[list[str]], waits: list[bool]) -> list[Progress]:
    """Return how far a rank is at each moment; it waits for the steps that others begin, where ``waits`` says so."""
    seen = [Progress()]
    for events, waited in zip(program, waits, strict=False):
        now = seen[-1]._replace(waits=waited or seen[-1].waits)
        seen.append(now)
        now = now.begun(now.steps + 1)
        seen.append(now)
        for event in events:
            if event in ("train", "backward"):
                now = now.mark()
                seen.append(now)
            if event in ("train", "other"):
                now = now._replace(forwards=now.forwards + 1)
            if event == "reduce":
                now = now._replace(reduced=True)
            seen.append(now)
    return [*seen, seen[-1]._replace(waits=True)]


PROGRAMS = st.lists(STEP.map(lambda events: ["train", *events]), min_size=1, max_size=5)
WAITS = st.lists(st.booleans(), min_size=5, max_size=5)


@given(PROGRAMS, WAITS, WAITS)
def test_ranks_that_run_the_same_never_contradict_each_other(
    program: list[list[str]], waits: list[bool], others: list[bool]
) -> None:
    for one, other in product(moments(program, waits), moments(program, others)):
        assert not one.contradicts(other)
        assert not other.contradicts(one)


@given(PROGRAMS, WAITS, WAITS, st.data())
def test_a_forward_that_one_rank_runs_alone_is_seen_in_the_end(
    program: list[list[str]], waits: list[bool], others: list[bool], data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, len(program) - 1))
    place = data.draw(st.integers(1, len(program[step])))
    alone = [list(events) for events in program]
    alone[step].insert(place, "other")
    assert moments(alone, waits)[-1].contradicts(moments(program, others)[-1])


@given(PROGRAMS, WAITS, WAITS, st.data())
def test_a_step_in_which_one_rank_alone_reduces_nothing_is_seen_in_the_end(
    program: list[list[str]], waits: list[bool], others: list[bool], data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, len(program) - 1))
    alone = [list(events) for events in program]
    program[step].append("reduce")
    alone[step] = [event for event in alone[step] if event != "reduce"]
    assert moments(alone, waits)[-1].contradicts(moments(program, others)[-1])
