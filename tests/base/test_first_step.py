"""The first step of an optimizer in a process is seen."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import stagereg.base.first_step as first_step


def test_the_first_step_is_seen_although_torch_is_imported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    monkeypatch.setattr(torch.__spec__, "_initializing", True, raising=False)
    steps = list[int]()
    try:
        first_step.call_at_first_step(lambda: steps.append(1))
        importlib.import_module("colorsys")
        assert first_step._first in sys.meta_path
        monkeypatch.setattr(torch.__spec__, "_initializing", False)
        sys.modules.pop("colorsys")
        importlib.import_module("colorsys")
        assert first_step._first not in sys.meta_path
        assert first_step.is_awaited()
        optimizer.step()
        optimizer.step()
        assert (steps, first_step.is_awaited()) == ([1], False)
    finally:
        first_step.take_step()
