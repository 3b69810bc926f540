"""The launcher: starts local ranks of this program's own command line, and waits for their end.

Each rank is a fresh interpreter that composes the same config again, so the typed config is never pickled. The launcher
makes the run directory and ``.hydra``, and has the store at which the ranks meet (:mod:`stagereg.launch.run_store`). Of
several tasks of a scheduler's job, each starts its part of the ranks, and the first one has the store. What happens
after a failure is up to extensions (:class:`.LaunchExtension`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from stagereg.base.command import publish_run, resume_overrides
from stagereg.base.machine import tunables
from stagereg.base.output import warn
from stagereg.errors import RESUME_CODE, LaunchError
from stagereg.launch.agreed_values import VALUES, resolved
from stagereg.launch.command_line import CommandLine
from stagereg.launch.extension import Again, Attempt, End, Exit, LaunchExtension, Start, answers, first
from stagereg.launch.local_ranks import LocalRanks
from stagereg.launch.progress import Progress
from stagereg.launch.rank import ATTEMPT, LAUNCHER, SECRET
from stagereg.launch.run_store import NEXT_START, TIME_TO_END, RunStore
from stagereg.launch.scheduler_task import SchedulerTask, meet, open_store

_LEAVE_S = 60.0  # seconds that a task waits for the others to end, since one of them has the store
_MORE_S = 5.0  # seconds that ranks have to report and end after one has died
_RANKS_PER_CORE = 4


class RanksFailedError(LaunchError):
    """Ranks of a job failed; the message has each cause once, with its rank."""


def checked_nproc(value: Any) -> int:
    """The number of local ranks, or ``LaunchError`` while nothing has started yet."""
    cores = os.cpu_count() or 1
    most = cores * _RANKS_PER_CORE
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        limits = f"it has {cores} cores, so use nproc={cores}, or nproc={most} at the very most"
        raise LaunchError(f"nproc={value} is no number of ranks that this machine can run: {limits}")
    return value


def launch(command: CommandLine, cfg: Any, hydra: Any, nproc: int, extensions: Sequence[LaunchExtension]) -> Any:
    """Run one job on ``nproc`` fresh local ranks and return rank 0's value, once all ranks have ended.

    In a scheduler's job with several tasks these are the ranks of this task, and only the first one returns a value. A
    signal that stopped the run, or that all ranks have saved for and exited, is a ``SystemExit``. ``extensions`` have
    checked the config; one of them may have a run that fails started again.
    """
    task, directory = SchedulerTask.current(), hydra.runtime.output_dir
    overrides = resume_overrides(hydra, cfg)
    publish_run(directory, overrides)
    with LocalRanks(extensions) as local:
        store = open_store(task)
        variables = {**_variables(task, nproc, store), VALUES: json.dumps(resolved(cfg))}
        start = Start(command.for_ranks(hydra), hydra.runtime.cwd, variables)
        run = _Run(local, store, task, start, directory, overrides)
        while True:
            end = run.attempt()
            if not end.errors and not end.codes and end.stopped is None:
                return end.result if task.index == 0 else None
            answer = first(extensions, lambda each, end=end: each.after(end))  # type: ignore[misc]
            if not isinstance(answer, Again):
                _end(end, answer.why if answer is not None else "", answer.code if isinstance(answer, Exit) else None)
            start.command.extend(each for each in answer.overrides if each not in start.command)
            warn(f"{end}\n{answer.why}")


@dataclass
class _Run:
    local: LocalRanks
    store: Any
    task: SchedulerTask
    start: Start
    directory: str
    overrides: list[str]  # as `resume_overrides`
    number = 0  # of the next attempt

    def attempt(self) -> End:
        """Start the ranks; return how they have ended, once they all have."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        local, task, extensions = self.local, self.task, self.local.extensions
        for more in answers(extensions, lambda each: each.variables()):
            self.start.variables.update(more)
        nproc, number = int(self.start.variables["LOCAL_WORLD_SIZE"]), self.number
        self.number += 1
        ranks = range(task.index * nproc, (task.index + 1) * nproc)
        run = RunStore(PrefixStore("stagereg", self.store), ranks[0], task.count * nproc, str(number))
        if task.index == 0:
            run.begin(self.directory, self.overrides)
        name = run.run()["attempt"]
        attempt = Attempt(number, task, self.start, run, self.store, lambda: Progress.of(self.directory, name))
        for local_rank, rank in enumerate(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), ATTEMPT: str(number)}
            local.start(rank, self.start._replace(variables=self.start.variables | own))
        codes = local.wait(lambda: answers(extensions, lambda each: each.poll(attempt)))
        end = End(attempt, codes, time.time(), local.forwarded, local.stopped, not local.ran_none)
        if end.stopped is not None:
            # A rank in its job may run its ``finally`` blocks after SIGINT; one that is not there yet could only print
            # a traceback from the middle of an import, so it is terminated instead.
            in_job = all(run.get(f"in job/{rank}") for rank in ranks)
            end.codes, end.skipped = local.end(end.stopped if in_job else signal.SIGTERM), run.get(NEXT_START) or ""
            return end
        at_once = any(answers(extensions, lambda each: each.ending(end)))
        if min(codes.values(), default=0) < 0 and not at_once:
            local.wait_for_rest((run.get(TIME_TO_END) or 0.0) + _MORE_S)
        local.end(signal.SIGTERM)
        with contextlib.suppress(RuntimeError):  # of the store, where the machine that had it is lost
            _read_reports(end)
            meet(self.store, task, f"ended {number}", _LEAVE_S)
        return end


def _read_reports(end: End) -> None:
    """Read what the ranks have reported; what came of another rank's end counts where no code tells of that."""
    run = end.attempt.store
    end.errors, end.result, end.skipped = run.errors(), run.get("result"), run.get(NEXT_START) or ""
    if not end.codes:
        return
    consequences = run.errors("consequences")
    causes = {rank: code for rank, code in end.codes.items() if rank not in consequences}
    if not end.errors and set(causes.values()) <= {RESUME_CODE}:
        end.errors = consequences
    elif not end.errors:
        end.codes = causes


def _end(end: End, why: str, code: int | None) -> NoReturn:
    """End the run as the attempt has ended, or with an exit ``code`` and ``why`` if that is given."""
    newest = end.attempt.progress().describe(end.skipped)
    if code is not None:
        warn(f"{why}{newest}")
        raise SystemExit(code)
    if end.preempted:
        raise SystemExit(RESUME_CODE)
    if end.received is None:
        raise RanksFailedError(f"{end}{why}{newest}")
    if end.stopped is None and end.errors:
        warn(f"{end}{newest}")
    # If rank 0 was killed, it waited in a collective, and could not print this itself.
    killed = end.stopped is not None and end.codes.get(0, 0) < 0
    warn(f"stopped by {end.received.name}{newest if killed else ''}")
    raise SystemExit(128 + end.received)


def _variables(task: SchedulerTask, nproc: int, store: Any) -> dict[str, str]:
    """The environment of this task's ranks: each takes one core, as processes share the cores."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if task.is_one_machine and sys.platform == "linux" else {}
    secret = {SECRET: secrets.token_hex(32)} if task.count == 1 and not os.environ.get(SECRET) else {}
    return {
        "OMP_NUM_THREADS": "1",
        **loopback,
        **os.environ,
        **tunables(os.environ),
        LAUNCHER: str(os.getpid()),
        "WORLD_SIZE": str(task.count * nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": task.host,
        "MASTER_PORT": str(store.port),
        **secret,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 opens no store of its own
    }
