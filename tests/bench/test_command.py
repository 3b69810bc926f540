"""``stagereg bench``: every kind runs and reports what it measured; wrong arguments are refused at once."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from stagereg import cli
from stagereg.bench.environment import noise_warning

from ..support.benched import bench, rows_by_group

WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
FEW = {
    "staging": ["--states", "large,small", "--rows", "pinned_cached,torch:per_save,first:blocking,again:ceiling"],
    "stall": ["--rows", "torch:async_save,pinned_cached+dcp", "--torch-threads", "1"],
}


def measured(folder: Path, kind: str, *more: str) -> dict[str, Any]:
    arguments = ["bench", kind, "--scale", "0.001", "--rounds", "2", *more]
    seen: dict[str, Any] = bench(cli.main, folder, *arguments, disk=kind == "stall")
    return seen


def test_medians_and_ratios_follow_from_the_samples_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = measured(tmp_path, "staging", *FEW["staging"])
    names = FEW["staging"][-1].split(",")
    assert seen["settings"]["rounds"] == 2
    environment = seen["environment"]
    assert (environment["torch"], environment["cores"]) == (torch.__version__, len(os.sched_getaffinity(0)))
    assert {"python", "kernel", "cpu", "load"} <= set(environment)
    groups = rows_by_group(seen)
    assert list(groups) == ["large", "small"]
    for found in groups.values():
        assert set(found) == {"ceiling", *names}
        top = statistics.median(found["ceiling"]["seconds"]["samples"])
        for row in found.values():
            assert len(row["seconds"]["samples"]) == 2
            assert row["seconds"]["median"] == pytest.approx(statistics.median(row["seconds"]["samples"]))
            assert row["seconds"]["q1"] <= row["seconds"]["median"] <= row["seconds"]["q3"]
            assert row["ratio"] == pytest.approx(row["seconds"]["median"] / top)
            assert row["peak"] >= 0
    out = capsys.readouterr().out
    assert all(name in out for name in names)
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.slow
def test_stall_measures_what_a_save_costs_and_prints_no_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The process that saves for torch prints none either."""
    rows = ["torch:async_save", "torch:process", "pinned_cached+dcp"]
    seen = measured(tmp_path, "stall", "--rows", ",".join(rows), "--torch-threads", "1")
    printed = capfd.readouterr()
    assert max(map(len, printed.out.splitlines())) <= 120
    assert "INFO" not in printed.err
    (found,) = rows_by_group(seen).values()
    assert list(found) == ["none", *rows]
    for row in found.values():
        pairs = zip(row["segment"]["samples"], row["alone"]["samples"], strict=True)
        lost = [mine - without for mine, without in pairs]
        assert any(lost)
        assert row["lost"]["samples"] == pytest.approx(lost)
        assert row["lost"]["median"] == pytest.approx(statistics.median(lost))
        assert 0 <= row["blocked"]["median"] < row["segment"]["median"]
    assert found["pinned_cached+dcp"]["blocked"]["median"] > found["none"]["blocked"]["median"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(FEW))
def test_every_row_that_is_there_can_be_measured(kind: str, tmp_path: Path) -> None:
    seen = measured(tmp_path, kind)
    assert [row for group in seen["groups"] for row in group["rows"] if "failure" in row] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["staging", "--states", "larg"], "Did you mean 'large'"),
        (["staging", "--rows", "pined_cached"], "Did you mean 'pinned_cached'"),
        (["staging", "--rows", ","], "Nothing to measure"),
        (["stall", "--rows", "blocking+dpc"], "Did you mean 'blocking+dcp'"),
        (["staging", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["staging", "--scale", "0"], "--scale must be above 0"),
        (["staging", "--scale", "nan"], "--scale must be above 0"),
        (["stall", "--torch-threads", "1,0"], "got '0'"),
        (["stall", "--torch-threads", "two"], "got 'two'"),
        (["staging", "--json", "/nowhere/at/all.json"], "cannot write in /nowhere/at"),
        (["staging", "--json", "/"], "is a directory"),
        (["stall", "--dir", "/nowhere/at/all"], "cannot write in /nowhere/at/all"),
        (["stall", "--dir", "/proc"], "cannot write in /proc"),
        pytest.param(["staging", "--device", "cuda"], "no CUDA device", marks=WITHOUT_CUDA),
    ],
)
def test_wrong_arguments_are_refused_on_one_screen(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    seen = capsys.readouterr()
    assert message in seen.err
    assert seen.out == ""
    assert len(seen.err.splitlines()) <= 5
    assert "Traceback" not in seen.err


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(FEW))
def test_every_kind_runs_with_the_state_on_a_device(kind: str, tmp_path: Path) -> None:
    seen = measured(tmp_path, kind, *FEW[kind], "--device", "cuda")
    assert seen["environment"]["device"]
    assert [row for group in seen["groups"] for row in group["rows"] if "failure" in row] == []


def test_a_row_that_fails_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stagereg.stagers.blocking import BlockingStager

    def broken(self: BlockingStager, state_dict: dict[str, Any]) -> dict[str, Any]:
        raise OSError("out of luck " + "y\n" * 300)

    monkeypatch.setattr(BlockingStager, "stage", broken)
    rows = ["--rows", "blocking,pinned_cached"]
    assert cli.main(["bench", "staging", "--states", "large", "--scale", "0.001", "--rounds", "1", *rows]) == 1
    out = capsys.readouterr().out
    assert "failed: OSError: out of luck y y" in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(("load", "cores", "noisy"), [(1.01, 2, True), (1.0, 2, False), (8.0, 64, False)])
def test_a_load_above_half_of_the_cores_is_called_noisy(load: float, cores: int, noisy: bool) -> None:
    assert bool(noise_warning(load, cores)) is noisy
