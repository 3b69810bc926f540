"""A state dict taken apart and put together: tensors listed once, everything else already copied."""

from __future__ import annotations

import gc

import pytest
import torch

from stagereg.errors import StagingError
from stagereg.kernel.state_dict import flatten, path_to


def test_each_tensor_object_is_listed_once_in_order() -> None:
    a, b = torch.ones(1), torch.ones(2)
    spec = flatten({"x": [a, (b, a)], "y": {"z": b}})
    assert [x is y for x, y in zip(spec.tensors, [a, b], strict=True)] == [True, True]


def test_the_copy_has_its_tensors_where_the_source_had_them() -> None:
    a, b = torch.ones(1), torch.ones(2)
    staged = [torch.zeros(1), torch.zeros(2)]
    copy = flatten({"x": [a, (b, 7, a)], "b": b}).unflatten(staged)
    assert copy["x"][0] is staged[0]
    assert copy["x"][1][0] is staged[1]
    assert copy["x"][1][2] is staged[0]
    assert copy["b"] is staged[1]
    assert list(copy) == ["x", "b"]


def test_a_bare_tensor_is_a_state_too() -> None:
    staged = torch.zeros(1)
    assert flatten(torch.ones(1)).unflatten([staged]) is staged


def test_nothing_of_the_source_outlives_the_tree_spec() -> None:
    source = {"w": torch.ones(3), "l": [torch.ones(2)]}
    copy = flatten(source).unflatten([torch.zeros(3), torch.zeros(2)])
    gc.collect()
    assert not [x for x in gc.get_referrers(source["w"]) if isinstance(x, (dict, list)) and x is not source]
    assert copy["l"][0].eq(0).all()


def test_a_tensors_index_leads_back_to_its_path() -> None:
    p = torch.nn.Parameter(torch.ones(1))
    p.extra = {"deep": torch.ones(2)}
    state = {"a": [torch.ones(1), (torch.ones(1), {"b": p})], 3: torch.ones(1).view(torch.int32)}
    count = len(flatten(state).tensors)
    paths = [path_to(state, i) for i in range(count)]
    assert paths == [("a", 0), ("a", 1, 0), ("a", 1, 1, "b"), ("a", 1, 1, "b", "extra", "deep"), (3,)]


def test_a_set_of_tensors_is_staged_like_any_container() -> None:
    a, staged = torch.ones(1, requires_grad=True) * 2, torch.zeros(1)
    copy = flatten({"s": {a}, "a": a}).unflatten([staged])
    assert copy["s"] == {staged}
    assert copy["a"] is staged


def test_an_error_keeps_its_cause() -> None:
    with pytest.raises(StagingError) as caught:
        flatten({"a": [(i for i in ())]})
    assert isinstance(caught.value.__cause__, TypeError)
