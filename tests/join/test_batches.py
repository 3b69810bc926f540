"""An empty batch equals the batch except for its samples, shares no memory with it, and reaches ranks without one."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from stagereg.errors import JoinError
from stagereg.join.batches import LIMIT, emptied, fetch, publish


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass(frozen=True)
class Record:
    tokens: Any
    name: Any = "record"

    def __post_init__(self) -> None:
        if len(self.tokens) == 0:
            raise ValueError("a record without tokens")


@dataclasses.dataclass
class Slotted:
    __slots__ = ("tokens",)
    tokens: Any


class Encoding(collections.UserDict[str, Any]):
    """A mapping with more arguments and more in it than its items."""

    def __init__(self, data: Any = None, kind: str = "fast") -> None:
        super().__init__(data)
        self.kind = kind


class Attributes(dict[str, Any]):
    """Items are attributes, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Table:
    """Knows how to slice itself, and has tensors out of sight."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Any:
        return Table(self.rows[key])


class Opaque:
    """Nothing is known of it but its length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class View(Mapping[str, Any]):
    """A mapping that is made of something else than a dict."""

    def __init__(self, one: Any, two: Any) -> None:
        self.items_by_name = {"one": one, "two": two}

    def __getitem__(self, key: str) -> Any:
        return self.items_by_name[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_by_name)

    def __len__(self) -> int:
        return 2


class Color(enum.Enum):
    RED = 1


def leaves(thing: Any) -> list[Any]:
    if isinstance(thing, Mapping):
        return [leaf for part in thing.values() for leaf in leaves(part)]
    if dataclasses.is_dataclass(thing):
        return [leaf for field in dataclasses.fields(thing) for leaf in leaves(getattr(thing, field.name))]
    if isinstance(thing, (list, tuple)):
        return [leaf for part in thing for leaf in leaves(part)]
    return [thing]


