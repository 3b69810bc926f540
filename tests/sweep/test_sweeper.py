"""``hydra/sweeper=interleaved``: which jobs a sweep has, in which order, and what it refuses before the first."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from stagereg.base.overrides import Identity
from stagereg.errors import ConfigError
from stagereg.sweep.interleaved import InterleavedSweeper, SweepError, interleaved

from . import programs
from .programs import App


def mark(job: list[str], key: str) -> str | None:
    return next((override.partition("=")[2] for override in job if override.startswith(f"++sweep.{key}=")), None)


@given(st.integers(1, 8), st.integers(2, 9))
def test_every_round_has_all_once_and_starts_with_another_one(number: int, repeats: int) -> None:
    jobs = interleaved([[f"a={value}"] for value in range(number)], repeats)
    entries = number + 1  # with the A/A job
    assert len(jobs) == entries * repeats
    names = [(job[0], mark(job, "again") or "") for job in jobs]
    starts = []
    for index in range(repeats):
        members = slice(index * entries, (index + 1) * entries)
        assert {mark(job, "repeat") for job in jobs[members]} == {str(index)}
        assert sorted(names[members]) == sorted([*((f"a={value}", "") for value in range(number)), ("a=0", "true")])
        starts.append(names[members][0])
        at, twin = names[members].index(("a=0", "true")), names[members].index(("a=0", ""))
        assert abs(at - twin) > 1 or number < 3, "not next to its twin"
    assert len(set(starts)) == min(entries, repeats)
    pairs = list(itertools.pairwise(names))
    assert number < 5 or not {(("a=0", ""), ("a=0", "true")), (("a=0", "true"), ("a=0", ""))} & {*pairs}


def test_a_combination_listed_twice_has_more_repeats_and_no_two_jobs_are_the_same() -> None:
    assert interleaved([["a=1"], ["a=2"], ["a=1"]], 1) == [["a=1"], ["a=2"], ["a=1", "++sweep.repeat=1"]]
    jobs = interleaved([["a=1", "b=1"], ["b=1", "a=1"], ["a=2", "b=1"]], 3)
    assert len({Identity.of(job) for job in jobs}) == len(jobs) == 12
    assert sorted(mark(job, "repeat") or "" for job in jobs if "a=1" in job and not mark(job, "again")) == [*"012345"]


@pytest.mark.parametrize("repeats", [0, -1, 1.5, True, None, "many", "3"])
def test_a_wrong_number_of_repeats_is_refused_first(repeats: object) -> None:
    # Not set up, it would fail in another way as soon as it went on.
    with pytest.raises(SweepError, match=rf"^sweep.repeats={repeats} is invalid: use an integer of at least 1"):
        InterleavedSweeper(repeats=repeats).sweep([])
    assert issubclass(SweepError, ConfigError)


def test_settings_of_the_whole_are_not_swept_batches_are_hydras() -> None:
    parse = OverridesParser.create().parse_overrides
    for override in ("sweep.repeats=1,2", "++sweep.metric=loss,stall_ms", "sweep.again=choice(true,false)"):
        with pytest.raises(SweepError, match=r"applies to the whole sweep\. Give one value"):
            InterleavedSweeper(repeats=1).split_arguments(parse(["a=1,2", override]), None)
    batches = InterleavedSweeper(repeats=2).split_arguments(parse(["a=1,2,3"]), 3)
    assert [len(batch) for batch in batches] == [3, 3, 2]
    assert InterleavedSweeper(repeats=1).split_arguments(parse(["a=1,2,3"]), 2) == [[["a=1"], ["a=2"]], [["a=3"]]]


@pytest.mark.slow
def test_jobs_run_in_rounds_and_know_which_repeat_they_are(app: App) -> None:
    ended = app.sweep("b=1,2", "sweep.repeats=2")
    assert ended.returncode == 0, ended.stderr
    seen = [(job["overrides"][0], job["repeat"], job["again"]) for job in app.results()]
    rounds = [("b=1", 0, False), ("b=2", 0, False), ("b=1", 0, True)]
    rounds += [("b=2", 1, False), ("b=1", 1, True), ("b=1", 1, False)]
    assert seen == rounds


@pytest.mark.parametrize(("code", "ran"), [(0, 2), (130, 1)])
def test_a_job_may_leave_by_itself_but_a_signal_stops_the_sweep(code: int, ran: int, app: App) -> None:
    ended = app.sweep("a=exit,fine", f"+code={code}")
    assert (ended.returncode, len(list(app.folder.glob("out/*/.hydra")))) == (code, ran)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "checkpoint.dir=one",
            "jobs 0 and 1 both have checkpoint.dir=one, so that one would resume from the other. Omit checkpoint.dir "
            "to give each job its own directory under hydra.sweep.dir=PATH. If this is intended, add "
            "checkpoint.resume=auto to the command.",
        ),
        pytest.param(
            "hydra.sweep.subdir=x",
            "jobs 0 and 1 would both write to OUT/x, so that one overwrites the other's result. Omit "
            "hydra.sweep.subdir to give each job its own directory.",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_jobs_never_have_one_directory(setting: str, line: str, tmp_path: Path) -> None:
    app = App(tmp_path, programs.RANKS, programs.RANKS_CONFIG)
    (tmp_path / "plain.yaml").write_text(programs.RANKS_CONFIG.replace("sweep: compare, ", ""))
    one_by_one = ["b=1,2", "hydra.sweeper.max_batch_size=1"]
    for repeated in (["b=1,2"], ["b=1", "sweep.repeats=2"], one_by_one, ["b=1,2", "--config-name=plain"]):
        ended = app.sweep(setting, *repeated)
        said = ended.stderr.replace(str(tmp_path / "out"), "OUT")
        assert (ended.returncode, said) == (1, f"stagereg: {line}\n")
        assert not list(app.folder.glob("**/.hydra")), "before the first job"


NO_STEP = "NO STEP WAS TAKEN: this run resumed from step 4"


@pytest.mark.parametrize(
    ("script", "config"),
    [
        (programs.ONE_PROCESS, "{dir: one, resume: auto, b: 1}"),
        pytest.param(
            programs.RESUMING,
            f"{programs.RANKS_CONFIG}dir: one\nresume: auto".replace("nproc: 2", "nproc: 1"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["hydra", "ranks"],
)
def test_a_job_resumes_from_another_combination_only_if_meant(script: str, config: str, tmp_path: Path) -> None:
    """Whatever sweeper runs them, and whatever their directory is called; the same job of another sweep resumes."""
    app = App(tmp_path, script, config.replace("sweep: compare, ", ""))
    ended = app.sweep("b=1,2", "hydra/sweeper=basic")
    assert ended.returncode == 1
    assert re.search(
        "Cannot use .*: job 1 of this sweep would resume from the checkpoints of job 0, which", ended.stderr
    )
    assert re.findall("RESULT .*", ended.stdout) == ["RESULT 1 0"]
    for value, code, line in (
        (2, 1, f"of job 0 of {tmp_path / 'out'}, which ran with b=1 instead of b=2. Give each job its own directory"),
        (1, 0, "RESULT 1 4"),
    ):
        other = app.run("-m", f"b={value}", "hydra/sweeper=basic", f"hydra.sweep.dir=other{value}")
        assert (other.returncode, line in other.stdout + other.stderr) == (code, True), other.stdout + other.stderr
    again = app.sweep("b=1,2", "resume=auto,latest")
    assert again.returncode == 0, again.stdout + again.stderr
    assert re.findall("RESULT .*", again.stdout) == [f"RESULT {b} 4" for b in "1122"]
    assert again.stdout.count(NO_STEP) == 4


@pytest.mark.slow
def test_directories_by_number_override_or_value_are_fine(tmp_path: Path) -> None:
    app = App(tmp_path, programs.RANKS, programs.RANKS_CONFIG)
    for setting in ("number_${hydra:job.num}", "value_${b}"):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        by_override = "hydra.sweep.subdir=${hydra.job.override_dirname}"
        ended = app.sweep("b=1,2", f"checkpoint.dir=c/{setting}", by_override, "nproc=1")
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"number_0", "number_1", "value_1", "value_2"}


@pytest.mark.slow
def test_the_same_sweep_once_more_runs_what_is_not_completed(app: App) -> None:
    first = app.sweep("b=1,2,3", "a=fine")
    assert first.returncode == 0
    before = app.results()
    (app.folder / "out" / "1" / "result.json").unlink()
    again = app.sweep("b=1,2,3", "a=fine")
    assert again.returncode == 0, again.stderr
    after = app.results()
    assert [new == old for new, old in zip(after, before, strict=True)] == [True, False, True]
    assert [job["figures"] for job in after] == [job["figures"] for job in before]
    kept = "was completed before; its result is reused. To run the job again, delete out/"
    assert [again.stdout.replace(f"{app.folder}/", "").count(f"Job {n} {kept}{n}\n") for n in "012"] == [1, 0, 1]
    assert "b=1 leads" in again.stdout
    assert app.sweep("b=3,2,1", "a=fine").stdout.count(kept) == 3, "in whatever order"
