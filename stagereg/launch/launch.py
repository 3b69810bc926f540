"""The launcher: starts local ranks with the command line of this program, and waits until they exit.

Each rank is a new interpreter that composes the same config again, so the typed config is never pickled. The launcher
creates the run directory and ``.hydra``, and opens the rendezvous store (:mod:`stagereg.launch.run_store`). If a
scheduler's job has several tasks, each task starts the ranks of its machine, and the first task opens the store.
Extensions decide whether and how the run continues after a failure (:class:`.LaunchExtension`).
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

_LEAVE_S = 60.0  # seconds that a task waits for the other tasks to end, because one of them hosts the store
_MORE_S = 5.0  # seconds for running ranks to report errors and exit after a rank was killed
_RANKS_PER_CORE = 4  # maximum number of local ranks for each core


class RanksFailedError(LaunchError):
    """Ranks of a job failed. The message lists each failure once, with its rank."""


def checked_nproc(value: Any) -> int:
    """Return ``value`` if it is a valid number of local ranks; otherwise raise ``LaunchError``."""
    cores = os.cpu_count() or 1
    most = cores * _RANKS_PER_CORE
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        limits = f"this machine has {cores} cores. Use nproc={cores}"
        raise LaunchError(f"nproc must be a whole number in 1..{most}, not {value}: {limits}.")
    return value


def launch(command: CommandLine, cfg: Any, hydra: Any, nproc: int, extensions: Sequence[LaunchExtension]) -> Any:
    """Run one job on ``nproc`` new local ranks. Return rank 0's value after all ranks have exited.

    If a scheduler's job has several tasks, each task runs ``nproc`` ranks, and only the first task returns a value.
    Raises ``SystemExit`` after a signal that stopped the run or made all ranks save and exit. ``extensions`` may
    restart a failed run. The caller has already called their :meth:`.LaunchExtension.check`.
    """
    task, directory = SchedulerTask.current(), hydra.runtime.output_dir
    overrides = resume_overrides(hydra, cfg)
    publish_run(directory, overrides)
    with LocalRanks(extensions) as local:
        store = open_store(task)
        variables = {**_variables(task, nproc, store), VALUES: json.dumps(resolved(cfg))}
        start = Start(command.for_ranks(hydra), hydra.runtime.cwd, variables)
        number = 0
        while True:
            end = _attempt(local, store, task, start, number, directory, overrides)
            if not end.errors and not end.codes and end.stopped is None:
                return end.result if task.index == 0 else None
            answer = first(extensions, lambda each, end=end: each.after(end))  # type: ignore[misc]
            if not isinstance(answer, Again):
                _end(end, answer.why if answer is not None else "", answer.code if isinstance(answer, Exit) else None)
            start.command.extend(each for each in answer.overrides if each not in start.command)
            warn(f"{end}\n{answer.why}")
            number += 1


def _attempt(
    local: LocalRanks, store: Any, task: SchedulerTask, start: Start, number: int, directory: str, overrides: list[str]
) -> End:
    """Start the ranks for the ``number``-th time, wait until all have exited, and return how the attempt ended.

    ``overrides``: the overrides that resume the run.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    for more in answers(local.extensions, lambda each: each.variables()):
        start.variables.update(more)
    nproc = int(start.variables["LOCAL_WORLD_SIZE"])
    ranks = range(task.index * nproc, (task.index + 1) * nproc)
    run = RunStore(PrefixStore("stagereg", store), ranks[0], task.count * nproc, str(number))
    if task.index == 0:
        run.begin(directory, overrides)
    name = run.run()["attempt"]
    attempt = Attempt(number, task, start, run, store, lambda: Progress.of(directory, name))
    for local_rank, rank in enumerate(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), ATTEMPT: str(number)}
        local.start(rank, start._replace(variables=start.variables | own))
    codes = local.wait(lambda: answers(local.extensions, lambda each: each.poll(attempt)))
    end = End(attempt, codes, time.time(), local.forwarded, local.stopped, not local.ran_none)
    if end.stopped is not None:
        # A rank in its job runs its ``finally`` blocks after SIGINT. A rank that still imports modules would only
        # print a traceback, so the launcher sends SIGTERM instead.
        in_job = all(run.get(f"in job/{rank}") for rank in ranks)
        end.codes, end.skipped = local.end(end.stopped if in_job else signal.SIGTERM), run.get(NEXT_START) or ""
        return end
    at_once = any(answers(local.extensions, lambda each: each.ending(end)))
    if min(codes.values(), default=0) < 0 and not at_once:
        local.wait_for_rest((run.get(TIME_TO_END) or 0.0) + _MORE_S)
    local.end(signal.SIGTERM)
    with contextlib.suppress(RuntimeError):  # the store raises it if the machine of the store has failed
        _read_reports(end)
        meet(store, task, f"ended {number}", _LEAVE_S)
    return end


def _read_reports(end: End) -> None:
    """Read the reports of the ranks into ``end``. Errors caused by other ranks count only if there are no others."""
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
    """Print why the run ends, then exit with ``code``. Without a code, exit or raise an error according to ``end``."""
    newest = end.attempt.progress().describe(end.skipped, str(end))
    if code is not None:
        warn(f"{why}{newest}")
        raise SystemExit(code)
    if end.preempted:
        raise SystemExit(RESUME_CODE)
    if end.received is None:
        raise RanksFailedError(f"{end}{why}{newest}")
    if end.stopped is None and end.errors:
        warn(f"{end}{newest}")
    # If rank 0 was killed, it was blocked in a collective and could not print this itself.
    killed = end.stopped is not None and end.codes.get(0, 0) < 0
    warn(f"stopped by {end.received.name}{newest if killed else ''}")
    raise SystemExit(128 + end.received)


def _variables(task: SchedulerTask, nproc: int, store: Any) -> dict[str, str]:
    """Return the environment of this task's ranks. OpenMP gets one thread by default, because ranks share cores."""
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
