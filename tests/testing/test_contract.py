"""What contracts have in common: promises are listed and tried one by one, and each end of a trial is reported."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

import stagereg.testing
from stagereg.errors import BrokenPromiseError
from stagereg.testing import Contract, Outcome
from stagereg.testing.contract import table
from stagereg.testing.snapshot import difference, note


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


class Interrupted(Contract):
    def test_it(self) -> None:
        raise KeyboardInterrupt


def test_promises_are_the_test_methods_in_order_with_the_first_line_of_their_doc() -> None:
    assert list(Small.promises().items())[:2] == [("test_kept", "It is kept."), ("test_broken", "It is broken.")]
    assert list(Small.promises()) == ["test_kept", "test_broken", "test_skipped", "test_odd", "test_leaving"]


def test_a_subclass_adds_promises_replaces_and_removes_them() -> None:
    assert list(Larger.promises()) == ["test_kept", "test_broken", "test_odd", "test_leaving", "test_more"]
    assert Larger.promises()["test_broken"] == "It is broken."
    assert Larger.outcome("test_broken").kept is True
    assert Small.outcome("test_broken").kept is False


def test_every_end_of_a_trial_is_an_outcome() -> None:
    assert Small.outcome("test_kept") == Outcome("test_kept", "It is kept.", True, "")
    assert Small.outcome("test_broken") == Outcome("test_broken", "It is broken.", False, "seen 3, not 4")
    assert Small.outcome("test_skipped") == Outcome("test_skipped", "It cannot be tried.", None, "no such device")
    odd = Small.outcome("test_odd")
    assert odd.kept is False
    assert odd.seen.startswith("KeyError: 'w' (")
    assert "test_contract.py:" in odd.seen
    assert "SystemExit: that was all" in Small.outcome("test_leaving").seen


def test_an_interrupt_is_no_outcome() -> None:
    with pytest.raises(KeyboardInterrupt):
        Interrupted.outcome("test_it")


def test_each_promise_is_tried_on_a_fresh_instance() -> None:
    seen = []

    class Fresh(Contract):
        def test_it(self) -> None:
            """It is fresh."""
            seen.append(self)

    Fresh.outcome("test_it")
    Fresh.outcome("test_it")
    assert seen[0] is not seen[1]


class TestWithin:
    def test_it_returns_and_raises_what_the_call_does(self) -> None:
        assert Small().within(lambda: threading.current_thread() is threading.main_thread()) is False
        with pytest.raises(ZeroDivisionError):
            Small().within(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        with pytest.raises(SystemExit):
            Small().within(sys.exit)

    def test_a_call_that_does_not_return_is_a_broken_promise_with_its_stack(self) -> None:
        never = threading.Event()

        def wait_for_ever() -> None:
            never.wait()

        with pytest.raises(BrokenPromiseError, match=r"did not come back within 1 s; it is at .*wait_for_ever"):
            Small().within(wait_for_ever, 1.0)
        never.set()


def test_a_table_has_a_line_for_each_promise_and_a_column_for_each_contract() -> None:
    lines = table({"small": Small, "larger": Larger}).splitlines()
    assert lines[:2] == ["| promise | small | larger |", "| --- | --- | --- |"]
    assert lines[2:5] == [
        "| It is kept | yes | yes |",
        "| It is broken | **no** | yes |",
        "| It cannot be tried | - | - |",
    ]
    assert lines[-1] == "| One more | - | yes |"


class TestSnapshot:
    @pytest.mark.parametrize(
        ("copied", "source", "shown"),
        [
            ({"a": torch.ones(2, dtype=torch.float64)}, {"a": torch.ones(2)}, "dtype torch.float64, not torch.float32"),
            ({"a": torch.ones(1)}, {"a": torch.ones(2)}, "has the shape (1,), not (2,)"),
            ({"a": torch.ones(2, 2).t()}, {"a": torch.ones(2, 2)}, "has the strides (1, 2), not (2, 1)"),
            ({"a": torch.ones(2)}, {"a": torch.ones(2, requires_grad=True)}, "has requires_grad False, not True"),
            (
                {"a": torch.tensor([1.0, -0.0])},
                {"a": torch.tensor([1.0, 0.0])},
                "1 of 2 elements of copy['a'] are wrong",
            ),
            ({"a": torch.ones(2)}, {"a": torch.nn.Parameter(torch.ones(2))}, "is a Tensor, and the source a Parameter"),
            ({"a": [1]}, {"a": (1,)}, "copy['a'] is a list, and the source a tuple"),
            ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "the keys of the copy are ['a', 'b'], not ['b', 'a']"),
            ({"a": [1, 2]}, {"a": [1]}, "copy['a'] has 2 items, not 1"),
            ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, "copy['a'][0]['b'] is 1, not 2"),
        ],
    )
    def test_every_difference_is_reported_with_its_path(self, copied: object, source: object, shown: str) -> None:
        seen = difference(copied, note(source, lambda x: x))
        assert seen is not None
        assert shown in seen

    def test_a_faithful_copy_has_no_difference(self) -> None:
        odd = {"nan": torch.tensor([float("nan"), -0.0]), "empty": torch.empty(0, 3), "one": torch.tensor(1)}
        state = {**odd, "t": torch.ones(2, 3).t(), "l": [odd, (1, None)], "p": torch.nn.Parameter(torch.ones(2))}
        assert difference(state, note(state, lambda x: x)) is None

    def test_later_writes_to_the_source_do_not_change_the_snapshot(self) -> None:
        state = {"w": torch.ones(3), "l": [1]}
        noted = note(state, lambda x: x)
        state["w"].zero_()
        state["l"].append(2)
        assert "3 of 3 elements" in str(difference(state, noted))
        assert difference({"w": torch.ones(3), "l": [1]}, noted) is None

    def test_the_expected_tensor_of_a_copy_may_be_another_one(self) -> None:
        noted = note({"w": torch.ones(2, 3).t()}, lambda x: x.to(torch.bfloat16))
        assert difference({"w": torch.ones(2, 3, dtype=torch.bfloat16).t()}, noted) is None
        assert "strides" in str(difference({"w": torch.ones(3, 2, dtype=torch.bfloat16)}, noted))


def test_the_contracts_are_there_by_name_and_importing_the_package_imports_no_torch() -> None:
    program = "import sys, stagereg.testing; assert 'torch' not in sys.modules; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert set(stagereg.testing.__all__) <= set(dir(stagereg.testing))
    assert issubclass(stagereg.testing.StagerContract, Contract)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = stagereg.testing.Nothing
