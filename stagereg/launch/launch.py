"""The launcher: starts local ranks of this program's own command line, and waits for their end.

Each rank is a fresh interpreter that runs the same script and composes the same config again. So the typed config is
never pickled, and it works the same below joblib and submitit. The launcher has made the run directory and written
``.hydra``, and has the store at which the ranks meet (:mod:`stagereg.launch.run_store`). In a scheduler's job with
several tasks each task does so for its part of the ranks, and the first one has the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import stagereg.record as record
from stagereg.crash_report import signal_name
from stagereg.errors import RESUME_CODE, LaunchError
from stagereg.launch.command_line import CommandLine
from stagereg.launch.preemption import SAME_SIGNAL_S, SIGNALS
from stagereg.launch.rank import LAUNCHER, command_to_go_on, publish_run, resume_override
from stagereg.launch.run_store import GATHER_S, RunStore
from stagereg.launch.scheduler_task import SchedulerTask
from stagereg.machine import tunables

_KILL_S = 3.0
"""Seconds ranks have to end after a signal, before they are killed."""
_MORE_S = 5.0
"""Seconds that ranks have to report and end once they have saved what is left."""
_LEAVE_S = 60.0
"""Seconds that a task waits for the others to end, since one of them has the store."""
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


def launch(command: CommandLine, hydra: Any, nproc: int) -> Any:
    """Run one job on ``nproc`` fresh local ranks and return rank 0's value, once all ranks have ended.

    In a scheduler's job with several tasks these are the ranks of this task, and only the first one returns a value. A
    signal that stopped the run, or that all ranks have saved for and exited, is a ``SystemExit``.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    task = SchedulerTask.current()
    publish_run(hydra.runtime.output_dir, resume_override(hydra))
    ranks = range(task.index * nproc, (task.index + 1) * nproc)
    with LocalRanks() as local:
        store = _open_store(task)
        run = RunStore(PrefixStore("stagereg", store), ranks[0], task.count * nproc)
        if task.index == 0:
            run.begin(hydra.runtime.output_dir, resume_override(hydra))
        variables = _variables(task, nproc, store.port)
        for number, rank in enumerate(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(number)}
            local.start(rank, command.for_ranks(hydra), hydra.runtime.cwd, variables | own)
        codes = local.wait()
        if any(code < 0 for code in codes.values()):
            local.wait_for_rest(run.get("saves after a loss") or 0.0)
        if local.stopped is not None:
            # A rank in its job may run its ``finally`` blocks after SIGINT; one that is not there yet could only print
            # a traceback from the middle of an import, so it is terminated instead.
            in_job = all(run.get(f"in job/{rank}") for rank in ranks)
            local.end(local.stopped if in_job else signal.SIGTERM)
            killed = local.wait().get(0, 0) < 0  # rank 0 waited in a collective, and could not say this itself
            raise _stopped(local.stopped, _newest_checkpoint(hydra.runtime.output_dir) if killed else "")
    errors, result = {}, None
    with contextlib.suppress(RuntimeError):  # of the store, where the machine that had it is lost
        errors, result = run.errors(), run.get("result")
        _meet(store, task, "ended", _LEAVE_S)
    if not errors and RESUME_CODE in codes.values():
        raise SystemExit(RESUME_CODE)
    if errors or codes:
        _raise(errors, codes, local.forwarded, _newest_checkpoint(hydra.runtime.output_dir, {0, *errors}))
    return result if task.index == 0 else None


