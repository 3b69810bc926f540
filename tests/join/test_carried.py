"""A loop that carries gradients over from step to step, without ``no_sync``, has the numbers of a single process."""

from __future__ import annotations

import itertools
import re

import pytest

from stagereg.testing import run_ranks

from ..support.any_loop import EXACT, Loop, apart, assert_exact, one_process, train
from ..support.reference import JOINABLES

WAYS = [(True, "planned"), (True, "counted"), (False, "planned"), (False, "counted"), (False, "torch")]
LOOPS = [
    Loop(lengths, 3, one_join, *way, column, k=k, to_none=to_none)
    for k, lengths in itertools.product((2, 3, 4), ((2, 5), (3, 6), (1, 6), (0, 5)))
    for column, way in itertools.product(("ddp", "fsdp2"), WAYS)
    for one_join, to_none in itertools.product((True, False), (True, False))
    if way[0] or not one_join
]
QUICK = [
    Loop((2, 5), 3, False, True, "planned", k=2),
    Loop((3, 6), 3, True, True, "counted", k=3, to_none=False),
    Loop((2, 5), 3, False, True, "counted", "fsdp2", k=2),
    Loop((3, 6), 3, False, False, "planned", k=2),
    Loop((3, 6), 3, False, False, "torch", k=4, to_none=False),
    Loop((1, 6), 3, False, False, "counted", "fsdp2", k=3),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("loops", [QUICK, pytest.param(LOOPS, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_gradients_are_carried_over_as_in_one_process(loops: list[Loop]) -> None:
    assert_exact([loop for loop in loops if JOINABLES or loop.column == "ddp"])


OFTEN = "did not step equally often|began a step without gradients"
WITHOUT = "began a step without gradients"
GUESSED = [
    # The optimizer in the list would step after every batch of the others.
    (Loop((1, 2), 3, False, False, "planned", k=3, listed="optimizer"), OFTEN),
    (Loop((4, 5), 3, False, False, "torch", k=2, listed="optimizer"), OFTEN),
    (Loop((2, 5), 3, False, False, "counted", "fsdp2", k=3, listed="optimizer"), OFTEN),
    # The body zeroes, which a rank that has left it does not run.
    (Loop((3, 6), 3, False, False, "planned", k=2, zeroes="before"), WITHOUT),
    (Loop((3, 6), 3, False, False, "torch", "fsdp2", k=2, zeroes="before"), WITHOUT),
    # The only steps that rank 0 and the others had seen by then began without gradients. If the ranks are so far apart
    # that rank 0 reads of a later step in time, it follows.
    (Loop((1, 5), 3, False, False, "counted", k=3, begin=2), "began a step with gradients"),
]


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] * (i not in (0, 3, 5)))
        for i, each in enumerate(GUESSED)
        if JOINABLES or each[0].column == "ddp"
    ],
)
def test_what_a_rank_without_data_cannot_know_is_an_error_on_all_ranks(loop: Loop, text: str) -> None:
    outcomes = [found for found, _ in run_ranks(train, 2, args=(loop,), timeout_s=60)]
    if loop.begin and not any(isinstance(each, str) for each in outcomes):
        assert max(apart(each, one_process(loop)) for each in outcomes) < EXACT
        return
    for error in outcomes:
        assert re.search(text, error), error
