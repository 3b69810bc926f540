"""Sweeps into one directory: whatever came before there, each job ends as it does alone, and nothing is mixed."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import stagereg.sweep.render as render
import stagereg.sweep.render.tables as tables
from stagereg import Checkpointer
from stagereg.sweep.plan import Plan
from stagereg.sweep.result import JobResult, jobs_in
from stagereg.sweep.reuse import held

from . import programs
from .programs import App

STEPS = 4
VALUES = ("1", "2", "3")
CONFIG = """
defaults: [sweep: compare, _self_]
lr: 0
size: 0
scale: {scale}
sweep: {{metric: returned.score, direction: minimize}}
"""


@dataclass(frozen=True)
class Sweep:
    """One sweep: what it tries, how often, with which config, and what happens to it."""

    values: tuple[str, ...] = VALUES
    repeats: int = 1
    size: str = ""  # one more override; none if empty
    scale: int = 1  # in the YAML file, so in no override
    raises: str = ""  # the value of which every job raises
    killed_after: int | None = None  # steps of all jobs together
    how: type[BaseException] = KeyboardInterrupt
    batch: int | None = None

    @property
    def planned(self) -> set[tuple[str, int, bool]]:
        """Value, repeat, A/A of each job."""
        found = {(value, at, False) for value in self.values for at in range(self.repeats * self.values.count(value))}
        return found | {(self.values[0], at, True) for at in range(self.repeats if self.repeats > 1 else 0)}

    @property
    def overrides(self) -> list[str]:
        size = [f"size={self.size}"] if self.size else []
        batch = [f"hydra.sweeper.max_batch_size={self.batch}"] if self.batch else []
        return [f"lr={','.join(self.values)}", f"sweep.repeats={self.repeats}", *size, *batch]


def sweeps() -> st.SearchStrategy[Sweep]:
    """One in three is killed, one in three has a value that raises."""
    values = st.lists(st.sampled_from(VALUES), min_size=1, max_size=4).map(tuple)
    return st.builds(
        Sweep,
        values=values,
        repeats=st.sampled_from((1, 1, 2, 3)),
        size=st.sampled_from(("", "", "5")),
        scale=st.sampled_from((1, 1, 1, 2)),
        raises=st.sampled_from(("", "", *VALUES)),
        killed_after=st.none() | st.integers(1, 14),
        how=st.sampled_from((KeyboardInterrupt, SystemExit)),
        batch=st.sampled_from((None, None, 2)),
    )


def after(score: int, cfg: Any, step: int) -> int:
    """One step of training: no other job has the same."""
    return zlib.crc32(f"{score} {cfg.lr} {cfg.size} {cfg.scale} {cfg.sweep.repeat} {cfg.sweep.again} {step}".encode())


def alone(cfg: Any) -> int:
    score = 0
    for step in range(1, STEPS + 1):
        score = after(score, cfg, step)
    return score


@dataclass
class Directory:
    """One directory that sweeps go to, in this process."""

    folder: Path
    left: int | None = None  # steps until the kill
    how: type[BaseException] = KeyboardInterrupt
    raises: str = ""
    at_the_end: set[Path] = field(default_factory=set)  # jobs that were killed after their last step
    ranked: list[JobResult] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def train(self, cfg: Any) -> Any:
        output = Path(HydraConfig.get().runtime.output_dir)
        state: dict[str, Any] = {"score": 0}
        with Checkpointer(str(output / "checkpoints"), every=1, stager="blocking") as checkpointer:
            for step in range((checkpointer.restore(state) or 0) + 1, STEPS + 1):
                state["score"] = after(state["score"], cfg, step)
                checkpointer.maybe_save(step, state)
                checkpointer.wait()
                if str(cfg.lr) == self.raises and step == 2:
                    raise ValueError("as planned")
                if self.left is not None:
                    self.left -= 1
                    if self.left == 0:
                        self.at_the_end |= {output} if step == STEPS else set()
                        raise self.how(143)
        return {"score": state["score"]}

    def run(self, sweep: Sweep, *more: str) -> int:
        """Run a sweep; return its exit code, 130 for Ctrl-C."""
        (self.folder / "app.yaml").write_text(CONFIG.format(scale=sweep.scale))
        self.left, self.how, self.raises = sweep.killed_after, sweep.how, sweep.raises
        self.ranked = []
        quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
        sys.argv = ["app.py", "-m", *sweep.overrides, *quiet, *more, f"hydra.sweep.dir={self.out}"]
        try:
            hydra.main(config_path=str(self.folder), config_name="app", version_base="1.3")(self.train)()
        except KeyboardInterrupt:
            return 130
        except SystemExit as ended:
            return int(ended.code or 0)
        finally:
            GlobalHydra.instance().clear()
        return 0


@pytest.fixture(scope="module")
def pages() -> Iterator[list[Any]]:
    """The comparisons that sweeps end with; drawing them takes most of the time."""
    seen: list[Any] = []
    root, argv = logging.getLogger(), sys.argv
    handlers = root.handlers[:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "terminal", lambda comparison: None)
        patch.setattr(render, "write", lambda comparison, directory: seen.append(comparison) or [Path("report.html")])
        yield seen
    sys.argv, root.handlers[:] = argv, handlers


def check(directory: Directory, sweep: Sweep, code: int, before: dict[Path, bytes], comparisons: Sequence[Any]) -> None:
    for job in jobs_in(directory.out):
        cfg = OmegaConf.load(job.directory / ".hydra" / "config.yaml")
        if job.status == "completed":
            assert job.returned == {"score": alone(cfg)}, job.directory
            assert job.figures["returned.score"] == alone(cfg)
        elif job.status == "failed" and "as planned" not in str(job.error):
            assert "no step was trained" in str(job.error)
            assert job.directory in directory.at_the_end
            assert not job.figures
    for file, content in before.items():
        assert file.read_bytes() == content, "a completed result changed"
    identities = [(job.identity, (job.directory / ".hydra/config.yaml").read_text()) for job in jobs_in(directory.out)]
    assert len(set(identities)) == len(identities), "one job twice"
    plan = Plan.read(directory.out)
    assert plan is not None
    assert not plan.progress(jobs_in(directory.out)).runs
    if code in (130, 143):
        assert directory.left == 0
        return
    assert code == (any(job.status == "failed" for row in comparisons[-1].rows for job in row.jobs))
    ranked = [job for row in comparisons[-1].rows for job in row.jobs]
    keys = [(dict(each.split("=") for each in job.overrides), job.repeat, job.again) for job in ranked]
    assert {(by_key["lr"], repeat, again) for by_key, repeat, again in keys} == sweep.planned
    assert len(keys) == len(sweep.planned)
    assert {by_key.get("size", "") for by_key, _, _ in keys} == {sweep.size}
    scales = {OmegaConf.load(job.directory / ".hydra" / "config.yaml").scale for job in ranked}
    assert scales == {sweep.scale}
    progress = plan.progress(jobs_in(directory.out))
    assert progress.completed + progress.failed == progress.planned == len(sweep.planned)


def completed(out: Path) -> dict[Path, bytes]:
    files = {path: path.read_bytes() for path in out.glob("*/result.json")}
    return {path: content for path, content in files.items() if json.loads(content)["status"] == "completed"}


def run_all(sequence: Sequence[Sweep], comparisons: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Directory(Path(folder))
        for sweep in sequence:
            before = completed(directory.out)
            code = directory.run(sweep)
            check(directory, sweep, code, before, comparisons)


def test_each_job_ends_as_it_does_alone_whatever_was_in_the_directory(pages: list[Any]) -> None:
    """A value in front of an unfinished one, in another order; more repeats; an edited YAML; a smaller sweep."""
    sequence = [
        Sweep(("1", "2"), killed_after=STEPS + 2),
        Sweep(("3", "1", "2"), raises="3"),
        Sweep(("2",), repeats=2),
        Sweep(("2",), scale=2),
        Sweep(("3", "3"), batch=1),
    ]
    run_all(sequence, pages)


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("SEQUENCES", "20")))
@given(st.lists(sweeps(), min_size=2, max_size=4))
def test_each_job_of_any_sweeps_into_one_directory_ends_as_it_does_alone(
    pages: list[Any], sequence: list[Sweep]
) -> None:
    run_all(sequence, pages)


def test_a_job_that_resumes_has_the_step_and_one_without_a_step_has_no_figures(
    pages: list[Any], tmp_path: Path
) -> None:
    directory = Directory(tmp_path)
    for killed_after in (STEPS, STEPS - 1):
        directory.run(Sweep(("1",), killed_after=killed_after))
        directory.run(Sweep(("1",)))
        job = JobResult.read(directory.out / "0")
        if killed_after == STEPS:
            assert (job.status, job.figures, job.resumed) == ("failed", {}, STEPS)
            how = f"no step was trained: the job resumed from its last step, {STEPS}. To run it again, delete "
            assert job.error == f"{how}{directory.out / '0'}."
            shutil.rmtree(directory.out / "0")
    assert (job.status, job.resumed, len(job.figures)) == ("completed", STEPS - 1, 1)


def test_a_result_that_cannot_be_read_and_another_job_in_the_way_are_refused_before_the_first_job(
    pages: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Directory(tmp_path)
    assert directory.run(Sweep(("1",))) == 0
    result = directory.out / "0" / "result.json"
    whole = result.read_bytes()
    result.write_bytes(whole[:40])
    assert directory.run(Sweep(("2", "1"))) == 1
    assert (
        f"Delete {result.parent} to run that job again, or choose another hydra.sweep.dir." in capsys.readouterr().err
    )
    assert result.read_bytes() == whole[:40]
    result.write_bytes(whole)
    for sweep, put in ((Sweep(("2",)), "lr=2"), (Sweep(("1",), scale=2), "lr=1")):
        assert directory.run(sweep, "hydra.sweep.subdir=0") == 1
        holds = "0 contains lr=1 with another config or of another program" if put == "lr=1" else "0 contains lr=1"
        said = (
            f"{holds}, but this sweep would put {put} there. Choose another hydra.sweep.dir, or delete that directory."
        )
        assert said in capsys.readouterr().err
    assert result.read_bytes() == whole
    assert [job.job["num"] for job in jobs_in(directory.out)] == [0]
    assert directory.run(Sweep(("1",)), "hydra.job.name=other") == 0, "another program"
    assert [job.job["num"] for job in jobs_in(directory.out)] == [0, 1]


def test_a_file_of_the_user_with_the_name_of_the_plan_is_refused_and_stays(
    pages: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Directory(tmp_path)
    directory.out.mkdir()
    own = directory.out / "sweep.json"
    own.write_text('{"method": "grid"}')
    assert directory.run(Sweep(("1",))) == 1
    assert "sweep.json: 'format'. Move or delete this file" in capsys.readouterr().err
    assert own.read_text() == '{"method": "grid"}'
    assert not jobs_in(directory.out)


def test_a_second_sweep_in_the_directory_of_a_running_one_is_refused(
    pages: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Directory(tmp_path)
    with held(directory.out):
        assert directory.run(Sweep(("1",))) == 1
    assert "is in use by another sweep, process " in capsys.readouterr().err
    assert [path.name for path in directory.out.iterdir()] == [".sweep"], "it has written nothing"
    assert directory.run(Sweep(("1",))) == 0


def test_a_job_is_the_same_only_if_its_config_is_known_to_be_the_same(
    pages: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by an environment variable in it, and if Hydra saves no config."""
    directory = Directory(tmp_path)
    for scale, more in ((1, "+note=${oc.env:NOTE_OF_TEST,none}"), (2, "hydra.output_subdir=null")):
        for then, note, jobs in ((1, "a", 1), (1, "a", 1), (scale, "b", 2)):
            monkeypatch.setenv("NOTE_OF_TEST", note)
            assert directory.run(Sweep(("1",), scale=then), more) == 0
            assert len(list(directory.out.glob("*/result.json"))) == jobs
        shutil.rmtree(directory.out)
    directory.run(Sweep(("1",)), more)
    result = directory.out / "0" / "result.json"  # of an earlier release
    result.write_text(result.read_text().replace('"config": ', '"other": '))
    directory.run(Sweep(("1",)), more)
    assert len(list(directory.out.glob("*/result.json"))) == 2


