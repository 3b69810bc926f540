"""``stagereg run``: runs torchrun but exits with the code of its ranks, for schedulers that requeue preempted jobs.

Runs torchrun in this process, with three differences. The command exits with the code of the first rank that failed,
such as 75. SIGTERM and SIGUSR1 are forwarded to the ranks, which then exit without torchrun's limit of 30 seconds; if
no rank is running yet, the command exits with code 75. Ranks get the memory settings of ``stagereg.main``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from pathlib import Path
from types import FrameType

from stagereg.base.output import warn
from stagereg.errors import RESUME_CODE, LaunchError
from stagereg.launch.exits import KEEPS_CODE

_HELP = "run torchrun, and exit with the code of the ranks, such as 75 after a preemption"
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
_ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # not handled if they are ignored at the start, as with nohup


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    # No character begins an option of this parser, because all options belong to torchrun or to the program.
    parser = commands.add_parser("run", help=_HELP, add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs="*", help="arguments of torchrun")
    parser.set_defaults(run=run, as_a_rank=True)


def run(asked: argparse.Namespace) -> int:
    """Run the ranks of this machine. Return 0, or the exit code of the first rank that failed (128 + N for signal N).

    Raises:
        LaunchError: The machines cannot connect, or the machine that hosts the rendezvous has failed.
    """
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import run as run_ranks

    os.environ[KEEPS_CODE] = str(os.getpid())
    parser = get_args_parser()
    parser.prog, parser.description = "stagereg run", f"R{_HELP[1:]}. The options are those of torchrun."
    arguments = parser.parse_args(asked.arguments)
    ending = [each.name for each in _ENDING if signal.getsignal(each) is not signal.SIG_IGN]
    arguments.signals_to_handle = ",".join(ending) or "SIGRTMAX"  # never sent; torchrun rejects an empty list
    taken = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _forward) for number in taken}
    try:
        run_ranks(arguments)
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode != RESUME_CODE:
            warn(str(error))
        return first.exitcode if first.exitcode >= 0 else 128 - first.exitcode
    except SignalException as error:
        return RESUME_CODE if error.sigval in _FORWARDED else 128 + error.sigval
    except (DistNetworkError, RendezvousError) as error:
        raise LaunchError(
            "the machines of this run cannot connect, or the machine of the rendezvous has failed: "
            f"{str(error).partition(chr(10))[0].rstrip('.')}. Pass the same --master-addr and --master-port, or "
            "--rdzv-endpoint, on all machines, and check the output of the machine at that address"
        ) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _forward(number: int, frame: FrameType | None) -> None:
    """Forward a signal to the ranks, which are the children of this process. Raises if no rank has been started."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    ranks: list[str] = []
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has terminated
            ranks += children.read_text().split()
    if not ranks:
        raise SignalException(f"signal {number} before any rank was started", signal.Signals(number))
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), number)
