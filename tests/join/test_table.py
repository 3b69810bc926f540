"""Every case of the table has the numbers of a single process, in every column and every mode."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from .parallel import COLUMNS
from .reference import EXACT, difference
from .table import CASES, MODES, PATIENCE_S, expected, has, in_column, run_column, run_failing

QUICK = {("ddp", "planned"), ("tp", "planned")}
QUICK_ERRORS = {
    ("divided by active ranks, which it cannot", "fsdp1", "planned"),
    ("one rank breaks alone, no hook for it", "fsdp1", "planned"),
    ("accumulation, each rank's last batch reduced", "ddp", "counted"),
}
MUCH_S = 10.0
"""Seconds that a case may take on a busy machine, beside those that it waits for a rank."""


def slow_unless(quick: bool, *values: str) -> object:
    return pytest.param(*values, id="-".join(values), marks=[] if quick else [pytest.mark.slow])


RUNS = [slow_unless((column, mode) in QUICK, column, mode) for column in COLUMNS for mode in MODES]
ERRORS = [
    slow_unless((name, column, mode) in QUICK_ERRORS, column, mode, name)
    for column in COLUMNS
    for mode in MODES
    for name in in_column(column)
    if has(mode, name) and CASES[name].fails
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("column", "mode"), RUNS)
def test_every_case_has_the_numbers_of_a_single_process(column: str, mode: str) -> None:
    """One run of all cases, one after another in the same ranks."""
    names = [name for name in in_column(column) if has(mode, name) and not CASES[name].fails]
    assert {name: value for name, value in run_column(column, names, mode).items() if not value < EXACT} == {}


@pytest.mark.parametrize(("column", "mode", "name"), ERRORS)
def test_what_cannot_be_joined_is_an_error_on_every_rank_in_time(column: str, mode: str, name: str) -> None:
    errors = run_failing(column, name, mode)
    assert [error for error, _ in errors if not re.search(CASES[name].fails, error)] == []
    assert max(seconds for _, seconds in errors) < PATIENCE_S + MUCH_S


def test_the_reference_distinguishes_the_cases() -> None:
    uneven, mixed = CASES["uneven"], CASES["batches of different sizes"]
    apart = [
        (uneven, replace(uneven, lengths=((2, 4, 5),))),
        (uneven, replace(uneven, skips=((2, 0),))),
        (uneven, replace(uneven, extras=frozenset({"clip"}))),
        (uneven, replace(uneven, forwards=2)),
        (uneven, replace(uneven, accumulate=2)),
        (uneven, replace(uneven, stop=3)),
        (mixed, replace(mixed, average="world")),
        (mixed, replace(mixed, average="active")),
        (replace(mixed, average="world"), replace(mixed, average="active")),
    ]
    for one, other in apart:
        assert difference(expected(one), expected(other)) > 1e-4
