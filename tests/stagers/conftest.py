"""The stagers that keep the contract, a view on their waiting, and how two state dicts are compared bit by bit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import stagereg
import stagereg.kernel.memory as memory
from stagereg import AsyncStager, BlockingAsyncStager


class Settled(AsyncStager):
    """A stager that promises a copy, seen as one that waits for it."""

    _synchronize_after_execute = False

    def __init__(self, promising: Any, owns_all: bool = False) -> None:
        self._promising = promising
        if owns_all:  # as if an optimizer wrote all there is, so that everything is copied in the background
            self._promising._guard.owned = _Everything
            self._promising._worth_deferring = 0

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return self._promising.stage(state_dict).result(60)

    def expect_release(self) -> None:
        self._promising.expect_release()

    def release(self, staged: dict[str, Any]) -> None:
        self._promising.release(staged)

    def close(self) -> None:
        self._promising.close()


class _Everything(dict[Any, int]):
    def get(self, key: Any, default: Any = None) -> int:
        return 2**62


def _overlapped(owns_all: bool) -> Callable[..., AsyncStager]:
    return lambda **kwargs: Settled(stagereg.build("stager", "overlapped", **kwargs), owns_all)


MAKERS: dict[str, Callable[..., AsyncStager]] = {
    "blocking": lambda **kwargs: stagereg.build("stager", "blocking", **kwargs),
    "incremental": lambda **kwargs: stagereg.build("stager", "incremental", **kwargs),
    "incremental_content": lambda **kwargs: stagereg.build("stager", "incremental", detect="content", **kwargs),
    "pinned_cached": lambda **kwargs: stagereg.build("stager", "pinned_cached", **kwargs),
    "overlapped": _overlapped(owns_all=False),
    "overlapped_late": _overlapped(owns_all=True),
    "shared": lambda **kwargs: stagereg.build("stager", "shared", **kwargs),
    "torch_plain": lambda: BlockingAsyncStager(False),
    "torch_cached": lambda: BlockingAsyncStager(True),
}


@pytest.fixture(autouse=True, scope="module")
def quick_collection() -> None:
    """Spares the stagers, which collect cycles before they wait, the many objects that have been there before."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def makers() -> dict[str, Callable[..., AsyncStager]]:
    """The makers of all stagers by name, for tests of many examples, which a fixture per example would slow down."""
    return MAKERS


@pytest.fixture(params=MAKERS)
def stager(request: pytest.FixtureRequest) -> Iterator[AsyncStager]:
    made = MAKERS[request.param]()
    yield made
    made.close()


@pytest.fixture(params=["blocking", "incremental", "incremental_content", "overlapped", "pinned_cached", "shared"])
def make(request: pytest.FixtureRequest) -> Callable[..., AsyncStager]:
    """Builds a registered stager with given arguments."""
    return MAKERS[request.param]


class Waits:
    """The times at which a stager came to its bound and waited.

    Attributes:
        count: how often.
        began: set at the first time.
    """

    def __init__(self) -> None:
        self.count = 0
        self.began = threading.Event()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Records the waiting; a reader that promises nothing is given half a minute."""
    seen, wait = Waits(), memory.Pool._wait

    def record(pool: memory.Pool) -> None:
        seen.count += 1
        seen.began.set()
        wait(pool)

    monkeypatch.setattr(memory.Pool, "_wait", record)
    monkeypatch.setattr(memory, "WAIT_WITHOUT_RELEASE_S", 30.0)
    return seen


@pytest.fixture
def assert_same() -> Callable[[Any, Any], None]:
    return _assert_same


def _bits(x: torch.Tensor) -> bytes:
    # Not contiguous(), which leaves odd strides alone where there is one element.
    plain = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    flat = plain.copy_(x.detach()).reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def _assert_same(copy: Any, source: Any) -> None:
    """Same types, same order, same bits, same strides, and no memory in common."""
    assert type(copy) is type(source)
    if isinstance(source, torch.Tensor):
        assert (copy.dtype, copy.shape, copy.stride()) == (source.dtype, source.shape, source.stride())
        assert (copy.requires_grad, copy.is_conj(), copy.is_neg()) == (
            source.requires_grad,
            source.is_conj(),
            source.is_neg(),
        )
        assert copy.device.type == "cpu"
        assert _bits(copy) == _bits(source)
        assert not source.numel() or copy.data_ptr() != source.data_ptr()
        _assert_same(vars(copy), vars(source))
    elif isinstance(source, dict):
        assert list(copy) == list(source)
        for key in source:
            _assert_same(copy[key], source[key])
        if hasattr(source, "__dict__"):
            _assert_same(vars(copy), vars(source))
    elif isinstance(source, (list, tuple)):
        assert len(copy) == len(source)
        for mine, theirs in zip(copy, source, strict=True):
            _assert_same(mine, theirs)
    else:
        assert copy == source
