"""A rank that dies or freezes in an exchange of a save or a restore is named on the others, in seconds."""

from __future__ import annotations

import datetime
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import stagereg.checkpoint.store.failpoints as failpoints
import stagereg.testing.ranks as harness
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.load.loading import Loading
from stagereg.checkpoint.options import Restore
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.errors import CheckpointError
from stagereg.testing import RankFailure, run_ranks

SECONDS = 30.0
"""Less than any time-out of a save or a restore."""


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def save_or_restore(checkpointer: Checkpointer, state: dict[str, Any], saves: bool) -> None:
    if saves:
        checkpointer.save(2, state)
        checkpointer.wait()
    checkpointer.restore(state)


def on_three_ranks(rank: int, world_size: int, root: str, dying: int, where: str, read: str = "auto") -> str:
    checkpointer = Checkpointer(root, restore=Restore(read=read))
    state = {"x": torch.ones(20 << 18), f"own{rank}": rank}
    checkpointer.save(1, state)
    checkpointer.wait()
    if rank == dying:
        failpoints.watch(lambda name: die() if name == where else None)
        for owner in (RankGroup, Loading):
            if hasattr(owner, where):
                setattr(owner, where, die)
    began = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        save_or_restore(checkpointer, state, saves=where == "flushed")
    assert time.monotonic() - began < SECONDS
    checkpointer.close()
    return str(raised.value)


@pytest.mark.parametrize(
    ("dying", "where", "failing"),
    [
        (2, "round_trip", "Nothing was restored from ROOT: "),
        (0, "assign", "ROOT/step-00000001 could not be restored: "),
        (2, "flushed", "Step 2 was not saved: "),
    ],
)
def test_a_rank_that_dies_in_an_exchange_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dying: int, where: str, failing: str
) -> None:
    monkeypatch.setattr(harness, "_LINGER_S", SECONDS)
    with pytest.raises(RankFailure, match=f"1 of 3 ranks failed: rank {dying}") as raised:
        run_ranks(on_three_ranks, 3, args=(str(tmp_path), dying, where))
    texts = raised.value.returned
    assert texts.keys() == {0, 1, 2} - {dying}
    expected = f"{failing.replace('ROOT', str(tmp_path))}rank {dying} terminated, or the connection was lost: check the"
    assert all(text.startswith(expected) for text in texts.values()), texts


def come_late(rank: int, world_size: int, hangs: bool) -> str:
    ranks = RankGroup()
    ranks.limit = datetime.timedelta(seconds=2)
    if hangs and rank == 0:
        hang = mock.Mock(side_effect=lambda *_: threading.Event().wait(60))
        ranks._store = mock.Mock(check=hang, compare_set=hang)
    if rank == 2:
        dist.barrier()
        return ""
    try:
        ranks.run_on_all("Nothing", int)
    except CheckpointError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def test_a_rank_that_does_not_come_is_named_on_all_when_the_time_is_up() -> None:
    first, second, _ = run_ranks(come_late, 3, args=(False,))
    assert first == second
    assert re.match(r"Nothing: rank 2 did not reach this exchange within 2(\.\d+)? s, and may hang", first)


def test_a_store_that_hangs_does_not_keep_a_rank_from_giving_up() -> None:
    assert run_ranks(come_late, 3, args=(True,))[0].startswith(
        "Nothing: a rank, perhaps the one with the rendezvous st"
    )


def agree_late(rank: int, world_size: int) -> list[int]:
    ranks = RankGroup()
    if rank == 1:
        dist.barrier()
    pending = ranks.max_async([0.0])
    if rank == 0:
        with pytest.raises(CheckpointError, match="could not agree on a step in 0:00:00"):
            pending(0.2)
        dist.barrier()
    return ranks.run_on_all("Nothing", lambda: rank)


def test_ranks_that_did_not_wait_for_a_slow_one_still_save_with_it() -> None:
    assert run_ranks(agree_late, 2) == [[0, 1], [0, 1]]
