"""A step is whole until something writes into its state; what is noted of it is what it was as the step ended."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stagereg
from stagereg.base.hooks import BEFORE_STEPS
from stagereg.checkpoint.format.split_tensors import is_split
from stagereg.checkpoint.state.entries import per_rank
from stagereg.checkpoint.state.optimizer_state import ParameterNames
from stagereg.data import ResumableSampler
from stagereg.errors import CheckpointError
from stagereg.extensions.recovery.end_of_step import Notes
from stagereg.extensions.recovery.step_snapshot import StepSnapshot
from tests.checkpoint.promises.test_split_tensors import ROWS, WHOLE, part_of
from tests.support.subclasses import codes


class Trained:
    """A model that has taken a step, which is noted."""

    def __init__(self, **more: Any) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.sampler = ResumableSampler(range(100))
        self.state = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        self.state |= {"sampler": self.sampler, "losses": [1.0], "step": 1, "seen": torch.zeros(2), **more}
        self.state["own"] = per_rank({"at": 1})
        self.whole = StepSnapshot(ParameterNames())
        self.train()
        self.whole.note(1, self.state)

    def train(self) -> None:
        self.model(torch.rand(4, 2)).sum().backward()
        self.optimizer.step()
        self.schedule.step()

    def taken(self) -> dict[str, Any]:
        return self.whole.take(0, 1)


def test_a_write_into_what_a_tensor_wraps_is_found() -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["moment"] = moment = codes(3, 2)
    state = {"model": model, "optimizer": optimizer}
    whole = StepSnapshot(ParameterNames())
    whole.note(1, state)
    assert whole.hold() == ""
    moment.scale.add_(1)
    with pytest.raises(CheckpointError):
        whole.expect_unchanged()


def test_what_is_taken_is_what_it_was_as_the_step_ended() -> None:
    trained = Trained()
    was = {name: x.clone() for name, x in trained.model.state_dict().items()}
    drawn = [f() for f in (torch.random.get_rng_state, random.getstate, numpy.random.get_state)]
    rate, schedule = trained.optimizer.param_groups[0]["lr"], trained.schedule.state_dict()
    trained.model(torch.rand(4, 2))
    random.random()
    numpy.random.rand()
    trained.schedule.step()
    trained.sampler.advance(3)
    trained.state["losses"].append(2.0)
    trained.state["step"] = 2
    trained.state["seen"] += 1
    trained.state["own"].value["at"] = 2
    assert trained.whole.hold() == ""
    taken = trained.taken()
    assert all(torch.equal(x, was[name]) for name, x in taken["model"].items())
    assert [group["lr"] for group in taken["optimizer"]["param_groups"].values()] == [rate]
    assert taken["schedule"] == schedule
    assert (taken["losses"], taken["step"], taken["seen"].tolist()) == ([1.0], 1, [0.0, 0.0])
    assert (taken["own.rank0"], taken["sampler.rank0"]["consumed"]) == ({"at": 1}, 0)
    assert taken["stagereg.step"] == 1
    again = StepSnapshot(ParameterNames())
    torch.random.set_rng_state(drawn[0])
    random.setstate(drawn[1])
    numpy.random.set_state(drawn[2])
    again.note(1, {})
    again.hold()
    assert taken["stagereg.rng.rank0"] == again.take(0, 1)["stagereg.rng.rank0"]
    trained.whole.expect_unchanged()


def test_nothing_is_whole_before_a_step_has_ended() -> None:
    assert StepSnapshot(ParameterNames()).hold() == "no step has completed"


def write(trained: Trained) -> None:
    with torch.no_grad():
        trained.model[0].weight.mul_(1.0)


def replace(trained: Trained) -> None:
    trained.model[1].running_mean = torch.zeros(3)


def move(trained: Trained) -> None:
    trained.model[0].weight.data = trained.model[0].weight.data.clone()


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda trained: trained.optimizer.step(), "its optimizer had begun the next step"),
        (lambda trained: trained.model.load_state_dict(trained.model.state_dict()), "its optimizer had begun"),
        (write, "code other than an optimizer has written"),
        (replace, "the tensors of its modules were replaced"),
        (move, "the tensors of its modules were replaced"),
    ],
)
def test_a_write_is_found(act: Any, why: str) -> None:
    trained = Trained()
    act(trained)
    assert trained.whole.hold().startswith(why)


def test_a_large_value_that_is_written_is_found() -> None:
    trained = Trained(large={"x": torch.zeros(1 << 15)})
    trained.state["large"]["x"] += 1
    assert trained.whole.hold().startswith("code other than an optimizer")


def test_the_next_end_of_a_step_makes_it_whole_again_with_what_there_is_then() -> None:
    trained = Trained()
    trained.train()
    trained.model.append(torch.nn.Linear(1, 1))
    trained.whole.note(2, trained.state | {"more": 3})
    assert trained.whole.hold() == ""
    assert (trained.taken()["stagereg.step"], trained.taken()["more"]) == (2, 3)


class Counting(list[int]):
    """A position in data of a kind that does not follow from others'."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Extra(torch.nn.Module):
    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None: ...


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Counting(), "the data loader state of 'more' differs"),
        (torch.optim.Adam([torch.zeros(1)], capturable=True), "an optimizer with capturable=True"),
        (Extra(), "the state of a module has values other than plain tensors"),
    ],
)
def test_what_can_be_taken_at_the_end_of_a_step_only_is_never_whole(value: Any, why: str) -> None:
    assert Trained(more=value).whole.hold().startswith(why)


