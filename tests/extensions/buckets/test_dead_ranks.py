"""A rank that dies while it reads for the others is named on them, in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

import stagereg.testing.ranks as harness
from stagereg.extensions.buckets.shared_read import SharedRead
from stagereg.testing import RankFailure, run_ranks

from ...checkpoint.promises.test_dead_ranks import SECONDS, die, on_three_ranks


def reading_once(rank: int, world_size: int, root: str) -> str:
    if rank == 1:
        SharedRead._place = die  # type: ignore[method-assign]
    return on_three_ranks(rank, world_size, root, 1, "_place", "once")


@pytest.mark.slow
def test_a_rank_that_dies_while_it_reads_for_others_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "_LINGER_S", SECONDS)
    with pytest.raises(RankFailure, match="1 of 3 ranks failed: rank 1") as raised:
        run_ranks(reading_once, 3, args=(str(tmp_path),))
    expected = (
        f"{tmp_path}/step-00000001 could not be restored: rank 1 terminated, or the connection was lost: check the"
    )
    assert [text.startswith(expected) for text in raised.value.returned.values()] == [True, True]