class LocalRanks:
    """The ranks of this task, and the signals that this process gets, for the time of a ``with`` block.

    SIGTERM and SIGUSR1 are forwarded: ranks with a checkpointer save and exit, others end. Where the same signal comes
    again later, and where it is any other one, the ranks are to be ended (``stopped``).
    """

    def __init__(self) -> None:
        self.forwarded: signal.Signals | None = None
        self.stopped: signal.Signals | None = None
        self._forwarded_at = 0.0
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> LocalRanks:
        if threading.current_thread() is threading.main_thread():  # no other can handle signals
            for number in {signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *SIGNALS}:
                handler = signal.getsignal(number)
                if handler is signal.SIG_IGN:  # by nohup, or a script that has this program in the background
                    continue
                if number != signal.SIGUSR1 or handler is signal.SIG_DFL:  # else a launcher's
                    self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *raised: object) -> None:
        self.end(signal.SIGTERM)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self, rank: int, command: list[str], folder: str, variables: dict[str, str]) -> None:
        """Start a rank, in a session of its own, so that Ctrl-C in a terminal does not reach it."""
        self._processes[rank] = subprocess.Popen(command, cwd=folder, env=variables, start_new_session=True)

    def wait(self) -> dict[int, int]:
        """Wait until all have ended, one has failed, or a signal is to end them; return exit codes that are not 0."""
        while True:
            codes = {rank: process.poll() for rank, process in self._processes.items()}
            failed = not set(codes.values()) <= {None, 0, RESUME_CODE}
            if failed or self.stopped is not None or None not in codes.values():
                return {rank: code for rank, code in codes.items() if code}
            time.sleep(0.05)

    def wait_for_rest(self, limit_s: float) -> None:
        """Wait until all have ended that save what they have, since one is lost; or a signal is to end them."""
        ends = time.monotonic() + limit_s + (_MORE_S if limit_s else 0.0)
        while time.monotonic() < ends and self.stopped is None and None in [p.poll() for p in self._processes.values()]:
            time.sleep(0.05)

    def end(self, number: signal.Signals) -> None:
        """End those that still run: with their children they get this signal, and are killed seconds later."""
        running = [process for process in self._processes.values() if process.poll() is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + _KILL_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        again = received == self.forwarded and time.monotonic() > self._forwarded_at + SAME_SIGNAL_S
        if received not in SIGNALS or again or not self._processes:
            self.stopped = self.stopped or received
            return
        if self.forwarded is None:
            self.forwarded, self._forwarded_at = received, time.monotonic()
        for process in self._processes.values():
            process.send_signal(received)


def _open_store(task: SchedulerTask) -> Any:
    """The store of the run, which task 0 has, once all tasks have come to it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=GATHER_S)
    try:
        store = TCPStore(task.host, task.port, is_master=task.index == 0, timeout=limit, wait_for_workers=False)
        _meet(store, task, "started", GATHER_S)
    except RuntimeError as error:
        where = f"the {task.count} tasks of the job have not met at {task.host}:{task.port} in {GATHER_S} s"
        raise LaunchError(f"{where}: {error}") from error
    return store


def _meet(store: Any, task: SchedulerTask, what: str, limit_s: float) -> None:
    """Wait until all tasks have come here. Raises ``RuntimeError`` if they have not in so many seconds."""
    store.set(f"{what}/{task.index}", "")
    store.wait([f"{what}/{index}" for index in range(task.count)], timedelta(seconds=limit_s))


def _variables(task: SchedulerTask, nproc: int, port: int) -> dict[str, str]:
    """The environment of this task's ranks: each takes one core, as processes share the cores."""
    one_machine = task.host == SchedulerTask.host
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if one_machine and sys.platform == "linux" else {}
    return {
        "OMP_NUM_THREADS": "1",
        **loopback,
        **os.environ,
        **tunables(os.environ),
        LAUNCHER: str(os.getpid()),
        "WORLD_SIZE": str(task.count * nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": task.host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 opens no store of its own
    }


def _newest_checkpoint(directory: str, ranks: Collection[int] = (0,)) -> str:
    """Return a line on the newest checkpoint that ranks have recorded, and the command that goes on from it."""
    newest: dict[str, dict[str, Any]] = {}
    for rank in ranks:  # one that is left may have saved after rank 0 was lost
        with contextlib.suppress(OSError):
            for line in Path(directory, record.file_name(rank)).read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):  # cut off, or no event
                    event = json.loads(line) if '"write"' in line or '"tier"' in line else {}
                    if "dir" in event and event["t"] >= newest.get(event["event"], event)["t"]:
                        newest[event["event"]] = event
    stored, near = newest.get("write"), newest.get("tier")
    if stored is None and near is None:
        return ""
    found = [] if stored is None else [f"The newest checkpoint is step {stored['step']}, in {stored['dir']}"]
    if near is not None and (stored is None or near["step"] > stored["step"]):
        found.append(f"step {near['step']} is in {near['dir']}")
    command = command_to_go_on("" if stored is None else stored["dir"])
    text = "; ".join([*found, f"{command} goes on from there"])
    return f"\n{text[0].upper()}{text[1:]}."


def _raise(
    errors: Mapping[int, str], codes: Mapping[int, int], forwarded: signal.Signals | None, more: str = ""
) -> NoReturn:
    """Raise for ranks that have failed: with what they have reported, or else with how they ended."""
    received = forwarded or next((each for each in SIGNALS if 128 + each in codes.values()), None)
    ends = {
        rank: f"died of {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        for rank, code in codes.items()
    }
    died = {rank: text for rank, text in ends.items() if codes[rank] < 0}
    texts = died | dict(errors) if errors else ends
    message = "\n".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items())) + more
    if received is None:
        raise RanksFailedError(message)
    if errors:
        print(message, file=sys.stderr)
    raise _stopped(received)


def _stopped(received: signal.Signals, more: str = "") -> SystemExit:
    print(f"stopped by {received.name}{more}", file=sys.stderr, flush=True)
    return SystemExit(128 + received)
