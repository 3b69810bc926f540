"""``overlapped``: a copy is good only when no operation can have written its source; storages may change meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import stagereg.stagers.deferred_copy as deferred_copy
from stagereg.errors import WrittenWhileStagedError
from stagereg.stagers.overlapped import OverlappedStager

from .conftest import WAIT_S

ROWS, WIDTH = 1000, 64


@pytest.fixture
def stager(late: tuple[OverlappedStager, threading.Event]) -> OverlappedStager:
    return late[0]


class Weight:
    """A parameter whose optimizer the stager knows."""

    def __init__(self, stager: OverlappedStager) -> None:
        self.parameter = torch.nn.Parameter(torch.rand(ROWS, WIDTH))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1, momentum=0.9)
        self.step()
        stager.watch(self.optimizer)

    def step(self) -> None:
        self.parameter.grad = torch.ones_like(self.parameter)
        self.optimizer.step()

    @property
    def momentum(self) -> torch.Tensor:
        found: torch.Tensor = self.optimizer.state[self.parameter]["momentum_buffer"]
        return found

    def state(self) -> dict[str, Any]:
        return {"weight": self.parameter.detach(), "optimizer": self.optimizer.state_dict()["state"]}


def from_elsewhere(future: Any) -> Any:
    """Return the outcome of a future as a thread gets it that is not the training thread."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(future.result, WAIT_S).result(WAIT_S)


FENCES: dict[str, Callable[[OverlappedStager, Weight, Any], object]] = {
    "the optimizer steps": lambda stager, weight, future: weight.step(),
    "the stager is called": lambda stager, weight, future: stager.confirm(),
    "the next copy begins": lambda stager, weight, future: stager.stage({}),
    "the training thread asks": lambda stager, weight, future: future.exception(WAIT_S),
    "nothing": lambda stager, weight, future: None,
}


@pytest.mark.parametrize("fence", FENCES)
def test_an_operation_that_runs_when_the_copy_ends_is_found(
    fence: str, gate: threading.Event, stager: OverlappedStager
) -> None:
    weight = Weight(stager)
    future = stager.stage(weight.state())
    weight.parameter.data.numpy()[500:510] = 7  # as an operation that has written some rows, and not returned
    gate.set()
    future.copied()
    torch.autograd.graph.increment_version(weight.parameter)  # torch does it when the operation has returned
    FENCES[fence](stager, weight, future)
    with pytest.raises(WrittenWhileStagedError, match="'weight'"):
        from_elsewhere(future)


@pytest.mark.parametrize("fence", FENCES)
def test_a_copy_is_done_at_the_next_fence_or_after_a_while(
    fence: str, gate: threading.Event, stager: OverlappedStager, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fence != "nothing":
        monkeypatch.setattr(deferred_copy, "_STILL_S", 1000 * WAIT_S)
    weight = Weight(stager)
    expected = weight.parameter.detach().clone()
    future = stager.stage(weight.state())
    gate.set()
    assert torch.equal(future.copied()["weight"], expected)
    FENCES[fence](stager, weight, future)
    assert torch.equal(from_elsewhere(future)["weight"], expected)


WRITES_AT_ONCE: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "data": lambda w: w.data.clamp_(-0.01, 0.01),
    "detach": lambda w: w.detach().zero_(),
    "numpy": lambda w: w.detach().numpy().fill(7.0),
}


@pytest.mark.parametrize("fence", ["the optimizer steps", "nothing"])
@pytest.mark.parametrize("write", WRITES_AT_ONCE)
def test_a_write_that_may_have_begun_before_the_copy_ended_is_found(
    write: str, fence: str, gate: threading.Event, stager: OverlappedStager
) -> None:
    weight = Weight(stager)
    future = stager.stage(weight.state())
    gate.set()
    future.copied()
    WRITES_AT_ONCE[write](weight.parameter)  # it has ended; nothing tells when it began
    FENCES[fence](stager, weight, future)
    with pytest.raises(WrittenWhileStagedError, match="'weight'"):
        from_elsewhere(future)


def test_a_fence_on_another_thread_confirms_nothing(gate: threading.Event, stager: OverlappedStager) -> None:
    weight = Weight(stager)
    future = stager.stage(weight.state())
    gate.set()
    future.copied()
    torch.autograd.graph.increment_version(weight.parameter)
    with ThreadPoolExecutor(1) as other:
        other.submit(stager.confirm).result(WAIT_S)
    [running] = stager._copies._running
    assert not running._fenced.is_set()


def written_later(stager: OverlappedStager, weight: Weight, write: Callable[[torch.nn.Parameter], object]) -> bool:
    """Whether a copy begun now holds what there is now, although the parameter is written right away."""
    expected = weight.parameter.detach().clone()
    future = stager.stage(weight.state())
    with torch.no_grad():
        write(weight.parameter)
    weight.step()
    return torch.equal(future.result(WAIT_S)["weight"], expected)


