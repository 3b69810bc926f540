"""Digests change with every bit that decides how training continues, and with nothing else."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stagereg.extensions.prove import observing
from stagereg.extensions.prove.observing import OUTSIDE, Snapshot, samples, snapshot, values_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


def taken(state: dict[str, Any]) -> Snapshot:
    return observing.resolved([snapshot(state, values_of(state))])[0]


def differing(a: Snapshot, b: Snapshot) -> set[str]:
    return {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}


@given(st.sampled_from(DTYPES), st.integers(1, 90_000), st.integers(0, 10**9), st.integers(0, 7))
def test_one_changed_bit_changes_the_digest(dtype: torch.dtype, length: int, place: int, bit: int) -> None:
    x = torch.zeros(length, dtype=torch.uint8)
    nbytes = length // dtype.itemsize * dtype.itemsize
    if not nbytes:
        return
    before = str(observing.digest(x[:nbytes].view(dtype)))
    x[place % nbytes] = 1 << bit
    assert str(observing.digest(x[:nbytes].view(dtype))) != before


@given(st.integers(20_000, 40_000), st.integers(1, 19_000), st.randoms())
def test_values_that_change_places_change_the_digest(length: int, apart: int, numbers: random.Random) -> None:
    x = torch.arange(length, dtype=torch.float32)
    before = str(observing.digest(x))
    assert str(observing.digest(x.clone())) == before
    at = numbers.randrange(length - apart)
    x[[at, at + apart]] = x[[at + apart, at]]
    assert str(observing.digest(x)) != before


def test_views_and_lazy_values_have_the_digest_of_their_values() -> None:
    x = torch.randn(300, 301)
    assert str(observing.digest(x.t().contiguous().t())) == str(observing.digest(x))
    assert str(observing.digest(x[1:])) == str(observing.digest(x[1:].clone()))
    y = torch.randn(4, dtype=torch.complex64)
    assert observing.digest(y.conj()) == observing.digest(y.conj().resolve_conj()) != observing.digest(y)


@given(st.integers(1, 30), st.integers(0, 30), st.sampled_from(DTYPES[:5]))
def test_the_sum_of_samples_does_not_depend_on_the_division_of_a_batch(
    count: int, cut: int, dtype: torch.dtype
) -> None:
    x, y = torch.randint(0, 9, (count, 3, 5)).to(dtype), torch.arange(count)
    cut = min(cut, count - 1)
    parts = [samples([x[at:end], y[at:end]]).item() for at, end in ((0, cut), (cut, count)) if end > at]
    assert sum(parts) % (1 << 64) == int(samples([x, y]).item()) % (1 << 64)
    if count > 1:
        assert samples([x, y.roll(1)]) != samples([x, y])  # each label belongs to its sample


def test_each_part_of_the_state_has_its_kind_and_name() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "mask": torch.ones(2)}
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    before = taken(state)
    changes = {
        "parameter: model.0.weight": lambda: model[0].weight.data.add_(1),
        "buffer: model.1.running_mean": lambda: model[1].running_mean.add_(1),
        "optimizer state: optimizer.model.0.bias.momentum_buffer": lambda: optimizer.state[model[0].bias][
            "momentum_buffer"
        ].add_(1),
        "schedule: optimizer.param_groups.0.weight_decay": lambda: optimizer.param_groups[0].update(weight_decay=1.0),
        "schedule: scheduler.last_epoch": lambda: vars(scheduler).update(last_epoch=9),
        "loss scale: scaler.scale": lambda: scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0}),
        "value: mask": lambda: state["mask"].zero_(),
        "random numbers: generator of torch": lambda: torch.rand(1),
        "random numbers: generator of python": random.random,
    }
    for name, change in changes.items():
        change()
        after = taken(state)
        assert {each for each in differing(before, after) if OUTSIDE not in each} == {name}
        before = after


def test_a_tied_parameter_is_named_by_the_first_one() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, False), "b": nn.Linear(2, 2, False)})
    model["b"].weight = model["a"].weight
    assert taken({"model": model})["parameter: model.b.weight (tied to)"] == "model.a.weight"
    model["b"].weight = nn.Parameter(model["a"].weight.detach().clone())
    assert "parameter: model.b.weight (tied to)" not in taken({"model": model})


class Holder:
    def __init__(self) -> None:
        self.own = torch.Generator()
        self.phase = 3


def test_variables_that_are_not_in_the_state_are_found() -> None:
    model, source, noise = nn.Linear(2, 2), torch.Generator(), random.Random(1)
    average, shadow = nn.Linear(2, 2), {name: x.detach().clone() for name, x in model.named_parameters()}
    other, temperature, holder = [torch.ones(5)], 0.5, Holder()
    loader = torch.utils.data.DataLoader([1, 2], generator=torch.Generator())
    found = {name.partition(").")[2] for name in values_of({"model": model}) if OUTSIDE in name}
    expected = {"source", "noise", "average", "shadow", "temperature", "holder.own", "holder.phase"}
    assert {name.replace(OUTSIDE, "") for name in found} >= expected
    assert not any(name.startswith(("model", "loader")) for name in found)  # the batches show the loader
    assert len([source, noise, average, shadow, other, temperature, holder, loader]) == 8
    assert not any("source" in name for name in values_of({"model": model, "source": source}) if OUTSIDE in name)


def test_an_attribute_that_is_in_the_state_is_not_found_again() -> None:
    holder = Holder()
    names = [name for name in values_of({"noise": holder.own}) if "holder.own" in name]
    assert names == []


def test_looking_at_variables_keeps_no_value_alive() -> None:
    def step() -> weakref.ref[torch.Tensor]:
        large = torch.ones(3)
        found = weakref.ref(large)
        values_of({})
        del large
        return found if found() is None else pytest.fail("the frame keeps the value alive")

    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


def test_a_local_module_outside_the_state_is_compared_by_its_own_tensors_only() -> None:
    model = nn.Linear(2, 2)
    wrapped = nn.DataParallel(model)
    assert not [name for name in taken({"model": model}) if "wrapped" in name]
    assert wrapped
