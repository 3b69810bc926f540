"""The launcher: starts local ranks of this program's own command line through torch elastic, and waits for their end.

Each rank is a fresh interpreter that runs the same script and composes the same config again. So the typed config is
never pickled, and it works the same below joblib and submitit. The launcher has composed the config, made the run
directory and written ``.hydra``; from here on it forwards signals, collects the errors of failed ranks and returns
rank 0's value. In a scheduler's job with several tasks each task does so for its part of the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stagereg.errors import RESUME_CODE, LaunchError
from stagereg.launch.command_line import CommandLine
from stagereg.launch.launcher_channel import LauncherChannel
from stagereg.launch.resume_hint import print_exit
from stagereg.launch.run_store import GATHER_S
from stagereg.launch.scheduler_task import SchedulerTask
from stagereg.launch.signal_forwarder import SignalForwarder
from stagereg.machine import tunables

__all__ = ["RanksFailedError", "checked_nproc", "launch"]

_GRACE_S = 3
"""Seconds ranks have to end after a signal, before they are killed."""
_RANKS_PER_CORE = 4


class RanksFailedError(LaunchError):
    """Ranks of a job failed; the message has each cause once, with its rank."""


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
    """Run one job on ``nproc`` fresh local ranks and return rank 0's value, once all ranks have ended.

    In a scheduler's job with several tasks (:class:`SchedulerTask`) these are the ranks of this task, and only the
    first task has a value to return.

    Args:
        command: how this program was started.
        hydra: the ``hydra`` node of the job's composed config.
        nproc: number of local ranks, at least one.

    Raises:
        RanksFailedError: a rank failed.
        SystemExit: a signal stopped the run (code 130 for SIGINT, 143 for SIGTERM), or the ranks have saved and exited
            because they were signalled (75).
    """
    task = SchedulerTask.current()
    first = task.index * nproc if task is not None else 0
    ranks = range(first, first + nproc)
    with tempfile.TemporaryDirectory(prefix="stagereg-run-") as folder:
        channel = LauncherChannel(os.getpid(), Path(folder), time.time())
        with SignalForwarder(channel, ranks) as signals:
            try:
                failures = _run_elastic(command.for_ranks(hydra), ranks, task, channel, hydra.runtime.cwd, signals)
            except BaseException as error:
                received = signals.received or getattr(error, "sigval", None) or signals.forwarded
                if received is None:
                    raise
                raise _stopped(received) from None
        if failures:
            _raise(failures, channel, signals.received or signals.forwarded)
        if (ended := channel.exit_of(ranks)) is not None:
            print_exit(ended, hydra)
            raise ended
        return channel.status(0).get("result")


def _stopped(received: signal.Signals) -> SystemExit:
    print(f"stopped by {received.name}", file=sys.stderr, flush=True)
    return SystemExit(128 + received)


def _raise(failures: Mapping[int, Any], channel: LauncherChannel, received: signal.Signals | None) -> None:
    """Raise for ranks that have failed, after the signal ``received`` if there was one."""
    errors = channel.errors()
    if any(failure.exitcode == RESUME_CODE for failure in failures.values()) and not errors:
        print("preempted: all is saved, but some ranks did not end in time", file=sys.stderr, flush=True)
        raise SystemExit(RESUME_CODE)
    if received is None:
        raise RanksFailedError(_message(errors, failures))
    if errors:
        print(_message(errors, failures), file=sys.stderr)
    raise _stopped(received)


def _message(errors: Mapping[int, str], failures: Mapping[int, Any]) -> str:
    """The errors that ranks have reported; where there are none, how the ranks ended."""
    if not errors:
        codes = {rank: failure.exitcode for rank, failure in sorted(failures.items())}
        # Elastic terminates the others as soon as one has ended badly, so their end says nothing.
        causes = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM} or codes
        errors = {
            rank: f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            for rank, code in causes.items()
        }
    return "\n".join(f"rank {rank}: {text}" for rank, text in errors.items())


def _run_elastic(
    command: Sequence[str],
    ranks: range,
    task: SchedulerTask | None,
    channel: LauncherChannel,
    folder: str,
    signals: SignalForwarder,
) -> Mapping[int, Any]:
    """Run the ranks to their end, in ``folder``; return the failures by rank."""
    from hydra.core.utils import env_override
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    interpreter, *arguments = command
    # Elastic fills ${local_rank} into arguments; a dollar of ours is to stay one.
    arguments = [argument.replace("$", "$$") for argument in arguments]
    start = elastic_launch(_elastic_config(len(ranks), task, channel.folder), interpreter)
    one_machine = task is None or task.machines == 1
    with contextlib.chdir(folder), env_override(_rank_variables(channel, one_machine)), _quiet_elastic():
        try:
            signals.listen()
            start(*arguments)
        except ChildFailedError as failed:
            return dict(failed.failures)
    return {}


def _elastic_config(nproc: int, task: SchedulerTask | None, folder: Path) -> Any:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    recent: dict[str, Any] = {"shutdown_timeout": _GRACE_S, "signals_to_handle": ""}  # older torch lacks them
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    rendezvous: dict[str, Any] = {
        "run_id": folder.name,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "127.0.0.1:0",
        "rdzv_configs": {"is_host": True, "timeout": 60},
        "local_addr": "127.0.0.1",
    }
    if task is not None:  # the ranks of task 0 are to come first, which only this rendezvous promises
        rendezvous = {
            "run_id": task.job,
            "rdzv_backend": "static",
            "rdzv_endpoint": task.endpoint,
            "rdzv_configs": {"rank": task.index, "timeout": GATHER_S},
        }
    nodes = 1 if task is None else task.count
    return LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=nproc,
        **rendezvous,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        **{name: value for name, value in recent.items() if name in known},
    )


def _rank_variables(channel: LauncherChannel, one_machine: bool) -> dict[str, str]:
    """The environment of ranks: each takes one core, as processes share the cores."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if one_machine and sys.platform == "linux" else {}
    defaults = {"OMP_NUM_THREADS": "1", **loopback}
    chosen = {name: os.environ.get(name, value) for name, value in defaults.items()}
    # Elastic sets this one in the launcher and leaves it there; naming it here takes it back in the end.
    elastics = {"TORCHELASTIC_SIGNALS_TO_HANDLE": ""}
    return chosen | tunables(os.environ) | elastics | channel.variables()


def _quiet_elastic() -> contextlib.ExitStack:
    """Disable elastic's loggers for a ``with`` block: they report in forty lines what :func:`_message` says in one."""
    restore = contextlib.ExitStack()
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logger = logging.getLogger(name)
            restore.callback(setattr, logger, "disabled", logger.disabled)
            logger.disabled = True
    return restore
