"""A manifest names what was written, or is refused.

Damage is noticed, and no name in it points out of its directory.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagereg.checkpoint.format.manifest import FileDigest, Manifest, step_name, step_of

PLAIN = st.text(
    st.characters(categories=["L", "N", "P", "S"], exclude_characters="/\\"), min_size=1, max_size=20
).filter(lambda name: name not in (".", "..", "manifest.json"))
MARKS = st.builds(FileDigest, st.integers(0, 2**50), st.integers(0, 2**32 - 1))
MANIFESTS = st.builds(
    Manifest,
    st.integers(0, 10**12),
    st.integers(1, 10**6),
    st.integers(0, 10**9),
    st.dictionaries(PLAIN, MARKS, max_size=4),
    PLAIN,
    st.integers(0, 2**36),
    st.dictionaries(PLAIN, st.floats(), max_size=4),
)
ONE = Manifest(7, 2, 3, {"__0_0.distcp": FileDigest(10, 11), ".metadata": FileDigest(12, 13)}, "direct", 14)


@given(MANIFESTS)
def test_a_written_manifest_is_read_back(manifest: Manifest) -> None:
    assert Manifest.loads(manifest.dumps()) == manifest
    assert Manifest.loads(manifest.dumps().encode()) == manifest
    json.loads(manifest.dumps(), parse_constant=pytest.fail)  # JSON has no NaN
    assert repr(Manifest.loads(manifest.dumps()).metrics) == repr(manifest.metrics)


@given(st.data())
def test_a_cut_or_a_changed_character_is_noticed(data: st.DataObject) -> None:
    text = ONE.dumps()
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.just("") | st.characters(codec="utf-8").map(lambda c: c + text[at + 1 :]))
    if changed == text:
        assert Manifest.loads(changed) == ONE
    else:
        with pytest.raises(ValueError, match=r".+"):
            Manifest.loads(changed)


NAMES = [
    "",
    ".",
    "..",
    "/etc/passwd",
    "../x",
    "a/b",
    "a\\b",
    "a\0b",
    "a\nb",
    "\x1b[2J",
    "\u202ea",
    "\ud800",
    "manifest.json",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_is_no_plain_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a plain file name"):
        Manifest.loads(Manifest(1, 1, 1, {name: FileDigest(0, 0)}).dumps())


WRONG: list[tuple[str, Any]] = [
    ("step", -1),
    ("step", 1.0),
    ("step", True),
    ("step", "1"),
    ("world_size", 0),
    ("serial", None),
    ("time", -5),
    ("time", 1.5),
    ("time", 10**18),
    ("serial", 2**63),
    ("storage", 3),
    ("storage", ""),
    ("storage", "\x1b[2Jdcp"),
    ("files", ["a"]),
    ("files", {"a": 3}),
    ("files", {"a": {"bytes": -1, "crc32": 0}}),
    ("files", {"a": {"bytes": 1}}),
    ("files", {"a": {"bytes": float("nan"), "crc32": 0}}),
    ("metrics", [1.0]),
    ("metrics", {"loss": 1}),
    ("metrics", {"loss": True}),
    ("metrics", {"loss": "0.5"}),
    ("metrics", {"loss": float("nan")}),
    ("metrics", {"\x1b[2J": 0.5}),
    ("dropped", "optimizer"),
    ("dropped", [7]),
    ("dropped", [""]),
    ("lost", ["1"]),
    ("lost", {"1": "random numbers"}),
    ("lost", {"one": ["random numbers"]}),
    ("lost", {"1": ["\x1b[2J"]}),
    ("lost", {"1": [2]}),
    ("lost", {"2": ["random numbers"]}),  # of 2 ranks
    ("format", 1),
    ("format", 3),
    ("format", None),
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=repr)
def test_a_value_that_cannot_be_is_refused(key: str, value: Any) -> None:
    data = {**json.loads(ONE.dumps()), key: value}
    with pytest.raises(ValueError, match=rf"{key}|no files|bytes|crc32 must|the metric"):
        Manifest.loads(json.dumps(data))


LONG = "x" * (1 << 20)
FILES = '{"format": 2, "step": 1, "storage": "x", "world_size": 1, "serial": 1, "files": {"%s": {"bytes": 1}}}'
INVALID = ["", "[]", "3", "null", "[" * 100_000, '{"format": 2}', b"\xff\xfe\x00", FILES % LONG, FILES % f"/{LONG}"]
INVALID += [f'{{"format": "{LONG}"}}', f'{{"format": 2, "storage": "{LONG}"}}']
INVALID += ['{"format": 2, "crc32": 1, "x": ' + "[" * depth + "]" * depth + "}" for depth in range(900, 1010)]


def test_an_invalid_manifest_is_refused_in_a_short_text() -> None:
    for text in INVALID:
        with pytest.raises(ValueError, match=r"(?s)\A.{1,300}\Z"):
            Manifest.loads(text)


@given(st.integers(0, 10**12))
def test_names_of_steps_show_which(step: int) -> None:
    assert step_of(step_name(step)) == step
    assert step_of(f".{step_name(step)}.ab.tmp") is None
