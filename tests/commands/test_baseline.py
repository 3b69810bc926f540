"""A combination is worse than in the baseline by more than a limit, if the runs show it; nothing is left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from stagereg.commands.baseline import Change, changes, limit, verdict
from stagereg.errors import ConfigError

OLD = (10.0, 10.1, 10.2, 10.3)


def document(rows: Mapping[str, Sequence[float] | str], better: str = "lower", **fields: Any) -> dict[str, Any]:
    """What a report prints of rows with these values, or of this status."""
    found = []
    for name, given in rows.items():
        row: dict[str, Any] = {"combination": dict(part.split("=") for part in name.split()), "again": False}
        cells = {} if isinstance(given, str) else {"stall_ms": {"values": list(given)}}
        found.append(row | {"status": given if isinstance(given, str) else "completed", "cells": cells} | fields)
    return {"kind": "sweep", "metric": "stall_ms", "better": better, "rows": found}


def test_sweeps_that_are_ranked_in_opposite_directions_are_not_compared() -> None:
    now, before = document({"a=1": OLD}, "higher"), document({"a=1": OLD}, "lower")
    with pytest.raises(ConfigError, match="stall_ms: lower is better in the baseline, but higher is better in now"):
        changes(before, now, 0.05)


def only(now: Sequence[float] | str, before: Sequence[float] | str = OLD, better: str = "lower") -> Change:
    (change,) = changes(document({"a=1": before}, better), document({"a=1": now}, better), 0.05)
    return change


def times(factor: float, values: Sequence[float] = OLD) -> list[float]:
    return [factor * value for value in values]


@pytest.mark.parametrize(
    ("now", "lower", "higher"),
    [
        (times(1.2), "worse", "better"),
        (times(0.8), "better", "worse"),
        (times(1.04), "within 5 %", "within 5 %"),
        ((10.05, 11.5, 12.0, 12.5), "no significant difference", "no significant difference"),
        ((*times(1.2), math.nan), "worse", "worse"),
    ],
)
def test_worse_is_by_more_than_the_limit_and_told_apart(now: Sequence[float], lower: str, higher: str) -> None:
    assert (only(now).verdict, only(now, better="higher").verdict) == (lower, higher)
    assert only(now).compared


def test_changes_have_medians_and_chances() -> None:
    change = only(times(1.2))
    assert (change.combination, change.before, change.now) == ("as configured", *map(pytest.approx, (10.15, 12.18)))
    assert (change.change, change.chance) == pytest.approx((0.2, 2 / 70))
    assert only((1.0, 1.1, 1.2, 1.3), before=(0.0,) * 4).verdict == "worse"
    assert only((0.0,) * 4, before=(0.0,) * 4).change == 0
    assert only(times(-1.2), before=times(-1)).verdict == "better", "negative values"


@pytest.mark.parametrize(
    ("now", "before", "why"),
    [
        (times(1, OLD[:3]), OLD, "too few runs: 4 and 3"),
        (OLD, OLD[:1], "too few runs: 1 and 4"),
        ("failed", OLD, "failed"),
        ("2 of 5 unfinished", OLD, "2 of 5 unfinished"),
        ((), OLD, "no stall_ms"),
        (OLD, (), "no stall_ms in the baseline"),
        (OLD, (math.inf, *OLD), "not finite in the baseline"),
    ],
)
def test_what_cannot_be_compared_is_no_success(now: Any, before: Any, why: str) -> None:
    change = only(now, before)
    assert (change.verdict, change.compared) == (why, False)
    with pytest.raises(ConfigError, match=r"1 of 1 combination could not be compared .*sweep\.repeats=4"):
        verdict([change], 0.05)


def test_combinations_are_matched_by_all_their_options() -> None:
    before = document({"a=1 b=x": OLD, "a=2 b=x": OLD, "a=3 b=x": "failed"})
    now = document({"b=x a=1": OLD, "a=3 b=x": OLD, "a=4 b=x": OLD})
    found = {each.combination: each for each in changes(before, now, 0.05)}
    assert {name: (each.verdict, each.compared) for name, each in found.items()} == {
        "a=1": ("within 5 %", True),
        "a=3": ("failed in the baseline", True),
        "a=4": ("new", True),
        "a=2": ("missing", False),
    }
    with pytest.raises(ConfigError, match=r"1 of 4 combinations could not be compared .*\(a=2: missing\)"):
        verdict(list(found.values()), 0.05)
    del found["a=2"]
    assert verdict(list(found.values()), 0.05) == "0 of 1 combination are worse than the baseline by more than 5 %."
    with pytest.raises(
        ConfigError, match=r"0 of 2 combinations could not be compared.*no combination completed in the baseline"
    ):
        verdict([found["a=3"], found["a=4"]], 0.05)
    worse = changes(before, document({"a=1 b=x": times(2)}), 0.05)
    assert verdict(worse, 0.05) == "Worse than the baseline by more than 5 %: a=1.", "whatever else is missing"


def test_no_common_combination_is_an_error_that_names_the_options() -> None:
    text = "the baseline and now have no common combination: every value of steps, c differs."
    with pytest.raises(ConfigError) as caught:
        changes(document({"a=1 steps=60": OLD}), document({"a=1 steps=80 c=1": OLD}), 0.05)
    assert str(caught.value) == text


def test_rows_of_different_versions_are_refused_and_again_is_left_out() -> None:
    twice = document({"a=1": OLD})
    twice["rows"].append(dict(twice["rows"][0]))
    with pytest.raises(ConfigError, match="cannot compare now: the sweep mixes results of different versions"):
        changes(document({"a=1": OLD}), twice, 0.05)
    twice["rows"][1]["again"] = True
    assert len(changes(document({"a=1": OLD}), twice, 0.05)) == 1


def test_a_limit_is_read_or_refused() -> None:
    assert [limit(text) for text in ("worse:5%", "worse:0.5%", "worse:0%", " worse:200% ")] == [0.05, 0.005, 0, 2]
    for text in ("worse:5", "worse:-5%", "better:5%", "5%", "worse:x%", "worse:5%%", ""):
        with pytest.raises(ConfigError, match=r"invalid limit .*: write worse:PERCENT%, for example worse:5%"):
            limit(text)
