"""``hydra/callbacks=compare``: each job writes a ``result.json``, and at the end of a sweep the jobs are compared.

Hydra calls the callback before and after every job, in the job's process, and before and after a sweep, in the program.
An error such as an unknown metric stops the sweep before the first job. A later error does not affect job results.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

import stagereg.base.record as record
from stagereg.base.crash_report import format_error
from stagereg.base.output import echo, warn
from stagereg.base.overrides import SWEEP_KEYS, raw, split
from stagereg.base.version import __version__
from stagereg.bench.environment import describe
from stagereg.errors import ConfigError, StageregError
from stagereg.launch.command_line import CommandLine, parsed
from stagereg.launch.rank import is_rank
from stagereg.launch.scheduler_task import SchedulerTask
from stagereg.sweep.figures import figures
from stagereg.sweep.metric import directed, lacking, least_difference, usual
from stagereg.sweep.number_text import counted
from stagereg.sweep.plan import PLAN, Plan
from stagereg.sweep.result import JobResult, is_completed, jobs_in
from stagereg.sweep.reuse import as_saved, fingerprint, flat, held
from stagereg.sweep.run import Run
from stagereg.sweep.selection import Source, compared

log = logging.getLogger(__name__)

_SWEEPS_OWN = re.compile(r"hydra[./](mode|run|sweep|sweeper|launcher)([./]|$)")
_in_use = contextlib.ExitStack()  # holds the lock of the sweep's directory until the process terminates
_CLOCKS_S = 1.0  # seconds by which the clocks of the job process and of its ranks may differ


class Compare(Callback):
    """The Hydra callback that compares the jobs of a sweep.

    Args:
        metric: the metric that ranks combinations, and that a sweeper which optimizes, such as Optuna's, receives.
            ``None``: rank by the stall of a checkpoint if it is known, otherwise by the loss; the sweeper gets the
            return value of the task.
        direction: ``"minimize"`` or ``"maximize"``; ``None`` uses the default direction of the metric.
        matters: see :func:`~stagereg.sweep.comparison.compare`.
    """

    def __init__(
        self, metric: str | None = None, direction: str | None = None, matters: float | str | None = None
    ) -> None:
        self._metric, self._direction, self._matters = metric, direction, matters
        # The user's command line without overrides. Workers of a launcher get it in the pickled callback. A rank under
        # torchrun has none.
        command = CommandLine.of_this_process()
        self._start = [] if is_rank() else [sys.orig_argv[0], *command.start[1:], *command.flags]
        self._sweeps_by_config = not parsed(sys.argv[1:]).multirun  # in a sweep: a config sets hydra.mode
        self._config = ""
        self._begin()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Reject invalid settings. Raises ``SystemExit``, because Hydra only warns about other exceptions."""
        try:
            self._check(config)
        except StageregError as error:
            _stop(error)

    def on_job_start(self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any) -> None:
        record.latest.clear()
        self._begin()
        self._config = _known("config", lambda: fingerprint(flat(as_saved(config))), "")

    def _begin(self) -> None:
        self._began = record.now()
        self._load = os.getloadavg()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Write the job's ``result.json``. In a sweep, also suppress a failure, and set the sweeper's value."""
        if SchedulerTask.current().index > 0:  # If several scheduler tasks form a run, only the first one writes.
            return
        failed = job_return.status != JobStatus.COMPLETED
        value = job_return._return_value  # The public property would raise the error of the job.
        found: dict[str, float] = {}
        try:
            result = self._result(config, None if failed else value, value if failed else None)
            failed, found = result.status == "failed", result.figures
            if config.hydra.mode == RunMode.MULTIRUN and is_completed(result.directory):
                raise ConfigError(f"Another process completed this job in {result.directory}. Its result is retained.")
            result.write()
        except Exception as error:
            log.error("Cannot write the result of this job: %s", _one_text(error))
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        if failed:
            text = _one_text(value) if isinstance(value, Exception) else str(result.error)
            log.error("This job failed, the sweep continues:%s%s", "\n" if "\n" in text else " ", text)
        job_return.status = JobStatus.COMPLETED
        job_return.return_value = self._for_sweeper(failed, value, found)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the comparison and write the report. Raises ``SystemExit`` with code 1 if a job failed."""
        import stagereg.sweep.render as render
        from stagereg.sweep.render.tables import terminal

        directory = _directory(config)
        try:
            source = Source.of(directory)
            comparison = compared([source], self._metric or "", self._direction, self._matters)
            terminal(comparison)
            written = render.write(comparison, directory)
            echo(f"\nReport: {next(path for path in written if path.suffix == '.html')}")
        except Exception as error:
            _stop(error, f"Run `stagereg report {shlex.quote(str(directory))}` to create the report.")
        incomplete = source.progress is not None and source.progress.completed < source.progress.planned
        if incomplete or any(job.status != "completed" for row in comparison.rows for job in row.jobs):
            sys.exit(1)

    def _check(self, config: DictConfig) -> None:
        directed(self._metric or usual(()), self._direction)
        least_difference(self._metric or usual(()), self._matters)
        sweeper, directory = config.hydra.sweeper, _directory(config)
        if "repeats" in sweeper:
            return
        repeats = OmegaConf.select(config, "sweep.repeats", default=1) if OmegaConf.is_dict(config.get("sweep")) else 1
        if repeats != 1:
            raise ConfigError(
                f"sweep.repeats={repeats} requires hydra/sweeper=interleaved: {sweeper._target_} cannot repeat jobs. "
                "Choose that sweeper, or set sweep.repeats=1."
            )
        _in_use.close()
        _in_use.enter_context(held(directory))
        if used := jobs_in(directory):
            raise ConfigError(
                f"{directory} contains {counted(len(used), 'job')} of an earlier sweep, but {sweeper._target_} numbers "
                "its jobs from 0: they would resume from these jobs and overwrite their results. Choose another "
                "hydra.sweep.dir, delete this directory, or use hydra/sweeper=interleaved."
            )
        if Plan.read(directory) is not None:  # The plan of an earlier sweep whose jobs were deleted.
            (directory / PLAN).unlink()

    def _result(self, config: DictConfig, returned: Any, error: Exception | None) -> JobResult:
        hydra = config.hydra
        directory = Path(hydra.runtime.output_dir)
        overrides, repeat, again = split(raw(hydra.overrides.task))
        run = _known("records", lambda: _run(directory, self._began), None)
        resumed, stepped, checkpoints = _resumed(run, self._began)
        text = None if error is None else _error_text(error)
        if idle := error is None and resumed is not None and not stepped:
            text = f"no step was trained: the job resumed from its last step, {resumed}. To run it again, delete "
            text += f"{directory if Path(checkpoints).is_relative_to(directory) else checkpoints}."
        return JobResult(
            directory=directory,
            status="completed" if text is None else "failed",
            error=text,
            overrides=overrides,
            job={key: OmegaConf.select(hydra.job, key) for key in ("num", "id", "name")} | {"config": self._config},
            repeat=repeat,
            again=again,
            started=self._began,
            seconds=record.now() - self._began,
            returned=returned,
            figures={} if idle else _known("figures", lambda: figures(run, returned), {}),
            versions=_known("versions", _versions, {}),
            environment=_known("environment", lambda: _environment(run), {}) | {"load": list(self._load)},
            command=self._command(hydra, overrides),
            resumed=resumed,
        )

    def _for_sweeper(self, failed: bool, value: Any, found: dict[str, float]) -> Any:
        if failed:
            return math.nan
        name = self._metric or usual(found)
        figure = found.get(name, math.nan)
        if self._metric is not None and name not in found:
            log.warning(lacking("This job cannot be ranked, because it has no", name, found))
        elif name in found and not math.isfinite(figure):
            log.warning("This job cannot be ranked, because %s is %g", name, figure)
        if self._metric is None:
            return value
        return figure if math.isfinite(figure) else math.nan

    def _command(self, hydra: Any, overrides: Iterable[str]) -> str:
        def key(override: str) -> str:
            return override.lstrip("+~").partition("=")[0].partition("@")[0]

        own = [override for override in hydra.overrides.hydra if not _SWEEPS_OWN.match(key(override))]
        own += ["hydra.mode=RUN"] * (self._sweeps_by_config and hydra.mode == RunMode.MULTIRUN)
        job = [override for override in overrides if key(override) not in SWEEP_KEYS]
        return shlex.join([*self._start, *job, *own]) if self._start else ""


