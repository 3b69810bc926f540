"""Fidelity: the copy equals the source in everything except its memory; what the contract of stagers does not try."""

from __future__ import annotations

import enum
import io
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch

from stagereg import AsyncStager

from ..support.states import assert_same

Pair = namedtuple("Pair", "left right")
NAMES = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64"
DTYPES = [getattr(torch, name) for name in f"{NAMES} complex32 complex64 complex128".split()]
DTYPES += [getattr(torch, name) for name in sorted(dir(torch)) if name.startswith(("float8_", "float4_"))]


def has_copies(dtype: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=dtype).clone()
    except NotImplementedError:  # float4 in torch 2.9
        return False
    return True


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


def quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x, 0.5, 1, torch.qint8)


def padded(x: torch.Tensor) -> torch.Tensor:
    return x.to_padded_tensor(0)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_keeps_its_bits(stager: AsyncStager) -> None:
    for dtype in filter(has_copies, DTYPES):
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
        x = raw.view(dtype)
        state = {"flat": x, "folded": x.clone().view(2, 3), "turned": x.clone().view(2, 3).t(), "one": x[2].clone()}
        for _ in range(2):
            assert_same(stager.stage(state), state)


def odd_tensors() -> dict[str, torch.Tensor]:
    c = torch.randn(5, dtype=torch.complex64)
    return {
        "no columns": torch.empty(5, 0, 2),
        "size-one strides": torch.empty_strided((1, 3), (77, 1)).fill_(1),
        "every second": torch.arange(24.0)[1::2],
        "expanded": torch.arange(3.0).view(3, 1).expand(3, 1000),
        "expanded scalar": torch.tensor(2.0).expand(10, 10),
        "windows": torch.arange(8.0).as_strided((5, 4), (1, 1)),
        "conj": c.conj(),
        "conj of a slice": torch.randn(9, dtype=torch.complex128)[2:7:2].conj(),
        "neg": c.conj().imag,
        "real of complex": torch.randn(5, dtype=torch.complex64).real,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "buffer": torch.nn.Buffer(torch.randn(2)),
        "leaf": torch.randn(3, requires_grad=True),
        "subclass": torch.randn(3).as_subclass(Mark),
    }


def test_odd_shapes_strides_and_views(stager: AsyncStager) -> None:
    state = odd_tensors()
    for _ in range(2):
        assert_same(stager.stage(state), state)
    for name, x in state.items():
        assert_same(stager.stage({name: x}), {name: x})
    assert not stager.stage({"x": state["leaf"] * 2})["x"].requires_grad


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
def test_other_layouts(stager: AsyncStager, make, dense, clear) -> None:
    x = make(torch.eye(4))
    before = dense(x).clone()
    copy = stager.stage({"x": x})["x"]
    clear(x)
    assert type(copy) is type(x)
    assert (copy.layout, copy.dtype, copy.is_nested) == (x.layout, x.dtype, x.is_nested)
    assert torch.equal(dense(copy), before)
    assert not torch.equal(dense(stager.stage({"x": x})["x"]), before)


def test_containers_of_every_kind(stager: AsyncStager) -> None:
    own = OwnDict("mine")
    own["w"] = torch.ones(2)
    ordered = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict()
    assert ordered._metadata
    state = {
        "pair": Pair(torch.ones(2), {"k": Pair(1, torch.ones(1))}),
        "own tuple": OwnTuple(torch.ones(1), 5),
        "max": torch.ones(3, 3).max(0),
        "module": ordered,
        "default": defaultdict(list, {"a": [torch.ones(1)]}),
        "own": own,
        "counter": Counter("abca"),
        3: {(1, "k"): torch.ones(1), None: None},
    }
    for _ in range(2):
        copy = stager.stage(state)
        assert_same(copy, state)
    assert copy["default"]["new"] == []
    assert copy["own"].name == "mine"
    assert isinstance(copy["module"], OrderedDict)
    copy["module"]._metadata["x"] = 1
    assert "x" not in ordered._metadata


def test_leaves_of_every_kind(stager: AsyncStager) -> None:
    buffer, array = io.BytesIO(b"abc"), np.arange(4)
    plain = [1, "x", b"y", None, 1j, torch.float16, torch.Size([1, 2]), Colour, len, torch.device("cpu"), Colour.RED]
    made = [array, buffer, torch.Generator().manual_seed(5)]
    copy = stager.stage({"plain": plain, "made": made})
    array[0] = 9
    buffer.truncate(0)
    assert copy["plain"] == plain
    staged_array, staged_buffer, generator = copy["made"]
    assert staged_array.tolist() == [0, 1, 2, 3]
    assert staged_buffer.getvalue() == b"abc"
    assert generator.initial_seed() == 5


def test_what_is_one_object_is_one_in_the_copy_cycles_too(stager: AsyncStager) -> None:
    w, p, array, shared = torch.ones(3), torch.nn.Parameter(torch.randn(3)), np.ones(2), [torch.ones(2)]
    p.tags, p.master, p.me = ["a"], w, p
    w.owner = p
    pair, cycle = (w, shared), ([], torch.ones(1))
    cycle[0].append(cycle)
    state: dict = {"a": shared, "b": [shared, w, array], "c": pair, "d": {"c": pair, "g": array}, "p": p, "e": cycle}
    state["self"] = state
    copy = stager.stage(state)
    p.tags.append("b")
    assert copy["self"] is copy
    assert copy["a"] is copy["b"][0] is copy["c"][1]
    assert copy["b"][1] is copy["c"][0] is copy["p"].master
    assert copy["b"][1].owner is copy["p"] is copy["p"].me
    assert copy["p"].tags == ["a"]
    assert copy["b"][2] is copy["d"]["g"]
    assert copy["d"]["c"] is copy["c"]
    assert copy["e"][0][0] is copy["e"]
    assert copy["e"][1].eq(1).all()


def test_values_that_a_dict_makes_when_asked_are_not_mixed_up(stager: AsyncStager) -> None:
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
