"""The parent's side of a run: start local ranks of the own command line through torch elastic, and see them end.

Every rank is a fresh interpreter that runs the same script and composes the same config again, so the typed config
needs no way through a pickle, and it works the same below joblib or submitit. The parent has composed, made the run
directory and written ``.hydra`` before; from here it only watches, hands signals on, collects what failed ranks have to
tell and brings rank 0's return value back. In a scheduler's job with several tasks, each task does that for its part of
the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from stagereg.errors import RESUME_CODE, LaunchError
from stagereg.launch.command_line import CommandLine
from stagereg.launch.launcher_channel import LauncherChannel
from stagereg.launch.libc import tunables
from stagereg.launch.preempted_exit import SignalForwarder, left, say
from stagereg.launch.preemption import SIGNALS
from stagereg.launch.rank import environment
from stagereg.launch.scheduler_task import SchedulerTask

__all__ = ["RanksFailedError", "checked_nproc", "launch"]

_GRACE_S = 3
"""Seconds ranks have to end after a signal, before they are killed."""
_GATHER_S = 600
"""Seconds in which the tasks of a scheduler's job may start one after another."""
_RANKS_PER_CORE = 4
_ELASTIC = "torch.distributed.elastic"


class RanksFailedError(LaunchError):
    """Ranks of a job failed; the message is what they told, each cause once and with its rank."""


class _SavedError(LaunchError):
    """Ranks had saved and were to leave, and have not come to their end in time."""


def checked_nproc(value: Any) -> int:
    """The number of local ranks, or ``LaunchError`` while nothing has started yet."""
    cores = os.cpu_count() or 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LaunchError(f"nproc={value} is no number of ranks: use nproc=1 or more (this machine has {cores} cores)")
    if value > cores * _RANKS_PER_CORE:
        raise LaunchError(
            f"nproc={value} is more than this machine can run: it has {cores} cores, so use nproc={cores}, "
            f"or nproc={cores * _RANKS_PER_CORE} at the very most"
        )
    return value


def launch(command: CommandLine, hydra: Any, nproc: int) -> Any:
    """Run one job on ``nproc`` fresh local ranks and return rank 0's value; all ranks have ended when it comes back.

    In a scheduler's job with several tasks (:class:`SchedulerTask`) these are the ranks of this task, and only the
    first task has a value to return.

    Args:
        command: how this program was started.
        hydra: the ``hydra`` node of the job's composed config.
        nproc: number of local ranks, at least one.

    Raises:
        RanksFailedError: a rank failed.
        SystemExit: a signal stopped the run (code 130 for SIGINT, 143 for SIGTERM), or the ranks have saved and left
            because they were signalled to (75).
    """
    task = SchedulerTask.current()
    first = task.index * nproc if task is not None else 0
    ranks = range(first, first + nproc)
    with tempfile.TemporaryDirectory(prefix="stagereg-run-") as folder:
        handover = LauncherChannel(os.getpid(), Path(folder), time.time())
        with _Signals(handover, ranks) as signals:
            try:
                _run_elastic(command.for_ranks(hydra), ranks, task, handover, hydra.runtime.cwd, signals)
            except _SavedError as error:
                print(error, file=sys.stderr, flush=True)
                raise SystemExit(RESUME_CODE) from None
            except BaseException as error:
                received = signals.received or getattr(error, "sigval", None) or signals.handed_on
                if received is None:
                    raise
                if isinstance(error, RanksFailedError) and handover.errors():
                    print(error, file=sys.stderr)
                print(f"stopped by {received.name}", file=sys.stderr, flush=True)
                raise SystemExit(128 + received) from None
        if (leaving := left([handover.left(rank) for rank in ranks])) is not None:
            say(leaving, hydra)
            raise leaving
        return json.loads(handover.result.read_text()) if handover.result.exists() else None


