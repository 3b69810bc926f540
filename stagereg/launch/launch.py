"""The launcher: starts local ranks of this program's own command line, and waits for their end.

Each rank is a fresh interpreter that composes the same config again, so the typed config is never pickled. The launcher
makes the run directory and ``.hydra``, and has the store at which the ranks meet (:mod:`stagereg.launch.run_store`). Of
several tasks of a scheduler's job, each starts its part of the ranks, and the first one has the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import stagereg.base.first_step as first_step
from stagereg.base.address import listen
from stagereg.base.command import command_to_resume, publish_run, resume_overrides
from stagereg.base.crash_report import signal_name
from stagereg.base.machine import tunables
from stagereg.base.output import warn
from stagereg.errors import RESUME_CODE, LaunchError, at_least
from stagereg.extensions.goodput.phases import FAILURE
from stagereg.extensions.preemption.signals import SIGNALS
from stagereg.extensions.recovery.restarts import Progress, Restarts
from stagereg.extensions.recovery.warm import Start
from stagereg.launch.agreed_values import VALUES, resolved
from stagereg.launch.command_line import CommandLine, number
from stagereg.launch.local_ranks import LocalRanks
from stagereg.launch.rank import ATTEMPT, LAUNCHER, NEXT_START, STEPPED
from stagereg.launch.run_secret import GATHER_S, SECRET, agreed_secret, new_secret
from stagereg.launch.run_store import RunStore
from stagereg.launch.scheduler_task import SchedulerTask

_LEAVE_S = 60.0  # seconds that a task waits for the others to end, since one of them has the store
_MORE_S = 5.0
"""Seconds that ranks have to report and end by themselves once one is lost, and they have saved what is left."""
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


def launch(command: CommandLine, cfg: Any, hydra: Any, nproc: int) -> Any:
    """Run one job on ``nproc`` fresh local ranks and return rank 0's value, once all ranks have ended.

    In a scheduler's job with several tasks these are the ranks of this task, and only the first one returns a value. A
    signal that stopped the run, or that all ranks have saved for and exited, is a ``SystemExit``. A run that fails is
    started again as often as ``restarts`` of the config says.
    """
    from omegaconf import OmegaConf

    task, directory = SchedulerTask.current(), hydra.runtime.output_dir
    overrides = resume_overrides(hydra, cfg)
    publish_run(directory, overrides)
    restarts = Restarts(at_least(0, "restarts", number(cfg, "restarts", 0)))
    with LocalRanks() as local:
        store = _open_store(task)
        variables = {**_variables(task, nproc, store), VALUES: json.dumps(resolved(cfg))}
        start = Start(command.for_ranks(hydra), hydra.runtime.cwd, variables)
        run = _Run(local, store, task, start, directory, overrides, restarts)
        while True:
            end = run.attempt()
            if not end.errors and end.unstepped is not None:
                raise _preempted(end.unstepped, _newest_checkpoint(run.progress(), end.skipped))
            if not end.errors and RESUME_CODE in end.codes.values():
                raise SystemExit(RESUME_CODE)
            if not end.errors and not end.codes:
                return end.result if task.index == 0 else None
            received = local.forwarded or end.received
            refusal = "" if received else run.refusal(end)
            if refusal is not None:
                _raise(end, received, refusal + _newest_checkpoint(run.progress(), end.skipped))
            run.prepare(end, OmegaConf.select(cfg, "checkpoint.resume") not in (None, "auto"))
            warn(f"{end}\n{restarts}")


@dataclass
class _End:
    """How the ranks have ended: exit codes that are not 0, reported errors, rank 0's value; when that was noticed."""

    run: RunStore
    codes: dict[int, int]
    noticed: float
    errors: dict[int, str] = field(default_factory=dict)
    result: Any = None
    unstepped: signal.Signals | None = None  # ended ranks, and no rank had taken a step
    skipped: str = ""  # that the next start skips the newest checkpoint, if so

    @property
    def received(self) -> signal.Signals | None:
        return next((each for each in SIGNALS if 128 + each in self.codes.values()), None)

    def hear(self) -> None:
        """Read what the ranks have reported; what came of another rank's end counts where no code tells of that."""
        self.errors, self.result = self.run.errors(), self.run.get("result")
        self.skipped = self.run.get(NEXT_START) or ""
        consequences = self.run.errors("consequences")
        causes = {rank: code for rank, code in self.codes.items() if rank not in consequences}
        if not self.errors and set(causes.values()) <= {RESUME_CODE}:
            self.errors = consequences
        elif not self.errors:
            self.codes = causes

    def __str__(self) -> str:
        texts = {
            rank: f"died of {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
            for rank, code in self.codes.items()
            if not self.errors or code < 0  # an error says more than the code that came of it
        } | self.errors
        return "\n".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items()))


