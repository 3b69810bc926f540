"""Durations as text: read as people write them, written so that reading gives the same."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from stagereg.durations import duration, write_duration
from stagereg.errors import ConfigError

SECONDS = {
    "30s": 30,
    "1h30m": 5400,
    "1 hour, 30 minutes": 5400,
    "2 days": 172800,
    "1w": 604800,
    "500ms": 0.5,
    "20us": 0.00002,
    "00:05:00": 300,
    "1:30": 90,
    "1 day, 0:00:01": 86401,
    "-1 day, 23:59:30": -30,
    "-0:00:30": -30,
    "-30s": -30,
    "30": 30,
    "0.25": 0.25,
    "1e-3": 0.001,
    " 30 S ": 30,
}


@pytest.mark.parametrize("text", SECONDS)
def test_a_duration_is_read_as_people_write_it(text: str) -> None:
    assert duration(text) == timedelta(seconds=SECONDS[text])
    of_yaml = OmegaConf.create(f"wait: {text}").wait if text[0].isdigit() and "day" not in text else text
    assert isinstance(of_yaml, str) or of_yaml == SECONDS[text]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (5400, "1h30m"), (172800, "2d"), (-30, "-30s"), (90.5, "1m30.5s"), (1e-6, "0.000001s")],
)
def test_a_duration_is_written_in_units(seconds: float, text: str) -> None:
    assert write_duration(timedelta(seconds=seconds)) == text


@given(st.timedeltas())
def test_every_duration_is_read_again_from_both_of_its_texts(value: timedelta) -> None:
    assert duration(write_duration(value)) == duration(str(value)) == value


INVALID = ["", "-", "s", "soon", "1h30", "--3s", "1:2:3:4", "nan", "1:30:00h", "1" * 5000 + "!"]
LONG = ["1e30", "9999999999 days", "99999999999999999999:00:00"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, r"is not a duration\. Write a duration as 30s, 1h30m, 2 days") for text in INVALID),
        *((text, "is too long for a duration") for text in LONG),
        ("3 dayz", r"has no unit of time after 3\. Did you mean 'days?'\?"),
    ],
)
def test_an_invalid_duration_is_refused_with_examples(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        duration(text)
