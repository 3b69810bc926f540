"""``stagereg prove`` finds each fault, in the first step that it changes, and names the kind of the difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cases import FAULTS, mostly_slow, prove, record

FIRST = {
    "sampler restarts its epoch": (9, "data"),
    "loader fetches ahead": (9, "data"),
    "loader draws its seed again": (8, "random numbers"),
    "NumPy generator": (8, "random numbers"),
    "Python generator": (8, "random numbers"),
    "torch generator": (8, "random numbers"),
    "seeded again": (8, "random numbers"),
    "scheduler stepped twice": (8, "schedule"),
    "weight decay of the config": (8, "schedule"),
    "learning rate of the config": (8, "schedule"),
    "warm-up by a counter": (8, "schedule"),
    "step repeated": (9, "step"),
    "step skipped": (9, "step"),
    "optimizer state swapped": (9, "parameter"),
    "optimizer state swapped if latest": (9, "parameter"),
    "average not restored": (8, "parameter"),
    "average not saved": (8, "parameter"),
    "copied average not saved": (8, "parameter"),
    "scale of the loss": (8, "loss scale"),
    "accumulation counter": (9, "step"),
    "accumulated gradients": (9, "gradient"),
    "annealed weight": (9, "gradient"),
    "annealed temperature": (9, "gradient"),
    "curriculum stage": (8, "random numbers"),
    "weights untied": (8, "parameter"),
    "optimizer of dead tensors": (9, "data"),
    "best model in place of the newest": (8, "parameter"),
    "evaluation mode": (9, "random numbers"),
    "layers frozen again": (9, "gradient"),
    "scheduler not saved": (8, "schedule"),
    "buffer that is not persistent": (8, "buffer"),
    "replay buffer": (8, "random numbers"),
    "normalizer of observations": (9, "value"),
    "momentum on one rank": (8, "value"),
    "buffers of another rank": (8, "buffer"),
    "generators of another rank": (8, "random numbers"),
    "bit flipped before the save": (8, "parameter"),
    "bit flipped after the restore": (8, "parameter"),
    "data of another world size": (9, "data"),
}
"""The step and the kind of the first difference; in step 8 the restored state differs."""

QUICK = "NumPy generator", "average not saved", "annealed weight"


@pytest.mark.parametrize("name", mostly_slow(FAULTS, *QUICK))
def test_a_fault_is_found_in_the_first_step_that_it_changes(name: str, tmp_path: Path) -> None:
    case = FAULTS[name]
    record(case, tmp_path / "run")
    code, found = prove(case, tmp_path / "run")
    assert (code, found["verdict"]) == (1, "refuted")
    assert (found["first"]["step"], found["first"]["kind"]) == FIRST[name]
