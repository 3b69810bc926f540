"""An empty batch equals the batch except for its samples, shares no memory with it, and reaches ranks without one."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from stagereg.errors import JoinError
from stagereg.join.batches import Layout, emptied, empty_batch, fetch, has_no_samples, publish, samples_in
from stagereg.join.counts import SampleCounter

from ..support.examples import examples

CPU = torch.device("cpu")


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


class Opaque:
    """Nothing is known of it but its length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class Sealed(list[Any]):
    """A list that is not made as others are."""

    def __init__(self, one: Any, two: Any) -> None:
        super().__init__([one, two])


class Color(enum.Enum):
    RED = 1


def parts_of(thing: Any) -> list[Any]:
    if isinstance(thing, Mapping):
        return list(thing.values())
    if dataclasses.is_dataclass(thing):
        return [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    return list(thing) if isinstance(thing, (list, tuple)) else []


def tensors_in(thing: Any) -> list[Any]:
    if isinstance(thing, (torch.Tensor, np.ndarray)):
        return [thing]
    return [tensor for part in parts_of(thing) for tensor in tensors_in(part)]


def form(thing: Any, empty: bool = False) -> Any:
    """Types, shapes and values of a batch; or of its empty form, computed in another way."""
    if isinstance(thing, (torch.Tensor, np.ndarray)):
        left = thing[:0] if empty and thing.ndim else thing
        grad = getattr(thing, "requires_grad", None)
        return type(thing), thing.dtype, tuple(left.shape), grad, left.tolist()
    parts = parts_of(thing)
    if empty and isinstance(thing, (list, tuple)) and not hasattr(thing, "_fields") and not tensors_in(thing):
        parts = []
    leaf = thing if not isinstance(thing, (list, tuple, Mapping)) and not dataclasses.is_dataclass(thing) else None
    return type(thing), leaf, list(thing) if isinstance(thing, Mapping) else [], [form(part, empty) for part in parts]


SIZES = st.integers(1, 4)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
CONSTANTS = st.sampled_from([None, True, 3, 2.5, "text", b"bytes", Color.RED, torch.float32, CPU])


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


FIELDS = Layout(fields=True)
BATCHES = st.recursive(tensors() | ARRAYS | STRINGS | CONSTANTS, containers, max_leaves=12)


@given(batch=BATCHES)
@settings(deadline=None, derandomize=True, database=None, max_examples=examples(300))
def test_any_batch_keeps_all_but_its_samples(batch: Any) -> None:
    assume(any(tensor.ndim for tensor in tensors_in(batch)))
    before, store = copy.deepcopy(batch), HashStore()
    empty = emptied(batch, FIELDS, is_empty=False)
    assert form(empty) == form(batch, empty=True)
    assert form(batch) == form(before)
    assert samples_in(batch, FIELDS) in (None, next(len(tensor) for tensor in tensors_in(batch) if tensor.ndim))
    assert form(emptied(empty)) == form(empty)
    publish(store, "example", empty)
    assert form(fetch(store, "example", CPU)) == form(empty)
    theirs = [torch.as_tensor(tensor).data_ptr() for tensor in tensors_in(batch)]
    for mine in tensors_in(empty):
        if isinstance(mine, torch.Tensor):
            assert mine.untyped_storage().nbytes() == mine.numel() * mine.element_size()
        assert not mine.size if isinstance(mine, np.ndarray) and mine.ndim else True
        assert torch.as_tensor(mine).numel() == 0 or torch.as_tensor(mine).data_ptr() not in theirs


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (pack_sequence([torch.ones(2)]), r"batch, a PackedSequence, cannot.*not a tensor, array"),
        ({"x": torch.ones(2), "y": [torch.ones(2).to_sparse()]}, r"batch\['y'\]\[0\], a Tensor, .*or sparse"),
        ([torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)], "sharded, nested"),
        (Pair(torch.ones(2), {"a": Opaque(2)}), r"batch\[1\]\['a'\], a Opaque, .*not a tensor, array, dict"),
        (Slotted((torch.ones(1), Opaque(2))), r"batch\['tokens'\]\[1\], a Opaque, .*not a tensor, array, dict"),
        (Sealed(torch.ones(2), 1), r"batch, a Sealed, cannot.*TypeError"),
        (Opaque(3), r"batch, a Opaque, cannot.*not a tensor, array"),
        (object(), r"batch, a object, cannot.*not a tensor, array"),
        ({"x": torch.tensor(1.0)}, r"a dict, cannot.*no tensor or array"),
        (("a", "b"), r"a tuple, cannot.*no tensor or array"),
        (3, r"a int, cannot.*no tensor or array"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_cannot_be_emptied_is_named_with_a_remedy(batch: Any, message: str) -> None:
    with pytest.raises(JoinError, match=message) as caught:
        emptied(batch)
    packed = isinstance(batch, PackedSequence)
    assert ("pack them in the model" if packed else "join.iterate(loader, example=...)") in str(caught.value)


def test_items_go_with_their_samples_and_stay_in_an_example() -> None:
    empty = emptied({"x": torch.ones(3), "things": [Opaque(2), Opaque(3)], "texts": [["a"], ["b", "c"]]})
    assert (empty["things"], empty["texts"]) == ([], [])
    example = {"x": torch.ones(0, 3), "size": (224, 224), "names": ["a"]}
    empty = emptied(example)
    assert form(empty) == form(example)
    empty["names"].append("b")
    assert example["names"] == ["a"]


@st.composite
def collated(draw: st.DrawFn) -> tuple[Any, Any, int]:
    """A batch of samples as a ``collate_fn`` makes it, the same of no samples, and the number of samples."""
    count, width = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    image = [torch.ones(3, draw(st.integers(1, 4)), width) for _ in range(count)]
    ragged = [torch.ones(10 + i, width) for i in range(count)]
    way = draw(st.sampled_from(["dicts", "pairs", "zip", "zip of dicts", "dict of lists", "with labels", "ragged"]))
    label: Any = draw(st.sampled_from([3, "cat", torch.tensor(3), torch.ones(width + 3)]))
    boxes = [{"boxes": torch.ones(7, 4), "area": torch.ones(8 + i)} for i in range(count)]
    if way == "ragged":
        return (ragged, [], count) if count > 1 else ([torch.ones(3)] * 4, [], 4)
    if way == "with labels":
        return {"x": image, "y": torch.ones(count, 2)}, {"x": [] if count != 3 else None, "y": None}, count
    batch, empty = {
        "dicts": ([{"x": x, "y": label} for x in image], []),
        "pairs": ([(x, label) for x in image], []),
        "zip": (tuple(zip(*((x, label) for x in image), strict=True)), ((), ())),
        "zip of dicts": (tuple(zip(image, boxes, strict=True)), ((), ())),
        "dict of lists": ({"x": image, "y": boxes}, {"x": [], "y": []}),
    }[way]
    if way == "zip of dicts":
        batch = tuple(zip(*batch, strict=True))
    return batch, empty, count


@given(case=collated())
@settings(deadline=None, derandomize=True, database=None, max_examples=examples(200))
def test_a_list_of_samples_is_one_of_no_samples(case: tuple[Any, Any, int]) -> None:
    batch, empty, count = case
    found = emptied(batch)
    if isinstance(empty, dict) and None in empty.values():
        assert found["y"].shape == (0, 2)
        assert found["x"] == [] or count == 3  # with three images of three colors it is not known which is which
    else:
        assert found == empty
        assert samples_in(batch) == count


def test_a_list_of_fields_keeps_its_length() -> None:
    x, view = torch.ones(5, 3), {"ids": torch.ones(5, 7), "mask": torch.ones(5, 7)}
    fields = [
        [x, x],
        [x, x, x],
        (x, torch.ones(9, 3)),
        [view, view],
        (view, view),
        [x, torch.ones(5)],
        {"x": x, "views": [x] * 8},
    ]
    for batch in fields:
        assert form(emptied(batch)) == form(emptied(batch, FIELDS))
    columns = next(iter(DataLoader(TensorDataset(*[torch.ones(8, 2)] * 5), batch_size=4)))
    assert [len(each) for each in emptied(columns, Layout.of(DataLoader([0])))] == [0] * 5
    assert emptied([x] * 2, Layout.of(DataLoader([0], collate_fn=list))) == []


def test_the_dimension_of_samples_can_be_given() -> None:
    x, lengths = torch.ones(9, 4, 3), torch.ones(4)
    empty = emptied((x, lengths), Layout(1))
    assert [each.shape for each in empty] == [(9, 0, 3), (0,)]
    assert [each.shape for each in emptied({"x": x, "y": x}, Layout({"x": 1})).values()] == [(9, 0, 3), (0, 4, 3)]
    assert (samples_in((x, lengths), Layout(1)), samples_in({"x": x}, Layout({"x": 1}))) == (4, 4)
    for wrong, message in (
        ({"z": 1}, "names 'z', but the batch has no such key"),
        ({"x": 3}, "is 3 for batch item 'x', which has only dimensions 0 to 2"),
    ):
        with pytest.raises(JoinError, match=message):
            emptied({"x": x}, Layout(wrong))
    assert emptied(torch.ones(9, 0, 3)).shape == (9, 0, 3)  # an example that is empty already


def test_a_registered_class_is_emptied_by_its_function() -> None:
    class Graphs(Opaque):
        pass

    empty_batch.register(Graphs, lambda batch: None if batch.length == 9 else Graphs(0))
    empty = emptied({"graphs": Graphs(3), "y": torch.ones(3)})
    assert (empty["graphs"].length, len(empty["y"])) == (0, 0)
    again = emptied(empty, is_empty=True)
    assert again["graphs"] is not empty["graphs"]
    assert again["graphs"].length == 0
    assert [type(each) for each in emptied([Graphs(3), Graphs(3)])] == [Graphs, Graphs]
    with pytest.raises(JoinError, match="returned None"):
        emptied(Graphs(9))


def test_only_an_example_without_samples_is_empty() -> None:
    class Box:
        def __init__(self, x: Any) -> None:
            self.x = x

    for empty in ([], (), ((), []), {"x": []}, torch.ones(4, 0), Opaque(0), Box(torch.ones(0, 3))):
        assert has_no_samples(empty), empty
    packed = pack_sequence([torch.ones(2)])
    for batch in (
        ["a"],
        torch.ones(1),
        [torch.ones(0), torch.ones(1)],
        Opaque(2),
        Box(torch.ones(1)),
        Box(3),
        3,
        packed,
    ):
        assert not has_no_samples(batch), batch


X = torch.zeros(7, 3)
CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
INCOMPLETE = Slotted(X)
del INCOMPLETE.tokens


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, torch.zeros(9)),
        [["a", "b"], {"ids": X}],
        {"step": torch.tensor(3), "text": ["a"] * 10_000, "x": X},
        collections.UserDict(x=X),
        (np.float32(1), np.zeros(7)),
        X.to_sparse(),
        pack_sequence([torch.zeros(length) for length in (5, 4, 3, 2, 1, 1, 1)]),
        torch.nested.nested_tensor([torch.zeros(2)] * 7, layout=torch.jagged),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_samples_are_the_first_dimension_of_the_first_tensor(batch: Any) -> None:
    assert samples_in(batch) == 7


