"""The contracts of joins: every joinable of the project keeps them, and each mutant is caught.

``joins`` has the contracts of the project's joinables and hooks, ``join_mutants`` those of joinables that are wrong on
purpose.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg
from stagereg.testing.join import JoinableContract, JoinHookContract
from stagereg.testing.scenario import Scenario, played

from . import join_mutants as mutants
from . import joins
from .torchs import table

PAGE = Path(__file__).parents[2] / "docs" / "contracts.md"
QUICK = (
    mutants.SumContract,
    mutants.HookContract,
    joins.DdpContract,
    joins.Fsdp2Contract,
    joins.MetricsContract,
    joins.ModuleContract,
    joins.StepHookContract,
)
COSTLY = (
    joins.ZeroContract,
    joins.CollectiveContract,
    joins.CheckpointContract,
    joins.CollectiveHookContract,
    joins.ZeroHookContract,
    joins.ActiveContract,
)
CONTRACTS = [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in COSTLY)]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
@pytest.mark.parametrize("promise", JoinableContract.promises())
def test_it_keeps(contract: type[JoinableContract], promise: str) -> None:
    outcome = contract.outcome(promise)
    if outcome.kept is None:
        pytest.skip(outcome.seen)
    assert outcome.kept, outcome.seen


# A hook that needs more than a joinable that announces is tried within its own one; auto makes one of the others.
@pytest.mark.parametrize(("kind", "without"), [("joinable", {"auto"}), ("join_hook", set())])
def test_every_built_in_joinable_and_hook_is_held_to_it(kind: str, without: set[str]) -> None:
    own = {name for name in stagereg.names(kind) if stagereg.registry.find(kind, name).target.startswith("stagereg.")}
    held = {each.__name__.lower() for each in (*QUICK, *COSTLY)} | {"stepcontract"}
    assert {name for name in own - without if f"{name}contract" not in held} == set()


def test_every_promise_has_a_joinable_that_breaks_it() -> None:
    assert set(mutants.CAUGHT_BY) == set(JoinableContract.promises()) == set(JoinHookContract.promises())


BREAKS = [(promise, breaks, seen) for promise, several in mutants.CAUGHT_BY.items() for breaks, seen in several.items()]


@pytest.mark.parametrize(("promise", "breaks", "seen"), BREAKS, ids=[f"{p}-{b.__name__}" for p, b, _ in BREAKS])
def test_a_promise_catches_who_breaks_it(promise: str, breaks: type[JoinableContract], seen: str) -> None:
    outcome = breaks.outcome(promise)
    assert outcome.kept is False
    assert seen in outcome.seen


def test_a_death_after_a_loop_is_not_blamed_on_another() -> None:
    first, second = Scenario(((2, 2),)), Scenario(((1, 2),))
    for each in (first, second):
        result = played(mutants.AftermathContract, each, [first, second])
        assert result.failure == ""
        assert [seen.done for seen in result.seen if seen] == [[length] for length in each.lengths[0]]


AUTHOR = """
import sys
from stagereg.testing import JoinableContract

class Mean:
    def __init__(self):
        import torch, types
        self._join_config = types.SimpleNamespace(enable=False, throw_on_early_termination=False,
                                                  is_first_joinable=False)
        self.total, self.weight = torch.zeros(2, dtype=torch.float64), 1.0
        self.join_device, self.join_process_group = torch.device("cpu"), None

    def add(self, *values):
        import torch, torch.distributed as dist, stagereg
        if values:
            stagereg.Join.notify_join_context(self)
        mine = torch.tensor([sum(values), float(len(values))], dtype=torch.float64)
        dist.all_reduce(mine)
        self.total += mine

    def join_hook(self, **kwargs):
        import types
        return types.SimpleNamespace(main_hook=self.add, post_hook=lambda is_last_joiner: None)

class TestMean(JoinableContract):
    def build(self):
        return Mean()

    def step(self, mean, value):
        mean.add(value)

    def state(self, mean):
        return {"mean": mean.total[0] / mean.total[1].clamp(min=1), "sums": mean.total}

    def expected(self, steps, world_size):
        values = sum(steps, [])
        # Python's numbers are doubles, alone and in lists.
        return {"mean": sum(values) / max(len(values), 1), "sums": [sum(values), len(values)]}

if __name__ == "__main__":
    kept = [TestMean.outcome(name).kept for name in TestMean.promises()]
    assert "pytest" not in sys.modules
    print(kept.count(True), kept.count(None), kept.count(False))
"""


@pytest.fixture
def author(tmp_path: Path) -> Path:
    """A file with a joinable that derives from nothing, and its contract; it may also be run."""
    file = tmp_path / "test_author.py"
    file.write_text(AUTHOR)
    return file


# A joinable that announces in torch's way only cannot be planned or counted, which skips these.
SKIPPED = {"test_planned", "test_counted", "test_iterate", "test_planned_sends_nothing_more", "test_planned_throw"}


@pytest.mark.slow
def test_a_contract_may_be_in_the_main_module(author: Path) -> None:
    run = subprocess.run([sys.executable, str(author)], capture_output=True, text=True, timeout=100)
    kept = len(JoinableContract.promises()) - len(SKIPPED)
    assert run.stdout == f"{kept} {len(SKIPPED)} 0\n", run.stdout + run.stderr


def test_the_pages_example_keeps_it_from_a_file_by_path(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text().partition("## Joins")[2], re.S)
    file = tmp_path / "example.py"
    file.write_text(example)
    spec: Any = importlib.util.spec_from_file_location("example_by_path", file)
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
    recorded = re.search(r"<!-- torch's joinables -->\n(.*?)\n<!-- -->", PAGE.read_text(), re.S)
    assert recorded
    assert table(joins.TORCHS) == recorded[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["importlib", "prepend"])
def test_under_pytest_each_promise_is_a_test(author: Path, mode: str) -> None:
    command = [sys.executable, "-m", "pytest", "-v", f"--import-mode={mode}", str(author)]
    run = subprocess.run(command, cwd=author.parent, capture_output=True, text=True, timeout=110)
    kept = len(JoinableContract.promises()) - len(SKIPPED)
    assert f"{kept} passed, {len(SKIPPED)} skipped" in run.stdout, run.stdout
