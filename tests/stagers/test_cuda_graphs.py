"""CUDA graphs: what a replay writes is copied before it, and no copy disturbs a capture."""

from __future__ import annotations

import threading

import pytest
import torch

import stagereg.stagers.guard as guard
from stagereg.base.hooks import REPLAYS
from stagereg.errors import StagingError
from stagereg.stagers.overlapped import OverlappedStager

from ..support.fake_device import FakeDevice
from .conftest import WAIT_S
from .test_overlapped import OneWeight

Late = tuple[OverlappedStager, threading.Event]


def test_what_a_cuda_graph_writes_is_copied_at_once(
    late: tuple[OverlappedStager, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    stager, gate = late
    monkeypatch.setattr(guard, "ANNOUNCES_REPLAYS", False)  # as before torch 2.14
    one = OneWeight(stager)
    one.weight.grad = torch.ones_like(one.weight)
    for is_captured in (False, True, False):
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda now=is_captured: now)
        one.optimizer.step()
    before = one.weight.detach().clone()
    promise = stager.stage(one.state)
    one.weight.data.add_(1)  # as a replay does: nothing is called before, and no version counter moves
    gate.set()
    assert torch.equal(promise.result(WAIT_S)["w"], before)


@pytest.mark.parametrize("watched", [False, True])
def test_what_a_graph_captured_earlier_may_write_is_copied_at_once_unless_watched(
    late: tuple[OverlappedStager, threading.Event], watched: bool
) -> None:
    stager, gate = late
    weight = torch.nn.Parameter(torch.ones(100_000))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Adam([weight])
    optimizer.step()
    optimizer.param_groups[0]["capturable"] = True  # torch takes no step with it on a processor
    if watched:
        stager.watch(optimizer)
    before = weight.detach().clone()
    promise = stager.stage({"w": weight.detach()})
    weight.data.add_(1)  # as a replay does
    gate.set()
    if watched:
        with pytest.raises(StagingError, match="written, freed or resized while"):
            promise.result(WAIT_S)
    else:
        assert torch.equal(promise.result(WAIT_S)["w"], before)


def test_a_copy_that_is_under_way_is_complete_before_its_optimizer_is_captured(
    fake_device: FakeDevice, late: Late
) -> None:
    stager, gate = late
    one = OneWeight(stager)
    one.weight.grad = torch.ones_like(one.weight)
    before = one.weight.detach().clone()
    future = stager.stage(one.state)
    fake_device.capturing = True
    waits = len(fake_device.waits())
    one.optimizer.step()
    assert fake_device.queried.is_set(), "the thread itself waits for the device"
    assert len(fake_device.waits()) == waits, "a graph that depends on an event from before its capture is invalid"
    fake_device.capturing = False
    one.weight.data.add_(1)  # as a replay does
    gate.set()
    assert torch.equal(future.result(WAIT_S)["w"], before)


def test_what_a_replay_writes_is_copied_before_it_if_torch_announces_replays(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    stager, gate = late
    monkeypatch.setattr(guard, "ANNOUNCES_REPLAYS", True)
    one = OneWeight(stager)
    one.weight.grad = torch.ones_like(one.weight)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
        one.optimizer.step()
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    one.optimizer.param_groups[0]["capturable"] = True
    before = one.weight.detach().clone()
    future = stager.stage(one.state)
    assert stager._split is not None
    assert stager._split[1].deferred, "the copy is not complete when the call returns"
    REPLAYS.call(object())  # as torch does
    one.weight.data.add_(1)
    gate.set()
    assert torch.equal(future.result(WAIT_S)["w"], before)


def test_a_replay_of_a_forward_pass_does_not_end_a_copy(fake_device: FakeDevice, late: Late) -> None:
    stager, gate = late
    one = OneWeight(stager)
    future = stager.stage(one.state)
    waits = fake_device.waits()
    REPLAYS.call(object())  # no optimizer was captured
    assert fake_device.waits() == waits, "training goes on beside the copy"
    gate.set()
    assert torch.equal(future.result(WAIT_S)["w"], one.weight)


def test_a_stager_refuses_to_stage_during_a_capture_and_goes_on_afterwards(fake_device: FakeDevice, late: Late) -> None:
    stager, gate = late
    gate.set()
    one = OneWeight(stager)
    fake_device.capturing = True
    with pytest.raises(StagingError, match="before or after the capture"):
        stager.stage(one.state)
    fake_device.capturing = False
    assert torch.equal(stager.stage(one.state).result(WAIT_S)["w"], one.weight)