def _run_elastic(
    words: Sequence[str],
    ranks: range,
    task: SchedulerTask | None,
    handover: LauncherChannel,
    folder: str,
    signals: _Signals,
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    interpreter, *arguments = words
    # Elastic fills ${local_rank} into arguments; a dollar of ours is to stay one.
    arguments = [argument.replace("$", "$$") for argument in arguments]
    start = elastic_launch(_elastic_config(len(ranks), task, handover.folder), interpreter)
    here = task is None or task.machines == 1
    with _in_folder(folder), environment(_rank_variables(handover, here)), _quiet_elastic():
        try:
            signals.listen()
            start(*arguments)
        except ChildFailedError as failed:
            if any(each.exitcode == RESUME_CODE for each in failed.failures.values()) and not handover.errors():
                raise _SavedError("preempted: all is saved, but ranks had not come to their end in time") from None
            raise RanksFailedError(_told(handover, failed.failures)) from None


def _elastic_config(nproc: int, task: SchedulerTask | None, folder: Path) -> Any:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    # Settings that older releases of torch do not know.
    recent: dict[str, Any] = {"shutdown_timeout": _GRACE_S, "signals_to_handle": ""}
    known = {each.name for each in dataclasses.fields(LaunchConfig)}
    meeting: dict[str, Any] = {
        "run_id": folder.name,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "127.0.0.1:0",
        "rdzv_configs": {"is_host": True, "timeout": 60},
        "local_addr": "127.0.0.1",
    }
    if task is not None:  # the ranks of task 0 are to come first, which this rendezvous alone can promise
        meeting = {
            "run_id": task.job,
            "rdzv_backend": "static",
            "rdzv_endpoint": task.meeting,
            "rdzv_configs": {"rank": task.index, "timeout": _GATHER_S},
        }
    nodes = 1 if task is None else task.count
    return LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=nproc,
        **meeting,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        **{name: value for name, value in recent.items() if name in known},
    )


def _rank_variables(handover: LauncherChannel, here: bool) -> dict[str, str]:
    """The environment of ranks: cores are shared out among processes, not threads; ``here`` is on this machine alone.

    What it has to do with staging is told in :mod:`stagereg.launch.libc`.
    """
    defaults = {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if here and sys.platform == "linux" else {})
    # Elastic sets this one in the parent and leaves it there; naming it here takes it back in the end.
    elastics = {"TORCHELASTIC_SIGNALS_TO_HANDLE": ""}
    chosen = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return chosen | tunables(os.environ) | elastics | handover.variables()


class _Signals:
    """Turns the first signal to stop in a ``with`` block into the end of all ranks.

    It raises nothing before :meth:`listen`, because importing torch can swallow an exception from a handler. A rank
    in its job may run its ``finally`` blocks after SIGINT; one that is not there yet could only print a traceback from
    the middle of an import, so it is terminated instead. What comes after the first signal changes nothing any more.

    Ranks that all listen for a signal get it handed on, and end by themselves; then it is the second one that ends
    them, or the end of their time.
    """

    def __init__(self, handover: LauncherChannel, ranks: range) -> None:
        self.received: signal.Signals | None = None
        self._listening = False
        self._ready = [handover.ready(rank) for rank in ranks]
        self._hand_on = SignalForwarder([handover.listening(rank) for rank in ranks], self._give_up)
        self._time_is_up = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in {signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *SIGNALS}:
                if number != signal.SIGUSR1 or signal.getsignal(number) is signal.SIG_DFL:  # else a launcher's
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *raised: object) -> None:
        self._hand_on.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def listen(self) -> None:
        """From here on a signal raises elastic's ``SignalException``; one that came before does so now."""
        self._listening = True
        if self.received is not None:
            self._stop(self.received)

    @property
    def handed_on(self) -> signal.Signals | None:
        """The signal that the ranks were left to end by themselves for."""
        return self._hand_on.received

    def _give_up(self) -> None:
        self._time_is_up = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if not self._time_is_up and self._hand_on.take(received):
            return
        if received == signal.SIGUSR1 and self.handed_on is None:  # does what it does without this
            signal.signal(number, self._before.pop(number))
            os.kill(os.getpid(), number)
        elif self.received is None:
            self.received = received
            if self._listening:
                self._stop(self.received)

    def _stop(self, received: signal.Signals) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        in_job = all(file.exists() for file in self._ready)
        raise SignalException(f"{received.name}", received if in_job else signal.SIGTERM)


@contextlib.contextmanager
def _in_folder(folder: str) -> Iterator[None]:
    """Work in the folder in which the program was started, wherever Hydra has gone since."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Leave it to this room to say how ranks ended; elastic would say the same in forty lines."""
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(_ELASTIC)]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _told(handover: LauncherChannel, failures: Mapping[int, Any]) -> str:
    """What the ranks told of their failures, or else how the first of them ended."""
    told = handover.errors()
    if not told:
        codes = {rank: failure.exitcode for rank, failure in sorted(failures.items())}
        # Elastic terminates the others as soon as one has ended badly; that is no news.
        causes = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM} or codes
        for rank, code in causes.items():
            told[rank] = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return "\n".join(f"rank {rank}: {text}" for rank, text in told.items())
