"""What strangers at the port of the heartbeats cost a training step: ``make bench-strangers``.

Two ranks train a DDP model with a pulse each. In the row ``strangers`` another process keeps 300 connections to the hub
that prove nothing, makes one again when it is sent away, and makes and drops 250 more a second: 10,000 in the default
rounds. In the row ``elsewhere`` it does the same to a port of its own, so what it costs by itself is seen. Each row
shows the time of a step on the slowest rank, and its ratio to that of the row without strangers *in the same round*.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

import stagereg.bench.command as command
from stagereg.bench.measure import Series, interleave
from stagereg.bench.report import Group
from stagereg.errors import LaunchError
from stagereg.launch.run_store import RunStore
from tests.benchmarks import on_ranks, program
from tests.benchmarks.noticing import NoticingTraining
from tests.benchmarks.on_ranks import Turn

BASE, ELSEWHERE, STRANGERS, AGAIN = "off", "elsewhere", "strangers", "again:off"
ROWS = [BASE, ELSEWHERE, STRANGERS, AGAIN]
MODELS = {"small": 384}  # its width: a step of about 15 ms, as that of examples/train.py
_SILENT, _RATE, _STEPS, _ROUNDS = 300, 250, 100, 20
_STRANGER = """
import socket, sys, time

host, port, silent, rate = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
if not port:
    listener = socket.create_server((host, 0), backlog=512)
    listener.setblocking(False)
    port = listener.getsockname()[1]


def call():
    line = socket.socket()
    line.setblocking(False)
    line.connect_ex((host, port))
    return line


def is_closed(line):
    try:
        return not line.recv(100)
    except BlockingIOError:
        return False
    except OSError:
        return True


lines, made, began = [call() for _ in range(silent)], 0, time.monotonic()
print("ready", flush=True)
while True:
    for at, line in enumerate(lines):
        if is_closed(line):
            line.close()
            lines[at] = call()
    while made < rate * (time.monotonic() - began):
        call().close()
        made += 1
        if sys.argv[2] == "0":
            try:
                listener.accept()[0].close()
            except BlockingIOError:
                pass
    time.sleep(0.02)
"""


class Disturbed(Turn):
    """Some steps of one way: with strangers at a port of rank 0, at another one, or without."""

    def __init__(self, row: str, training: NoticingTraining, address: tuple[str, int] | None) -> None:
        super().__init__(row)
        self._training, self._address = training, address

    def turn(self) -> Iterator[float | None]:
        """Train for one block."""
        stranger = None
        if self._address is not None and dist.get_rank() == 0:
            numbers = map(str, (*self._address, _SILENT, _RATE))
            stranger = subprocess.Popen([sys.executable, "-S", "-c", _STRANGER, *numbers], stdout=subprocess.PIPE)
            assert stranger.stdout is not None
            stranger.stdout.readline()
        try:
            for _ in range(_STEPS // 4):
                self._training.step()
            dist.barrier()  # no rank times how much later another one begins
            yield None
            began = time.perf_counter()
            for _ in range(_STEPS):
                self._training.step()
            yield (time.perf_counter() - began) / _STEPS
        finally:
            if stranger is not None:
                stranger.kill()
                stranger.wait()


def measure(rank: int, world: int, model: str, rows: Sequence[str], rounds: int) -> dict[str, Series]:
    """Measure rows, on a rank."""
    training, store = NoticingTraining(MODELS[model]), RunStore(dist.distributed_c10d._get_default_store(), rank, world)
    with store.watch(10.0, print) as watch:
        assert watch is not None
        hub = ("", 0) if watch._listener is None else watch._listener.getsockname()[:2]
        addresses = {STRANGERS: hub, ELSEWHERE: ("127.0.0.1", 0)}
        found = interleave([Disturbed(row, training, addresses.get(row)) for row in rows], rounds)
        if lost := watch.sentence():
            raise LaunchError(f"strangers had a rank lost: {lost}")
        return {one.row: one for one in found}


def group(model: str, ranks: int, rows: Sequence[str], rounds: int, scale: float, folder: Path) -> Group:
    """Measure rows, and the one that they are held against, on fresh local ranks."""
    if (most := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < _SILENT + 100:
        raise LaunchError(f"ulimit -n is {most}: {_SILENT} connections need at least {_SILENT + 100}.")
    wanted = [row for row in ROWS if row in {*rows, BASE}]
    taken = on_ranks.measured("strangers", ranks, measure, model, wanted, rounds)
    lines = [on_ranks.line(row, taken, BASE) for row in wanted]
    title = f"strangers {model}, {ranks} ranks: DDP"
    return Group(f"{model}/{ranks}", title, ["step ms", f"x {BASE}", "IQR"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description="What strangers at the port of the heartbeats cost a training step.")
    command.add_options(parser, _ROUNDS, lambda asked: ROWS, program.by_ranks(group), scale=None)
    parser.set_defaults(scale=1.0)
    program.add_ranks(parser, list(MODELS), "2")
    return program.main(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
