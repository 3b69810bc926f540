"""``hydra/sweeper=interleaved``: Hydra's basic sweeper, but each combination runs ``sweep.repeats`` times.

The repeats run in rounds, and each round starts with a different combination, so that a slowdown of the machine affects
all combinations. A/A jobs run the first combination again, which shows the noise. Jobs that an earlier sweep completed
do not run again (:mod:`stagereg.sweep.reuse`). Hydra imports this module at every start, so its imports are small.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, read_write

from stagereg.base.output import warn
from stagereg.base.overrides import SWEEP_KEYS, Identity, gives_resume, raw
from stagereg.errors import RESUME_CODE, ConfigError, LaunchError
from stagereg.sweep.number_text import counted
from stagereg.sweep.plan import Plan, PlannedJob, command_to_continue
from stagereg.sweep.result import RESULT, JobResult, is_completed, jobs_in
from stagereg.sweep.reuse import Reuse, SweepError, as_saved, expect_own, flat, held

log = logging.getLogger(__name__)

_REPEAT, _AGAIN = "++sweep.repeat", "++sweep.again"
_COMPARE = "stagereg.sweep.callback.Compare"
_STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1)
_STOPPED = {RESUME_CODE, *(128 + number for number in _STOPS)}  # exit codes of a program that a signal stopped
_SHARED = {
    "hydra.sweep.subdir": "jobs {} and {} would both write to {dir}, so that one overwrites the other's result. Omit "
    "hydra.sweep.subdir to give each job its own directory.",
    "checkpoint.dir": "jobs {} and {} both have checkpoint.dir={dir}, so that one would resume from the other. Omit "
    "checkpoint.dir to give each job its own directory under hydra.sweep.dir=PATH. If this is intended, add "
    "checkpoint.resume=auto to the command.",
}
_KEPT = "Job %d was completed before; its result is reused. To run the job again, delete %s"
_CHANGED = "The config or the program changed since %s in %s ran, for example %s. These jobs run again as new jobs."


class SweepSearchPath(SearchPathPlugin):
    """Appends the configs with the sweep options to the search path of every Hydra app."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("stagereg", "pkg://stagereg.sweep.conf")


