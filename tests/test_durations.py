"""Durations as text: read as people write them, written so that reading gives the same."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagereg.durations import duration, write_duration
from stagereg.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("1h30m", 5400),
        ("1 hour, 30 minutes", 5400),
        ("2 days", 172800),
        ("1w", 604800),
        ("500ms", 0.5),
        ("20us", 0.00002),
        ("00:05:00", 300),
        ("1:30", 90),
        ("1 day, 0:00:01", 86401),
        ("-1 day, 23:59:30", -30),
        ("-0:00:30", -30),
        ("-30s", -30),
        ("30", 30),
        ("0.25", 0.25),
        ("1e-3", 0.001),
        (" 30 S ", 30),
    ],
)
def test_a_duration_is_read_as_people_write_it(text: str, seconds: float) -> None:
    assert duration(text) == timedelta(seconds=seconds)


def test_a_clock_time_is_read_as_yaml_reads_it() -> None:
    from omegaconf import OmegaConf

    for text in ("1:30", "1:30:00", "10:00:01"):
        assert duration(text) == timedelta(seconds=OmegaConf.create(f"wait: {text}").wait)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (timedelta(0), "0s"),
        (timedelta(hours=1.5), "1h30m"),
        (timedelta(days=2), "2d"),
        (timedelta(seconds=-30), "-30s"),
        (timedelta(seconds=90.5), "1m30.5s"),
        (timedelta(microseconds=1), "0.000001s"),
    ],
)
def test_a_duration_is_written_in_units(value: timedelta, text: str) -> None:
    assert write_duration(value) == text


@given(st.timedeltas())
def test_every_duration_is_read_again_from_both_of_its_texts(value: timedelta) -> None:
    assert duration(write_duration(value)) == duration(str(value)) == value


@pytest.mark.parametrize("text", ["", "-", "s", "soon", "1h30", "--3s", "1:2:3:4", "nan", "1:30:00h", "1" * 5000 + "!"])
def test_an_invalid_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a duration\. Write a duration as 30s, 1h30m, 2 days"):
        duration(text)


def test_a_wrong_unit_of_time_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^'3 dayz' has no unit of time after 3\. Did you mean 'days?'\?"):
        duration("3 dayz")


@pytest.mark.parametrize("text", ["1e30", "9999999999 days", "99999999999999999999:00:00"])
def test_a_duration_too_long_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="too long"):
        duration(text)
