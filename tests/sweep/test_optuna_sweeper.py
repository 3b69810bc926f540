"""``hydra/sweeper=stagereg_optuna``: what it tries, what it keeps, and how a search ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

import stagereg.sweep.optuna_sweeper as optuna_sweeper
from stagereg.sweep.interleaved import SweepError
from stagereg.sweep.optuna_sweeper import OptunaSweeper

from . import programs
from .programs import App

optuna = pytest.importorskip("optuna", minversion="4")

SHIPPED = Path(__file__).parents[2] / "conf" / "hydra" / "sweeper" / "stagereg_optuna.yaml"
OPTUNA = ("hydra/sweeper=stagereg_optuna",)
Job = Mapping[str, str]


class Search:
    """A sweeper whose jobs are calls of a function; each search in the same folder goes on with the same study.

    Attributes:
        jobs: overrides of the jobs that ran, by key.
        numbers: of these jobs.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.jobs: list[dict[str, str]] = []
        self.numbers: list[int] = []
        # Hydra's own would scan for plugins, and import some of its modules anew.
        monkeypatch.setattr(Plugins, "instance", lambda: SimpleNamespace(instantiate_launcher=lambda **_: self))
        monkeypatch.setattr(optuna_sweeper, "check_directories", lambda *_: None)  # there is nothing to compose

    def __call__(self, value: Callable[[Job], Any], *overrides: str, **settings: Any) -> list[dict[str, str]]:
        """Search, and return the jobs that were run for it."""
        self.value = value
        before = len(self.jobs)
        shipped: Any = OmegaConf.load(SHIPPED)
        arguments = {str(key): shipped._get_node(key) for key in shipped if not str(key).startswith("_")}
        storage = f"sqlite:///{self.folder}/study.db"
        plain = {"storage": storage, "repeats": 1, "metric": None, "direction": None}
        sweeper = OptunaSweeper(**{**arguments, "n_trials": 20, "seed": 0, **plain, **settings})
        choices = {"stager": "blocking", "data": "even"}
        hydra = {"runtime": {"choices": choices}, "sweep": {"dir": str(self.folder)}}
        config = OmegaConf.create({"hydra": hydra, "lr": 2, "rate": 0.5, "stager": {"threads": 2}})
        context: Any = SimpleNamespace(config_loader=None)
        sweeper.setup(hydra_context=context, task_function=lambda cfg: None, config=config)
        sweeper.sweep(list(overrides))
        return self.jobs[before:]

    def launch(self, jobs: list[list[str]], initial_job_idx: int) -> list[JobReturn]:
        """What the sweeper calls of a launcher."""
        ((*overrides,),) = jobs
        job = dict(override.lstrip("+").split("=") for override in overrides)
        self.jobs.append(job)
        self.numbers.append(initial_job_idx)
        returned = JobReturn(status=JobStatus.COMPLETED)
        try:
            returned.return_value = self.value(job)
        except ValueError as error:
            returned.status, returned.return_value = JobStatus.FAILED, error
        return [returned]

    def study(self) -> Any:
        return optuna.load_study(study_name=None, storage=f"sqlite:///{self.folder}/study.db")


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Search:
    return Search(tmp_path, monkeypatch)


def lr(job: Job) -> float:
    return float(job["lr"])


def test_every_combination_is_tried_once_the_programs_own_first(search: Search) -> None:
    jobs = search(lr, "lr=1,2,3", "x=range(0,6,2)", "nproc=1")
    assert jobs[0]["lr"] == "2", "as the program has it by itself"
    assert sorted((job["lr"], job["x"]) for job in jobs) == [(lr, x) for lr in "123" for x in "024"]
    assert {job["nproc"] for job in jobs} == {"1"}
    assert search.numbers == list(range(9))
    assert search.study().best_value == 1.0


@pytest.mark.parametrize(
    ("override", "kind", "fits"),
    [
        ("lr=interval(1,9)", int, lambda value: 1 <= value <= 9),
        ("x=int(interval(1,9))", int, lambda value: 1 <= value <= 9),
        ("rate=interval(0.25,0.75)", float, lambda value: 0.25 <= value <= 0.75),
        ("+x=tag(log,interval(0.001,1))", float, lambda value: 0.001 <= value <= 1),
        ("x=range(4,0,-1)", int, lambda value: 1 <= value <= 4),
        ("x=true,null,'a b'", str, lambda value: value in ("True", "null", "'a b'")),
    ],
)
def test_hydras_grammar_names_the_values(
    override: str, kind: type, fits: Callable[[Any], bool], search: Search
) -> None:
    jobs = search(lambda job: 1.0, override, n_trials=5)
    values = [job[override.partition("=")[0].lstrip("+")] for job in jobs]
    assert len(set(values)) == len(values) >= 3
    assert all(fits(kind(value)) for value in values)


def test_an_option_is_varied_only_with_components_that_have_it(search: Search) -> None:
    jobs = search(lambda job: 1.0, "stager.detect=declared,content", "stager=blocking,incremental")
    seen = {(job["stager"], job.get("stager.detect")) for job in jobs}
    assert seen == {("blocking", None), ("incremental", "declared"), ("incremental", "content")}


def test_a_search_goes_on_where_it_was_stopped(search: Search) -> None:
    def stopped(job: Job) -> float:
        if len(search.jobs) == 3:
            raise KeyboardInterrupt
        return lr(job)

    with pytest.raises(KeyboardInterrupt):
        search(stopped, "lr=1,2,3,4", "sweep.repeats=1")
    again = search(lr, "lr=1,2,3,4", n_trials=3)
    assert len(again) == 1, "two were done, and what was interrupted is as good as not tried"
    rest = search(lr, "lr=1,2,3,4")
    tried = [job["lr"] for job in (*search.jobs[:2], *again, *rest)]
    assert sorted(tried) == ["1", "2", "3", "4"]
    assert search.numbers == [0, 1, 2, 3, 4], "no job runs where an interrupted one has left its files"
    assert "RUNNING" not in [trial.state.name for trial in search.study().trials]