def same(one: Any, other: Any) -> bool:
    """Whether two batches have the same types, tensors and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.requires_grad == other.requires_grad and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def is_empty_form(empty: Any, batch: Any) -> bool:
    """Whether ``empty`` follows the rules for ``batch``, computed in another way."""
    if type(empty) is not type(batch):
        return False
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        shape = (0, *batch.shape[1:]) if batch.ndim else ()
        alike = getattr(empty, "requires_grad", None) == getattr(batch, "requires_grad", None)
        return tuple(empty.shape) == shape and empty.dtype == batch.dtype and alike
    if isinstance(batch, Mapping):
        return list(empty) == list(batch) and all(is_empty_form(empty[key], batch[key]) for key in batch)
    if dataclasses.is_dataclass(batch):
        return all(is_empty_form(getattr(empty, f.name), getattr(batch, f.name)) for f in dataclasses.fields(batch))
    if isinstance(batch, (list, tuple)):
        has_fields = hasattr(batch, "_fields") or any(isinstance(x, (torch.Tensor, np.ndarray)) for x in leaves(batch))
        return all(map(is_empty_form, empty, batch)) and len(empty) == len(batch) if has_fields else len(empty) == 0
    return empty == batch


SIZES = st.integers(1, 4)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
CONSTANTS = st.sampled_from([None, True, 3, 2.5, "text", b"bytes", Color.RED, torch.float32, torch.device("cpu")])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(SIZES, max_size=4))
    tensor = torch.ones(shape, dtype=draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()) and len(shape) > 1:
        tensor = tensor.transpose(0, 1)
    return tensor.requires_grad_(draw(st.booleans()) and tensor.is_floating_point())


ARRAYS = st.lists(SIZES, max_size=3).map(lambda shape: np.ones(shape, dtype=np.float32))
STRINGS = st.lists(st.text(max_size=3), max_size=4) | st.lists(st.text(max_size=3), max_size=4).map(tuple)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.dictionaries(st.text(max_size=3), inner, max_size=3)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        items,
        items.map(collections.OrderedDict),
        items.map(Encoding),
        items.map(lambda values: collections.defaultdict(list, values)),
        st.builds(Pair, inner, inner),
        st.builds(Slotted, inner),
        st.builds(Record, tensors().filter(lambda t: t.dim()), inner),
    )


BATCHES = st.recursive(tensors() | ARRAYS | STRINGS | CONSTANTS, containers, max_leaves=12)


def can_lose_samples(batch: Any) -> bool:
    return any(isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim for leaf in leaves(batch))


@given(batch=BATCHES)
@settings(deadline=None, derandomize=True, database=None, max_examples=300)
def test_any_batch_keeps_all_but_its_samples(batch: Any) -> None:
    assume(can_lose_samples(batch))
    before = copy.deepcopy(batch)
    empty = emptied(batch)
    assert is_empty_form(empty, batch)
    assert same(batch, before)
    assert same(emptied(empty), empty)


@given(batch=BATCHES)
@settings(deadline=None, derandomize=True, database=None)
def test_an_empty_batch_shares_no_memory_with_the_batch(batch: Any) -> None:
    assume(can_lose_samples(batch))
    storages = {leaf.untyped_storage()._cdata for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)}
    arrays = [leaf for leaf in leaves(batch) if isinstance(leaf, np.ndarray)]
    for leaf in leaves(emptied(batch)):
        if isinstance(leaf, torch.Tensor):
            assert leaf.untyped_storage()._cdata not in storages
            assert leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()
        elif isinstance(leaf, np.ndarray):
            assert leaf.base is None
            assert not any(np.shares_memory(leaf, array) for array in arrays)


@given(batch=BATCHES)
@settings(deadline=None, derandomize=True, database=None)
def test_an_empty_batch_comes_through_a_store_as_it_is(batch: Any) -> None:
    assume(can_lose_samples(batch))
    store = HashStore()
    assert fetch(store, "example") is None
    publish(store, "example", batch)
    assert same(fetch(store, "example"), emptied(batch))


@pytest.mark.parametrize(
    "sample",
    [
        1.0,
        torch.ones(2, 3),
        np.ones(3),
        (torch.ones(2), 1),
        {"x": torch.ones(2), "name": "a", "more": [1, (2.0, "b")]},
        Pair(torch.ones(2), "label"),
        [torch.ones(2), {"ids": 3, "tags": ("a", "b")}],
    ],
    ids=lambda sample: type(sample).__name__,
)
def test_a_batch_collated_by_torch_is_emptied_like_one_of_another_size(sample: Any) -> None:
    def shape(thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return (thing.dtype, tuple(thing.shape[1:]))
        if isinstance(thing, dict):
            return {key: shape(value) for key, value in thing.items()}
        if isinstance(thing, (list, tuple)) and any(isinstance(leaf, torch.Tensor) for leaf in leaves(thing)):
            return (type(thing), [shape(part) for part in thing])
        return type(thing)

    two, three = default_collate([sample] * 2), default_collate([sample] * 3)
    assert shape(two) == shape(three)
    for batch in (two, three):
        empty = emptied(batch)
        assert all(len(leaf) == 0 for leaf in leaves(empty) if isinstance(leaf, torch.Tensor))
        assert not any(isinstance(leaf, str) for leaf in leaves(empty))
        # A list of strings has lost them; where that is all a field has, it is another empty list.
        assert same(empty, emptied(two))


def test_channels_last_stays() -> None:
    images = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert emptied(images).stride() == images.stride()


def test_a_mapping_keeps_its_type_and_loses_what_is_derived_from_its_samples() -> None:
    batch = Attributes(x=torch.ones(3, 2), n=3)
    empty = emptied(batch)
    assert type(empty) is Attributes
    assert empty.x is empty["x"]
    assert empty.x.shape == (0, 2)
    lists = collections.defaultdict(list, x=torch.ones(2))
    assert emptied(lists)["not there"] == []
    assert "not there" not in lists


def test_a_class_with_its_own_slicing_is_sliced_by_it() -> None:
    empty = emptied([Table(torch.ones(3, 2)), torch.ones(3)])
    assert empty[0].rows.shape == (0, 2)


def test_samples_of_any_type_in_a_list_are_dropped() -> None:
    empty = emptied({"x": torch.ones(2), "things": [Opaque(2), Opaque(3)], "texts": [["a"], ["b", "c"]]})
    assert empty["things"] == []
    assert empty["texts"] == []


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (pack_sequence([torch.ones(2)]), r"a batch that is a PackedSequence cannot.*packed"),
        ({"x": torch.ones(2), "y": [torch.ones(2).to_sparse()]}, r"batch\['y'\]\[0\], a Tensor, .*sparse_coo"),
        (Pair(torch.ones(2), {"a": Opaque(2)}), r"batch\.label\['a'\], a Opaque, .*own type for \[:0\]"),
        ([torch.ones(1), View(torch.ones(2), 3)], r"batch\[1\], a View, .*made of a dict"),
        (Opaque(3), r"a batch that is a Opaque cannot.*own type for \[:0\]"),
        (object(), r"a batch that is a object cannot.*own type for \[:0\]"),
        ({"x": torch.tensor(1.0)}, r"a dict cannot.*no tensor or array"),
        (["a", "b"], r"a list cannot.*no tensor or array"),
        ({"texts": ["a"], "notes": []}, r"a dict cannot.*no tensor or array"),
        ([], None),
        (3, r"a int cannot.*no tensor or array"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_cannot_be_emptied_is_named_with_its_path_and_a_remedy(batch: Any, message: str | None) -> None:
    if message is None:
        assert emptied(batch) == batch
        return
    with pytest.raises(JoinError, match=message) as caught:
        emptied(batch)
    assert "join.iterate(loader, example=...)" in str(caught.value)
    assert "already empty one" in str(caught.value)


def test_nested_tensors_are_refused() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(JoinError, match="it is nested"):
        emptied([torch.ones(2), jagged])


@pytest.mark.parametrize(
    "example",
    [
        ([], []),
        {"x": torch.ones(0, 3), "size": (224, 224), "texts": []},
        Opaque(0),
        {"x": torch.ones(0, 2), "graph": Opaque(0)},
    ],
    ids=["empty lists", "a constant in a tuple", "opaque", "opaque part"],
)
def test_an_already_empty_example_is_used_as_it_is(example: Any) -> None:
    empty = emptied(example)
    assert type(empty) is type(example)
    if isinstance(example, dict):
        assert list(empty) == list(example)
        assert all(same(empty[key], example[key]) for key in example)
        empty["more"] = 1
        assert "more" not in example


def test_the_rank_that_cannot_publish_reports_it_to_those_that_wait() -> None:
    store = HashStore()
    with pytest.raises(JoinError, match="Opaque"):
        publish(store, "example", Opaque(2))
    store.wait(["example"], timedelta(seconds=1))
    with pytest.raises(JoinError, match="Opaque"):
        fetch(store, "example")


def test_an_example_that_cannot_be_pickled_or_is_too_large_is_an_error() -> None:
    class Local(dict[str, Any]):
        pass

    store = HashStore()
    with pytest.raises(JoinError, match=r"cannot be pickled.*example="):
        publish(store, "local", Local(x=torch.ones(2)))
    with pytest.raises(JoinError, match=rf"bytes, more than {LIMIT}.*example="):
        publish(store, "large", [torch.ones(2), "x" * LIMIT])
    with pytest.raises(JoinError, match="more than"):
        fetch(store, "large")
    publish(store, "small", torch.ones(1 << 20, 3))
    assert len(store.get("small")) < 1000


@pytest.mark.gpu
def test_tensors_of_an_accelerator_arrive_on_the_device_of_the_receiver() -> None:
    store = HashStore()
    publish(store, "example", {"there": torch.ones(3, 2, device="cuda"), "here": torch.ones(3)})
    for device, expected in ((None, "cpu"), (torch.device("cuda"), "cuda")):
        empty = fetch(store, "example", device)
        assert empty["there"].device.type == expected
        assert empty["there"].shape == (0, 2)
        assert empty["here"].device.type == "cpu"
