"""A checkpoint never holds a state that the program wrote while it was copied; such a save is made again."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg.stagers.deferred_copy as deferred_copy
from stagereg import Checkpointer
from stagereg.errors import WrittenWhileSavedError
from stagereg.stagers.deferred_copy import DeferredCopy
from stagereg.stagers.overlapped import OverlappedStager
from stagereg.testing import run_ranks
from tests.support.reading import opened

WAIT_S = 60.0
ROWS, WIDTH = 20_000, 64


class Codebook(torch.nn.Module):
    """A layer of the program's own, which writes its weight in the forward pass from some step on."""

    def __init__(self, writes_from: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(ROWS, WIDTH))
        self.bias = torch.nn.Parameter(torch.rand(ROWS))
        self.writes_from, self.steps = writes_from, 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps >= self.writes_from:
            with torch.no_grad():
                self.weight.index_copy_(0, rows, torch.full((len(rows), WIDTH), float(self.steps)))
        return self.weight[rows] + self.bias[rows, None]


class Run:
    """Trains a codebook, and knows the weight of each step."""

    def __init__(self, writes_from: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Codebook(writes_from)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.weights: dict[int, torch.Tensor] = {}

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randint(ROWS, (50,))).sum().backward()
        self.optimizer.step()
        self.weights[step] = self.model.weight.detach().clone()

    def train(self, checkpointer: Checkpointer, steps: range, state: dict[str, Any] | None = None) -> None:
        """Train, and save; the first write meets the save of the step before, which has ended after this step."""
        for step in steps:
            self.step(step)
            checkpointer.maybe_save(step, state or self.state)
            if step == self.model.writes_from:
                assert checkpointer._background.last.ends_by(time.monotonic() + WAIT_S)

    def checked(self, folder: Path | str) -> list[int]:
        """Return the steps of the checkpoints, which all hold the weight of their step."""
        found = []
        for name in sorted(each for each in os.listdir(folder) if each.startswith("step-")):
            with opened(f"{folder}/{name}", verify=True) as checkpoint:
                found.append(int(name.removeprefix("step-")))
                assert torch.equal(checkpoint["model.weight"], self.weights[found[-1]])
        return found


def test_a_save_that_met_a_write_is_made_again_at_a_later_step_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(writes_from=11)
    with caplog.at_level(logging.WARNING), Checkpointer(str(tmp_path), every=10, keep=9) as checkpointer:
        run.train(checkpointer, range(1, 41))
    again, *others = run.checked(tmp_path)
    assert again in (11, 12), "the save fails while step 11 ends"
    assert others == [20, 30, 40]
    [line] = [record.getMessage() for record in caplog.records if "was not saved" in record.getMessage()]
    assert "Step 10 was not saved" in line
    assert "'model.weight'" in line
    assert f"at the end of step {again}" in line


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "embedding_renorm_": lambda w: torch.embedding_renorm_(w, torch.randint(ROWS, (500,)), 0.5, 2.0),
    "e[i] = v": lambda w: w.__setitem__(int(torch.randint(ROWS, ())), torch.rand(WIDTH)),
    "clamp_ of .data": lambda w: w.data.clamp_(-0.5, 0.5),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_program_that_writes_a_parameter_right_after_each_save_loses_no_save(write: str, tmp_path: Path) -> None:
    run = Run(writes_from=1000)
    with Checkpointer(str(tmp_path), every=1, keep=20) as checkpointer:
        for step in range(1, 13):
            run.step(step)
            checkpointer.maybe_save(step, run.state)
            with torch.no_grad():
                WRITES[write](run.model.weight)
    assert run.checked(tmp_path) == list(range(1, 13))


def test_nothing_is_committed_before_the_copy_is_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_copy, "_STILL_S", 1000 * WAIT_S)
    run = Run(writes_from=1000)
    with Checkpointer(str(tmp_path), every=10, save_last=False) as checkpointer:
        for step in range(1, 11):
            run.step(step)
            checkpointer.maybe_save(step, run.state)
        [save] = checkpointer._background.last._under_way
        until = time.monotonic() + WAIT_S
        while not save.at.startswith("waiting for the proof"):
            assert time.monotonic() < until
            save.over.wait(0.01)
        assert run.checked(tmp_path) == []
        with torch.no_grad():
            run.model.weight[5] = 1.0  # as an operation that was running when the copy ended
        run.step(11)
        assert save.over.wait(WAIT_S)
        assert run.checked(tmp_path) == []
        checkpointer.maybe_save(12, run.state)
        run.weights[12] = run.weights[11]
    assert run.checked(tmp_path) == [12]


def two_ranks(rank: int, size: int, folder: str) -> list[int]:
    run = Run(writes_from=11 if rank == 1 else 1000, seed=rank)
    state = {f"model{rank}": run.model, f"optimizer{rank}": run.optimizer}
    with Checkpointer(folder, every=10, keep=9) as checkpointer:
        run.train(checkpointer, range(1, 31), state)
    found = []
    for name in sorted(each for each in os.listdir(folder) if each.startswith("step-")):
        with opened(f"{folder}/{name}", verify=True) as checkpoint:
            found.append(int(name.removeprefix("step-")))
            assert torch.equal(checkpoint[f"model{rank}.weight"], run.weights[found[-1]])
    return found


