"""``stagereg tune``: run a program as the search chooses, and see whether the best is better.

Each trial is a fresh run of the program in a directory of its own, ``trials/N``, with its output in ``output.log`` and
a ``result.json`` like that of any job of a sweep. What fails or takes too long is a trial without a value, and the
search goes on. A single run each is enough to find what is promising and too little to believe it: so in the end the
best and the program's defaults are run again, in turns, and compared as the jobs of a sweep are.

Checkpoints of trials are deleted when the trial has ended. Where the program names a directory for them that all runs
would share, each trial gets one of its own below it, so that none goes on from where another one has stopped.

:mod:`stagereg.sweep.candidates` chooses what may be varied, ``objective`` what is wanted; ``study`` chooses trials.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stagereg.machine as machine
from stagereg.errors import ConfigError
from stagereg.launch.command_line import quoted
from stagereg.record import FILES
from stagereg.sweep.compare import compare
from stagereg.sweep.comparison import Comparison, ComparisonRow, Tie
from stagereg.sweep.figures import figures
from stagereg.sweep.objective import Objective
from stagereg.sweep.program import LOG, Composed, Program
from stagereg.sweep.result import RESULT, JobResult
from stagereg.sweep.run import Run
from stagereg.sweep.study import Study, Trial

__all__ = ["Search", "SearchVerdict"]

_HOPELESS = 5
"""Trials in a row, from the first one on, after whose failure the search gives up."""
_CHECKPOINTS = "checkpoint.dir"
_TIES = {Tie.EQUAL: "the figures are equal", Tie.OVERLAP: "their runs overlap"}


@dataclass(frozen=True)
class SearchVerdict:
    """What a search has come to.

    Attributes:
        answer: in a sentence or two.
        overrides: those to take, beside what every run was given; empty for the program's defaults.
        real: whether the best is better than the defaults beyond chance; ``None`` where that was not tried.
        comparison: of the best and the defaults, run in turns; ``None`` where they were not.
    """

    answer: str
    overrides: tuple[str, ...]
    real: bool | None = None
    comparison: Comparison | None = None


class Search:
    """Runs the trials of a study.

    Args:
        program: what to run.
        composed: its config by itself.
        goal: what is wanted.
        study: what to try.
        directory: where trials leave what they leave.
        limit_s: seconds that a run may take.
    """

    def __init__(
        self, program: Program, composed: Composed, objective: Objective, study: Study, directory: Path, limit_s: float
    ) -> None:
        self._program = program
        self._composed = composed
        self._objective = objective
        self._study = study
        self._directory = directory
        self._limit_s = limit_s

    def trials(self, upto: int) -> Iterator[Trial]:
        """Try until the study has ``upto`` trials, or everything there is was tried; yield each when it has ended.

        Raises:
            ConfigError: none of the first trials could be measured.
        """
        while len(before := self._study.tried()) < upto:
            if len(before) >= _HOPELESS and not self._study.best():
                raise ConfigError(
                    f"None of the first {len(before)} trials could be measured. The last one: {before[-1].error}\n"
                    f"What it printed is in {self.log(before[-1])}."
                )
            asked = self._study.ask()
            if asked is None:
                return
            yield self._try(asked)

    def log(self, tried: Trial) -> Path:
        """Where the output of a trial is."""
        return self._directory_of(tried) / LOG

    def judge(self, times: int) -> Iterator[JobResult | SearchVerdict]:
        """Run the best and the defaults ``times`` times each, in turns; yield every run and then the verdict.

        Runs that an earlier search has done of the same two are taken as they are.

        Raises:
            ConfigError: no trial could be measured.
        """
        best = self._study.best()
        if best is None:
            raise ConfigError("None of the trials could be measured: there is no answer.")
        defaults = next((tried for tried in self._study.tried() if not tried.overrides), None)
        if not best.overrides:
            yield SearchVerdict(f"Nothing that was tried is better than the defaults, {self._text(best)}.", ())
        elif not times:
            against = f", {self._text(defaults)} by default" if defaults and defaults.value is not None else ""
            yield SearchVerdict(
                f"Best of {len(self._study.tried())} trials: {' '.join(best.overrides)}, {self._text(best)}{against}. "
                "One run each: it is unknown whether the difference is real; --confirm 3 would show.",
                best.overrides,
            )
        else:
            yield from self._confirm(best, times)

    def _try(self, asked: Trial) -> Trial:
        try:
            result = self._run(self._directory_of(asked), asked.overrides, asked.chosen, {"num": asked.number})
        except BaseException:
            with contextlib.suppress(Exception):
                self._study.tell(asked)
            raise
        tried = dataclasses.replace(
            asked,
            status=result.status,
            value=result.figures.get(self._objective.metric.name) if result.status == "completed" else None,
            error=result.error or "",
            seconds=result.seconds,
            figures=result.figures,
        )
        self._study.tell(tried)
        return tried

    def _confirm(self, best: Trial, times: int) -> Iterator[JobResult | SearchVerdict]:
        sides = [("best", best.overrides, best.chosen), ("defaults", (), {})]
        jobs: list[JobResult] = []
        for repeat in range(times):
            # Whoever comes second may find a warmer machine, so they take turns in that, too.
            for side, overrides, chosen in sides if repeat % 2 == 0 else sides[::-1]:
                directory = self._directory / "confirm" / f"trial-{best.number}" / f"{side}-{repeat}"
                job = _before(directory, (*self._program.overrides, *overrides))
                if job is None:
                    job = self._run(directory, overrides, chosen, {"num": len(jobs)}, repeat)
                jobs.append(job)
                yield job
        direction = "maximize" if self._objective.maximize else "minimize"
        comparison = compare(jobs, self._objective.metric.name, direction)
        tuned, usual = (_row(comparison, [*self._program.overrides, *overrides]) for _, overrides, _ in sides)
        yield self._verdict(comparison, tuned, usual, best, times)

    def _verdict(
        self, comparison: Comparison, tuned: ComparisonRow, usual: ComparisonRow, best: Trial, times: int
    ) -> SearchVerdict:
        name = self._objective.metric.name
        for row, what in ((tuned, " ".join(best.overrides)), (usual, "the defaults")):
            if row.status != "completed" or name not in row.cells:
                return SearchVerdict(
                    f"Not confirmed: of {times} more runs of {what} not all could be measured: {row.error}",
                    best.overrides if row is usual else (),
                    None,
                    comparison,
                )
        figures = [f"{self._objective.text(row.cells[name].median)}{self._spread(row)}" for row in (tuned, usual)]
        turns = f"{times} runs each in turns" if times > 1 else "one more run each"
        text = f"{' '.join(best.overrides)}: {figures[0]}, {figures[1]} by default; {turns}."
        # What is chosen without a reason to is what the program has already.
        lead = () if comparison.best is usual else best.overrides
        if times == 1:
            return SearchVerdict(
                f"{text} It is unknown whether the difference is real; --confirm 3 would show.", lead, None, comparison
            )
        if (tie := comparison.tie(tuned, usual)) is not None:
            why = _TIES.get(tie, "the difference is smaller than the spread")
            end = "may be as good" if lead else "will do"
            return SearchVerdict(f"{text} A tie: {why}, so the defaults {end}.", lead, False, comparison)
        if not lead:
            return SearchVerdict(
                f"{text} The defaults are better: what the search has found was chance.", (), False, comparison
            )
        return SearchVerdict(
            f"{text} The gain is real: it is greater than the spread.", best.overrides, True, comparison
        )

    def _spread(self, row: ComparisonRow) -> str:
        spread = row.cells[self._objective.metric.name].spread
        return "" if spread is None else f" (spread {self._objective.text(spread)})"

    def _text(self, tried: Trial) -> str:
        return "not measured" if tried.value is None else self._objective.text(tried.value)

    def _directory_of(self, tried: Trial) -> Path:
        return self._directory / "trials" / str(tried.number)

    def _run(
        self,
        directory: Path,
        overrides: tuple[str, ...],
        chosen: Mapping[str, str],
        job: dict[str, Any],
        repeat: int = 0,
    ) -> JobResult:
        """Run the program once, and leave and return what came of it."""
        for old in (*directory.glob(FILES), directory / RESULT):
            old.unlink(missing_ok=True)
        kept, more = _checkpoints(self._composed, directory)
        try:
            ended = self._program.run(directory, (*overrides, *more), self._limit_s)
        finally:
            if kept is not None:
                shutil.rmtree(kept, ignore_errors=True)
        run, returned = _run(directory), _returned(directory)
        found = figures(run, returned)
        error = ended.error and (run.error if run and run.error else ended.error)
        try:
            found = found if error else {**found, self._objective.metric.name: self._objective.value(found, chosen)}
        except ConfigError as missing:
            error = str(missing) if run else "it has recorded nothing: is it a program of stagereg.main?"
        result = JobResult(
            directory,
            status="failed" if error else "completed",
            error=error or None,
            overrides=(*self._program.overrides, *overrides),
            job={"id": None, "name": self._program.name, **job},
            repeat=repeat,
            started=ended.began,
            seconds=ended.seconds,
            returned=returned,
            figures=found,
            versions=run.versions if run else {"python": platform.python_version()},
            environment=machine.describe("cpu"),
            command=self._program.line(*overrides),
        )
        result.write()
        return result


def _run(directory: Path) -> Run | None:
    try:
        return Run.read(directory)
    except ConfigError:
        return None


def _returned(directory: Path) -> Any:
    """What the task returned, where the program's own callback has kept that."""
    try:
        return JobResult.read(directory).returned
    except ConfigError:
        return None


