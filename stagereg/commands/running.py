"""``stagereg run``: torchrun that keeps the exit code, for schedulers that start a preempted job again.

It runs torchrun in this process, with three differences. It exits with the code of the rank that ended first, such as
75. SIGTERM and SIGUSR1 go to the ranks alone, which exit by themselves without a limit of 30 seconds; before there are
ranks, they end it with 75. The ranks copy with the memory settings of ``stagereg.main``.
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

_FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
_ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that torchrun ends by; those that were ignored when it was started stay ignored, as by ``nohup``."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    # No character begins an option here: all of them are torchrun's, or the program's.
    parser = commands.add_parser(
        "run", help="torchrun that keeps exit code 75, for preempted jobs", add_help=False, prefix_chars="\0"
    )
    parser.add_argument("arguments", nargs="*", help="as for torchrun")
    parser.set_defaults(run=run, as_a_rank=True)


def run(asked: argparse.Namespace) -> int:
    """Run the ranks of this machine; return 0, or the code of the first that failed, 128 + the number of a signal.

    Raises:
        LaunchError: the machines have not found each other, or the one that all meet at is gone.
    """
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args
    from torch.distributed.run import run as run_ranks

    os.environ[KEEPS_CODE] = str(os.getpid())
    arguments = parse_args(asked.arguments)
    ending = [each.name for each in _ENDING if signal.getsignal(each) is not signal.SIG_IGN]
    arguments.signals_to_handle = ",".join(ending) or "SIGRTMAX"  # which nobody sends; of none, torchrun complains
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
            "the machines of this run have not found each other, or the one that all meet at is gone: "
            f"{str(error).partition(chr(10))[0].rstrip('.')}. Give all of them the same --master-addr and "
            "--master-port, or --rdzv-endpoint, see that its machine has started, and look at the output there"
        ) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _forward(number: int, frame: FrameType | None) -> None:
    """Hand a signal on to the ranks, which are what this process has started; end by it where there are none yet."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    ranks: list[str] = []
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            ranks += children.read_text().split()
    if not ranks:
        raise SignalException(f"signal {number} before any rank was started", signal.Signals(number))
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), number)
