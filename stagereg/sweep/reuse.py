"""Which jobs of a sweep are in its directory already: the same combination, repeat and config, whatever their number.

A sweep that uses a directory again keeps what is completed, resumes what is not, and gives its new jobs numbers that no
job there has.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagereg.launch.command_line import SWEEP_KEYS, Identity
from stagereg.sweep.plan import SweepError
from stagereg.sweep.result import CONFIG, RESULT, JobResult, is_job, jobs_in, yaml_of


class Reuse:
    """The jobs in the directory of a sweep, and the numbers that are free.

    Attributes:
        changed: for each planned job whose overrides another job has, but with another config, what differs.
    """

    def __init__(self, root: Path) -> None:
        self._found: defaultdict[Identity, list[JobResult]] = defaultdict(list)
        self.changed: list[str] = []
        taken = {int(path.name) for path in root.glob("[0-9]*") if path.name.isdecimal()}
        below = [job for job in jobs_in(root) if job.directory != root]  # a single run may have had the directory
        for job in sorted(below, key=lambda job: job.status != "completed"):
            self._found[job.identity].append(job)
            taken.add(_number(job))
        self._free = (number for number in itertools.count() if number not in taken)
        self._used: set[int] = set()

    def find(self, identity: Identity, name: str, config: Mapping[str, str]) -> JobResult | None:
        """Return the job that ran as this one of the program ``name`` would, if any: the completed one of several."""
        differences = []
        for job in self._found[identity]:
            program = job.job.get("name", name)
            difference = f"of {program}" if program != name else _difference(job.directory / CONFIG, config)
            if not difference and job.status == "unfinished" and (job.directory / RESULT).exists():
                again = f"Delete {job.directory} to run that job again, or take another hydra.sweep.dir."
                raise SweepError(f"{job.error} {again}")  # the result cannot be read
            if not difference:
                return job
            differences.append(f"job {_number(job)} {difference}")
        self.changed += differences[:1]
        return None

    def number(self, job: JobResult | None) -> int:
        """Return the number of a job found, or a free one: for none, and if another job of the plan has the number."""
        number = -1 if job is None else _number(job)
        if number < 0 or number in self._used:
            number = next(self._free)
        self._used.add(number)
        return number


def expect_own(directory: Path, found: JobResult | None, identity: Identity) -> None:
    """Raise ``SweepError`` if the output directory of a job that is to be launched holds another job."""
    if not is_job(directory) or (found is not None and os.path.samefile(directory, found.directory)):
        return
    other = JobResult.of_directory(directory).identity
    also = " with another config or of another program" if other == identity else ""
    raise SweepError(
        f"{os.path.relpath(directory)} holds {other}{also}; this sweep would put {identity} there. Take another "
        "hydra.sweep.dir, or delete it."
    )


def flat(node: Any, key: str = "") -> dict[str, str]:
    """Return the values of a config by their keys, as text, without the options of the sweep itself."""
    if not node or not isinstance(node, (dict, list)):
        return {} if key in SWEEP_KEYS else {key: repr(node)}
    items = node.items() if isinstance(node, dict) else enumerate(node)
    return {k: v for name, value in items for k, v in flat(value, f"{key}.{name}".lstrip(".")).items()}


def _difference(file: Path, config: Mapping[str, str]) -> str:
    """Return one difference between the config that a job ran with and another one; empty if there is none."""
    if not file.exists():
        return ""
    if (content := yaml_of(file)) is None:
        return f"(its {file.name} cannot be read)"
    before = flat(content)
    keys = (key for key in (*before, *config) if before.get(key) != config.get(key))
    key = next(keys, None)
    return "" if key is None else f"({key} was {before.get(key, 'absent')}, and is {config.get(key, 'absent')} now)"


def _number(job: JobResult) -> int:
    number, name = job.job.get("num"), job.directory.name
    return number if isinstance(number, int) else int(name) if name.isdecimal() else -1