def _before(directory: Path, overrides: tuple[str, ...]) -> JobResult | None:
    """A run that is there already and is worth as much as a new one."""
    try:
        job = JobResult.read(directory)
    except ConfigError:
        return None
    return job if job.status == "completed" and tuple(job.overrides) == overrides else None


def _row(comparison: Comparison, overrides: list[str]) -> ComparisonRow:
    return next(row for row in comparison.rows if list(row.jobs[0].overrides) == overrides)


def _checkpoints(program: Composed, directory: Path) -> tuple[Path | None, tuple[str, ...]]:
    """Where a run in ``directory`` will keep its checkpoints, as far as that is its own, and the override for it."""
    from omegaconf import OmegaConf

    written = program.get(_CHECKPOINTS)
    if not isinstance(written, str):
        return None, ()
    if "${hydra:runtime.output_dir}" in written:
        inside = Path(written.replace("${hydra:runtime.output_dir}", str(directory)))
        return (inside if "${" not in str(inside) else None), ()
    try:
        shared = Path(OmegaConf.select(OmegaConf.create(program.config), _CHECKPOINTS))
    except Exception:  # what only the program can resolve is taken to depend on its run
        return None, ()
    own = shared / f"tune-{directory.parent.name}-{directory.name}"
    return own, (f"{_CHECKPOINTS}={quoted(str(own))}",)