WRITES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "max_norm": lambda w: torch.embedding_renorm_(w, torch.randint(ROWS, (50,)), 0.5, 2.0),
    "index_copy_": lambda w: w.index_copy_(0, torch.arange(50), torch.zeros(50, WIDTH)),
    "clamp_ of .data": lambda w: w.data.clamp_(-0.01, 0.01),
    "one row": lambda w: w[100].zero_(),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_between_two_early_steps_is_known_in_the_first_copy(
    write: str, gate: threading.Event, stager: OverlappedStager
) -> None:
    gate.set()
    weight = Weight(stager)
    for _ in range(2):
        with torch.no_grad():
            WRITES[write](weight.parameter)
        weight.step()
    assert all(written_later(stager, weight, WRITES[write]) for _ in range(3))
    assert stager._split is not None
    assert stager._split[1].members, "the momentum is still copied later"


def test_a_write_that_a_copy_meets_is_known_in_the_next_one(gate: threading.Event, stager: OverlappedStager) -> None:
    gate.set()
    weight = Weight(stager)
    with pytest.raises(WrittenWhileStagedError):
        written_later(stager, weight, WRITES["index_copy_"])
    assert all(written_later(stager, weight, WRITES["index_copy_"]) for _ in range(3))
    assert stager._split is not None
    assert stager._split[1].members, "the momentum is still copied later"


def test_tensors_given_to_copy_at_once_may_be_written_at_once(gate: threading.Event, stager: OverlappedStager) -> None:
    gate.set()
    weight = Weight(stager)
    stager.copy_at_once([weight.parameter])
    assert all(written_later(stager, weight, WRITES["max_norm"]) for _ in range(3))


def test_what_cannot_be_observed_ends_no_step(gate: threading.Event, stager: OverlappedStager) -> None:

    gate.set()
    weight = torch.nn.Parameter(torch.rand(ROWS, WIDTH))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["odd"] = torch.nn.parameter.UninitializedParameter()
    weight.grad = None
    optimizer.step()
    optimizer.step()
    assert stager.stage({"w": weight.detach()}).result(WAIT_S)["w"].shape == weight.shape


REPLACEMENTS: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda x: setattr(x, "data", torch.full((ROWS, WIDTH), 7.0)),
    "storage freed": lambda x: x.untyped_storage().resize_(0),
    "storage shrunk": lambda x: x.untyped_storage().resize_(4096),
    "storage grown": lambda x: x.untyped_storage().resize_(2**24),
    "resize_": lambda x: x.resize_(4 * ROWS, WIDTH),
    "resize_as_": lambda x: x.resize_as_(torch.ones(4 * ROWS, WIDTH)),
    "share_memory_": lambda x: x.share_memory_().fill_(7.0),
}


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_a_storage_that_is_replaced_or_resized_is_copied_as_it_was(
    replacement: str, gate: threading.Event, stager: OverlappedStager
) -> None:
    weight = Weight(stager)
    expected = weight.momentum.clone()
    future = stager.stage(weight.state())
    REPLACEMENTS[replacement](weight.momentum)
    noise = [torch.full((ROWS, WIDTH), 8.0) for _ in range(50)]
    gate.set()
    assert torch.equal(future.copied()["optimizer"][0]["momentum_buffer"], expected)
    assert len(noise) == 50


@pytest.mark.parametrize("exchange", [torch.Tensor.set_, torch.utils.swap_tensors])
def test_exchanged_tensors_are_copied_as_they_were_or_refused(
    exchange: Callable[..., object], gate: threading.Event, stager: OverlappedStager
) -> None:
    weight = Weight(stager)
    weight.step()
    expected = weight.momentum.clone()
    future = stager.stage(weight.state())
    exchange(weight.momentum, torch.full((ROWS, WIDTH), 7.0))
    gate.set()
    error = future.exception(WAIT_S)
    if error is None:
        assert torch.equal(future.result()["optimizer"][0]["momentum_buffer"], expected)
    else:
        assert isinstance(error, WrittenWhileStagedError)
        assert "momentum_buffer" in str(error)


def test_a_storage_that_is_freed_past_torchs_methods_is_an_error_with_its_path(
    gate: threading.Event, stager: OverlappedStager
) -> None:
    weight = Weight(stager)
    future = stager.stage(weight.state())
    storage = weight.momentum.untyped_storage()
    torch._C.StorageBase.resize_(storage, 0)
    gate.set()
    with pytest.raises(WrittenWhileStagedError, match=r"momentum_buffer.*freed"):
        future.result(WAIT_S)
    torch._C.StorageBase.resize_(storage, ROWS * WIDTH * 4)
    assert stager.stage(weight.state()).result(WAIT_S)["weight"].shape == (ROWS, WIDTH)


def test_a_reader_that_waits_for_the_bytes_alone_reports_the_failure(
    gate: threading.Event, stager: OverlappedStager
) -> None:
    weight = Weight(stager)
    future = stager.stage(weight.state())
    copied = threading.Event()
    future.when_copied(copied.set)
    torch.autograd.graph.increment_version(weight.parameter)
    gate.set()
    stager.stage({}).result(WAIT_S)  # raises nothing, although the copy before has failed
    assert copied.wait(WAIT_S)
    with pytest.raises(WrittenWhileStagedError, match="'weight'"):
        future.result(WAIT_S)
