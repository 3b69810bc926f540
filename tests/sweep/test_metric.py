"""Metrics are found by name, and the error for an unknown name lists all names."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stagereg.errors import ConfigError
from stagereg.sweep.metric import directed, least_difference, metric, usual
from stagereg.sweep.number_text import shown


def test_an_unknown_metric_is_reported_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown metric 'stal_ms'\. Did you mean 'stall_ms'\? .*shadowed_steps; and ret"
    ):
        metric("stal_ms")
    with pytest.raises(ConfigError, match=r"'returned\.'.*returned\.KEY"):
        metric("returned.")


def test_a_direction_may_be_turned_but_must_be_one() -> None:
    assert metric("returned.valid.error").head == "valid.error"
    for name, better in (("loss", "lower"), ("samples_per_s", "higher")):
        assert directed(name).better == better
        assert directed(name, "maximize").better == "higher"
        assert directed(name, "minimize").better == "lower"
    with pytest.raises(ConfigError, match=r"got 'minimise'\. Did you mean 'minimize'\?"):
        directed("loss", "minimise")
    for name in ("shadowed_steps", "returned.accuracy"):
        with pytest.raises(ConfigError, match=rf"{name} has no direction of its own. .*sweep\.direction=minimize"):
            directed(name)
        assert directed(name, "maximize").better == "higher"


def test_what_matters_is_a_part_and_of_the_program_s_own_numbers_any_difference() -> None:
    assert [least_difference(name, None) for name in ("stall_ms", "loss", "returned.a")] == [0.05, 0, 0]
    assert [least_difference("loss", each) for each in ("5%", " 2.5 %", 0.2, "0.2", "0%")] == [0.05, 0.025, 0.2, 0.2, 0]
    for wrong in ("5", 5, "100%", "-1%", "few", "nan", "%", True, ""):
        with pytest.raises(ConfigError, match=r"must be at least 0% and below 100%, for example sweep\.matters=5%"):
            least_difference("loss", wrong)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.9999, "0.9999"), (-0.9999, "-0.9999"), (99.97, "99.97"), (1.0, "1"), (0.1 + 0.2, "0.3"), (1000.4, "1,000")],
)
def test_a_number_that_is_not_whole_does_not_look_whole(value: float, text: str) -> None:
    assert shown(value) == text


@settings(deadline=None)
@given(value=st.floats(1e-9, 9e8))
@example(9.995)
@example(999.5)
@example(1e-4)
def test_numbers_are_shown_in_three_digits(value: float) -> None:
    text = shown(value)
    assert math.isclose(float(text.replace(",", "")), value, rel_tol=0.0051)
    digits = len(text.replace(",", "").replace(".", "").lstrip("0"))
    assert digits <= max(4, len(str(round(value)))) or value < 1e-4 or abs(value - round(value)) < 0.005
    assert "e" not in text or value < 1e-4
    assert shown(-value) == f"-{text}"


def test_numbers_have_their_units() -> None:
    seen = [metric(name).text(value) for name, value in [("stall_ms", 1.204), ("lost_percent", 0), ("loss", 2.5)]]
    assert [*seen, shown(12345.6)] == ["1.2 ms", "0%", "2.5", "12,346"]


def test_the_default_ranking_is_by_stall_and_otherwise_by_loss() -> None:
    assert [usual(known) for known in ((), ("loss",), ("loss", "stall_ms"))] == ["stall_ms", "loss", "stall_ms"]