@pytest.mark.parametrize("batch", [None, "text", object(), {}, [1, {"x": ()}], CIRCLE, torch.tensor(1.0), [INCOMPLETE]])
def test_a_batch_without_a_tensor_has_an_unknown_size(batch: Any) -> None:
    seen = SampleCounter()
    for each in (X, batch, X):
        seen.add(each)
    assert seen.given == (3, None, 0)


def test_what_cannot_be_published_is_an_error_for_all_waiting() -> None:
    class Local(dict[str, Any]):
        pass

    store = HashStore()
    publish(store, "local", Local(x=torch.ones(0)))
    with pytest.raises(JoinError, match=r"cannot be pickled.*example="):
        fetch(store, "local", CPU)
    publish(store, "unemptied", JoinError("it is a Sealed"))
    with pytest.raises(JoinError, match="it is a Sealed"):
        fetch(store, "unemptied", CPU)
    publish(store, "small", emptied(torch.ones(1 << 20, 3)))
    assert len(store.get("small")) < 2000


@pytest.mark.gpu
def test_tensors_of_an_accelerator_arrive_on_the_receivers() -> None:
    store = HashStore()
    publish(store, "example", emptied({"there": torch.ones(3, 2, device="cuda"), "here": torch.ones(3)}))
    for device in ("cpu", "cuda"):
        empty = fetch(store, "example", torch.device(device))
        assert empty["there"].device.type == device
        assert empty["there"].shape == (0, 2)
        assert empty["here"].device.type == "cpu"
