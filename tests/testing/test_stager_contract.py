"""The contract of a stager: the project's stagers keep it, and each promise catches the stagers that break it.

``mutants`` has the stagers that are wrong on purpose; what torch's own stagers break is the table in the page.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import stagereg
from stagereg import AsyncStager, BlockingAsyncStager
from stagereg.base.providers import has
from stagereg.plugin import BlockingStager
from stagereg.testing import StagerContract

from ..support.pages import expect_table_of_contracts
from .mutants import MUTANTS, RELEASE, Reuses, ShardsOnAnAccelerator, variant

pytest_plugins = "pytester"

HELD_COPIES = "test_held_copies_stay_as_they_are"
ON_A_RANK = {"test_distributed_tensors_keep_their_parts", "test_a_storage_that_shrank_is_an_error"}


def contract_of(name: str, make: Callable[..., Any], *args: Any, **options: Any) -> type[StagerContract]:
    """The contract of what ``make`` makes; ranks find it by its name."""
    facts = {"make": lambda self: make(*args, **options), "__module__": __name__}
    globals()[name] = contract = type(name, (StagerContract,), facts)
    return contract


def registered(stager: str, **options: Any) -> Any:
    """The contract of a registered stager, which waits briefly for copies to be dropped."""
    name = "_".join(["Held", stager, *options])
    contract = contract_of(name, stagereg.build, "stager", stager, wait_s=0.1, **options)
    return pytest.param(contract, id=name)


class HeldOverlappedLate(StagerContract):
    """``overlapped``, as if an optimizer wrote all there is, so that everything is copied in the background."""

    def make(self) -> AsyncStager:
        stager = stagereg.build("stager", "overlapped", wait_s=0.1)
        stager._guard.owned = lambda is_known: {(-1, 0): 2**62}
        stager._worth_deferring = 0
        return stager


class RoundsWhatHasDimensions(BlockingStager):
    def stage(self, state_dict: Any) -> Any:
        return super().stage(self.map_memory(state_dict, lambda x: x.bfloat16()))


class HeldRounded(StagerContract):
    """What is expected depends on the shape, which the slice of a tensor without dimensions does not have."""

    def make(self) -> AsyncStager:
        return RoundsWhatHasDimensions()

    def expected(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        return tensor.bfloat16() if tensor.is_floating_point() and tensor.dim() else tensor


HELD = [
    registered("blocking"),
    registered("pinned_cached"),
    registered("overlapped"),
    HeldRounded,
    HeldOverlappedLate,
    contract_of("OfTorchsName", BlockingAsyncStager, cache_staged_state_dict=True),
]


@pytest.mark.parametrize("contract", HELD)
@pytest.mark.parametrize("promise", StagerContract.promises())
def test_it_keeps(contract: type[StagerContract], promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "timeout_s", 100.0)
    outcome = contract.outcome(promise)
    assert outcome.kept, outcome.seen


def test_every_stager_of_the_project_is_held_to_it() -> None:
    held = {each.id for each in HELD[:-3]}
    assert held >= {f"Held_{name}" for name in stagereg.names("stager") if name != "torch_default"}


def test_every_promise_has_a_stager_that_breaks_it() -> None:
    assert set(MUTANTS) == set(StagerContract.promises())


BREAKS = [
    (name, contract_of(f"{name[5:12]}_{each.__name__}", each)) for name, several in MUTANTS.items() for each in several
]


@pytest.mark.parametrize(("promise", "contract"), BREAKS, ids=[contract.__name__ for _, contract in BREAKS])
def test_a_promise_catches_who_breaks_it(
    promise: str, contract: type[StagerContract], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = contract.outcome(promise)
    RELEASE.set()
    RELEASE.clear()
    assert shown.kept is False
    assert shown.seen


@pytest.mark.slow
@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_a_held_copy_is_watched_whatever_its_size_and_place(ring: int) -> None:
    for at_least, nested in itertools.product((0, 256, 2048, 4096, 2**16, 2**20, 2**22), (True, False)):
        reusing = variant(Reuses, ring=ring, at_least=at_least, nested=nested)
        shown = contract_of("OfReuses", reusing).outcome(HELD_COPIES)
        assert shown.kept is False
        assert "has changed: " in shown.seen


PLACED_ELSEWHERE = contract_of("PlacedElsewhere", ShardsOnAnAccelerator)


def test_a_copy_of_shards_may_be_placed_elsewhere() -> None:
    shown = PLACED_ELSEWHERE.outcome("test_distributed_tensors_keep_their_parts")
    assert shown.kept, shown.seen


class Unpinned(staging.BlockingAsyncStager):
    """Its cache is not page-locked. torch page-locks it whether there is an accelerator or not, which fails without."""

    def stage(self, state_dict: Any) -> Any:
        if self.state_dict_cache is None:
            self.state_dict_cache = _create_cpu_state_dict(state_dict)
        return super().stage(state_dict)


# Without the options that need an accelerator: so the table is the same on a machine without one.
PLAIN = dict.fromkeys(("use_pinned_memory", "use_async_staging", "use_non_blocking_copy"), False)
TORCHS: dict[str, type[StagerContract]] = {
    "`BlockingAsyncStager`": contract_of("Blocking", staging.BlockingAsyncStager),
    "the same, cached": contract_of("Cached", Unpinned, cache_staged_state_dict=True),
    "`DefaultStager`": contract_of("Default", DefaultStager, StagingOptions(False, False, False, False)),
    "the same, async": contract_of("DefaultAsync", DefaultStager, StagingOptions(False, False, True, False)),
}
if has("interop"):
    TORCHS["`torch_default`"] = contract_of("TorchDefault", stagereg.build, "stager", "torch_default", **PLAIN)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the page is about torch 2.13")
@pytest.mark.slow
def test_torchs_stagers_break_exactly_what_the_page_lists() -> None:
    expect_table_of_contracts("torch's stagers", TORCHS)


def test_reading_freed_memory_costs_only_the_process_of_a_rank() -> None:
    shown = TORCHS["`BlockingAsyncStager`"].outcome("test_a_storage_that_shrank_is_an_error")
    assert shown.kept is False
    assert "tried in a process of its own, was killed by SIGSEGV" in shown.seen


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(set(stagereg.names("stager")) - {"torch_default"}))
def test_every_stager_keeps_it_from_an_accelerator(name: str) -> None:
    held = contract_of("OnAnAccelerator", stagereg.build, "stager", name, wait_s=0.1)
    held.device = "cuda"
    outcomes = [held.outcome(each) for each in held.promises() if each not in ON_A_RANK]
    assert {each.name: each.seen for each in outcomes if each.kept is False} == {}


AUTHORS = """
import stagereg
from stagereg.plugin import BlockingStager
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
    shown = "BrokenPromiseError: after in-place writes to the source, 1 of 1 elements of copy['4 bytes'] differ: "
    assert shown + "element 0 is 18.0, not 0.0" in run.stdout.str()
