"""Work in the background begins while the training thread is in a backward pass, or when somebody waits for it."""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg.checkpoint.save.backward as backward
import stagereg.checkpoint.save.committing as committing
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.options import Failure
from stagereg.checkpoint.save.backward import short_turns, wait_for_backward

LONG_S = 60.0


class Held(torch.autograd.Function):
    """Holds a pass, deep inside of hooks of modules, until it is let go."""

    entered, let_go = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, which: str) -> torch.Tensor:
        ctx.which = which
        if which == "forward":
            Held.hold()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.which == "backward":
            Held.hold()
        return grads[0], None

    @classmethod
    def hold(cls) -> None:
        cls.entered.set()
        assert cls.let_go.wait(LONG_S)


@pytest.mark.parametrize(("which", "begins"), [("forward", False), ("backward", True)])
def test_work_begins_in_a_backward_pass(which: str, begins: bool) -> None:
    began, hurried = threading.Event(), threading.Event()
    Held.entered.clear(), Held.let_go.clear()
    caller = threading.get_ident()
    wait_for_backward(caller, hurried, 0.1)  # the first one has the engine say what it does

    def work() -> None:
        Held.entered.wait(LONG_S)
        wait_for_backward(caller, hurried, LONG_S)
        began.set()

    def let_go() -> None:
        assert Held.entered.wait(LONG_S)
        seen.append(began.wait(LONG_S if begins else 0.2))
        Held.let_go.set()

    seen: list[bool] = []
    threads = [threading.Thread(target=work), threading.Thread(target=let_go)]
    for thread in threads:
        thread.start()
    x = torch.ones(3, requires_grad=True)
    Held.apply(x, which).sum().backward()
    hurried.set()
    for thread in threads:
        thread.join(LONG_S)
    assert seen == [begins]
    assert began.is_set(), "by itself or in a hurry"


class Watch:
    """An event that is set after so many waits, which take no time and are counted."""

    def __init__(self, set_after: int) -> None:
        self.waits, self.set_after = 0, set_after

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        return self.waits > self.set_after


@pytest.mark.parametrize(("limit_s", "set_after", "waits"), [(0.0, 10**9, 1), (LONG_S, 0, 1), (LONG_S, 3, 4)])
def test_nobody_waits_longer_than_the_limit_or_in_a_hurry(limit_s: float, set_after: int, waits: int) -> None:
    watch: Any = Watch(set_after)
    wait_for_backward(threading.get_ident(), watch, limit_s)  # this thread is in no backward pass
    assert watch.waits == waits


def test_a_save_that_is_waited_for_begins_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committing, "_CALM_S", LONG_S)
    state = {"x": torch.ones(3)}
    with Checkpointer(str(tmp_path), failure=Failure(timeout=datetime.timedelta(seconds=LONG_S / 2))) as checkpointer:
        for step in range(5):  # the third one waits for the first
            checkpointer.save(step, state)
        checkpointer.wait()
        assert checkpointer.stats.saves == 5


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
    monkeypatch.setattr(committing, "wait_for_backward", lambda *_: seen.append(sys.getswitchinterval()))
    monkeypatch.setattr(committing, "failpoint", lambda _: policies.append(os.sched_getscheduler(0)))
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


def test_a_backward_pass_that_fails_or_is_within_another_has_ended_as_well() -> None:
    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            inner = torch.ones(1, requires_grad=True)
            inner.backward()
            counts.append(backward._in_backward.count(threading.get_ident()))
            raise ValueError("of the pass")

    counts: list[int] = []
    wait_for_backward(threading.get_ident(), Watch(0), LONG_S)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of the pass"):
        Nested.apply(torch.ones(3, requires_grad=True)).sum().backward()
    assert counts == [1]
    assert backward._in_backward.count(threading.get_ident()) == 0
