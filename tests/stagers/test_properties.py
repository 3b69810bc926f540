"""For any state dict and any changes between calls, the copy is what the source was."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagereg import AsyncStager
from stagereg.base.many_tensors import span_of

from ..support.examples import examples
from ..support.states import Piece, assert_whole, kept, pieces
from .conftest import MAKERS

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
DTYPES += [torch.float8_e4m3fn, torch.float16]


@st.composite
def tensors(draw: st.DrawFn, pool: list[torch.Tensor]) -> torch.Tensor:
    """A fresh tensor, or any view of one that is there already; views of other dtypes among them."""
    if not pool or draw(st.booleans()):
        shape = draw(st.lists(st.integers(0, 70), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        high = 2 if dtype is torch.bool else 120
        pool.append(torch.randint(0, high, (size,), dtype=torch.uint8).view(dtype).view(shape))
        return pool[-1]
    x = draw(st.sampled_from(pool))
    for _ in range(draw(st.integers(0, 3))):
        if x.dim() and draw(st.booleans()):
            dim = draw(st.integers(0, x.dim() - 1))
            begin = draw(st.integers(0, x.shape[dim]))
            x = x[
                (slice(None),) * dim + (slice(begin, draw(st.integers(begin, x.shape[dim])), draw(st.integers(1, 40))),)
            ]
        elif x.dim() > 1:
            x = x.transpose(0, draw(st.integers(1, x.dim() - 1)))
        elif x.dtype.is_complex:
            x = draw(st.sampled_from([x.conj(), torch.view_as_real(x.resolve_conj())]))
        elif x.element_size() == 4 and x.dim() and x.stride(-1) == 1:
            x = x.view(torch.uint8)
        else:
            x = x.expand(draw(st.integers(1, 3)), *x.shape)
    return x


@st.composite
def states(draw: st.DrawFn) -> dict[Any, Any]:
    pool: list[torch.Tensor] = []
    values = st.recursive(
        st.one_of(tensors(pool), st.integers(), st.text(max_size=3), st.none(), st.floats(allow_nan=False)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.one_of(st.text(max_size=2), st.integers(0, 5)), inner, max_size=4),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        ),
        max_leaves=15,
    )
    return draw(st.dictionaries(st.text(max_size=3), values, min_size=1, max_size=6))


def leaves(x: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in pieces(x) if isinstance(leaf, torch.Tensor)]


def overwrite(state: Any, mask: int) -> None:
    for x in leaves(state):
        if x.untyped_storage().nbytes():
            torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).bitwise_xor_(mask)


STAGERS = ("blocking", "overlapped", "overlapped_late", "pinned_cached")
TORCHS = ("torch_plain", "torch_cached")
LIMITS = settings(
    max_examples=examples(60),
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)


def made(kind: str) -> AsyncStager:
    return MAKERS[kind]() if kind in TORCHS else MAKERS[kind](max_in_flight=3)


QUICK = [(kind, 25) for kind in ("blocking", "overlapped")]
MANY = [pytest.param(kind, 60, marks=pytest.mark.slow) for kind in STAGERS + TORCHS]


@pytest.mark.parametrize(("kind", "examples"), QUICK + MANY)
def test_any_state_dict_staged_again_and_again(kind: str, examples: int) -> None:
    tried = given(data=st.data())(lambda data: stage_again_and_again(kind, data))
    settings(LIMITS, max_examples=examples)(tried)()


def stage_again_and_again(kind: str, data: st.DataObject) -> None:
    stager = made(kind)
    state = data.draw(states())
    held: list[tuple[Any, list[Piece]]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        held.append((stager.stage(state), kept(state)))
        overwrite(state, 1)  # a bool stays a bool
        what = data.draw(st.sampled_from(["write only", "drop a copy", "other values", "other state", "new tensors"]))
        if what == "drop a copy":
            held.pop(data.draw(st.integers(0, len(held) - 1)))
        elif what == "other values":
            state["new"] = data.draw(tensors(leaves(state)))
        elif what == "other state":
            state = data.draw(states())
        elif what == "new tensors":
            state = copy.deepcopy(state)
        for staged, before in held:
            assert_whole(staged, before)
    stager.close()
    overwrite(state, 1)
    for staged, before in held:
        assert_whole(staged, before)


@pytest.mark.parametrize("kind", [*STAGERS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in TORCHS)])
@LIMITS
@given(data=st.data())
def test_memory_is_shared_exactly_where_the_source_shares_it(kind: str, data: st.DataObject) -> None:
    pool: list[torch.Tensor] = []
    state = [data.draw(tensors(pool)) for _ in range(data.draw(st.integers(2, 6)))]
    stager = made(kind)
    copies = stager.stage({"all": state})["all"]
    stager.close()
    for x, mine in zip(state, copies, strict=True):
        for y, other in zip(state, copies, strict=True):
            lazy = x.is_conj() or y.is_conj()  # these get memory of their own
            if (
                not lazy
                and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
                and is_dense(x)
                and is_dense(y)
            ):
                apart = x.data_ptr() - y.data_ptr()
                if -span(x) < apart < span(y):
                    assert mine.data_ptr() - other.data_ptr() == apart
    staged_bytes = {m.untyped_storage().data_ptr(): m.untyped_storage().nbytes() for m in copies}
    assert sum(staged_bytes.values()) <= sum(span(x) for x in state) + 16 * len(state)


def span(x: torch.Tensor) -> int:
    return span_of(x) * x.element_size()


def is_dense(x: torch.Tensor) -> bool:
    return bool(x.numel()) and span(x) <= x.numel() * x.element_size()
