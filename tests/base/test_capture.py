"""CUDA calls beside a capture: the thread's mode is relaxed for the calls, and what it was before afterwards."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch

import stagereg.base.capture as capture
from stagereg.base.capture import relaxed_capture

GLOBAL, THREAD_LOCAL, RELAXED = range(3)


class FakeDriver(threading.local):
    """The driver as far as it knows the mode of each thread."""

    mode = GLOBAL
    fails = False

    def exchange(self, mode: Any) -> int:
        if self.fails:
            return 3  # CUDA_ERROR_NOT_INITIALIZED
        wanted = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents
        self.mode, wanted.value = wanted.value, self.mode
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr(capture, "_exchange", lambda: fake.exchange)
    return fake


@pytest.mark.parametrize("before", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_the_mode_is_relaxed_inside_and_the_previous_one_after_it(before: int, driver: FakeDriver) -> None:
    driver.mode = before
    with relaxed_capture():
        assert driver.mode == RELAXED
        with relaxed_capture():
            assert driver.mode == RELAXED
        assert driver.mode == RELAXED
    assert driver.mode == before


def test_the_mode_is_restored_after_an_error(driver: FakeDriver) -> None:
    with pytest.raises(KeyError), relaxed_capture():
        raise KeyError
    assert driver.mode == GLOBAL


def test_other_threads_keep_their_mode(driver: FakeDriver) -> None:
    seen: list[int] = []
    with relaxed_capture():
        thread = threading.Thread(target=lambda: seen.append(driver.mode))
        thread.start()
        thread.join()
    assert seen == [GLOBAL]


def test_a_driver_that_refuses_costs_nothing_but_the_mode(driver: FakeDriver) -> None:
    driver.fails = True
    with relaxed_capture():
        driver.fails = False
    assert driver.mode == GLOBAL, "what was not exchanged is not exchanged back"


def test_without_cuda_the_driver_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    monkeypatch.setattr(capture, "_exchange", lambda: pytest.fail("asked for the driver"))
    with relaxed_capture():
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the driver")
def test_cuda_without_nvidias_driver_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    capture._exchange.cache_clear()
    with relaxed_capture():
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_an_event_query_beside_a_capture_leaves_the_graph_valid() -> None:
    event = torch.cuda.Event()
    event.record()
    torch.cuda.synchronize()
    x = torch.zeros(1000, device="cuda")
    failures: list[BaseException] = []

    def query() -> None:
        try:
            with relaxed_capture():
                event.query()
        except RuntimeError as error:
            failures.append(error)

    graph, thread = torch.cuda.CUDAGraph(), threading.Thread(target=query)
    with torch.cuda.graph(graph, capture_error_mode="global"):
        x.add_(1)
        thread.start()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert (failures, float(x.sum())) == ([], 1000.0)
