"""The result of a job is complete or absent, and a job is found in any state it was left in."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

import stagereg.base.small_files as small_files
from stagereg.base.overrides import split
from stagereg.errors import ConfigError
from stagereg.sweep.plan import Plan
from stagereg.sweep.result import RESULT, JobResult, kind_of, results

from ..support.samples import BEGAN, VERSIONS, Sample, rank_file, result, sweep, write_events, write_hydra, write_run


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    facts = {"status": "failed", "error": "two\nlines", "repeat": 2, "again": True}
    facts |= {
        "overrides": ("a=1", "+b='x y'"),
        "returned": {"loss": 1.5, "names": ["a"]},
        "figures": {"stall_ms": 1.25},
    }
    seen = result(tmp_path / "3", 3, **facts)
    assert seen.write() == tmp_path / "3" / RESULT
    assert JobResult.read(tmp_path / "3") == JobResult.of_directory(tmp_path / "3") == seen


def test_a_result_is_strict_json_of_this_format(tmp_path: Path) -> None:
    class Loss:
        def __float__(self) -> float:
            return 2.0

    returned = {"nan": math.nan, 1: math.inf, "loss": Loss(), "path": Path("a/b"), "pair": (1, None), "set": {1}}
    written = result(tmp_path, returned=returned, figures={"loss": math.nan, "stall_ms": 1.0}).write()
    seen = json.loads(written.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert seen["format"] == 1
    assert seen["returned"] == {"nan": None, "1": None, "loss": 2.0, "path": "a/b", "pair": [1, None], "set": "{1}"}
    assert seen["figures"] == {"loss": "nan", "stall_ms": 1.0}
    figures = {"a": -math.inf, "b": math.inf, "loss": math.nan, "stall_ms": 1.0}
    written = result(tmp_path, figures=figures).write()
    assert JobResult.read(tmp_path).figures == pytest.approx(figures, nan_ok=True)


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result(tmp_path, returned=1).write()

    def full(path: str, *_: Any) -> None:
        Path(path).touch()
        raise OSError("No space left on device")

    monkeypatch.setattr(small_files, "write_new", full)
    with pytest.raises(OSError, match="No space"):
        result(tmp_path, returned=2).write()
    assert JobResult.read(tmp_path).returned == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"format": 1, "status": "comp',
        "",
        "[" * 100_000,
        "\xff",
        "[1, 2]",
        '{"accuracy": 0.5}',
        '{"format": 1, "status": "failed"}',
        '{"format": 2, "figures": {}, "overrides": []}',
        '{"format": 1, "figures": {}, "overrides": [], "mine": 1}',
    ],
)
def test_an_invalid_result_is_reported_and_its_job_is_unfinished(tmp_path: Path, text: str) -> None:
    write_hydra(tmp_path, ["lr=1"], 4)
    (tmp_path / RESULT).write_text(text, encoding="latin-1")
    message = f"{RESULT} is corrupt or was written by another version of stagereg"
    with pytest.raises(ConfigError, match=message):
        JobResult.read(tmp_path)
    job = JobResult.of_directory(tmp_path)
    assert (job.status, job.overrides, job.job["num"]) == ("unfinished", ("lr=1",), 4)
    assert message in (job.error or "")
    write_run(tmp_path)
    (job,) = results(tmp_path)
    assert job.status == "unfinished"
    assert message in (job.error or "")
    assert job.figures["loss"] == 2.5


class TestWithoutResult:
    def test_a_killed_job_is_unfinished_and_has_its_recorded_figures(self, tmp_path: Path) -> None:
        write_hydra(tmp_path, ["stager=blocking", "++sweep.repeat=2", "++sweep.again=true"], 7)
        write_run(tmp_path, Sample(killed=True, versions={**VERSIONS, "device": "H200"}))
        job = JobResult.of_directory(tmp_path)
        assert job.environment == {"host": "here", "device": "H200"}
        assert (job.status, job.overrides, job.repeat, job.again) == ("unfinished", ("stager=blocking",), 2, True)
        assert job.error == "killed or still running"
        assert job.job["num"] == 7
        assert (job.started, job.versions) == (BEGAN, VERSIONS)
        assert job.seconds == pytest.approx(0.406, rel=0.1)
        assert job.figures["stall_ms"] == pytest.approx(2.1)

    def test_a_job_that_has_recorded_nothing_is_unfinished(self, tmp_path: Path) -> None:
        write_hydra(tmp_path, ["a=1"], 0)
        newer = {"event": "start", "t": 1, "format": 2}
        for events, error in (([], "metrics.jsonl is missing"), ([newer], "newer stagereg")):
            if events:
                write_events(tmp_path / "metrics.jsonl", events)
            (job,) = results(tmp_path)
            assert (job.status, error in (job.error or ""), job.overrides) == ("unfinished", True, ("a=1",))
        (tmp_path / ".hydra" / "overrides.yaml").write_text("- 'a=")  # torn
        (tmp_path / ".hydra" / "hydra.yaml").write_text("hydra: {job: ")
        job = JobResult.of_directory(tmp_path)
        assert (job.overrides, job.job) == ((), {})

    def test_a_run_that_reports_its_end_has_ended_that_way(self, tmp_path: Path) -> None:
        assert JobResult.of_directory(write_run(tmp_path / "a")).status == "completed"
        end = {"event": "end", "t": BEGAN + 9, "seconds": 9, "status": "failed"}
        for name, error, status in [
            ("b", "ValueError: no", "failed"),
            ("c", "KeyboardInterrupt: ", "unfinished"),
            ("d", "called sys.exit(143)", "unfinished"),
        ]:
            write_run(tmp_path / name, Sample(killed=True))
            rank_file(tmp_path / name, 1).unlink()
            write_events(rank_file(tmp_path / name, 1), [*Sample(killed=True).events(1), {**end, "error": error}])
            job = JobResult.of_directory(tmp_path / name)
            assert (job.status, job.error) == (status, f"rank 1: {error}")


class TestResults:
    def test_all_jobs_of_a_sweep_come_in_the_order_they_were_planned(self, tmp_path: Path) -> None:
        sweep(tmp_path, repeats=2)
        sweep(tmp_path / "later", repeats=1)  # is not mixed in
        found = results(tmp_path)
        assert {job.directory.parent for job in found} == {tmp_path}
        assert [job.job["num"] for job in found] == list(range(2 * 6 + 2 + 2 + 1))
        assert [job.status for job in found[-3:]] == ["failed", "failed", "unfinished"]

    def test_jobs_without_a_number_come_as_their_folders_are(self, tmp_path: Path) -> None:
        for name in ("10", "9", "b/1"):
            result(tmp_path / name, job={}).write()
        for name in ("9/logs", ".submitit/0"):  # below a job, and hidden
            write_run(tmp_path / name)
        assert [str(job.directory.relative_to(tmp_path)) for job in results(tmp_path)] == ["9", "10", "b/1"]

    def test_the_error_for_an_empty_folder_names_the_expected_files(self, tmp_path: Path) -> None:
        for read in (JobResult.of_directory, results):
            for directory in (tmp_path, tmp_path / "absent"):
                with pytest.raises(
                    ConfigError, match=r"contains no job.*result\.json.*metrics\.jsonl.*hydra\.sweep\.dir"
                ):
                    read(directory)


def test_repeats_are_distinguished_from_combinations() -> None:
    assert split(["a=1", "++sweep.repeat=3", "++sweep.again=True"]) == (("a=1",), 3, True)
    others = ("sweep.repeats=3", "x.sweep.repeat=1")
    assert split([*others, "sweep.again=false"]) == (others, 0, False)
    assert split([]) == ((), 0, False)


def test_runs_and_sweeps_are_recognised_and_nothing_else(tmp_path: Path) -> None:
    run, here, there = write_run(tmp_path / "outputs" / "today"), tmp_path / "multirun" / "1", tmp_path / "trials"
    sweep(here, {"stager=blocking": 30.0}, repeats=1, others=False)
    write_run(there / "0")
    for given, kind in ((run, "run"), (here, "sweep"), (here / "0", "run"), (there, "sweep")):
        assert kind_of(given) == kind
    (run / "checkpoints").mkdir()
    for other in (run / "checkpoints", tmp_path / "outputs"):
        with pytest.raises(
            ConfigError,
            match=rf"^{re.escape(str(other))} contains no job: neither this directory nor a folder under it has result",
        ):
            kind_of(other)
    with pytest.raises(ConfigError, match=r"^The directory outptus/x does not exist\.$"):
        kind_of(Path("outptus/x"))


@pytest.mark.parametrize("name", ["result.json", ".hydra/overrides.yaml", "sweep.json"])
def test_files_that_are_no_regular_files_keep_no_reader_waiting(tmp_path: Path, name: str) -> None:
    write_hydra(tmp_path, ["a=1"])
    result(tmp_path).write()
    path = tmp_path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    job = JobResult.of_directory(tmp_path)
    assert (job.status == "unfinished") == (name == "result.json")
    if name == "result.json":
        assert "result.json: it is not a regular file" in str(job.error)
    if name == "sweep.json":
        with pytest.raises(ConfigError, match=r"cannot read the plan .*sweep\.json: .*not a regular file"):
            Plan.read(tmp_path)
