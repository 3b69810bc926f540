"""Many tensors are described, compared and created alike by the compiled part and by Python alone."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import io
import shutil
import subprocess
import sysconfig
import threading
import unittest.mock
import warnings
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import stagereg.base.many_tensors as many_tensors
import stagereg.kernel.state_dict as state_dict
from tests.kernel.test_state_dict import CHANGES, base, is_recognized, remembered

SOURCE = Path(many_tensors.__file__).with_name("tensors.c")
DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


def loaded(library: str) -> ModuleType:
    """The module, as it is with this library beside it."""
    spec = importlib.util.spec_from_file_location("stagereg.base.loaded_again", many_tensors.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with unittest.mock.patch("ctypes.PyDLL", lambda beside, load=ctypes.PyDLL: load(library)):
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The compiled part, compiled here."""
    compiler, header = shutil.which("cc"), Path(sysconfig.get_path("include")) / "Python.h"
    if compiler is None or not header.exists():
        pytest.skip("needs a C compiler, and the header files of Python")
    made = str(tmp_path_factory.mktemp("compiled") / "_tensors.so")
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{header.parent}"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", made], check=True, timeout=60)
    return made


@pytest.fixture(params=["compiled", "compiled, nothing loaded early", "Python"])
def way(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "Python":
        return loaded("nowhere")
    module = loaded(request.getfixturevalue("library"))
    assert module._torch is not None
    if request.param != "compiled":
        module._places = type(module._places)(0, 0)
    return module


def created(module: ModuleType, tensors: list[torch.Tensor], gap: int = 64) -> tuple[list[torch.Tensor], bytearray]:
    """Tensors like these over new memory that has their bytes, in order."""
    memory, offsets = bytearray(), array("q")
    for x in tensors:
        offsets.append(len(memory))
        whole = x.untyped_storage()
        memory += bytes(whole[x.storage_offset() * x.itemsize :])  # type: ignore[arg-type]
        memory += bytes(-len(memory) % gap)
    return module.Description(tensors).create(memoryview(memory), offsets), memory


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "a vector": lambda: torch.arange(7.0),
    "a scalar": lambda: torch.tensor(3),
    "a matrix": lambda: torch.arange(12.0).view(3, 4),
    "turned": lambda: torch.arange(12.0).view(3, 4).t(),
    "every second": lambda: torch.arange(12.0)[1::2],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "a parameter": lambda: torch.nn.Parameter(torch.arange(6.0).view(2, 3)),
    "five dimensions": lambda: torch.arange(32).view(2, 2, 2, 2, 2).permute(4, 1, 2, 3, 0),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_tensor_is_created_as_it_is_described(way: ModuleType, view: str) -> None:
    source = VIEWS[view]()
    [made], _ = created(way, [source])
    assert torch.equal(made, source)
    assert (made.dtype, made.shape, made.stride()) == (source.dtype, source.shape, source.stride())
    assert (type(made), made.storage_offset(), made.requires_grad) == (torch.Tensor, 0, False)
    assert made.untyped_storage().nbytes() == many_tensors.span_of(source) * source.itemsize


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_kept(way: ModuleType, dtype: torch.dtype) -> None:
    with warnings.catch_warnings(action="ignore"):
        x = torch.empty(4, dtype=dtype)
    [made] = way.Description([x]).create(memoryview(bytearray(range(64))), array("q", [0]))
    assert (made.dtype, made.shape, made.itemsize) == (x.dtype, x.shape, x.itemsize)
    assert bytes(made.untyped_storage()) == bytes(range(4 * x.itemsize))  # type: ignore[call-overload]


def test_each_tensor_has_a_storage_of_its_own(way: ModuleType) -> None:
    made, _ = created(way, [torch.full((1000,), float(i)) for i in range(50)])
    assert len({x.untyped_storage().data_ptr() for x in made}) == 50
    file = io.BytesIO()
    torch.save(made[3], file)
    assert len(file.getvalue()) < 2 * 4000


def test_thousands_are_created_in_order_except_those_left_out(way: ModuleType) -> None:
    sources = [torch.full((1 + i % 3, 2), i) for i in range(5000)]
    offsets = array("q", [-1 if i % 7 == 0 else 64 * i for i in range(5000)])
    memory = bytearray(64 * 5000)
    made = way.Description(sources).create(memoryview(memory), offsets)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert [None if x is None else (x.data_ptr() - start, x.shape) for x in made] == [
        None if at < 0 else (at, source.shape) for at, source in zip(offsets, sources, strict=True)
    ]


class Memory(bytearray):
    """Memory that can be watched."""


@pytest.mark.parametrize("thread", [False, True])
def test_the_memory_is_kept_until_the_last_tensor_is_freed(way: ModuleType, thread: bool) -> None:
    memory = Memory(64 * 3000)
    gone = weakref.ref(memory)
    sources = [torch.zeros(4) for _ in range(3000)]
    made = way.Description(sources).create(memoryview(memory), array("q", range(0, 64 * 3000, 64)))
    del memory
    rest = [made.pop(1500), made.pop(7).view(2, 2)]
    del made
    gc.collect()
    assert gone() is not None
    rest[0].fill_(1.0)
    if thread:
        freeing = threading.Thread(target=rest.clear)
        freeing.start()
        freeing.join(30)
    rest.clear()
    assert gone() is None


DIFFERENT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "other memory": lambda x: x.clone(),
    "another dtype": lambda x: x.view(torch.int32),
    "another dtype of one kind": lambda x: x.view(torch.float16)[:, ::2],
    "turned": lambda x: x.t(),
    "fewer rows": lambda x: x[:3],
    "other strides": lambda x: x.as_strided((4, 4), (1, 4)),
    "another number of dimensions": lambda x: x.view(16),
    "another place in its storage": lambda x: x.as_strided((4, 4), (4, 1), 1),
    "no memory": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("change", DIFFERENT)
@pytest.mark.parametrize("at", [0, 20, 99])
def test_a_tensor_that_differs_does_not_match(way: ModuleType, change: str, at: int) -> None:
    tensors = [torch.zeros(8, 4)[:4] for _ in range(100)]
    known = way.Description(tensors)
    assert known.matches([x.detach() for x in tensors])
    changed = [*tensors]
    changed[at] = DIFFERENT[change](changed[at])
    assert not known.matches(changed)
    assert known.matches(tensors)


def test_another_number_of_tensors_does_not_match(way: ModuleType) -> None:
    tensors = [torch.zeros(4) for _ in range(3)]
    known = way.Description(tensors)
    assert not known.matches(tensors[:2])
    assert not known.matches([*tensors, torch.zeros(4)])
    assert not way.Description([]).matches(tensors)
    assert way.Description([]).matches([])


def test_freed_memory_does_not_match(way: ModuleType) -> None:
    tensors = [torch.zeros(4)]
    known = way.Description(tensors)
    tensors[0].untyped_storage().resize_(0)
    assert not known.matches(tensors)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_state_is_not_recognized_either_way(
    way: ModuleType, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_dict, "Description", way.Description)
    state = base()
    copier = remembered(state)
    assert is_recognized(copier, state)
    CHANGES[change](state)
    assert not is_recognized(copier, state)


def test_conjugation_is_seen_at_the_same_address(way: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dict, "Description", way.Description)
    state: dict[str, Any] = {"w": torch.randn(4, dtype=torch.complex64), "v": torch.randn(4, dtype=torch.complex64)}
    copier = remembered(state)
    assert is_recognized(copier, state)
    state["w"] = state["w"].conj()
    assert not is_recognized(copier, state)
    assert torch.equal(copier.copy(state)["w"], state["w"])
