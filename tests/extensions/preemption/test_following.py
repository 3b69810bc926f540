"""A rank that has left its loop exits with the others, after the step that they save."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest

import stagereg.extensions.preemption.consensus as preemption_consensus
from stagereg import Checkpointer
from stagereg.errors import Preempted
from stagereg.testing import run_ranks
from tests.checkpoint.ranks.test_requests import LENGTHS, Run


def preempted(rank: int, world_size: int, root: str, mode: str | None) -> int:
    run = Run(rank)
    each_step = mock.patch.object(preemption_consensus, "_EVERY_S", 0.0)
    try:
        with each_step, Checkpointer(root, every=1000) as checkpointer:
            checkpointer.restore(run.state)
            with run.join(mode):
                for step, x in enumerate(run.batches, 1):
                    if rank == 0 and step == LENGTHS[1] + 1:  # rank 1 has left
                        os.kill(os.getpid(), signal.SIGTERM)
                        while not any(checkpointer.preemption.signal_flags()):
                            time.sleep(0.001)
                    run.step(x)
                    checkpointer.maybe_save(step, run.state)
    except Preempted as error:
        return error.step
    return -1


@pytest.mark.parametrize("mode", ["torch", "counted"])
def test_ranks_that_left_the_loop_leave_with_the_others(tmp_path: Path, mode: str) -> None:
    steps = set(run_ranks(preempted, 3, args=(str(tmp_path), mode), timeout_s=60))
    assert len(steps) == 1
    assert steps <= {4, 5, 6}
    assert Path(tmp_path / f"step-{steps.pop():08d}").is_dir()
