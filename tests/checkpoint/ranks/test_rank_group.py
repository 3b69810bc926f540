"""A round trip of ranks ends on all of them, whatever rank 0 fails with as it answers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.errors import CheckpointError
from stagereg.testing.ranks import run_ranks


def fails_as_it_answers(rank: int, world_size: int, kind: type[BaseException]) -> tuple[str, str, str]:
    def answer(posts: list[int]) -> Any:
        raise kind(f"of {posts}")

    ranks = RankGroup()
    try:
        ranks.round_trip("Nothing was asked", lambda: rank, answer)
    except (CheckpointError, KeyboardInterrupt) as error:
        ended = type(error).__name__, str(error), type(error.__cause__).__name__
    assert ranks.run_on_all("The ranks do not meet again", lambda: rank) == [0, 1]
    return ended


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_rank_0_fails_with_is_raised_on_all_and_is_itself_on_rank_0(kind: type[BaseException]) -> None:
    first, second = run_ranks(fails_as_it_answers, nproc=2, args=(kind,), timeout_s=60)
    assert second[0] == "CheckpointError"
    assert "of [0, 1]" in second[1]
    if kind is KeyboardInterrupt:
        assert first[:2] == ("KeyboardInterrupt", "of [0, 1]")
    else:
        assert first == ("CheckpointError", second[1], "ValueError")


class Gone:
    """A store that does not answer."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of the store was called")


def is_ended(rank: int, world_size: int) -> str:
    ranks = RankGroup()
    if rank == 1:
        time.sleep(0.5)  # does not come to what the other one waits for
        ranks.end("lost rank 0")
        return ""
    ranks._store, ending = Gone(), threading.Timer(0.2, ranks.end, ["lost rank 1"])
    ending.start()
    with pytest.raises(CheckpointError) as caught:
        ranks.run_on_all("Nothing was saved", lambda: rank)
    return str(caught.value)


def test_an_exchange_that_is_ended_fails_for_that_reason_and_asks_nobody() -> None:
    first, _ = run_ranks(is_ended, nproc=2, timeout_s=60)
    assert first == "Nothing was saved: lost rank 1"
