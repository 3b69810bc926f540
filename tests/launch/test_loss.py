"""After a loss what has registered saves once, for a bounded time; and not where there is no use in it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore

from stagereg.errors import LaunchError
from stagereg.launch.loss import AfterLoss, Loss, of_process
from stagereg.launch.run_store import RunStore

NOTICE_S = 0.2


class Saves:
    def __init__(self, act: Any = lambda told: "All is saved.") -> None:
        self.act, self.told = act, list[Loss]()

    def save_after_loss(self, told: Loss) -> str:
        self.told.append(told)
        return str(self.act(told))


def after_loss(meet: Any = None) -> tuple[AfterLoss, RunStore]:
    run = RunStore(HashStore(), 0, 3)
    run.meet = meet or (lambda limit_s: run._store)  # type: ignore[method-assign]
    run.lost_ranks = lambda: frozenset([1])  # type: ignore[method-assign]
    return AfterLoss(run, 0, 3, NOTICE_S), run


def test_it_saves_once_and_all_who_ask_hear_of_it() -> None:
    (after, run), saves = after_loss(), Saves()
    after.expect(saves)
    with of_process(after):
        assert [after.save(), after.save()] == ["All is saved."] * 2
        after.await_saved()
    [told] = saves.told
    assert (told.rank, told.world_size, told.lost()) == (0, 3, {1})
    assert run.saved == "All is saved."


def test_what_is_gone_saves_nothing() -> None:
    after, _ = after_loss()
    after.expect(Saves())
    assert after.save() == ""


def test_nothing_is_saved_where_the_cause_is_known() -> None:
    (after, run), saves = after_loss(), Saves()
    after.expect(saves)
    run.set("cause is known", True)
    assert (after.save(), saves.told) == ("", [])


def hang(*_: object) -> None:
    threading.Event().wait(30)


def fail(*_: object) -> None:
    raise DistNetworkError("failed to recv, got 0 bytes\nException raised from recvBytes")


def refuse(*_: object) -> None:
    raise LaunchError("it is gone.")


@pytest.mark.parametrize(
    ("meet", "act", "why"),
    [
        (hang, None, "no store of this run answers."),
        (refuse, None, "it is gone."),
        (None, hang, "that has taken longer than 0.6 s."),
        (None, fail, "the store of this run is gone."),
    ],
)
def test_what_hangs_or_fails_costs_a_bounded_time(meet: Any, act: Any, why: str) -> None:
    (after, _), saves = after_loss(meet), Saves(act)
    after.expect(saves)
    assert after.save() == f"Those who are left have not saved: {why}"
