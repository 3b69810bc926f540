"""``stagereg report``: it recognises a run or a sweep by itself, and makes what the sweep made."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import stagereg.sweep.render as render
from stagereg.commands.reporting import figure_text, in_order
from stagereg.sweep.comparison import Comparison
from stagereg.sweep.plan import Plan, PlannedJob
from stagereg.sweep.result import JobResult, results
from stagereg.sweep.reuse import held

from ..support.samples import (
    BEGAN,
    CONSTANT,
    FAILING,
    Sample,
    failed,
    figures,
    jobs,
    rank_file,
    result,
    sweep,
    write_events,
    write_hydra,
    write_run,
)
from .conftest import Command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def report(here: Path, command: Command) -> Command:
    return lambda *arguments, code=0: command("report", *arguments, code=code)


def test_a_run_is_reported_and_left_as_it_is(here: Path, report: Command) -> None:
    write_run(here / "run")
    before = sorted(here.rglob("*"))
    seen = report("run").out
    assert (
        "run: Completed 40 steps on 2 ranks in 0.44 s. 4 checkpoints; median stall of the training loop: 2.1 ms."
        in seen
    )
    assert "Failed" not in seen
    rows = [line.split() for line in seen.splitlines()]
    assert ["10", "0.1", "2.1", "5", "20", "25", "128", "complete"] in rows
    assert ["stall_ms", "2.1", "ms"] in rows
    assert sorted(here.rglob("*")) == before


def test_restarts_are_reported_by_phase_with_the_share_that_was_training(here: Path, report: Command) -> None:
    write_run(here / "run", Sample(ranks=1, killed=True))
    seen = report("run").out
    assert ("reason" in seen, "Restarts" in seen, "How the time was spent" in seen) == (False, False, True)
    file = rank_file(here / "run", 0)
    file.write_text(file.read_text() + "\n")
    write_run(here / "run", Sample(ranks=1, began=BEGAN + 10))
    since, phases = BEGAN + 0.415, {"noticed": 1.5, "started": 2.0, "restored": 6.0, "first step": 0.095}
    restart = {"event": "restart", "t": BEGAN + 10, "step": 1, "number": 1, "why": "lost <rank 1>\nin", "again": 39}
    write_events(file, [restart | {"since": since, "phases": phases, "source": "/dev/shm/x", "origin": "tier"}])
    seen = report("run").out
    assert (
        "Completed 40 steps on 1 rank in 10.4 s, of which 3.8 % were training. Failed after step 39, resumed from"
        in seen
    )
    rows = [" ".join(line.split()) for line in seen.splitlines()]
    assert "repeated steps 0.399 3.82 steps trained again after a failure or a rollback" in rows
    assert "restarts: restored 6 57.5 until the model was built and restored" in rows
    assert "1 1.5 2 6 0.095 9.6" in rows
    assert "1 1 39 tier lost <rank 1>" in rows
    told = report("run", "--json").json
    assert [(start["number"], start["phases"]) for start in told["starts"]] == [(1, phases)]
    assert told["goodput"]["share"] == pytest.approx(0.038, abs=1e-3)


@pytest.mark.parametrize(
    ("failures", "text"),
    [
        ([(10, 2)], "Failed after step 12, resumed from step 10."),
        ([(10, 2), (30, 2)], "Failed after step 12 and after step 32, resumed from step 10 and from step 30."),
        ([(0, 0), (0, 5)], "Failed before step 1 and after step 5, resumed from the beginning and from the beginning."),
        ([(10 * at, 3) for at in range(1, 7)], "Failed 6 times, last after step 63, resumed from step 60."),
    ],
)
def test_a_run_with_restarts_is_reported_with_all_attempts(
    here: Path, report: Command, failures: list[tuple[int, int]], text: str
) -> None:
    for number, (restored, again) in enumerate([(0, 0), *failures]):
        began = BEGAN + 10 * number
        why = {"event": "restart", "t": began, "step": restored + 1, "since": began - 5, "phases": {"started": 5.0}}
        why |= {"number": number, "why": "lost", "restored": restored, "again": again}
        sample = Sample(steps=20, began=began, killed=number < len(failures))
        for rank in range(2):
            events = [*sample.events(rank), *([why] if number and not rank else [])]
            write_events(rank_file(here / "run", rank), [{**event, "run": f"a.{number}"} for event in events])
    attempts = len(failures) + 1
    seen = report("run").out
    # Of the attempts that were killed, the second checkpoint was being written.
    assert f"{text} {attempts + 1} checkpoints; median stall of the training loop: 2.1 ms." in seen
    assert f"Metrics of {attempts} attempts" in seen
    rows = [line.split() for line in seen.splitlines()]
    assert ["restart", "step", "saved", "at", "s"] in [row[:5] for row in rows]
    assert [str(attempts - 1), "20"] in [row[:2] for row in rows]
    told = report("run", "--json").json
    assert (told["attempts"], text in told["headline"]) == (attempts, True)
    saves = [(number, step) for number in range(attempts) for step in (10, 20)]
    assert [(one["restart"], one["step"]) for one in told["checkpoints"]] == saves


def test_other_runs_in_the_directory_are_left_out_and_counted(here: Path, report: Command) -> None:
    for number, steps in enumerate((30, 20, 40)):
        run = Sample(ranks=1, steps=steps, began=BEGAN + 100 * number)
        write_events(rank_file(here / "run", 0), [{**event, "run": f"r{number}.0"} for event in run.events(0)])
    seen = report("run").out
    assert "run: Completed 40 steps on 1 rank" in seen
    assert "Left out: 2 other runs in this directory; the report is on the latest run." in seen
    assert "other run" in report("run", "--json").json["warnings"][0]


def test_a_sweep_with_failed_jobs_is_compared_again(here: Path, report: Command, no_matplotlib: None) -> None:
    sweep(here / "sweep")
    seen = report("sweep", "--output", "elsewhere").out
    assert "Not decided: planned or counted." in seen
    assert "the loss is not finite" in seen
    assert {"compare.csv", "report.html"} <= set(os.listdir("elsewhere"))
    assert "report.html" not in os.listdir("sweep")


def test_json_has_the_same_figures_and_writes_no_file_unasked(here: Path, report: Command) -> None:
    sweep(here / "sweep")
    write_run(here / "run", Sample(killed=True))
    before = sorted(here.rglob("*"))
    seen = report("sweep", "--json").json
    assert (seen["kind"], seen["metric"], seen["files"]) == ("sweep", "stall_ms", [])
    by_status = {row["parameters"]["stager"]: row for row in seen["rows"]}
    assert by_status["missing"]["status"] in ("failed", "unfinished")
    assert by_status["pinned_cached"]["cells"]["stall_ms"]["verdict"] in ("best", "tie")
    assert by_status["blocking"]["combination"].keys() == {"train.steps", "nproc", "stager", "join.mode"}
    assert seen["answer"] == " ".join((seen["headline"], *seen["evidence"]))
    assert seen["command"].startswith("python train.py")
    seen = report("run", "--json").json
    assert (seen["kind"], seen["status"]) == ("run", "unfinished")
    assert seen["figures"]["checkpoints"] == 3
    assert [one["state"] for one in seen["checkpoints"]] == ["complete"] * 3 + ["not complete"]
    assert sorted(here.rglob("*")) == before


def test_a_sweep_is_ranked_by_its_own_metric_by_default(here: Path, report: Command) -> None:
    sweep(here / "sweep")
    for config in here.glob("sweep/*/.hydra/config.yaml"):
        config.write_text("sweep: {metric: samples_per_s, direction: minimize}\n")
    seen = report("sweep", "--json").json
    assert (seen["metric"], seen["better"]) == ("samples_per_s", "lower")
    seen = report("sweep", "--json", "--metric", "samples_per_s").json
    assert (seen["metric"], seen["better"]) == ("samples_per_s", "lower"), "the sweep's own direction"
    seen = report("sweep", "--json", "--metric", "stall_ms").json
    assert (seen["metric"], seen["better"]) == ("stall_ms", "lower")
    seen = report("sweep", "--json", "--metric", "shadowed_steps", "--direction", "maximize").json
    assert (seen["metric"], seen["better"]) == ("shadowed_steps", "higher")
    wrong = report("sweep", "--metric", "stal_ms", code=2).err
    assert "unknown metric 'stal_ms'. Did you mean 'stall_ms'?" in wrong


def test_an_unknown_figure_is_named_and_no_page_is_replaced(here: Path, report: Command) -> None:
    given = {"a=1": [{"returned.accuracy": 0.5, "loss": 1.0}], "a=2": [{"returned.accuracy": math.nan, "loss": 2.0}]}
    for job in jobs(given, here / "sweep"):
        write_hydra(job.directory, [], config="sweep: {metric: returned.accuracy, direction: maximize}\n")
        job.write()
    assert "nan" in report("sweep").out
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    wrong = report("sweep", "--metric", "returned.acuracy", code=2).err
    assert "job in sweep has returned.acuracy. Did you mean 'returned.accuracy'? Available metrics: loss, ret" in wrong
    config = here / "sweep" / "0" / ".hydra" / "config.yaml"
    config.write_text("sweep: {metric: returned.x, direction: maximize}\n")
    assert "No completed job in sweep has returned.x." in report("sweep", code=2).err
    config.write_text("sweep: {metric: returned.accuracy}\n")
    wrong = report("sweep", code=2).err
    assert "returned.accuracy has no direction of its own. Set sweep.direction=minimize" in wrong
    config.write_bytes(before[config])
    seen = report("sweep", "--json", "--metric", "returned.accuracy").json
    assert (seen["better"], seen["rows"][1]["cells"]["returned.accuracy"]["values"]) == ("higher", ["nan"])
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before
    for job in results(here / "sweep"):
        replace(job, status="failed", error="no").write()
    assert "No answer" in report("sweep", "--metric", "loss").out, "a sweep of which all jobs failed has its page"


def test_several_directories_are_compared_and_only_a_table_is_written(
    here: Path, report: Command, no_matplotlib: None
) -> None:
    for name, stall in (("x/sweep", 3.0), ("y/sweep", 5.0)):
        sweep(here / name, {"stager=a": stall, "stager=b": 9.0}, 4)
    job = replace(result(here / "job", overrides=("sweep=mine", "stager=a")), figures=figures(4.0))
    job.write()
    write_hydra(job.directory, job.overrides)
    before = sorted(here.rglob("*"))
    seen = report("x/sweep", str(here / "y" / "sweep"), "job", "--json").json
    assert seen["parameters"][:2] == ["sweep", "stager"]
    rows = {(row["parameters"]["sweep"], row["parameters"]["stager"], row["again"]): row for row in seen["rows"]}
    assert rows["x/sweep", "a", False]["cells"]["stall_ms"]["median"] == 3
    assert rows["y/sweep", "a", False]["cells"]["stall_ms"]["median"] == 5
    assert rows["job", "a", False]["combination"] == {"sweep": "job", "stager": "a"}
    twins = [rows[name, "a", True]["cells"]["stall_ms"]["median"] for name in ("x/sweep", "y/sweep")]
    assert twins == [pytest.approx(3.05), pytest.approx(5.05)]
    assert "Written" not in report("x/sweep", "y/sweep").out
    assert sorted(here.rglob("*")) == before
    report("x/sweep", "y/sweep", "--output", "both")
    assert "report.html" in os.listdir("both")
    for twice in (("x/sweep", "x/sweep/."), ("x/sweep", "x/sweep/0")):
        assert "contain the same jobs" in report(*twice, code=2).err
    for name, metric in (("x", "loss"), ("y", "stall_ms")):
        for config in here.glob(f"{name}/sweep/*/.hydra/config.yaml"):
            config.write_text(f"sweep: {{metric: {metric}}}\n")
    wrong = report("x/sweep", "y/sweep", code=2).err
    assert "different metrics (x/sweep by loss, y/sweep by stall_ms). Choose one with --metric NAME." in wrong
    assert report("x/sweep", "y/sweep", "--metric", "loss", "--json").json["metric"] == "loss"
    for name, direction in (("x", "null"), ("y", "maximize")):
        for config in here.glob(f"{name}/sweep/*/.hydra/config.yaml"):
            config.write_text(f"sweep: {{metric: stall_ms, direction: {direction}}}\n")
    assert "rank stall_ms in different directions. Pass --d" in report("x/sweep", "y/sweep", code=2).err
    for config in here.glob("y/sweep/*/.hydra/config.yaml"):
        config.write_text("sweep: {metric: stall_ms, direction: minimize}\n")
    assert report("x/sweep", "y/sweep", "--json").json["better"] == "lower"


def test_a_sweep_is_judged_against_a_baseline_by_the_exit_code(
    here: Path, report: Command, no_matplotlib: None
) -> None:
    stalls = {"stager=a": 3.0, "stager=b": 5.0}
    sweep(here / "old", stalls, 4)
    sweep(here / "same", stalls, 4)
    sweep(here / "worse", stalls | {"stager=b": 7.0}, 4)
    sweep(here / "few", stalls, 3)
    sweep(here / "part", {"stager=a": 3.0}, 4)
    (here / "old.json").write_text(json.dumps(report("old", "--json").json))
    for path in ("old", "old.json"):
        judge = ("--baseline", path, "--fail-if", "worse:5%")
        seen = report("same", *judge).out
        assert "0 of 2 combinations are worse than the baseline by more than 5 %." in seen
        seen = report("worse", *judge, code=1).out
        rows = [line.split() for line in seen.splitlines()]
        assert ["stager=b", "5", "7", "+40", "%", "0.0286", "worse"] in rows
        assert "Worse than the baseline by more than 5 %: stager=b." in seen
        assert report("worse", "--json", *judge, code=1).json["baseline"][1]["verdict"] == "worse"
        assert "(stager=a: too few runs: 4 and 3; stager=b: too few runs" in report("few", *judge, code=2).err
        assert "(stager=b: missing)" in report("part", *judge, code=2).err
        assert "better" in report("worse", *judge, "--direction", "maximize").out
        report("worse", "--baseline", path)  # shows, and does not judge
    assert "--fail-if requires --baseline PATH: " in report("same", judge[2], judge[3], code=2).err
    assert "requires exactly one sweep. Name one directory" in report("same", "worse", "--baseline", "old", code=2).err
    assert "cannot read the baseline nix: No such file" in report("same", "--baseline", "nix", code=2).err
    (here / "old.json").write_text("[]")
    assert "old.json is not a baseline. Name the directory of a" in report("same", *judge, code=2).err


def test_a_sweep_that_was_stopped_is_reported_by_its_plan(here: Path, report: Command, no_matplotlib: None) -> None:
    sweep(here / "sweep", {"stager=a": 3.0, "stager=b": 2.0, "stager=c": 1.0}, 1, others=False)
    planned = [(f"stager={name}", number) for number, name in enumerate("abd")]
    plan = Plan(
        here / "sweep",
        tuple(PlannedJob(number, str(number), (*CONSTANT, name)) for name, number in planned),
        "python train.py -m stager=a,b,d",
        began=0.0,
        metric="stall_ms",
        direction="maximize",
    )
    plan.write()
    (here / "sweep" / "1" / "result.json").unlink()
    seen = " ".join(report("sweep").out.split())
    assert "The sweep in sweep is not complete: 1 of 3 completed, 1 stopped, 1 not started. Continue" in seen
    assert "Continue the sweep with: python train.py -m stager=a,b,d" in seen
    assert "Not compared: 1 job of earlier sweeps in sweep." in seen
    document = report("sweep", "--json").json
    assert [row["parameters"]["stager"] for row in document["rows"]] == ["a", "b"]
    assert (document["metric"], document["better"]) == ("stall_ms", "higher")
    (state,) = document["sweeps"]
    counts = {"planned": 3, "completed": 1, "failed": 0, "begun": 1, "runs": False, "not_started": 1}
    assert (state["progress"], state["others"], state["command"]) == (counts, 1, plan.command)
    with held(here / "sweep"):
        assert "1 running, 1 not started." in report("sweep").out
        assert "Continue the sweep" not in report("sweep").out
    replace(plan, jobs=plan.jobs[2:]).write()
    wrong = report("sweep", code=2).err
    assert "No job of the newest sweep in sweep has started: 0 of 1 completed, 1 not started\n" in wrong


def test_a_job_that_ends_while_the_page_is_written_is_in_the_page(
    here: Path, report: Command, monkeypatch: pytest.MonkeyPatch, no_matplotlib: None
) -> None:
    sweep(here / "sweep", {"stager=a": 3.0}, 4, others=False)
    late = JobResult.read(here / "sweep" / "3")
    (here / "sweep" / "3" / "result.json").unlink()
    write, calls = render.write, []

    def slow(comparison: Comparison, directory: Path) -> list[Path]:
        calls.append(comparison)
        late.write()
        return write(comparison, directory)

    monkeypatch.setattr(render, "write", slow)
    report("sweep")
    assert [len(each.rows[0].cells["stall_ms"].values) for each in calls] == [3, 4]


def test_a_job_that_recorded_nothing_has_its_result(here: Path, report: Command) -> None:
    failed(here / "job", 0, FAILING.split()).write()
    seen = report("job").out
    assert "job: Failed." in seen
    assert "The run has no usable records: job contains no run: metrics.jsonl is missing." in seen
    assert os.listdir("job") == ["result.json"]
    (here / "job" / "metrics.jsonl").touch()
    assert "The run has no usable records: job contains no run: job/metrics.jsonl has no records" in report("job").out


def test_the_error_of_a_run_is_reported_once_in_a_line(here: Path, report: Command) -> None:
    write_run(here / "job")
    failed(here / "job", 0, []).write()
    seen = report("job").out
    assert (seen.count("the loss is not finite"), "Traceback" in seen) == (1, False)


def test_missing_records_and_fallbacks_are_reported(here: Path, report: Command) -> None:
    write_run(here / "run", Sample(ranks=3))
    rank_file(here / "run", 1).unlink()
    file = rank_file(here / "run", 0)
    event = {"event": "fallback", "t": 1750000000.0, "step": 100, "damaged": 200, "lost": 100, "why": "a: missing"}
    file.write_text(file.read_text().replace('"event": "stall"', '"event": stall', 2))
    write_events(file, [event])
    seen = report("run").out
    assert "Skipped 2 corrupt lines of the records." in seen
    assert "No records of 1 rank (1):" in seen
    assert (
        "The run resumed from step 100, because a newer checkpoint was skipped (a: missing): 100 steps repeated."
        in seen
    )


def test_stragglers_are_named_with_the_steps_in_which_they_were_slow(here: Path, report: Command) -> None:
    write_run(here / "run")
    usual = {"event": "straggler", "t": 1750000000.0, "rank": 3, "machine": "m7", "wait": 0.041, "of": 0.12}
    told = [usual | {"step": 1200, "slow": True}, usual | {"step": 1900, "slow": False}]
    told += [usual | {"step": 2500, "slow": True}, usual | {"step": 2600, "slow": True, "rank": 4}]
    write_events(rank_file(here / "run", 0), told)
    seen = report("run").out
    for who in ("3 on machine m7 was slow from step 1200 to step 1900", "3 on machine m7 was slow from step 2500"):
        assert f"Rank {who}: the other ranks waited 41 ms of each 120 ms step." in seen
    assert seen.count("was slow") == 3


def test_many_checkpoints_are_cut_short_on_the_terminal(here: Path, report: Command) -> None:
    write_run(here / "run", Sample(steps=100, every=5, ranks=1))
    table = report("run").out.partition("Checkpoints")[2]
    steps = [line.split()[0] for line in table.splitlines()[3:] if line.strip()]
    assert steps == ["5", "10", "15", "20", "25", "30", "35", "…", "70", "75", "80", "85", "90", "95", "100"]


def test_what_is_asked_for_in_vain_is_refused(here: Path, report: Command) -> None:
    write_run(here / "run")
    assert "require a sweep, but run is a single run" in report("run", "--metric", "loss", code=2).err
    (here / "file").write_text("")
    sweep(here / "sweep")
    seen = report("sweep", "--output", "file/below", code=2)
    assert "Not decided" in seen.out, "the table is there anyway"
    assert "cannot write in file/below: Not a directory. Choose another directory with --output DIR." in seen.err


def test_figures_come_in_order_with_their_units() -> None:
    ordered = ["stall_ms", "loss", "returned.a", "returned.b", "state_bytes", "steps", "zeal"]
    assert in_order(sorted(ordered)) == ordered
    assert figure_text("state_bytes", 3 * 2**20) == "3 MiB"
    own = ("returned.tokens_per_s", "returned.bytes_per_token")  # whose unit only the task knows
    for name, text in [("lost_percent", "0.5%"), ("train_s", "0.5 s"), *((name, "0.5") for name in own)]:
        assert figure_text(name, 0.5) == text
