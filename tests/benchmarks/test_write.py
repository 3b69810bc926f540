"""``make bench-write``: durable bytes, against the disk's own speed."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest

import stagereg.bench.ceiling as ceiling
from stagereg.bench.measure import interleave

from ..support.benched import bench, rows_by_group
from . import write
from .write import durable, raw_write


@pytest.mark.slow
def test_every_row_can_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rows,) = rows_by_group(bench(write.main, tmp_path, "--scale", "0.001", "--rounds", "2")).values()
    assert list(rows) == write.row_names()
    top = statistics.median(rows["ceiling"]["seconds"]["samples"])
    for row in rows.values():
        assert len(row["seconds"]["samples"]) == 2
        assert row["ratio"] == pytest.approx(row["seconds"]["median"] / top)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 120


@pytest.mark.gpu
def test_a_state_on_a_device_can_be_measured(tmp_path: Path) -> None:
    seen = bench(write.main, tmp_path, "--scale", "0.001", "--rounds", "2", "--rows", "dcp", "--device", "cuda")
    assert seen["environment"]["device"]
    assert [row for row in rows_by_group(seen)["gpt"].values() if "failure" in row] == []


def test_wrong_arguments_are_refused_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert write.main(["--rows", "torch:dpc"]) == 2
    seen = capsys.readouterr()
    assert "Did you mean 'torch:dcp'" in seen.err
    assert (seen.out, len(seen.err.splitlines()) <= 5) == ("", True)


def test_a_write_is_timed_with_its_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def fsync(handle: int) -> None:
        now[0] += 1.0

    def saved(folder: Path) -> None:
        (folder / "file").write_bytes(b"12345")
        now[0] += 10.0

    monkeypatch.setattr(ceiling.os, "fsync", fsync)
    cases = [durable(str(nbytes), lambda: saved, nbytes, tmp_path) for nbytes in (5, 6)]
    enough, too_little = interleave(cases, 1, clock=lambda: now[0])
    assert enough.samples == [12.0]  # the file and the directory
    assert "only 5 of 6 bytes" in too_little.failure


def test_the_ceiling_passes_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, flags = os.open, []
    monkeypatch.setattr(write.os, "open", lambda path, how: flags.append(how) or real(path, how & ~os.O_DIRECT))
    raw_write(5000)(tmp_path)
    assert (tmp_path / "bytes").stat().st_size == 8192, "whole pages"
    assert flags[0] & os.O_DIRECT
