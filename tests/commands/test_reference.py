"""The option reference: it is generated from today's code, has everything, and explains it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from stagereg import registry

from .conftest import Install

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def page() -> str:
    written: str = runpy.run_path(str(DOCS / "options.py"))["page"]()
    return written


def test_the_committed_page_is_current(page: str) -> None:
    assert (DOCS / "options.md").read_text() == page, "run: python docs/options.py > docs/options.md"


def test_every_component_has_a_section(page: str) -> None:
    headings = {line.removeprefix("### ") for line in page.splitlines() if line.startswith("### ")}
    assert headings == {f"{e.kind}/{e.name}" for e in registry.entries() if e.distribution == "hydra-stagereg"}


def test_everything_that_can_be_set_is_explained(page: str) -> None:
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows
    assert [row for row in rows if row.endswith("|  |")] == []


def test_the_page_is_the_same_whatever_else_is_installed(page: str, install: Install) -> None:
    install("other", "raise SystemExit('imported')", {"stager.blocking": "Blocking", "stager.other": "Other"})
    assert "blocking@hydra-stagereg" in registry.names("stager")
    assert runpy.run_path(str(DOCS / "options.py"))["page"]() == page
