"""The contracts of joins: every joinable of the project keeps them, and each mutant is caught.

``joins`` has the contracts of the project's joinables and hooks, ``join_mutants`` those of joinables that are wrong on
purpose.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg
from stagereg.testing import scenario
from stagereg.testing.join import JoinableContract, JoinHookContract

from ..support.pages import expect_table_of_contracts
from ..support.reference import JOINABLES
from . import join_mutants as mutants
from . import joins

PAGE = Path(__file__).parents[2] / "docs" / "contracts.md"
QUICK = (
    mutants.SumContract,
    mutants.HookContract,
    joins.DdpContract,
)
OF_THE_EXTENSION = (joins.MetricsContract, joins.Fsdp2Contract, joins.ZeroContract)
COSTLY = (joins.ModuleContract, joins.ActiveContract, *OF_THE_EXTENSION[: 3 * JOINABLES])
CONTRACTS = [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in COSTLY)]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
@pytest.mark.parametrize("promise", JoinableContract.promises())
def test_it_keeps(contract: type[JoinableContract], promise: str) -> None:
    outcome = contract.outcome(promise)
    if outcome.kept is None:
        pytest.skip(outcome.seen)
    assert outcome.kept, outcome.seen


# The hooks are tried in their joinables; auto makes one of the others, and step comes with ddp.
def test_every_built_in_joinable_is_held_to_it() -> None:
    names = stagereg.names("joinable")
    own = {name for name in names if stagereg.registry.find("joinable", name).target.startswith("stagereg.")}
    held = {each.__name__.lower() for each in (*QUICK, *COSTLY)}
    assert {name for name in own - {"auto", "step"} if f"{name}contract" not in held} == set()


def test_every_promise_has_a_joinable_that_breaks_it() -> None:
    assert set(mutants.CAUGHT_BY) == set(JoinableContract.promises()) == set(JoinHookContract.promises())


BREAKS = [(promise, breaks, seen) for promise, several in mutants.CAUGHT_BY.items() for breaks, seen in several.items()]


@pytest.mark.parametrize(("promise", "breaks", "seen"), BREAKS, ids=[f"{p}-{b.__name__}" for p, b, _ in BREAKS])
def test_a_promise_catches_who_breaks_it(promise: str, breaks: type[JoinableContract], seen: str) -> None:
    outcome = breaks.outcome(promise)
    assert outcome.kept is False
    assert seen in outcome.seen


@pytest.mark.slow
def test_once_a_loop_has_hung_the_others_get_a_third_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, run = [], scenario._run

    def observed(contract: Any, what: Any, limit_s: float) -> Any:
        limits.append(limit_s)
        return run(contract, what, limit_s)

    monkeypatch.setattr(scenario, "_run", observed)
    monkeypatch.setattr(scenario, "_STARTING_S", 1.0)
    monkeypatch.setattr(scenario, "_HURRIED_S", 1.0)
    monkeypatch.setattr(mutants.NeverReturnsContract, "timeout_s", 6.0)
    monkeypatch.setattr(scenario, "_played", weakref.WeakKeyDictionary())
    monkeypatch.setattr(scenario, "_hung", weakref.WeakSet())
    names = ("test_uneven_inputs", "test_even_inputs", "test_failing_rank")
    uneven, even, failing = map(mutants.NeverReturnsContract.outcome, names)
    assert "rank 0 hung in main_hook" in uneven.seen
    assert "1, 3 batches on ranks 0, 1, ..." in uneven.seen
    assert (even.kept, failing.kept) == (True, True)
    assert limits == [6.0, 2.0, 2.0, 2.0]


def test_the_pages_example_keeps_it_from_a_file_by_path(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text().partition("## Joins")[2], re.S)
    author = tmp_path / "test_author.py"
    author.write_text(example)
    spec: Any = importlib.util.spec_from_file_location("example_by_path", author)
    sys.modules["example_by_path"] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        outcomes = [module.TestTotal.outcome(name) for name in JoinableContract.promises()]
    finally:
        del sys.modules["example_by_path"]
    assert [(each.kept, each.seen) for each in outcomes] == [(True, "")] * len(outcomes)


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the page is about torch 2.13")
def test_torchs_joinables_break_what_the_page_lists() -> None:
    expect_table_of_contracts("torch's joinables", joins.TORCHS)