def test_a_job_that_fails_or_has_no_number_ends_its_trial_alone(search: Search) -> None:
    def value(job: Job) -> Any:
        if job["lr"] == "1":
            raise ValueError("no")
        return {"2": float("nan"), "3": "text", "4": 0.5}[job["lr"]]

    assert len(search(value, "lr=1,2,3,4")) == 4
    assert search(value, "lr=1,2,3,4") == [], "what failed is not tried again"
    assert search.study().best_params == {"lr": "4"}


def test_the_value_of_a_trial_is_the_median_of_its_jobs(search: Search) -> None:
    values = iter([1.0, 2.0, 9.0])
    jobs = search(lambda job: next(values), "rate=interval(0.0,1.0)", repeats=3, n_trials=1)
    assert [job["sweep.repeat"] for job in jobs] == ["0", "1", "2"]
    assert search.study().best_value == 2.0
    assert search.study().trials[0].intermediate_values == {0: 1.0, 1: 1.5, 2: 2.0}, "what the pruner compares"


def test_a_trial_that_is_worse_than_the_others_is_pruned(search: Search) -> None:
    jobs = search(lr, "lr=range(1,20)", repeats=3, n_trials=19)
    states = [trial.state.name for trial in search.study().trials if trial.state.name != "FAIL"]
    assert states[:4] == ["COMPLETE"] * 4
    assert "PRUNED" in states
    assert len(jobs) == 3 * states.count("COMPLETE") + states.count("PRUNED")


@pytest.mark.parametrize(
    ("settings", "best"),
    [
        ({"metric": "stall_ms"}, "1"),
        ({"metric": "samples_per_s"}, "3"),
        ({"direction": "maximize", "sampler": OmegaConf.create({"_target_": "optuna.samplers.RandomSampler"})}, "3"),
    ],
)
def test_the_direction_is_that_of_the_metric(settings: dict[str, Any], best: str, search: Search) -> None:
    search(lr, "lr=1,2,3", **settings)
    assert search.study().best_params == {"lr": best}


def test_another_search_is_not_mixed_into_a_study(search: Search) -> None:
    search(lr, "lr=1,2", "nproc=1")
    same = ("lr=1,2", "nproc=1")
    others = [(("lr=1,2", "nproc=2"), {}), (("lr=1,3", "nproc=1"), {})]
    for overrides, settings in (*others, (same, {"direction": "maximize"}), (same, {"metric": "loss"})):
        with pytest.raises(SweepError, match="has another search, whose values cannot be mixed"):
            search(lr, *overrides, **settings)
    assert len(search.jobs) == 2


@pytest.mark.parametrize(
    ("override", "settings", "message"),
    [
        ("lr=1", {}, "There is nothing to search"),
        ("lr=interval(2,1)", {}, "lr=interval"),
        ("lr=tag(log,interval(0,1))", {}, "lr=tag"),
        ("sweep.repeats=1,2", {}, "goes for the whole sweep"),
        ("lr=1,2", {"repeats": 0}, "sweep.repeats=0 is no number of repeats"),
        ("lr=1,2", {"storage": "nope://x"}, "Optuna cannot use nope://x"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_a_job(
    override: str, settings: dict[str, Any], message: str, search: Search
) -> None:
    with pytest.raises(SweepError) as caught:
        search(lr, override, **settings)
    assert message in str(caught.value)
    assert search.jobs == []


@pytest.mark.slow
def test_a_search_of_a_program_ends_with_the_comparison(tmp_path: Path) -> None:
    app = App(tmp_path, programs.PLAIN, programs.PLAIN_CONFIG)
    ended = app.sweep(*OPTUNA, "a=fine,raise", "b=range(1,4)", "sweep.direction=maximize", "hydra.sweeper.n_trials=6")
    assert ended.returncode == 1, "a job failed"
    assert "Best by returned.score: a=fine b=3" in ended.stdout, ended.stdout + ended.stderr
    assert "sweep.repeats=3 would show" in ended.stdout
    assert sorted(job["status"] for job in app.results()) == ["completed"] * 3 + ["failed"] * 3
    assert {"study.db", "multirun.yaml", "report.html", "compare.csv"} <= set(os.listdir(tmp_path / "out"))
    again = app.sweep(*OPTUNA, "a=fine,raise", "b=range(1,4)", "sweep.direction=maximize", "hydra.sweeper.n_trials=6")
    assert len(app.results()) == 6
    assert "Best by returned.score: a=fine b=3" in again.stdout


def test_a_search_in_one_directory_is_refused_before_a_job(tmp_path: Path) -> None:
    app = App(tmp_path, programs.RANKS, programs.RANKS_CONFIG)
    ended = app.sweep(*OPTUNA, "b=1,2", "checkpoint.dir=one", "hydra.sweeper.n_trials=2")
    assert ended.stderr.startswith("stagereg: jobs 0 and 1 would both have checkpoint.dir=one, and one resume from ")
    assert (ended.returncode, app.results()) == (1, [])


def test_without_optuna_one_line_says_what_to_install(tmp_path: Path) -> None:
    app = App(tmp_path, programs.PLAIN.replace("main()\n", "sys.modules['optuna'] = None\nmain()\n"), "a: 1\nb: 1\n")
    ended = app.run("-m", *OPTUNA, "b=1,2")
    assert ended.returncode == 1
    assert "pip install 'hydra-stagereg[optuna]'" in ended.stderr
    assert "Traceback" not in ended.stderr
