"""A promised copy and an accelerator's queue; a stand-in for it copies only when it is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import stagereg
from stagereg.kernel.transfer import CopyEngine

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Queued:
    """An event behind some copies."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs

    def synchronize(self) -> None:
        for to, source in self._pairs:
            to.copy_(source)


class Stream:
    def record_event(self) -> Queued:
        return Queued([])

    def wait_event(self, event: Queued) -> None:
        pass


def test_the_future_is_done_when_what_was_queued_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(engine: Any, pairs: Pairs) -> list[tuple[torch.device, Queued]]:
        return [(torch.device("cpu"), Queued(pairs))]

    monkeypatch.setattr(CopyEngine, "fetch", fetch)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream())
    stager = stagereg.build("stager", "overlapped")
    column = torch.arange(40_000.0).view(200, 200)[:, 3]  # is packed, which is an accelerator's way of copying
    assert torch.equal(stager.stage({"x": column}).result(30)["x"], column)
    stager.close()
