"""A save in the background is written by itself, and threads take short turns meanwhile."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

import stagereg.checkpoint.save.committing as committing
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.save.scheduling import short_turns

LONG_S = 60.0


def test_a_save_nobody_waits_for_is_written_all_the_same(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(3)})
        until = time.monotonic() + LONG_S
        while not (tmp_path / "latest").exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert (tmp_path / "latest").exists()


def test_threads_take_short_turns_while_a_save_is_written_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.setswitchinterval(0.005)  # a save of another test may hang, and have its turns
    before, seen, policies = sys.getswitchinterval(), [], []

    def look(_: str) -> None:
        seen.append(sys.getswitchinterval())
        policies.append(os.sched_getscheduler(0))

    monkeypatch.setattr(committing, "failpoint", look)
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(2)})
        checkpointer.wait()
    assert seen[0] < before / 10
    assert sys.getswitchinterval() == before
    assert set(policies) == {os.SCHED_BATCH}, "nor does it take a core from the thread that trains"
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_turn_that_the_program_sets_during_a_save_stays() -> None:
    before = sys.getswitchinterval()
    try:
        with short_turns():
            sys.setswitchinterval(0.01)
        assert sys.getswitchinterval() == pytest.approx(0.01)
        sys.setswitchinterval(0.0001)
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(0.0001, rel=0.1)
    finally:
        sys.setswitchinterval(before)
