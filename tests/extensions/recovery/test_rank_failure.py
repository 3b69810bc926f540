"""After a rank failure what has registered saves once, for a bounded time; and not if that is of no use."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore, PrefixStore, TCPStore

import stagereg.base.rank_failures as rank_failures
import stagereg.extensions.recovery.rank_failure as rank_failure
from stagereg.base.rank_failures import responding
from stagereg.errors import LaunchError
from stagereg.extensions.recovery.rank_failure import EmergencySave, RankFailure
from stagereg.launch.run_store import RunStore

TIMEOUT_S, LIMIT_S = 0.2, 60.0
CONNECT = rank_failure.connect


class Saves:
    def __init__(self, act: Any = lambda told: "All is saved.") -> None:
        self.act, self.told = act, list[RankFailure]()

    def save(self, told: RankFailure) -> str:
        self.told.append(told)
        return str(self.act(told))


@pytest.fixture(autouse=True)
def no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in this process has no second connection."""
    monkeypatch.setattr(rank_failure, "connect", lambda run, limit_s: run.of_attempt)


def after_failure() -> tuple[EmergencySave, RunStore]:
    run = RunStore(HashStore(), 0, 3)
    after = EmergencySave(run, 0, 3, TIMEOUT_S)
    after.failed_ranks = lambda: {1: "(process 1 on here): gone"}  # type: ignore[method-assign]
    return after, run


def test_it_saves_once_and_all_who_ask_hear_of_it() -> None:
    (after, _), saves = after_failure(), Saves()
    after.expect(saves.save)
    assert not rank_failures.response().is_expected()
    with responding(after):
        assert rank_failures.response().is_expected()
        assert [after.save(), after.save()] == ["All is saved."] * 2
        rank_failures.response().await_saved()
    assert not rank_failures.response().is_expected()
    [told] = saves.told
    assert (told.rank, told.world_size, [*told.failed()]) == (0, 3, [1])
    assert (told.is_of("process 1 on here"), told.is_of("process 11 on here")) == (True, False)
    assert after.saved == "All is saved."


def test_what_is_gone_saves_nothing() -> None:
    after, _ = after_failure()
    after.expect(Saves().save)
    assert after.save() == ""


def test_what_is_withdrawn_saves_nothing_and_withdraws_nothing_of_others() -> None:
    (after, _), first, second = after_failure(), Saves(), Saves()
    with responding(after):
        for each in (first, second):
            rank_failure.expect(each.save)
        rank_failure.withdraw(first.save)
        assert after.is_expected()
        rank_failure.withdraw(second.save)
        assert (after.is_expected(), after.save(), second.told) == (False, "", [])


def test_nothing_is_saved_where_the_cause_is_known() -> None:
    (after, run), saves = after_failure(), Saves()
    after.expect(saves.save)
    run.set("cause is known", True)
    assert (after.save(), saves.told) == ("", [])


def hang(*_: object) -> None:
    threading.Event().wait(30)


def fail(*_: object) -> None:
    raise DistNetworkError("failed to recv, got 0 bytes\nException raised from recvBytes")


def refuse(*_: object) -> None:
    raise LaunchError("it is gone.")


@pytest.mark.parametrize(
    ("connect", "act", "why"),
    [
        (hang, None, "the rendezvous store of this run does not answer."),
        (refuse, None, "it is gone."),
        (None, hang, "the emergency save took longer than 0.6 s."),
        (None, fail, "the rendezvous store of this run has failed."),
    ],
)
def test_what_hangs_or_fails_costs_a_bounded_time(
    connect: Any, act: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if connect is not None:
        monkeypatch.setattr(rank_failure, "connect", connect)
    (after, _), saves = after_failure(), Saves(act)
    after.expect(saves.save)
    assert after.save() == f"The surviving ranks did not save: {why}"


def test_a_failure_is_waited_for_where_the_store_of_the_run_went_first() -> None:
    (after, run), saves, looks = after_failure(), Saves(), [0]

    def failed() -> dict[int, str]:
        looks[0] += 1
        return {1: "gone"} if looks[0] > 3 else {}

    after.failed_ranks, run.get = failed, fail  # type: ignore[method-assign, assignment]
    after.expect(saves.save)
    after.await_saved()
    assert (after.saved, len(saves.told)) == ("All is saved.", 1)


def test_a_store_that_is_gone_is_found_at_once() -> None:
    """Torch's own connection is tried for as long as the store may be late."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    late = timedelta(seconds=300)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=late)
    run = RunStore(PrefixStore("stagereg", client), 1, 2)
    assert CONNECT(run, LIMIT_S).check(["hub"]) is False
    del server
    with pytest.raises(LaunchError, match=r"store of this run has failed.*next start resumes"):
        CONNECT(run, LIMIT_S)


def test_an_error_whose_text_is_not_utf_8_is_reported_once() -> None:
    run = RunStore(HashStore(), 0, 2)
    text = "no labels in /data/shard-\udcff.bin"  # the name of a file
    assert [run.is_first(text), run.is_first(text), run.is_first("another")] == [True, False, True]
