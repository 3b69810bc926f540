"""Runs a function on several local ranks with a time limit, and reports ranks that failed, died or hung.

The ranks are forked from a server process (the forkserver of ``multiprocessing``). The server has imported torch and
stagereg, but never runs a thread, autograd or a collective. ``faulthandler`` dumps the Python stacks of a hung rank.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import stagereg.registry as registry
from stagereg.base.address import listen
from stagereg.base.crash_report import signal_name
from stagereg.base.installed import DISTRIBUTION
from stagereg.errors import StageregError
from stagereg.testing.worker import Assignment, pack, work

_PRELOAD = [
    "stagereg.testing.worker",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "torch.nn.parallel",
]
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_ON_THIS_MACHINE = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
_PG_EXTRA_S = 60.0
"""Seconds added to the timeout of the process group, so that ``run_ranks`` reports a hang before torch does."""
_LINGER_S = 2.0
"""Seconds to wait after a failure for the errors of other ranks, and after a hang for the stacks."""
before_wait: Callable[[float], object] = lambda seconds: None  # noqa: E731
"""Called before each wait of a test, with its time limit in seconds. ``stagereg check`` sums these limits."""


class RankFailure(StageregError, RuntimeError):
    """At least one rank of :func:`run_ranks` raised, died or hung. All rank processes have terminated.

    Attributes:
        failed: maps each failed rank, in order of failure, to its traceback or to a description of how it died.
        hung: maps each hung rank to the Python stacks of all its threads at the timeout.
        returned: maps each rank that finished to the result of the function.
    """

    def __init__(
        self, message: str, failed: Mapping[int, str] | None = None, hung: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.failed = dict(failed or {})
        self.hung = dict(hung or {})
        self.returned: dict[int, Any] = {}


def run_ranks(
    fn: Callable[..., Any],
    nproc: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``fn(rank, world_size, *args, **kwargs)`` on ``nproc`` new local processes and return their results.

    Each process has an initialized process group of size ``nproc``, one compute thread, the caller's working directory,
    ``sys.path`` and environment, and ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` as set by ``torchrun``. No rank exits
    before ``fn`` has returned or raised on all ranks. After all ranks have exited, their output is printed to the
    caller's ``sys.stdout``, each line prefixed with the rank. ``atexit`` handlers do not run in the ranks.

    Args:
        fn: a function defined at module level. The module may be a test module, with any import mode of pytest.
        nproc: number of ranks.
        args: picklable positional arguments, passed after rank and world size. Each rank gets a separate copy.
        kwargs: picklable keyword arguments. Each rank gets a separate copy.
        timeout_s: seconds after which ranks that still run count as hung, and are terminated.
        backend: as in ``torch.distributed.init_process_group``.
        env: additional environment variables for the ranks, set after torch was imported.

    Returns:
        The results of ``fn``, in rank order. A result must be picklable; tensors are picklable.

    Raises:
        RankFailure: a rank raised, died or hung.
        ValueError: ``fn`` is not defined at module level, or an argument cannot be pickled.
    """
    before_wait(timeout_s)
    shipment = pack(fn, tuple(args), dict(kwargs or {}))
    with tempfile.TemporaryDirectory(prefix="stagereg-ranks-") as folder:
        store = _open_store()
        sizes = {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
        limit_s, port = timeout_s + _PG_EXTRA_S, store.port
        ranks: list[_Rank] = []
        try:
            for rank in range(nproc):
                own = {**sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                variables = {**os.environ, **_ONE_THREAD, **_ON_THIS_MACHINE, **own, **(env or {})}
                ranks.append(_start(Assignment(rank, nproc, Path(folder), shipment, variables, backend, port, limit_s)))
            # The time limit starts here, because the server may first need to import torch before it can fork.
            hung = _wait(ranks, time.monotonic() + timeout_s)
        finally:
            for each in ranks:
                each.end()
            for each in ranks:
                for line in each.lines("output"):
                    print(f"[rank {each.job.rank}] {line}")
            del store  # The traceback of a RankFailure refers to this frame, and would keep the store alive.
        return _results(ranks, hung, timeout_s)


def _open_store() -> Any:
    """Start a TCPStore on a free loopback port, served by this process, so that it survives the exit of a rank."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with listen("127.0.0.1") as opened:
        own: Any = {"wait_for_workers": False, "master_listen_fd": opened.fileno()}
        store = TCPStore("127.0.0.1", opened.getsockname()[1], is_master=True, **own)
        opened.detach()
    return store


@dataclass
class _Rank:
    job: Assignment
    process: ForkServerProcess
    pid: int
    was_ended: bool = False

    def end(self) -> None:
        self.was_ended = self.was_ended or self.process.is_alive()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        # Kill the process itself, too: a new rank may not have created its Unix process group yet.
        self.process.kill()
        self.process.join(_LINGER_S)

    def lines(self, kind: str) -> list[str]:
        file = self.job.file(kind)
        return file.read_text(errors="replace").splitlines() if file.exists() else []

    def when_failed(self) -> float:
        """Return the time of the rank's error, or 0 if it died without an error: a sort key that puts causes first."""
        error = self.job.file("error")
        return error.stat().st_mtime if error.exists() else 0.0

    def failure(self) -> str:
        """Return the rank's traceback, or how it died; an empty string if it has a result, runs, or was terminated."""
        if error := self.lines("error"):
            return "\n".join(error)
        if self.was_ended or self.process.is_alive() or self.job.file("result").exists():
            return ""
        code = self.process.exitcode or 0
        died = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return "\n  ".join([f"{died} before it returned", *self.lines("output")[-10:], *self.lines("stacks")[:60]])


def _start(job: Assignment) -> _Rank:
    start_server()
    process = get_context("forkserver").Process(target=work, args=(job,), name=f"rank {job.rank}")
    process.start()
    assert process.pid is not None
    return _Rank(job, process, process.pid)


def start_server() -> None:
    """Start the server process that forks ranks, unless the server is already running."""
    # The server preloads only modules that tests import in any case: torch, the test runner, and components of
    # stagereg. A rank imports other packages when it needs them.
    runners = {"pytest", "hypothesis"} & sys.modules.keys()
    own = sorted({each.target.partition(":")[0] for each in registry.entries() if each.distribution == DISTRIBUTION})
    get_context("forkserver").set_forkserver_preload([*_PRELOAD, *own, *sorted(runners)])
    # Let the server import the same modules as this process, regardless of the server's working directory.
    here = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONSAFEPATH": "1"}
    with mock.patch.dict(os.environ, {**_ONE_THREAD, **here}):
        forkserver.ensure_running()


def _wait(ranks: Sequence[_Rank], deadline: float) -> list[_Rank]:
    """Wait until all ranks have exited, a rank has failed, or the deadline has passed. Return the ranks that hung."""
    failed = False
    while running := [each for each in ranks if each.process.is_alive()]:
        if not failed and any(each.failure() for each in ranks):
            failed, deadline = True, min(deadline, time.monotonic() + _LINGER_S)
        left_s = deadline - time.monotonic()
        # After a failure, a rank that has a result is not hung: it only waits for the failed rank.
        if left_s <= 0 or (failed and all(each.job.file("result").exists() for each in running)):
            break
        connection.wait([each.process.sentinel for each in running], min(left_s, 0.05) if failed else left_s)
    if failed:
        return []
    # A rank with a result is only waiting for other ranks. If all running ranks have results, they hang during exit.
    hung = [each for each in running if not each.job.file("result").exists()] or running
    for each in hung:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGUSR2)  # The handler dumps the Python stacks, and terminates the rank.
    patience = time.monotonic() + _LINGER_S
    for each in hung:
        each.process.join(max(0.0, patience - time.monotonic()))
    return hung


def _results(ranks: Sequence[_Rank], hung: Sequence[_Rank], timeout_s: float) -> list[Any]:
    files = {each.job.rank: each.job.file("result") for each in ranks}
    returned = {rank: pickle.loads(file.read_bytes()) for rank, file in files.items() if file.exists()}
    stacks = {each.job.rank: "\n".join(each.lines("stacks")) or "it did not respond" for each in hung}
    failed = {each.job.rank: why for each in sorted(ranks, key=_Rank.when_failed) if (why := each.failure())}
    if not stacks and not failed:
        return list(returned.values())
    if stacks:
        others = [str(each.job.rank) for each in ranks if each not in hung]
        ended = f"; finished in time: rank {', '.join(others)}" if others else ""
        head, failed = f"rank {', '.join(map(str, stacks))} hung: still running after {timeout_s:g} s{ended}", {}
    else:
        head = f"{len(failed)} of {len(ranks)} ranks failed: rank {', then '.join(map(str, failed))}"
    parts = [f"--- rank {rank}, stacks:\n{text}" for rank, text in stacks.items()]
    parts += [f"--- rank {rank}: {why}" for rank, why in failed.items()]
    failure = RankFailure("\n".join([head, *parts]), failed, stacks)
    failure.returned = returned
    raise failure