class InterleavedSweeper(BasicSweeper):
    """Hydra's basic sweeper with an additional argument: each combination runs ``repeats`` times."""

    __module__ = "hydra_plugins.stagereg_plugin"  # Hydra 1.3 requires sweepers in this package.

    def __init__(
        self, max_batch_size: int | None = None, params: dict[str, str] | None = None, repeats: Any = 1
    ) -> None:
        super().__init__(max_batch_size, params)
        self._repeats = repeats
        self._plan: Plan | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        super().setup(hydra_context=hydra_context, task_function=ContainedTask(task_function), config=config)

    def sweep(self, arguments: list[str]) -> Any:
        repeats = self._repeats
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise SweepError(f"sweep.repeats={repeats} is invalid: use an integer of at least 1, such as 3")
        assert self.config is not None
        with held(Path(str(self.config.hydra.sweep.dir))):
            try:
                return super().sweep(arguments)
            except BaseException as error:  # Hydra does not call callbacks after an error.
                with contextlib.suppress(OSError):
                    self._print_progress()
                if self._plan is not None and isinstance(error, KeyboardInterrupt):  # no traceback after Ctrl-C
                    raise SystemExit(128 + signal.SIGINT) from None
                raise

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """Return the jobs to launch, in batches with consecutive job numbers. The basic sweeper calls this method."""
        for each in overrides:
            if each.is_sweep_override() and each.key_or_group in SWEEP_KEYS:
                raise SweepError(f"{each.input_line}: {each.key_or_group} applies to the whole sweep. Give one value.")
        (combinations,) = BasicSweeper.split_arguments(overrides, None)
        jobs = interleaved(combinations, self._repeats)
        if self.config is None:
            numbered = list(enumerate(jobs))
        else:
            self._plan = self._planned(jobs)
            numbered = [(job.num, list(job.overrides)) for job in self._plan.jobs if not job.kept]
        batches = list[list[tuple[int, list[str]]]]()
        most = max_batch_size if max_batch_size and max_batch_size > 0 else len(numbered)
        for number, job in numbered:
            if not batches or number != batches[-1][-1][0] + 1 or len(batches[-1]) == most:
                batches.append([])
            batches[-1].append((number, job))
        firsts, launcher = iter([batch[0][0] for batch in batches]), self.launcher
        # Each batch gets the job numbers of the plan.
        self.launcher: Any = SimpleNamespace(launch=lambda batch, initial_job_idx: launcher.launch(batch, next(firsts)))
        return [[job for _, job in batch] for batch in batches]

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Do nothing, because all jobs were already composed and checked before the first launch."""

    def _planned(self, jobs: Sequence[list[str]]) -> Plan:
        """Assign numbers to the jobs, and write the plan file. Raises ``SweepError`` if two jobs share a directory."""
        config: Any = self.config
        context: Any = self.hydra_context
        root = Path(str(config.hydra.sweep.dir))
        try:
            Plan.read(root)  # Raises ConfigError if the file is not a plan, so that it is not overwritten.
        except ConfigError as error:
            raise SweepError(str(error)) from error
        reuse, before = Reuse(root), HydraConfig.instance().cfg
        taken, planned = dict[tuple[str, str], int](), list[PlannedJob]()
        try:
            for overrides in jobs:
                job = context.config_loader.load_sweep_config(config, list(overrides))
                _expect_one_comparison(config, job, overrides)
                identity = Identity.of(overrides)
                found = reuse.find(identity, str(job.hydra.job.name), flat(as_saved(job)))
                number = reuse.number(found)
                places = _directories(job, number)
                output = Path(places["hydra.sweep.subdir"])
                kept = found is not None and is_completed(found.directory)
                if found is not None and kept:
                    output = found.directory
                    log.info(_KEPT, number, output)
                else:
                    expect_own(output, found, identity)
                for place in places.items():
                    if taken.setdefault(place, number) != number:
                        raise SweepError(_SHARED[place[0]].format(taken[place], number, dir=place[1]))
                directory = os.path.relpath(output, root)
                if _comparison(config):
                    _expect_found(root, directory, [each.directory for each in planned])
                planned.append(PlannedJob(number, directory, tuple(overrides), kept))
        finally:
            HydraConfig.instance().cfg = before
        if reuse.changed:
            log.info(_CHANGED, counted(len(reuse.changed), "job"), root, reuse.changed[0])
        metric, direction, matters = (_comparison(config).get(key) for key in ("metric", "direction", "matters"))
        command = command_to_continue(str(config.hydra.sweep.dir))
        plan = Plan(root, tuple(planned), command, time.time(), metric, direction, matters)
        plan.write()
        return plan

    def _print_progress(self) -> None:
        """Print the number of completed jobs and the command that runs the other jobs."""
        if self._plan is None or not _comparison(self.config):
            return
        done = self._plan.progress(found := jobs_in(self._plan.root))
        report = f" Report them: stagereg report {shlex.quote(os.path.relpath(self._plan.root))}." if found else ""
        text = f"{done.completed} of {done.planned} jobs are completed.{report} Run the others:"
        warn(f"{text} {self._plan.command}")


def interleaved(combinations: Sequence[Sequence[str]], repeats: int) -> list[list[str]]:
    """Return the overrides of all jobs, in launch order. Each of ``combinations`` runs ``repeats`` times.

    Round r starts with combination r. If there are several rounds, each has an A/A job, which repeats the first
    combination. With at least three combinations, the A/A job is not next to that job. Duplicates run twice as often.
    """
    entries = [(list(combination), False) for combination in combinations]
    if repeats > 1:
        entries.insert((len(entries) + 2) // 2, (list(combinations[0]), True))
    jobs, seen = [], Counter[tuple[Any, bool]]()
    for round_ in range(repeats):
        first = round_ % len(entries)
        for combination, again in (*entries[first:], *entries[:first]):
            key = (Identity.of(combination).combination, again)
            marks = [f"{_REPEAT}={seen[key]}"] if repeats > 1 or seen[key] else []
            jobs.append([*combination, *marks, *([f"{_AGAIN}=true"] if again else [])])
            seen[key] += 1
    return jobs


class ContainedTask:
    """Wraps a task: logs the progress of the sweep, and catches ``sys.exit``, so that it does not end the sweep."""

    __wrapped__: Callable[[Any], Any]

    def __init__(self, task: Callable[[Any], Any]) -> None:
        functools.update_wrapper(self, task, updated=())

    def __call__(self, cfg: Any) -> Any:
        hydra = HydraConfig.get()
        with contextlib.suppress(ConfigError, OSError):
            if JobResult.read(output := hydra.runtime.output_dir).status != "completed":
                Path(output, RESULT).unlink()  # the result of an earlier run of this job, which failed
        with contextlib.suppress(Exception):  # On a network file system, the plan file may not be visible yet.
            if plan := Plan.read(os.path.join(hydra.runtime.cwd, str(hydra.sweep.dir))):
                log.info(plan.position(hydra.job.num))
        before = os.getcwd()
        try:
            return self.__wrapped__(cfg)
        except SystemExit as left:
            if left.code in _STOPPED:
                raise
            if left.code:
                raise LaunchError(f"called sys.exit({left.code!r})") from None
            return None
        finally:
            os.chdir(before)  # Hydra resolves the directory of the next job relative to the working directory.


def _directories(job: DictConfig, number: int) -> dict[str, str]:
    with read_write(job):
        OmegaConf.update(job, "hydra.job.num", number, force_add=True)
        OmegaConf.update(job, "hydra.job.id", str(number), force_add=True)
        HydraConfig.instance().set_config(job)
        output = Path(job.hydra.sweep.dir, str(job.hydra.sweep.subdir)).absolute()
    with read_write(job.hydra):
        OmegaConf.update(job, "hydra.runtime.output_dir", str(output), force_add=True)
    HydraConfig.instance().set_config(job)  # Set the config again, because set_config stores a copy.
    found = {"hydra.sweep.subdir": str(output)}

    def option(key: str, default: Any) -> Any:
        return OmegaConf.select(job, f"checkpoint.{key}", default=default, throw_on_resolution_failure=False)

    resumes = option("enable", True) and option("resume", "auto") == "auto"
    if resumes and not gives_resume(raw(job.hydra.overrides.task)):
        found["checkpoint.dir"] = option("dir", None)
    return {key: str(place) for key, place in found.items() if place}


def _expect_one_comparison(config: Any, job: Any, overrides: Sequence[str]) -> None:
    """Raise ``SweepError`` if the config of a job changes a setting of the comparison, which the whole sweep shares."""
    for key in ("sweep.metric", "sweep.direction", "sweep.matters", "sweep.repeats"):
        own, its = (OmegaConf.select(each, key, throw_on_resolution_failure=False) for each in (config, job))
        if own != its:
            raise SweepError(
                f"{' '.join(overrides)} sets {key}={its}, but the sweep has {key}={own}. One value applies to the "
                f"whole sweep: set it on the command line, as in {key}={its}."
            )


def _expect_found(root: Path, directory: str, others: Sequence[str]) -> None:
    """Raise ``SweepError`` if ``stagereg report`` would not find a job whose output directory is ``directory``."""
    parts = Path(directory).parts
    if not parts or any(part.startswith(".") for part in parts):
        raise SweepError(
            f"hydra.sweep.subdir puts a job into {root / directory}, where `stagereg report` does not search. Choose "
            f"a folder under {root} whose name does not begin with a dot."
        )
    for other in others:
        if directory != other and parts[: len(Path(other).parts)] in (parts, Path(other).parts)[1:]:
            raise SweepError(
                f"hydra.sweep.subdir puts a job into {root / other} and another one under it, into {root / directory}, "
                "where `stagereg report` does not search. Choose folders that do not contain each other."
            )


def _comparison(config: Any) -> Any:
    """Return the settings of the callback ``Compare`` in a config, or an empty dict if it is not configured."""
    nodes = (OmegaConf.select(config, "hydra.callbacks") or {}).values()
    return next((node for node in nodes if node and node.get("_target_") == _COMPARE), {})
