"""Fidelity: the copy equals the source in everything except its memory."""

from __future__ import annotations

import dataclasses
import enum
import io
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch

from stagereg import AsyncStager

from .states import assert_same

Pair = namedtuple("Pair", "left right")
NAMES = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64"
DTYPES = [getattr(torch, name) for name in f"{NAMES} complex32 complex64 complex128".split()]
DTYPES += [getattr(torch, name) for name in sorted(dir(torch)) if name.startswith(("float8_", "float4_"))]


class Mark(torch.Tensor):
    """A plain subclass."""


class OwnDict(dict):
    """A dict that is more than a dict."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class OwnTuple(tuple):
    """A tuple whose constructor takes something else than its items."""

    def __new__(cls, left: object, right: object) -> OwnTuple:
        return super().__new__(cls, (left, right))


class Freshly(dict):
    """A dict that makes its values when asked for them."""

    def items(self):
        for i in range(50):
            yield i, np.full(3, i)


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: list[int]
    w: torch.Tensor


def quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x, 0.5, 1, torch.qint8)


def padded(x: torch.Tensor) -> torch.Tensor:
    return x.to_padded_tensor(0)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_keeps_its_bits(stager: AsyncStager) -> None:
    for dtype in DTYPES:
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
        x = raw.view(dtype)
        state = {"flat": x, "folded": x.clone().view(2, 3), "turned": x.clone().view(2, 3).t(), "one": x[2].clone()}
        for _ in range(2):
            assert_same(stager.stage(state), state)


def odd_tensors() -> dict[str, torch.Tensor]:
    x = torch.arange(24.0)
    c = torch.randn(5, dtype=torch.complex64)
    return {
        "scalar": torch.tensor(3),
        "empty": torch.empty(0),
        "no rows": torch.empty(0, 5, dtype=torch.int16),
        "no columns": torch.empty(5, 0, 2),
        "size-one strides": torch.empty_strided((1, 3), (77, 1)).fill_(1),
        "transposed": x.clone().view(4, 6).t(),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "every second": torch.arange(24.0)[1::2],
        "expanded": torch.arange(3.0).view(3, 1).expand(3, 1000),
        "expanded scalar": torch.tensor(2.0).expand(10, 10),
        "windows": torch.arange(8.0).as_strided((5, 4), (1, 1)),
        "conj": c.conj(),
        "conj of a slice": torch.randn(9, dtype=torch.complex128)[2:7:2].conj(),
        "neg": c.conj().imag,
        "real of complex": torch.randn(5, dtype=torch.complex64).real,
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }


def test_odd_shapes_strides_and_views(stager: AsyncStager) -> None:
    state = odd_tensors()
    for _ in range(2):
        assert_same(stager.stage(state), state)
    for name, x in state.items():
        assert_same(stager.stage({name: x}), {name: x})


class TestSharing:
    def test_overlapping_views_show_each_others_writes(self, stager: AsyncStager) -> None:
        x = torch.arange(100.0)
        grid = x.view(10, 10)
        copy = stager.stage(
            {"head": x[:60], "tail": x[40:], "t": grid.t(), "row": grid[5], "bits": x.view(torch.int32)}
        )
        copy["head"].fill_(-1)
        assert copy["tail"][:20].eq(-1).all()
        assert copy["t"][:, :6].eq(-1).all()
        assert copy["row"].eq(-1).all()
        assert copy["bits"].view(torch.float32)[:60].eq(-1).all()
        assert copy["tail"][20:].tolist() == list(range(60, 100))

    def test_conjugate_and_plain_stay_one_memory(self, stager: AsyncStager) -> None:
        x = torch.randn(4, dtype=torch.complex64)
        copy = stager.stage({"x": x, "conj": x.conj()})
        copy["x"].fill_(1 + 2j)
        assert copy["conj"].tolist() == [1 - 2j] * 4


class TestTensorsThatAreMore:
    def test_parameters_and_grad(self, stager: AsyncStager) -> None:
        state = {
            "p": torch.nn.Parameter(torch.randn(3)),
            "frozen": torch.nn.Parameter(torch.randn(3), requires_grad=False),
            "buffer": torch.nn.Buffer(torch.randn(2)),
            "leaf": torch.randn(3, requires_grad=True),
            "mark": torch.randn(3).as_subclass(Mark),
        }
        copy = stager.stage(state)
        assert_same(copy, state)
        assert copy["p"].is_leaf
        assert not stager.stage({"x": state["p"] * 2})["x"].requires_grad

    def test_attributes(self, stager: AsyncStager) -> None:
        p = torch.nn.Parameter(torch.randn(3))
        q = torch.randn(2)
        p.tags, p.master, p.me = ["a"], q, p
        q.owner = p
        copy = stager.stage({"p": p, "q": q})
        p.tags.append("b")
        assert copy["p"].tags == ["a"]
        assert copy["p"].me is copy["p"]
        assert copy["p"].master is copy["q"]
        assert copy["q"].owner is copy["p"]

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize(
        ("make", "dense", "clear"),
        [
            (lambda x: x.to_sparse(), torch.Tensor.to_dense, lambda x: x._values().zero_()),
            (lambda x: x.to_sparse_csr(), torch.Tensor.to_dense, lambda x: x.values().zero_()),
            (lambda x: x.to_sparse_bsr((2, 2)), torch.Tensor.to_dense, lambda x: x.values().zero_()),
            (quantized, torch.dequantize, lambda x: x.copy_(quantized(torch.zeros(4, 4)))),
            (lambda x: x.to_mkldnn(), torch.Tensor.to_dense, lambda x: x.zero_()),
            (lambda x: torch.nested.nested_tensor([x, x[:2]]), padded, lambda x: x.zero_()),
            (lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged), padded, lambda x: x.zero_()),
        ],
        ids=["coo", "csr", "bsr", "quantized", "mkldnn", "nested", "jagged"],
    )
    def test_other_layouts(self, stager: AsyncStager, make, dense, clear) -> None:
        x = make(torch.eye(4))
        before = dense(x).clone()
        copy = stager.stage({"x": x})["x"]
        clear(x)
        assert type(copy) is type(x)
        assert (copy.layout, copy.dtype, copy.is_nested) == (x.layout, x.dtype, x.is_nested)
        assert torch.equal(dense(copy), before)
        assert not torch.equal(dense(stager.stage({"x": x})["x"]), before)


class TestStructure:
    def test_containers_of_every_kind(self, stager: AsyncStager) -> None:
        own = OwnDict("mine")
        own["w"] = torch.ones(2)
        ordered = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict()
        assert ordered._metadata
        state = {
            "z first": [torch.ones(2), (torch.ones(1), [torch.ones(1), "x"], ())],
            "pair": Pair(torch.ones(2), {"k": Pair(1, torch.ones(1))}),
            "own tuple": OwnTuple(torch.ones(1), 5),
            "max": torch.ones(3, 3).max(0),
            "module": ordered,
            "default": defaultdict(list, {"a": [torch.ones(1)]}),
            "own": own,
            "counter": Counter("abca"),
            3: {(1, "k"): torch.ones(1), None: None},
            "nothing": {},
        }
        for _ in range(2):
            copy = stager.stage(state)
            assert_same(copy, state)
        assert copy["default"]["new"] == []
        assert copy["own"].name == "mine"
        assert isinstance(copy["module"], OrderedDict)
        copy["module"]._metadata["x"] = 1
        assert "x" not in ordered._metadata

    def test_leaves_of_every_kind(self, stager: AsyncStager) -> None:
        buffer, array, point = io.BytesIO(b"abc"), np.arange(4), Point([1], torch.ones(2))
        plain = [1, "x", b"y", None, 1j, torch.float16, torch.Size([1, 2]), Point, len, torch.device("cpu"), Colour.RED]
        made = [array, buffer, point, torch.Generator().manual_seed(5)]
        copy = stager.stage({"plain": plain, "made": made})
        array[0], point.x[0] = 9, 9
        point.w.zero_()
        buffer.truncate(0)
        assert copy["plain"] == plain
        staged_array, staged_buffer, staged_point, generator = copy["made"]
        assert staged_array.tolist() == [0, 1, 2, 3]
        assert staged_buffer.getvalue() == b"abc"
        assert staged_point.x == [1]
        assert staged_point.w.eq(1).all()
        assert generator.initial_seed() == 5

    def test_an_object_that_is_there_twice_is_one_object_in_the_copy(self, stager: AsyncStager) -> None:
        shared, w, array = [torch.ones(2)], torch.ones(3), np.ones(2)
        pair = (w, shared)
        copy = stager.stage({"a": shared, "b": shared, "c": [w, w], "d": pair, "e": {"f": pair}, "g": [array, array]})
        assert copy["a"] is copy["b"]
        assert copy["c"][0] is copy["c"][1]
        assert copy["d"] is copy["e"]["f"]
        assert copy["d"][0] is copy["c"][0]
        assert copy["g"][0] is copy["g"][1]

    def test_cycles(self, stager: AsyncStager) -> None:
        state: dict = {"w": torch.ones(2), "list": [], "tuple": ([], torch.ones(1))}
        state["self"] = state
        state["list"].append(state["list"])
        state["tuple"][0].append(state["tuple"])
        copy = stager.stage(state)
        assert copy["self"] is copy
        assert copy["list"][0] is copy["list"]
        assert copy["tuple"][0][0] is copy["tuple"]
        assert copy["tuple"][1].eq(1).all()

    def test_values_that_a_dict_makes_when_asked_are_not_mixed_up(self, stager: AsyncStager) -> None:
        copy = stager.stage(Freshly.fromkeys(range(50)))
        assert [dict.__getitem__(copy, i).tolist() for i in range(50)] == [[i] * 3 for i in range(50)]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_callers_modes_make_no_difference(stager: AsyncStager, device: str) -> None:
    state = {**odd_tensors(), "tied": (x := torch.ones(3, 3)), "with": x.t()}
    with torch.device(device):
        assert_same(stager.stage(state), state)
    with torch.inference_mode():
        assert_same(stager.stage(state), state)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(stager.stage(state), state)
    finally:
        torch.use_deterministic_algorithms(False)
