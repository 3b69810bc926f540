"""Tests of the average in one process."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from stagereg.plugin import ConfigError
from torch import nn

from lean_export.average import WeightAverage
from lean_export.joinable import EmaJoinable


def test_it_is_the_running_average_with_early_weights_forgotten_sooner() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    average, expected = WeightAverage(layer, decay=0.2), 0.0
    for n, weight in enumerate((1.0, -2.0, 5.0, 3.0)):
        nn.init.constant_(layer.weight, weight)
        average.update()
        keep = min(0.2, (1 + n) / (10 + n))
        expected = keep * expected + (1 - keep) * weight
        assert average.weights()["weight"].item() == pytest.approx(expected)
    assert average.updates == 4


def test_buffers_are_copied_or_averaged_as_configured() -> None:
    choices: tuple[Literal["copy", "average"], ...] = ("copy", "average")
    for buffers in choices:
        norm = nn.BatchNorm1d(1)
        average = WeightAverage(norm, decay=0.5, buffers=buffers)
        norm.running_mean.fill_(10.0)  # type: ignore[union-attr]
        norm.num_batches_tracked.fill_(3)  # type: ignore[union-attr]
        average.update()
        weights = average.weights()
        assert weights["running_mean"].item() == pytest.approx({"copy": 10.0, "average": 9.0}[buffers])
        assert weights["num_batches_tracked"].item() == 3


def test_tied_weights_are_one_average() -> None:
    token, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = token.weight
    average = WeightAverage(nn.Sequential(token, head), decay=0.9)
    average.update()
    weights = average.weights()
    assert weights["0.weight"] is weights["1.weight"]
    assert torch.equal(weights["0.weight"], token.weight)


def test_half_precision_weights_are_averaged_in_float32() -> None:
    layer = nn.Linear(2, 2).to(torch.bfloat16)
    average = WeightAverage(layer)
    average.update()
    assert average.weights()["weight"].dtype == torch.float32


def test_it_resumes_from_its_state_and_loads_into_a_model() -> None:
    layer = nn.Linear(2, 2)
    first, second = WeightAverage(layer, decay=0.5), WeightAverage(nn.Linear(2, 2), decay=0.5)
    for _ in range(3):
        nn.init.normal_(layer.weight)
        first.update()
    second.load_state_dict(first.state_dict())
    assert second.updates == 3
    fresh = nn.Linear(2, 2)
    second.copy_to(fresh)
    assert torch.equal(fresh.weight, first.weights()["weight"])


def test_a_state_of_another_module_and_a_senseless_decay_are_refused() -> None:
    with pytest.raises(ValueError, match="only one of the two has bias"):
        WeightAverage(nn.Linear(2, 2)).load_state_dict(WeightAverage(nn.Linear(2, 2, bias=False)).state_dict())
    with pytest.raises(ConfigError, match=r"decay must be at least 0 and below 1, not 1\.5"):
        EmaJoinable(nn.Linear(2, 2), decay=1.5)
