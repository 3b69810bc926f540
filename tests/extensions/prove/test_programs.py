"""The healthy programs resume bit for bit, and each fault changes the results of the resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .cases import FAULTS, HEALTHY, Case, mostly_slow, results

KILL = "--watch=kill"
REFUSED = {"momentum on one rank", "bit flipped after the restore"}
"""Ranks differ after the restore, and the next save is refused."""


def run(case: Case, folder: Path) -> tuple[list[Any], list[Any]]:
    """Return the results of a run of twelve steps, and the results of a run that resumed from step 8."""
    killed = KILL in case.arguments
    alive = Case(case.program, tuple(each for each in case.arguments if each != KILL), case.ranks)
    assert alive.run(folder / "straight", 12, folder / "results") == 0
    assert case.run(folder / "run", 12 if killed else 8) == (-9 if killed else 0)
    code = case.run(folder / "run", 12, folder / "resumed", ranks=case.resumed_ranks)
    size = 2 if case.program == "uneven" else case.ranks
    straight = results(folder / "results", size)
    return straight, [] if code else results(folder / "resumed", case.resumed_ranks or size)


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.numpy().tobytes() == right.numpy().tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


@pytest.mark.parametrize("name", mostly_slow(HEALTHY, "AdamW and dropout"))
def test_a_healthy_program_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    straight, resumed = run(HEALTHY[name], tmp_path)
    assert equal(straight, resumed)


@pytest.mark.parametrize("name", mostly_slow(FAULTS, "NumPy generator"))
def test_a_fault_changes_the_results_of_the_resumed_run(name: str, tmp_path: Path) -> None:
    straight, resumed = run(FAULTS[name], tmp_path)
    assert bool(resumed) != (name in REFUSED)
    assert not equal(straight, resumed)


@pytest.mark.slow
def test_a_global_batch_that_is_counted_in_samples_stays_the_same_on_another_world_size(tmp_path: Path) -> None:
    straight, resumed = run(Case("resharded", ranks=2, resumed_ranks=1), tmp_path)
    assert sorted(straight[0]["used"][-16:] + straight[1]["used"][-16:]) == resumed[0]["used"]
