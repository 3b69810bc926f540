"""What contracts have in common: promises are listed and tried one by one, and each end of a trial is reported."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import threading

import pytest
import torch

import stagereg.testing
from stagereg.errors import BrokenPromiseError
from stagereg.testing import Contract, Outcome
from stagereg.testing.stager_trial import difference


class Small(Contract):
    timeout_s = 5.0

    def test_kept(self) -> None:
        """It is kept.

        This is for who reads on.
        """

    def test_broken(self) -> None:
        """It is broken."""
        self.broken("seen 3, not 4")

    def test_skipped(self) -> None:
        """It cannot be tried."""
        self.skipped("no such device")

    def test_odd(self) -> None:
        """It raises."""
        raise KeyError("w")

    def test_leaving(self) -> None:
        """It ends the process."""
        sys.exit("that was all")

    def helper(self) -> None:
        """No promise."""


class Larger(Small):
    test_skipped = None  # type: ignore[assignment]

    def test_broken(self) -> None:
        pass

    def test_more(self) -> None:
        """One more."""


def test_promises_are_test_methods_and_their_first_line() -> None:
    assert list(Small.promises().items())[:2] == [("test_kept", "It is kept."), ("test_broken", "It is broken.")]
    assert list(Small.promises()) == ["test_kept", "test_broken", "test_skipped", "test_odd", "test_leaving"]
    assert list(Larger.promises()) == ["test_kept", "test_broken", "test_odd", "test_leaving", "test_more"]
    assert Larger.promises()["test_broken"] == "It is broken."
    assert Larger.outcome("test_broken").kept is True


def test_every_end_of_a_trial_is_an_outcome() -> None:
    kept, broken, skipped, odd, leaving = map(Small.outcome, Small.promises())
    assert kept == Outcome("test_kept", "It is kept.", True, "")
    assert broken == Outcome("test_broken", "It is broken.", False, "seen 3, not 4")
    assert skipped == Outcome("test_skipped", "It cannot be tried.", None, "no such device")
    assert odd.kept is False
    assert re.match(r"KeyError: 'w' \(.*test_contract\.py:", odd.seen)
    assert "SystemExit: that was all" in leaving.seen


def test_an_interrupt_is_no_outcome_and_each_trial_a_fresh_one() -> None:
    seen = []

    class Interrupted(Contract):
        def test_it(self) -> None:
            seen.append(self)
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            Interrupted.outcome("test_it")
    assert seen[0] is not seen[1]


def test_a_bounded_call_ends_as_the_call_does_or_is_broken() -> None:
    assert Small().within(lambda: threading.current_thread() is threading.main_thread()) is False
    for call, error in ((lambda: 1 / 0, ZeroDivisionError), (sys.exit, SystemExit)):
        with pytest.raises(error):
            Small().within(call)
    never = threading.Event()
    with pytest.raises(BrokenPromiseError, match=r"did not return within 1 s\. It is at .* in wait$"):
        Small().within(never.wait, 1.0)
    never.set()


ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("copied", "source", "shown"),
    [
        (
            torch.ones(2, dtype=torch.float64),
            ONES,
            "not torch.float32. If the stager changes this on purpose, override expected(tensor, path)",
        ),
        (torch.ones(1), ONES, "has the shape (1,), not (2,)"),
        (torch.ones(2, 2).t(), torch.ones(2, 2), "has the strides (1, 2), not (2, 1)"),
        (ONES, torch.ones(2, requires_grad=True), "has the requires_grad False, not True"),
        (torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]), "1 of 2 elements of copy['a'] differ"),
        (ONES, torch.nn.Parameter(ONES), "is a Tensor, but the source is a Parameter"),
        ([1], (1,), "copy['a'] is a list, but the source is a tuple"),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}, "the keys of the copy['a'] are ['x', 'y'], not ['y', 'x']"),
        ([1, 2], [1], "the keys of the copy['a'] are [0, 1], not [0]"),
        ([{"b": 1}], [{"b": 2}], "copy['a'][0]['b'] is 1, not 2"),
    ],
)
def test_every_difference_of_a_copy_is_shown_with_its_path(copied: object, source: object, shown: str) -> None:
    assert shown in str(difference({"a": copied}, {"a": source}))


def test_a_faithful_or_expected_copy_has_no_difference() -> None:
    odd = {"nan": torch.tensor([float("nan"), -0.0]), "empty": torch.empty(0, 3), "one": torch.tensor(1)}
    state = {**odd, "t": torch.ones(2, 3).t(), "l": [odd, (1, None)], "p": torch.nn.Parameter(torch.ones(2))}
    assert difference(state, copy.deepcopy(state)) is None
    source, cast = torch.ones(2, 3).t(), torch.ones(2, 3, dtype=torch.bfloat16)

    def expected(x: torch.Tensor, path: str) -> torch.Tensor:
        return x.to(torch.bfloat16) if path.startswith("optimizer.state.0.") else x

    def inside(x: torch.Tensor) -> dict[str, object]:
        return {"model": source, "optimizer": {"state": {0: {"exp_avg": x}}}}

    assert difference(inside(cast.t()), inside(source), expected) is None
    assert "strides" in str(difference(inside(cast.view(3, 2)), inside(source), expected))
    assert "bfloat16" in str(difference({**inside(cast.t()), "model": cast.t()}, inside(source), expected))


@pytest.mark.slow
def test_contracts_are_there_by_name_without_importing_torch() -> None:
    program = (
        "import sys, stagereg.testing as t; assert 'torch' not in sys.modules; "
        "t.StagerContract, t.JoinableContract; assert 'pytest' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert set(stagereg.testing.__all__) <= set(dir(stagereg.testing))
    assert issubclass(stagereg.testing.StagerContract, Contract)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = stagereg.testing.Nothing
