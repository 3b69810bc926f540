"""The contract of a stager: the project's stagers keep it, each promise catches a stager that breaks it, and no other.

``mutants`` has the stagers that are wrong on purpose; what torch's own stagers break is the table in the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg
from stagereg import AsyncStager, BlockingAsyncStager
from stagereg.testing import StagerContract, run_ranks

from .mutants import MUTANTS, RELEASE, Plain, ShardsOnAnAccelerator
from .torchs import TORCHS, table

pytest_plugins = "pytester"

PAGE = Path(__file__).parents[2] / "docs" / "contracts.md"
ON_A_RANK = {
    "test_distributed_tensors_keep_their_parts",
    "test_a_storage_that_shrank_is_an_error",
}
COSTLY = {"test_memory_is_given_back"}
PAIRS = [pytest.param(name, each, id=each.__name__) for name, several in MUTANTS.items() for each in several]


def held_to(make: Callable[[], Any], **facts: Any) -> type[StagerContract]:
    return type("Held", (StagerContract,), {"make": lambda self: make(), **facts})


def registered(stager: str, slow: bool = False, **options: Any) -> Any:
    """The contract of a registered stager, which ranks find by its name; it waits briefly for copies to be dropped."""
    name = "_".join(["Held", stager, *options])
    facts = {"make": lambda self: stagereg.build("stager", stager, wait_s=0.1, **options), "__module__": __name__}
    globals()[name] = contract = type(name, (StagerContract,), facts)
    return pytest.param(contract, id=name, marks=[pytest.mark.slow] if slow else [])


class Everything(dict[Any, int]):
    def get(self, key: Any, default: Any = None) -> int:
        return 2**62


class HeldOverlappedLate(StagerContract):
    """``overlapped``, as if an optimizer wrote all there is, so that everything is copied in the background."""

    def make(self) -> AsyncStager:
        stager = stagereg.build("stager", "overlapped", wait_s=0.1)
        stager._guard.owned = Everything
        stager._worth_deferring = 0
        return stager


class OfTorchsName(StagerContract):
    def make(self) -> AsyncStager:
        return BlockingAsyncStager(cache_staged_state_dict=True)


HELD = [
    registered("blocking"),
    registered("blocking", slow=True, host_memory_gb=1.0, threads=1),
    registered("pinned_cached"),
    registered("pinned_cached", slow=True, max_in_flight=1, reserve_gb=0.01),
    registered("incremental"),
    registered("incremental", detect="content"),
    registered("overlapped"),
    registered("overlapped", slow=True, verify=True),
    registered("shared"),
    HeldOverlappedLate,
    OfTorchsName,
]


@pytest.mark.parametrize("contract", HELD)
@pytest.mark.parametrize("promise", StagerContract.promises())
def test_it_keeps(contract: type[StagerContract], promise: str) -> None:
    outcome = contract.outcome(promise)
    assert outcome.kept, outcome.seen


def test_every_stager_of_the_project_is_held_to_it() -> None:
    held = {each.id.split("_threads")[0] for each in HELD[:-2]}
    assert held >= {f"Held_{name}" for name in stagereg.names("stager") if name != "torch_default"}


class TestMutants:
    def test_every_promise_has_one(self) -> None:
        assert set(MUTANTS) == set(StagerContract.promises())

    @pytest.mark.parametrize(("promise", "mutant"), PAIRS)
    def test_each_breaks_its_promise_and_no_other(
        self, promise: str, mutant: type[Any], broken_on_a_rank: dict[str, dict[str, str]]
    ) -> None:
        here = set(MUTANTS) - ON_A_RANK - (COSTLY - {promise})
        seen = broken_of(mutant, here) | broken_on_a_rank[mutant.__name__]
        assert (set(seen), all(seen.values())) == ({promise}, True), seen

    @pytest.mark.slow
    @pytest.mark.parametrize(("promise", "mutant"), PAIRS)
    def test_each_keeps_the_costly_promises_of_others(self, promise: str, mutant: type[Any]) -> None:
        assert set(broken := broken_of(mutant, COSTLY)) == {promise} & COSTLY, broken

    def test_their_base_class_keeps_every_promise(self, broken_on_a_rank: dict[str, dict[str, str]]) -> None:
        assert broken_of(Plain, set(MUTANTS) - ON_A_RANK) | broken_on_a_rank["Plain"] == {}

    def test_a_copy_of_shards_may_be_placed_elsewhere(self, broken_on_a_rank: dict[str, dict[str, str]]) -> None:
        assert broken_on_a_rank["ShardsOnAnAccelerator"] == {}


def broken_of(mutant: type[Any], promises: set[str]) -> dict[str, str]:
    """What was seen of the promises that a mutant breaks."""
    outcomes = []
    for name in sorted(promises):
        impatient = {"timeout_s": 4.0} if name == "test_held_copies_stay_as_they_are" else {}
        outcomes.append(held_to(mutant, **impatient).outcome(name))
    RELEASE.set()
    RELEASE.clear()
    return {each.name: each.seen for each in outcomes if each.kept is False}


def try_all(rank: int, world_size: int) -> dict[str, dict[str, str]]:
    """On a rank: which promises that are tried on one each mutant breaks."""
    mutants = [Plain, ShardsOnAnAccelerator, *(each for several in MUTANTS.values() for each in several)]
    return {mutant.__name__: broken_of(mutant, ON_A_RANK) for mutant in mutants}


@pytest.fixture(scope="module")
def broken_on_a_rank() -> dict[str, dict[str, str]]:
    (broken,) = run_ranks(try_all, 1, timeout_s=60)
    return broken


class TestTorchsStagers:
    @pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the page is about torch 2.13")
    @pytest.mark.slow
    def test_they_break_exactly_the_promises_that_the_page_lists(self) -> None:
        recorded = re.search(r"<!-- torch's stagers -->\n(.*?)\n<!-- -->", PAGE.read_text(), re.S)
        assert recorded
        assert table(TORCHS) == recorded[1]

    def test_reading_freed_memory_costs_only_the_process_of_a_rank(self) -> None:
        shown = TORCHS["`BlockingAsyncStager`"].outcome("test_a_storage_that_shrank_is_an_error")
        assert shown.kept is False
        assert "tried in a process of its own, died of SIGSEGV" in shown.seen


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(set(stagereg.names("stager")) - {"torch_default"}))
def test_every_stager_keeps_it_from_an_accelerator(name: str) -> None:
    held = held_to(lambda: stagereg.build("stager", name, wait_s=0.1), device="cuda")
    outcomes = [held.outcome(each) for each in held.promises() if each not in ON_A_RANK]
    assert {each.name: each.seen for each in outcomes if each.kept is False} == {}


def test_a_stager_that_hangs_is_reported_with_its_stack() -> None:
    class Stuck(BlockingAsyncStager):
        def close(self) -> None:
            RELEASE.wait(30)

    shown = held_to(Stuck, timeout_s=2.0).outcome("test_close_is_the_end")
    RELEASE.set()
    assert shown.kept is False
    assert re.search(r"did not come back within 2 s; it is at .* in close -> .* in wait", shown.seen), shown.seen


AUTHORS = """
import stagereg
from stagereg.testing import StagerContract

class AliasingStager(stagereg.BlockingAsyncStager):
    def stage(self, state_dict):
        return dict(state_dict)

class TestMine(StagerContract):
    def make(self):
        return AliasingStager()
"""


def test_under_pytest_an_author_needs_only_the_subclass(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_mine=AUTHORS)
    run = pytester.runpytest_inprocess("-W", "error", "-k", "later_writes or shape_of")
    run.assert_outcomes(passed=1, failed=1)
    shown = (
        "BrokenPromiseError: after in-place writes to the source, 1000 of 1000 elements of copy['small'] are wrong: "
    )
    assert shown + "element 0 is 7.0, not 1.0" in run.stdout.str()


def test_no_contract_imports_pytest() -> None:
    for file in sorted(Path(stagereg.testing.__file__).parent.glob("*.py")):
        assert not re.search(r"^\s*(import|from) _?pytest\b", file.read_text(), re.M), file.name
