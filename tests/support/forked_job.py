"""Jobs in the lab whose ranks are forked from one process that has imported torch: a start takes a second, not ten.

For tests with many starts and kills; others use :meth:`tests.support.lab.Lab.torchrun`, as users do. A machine has a
launcher, which starts the ranks, ends them all when one fails, and can be killed without them, as torchrun can.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch.distributed import TCPStore

from .lab import PORT, Job, Lab, Machine, Process, children_of

_FORKED = multiprocessing.get_context("forkserver")
_IMPORTED = ("torch._dynamo", "torch._inductor.utils", "torch.distributed.fsdp", "stagereg.assembly")
_IMPORTED += (
    "stagereg.extensions.tiers.memory",
    "stagereg.extensions.tiers.disk",
    "stagereg.stagers.host",
    "hydra.utils",
)
_FORKED.set_forkserver_preload([*_IMPORTED, "tests.extensions.tiers.train"])
_SECONDS = 20.0
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "TMPDIR": "/run",
    "OMP_NUM_THREADS": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


class ForkedProcess(Process):
    """The launcher of one machine."""

    def __init__(
        self,
        machine: Machine,
        main: Callable[[dict[str, str]], None],
        ranks: Sequence[tuple[dict[str, str], dict[str, str]]],
    ) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="forked-")  # noqa: SIM115
        self._outside = _FORKED.Process(target=_outside, args=(machine.pid, self._file.name, main, ranks), daemon=True)
        self._outside.start()

    @property
    def output(self) -> str:
        """What all ranks have printed until now."""
        return Path(self._file.name).read_text(errors="replace")

    @property
    def returncode(self) -> int | None:
        """``None`` while the launcher runs; 0, 1, or 128 and the number of the signal that ended it."""
        return self._outside.exitcode

    @property
    def ranks(self) -> list[int]:
        """The ids on this host of the ranks that run."""
        return [rank for launcher in self.launchers for rank in children_of(launcher)]

    @property
    def launchers(self) -> list[int]:
        """The id of the launcher, while it runs."""
        return children_of(self._outside.pid or 0)

    def report(self) -> str:
        """Have all ranks print their stacks, and return what was printed in all."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGUSR2)
        time.sleep(1.0)
        return self.output

    def kill_rank(self, number: int) -> None:
        """End one of its ranks."""
        for rank in self.ranks[number : number + 1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)

    def kill_launcher(self) -> None:
        """End the launcher alone; its ranks go on."""
        for launcher in self.launchers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(launcher, signal.SIGKILL)
        self._outside.join(_SECONDS)

    def wait(self, timeout_s: float) -> int:
        """Return its exit status. Fails the test if it runs for longer."""
        self._outside.join(timeout_s)
        if self.returncode is None:
            raise AssertionError(f"still runs after {timeout_s:g} s:\n{self.report()}")
        return self.returncode


def start(
    lab: Lab,
    main: Callable[[dict[str, str]], None],
    options: Mapping[str, object],
    machines: Sequence[int],
    nproc: int = 1,
) -> Job:
    """Run ``main(options)`` in ``nproc`` ranks on each of these machines; the first one has rank 0."""
    given = {name: str(value) for name, value in options.items()}
    chosen = [lab.machines[each] for each in machines]
    world = {"WORLD_SIZE": str(nproc * len(chosen)), "MASTER_ADDR": chosen[0].address, "MASTER_PORT": str(PORT)}
    processes = {}
    for number, machine in enumerate(chosen):
        ranks = [
            ({**_ENVIRONMENT, **world, "RANK": str(number * nproc + local), "LOCAL_RANK": str(local)}, given)
            for local in range(nproc)
        ]
        processes[machine] = ForkedProcess(machine, main, ranks)
    return Job(processes)


def _outside(
    machine: int,
    output: str,
    main: Callable[[dict[str, str]], None],
    ranks: Sequence[tuple[dict[str, str], dict[str, str]]],
) -> None:
    """Start the launcher inside of the machine, and end as it does. In a process of its own, outside."""
    with open(output, "ab", 0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.pidfd_open(machine), 0x00020000 | 0x04000000 | 0x08000000 | 0x40000000 | 0x20000000) != 0:
        sys.exit(f"setns: {os.strerror(ctypes.get_errno())}")
    if (launcher := os.fork()) == 0:
        _launch(main, ranks)
    _, status = os.waitpid(launcher, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _launch(main: Callable[[dict[str, str]], None], ranks: Sequence[tuple[dict[str, str], dict[str, str]]]) -> None:
    os.setsid()
    pids = []
    for environment, options in ranks:
        if (pid := os.fork()) == 0:
            os.environ.update(environment)
            _rank(main, options)
        pids.append(pid)
    first = ranks[0][0]
    if first["RANK"] == "0":  # as torchrun does: ranks meet at a store of the launcher
        store = TCPStore(first["MASTER_ADDR"], PORT, is_master=True, wait_for_workers=False)  # noqa: F841
    code = 0
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            code = 1
            for each in pids:
                os.kill(each, signal.SIGKILL)
    os._exit(code)


def _rank(main: Callable[[dict[str, str]], None], options: dict[str, str]) -> None:
    os.chdir("/")
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    code = 1
    try:
        _wait_for_store(os.environ["MASTER_ADDR"])
        main(options)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _wait_for_store(address: str) -> None:
    """Wait until the first launcher listens: torch may wait half a minute before it tries a second time."""
    ends = time.monotonic() + _SECONDS
    while time.monotonic() < ends:
        with contextlib.suppress(OSError), socket.create_connection((address, PORT), 1.0):
            return
        time.sleep(0.02)
