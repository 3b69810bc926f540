"""Values that a state may have come back from JSON as they were, with their types."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg.checkpoint.index as index
from stagereg import Checkpointer
from stagereg.checkpoint.encoding import Leaf, decode, encode, fill, leaves, marks
from stagereg.errors import CheckpointError

flat = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary()
keys = st.recursive(flat, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2), max_leaves=4)
plain = st.recursive(
    flat | st.sets(st.integers()),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3).map(collections.OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(collections.Counter)
    ),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """A value with the types of all its parts, in which equal floats have equal bits."""
    if isinstance(value, dict):
        return type(value), [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [typed(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, map(typed, value)))
    return type(value), repr(value)


@settings(max_examples=300, deadline=None)
@given(plain)
def test_plain_data_comes_back_with_its_types(value: Any) -> None:
    encoded = encode(value, "x")
    assert encoded.objects == []
    assert typed(decode(json.loads(encoded.text), "x")) == typed(value)


def test_numbers_of_numpy_become_pythons() -> None:
    numpy = pytest.importorskip("numpy")
    numbers = [numpy.dtype(name).type(3) for name in "?bBhHiIlLefd"]
    found = decode(json.loads(encode({"best": numbers, "pair": (numpy.float32(0.1), 1)}, "x").text), "x")
    assert found == {"best": numbers, "pair": (float(numpy.float32(0.1)), 1)}
    assert [*map(type, found["best"])] == [bool] + [int] * 8 + [float] * 3
    for other in (numpy.longdouble(3), numpy.timedelta64(1, "ns"), numpy.ones(2)):
        with pytest.raises(CheckpointError, match="would not load back"):
            encode({"x": other}, "x")


def test_tensors_are_leaves_and_objects_are_listed() -> None:
    x = torch.ones(2)
    state = {"a": x, "b": [x, {"c": 1}], 3: {"pair": (x, 1)}}
    encoded = encode(state, "s")
    assert encoded.objects == ["s.3.pair"]
    structure = decode(json.loads(encoded.text), "s")
    assert [leaf.name for leaf in marks(structure)] == ["s.a", "s.b.0", "s.3.pair"]
    assert [name for name, _ in leaves(state, "s")] == [name for name, _ in leaves(structure, "s")]
    for leaf in marks(structure):
        leaf.value = leaf.name
    assert fill(structure) == {"a": "s.a", "b": ["s.b.0", {"c": 1}], 3: {"pair": "s.3.pair"}}
    assert isinstance(decode({}, "s"), Leaf)


def test_versions_of_modules_are_kept() -> None:
    ordered = collections.OrderedDict({"y": {"z": [1, {}]}})
    ordered._metadata = collections.OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    found = decode(json.loads(encode({"o": ordered}, "x").text), "x")
    assert found["o"]._metadata == ordered._metadata
    with pytest.raises(CheckpointError, match=r"a collections.defaultdict; save dict\(x\) of it"):
        encode(collections.defaultdict(list), "x")


def test_a_state_that_is_nested_too_deeply_is_refused_and_named(tmp_path: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(190):
        deep = {"x": deep}
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"deep": deep})
        state: dict[str, Any] = {"deep": None}
        assert checkpointer.restore(state) == 1
        assert state["deep"] == deep
    for _ in range(20):
        deep = {"x": deep}
    with pytest.raises(CheckpointError, match="nested more than 200 deep"):
        encode(deep, "deep")


def test_more_plain_values_than_are_read_back_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "INDEX_BYTES", 100_000)
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"small": 1, "tensor": torch.ones(100_000)})
        checkpointer.save(2, {"small": 1, "large": "x" * 100_000})
        with pytest.raises(CheckpointError, match=r"100,000 are read back.* is 'large', with 100,002 bytes"):
            checkpointer.wait()
        assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]
