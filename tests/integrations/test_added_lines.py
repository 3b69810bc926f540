"""The lines that the pages on trainers have a user add run as they are printed."""

from __future__ import annotations

import re
from typing import Any

import pytest

import stagereg

from ..support.pages import Page

MADE = re.compile(r"\b(Stagereg\w+(?:\.Config)?|UnevenInputs)\((?:[^()]|\([^()]*\))*\)")
"""What is given to the trainer."""


@pytest.mark.parametrize("trainer", ["lightning", "torchtitan", "transformers"])
def test_what_a_page_adds_can_be_imported_and_made(trainer: str) -> None:
    pytest.importorskip(trainer, reason="make frameworks installs it")
    known: dict[str, Any] = {"stagereg": stagereg}
    for diff in Page(f"integrations/{trainer}.md").of("diff"):
        added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
        exec("\n".join(line for line in added if line.startswith("from ")), known)
        (made,) = (found[0] for line in added if (found := MADE.search(line)))
        assert eval(made, known).__class__.__module__.startswith("stagereg.integrations."), made


def test_what_the_page_on_accelerate_adds_attaches() -> None:
    accelerate = pytest.importorskip("accelerate", reason="make frameworks installs it")
    (diff,) = Page("integrations/accelerate.md").of("diff")
    (line,) = (line[1:].strip() for line in diff.splitlines() if line.startswith("+"))
    import stagereg.integrations.accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    exec(line, {"stagereg": stagereg, "accelerator": accelerator})
    assert "save_state" in vars(accelerator)
    accelerator.end_training()
    accelerate.state.AcceleratorState._reset_state(True)
