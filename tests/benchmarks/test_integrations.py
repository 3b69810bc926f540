"""``make bench-integrations``: each trainer is measured with its own saving and with stagereg's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from ..support.benched import bench
from . import integrations

TRAINERS = ["accelerate", "lightning", "transformers", "torchtitan"]


def measured(folder: Path, rows: str, capsys: pytest.CaptureFixture[str]) -> tuple[list[Any], str]:
    """The groups of a run, and what it printed."""
    seen = bench(integrations.main, folder, "--scale", "0.001", "--rounds", "1", "--rows", rows)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 120
    return seen["groups"], out


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_way_of_each_trainer_is_measured(trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(trainer, reason="make frameworks installs it")
    names = [row for row in integrations.row_names() if row.startswith(f"{trainer}:")]
    assert {f"{trainer}:none", f"{trainer}:own", f"{trainer}:stagereg"} <= {*names}
    (group,), _ = measured(tmp_path, ",".join(names), capsys)
    assert [row["row"] for row in group["rows"]] == names
    blocked = {row["row"]: row["blocked"]["median"] for row in group["rows"]}
    assert all(blocked[name] > blocked[f"{trainer}:none"] for name in names[1:])


@pytest.mark.slow
def test_a_trainer_that_is_not_installed_is_a_skipped_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {"torch": torch}.get)
    (skipped, taken), out = measured(tmp_path, "accelerate:own,torch:stagereg,torch:async", capsys)
    assert "skipped: accelerate is not installed (pip install './stagereg[accelerate]')" in out
    assert skipped["rows"] == [{"row": "accelerate"}]
    found = {row["row"]: row for row in taken["rows"]}
    assert list(found) == ["torch:none", "torch:async", "torch:stagereg"]
    assert all(len(row["lost"]["samples"]) == 1 for row in found.values())
    assert found["torch:stagereg"]["blocked"]["median"] > found["torch:none"]["blocked"]["median"]


def test_wrong_arguments_are_refused_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert integrations.main(["--rows", "acelerate:own"]) == 2
    seen = capsys.readouterr()
    assert "Did you mean 'accelerate:own'" in seen.err
    assert (seen.out, len(seen.err.splitlines()) <= 5) == ("", True)
