"""What cannot be staged is an error with its path in the dict, never a crash and never left out."""

from __future__ import annotations

import copy
import io
import socket
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stagereg import AsyncStager, BlockingAsyncStager, StageregError
from stagereg.errors import StagingError, UnstageableTypeError


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def freed(x: torch.Tensor, left: int = 0) -> torch.Tensor:
    x.untyped_storage().resize_(left)
    return x


class Uncopyable:
    def __deepcopy__(self, memo: object) -> None:
        raise ValueError("I am one of a kind")


class CopiesItself:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        return CopiesItself(copy.deepcopy(self.x, memo))


TENSORS: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.empty(3, device="meta"),
    "meta parameter": lambda: torch.nn.Linear(2, 2, device="meta").weight,
    "lazy": lambda: torch.nn.LazyLinear(3).weight,
    "fake": fake,
    "freed": lambda: freed(torch.ones(100)),
    "shrunk": lambda: freed(torch.ones(100), 396),
    "freed parameter": lambda: freed(torch.nn.Parameter(torch.ones(100))),
    "freed conjugate": lambda: freed(torch.ones(100, dtype=torch.complex64).conj()),
    "freed column": lambda: freed(torch.ones(100, 100)[:, 3]),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "python generator": lambda: (i for i in ()),
    "socket": socket.socket,
    "uncopyable": Uncopyable,
    "tensors in what copies itself": lambda: CopiesItself(torch.ones(3)),
}
INSIDE: dict[str, tuple[Callable[[], Any], str]] = {
    "lock in an object": (lambda: SimpleNamespace(held=threading.Lock()), "held"),
    "meta in an object": (lambda: SimpleNamespace(x=torch.empty(3, device="meta")), "x"),
    "lock in a deque": (lambda: deque([1, threading.Lock()]), "1"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*TENSORS, *OTHERS])
def test_what_has_no_data_or_cannot_be_copied_is_named(stager: AsyncStager, kind: str) -> None:
    value = (TENSORS | OTHERS)[kind]()
    error = StagingError if kind in TENSORS else UnstageableTypeError
    state = {"model": {"layers": [torch.ones(2), 0, (1,), {"w": value}]}, "ok": torch.ones(3)}
    with pytest.raises(error, match=r"model\.layers\.3\.w") as caught:
        stager.stage(state)
    assert caught.value.path == ("model", "layers", 3, "w")
    assert isinstance(caught.value, StageregError)
    assert len(str(caught.value)) < 400
    assert kind in TENSORS or type(value).__name__ in str(caught.value)
    if isinstance(value, socket.socket):
        value.close()


@pytest.mark.parametrize("kind", INSIDE)
def test_what_is_wrong_inside_an_object_is_named(stager: AsyncStager, kind: str) -> None:
    make, inside = INSIDE[kind]
    with pytest.raises(StagingError, match=rf"model\.0\.{inside}\b"):
        stager.stage({"model": [make()]})


def test_a_bad_attribute_or_value_in_a_tuple_is_named(stager: AsyncStager) -> None:
    w = torch.ones(2)
    w.lock = threading.Lock()
    with pytest.raises(UnstageableTypeError, match=r"model\.w\.lock"):
        stager.stage({"model": {"w": w}})
    with pytest.raises(UnstageableTypeError) as caught:
        stager.stage({"a": (1, (torch.ones(1), threading.Lock()))})
    assert caught.value.path == ("a", 1, 1)


def test_type_check_refuses_the_same_as_torch() -> None:
    stager = BlockingAsyncStager(True, type_check=True)
    fine = {"a": [torch.ones(1), (1, 1.0, True, "s", b"b", None)], "io": io.BytesIO(b"x")}
    assert stager.stage(fine)["a"][1] == fine["a"][1]
    for bad in ({1}, 1j, object(), torch.float32, len):
        with pytest.raises(ValueError, match=r"cannot stage 'model\.x': Unexpected value type"):
            stager.stage({"model": {"x": bad}})