def test_names_of_parameters_are_as_a_save_finds_them() -> None:
    bias, names = torch.nn.Parameter(torch.zeros(2)), ParameterNames()
    optimizer = torch.optim.SGD([bias], 0.1, momentum=0.9)
    whole = StepSnapshot(names)
    bias.grad = torch.ones(2)
    optimizer.step()
    whole.note(1, {"bias": bias, "optimizer": optimizer})
    whole.hold()
    assert [*whole.take(0, 1)["optimizer"]["state"]] == ["bias"]


class Counter:
    """An object with a state of its own, in memory of NumPy."""

    def __init__(self, items: int = 3) -> None:
        self.count, self.x = 0, numpy.zeros(items)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "x": torch.from_numpy(self.x)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def add(self) -> None:
        self.count += 1
        self.x += 1


def test_what_a_step_writes_before_its_optimizer_is_as_it_was() -> None:
    counters, array, listed, inner = [Counter() for _ in range(4)], numpy.zeros(30_000), torch.zeros(3), {"n": [0]}
    batch_norm = torch.nn.BatchNorm1d(3)
    trained = Trained(
        object=counters[0],
        ranks=per_rank(counters[1]),
        objects=[counters[2]],
        nested={"a": [per_rank(counters[3]).value]},
        array=torch.from_numpy(array),
        listed=per_rank([listed]),
        module=per_rank(batch_norm),
        inner=inner,
    )
    for each in counters:
        each.add()
    array += 1
    listed += 1
    inner["n"].append(1)
    batch_norm(torch.ones(4, 3))
    assert trained.whole.hold() == ""
    taken = trained.taken()
    found = [taken["object"], taken["ranks.rank0"], taken["objects"][0], taken["nested"]["a"][0]]
    assert [(each["count"], each["x"].tolist()) for each in found] == [(0, [0.0] * 3)] * 4
    assert not taken["array"].any()
    assert not taken["listed.rank0"][0].any()
    assert not taken["module.rank0"]["running_mean"].any()
    assert taken["inner"] == {"n": [0]}


class Slow(Counter):
    def state_dict(self) -> dict[str, Any]:
        ends = time.thread_time() + 0.02
        while time.thread_time() < ends:
            pass
        return super().state_dict()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Slow(), "takes"),
        (Counter(1 << 20), "NumPy tensors"),
        ([[0]] * 2000, "2,000 items"),
        ([0] * 140_000, "140,000"),
    ],
)
def test_what_cannot_be_noted_at_each_step_is_an_error(value: Any, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        Trained(value=value)


def test_a_write_into_a_large_tensor_of_a_container_is_found() -> None:
    large = torch.zeros(1 << 15)
    trained = Trained(large=[{"x": large}])
    assert trained.whole.hold() == ""
    large += 1
    with pytest.raises(CheckpointError):
        trained.whole.expect_unchanged()


def test_a_closed_checkpointer_observes_no_step_of_an_optimizer_and_keeps_no_state(tmp_path: Path) -> None:
    """Although the program still has the checkpointer, as after a ``with`` block."""
    gc.collect()
    before = {*BEFORE_STEPS._hooks}
    gc.disable()
    try:
        checkpointer = stagereg.Checkpointer(str(tmp_path), every=1)
        model = torch.nn.Linear(2, 2)
        checkpointer.maybe_save(1, {"model": model})
        assert {*BEFORE_STEPS._hooks} > before
        checkpointer.close()
        assert {*BEFORE_STEPS._hooks} == before
        [saver] = [each for each in checkpointer._extensions.all if each.name == "emergency saver"]
        assert (saver._state, saver._whole._seen, saver._whole._ends) == ({}, None, [])
    finally:
        gc.enable()


def test_a_snapshot_that_is_held_for_a_save_is_not_closed() -> None:
    whole, model = StepSnapshot(ParameterNames()), torch.nn.Linear(2, 2)
    whole.note(1, {"model": model})
    whole.hold()
    assert not whole.close()
    assert whole._seen is not None


def test_a_part_of_a_larger_tensor_is_noted_as_one() -> None:
    assert is_split(Notes().of(part_of(WHOLE, [range(ROWS)])))