def _directory(config: DictConfig) -> Path:
    return Path(config.hydra.runtime.cwd, str(config.hydra.sweep.dir))


def _stop(error: Exception, advice: str = "") -> NoReturn:
    text = f"stagereg: {error}" if isinstance(error, StageregError) else _one_text(error)
    warn("\n".join(filter(None, (text, advice))))
    raise SystemExit(1) from None


def _one_text(error: BaseException) -> str:
    # `format_error` is not used for stagereg's errors: it depends on a switch that stagereg.main sets during callbacks.
    return str(error) if isinstance(error, StageregError) else format_error(error)


def _known(what: str, ask: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return ask()
    except Exception as error:
        log.error("Cannot determine the %s of this job: %s", what, _one_text(error))
        return otherwise


def _run(directory: Path, began: float) -> Run | None:
    """Return the records of the job's ranks, or ``None`` if the directory contains only records of an earlier run."""
    with contextlib.suppress(ConfigError):
        if (run := Run.read(directory)).began >= began - _CLOCKS_S:
            return run
    return None


def _resumed(run: Run | None, began: float) -> tuple[int | None, bool, str]:
    """Return the step from which a job resumed, whether it trained after its start, and its checkpoint directory."""
    if run is None:  # A job without records ran in this process, where `record.latest` has the same facts.
        found = record.latest.get("resumed", {})
        return found.get("step"), bool(record.latest.keys() - {"resumed"}), found.get("dir", "")
    attempts = [each.ranks[0] for each in run.attempts if each.ranks[0].first >= began - _CLOCKS_S]
    step, checkpoints, _ = next((each.resumed for each in reversed(attempts) if each.resumed), (None, "", 0.0))
    last = max((at for each in attempts for at, _ in each.steps), default=0)
    stepped = last > (step or 0) or any(each.started or each.stalls for each in attempts)
    return step, stepped, checkpoints


def _versions() -> dict[str, str]:
    others = {name: importlib.metadata.version(name) for name in ("torch", "hydra-core")}
    return {"stagereg": __version__, **others, "python": platform.python_version()}


def _environment(run: Run | None) -> dict[str, Any]:
    import torch

    device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    return describe(device) | (run.environment if run else {})


def _error_text(error: Exception) -> str:
    """Format an error: the cause in the first line, then the traceback, if the error has one."""
    text = _one_text(error)
    head, found, _ = text.partition("Traceback (most recent call last):\n")
    if not found or "\n" in head:
        return text
    cause = text.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    cause_line = next((line for line in cause if line.strip() and not line.startswith(" ")), str(error))
    return f"{head}{cause_line}\n{text}"
