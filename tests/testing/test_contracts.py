"""Contracts of retention rules, callbacks, tiers and storages: right ones keep each promise, wrong ones are caught."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagereg.testing import Contract, KeepContract, OnCommitContract, StorageContract, TierContract

from ..support.pages import Page
from . import callbacks, keep_rules, storages, tiers

PAGE = Path(__file__).parents[2] / "docs" / "contracts.md"
KINDS: list[tuple[type[Contract], Any]] = [
    (KeepContract, keep_rules),
    (OnCommitContract, callbacks),
    (TierContract, tiers),
    (StorageContract, storages),
]


def name_of(case: Any) -> str:
    return getattr(case, "__name__", str(case))


def rights() -> Iterator[Any]:
    for kind, module in KINDS:
        for contract in module.RIGHT:
            contracts, marks = getattr(contract, "values", (contract,)), getattr(contract, "marks", ())
            yield from (pytest.param(*contracts, promise, marks=marks) for promise in kind.promises())


@pytest.mark.parametrize(("contract", "promise"), [*rights()], ids=name_of)
def test_a_right_one_keeps(contract: type[Contract], promise: str) -> None:
    outcome = contract.outcome(promise)
    assert outcome.kept, outcome.seen


@pytest.mark.parametrize(("promise", "contract"), [each for _, module in KINDS for each in module.WRONG], ids=name_of)
def test_a_wrong_one_is_found(promise: str, contract: type[Contract]) -> None:
    outcome = contract.outcome(promise)
    assert outcome.kept is False
    assert outcome.seen


@pytest.mark.parametrize(("kind", "module"), KINDS, ids=name_of)
def test_each_promise_has_one_that_breaks_it(kind: type[Contract], module: Any) -> None:
    assert {promise for promise, _ in module.WRONG} == set(kind.promises())


@pytest.mark.parametrize(("section", "name"), [("Retention rules", "TestEveryTenth"), ("Tiers", "TestFlash")])
def test_an_example_on_the_page_keeps_all(
    section: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(rf"## {section}\n.*?```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / f"example_{name}.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    contract = getattr(importlib.import_module(f"example_{name}"), name)
    outcomes = [contract.outcome(promise) for promise in contract.promises() if promise != "test_rank_0_alone"]
    assert [(each.kept, each.seen) for each in outcomes] == [(True, "")] * len(outcomes)


ZSTANDARD = """\
import zlib

def compress(data, level):
    return zlib.compress(data, min(level, 9))

decompress = zlib.decompress
"""
QUICK = ("test_every_value", "test_no_arguments")


@pytest.fixture(scope="module")
def of_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[StorageContract]]:
    """The contract of the page on storages, with zlib where zstandard is not installed."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "storage_of_the_page.py").write_text("\n".join(Page("storages.md").of("python")))
    if importlib.util.find_spec("zstandard") is None:
        (folder / "zstandard.py").write_text(ZSTANDARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("storage_of_the_page").TestZstd


@pytest.mark.parametrize(
    "promise",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in StorageContract.promises()],
)
def test_the_storage_on_its_page_keeps(promise: str, of_page: type[StorageContract]) -> None:
    outcome = of_page.outcome(promise)
    assert outcome.kept, outcome.seen