@dataclass
class _Run:
    local: LocalRanks
    store: Any
    task: SchedulerTask
    start: Start
    directory: str
    overrides: list[str]  # as `resume_overrides`
    restarts: Restarts
    name = ""  # by which the record has what this attempt has done

    def attempt(self) -> _End:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        local, task, variables = self.local, self.task, self.start.variables
        nproc, attempt = int(variables["LOCAL_WORLD_SIZE"]), str(self.restarts.count)
        ranks = range(task.index * nproc, (task.index + 1) * nproc)
        run = RunStore(PrefixStore("stagereg", self.store), ranks[0], task.count * nproc, attempt)
        if task.index == 0:
            run.begin(self.directory, self.overrides)
        self.name = run.run()["attempt"]
        for local_rank, rank in enumerate(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), ATTEMPT: attempt}
            local.start(rank, self.start._replace(variables=variables | own))

        def warm_up() -> None:
            if self.restarts.most and run.get("in job/0"):  # before, it would take their cores
                local.warm_up(self.start)

        codes = local.wait(warm_up)
        end = _End(run, codes, time.time())
        if local.stopped is not None:
            self._stop(run, ranks, local.stopped)
        end.unstepped = _find_unstepped(run, codes, local.forwarded)
        if min(codes.values(), default=0) < 0 and end.unstepped is None:
            local.wait_for_rest((run.get("saves after a loss") or 0.0) + _MORE_S)
        local.end(signal.SIGTERM)
        with contextlib.suppress(RuntimeError):  # of the store, where the machine that had it is lost
            end.hear()
            _meet(self.store, task, f"ended {attempt}", _LEAVE_S)
        return end

    def refusal(self, end: _End) -> str | None:
        """Return why this run is not started again, or nothing if nobody asked for that; ``None`` if it is."""
        restarts = self.restarts
        if restarts.most == 0:
            return ""
        key = f"refused {restarts.count}"
        with contextlib.suppress(RuntimeError):  # of the store, whose task is gone
            if end.run.get("comes again"):
                return ""
            if self.task.index > 0:
                refusal, restarts.progressed = json.loads(self.store.get(key))
                restarts.count += refusal is None
                return str(refusal) if refusal else None
            killed = min(end.codes.values(), default=0) < 0
            refusal = restarts.refusal(end.errors, killed, self.progress())
            self.store.set(key, json.dumps([refusal, restarts.progressed]))
            return refusal
        return ""

    def progress(self) -> Progress:
        return Progress.of(self.directory, self.name)

    def prepare(self, end: _End, has_begun_elsewhere: bool) -> None:
        """Have the next attempt know of the failure, and go on from what this one has made."""
        failure = {"why": str(end), "noticed": end.noticed, "ended": time.time(), "restart": self.restarts.count}
        self.start.variables[FAILURE] = json.dumps(failure)
        resume = "++checkpoint.resume=auto"
        if self.restarts.progressed and has_begun_elsewhere and resume not in self.start.command:
            self.start.command.append(resume)  # the run has passed the checkpoint that it was to begin from

    def _stop(self, run: RunStore, ranks: range, stopped: signal.Signals) -> NoReturn:
        if self.local.ran_none and stopped in SIGNALS:
            self.local.end(signal.SIGTERM)
            raise _preempted(stopped, _newest_checkpoint(self.progress()))
        # A rank in its job may run its ``finally`` blocks after SIGINT; one that is not there yet could only print a
        # traceback from the middle of an import, so it is terminated instead.
        in_job = all(run.get(f"in job/{rank}") for rank in ranks)
        killed = self.local.end(stopped if in_job else signal.SIGTERM).get(0, 0) < 0
        # If it is, rank 0 waited in a collective, and could not say this itself.
        skipped = run.get(NEXT_START) or ""
        raise _stopped(stopped, _newest_checkpoint(self.progress(), skipped) if killed else "")


