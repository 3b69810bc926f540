"""``hydra/sweeper=interleaved``: all combinations like Hydra's basic sweeper, and each of them ``sweep.repeats`` times.

Repeats run in rounds that each start with another combination, so a machine that becomes slower is slower for all. One
more job (A/A) runs the first combination again as if it were another one, which shows the noise. The same sweep once
more runs what was not completed. Imports nothing heavy: Hydra scans this module at every start.
"""

from __future__ import annotations

import functools
import itertools
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, read_write

from stagereg.errors import RESUME_CODE, ConfigError, LaunchError
from stagereg.launch.command_line import gives_resume, raw
from stagereg.sweep.result import KEYS, completed_before

log = logging.getLogger(__name__)

_REPEAT, _AGAIN = "++sweep.repeat", "++sweep.again"
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


class SweepError(ConfigError, ConfigCompositionException):
    """A sweeper cannot do what it was asked for; it has run no job."""


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

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        super().setup(hydra_context=hydra_context, task_function=ContainedTask(task_function), config=config)

    def sweep(self, arguments: list[str]) -> Any:
        repeats = self._repeats
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise SweepError(f"sweep.repeats={repeats} is no number of repeats: use 1 or more, such as sweep.repeats=3")
        return super().sweep(arguments)

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The jobs in batches; the basic sweeper asks for them."""
        for each in overrides:
            if each.is_sweep_override() and each.key_or_group in KEYS:
                raise SweepError(f"{each.input_line}: {each.key_or_group} goes for the whole sweep and takes one value")
        (combinations,) = BasicSweeper.split_arguments(overrides, None)
        return list(self.split_overrides_to_chunks(interleaved(combinations, self._repeats), max_batch_size))

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Compose the jobs of all batches before the first one is launched; refuse two jobs that share a directory."""
        if self.batch_index != 1 or not self.overrides or not self.config:
            return
        context: Any = self.hydra_context
        before, taken = HydraConfig.instance().cfg, dict[tuple[str, str], int]()
        try:
            for number, overrides in enumerate(itertools.chain.from_iterable(self.overrides)):
                job = context.config_loader.load_sweep_config(self.config, list(overrides))
                for place in _directories(job, number).items():
                    if taken.setdefault(place, number) != number:
                        raise SweepError(_SHARED[place[0]].format(taken[place], number, dir=place[1]))
        finally:
            HydraConfig.instance().cfg = before


def interleaved(combinations: Sequence[Sequence[str]], repeats: int) -> list[list[str]]:
    """Return the overrides of the jobs that run each of ``combinations`` ``repeats`` times, in their order.

    Round r starts with combination r. The job that runs the first one again opens a round near the middle, and never
    stands beside one of the jobs it is going to be compared with, where there is another combination.
    """
    if repeats == 1:  # there is nothing to compare, so no job is added either
        return [list(combination) for combination in combinations]
    number = len(combinations)
    apart = [r for r in range(1, repeats) if r % number and (r - 2) % number] or [1]
    middle = min(apart, key=lambda r: abs(2 * r - repeats))
    jobs = []
    for repeat in range(repeats):
        if repeat == middle:
            jobs.append([*combinations[0], f"{_REPEAT}=0", f"{_AGAIN}=true"])
        first = repeat % number
        for combination in (*combinations[first:], *combinations[:first]):
            jobs.append([*combination, f"{_REPEAT}={repeat}"])
    return jobs


class ContainedTask:
    """A task whose ``sys.exit`` ends it alone, and which returns what an earlier run of the same job has returned."""

    __wrapped__: Callable[[Any], Any]

    def __init__(self, task: Callable[[Any], Any]) -> None:
        functools.update_wrapper(self, task, updated=())

    def __call__(self, cfg: Any) -> Any:
        if kept := completed_before(HydraConfig.get()):
            log.info("This job was completed before, its result is kept; to run it again, delete %s", kept.directory)
            return kept.returned
        try:
            return self.__wrapped__(cfg)
        except SystemExit as left:
            if left.code in _STOPPED:
                raise
            if left.code:
                raise LaunchError(f"left by sys.exit({left.code!r})") from None
            return None


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
