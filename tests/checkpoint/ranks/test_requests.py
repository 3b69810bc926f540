"""What ranks do together: a rank that has left its loop saves with the others, and one that passes over it is named."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg import Checkpointer
from stagereg.errors import StageregError
from stagereg.testing import run_ranks

from ...support.reference import Case, Training, batch, difference, net

LENGTHS = (6, 3, 5)
CASE = Case(lengths=LENGTHS, last="scheduler")
EVERY = 2


class Run:
    """A model, its optimizer and schedule, and a loop that ranks leave when they run out of data."""

    def __init__(self, rank: int) -> None:
        self.model = DistributedDataParallel(net(CASE))
        self.training = Training(CASE, self.model.module)
        self.followers = [self.training.optimizer, self.training.scheduler]
        optimizer, schedule = self.followers
        self.state: dict[str, Any] = {"model": self.model, "optimizer": optimizer, "schedule": schedule, "taken": 0}
        self.batches = [batch(rank, 0, step) for step in range(LENGTHS[rank])]

    def join(self, mode: str | None, *others: Any) -> Any:
        joinables = [self.model, *(others or self.followers)]
        return stagereg.Join(joinables, timeout=20, mode=mode, loader=self.batches if mode == "planned" else None)

    def step(self, x: torch.Tensor) -> None:
        self.training.zero("start")
        self.model(x).square().sum().backward()
        self.training.finish()
        self.state["taken"] += 1


def followed(rank: int, root: str, mode: str | None, waits: bool) -> tuple[dict[int, Any], list[Any]]:
    run = Run(rank)
    seen = {}
    with Checkpointer(root, every=EVERY, keep=9) as checkpointer:
        checkpointer.restore(run.state)
        with run.join(mode):
            for step, x in enumerate(run.batches, 1):
                run.step(x)
                seen[step] = run.training.outcome()
                checkpointer.maybe_save(step, run.state)
                if waits:
                    checkpointer.wait()
    found = []
    for path in sorted(Path(root).glob("step-*")):
        with Checkpointer(root, resume=str(path)) as checkpointer:
            step = checkpointer.restore(run.state)
            found.append((step, run.training.outcome(), run.state["taken"]))
    return seen, found


def follow(rank: int, world_size: int, root: str, cases: list[tuple[str | None, bool]]) -> dict[Any, Any]:
    return {case: followed(rank, f"{root}/{case[0]}-{case[1]}", *case) for case in cases}


WAYS = [("torch", True), ("planned", True)]
OTHER_WAYS = [(None, False), ("counted", True), ("planned", False)]


@pytest.mark.parametrize("ways", [WAYS, pytest.param(OTHER_WAYS, marks=pytest.mark.slow)], ids=["ways", "others"])
def test_ranks_that_left_the_loop_save_with_those_in_it(tmp_path: Path, ways: list[tuple[str | None, bool]]) -> None:
    ranks = run_ranks(follow, 3, args=(str(tmp_path), ways), timeout_s=120)
    for case, (seen, _) in ranks[0].items():  # the rank that goes on longest
        for found in (each[case][1] for each in ranks):
            assert [(step, taken) for step, _, taken in found] == [(2, 2), (4, 4), (6, 6)], case
            for step, weights, _ in found:
                assert difference(weights, seen[step]) == 0.0, (case, step)


def raised(act: Any) -> tuple[str, float]:
    began = time.monotonic()
    try:
        act()
    except StageregError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def stale(rank: int, world_size: int, root: str) -> tuple[str, float]:
    run = Run(rank)

    def act() -> None:
        with Checkpointer(root, every=EVERY) as checkpointer:
            checkpointer.restore(run.state)
            with run.join(None, torch.optim.SGD(run.model.parameters(), 0.0)):
                for step, x in enumerate(run.batches, 1):
                    run.step(x)
                    checkpointer.maybe_save(step, run.state)
                    checkpointer.wait()

    return raised(act)


def test_stale_values_of_a_rank_that_left_are_refused(tmp_path: Path) -> None:
    for text, _ in run_ranks(stale, 3, args=(str(tmp_path),), timeout_s=60):
        assert "Step 4 was not saved: 'optimizer' is not the same on all ranks: " in text
        assert "its number of steps is 4 on rank 0, 3 on rank 1" in text
        assert "add the optimizer, the schedule or the function that steps them, as in Join([model, optimizer])" in text


def unknown(rank: int, world_size: int, root: str) -> tuple[str, float]:
    run = Run(rank)
    batches = [] if rank == 1 else run.batches

    def act() -> None:
        with Checkpointer(root, every=EVERY) as checkpointer, run.join(None):
            for step, x in enumerate(batches, 1):
                run.step(x)
                checkpointer.maybe_save(step, run.state)

    return raised(act)


def test_a_rank_without_data_or_state_says_what_to_do(tmp_path: Path) -> None:
    for text, _ in run_ranks(unknown, 3, args=(str(tmp_path),), timeout_s=60):
        assert "Call restore(state) before the loop, or loop over join.iterate(loader)." in text