@pytest.mark.parametrize(
    ("subdir", "line"),
    [
        (".job${lr}", "where `stagereg report` does not search. Choose a folder under "),
        ("../${lr}", "where `stagereg report` does not search. Choose a folder under "),
        ("${lr}", "Choose folders that do not contain each other."),
    ],
)
def test_a_directory_in_which_no_report_finds_a_job_is_refused(
    pages: list[Any], subdir: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Directory(tmp_path)
    assert directory.run(Sweep(("1", "1/2")), f"hydra.sweep.subdir={subdir}") == 1
    assert line in capsys.readouterr().err
    assert not jobs_in(directory.out)


def test_an_option_of_a_group_cannot_compare_the_sweep_in_another_way(
    pages: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, way in (("one", "maximize"), ("two", "minimize")):
        (tmp_path / "exp").mkdir(exist_ok=True)
        (tmp_path / "exp" / f"{name}.yaml").write_text(f"# @package _global_\nsweep: {{direction: {way}}}\n")
    assert Directory(tmp_path).run(Sweep(("1",)), "+exp=one,two") == 1
    said = capsys.readouterr().err
    assert "+exp=one sets sweep.direction=maximize, but the sweep has sweep.direction=" in said
    assert "set it on the command line, as in sweep.direction=maximize." in said


class Unruly(Directory):
    """Its jobs change the working directory, and delete what the job before has left."""

    def train(self, cfg: Any) -> Any:
        os.chdir("/")
        shutil.rmtree(self.out / "0", ignore_errors=str(cfg.lr) == "1")
        return super().train(cfg)


def test_a_job_that_moves_away_moves_no_other_and_one_that_is_gone_is_no_success(
    pages: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = Unruly(tmp_path)
    assert directory.run(Sweep(("1",))) == 0
    assert Path.cwd() == tmp_path
    assert directory.run(Sweep(("1", "2"))) == 1
    assert pages[-1].warnings[-1].startswith(f"The sweep in {directory.out} is not complete: 1 of 2 completed")


def test_a_stopped_sweep_prints_how_many_jobs_are_completed_and_what_runs_the_others(
    pages: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = Directory(tmp_path)
    for killed, count in ((1, 0), (STEPS + 1, 1)):
        assert directory.run(Sweep(killed_after=killed)) == 130
        line = capsys.readouterr().err.splitlines()[-1]
        start = f"{count} of 3 jobs are completed. Report them: stagereg report out. Run the others: "
        assert line.startswith(start)
        assert shlex.split(line.removeprefix(start))[-1] == f"hydra.sweep.dir={directory.out}"
    plan = Plan.read(directory.out)
    assert plan is not None
    assert plan.progress(jobs_in(directory.out)).text == "1 of 3 completed, 1 stopped, 1 not started"


TRAINS = """
import os, time, zlib
import hydra
from hydra.core.hydra_config import HydraConfig
from stagereg import Checkpointer

@hydra.main(config_path=".", config_name="app", version_base="1.3")
def main(cfg):
    state = {"score": 0}
    checkpoints = os.path.join(HydraConfig.get().runtime.output_dir, "checkpoints")
    with Checkpointer(checkpoints, every=1, stager="blocking") as checkpointer:
        for step in range((checkpointer.restore(state) or 0) + 1, 5):
            state["score"] = zlib.crc32(f"{state['score']} {cfg.b} {step}".encode())
            checkpointer.maybe_save(step, state)
            checkpointer.wait()
            if cfg.b == 2 and step == cfg.hangs_at:
                print("IN THE JOB", flush=True)
                time.sleep(600)
    return {"score": state["score"]}

main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill"])
def test_a_stopped_sweep_is_continued_by_the_printed_command_and_by_another_one(
    how: signal.Signals, tmp_path: Path
) -> None:
    """Ctrl-C also where the directory is a date, which the printed command names."""
    App(tmp_path, TRAINS, f"{programs.PLAIN_CONFIG}hangs_at: ${{oc.decode:${{oc.env:HANGS_AT,0}}}}")
    killed = how == signal.SIGKILL
    own = ["hydra.sweep.dir='out/a b'"] if killed else []
    how_to_run: Any = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how_to_run |= {"env": programs.environment() | {"HANGS_AT": "3"}, "start_new_session": True}
    sweep = subprocess.Popen([sys.executable, "app.py", "-m", "b=1,2,3", *own], **how_to_run)
    assert sweep.stdout is not None
    assert any("IN THE JOB" in line for line in sweep.stdout)
    (running,) = (path.parent for path in tmp_path.rglob("sweep.json"))
    plan = Plan.read(running)
    assert plan is not None
    assert plan.progress(jobs_in(running)).text == "1 of 3 completed, 1 running, 1 not started"
    os.killpg(sweep.pid, how)
    _, said = sweep.communicate(timeout=30)
    assert plan.progress(jobs_in(running)).text == "1 of 3 completed, 1 stopped, 1 not started"
    before = (running / "0" / "result.json").read_bytes()
    continued = shlex.join([sys.executable, "app.py", "-m", "b=4,3,2,1", *own])
    if not killed:
        assert sweep.returncode == 130
        continued = said.splitlines()[-1].partition(" Run the others: ")[2]
    how_to_run["env"]["HANGS_AT"] = "0"
    ended = subprocess.run(continued, shell=True, timeout=100, check=False, **how_to_run)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    jobs = {job.overrides[0]: job for job in jobs_in(running)}
    assert len(jobs) == (4 if killed else 3)
    for override, job in jobs.items():
        score = 0
        for step in range(1, 5):
            score = zlib.crc32(f"{score} {override[-1]} {step}".encode())
        assert (job.status, job.returned, job.resumed) == (
            "completed",
            {"score": score},
            3 if override == "b=2" else None,
        )
    assert (running / "0" / "result.json").read_bytes() == before
    assert jobs["b=2"].directory.name == "1"
