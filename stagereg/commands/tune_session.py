"""The output of one ``stagereg tune``: what is varied, each trial as it ends, all of them, and the answer.

With ``--json`` the progress goes to stderr, and one document has the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stagereg.machine as machine
import stagereg.output as output
from stagereg.errors import ConfigError
from stagereg.sweep.candidates import space
from stagereg.sweep.objective import Objective
from stagereg.sweep.program import Program
from stagereg.sweep.search_space import refuse_sweeps
from stagereg.sweep.study import Study, Trial
from stagereg.sweep.tune_space import Parameter, Space
from stagereg.sweep.tuning import Search, SearchVerdict

__all__ = ["Session"]


class Session:
    """One search.

    Args:
        asked: the command line, checked.
        program: what to run.
        directory: where all is kept; it is this process's alone.
    """

    def __init__(self, asked: argparse.Namespace, program: Program, directory: Path) -> None:
        self._asked = asked
        self._program = program
        self._directory = directory

    def run(self) -> int:
        """Search and print the answer. Returns 0, or 1 if nothing could be measured.

        Raises:
            ConfigError: something that was asked for cannot be had; nothing was run.
        """
        objective, space, study, search = self._prepared()
        self._begin(objective, space, study)
        try:
            for tried in self._trials(search, study):
                self._progress(objective, search, study, tried)
            if len(study.tried()) < self._asked.trials:
                self._say(f"All {len(study.tried())} combinations were tried.")
            verdict = self._judged(objective, search)
        except ConfigError as error:
            if study.best():
                raise
            output.progress()
            self._table(objective, search, study)
            print(f"stagereg: {error}", file=sys.stderr)
            return 1
        self._end(objective, space, search, study, verdict)
        return 0

    def _prepared(self) -> tuple[Objective, Space, Study, Search]:
        asked, program = self._asked, self._program
        refuse_sweeps(program.overrides)
        output.progress(f"composing {program.script}")
        composed = program.compose()
        objective = Objective.of(composed, asked.metric, asked.direction, _seconds(asked.mtbf))
        with output.stdout_to_stderr():  # components are imported, and may print
            _import_plugins(program, composed.config)
            varied = space(composed, program.overrides, asked.over, asked.only, objective.mtbf_s is not None)
        database = asked.database or str(self._directory / "study.db")
        belongs = {"program": program.line(), **objective.plain()}
        study = Study(database, varied, belongs, objective.maximize, asked.seed)
        output.progress()
        return (
            objective,
            varied,
            study,
            Search(program, composed, objective, study, self._directory, asked.trial_timeout),
        )

    def _begin(self, objective: Objective, space: Space, study: Study) -> None:
        if busy := machine.noise_warning(os.getloadavg()[0], machine.cores()):
            print(busy, file=sys.stderr, flush=True)
        if self._asked.json:
            return
        towards = "the most" if objective.maximize else "the least"
        output.echo(
            f"{self._program.line()}: searching for {towards} {objective.metric.head}, in {self._directory}", "bold"
        )
        rows = [(p.key, str(p.values).replace(",", ", "), _where(p, space)) for p in space.parameters]
        output.table("", ("varied", "over", "with"), rows)
        for line in space.left_out:
            output.echo(f"  not tried: {line}")
        if done := len(study.tried()):
            output.echo(f"{done} of {self._asked.trials} trials were done before: going on.")
        output.echo()

    def _trials(self, search: Search, study: Study) -> Iterator[Trial]:
        self._running("trial", len(study.tried()), self._asked.trials)
        for tried in search.trials(self._asked.trials):
            output.progress()
            yield tried
            self._running("trial", len(study.tried()), self._asked.trials)
        output.progress()

    def _running(self, what: str, done: int, of: int) -> None:
        if done < of:
            output.progress(f"{what} {done + 1} of {of} is running")

    def _progress(self, objective: Objective, search: Search, study: Study, tried: Trial) -> None:
        progress = f"trial {len(study.tried())}/{self._asked.trials}"
        what = " ".join(tried.overrides) or "the defaults"
        if tried.value is None:
            self._say(f"{progress}  failed: {tried.error}  {what}  (see {search.log(tried)})", "yellow")
            return
        best = study.best()
        so_far = "  best so far" if best and best.number == tried.number and tried.overrides else ""
        self._say(f"{progress}  {objective.text(tried.value)}  {what}  ({tried.seconds:.1f} s){so_far}")

    def _judged(self, objective: Objective, search: Search) -> SearchVerdict:
        runs = 2 * self._asked.confirm
        self._running("confirming, run", 0, runs)
        for number, came in enumerate(search.judge(self._asked.confirm), 1):
            output.progress()
            if isinstance(came, SearchVerdict):
                return came
            value = came.figures.get(objective.metric.name)
            text = f"failed: {came.error}" if came.status != "completed" or value is None else objective.text(value)
            side = came.directory.name.partition("-")[0]
            self._say(f"confirming {number}/{runs}  {text}  {side}")
            self._running("confirming, run", number, runs)
        raise AssertionError("a search that ends has a verdict")

    def _end(self, objective: Objective, space: Space, search: Search, study: Study, verdict: SearchVerdict) -> None:
        command = self._program.line(*verdict.overrides)
        notes = _notes(objective, space, verdict)
        if self._asked.json:
            best = study.best()
            output.as_json(
                {
                    **objective.plain(),
                    "answer": verdict.answer,
                    "notes": notes,
                    "command": command,
                    "overrides": verdict.overrides,
                    "real": verdict.real,
                    "best": best and dataclasses.asdict(best),
                    "confirmed": _confirmed(objective, verdict),
                    "trials": [dataclasses.asdict(tried) for tried in study.tried()],
                    "space": space.plain(),
                    "not_tried": space.left_out,
                    "directory": self._directory,
                }
            )
            return
        output.echo()
        self._table(objective, search, study)
        output.echo()
        output.echo(verdict.answer, "bold")
        for note in notes:
            output.echo(note)
        output.echo()
        output.echo(command)

    def _table(self, objective: Objective, search: Search, study: Study) -> None:
        """All trials, the best first."""
        if self._asked.json:
            return
        sign = -1 if objective.maximize else 1
        rows = []
        for tried in sorted(study.tried(), key=lambda one: (one.value is None, sign * (one.value or 0.0), one.number)):
            what = " ".join(tried.overrides) or "the defaults"
            text = "failed" if tried.value is None else objective.text(tried.value)
            why = "" if tried.value is not None else f"\n{tried.error}\n{search.log(tried)}"
            rows.append((search.log(tried).parent.name, text, f"{what}{why}"))
        output.table("", ("in trials/", objective.metric.head, "with"), rows)

    def _say(self, text: str, style: str = "") -> None:
        if self._asked.json:
            print(text, file=sys.stderr, flush=True)
        else:
            output.echo(text, style)
            sys.stdout.flush()


def _where(parameter: Parameter, space: Space) -> str:
    """With which choices a parameter is asked for, where that is not all of them."""
    group = next((p for p in space.parameters if p.path == parameter.group), None)
    if group is None or set(group.values.texts()) <= {*parameter.options}:
        return ""
    return f"{parameter.group} {', '.join(parameter.options)}"


def _notes(objective: Objective, space: Space, verdict: SearchVerdict) -> list[str]:
    """What the reader of the answer should know."""
    interval = next((each for each in verdict.overrides if each.startswith("checkpoint.every=")), None)
    if interval is None or objective.mtbf_s is not None:
        return []
    return [
        f"{interval} was judged by {objective.metric.name} alone, not by how often a checkpoint is paid for or how "
        "much work a failure costs: --mtbf 6h weighs these, too."
    ]


def _confirmed(objective: Objective, verdict: SearchVerdict) -> list[dict[str, Any]] | None:
    if verdict.comparison is None:
        return None
    cells = [(row, row.cells.get(objective.metric.name)) for row in verdict.comparison.rows]
    return [
        {
            "overrides": row.jobs[0].overrides,
            "median": cell and cell.median,
            "spread": cell and cell.spread,
            "values": cell and cell.values,
            "error": row.error,
        }
        for row, cell in cells
    ]


def _seconds(text: str | None) -> float | None:
    from stagereg.durations import duration

    return None if text is None else duration(text).total_seconds()


def _import_plugins(program: Program, config: dict[str, Any]) -> None:
    from omegaconf import OmegaConf

    import stagereg.config.plugins as plugins

    sys.path.insert(0, str(Path(program.script).resolve().parent))  # where Python looks for the modules of the script
    plugins.from_config(OmegaConf.create({"plugins": config.get("plugins")}))
