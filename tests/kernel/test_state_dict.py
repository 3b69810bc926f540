"""A state dict taken apart and put together, by a plan that is kept as long as the state stays the same.

A recognised state dict is copied like one that is taken apart, and only an unchanged one is recognised.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stagereg.kernel.copier as copier_module
from stagereg.errors import StagingError
from stagereg.kernel.copier import HostCopier
from stagereg.kernel.layout import signature
from stagereg.kernel.memory import Pool
from stagereg.kernel.state_dict import flatten

from ..support.states import assert_same


def test_a_set_and_a_bare_tensor_are_states_too() -> None:
    b, staged = torch.ones(2), [torch.zeros(2)]
    assert flatten({"s": {b}}).unflatten(staged) == {"s": {staged[0]}}
    assert flatten(b).unflatten(staged) is staged[0]


def test_an_error_keeps_its_cause() -> None:
    with pytest.raises(StagingError) as caught:
        flatten({"a": [(i for i in ())]})
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_signature_differs_when_only_the_storage_has_shrunk() -> None:
    x = torch.ones(100)
    x.untyped_storage().resize_(200)
    x.untyped_storage().resize_(400)
    whole = signature([x])
    x.untyped_storage().resize_(200)
    assert signature([x]) != whole


def remembered(state: Any) -> HostCopier:
    copier = HostCopier(Pool())
    copier.copy(state)
    return copier


def is_recognized(copier: HostCopier, state: Any) -> bool:
    with unittest.mock.patch.object(copier_module, "flatten", wraps=copier_module.flatten) as flatten:
        with contextlib.suppress(StagingError):
            copier.prepare(state)
        return not flatten.called


def test_a_modules_state_dict_is_recognised_in_new_objects() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    copier = remembered({"model": model.state_dict()})
    state = {"model": model.state_dict()}
    assert is_recognized(copier, state)
    made = copier.copy(state)
    assert_same(made, state)
    assert made["model"]._metadata == state["model"]._metadata
    made["model"]._metadata[""]["version"] = 99
    assert state["model"]._metadata[""]["version"] == 1


def base() -> dict[str, Any]:
    return {
        "w": torch.randn(4, 4),
        "v": torch.randn(4, 4),
        "inner": {"t": (1, 2), "x": torch.ones(3)},
        "list": [1, 2.0],
    }


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "other memory": lambda s: s.update(w=s["w"].clone()),
    "other data in place": lambda s: setattr(s["w"], "data", torch.zeros(4, 4)),
    "turned in place": lambda s: s["w"].t_(),
    "seen as another dtype": lambda s: s.update(w=s["w"].view(torch.int32)),
    "a part of it": lambda s: s.update(w=s["w"][:2]),
    "from another offset on": lambda s: s.update(w=s["w"][1:]),
    "turned": lambda s: s.update(w=s["w"].t()),
    "of another shape": lambda s: s.update(w=s["w"].view(2, 8)),
    "expanded": lambda s: s.update(w=s["w"].expand(2, 4, 4)),
    "gradients": lambda s: s["w"].requires_grad_(),
    "a parameter": lambda s: s.update(w=torch.nn.Parameter(s["w"])),
    "an attribute": lambda s: setattr(s["w"], "tag", [1]),
    "tied": lambda s: s.update(v=s["w"]),
    "negated": lambda s: s.update(w=torch._neg_view(s["w"])),
    "another order": lambda s: s.update(w=s.pop("w")),
    "one more": lambda s: s.update(more=3),
    "one less": lambda s: s.pop("v"),
    "a value of another type": lambda s: s["list"].__setitem__(0, 1.5),
    "another mapping": lambda s: s.update(inner=OrderedDict(s["inner"])),
    "a container met twice": lambda s: s.update(list=s["inner"]),
    "a tuple that has what can change": lambda s: s["inner"].update(t=(1, [2])),
    "freed memory": lambda s: s["w"].untyped_storage().resize_(0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_differs_is_taken_apart_anew(change: str) -> None:
    state = base()
    copier = remembered(state)
    state["w"].add_(1)
    state["list"][0] = 7
    assert is_recognized(copier, state)
    assert_same(copier.copy(state), state)
    CHANGES[change](state)
    assert not is_recognized(copier, state)
    if change != "freed memory":
        assert_same(copier.copy(state), state)


@pytest.mark.parametrize(
    "odd", [torch.nn.Parameter(torch.ones(3)), {1, 2}, (torch.ones(2),), torch.ones(2).to_sparse()]
)
def test_a_state_that_is_not_plain_is_never_recognised(odd: Any) -> None:
    state = {"w": torch.ones(3), "odd": odd}
    assert not is_recognized(remembered(state), state)


def test_the_copy_of_a_tuple_that_was_constant_once_is_no_alias() -> None:
    state: dict[str, Any] = {"w": torch.ones(3), "t": (1, 2)}
    copier = remembered(state)
    state["t"] = (1, [2])
    made = copier.copy(state)
    state["t"][1].append(3)
    assert made["t"] == (1, [2])


def test_objects_that_become_one_are_one_in_the_copy() -> None:
    w, first = torch.ones(3), {"x": 1}
    many = {str(i): torch.ones(1) for i in range(1000)}
    copier = remembered({"w": w, **many, "v": w.detach()})
    tied = copier.copy({"w": w, **many, "v": w})
    assert tied["w"] is tied["v"]
    copier = remembered({"w": w, "first": first, "second": {"x": 1}})
    shared = copier.copy({"w": w, "first": first, "second": first})
    assert shared["first"] is shared["second"]