def _open_store(task: SchedulerTask) -> Any:
    """The store of the run, which task 0 has, once all tasks have come to it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit, port, listener = timedelta(seconds=GATHER_S), task.port, None
    try:
        if task.index == 0 and task.is_one_machine:  # else torch listens on all interfaces
            opened = listen(task.host, task.port)
            port, listener = opened.getsockname()[1], opened.detach()
        begins = {"timeout": limit, "wait_for_workers": False, "master_listen_fd": listener}
        store: Any = TCPStore(task.host, port, is_master=task.index == 0, **begins)  # type: ignore[arg-type]
        _meet(store, task, "started", GATHER_S)
    except (RuntimeError, OSError) as error:
        where = f"the {task.count} tasks of the job have not met at {task.host}:{task.port} in {GATHER_S} s"
        raise LaunchError(f"{where}: {error}") from error
    return store


def _meet(store: Any, task: SchedulerTask, what: str, limit_s: float) -> None:
    """Wait until all tasks have come here. Raises ``RuntimeError`` if they have not in so many seconds."""
    store.set(f"{what}/{task.index}", "")
    store.wait([f"{what}/{index}" for index in range(task.count)], timedelta(seconds=limit_s))


def _variables(task: SchedulerTask, nproc: int, store: Any) -> dict[str, str]:
    """The environment of this task's ranks: each takes one core, as processes share the cores."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if task.is_one_machine and sys.platform == "linux" else {}
    secret = os.environ.get(SECRET, "")
    if task.count > 1:
        secret = agreed_secret(store, task.index, task.count, secret)
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
        SECRET: secret or new_secret(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 opens no store of its own
    }


def _newest_checkpoint(progress: Progress, skipped: str = "") -> str:
    """Return a line on the newest checkpoint of a run, and how to resume from it; ``skipped`` as of `_End`."""
    stored, near = progress.stored or progress.resumed, progress.near
    if stored is None and near is None:
        return skipped and f"\n{skipped}"
    found = [] if stored is None else [f"The newest checkpoint is step {stored['step']}, in {stored['dir']}"]
    if near is not None and (stored is None or near["step"] > stored["step"]):
        found.append(f"step {near['step']} is in {near['dir']}")
    command = command_to_resume("" if stored is None else stored["dir"])
    text = "; ".join([*found, *([] if skipped else [f"{command} resumes from there"])])
    return f"\n{text[0].upper()}{text[1:]}. {skipped}".rstrip()


def _raise(end: _End, received: signal.Signals | None, more: str) -> NoReturn:
    if received is None:
        raise RanksFailedError(f"{end}{more}")
    if end.errors:
        warn(f"{end}{more}")
    raise _stopped(received)


def _find_unstepped(run: RunStore, codes: dict[int, int], forwarded: signal.Signals | None) -> signal.Signals | None:
    """Return the signal that has ended ranks, if nothing else has ended one, and no rank had taken a step.

    A rank that exits with 75 does not name the signal; ``forwarded`` is the one that the launcher got.
    """
    if not codes or not {*codes.values()} <= {RESUME_CODE, *(-each for each in SIGNALS)}:
        return None
    received = next((each for each in SIGNALS if -each in codes.values()), forwarded or signal.SIGTERM)
    with contextlib.suppress(RuntimeError):  # of the store, where the machine that had it is lost
        return None if run.get(STEPPED) else received
    return None


def _preempted(received: signal.Signals, more: str) -> SystemExit:
    warn(f"{first_step.preempted(received)}{more}")
    return SystemExit(RESUME_CODE)


def _stopped(received: signal.Signals, more: str = "") -> SystemExit:
    warn(f"stopped by {received.name}{more}")
    return SystemExit(128 + received)
