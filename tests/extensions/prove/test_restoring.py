"""A run that resumes from a refuted checkpoint warns before it reads the checkpoint, and names a proven one."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.testing import run_ranks

from ...commands.checkpoint_directories import path_of
from ...support.keeping import composed, train
from ...support.noted import note


def warned(caplog: Any) -> list[str]:
    return [each.getMessage() for each in caplog.records if " refuted by " in each.getMessage()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with four checkpoints: proven, proven, not tried, refuted."""
    root = tmp_path / "run"
    train(str(root), 9, (1, 2, 3, 4))
    for step, verdict in ((1, "proven"), (2, "proven"), (3, ""), (4, "refuted")):
        note(root, step, verdict, "data: batches")
    return root


def restored(root: Path | str, **options: Any) -> int | None:
    with Checkpointer(str(root), save_last=False, **options) as checkpointer:
        return checkpointer.restore({"x": torch.zeros(64)})


def test_the_warning_names_the_difference_and_an_option_that_works(run: Path, caplog: Any) -> None:
    assert restored(run) == 4
    [text] = warned(caplog)
    assert text == (
        f"stagereg: {path_of(run, 4)} is refuted by data: batches: a run that resumed from it differed from this run."
        f' Resume from a proven one with resume="{path_of(run, 2)}".'
    )
    caplog.clear()
    options = eval(f"dict({re.search('resume=.*(?=[.]$)', text)[0]})")  # type: ignore[index]
    assert restored(run, **options) == 2
    assert warned(caplog) == []


def test_in_a_config_the_option_is_an_override(run: Path, tmp_path: Path, caplog: Any) -> None:
    def resumed(*overrides: str) -> int | None:
        options = composed(tmp_path, "checkpoint.save_last=false", *overrides).checkpoint
        with stagereg.instantiate(options) as checkpointer:
            return checkpointer.restore({"x": torch.zeros(64)})  # type: ignore[no-any-return]

    assert resumed() == 4
    [text] = warned(caplog)
    [override] = re.findall("with (checkpoint.resume=.*)[.]$", text)
    assert resumed(override) == 2


def test_the_argument_source_gets_its_own_advice(run: Path, tmp_path: Path, caplog: Any) -> None:
    with Checkpointer(str(tmp_path / "other"), resume="never", save_last=False) as checkpointer:
        for step in (4, 2):
            assert checkpointer.restore({"x": torch.zeros(64)}, source=str(path_of(run, step))) == step
    [text] = warned(caplog)
    assert text.endswith(f'proven one with source="{path_of(run, 2)}".')


@pytest.mark.parametrize("step", [1, 3])
def test_no_warning_for_a_checkpoint_that_is_proven_or_not_tried(run: Path, caplog: Any, step: int) -> None:
    assert restored(run, resume=str(path_of(run, step))) == step
    assert warned(caplog) == []


def test_without_a_proven_checkpoint_the_warning_has_no_advice(run: Path, caplog: Any) -> None:
    for step in (1, 2):
        note(run, step)
    restored(run)
    assert [text.rpartition(": ")[2] for text in warned(caplog)] == [
        "a run that resumed from it differed from this run."
    ]


def test_the_verdict_about_an_earlier_save_of_the_step_does_not_count(run: Path, caplog: Any) -> None:
    note(run, 4, "refuted", "data: batches", key="step-00000004 1 1")
    assert restored(run) == 4
    assert warned(caplog) == []


def warnings_of(rank: int, size: int, root: str) -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stagereg").addHandler(handler)
    restored(root)
    return [text for text in found if " refuted by " in text]


def test_only_rank_0_warns(run: Path) -> None:
    first, second = run_ranks(warnings_of, nproc=2, args=(str(run),))
    assert (len(first), second) == (1, [])
