"""Copies from an accelerator in pieces: one after another, at a limited rate, and at once if a write waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stagereg import Checkpointer
from stagereg.base.device_copy import DeviceCopy
from stagereg.errors import StagingError
from stagereg.stagers.overlapped import OverlappedStager

from ..support.fake_device import FakeDevice
from ..support.reading import opened
from .conftest import WAIT_S

MIB = 2**20


class Paced:
    """A parameter of 8 MiB, copied in pieces of 1 MiB; ``queued`` grows with each piece."""

    def __init__(self, patch: pytest.MonkeyPatch, **options: float) -> None:
        self.queued: list[tuple[float, int, str]] = []
        copied = DeviceCopy._copy

        def copy(copy: DeviceCopy, source) -> None:
            self.queued.append((time.monotonic(), source.data.numel(), threading.current_thread().name))
            copied(copy, source)

        patch.setattr(DeviceCopy, "_copy", copy)
        self.stager = OverlappedStager(**options)
        self.weight = torch.nn.Parameter(torch.randn(8 * MIB // 4))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.stager.watch(self.optimizer)
        self.state = {"w": self.weight.detach()}

    def await_queued(self, count: int) -> None:
        until = time.monotonic() + WAIT_S
        while len(self.queued) < count and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.05)
        assert len(self.queued) == count


@pytest.fixture
def paced(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Paced]:
    made = Paced(monkeypatch, device_piece_mib=1)
    yield made
    fake_device.done.set()
    made.stager.close()


def test_the_next_piece_is_queued_when_the_last_one_is_copied(fake_device: FakeDevice, paced: Paced) -> None:
    fake_device.done.clear()
    future = paced.stager.stage(paced.state)
    paced.await_queued(1)
    fake_device.done.set()
    assert torch.equal(future.result(WAIT_S)["w"], paced.weight)
    assert [nbytes for _, nbytes, _ in paced.queued] == [MIB] * 8


def test_an_optimizer_does_not_wait_for_the_pieces_but_has_them_queued(fake_device: FakeDevice, paced: Paced) -> None:
    fake_device.done.clear()
    late = threading.Timer(WAIT_S, fake_device.done.set)
    late.start()
    before = paced.weight.detach().clone()
    future = paced.stager.stage(paced.state)
    paced.await_queued(1)
    paced.weight.grad = torch.ones_like(paced.weight)
    paced.optimizer.step()
    assert late.is_alive(), "the step waited for the device"
    late.cancel()
    assert len(paced.queued) == 8
    assert fake_device.log[-1][:2] == ("main", "waits for")
    assert not future.done()
    fake_device.done.set()
    assert torch.equal(future.result(WAIT_S)["w"], before)


def test_the_rate_is_limited_until_a_write_waits(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Paced(monkeypatch, device_piece_mib=1, device_rate=MIB / 0.05 / 1e9)
    future = made.stager.stage(made.state)
    assert torch.equal(future.result(WAIT_S)["w"], made.weight)
    times = [at for at, _, _ in made.queued]
    assert times[-1] - times[0] >= 7 * 0.05, "a later piece is never early, however busy the machine is"
    made.stager.close()


def test_without_a_pace_everything_is_queued_at_once(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Paced(monkeypatch)
    fake_device.done.clear()
    future = made.stager.stage(made.state)
    made.await_queued(1)
    assert made.queued[0][1] == 8 * MIB
    fake_device.done.set()
    assert torch.equal(future.result(WAIT_S)["w"], made.weight)
    made.stager.close()


@pytest.mark.parametrize("options", [{"device_piece_mib": 0}, {"device_rate": -1.0}, {"device_rate": float("nan")}])
def test_a_pace_that_cannot_be_kept_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(StagingError, match=rf"stager\.{next(iter(options))} must be greater than 0"):
        OverlappedStager(**options)


@pytest.mark.parametrize("options", [{}, {"device_piece_mib": 1}, {"device_rate": 0.5}], ids=str)
def test_each_checkpoint_of_a_state_on_a_device_holds_its_step(
    fake_device: FakeDevice, options: dict[str, float], tmp_path: Path
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.BatchNorm1d(700), torch.nn.Linear(700, 300))
    optimizer, view = torch.optim.AdamW(model.parameters()), torch.arange(300.0).view(5, 60)[:, ::9]
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "view": view}
    expected = {}
    with Checkpointer(str(tmp_path), every=1, keep=9, stager=OverlappedStager(**options)) as checkpointer:
        for step in range(1, 7):
            model(torch.randn(16, 300)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected[step] = {f"model.{name}": x.clone() for name, x in model.state_dict().items()} | {"view": view}
            checkpointer.maybe_save(step, state)
    for step, values in expected.items():
        with opened(f"{tmp_path}/step-{step:08d}", verify=True) as checkpoint:
            assert all(torch.equal(torch.as_tensor(checkpoint[name]), x) for name, x in values.items())