def test_all_ranks_save_again_at_one_step_if_one_rank_met_a_write(tmp_path: Path) -> None:
    one, other = run_ranks(two_ranks, 2, args=(str(tmp_path),), timeout_s=2 * WAIT_S)
    assert one == other
    assert one[0] in range(11, 21), "rank 0 has ended step 11 or a later one, as far as rank 1 lets it"
    assert one[-1] == 30


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies of the stager begin only while this event is set."""
    may_begin, run = threading.Event(), DeferredCopy.run
    may_begin.set()

    def held(copy: DeferredCopy) -> list[int]:
        assert may_begin.wait(WAIT_S)
        return run(copy)

    monkeypatch.setattr(DeferredCopy, "run", held)
    return may_begin


@pytest.mark.parametrize("ends", ["the block", "wait", "close"])
@pytest.mark.parametrize("saves", ["maybe_save", "save"])
def test_a_state_that_was_replaced_after_its_step_is_not_saved_as_that_step(
    ends: str, saves: str, tmp_path: Path, copies: threading.Event
) -> None:
    """Programs copy averaged weights into the model after the last step, to evaluate them."""
    run = Run(writes_from=1000)

    def train() -> None:
        with Checkpointer(str(tmp_path), every=5) as checkpointer:
            run.train(checkpointer, range(1, 10))
            checkpointer.wait()
            run.step(10)
            copies.clear()
            getattr(checkpointer, saves)(10, run.state)
            run.model.weight.data.fill_(7.0)
            copies.set()
            if ends != "the block":
                getattr(checkpointer, ends)()

    with pytest.raises(
        WrittenWhileSavedError, match=r"Step 10 was not saved.*'model\.weight'.*wait\(\).*pinned_cached"
    ):
        train()
    assert run.checked(tmp_path) == [5]


def test_a_save_that_was_discarded_before_the_last_step_is_made_again_with_the_last_step(
    tmp_path: Path, copies: threading.Event
) -> None:
    run = Run(writes_from=1000)
    with Checkpointer(str(tmp_path), every=10) as checkpointer:
        run.train(checkpointer, range(1, 10))
        copies.clear()
        run.train(checkpointer, range(10, 11))
        run.model.weight.data.fill_(7.0)
        copies.set()
        run.step(11)
        checkpointer.maybe_save(11, run.state)
    assert run.checked(tmp_path) == [11]


def test_a_program_that_calls_save_by_itself_saves_again_with_its_next_call(tmp_path: Path) -> None:
    run = Run(writes_from=4)
    with Checkpointer(str(tmp_path), every=10) as checkpointer:
        for step in range(1, 10):
            run.step(step)
            if step % 3 == 0:
                checkpointer.save(step, run.state)
    assert run.checked(tmp_path) == [6, 9]


@pytest.mark.parametrize("ends", ["wait", "close"])
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_discarded_save_of_a_state_that_trained_on_is_an_error(
    ends: str, has_optimizer: bool, tmp_path: Path
) -> None:
    run = Run(writes_from=4)
    if not has_optimizer:
        del run.state["optimizer"]
    checkpointer = Checkpointer(str(tmp_path), every=10)
    for step in range(1, 6):
        run.step(step)
        if step == 3:
            checkpointer.save(step, run.state)
    with pytest.raises(WrittenWhileSavedError, match=r"Step 3 was not saved.*'model\.weight'"):
        getattr(checkpointer, ends)()
    checkpointer.close()
    assert run.checked(tmp_path) == []


def test_a_save_that_fails_again_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OverlappedStager, "copy_at_once", lambda stager, tensors: None)
    monkeypatch.setattr(OverlappedStager, "_learn", lambda stager: None)
    run = Run(writes_from=51)

    def train() -> None:
        with Checkpointer(str(tmp_path), every=50) as checkpointer:
            for step in range(1, 200):
                run.step(step)
                checkpointer.maybe_save(step, run.state)

    with pytest.raises(WrittenWhileSavedError, match="was not saved"):
        train()
    assert run.checked(tmp_path) == []


def test_a_compiled_step_of_an_optimizer_is_announced_without_being_compiled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(writes_from=1000)
    step = torch.compile(lambda: run.optimizer.step(), backend="eager")
    with Checkpointer(str(tmp_path), every=1, keep=20) as checkpointer:
        for number in range(1, 13):
            run.model(torch.randint(ROWS, (50,))).sum().backward()
            step()
            run.weights[number] = run.model.weight.detach().clone()
            checkpointer.maybe_save(number, run.state)
    assert run.checked(tmp_path) == list(range(1, 13))
    assert "recompile_limit" not in caplog.text


class Lookahead(torch.optim.Optimizer):
    """A wrapper as it is often written, without the constructor of its base."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)


def wrapped(rank: int, size: int, folder: str) -> list[str]:
    run = Run(writes_from=1000)
    run.state["optimizer"] = Lookahead(run.optimizer)
    with Checkpointer(folder, every=1) as checkpointer:
        run.step(1)
        checkpointer.maybe_save(1, run.state)
    return sorted(os.listdir(folder))


def test_an_optimizer_without_hooks_is_saved_on_several_ranks(tmp_path: Path) -> None:
    for names in run_ranks(wrapped, 2, args=(str(tmp_path),), timeout_s=2 * WAIT_S):
        assert "step-00000001" in names
