"""Copies that do not keep up are a warning, once, and mended ones a line."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from stagereg import build
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.store.open_store import open_store
from stagereg.checkpoint.tiers.lag import CopyLag
from stagereg.checkpoint.tiers.near import NearCopies
from stagereg.checkpoint.tiers.part import Part
from stagereg.checkpoint.tiers.peer import Peer
from stagereg.testing import run_ranks

from ...support.programs import comes_true


def test_each_lag_is_one_warning_and_one_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lag = CopyLag()
    lag.note_copied(None)
    for _ in range(20):
        lag.note_late("copies have failed")
    lag.note_copied(40)
    for _ in range(20):
        lag.note_late("rank 1 still sending copies")
    lag.note_copied(90)
    lag.note_copied(100)
    texts = [each.getMessage() for each in caplog.records]
    assert [each.levelname for each in caplog.records] == ["WARNING", "INFO", "WARNING", "INFO"]
    assert "no step of the tier is copied yet, and 5 saves have begun since: copies have failed." in texts[0]
    assert "step 40 is the newest that is copied in the tier, and 5 saves have begun since: rank 1 still" in texts[2]
    assert [each.rpartition(": ")[2] for each in texts[1::2]] == ["step 40 is copied.", "step 90 is copied."]


def test_a_few_slow_copies_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lag = CopyLag()
    for step in range(20):
        for _ in range(4):
            lag.note_late("rank 1 still sending copies")
        lag.note_copied(step)
    assert not caplog.records


def save_while_no_copy_is_made(rank: int, world_size: int, root: str, failing: int) -> list[str]:
    """Save on two machines, which are two folders; the first so many copies fail. Return what was said of it."""
    lines, handler = list[str](), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("stagereg.checkpoint.tiers.lag")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    tier = build("tier", "disk", dir=f"{root}/machine{rank}")
    os.makedirs(f"{root}/store", exist_ok=True)
    near = NearCopies(tier, RankGroup(), open_store(f"{root}/store"))
    for step in range(1, 10):
        refused = mock.Mock(side_effect=OSError("it is gone"))
        with mock.patch.object(Peer, "put", refused) if step <= failing else contextlib.nullcontext():
            save = near.begin_save(step)
            assert save is not None
            os.makedirs(near.folder.directory(save), exist_ok=True)
            near.end_save(Part(save, rank, {}))
            assert comes_true(lambda: not near._threads.busy, 30)
            dist.barrier()
    near.close()
    return lines


def test_a_run_whose_copies_fail_says_so_and_when_they_are_made_again(tmp_path: Path) -> None:
    said, other = run_ranks(save_while_no_copy_is_made, 2, args=(str(tmp_path), 7))
    warned, mended = said
    assert "no step of the tier is copied yet, and 5 saves have begun since: copies have failed." in warned
    assert mended.endswith("keep up again: step 8 is copied.")
    assert other == []
