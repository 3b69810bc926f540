"""``hydra/sweeper=interleaved``: all combinations like Hydra's basic sweeper, and each of them ``sweep.repeats`` times.

Repeats run in rounds that each start with another combination, so a machine that becomes slower is slower for all. The
A/A jobs run the first combination again as if it were another one, which shows the noise. In a directory that holds
jobs already, only the jobs that are not completed there run (:mod:`stagereg.sweep.reuse`). Imports nothing heavy: Hydra
scans this module at every start.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, read_write

from stagereg.errors import RESUME_CODE, LaunchError
from stagereg.launch.command_line import SWEEP_KEYS, Identity, gives_resume, raw
from stagereg.sweep.plan import Plan, PlannedJob, SweepError, command_to_continue, held
from stagereg.sweep.result import RESULT, is_completed, jobs_in
from stagereg.sweep.reuse import Reuse, expect_own, flat

log = logging.getLogger(__name__)

_REPEAT, _AGAIN = "++sweep.repeat", "++sweep.again"
_COMPARE = "stagereg.sweep.callback.Compare"
_STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1)
_STOPPED = {RESUME_CODE, *(128 + number for number in _STOPS)}
"""Exit codes of a program that was stopped by a signal: no matter of one job."""
_SHARED = {
    "hydra.sweep.subdir": "jobs {} and {} would both write to {dir}, and one overwrite the result of the other. Leave "
    "out hydra.sweep.subdir: then each job has a directory of its own.",
    "checkpoint.dir": "jobs {} and {} would both have checkpoint.dir={dir}, and one resume from the other. Leave out "
    "checkpoint.dir: then each job has its own, below hydra.sweep.dir=PATH. Or say that it is meant, with "
    "checkpoint.resume=auto.",
}
"""What is wrong where two jobs have one directory, by the key that says which."""
_KEPT = "Job %d was completed before, its result is kept; to run it again, delete %s"
_CHANGED = "The config has changed since %d jobs in %s ran, such as %s: this sweep runs them again as new jobs."


class InterleavedSweeper(BasicSweeper):
    """Hydra's basic sweeper with repeats.

    Args:
        max_batch_size: jobs given to the launcher at a time; ``None`` for all at once.
        params: parameters that are always swept, as in the basic sweeper.
        repeats: how many times to run each combination; checked before the first job.
    """

    # Hydra 1.3 takes no sweeper from elsewhere. The file that packaging puts there has this class.
    __module__ = "hydra_plugins.stagereg_plugin"

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
            raise SweepError(f"sweep.repeats={repeats} is no number of repeats: use 1 or more, such as sweep.repeats=3")
        assert self.config is not None
        with held(Path(str(self.config.hydra.sweep.dir))):
            try:
                return super().sweep(arguments)
            except BaseException as error:  # Hydra calls no callback then
                with contextlib.suppress(OSError):
                    self._print_progress()
                if self._plan is not None and isinstance(error, KeyboardInterrupt):  # whose traceback would hide that
                    raise SystemExit(128 + signal.SIGINT) from None
                raise

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The jobs to launch in batches, each of consecutive numbers; the basic sweeper asks for them."""
        for each in overrides:
            if each.is_sweep_override() and each.key_or_group in SWEEP_KEYS:
                raise SweepError(f"{each.input_line}: {each.key_or_group} goes for the whole sweep and takes one value")
        (combinations,) = BasicSweeper.split_arguments(overrides, None)
        jobs = interleaved(combinations, self._repeats)
        if self.config is None:
            numbered = list(enumerate(jobs))
        else:
            self._plan = self._planned(jobs)
            numbered = [(job.num, list(job.overrides)) for job in self._plan.jobs if not job.kept]
        firsts, batches = list[int](), list[list[list[str]]]()
        most = max_batch_size if max_batch_size and max_batch_size > 0 else len(numbered)
        for number, job in numbered:
            if not batches or number != firsts[-1] + len(batches[-1]) or len(batches[-1]) == most:
                firsts.append(number)
                batches.append([])
            batches[-1].append(job)
        self.launcher: Any = _Numbered(self.launcher, firsts)
        return batches

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Do nothing: all jobs are composed before the first one is launched."""

    def _planned(self, jobs: Sequence[list[str]]) -> Plan:
        """Give each job its number, and write the plan; refuse jobs that would share a directory."""
        config: Any = self.config
        context: Any = self.hydra_context
        root = Path(str(config.hydra.sweep.dir))
        reuse, before, taken, planned = Reuse(root), HydraConfig.instance().cfg, dict[tuple[str, str], int](), []
        try:
            for overrides in jobs:
                job = context.config_loader.load_sweep_config(config, list(overrides))
                identity = Identity.of(overrides)
                found = reuse.find(identity, str(job.hydra.job.name), flat(_as_saved(job)))
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
                planned.append(PlannedJob(number, _below(root, output), tuple(overrides), kept))
        finally:
            HydraConfig.instance().cfg = before
        if reuse.changed:
            log.info(_CHANGED, len(reuse.changed), root, reuse.changed[0])
        metric, direction, matters = (_comparison(config).get(key) for key in ("metric", "direction", "matters"))
        command = command_to_continue(str(config.hydra.sweep.dir))
        plan = Plan(root, tuple(planned), command, time.time(), metric, direction, matters)
        plan.write()
        return plan

    def _print_progress(self) -> None:
        """Print how many jobs are completed, and the command that runs the others."""
        if self._plan is None or not _comparison(self.config):
            return
        found = jobs_in(self._plan.root)
        done = self._plan.progress(found)
        shown = f"`stagereg report {shlex.quote(os.path.relpath(self._plan.root))}` shows them; t" if found else "T"
        text = f"{done.completed} of {done.planned} jobs are completed. {shown}his command runs the others:"
        print(text, self._plan.command, file=sys.stderr, flush=True)


def interleaved(combinations: Sequence[Sequence[str]], repeats: int) -> list[list[str]]:
    """Return the overrides of the jobs that run each of ``combinations`` ``repeats`` times, in their order.

    Round r starts with combination r. With more than one round, each has an A/A job, which runs the first combination
    again; from three combinations on, it never is next to the job in its round that it is going to be compared with. A
    combination that is listed twice has twice as many repeats.
    """
    entries = [(list(combination), False) for combination in combinations]
    if repeats > 1:  # else there is nothing to compare
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
    """A task whose ``sys.exit`` ends it alone; logs how far its sweep has come."""

    __wrapped__: Callable[[Any], Any]

    def __init__(self, task: Callable[[Any], Any]) -> None:
        functools.update_wrapper(self, task, updated=())

    def __call__(self, cfg: Any) -> Any:
        hydra = HydraConfig.get()
        if not is_completed(output := hydra.runtime.output_dir):
            Path(output, RESULT).unlink(missing_ok=True)  # an earlier failure, which is not that of this run
        with contextlib.suppress(Exception):  # a file system that is slow to show the plan stops no job
            if plan := Plan.read(os.path.join(hydra.runtime.cwd, str(hydra.sweep.dir))):
                log.info(plan.position(hydra.job.num))
        try:
            return self.__wrapped__(cfg)
        except SystemExit as left:
            if left.code in _STOPPED:
                raise
            if left.code:
                raise LaunchError(f"left by sys.exit({left.code!r})") from None
            return None


class _Numbered:
    """A launcher that gives jobs the numbers they have in the plan."""

    def __init__(self, launcher: Any, firsts: Sequence[int]) -> None:
        self._launcher, self._firsts = launcher, iter(firsts)

    def launch(self, batch: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
        return self._launcher.launch(batch, initial_job_idx=next(self._firsts))


def _directories(job: DictConfig, number: int) -> dict[str, str]:
    with read_write(job):
        OmegaConf.update(job, "hydra.job.num", number, force_add=True)
        OmegaConf.update(job, "hydra.job.id", str(number), force_add=True)
        HydraConfig.instance().set_config(job)
        output = Path(job.hydra.sweep.dir, str(job.hydra.sweep.subdir)).absolute()
    with read_write(job.hydra):
        OmegaConf.update(job, "hydra.runtime.output_dir", str(output), force_add=True)
    HydraConfig.instance().set_config(job)  # it has a copy
    found = {"hydra.sweep.subdir": str(output)}
    enable, resume = (
        OmegaConf.select(job, f"checkpoint.{key}", default=default, throw_on_resolution_failure=False)
        for key, default in (("enable", True), ("resume", "auto"))
    )
    if enable and resume == "auto" and not gives_resume(raw(job.hydra.overrides.task)):
        found["checkpoint.dir"] = OmegaConf.select(job, "checkpoint.dir", throw_on_resolution_failure=False)
    return {key: str(place) for key, place in found.items() if place}


def _as_saved(job: DictConfig) -> Any:
    """The config of a job as it is read from the file that Hydra saves."""
    task = OmegaConf.masked_copy(job, [key for key in job if key != "hydra"])  # type: ignore[misc]
    return OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(task)), resolve=False)


def _below(root: Path, output: Path) -> str:
    inside = os.path.relpath(output, root)
    return os.path.abspath(output) if inside.startswith("..") else inside


def _comparison(config: Any) -> Any:
    """The node of :class:`stagereg.sweep.callback.Compare` in a config, empty if a sweep is not compared."""
    nodes = (OmegaConf.select(config, "hydra.callbacks") or {}).values()
    return next((node for node in nodes if node and node.get("_target_") == _COMPARE), {})
