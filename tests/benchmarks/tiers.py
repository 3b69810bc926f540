"""What tiers cost and give: ``make bench-tiers``. Two ranks on this machine are two machines, each with a folder.

* ``lost``: what a save costs training, as ``stagereg bench stall`` measures it: to the store on the disk alone, and to
  a tier with one copy, until that is acknowledged. The ranks train replicas of the model there.
* ``write``: how long a staged copy takes to be in a tier, against memory's and the disk's own speed.
* ``copy``: how long a part takes to another process, checked, against a plain stream of as many bytes.
* ``restore``: the model of ``make bench-restore`` from the store's page cache, with verification; from a rank's own
  memory; and of a rank that has nothing from the other one, against a plain stream of as many bytes.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

import stagereg.bench.ceiling as ceiling
import stagereg.bench.command as command
import stagereg.bench.report as report
from stagereg.assembly import Checkpointer
from stagereg.bench.measure import Case, Series, interleave, standard_error
from stagereg.bench.report import Group, Line, iqr, ms
from stagereg.bench.stall import BASE, Segment, StallTraining
from stagereg.bench.states import State, make
from stagereg.checkpoint.save.state_planner import StatePlanner
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.extensions.tiers.folder import MachineFolder
from stagereg.extensions.tiers.part import Part, PartFile, SaveId
from stagereg.extensions.tiers.peer import Peer
from stagereg.extensions.tiers.server import PartServer
from stagereg.registry import build
from tests.benchmarks import on_ranks, program
from tests.benchmarks.on_ranks import Turn
from tests.benchmarks.restore import SplitTraining, local
from tests.benchmarks.write import raw_write

GROUPS = ("lost", "write", "copy", "restore")
_SHM = "/dev/shm"
_SAVES = {"lost": ["store", "tier:memory", "tier:disk", "again:store"]}


def checkpointer(way: str, folder: Path) -> Checkpointer:
    """Return one that saves each step to the store alone, or to a tier alone, with a copy on the other rank."""
    kind = way.partition(":")[2]
    if not way.startswith("tier:"):
        return Checkpointer(str(folder / "store"), every=1, keep=1, save_last=False)
    own = f"{_SHM}/{folder.parent.name}-{folder.name}" if kind == "memory" else f"{folder}/tier"
    tier = build("tier", kind, dir=f"{own}/{dist.get_rank()}", every=1)
    return Checkpointer(None, tier=tier, save_last=False)


def settled(of: Checkpointer) -> None:
    """Wait until what it has saved is complete, and copied on all ranks."""
    of.wait()
    if of._tiering is not None and (near := of._tiering.near) is not None:
        while near._threads.busy:
            time.sleep(0.0005)
        assert near._threads.copied, "it was not copied"
        dist.barrier()


class Saving(Turn, Segment):
    """Four steps, and then a save and four steps that it may disturb."""

    _checkpointer: Checkpointer | None = None
    _step = 0

    def prepare(self) -> None:
        """Make the checkpointer, once."""
        if self._checkpointer is None and BASE not in self.rows:
            self._checkpointer = checkpointer(self.rows[-1].removeprefix("again:"), self.folder)
        dist.barrier()

    def save(self) -> Callable[[], None]:
        """Begin; return what waits until it is complete and copied."""
        if self._checkpointer is None:
            return lambda: None
        self._step += 1
        state = {"model": self.training.model, "optimizer": self.training.optimizer}
        self._checkpointer.maybe_save(self._step, state)
        return lambda: settled(self._checkpointer)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close it."""
        if self._checkpointer is not None:
            self._checkpointer.close()


def lost_on(rank: int, world: int, rounds: int, scale: float, folder: Path) -> dict[str, Series]:
    """Measure on a rank."""
    training: Any = StallTraining(scale, "cpu")
    training.model = DistributedDataParallel(training.model)
    rows = [BASE, *_SAVES["lost"]]
    cases = [Saving(row, training, folder / str(number)) for number, row in enumerate(rows)]
    return {one.row: one for one in interleave(cases, rounds)}


def lost(rounds: int, scale: float, folder: Path) -> Group:
    """What a save costs training, of the rank that loses most."""
    taken = on_ranks.measured("saves", 2, lost_on, rounds, scale, folder)
    rows, lines, of = [BASE, *_SAVES["lost"]], [], {}
    for row in rows:
        if failure := on_ranks.failure(taken, row):
            lines.append(Line(row, failure=failure))
            continue
        whole, alone = on_ranks.slowest(taken, row), on_ranks.slowest(taken, f"{row}:alone")
        blocked = on_ranks.slowest(taken, f"{row}:blocked")
        of[row] = [mine - other for mine, other in zip(whole, alone, strict=True)]
        middle = statistics.median(of[row])
        ratio = f"{middle / statistics.median(of['store']):.2f}" if "store" in of else "-"
        cells = [ms(statistics.median(blocked)), ms(middle), ms(standard_error(of[row])), iqr(of[row], ms), ratio]
        lines.append(Line(row, cells, {"lost": of[row], "blocked": blocked, "alone": alone}))
    return Group("lost", "lost, two ranks", ["blocked ms", "lost ms", "± ms", "IQR ms", "x store"], lines)


def written(rounds: int, scale: float, folder: Path) -> list[Group]:
    """How long a staged copy takes to be in memory, or on the disk."""
    groups = []
    for kind, root in (("memory", Path(tempfile.mkdtemp(dir=_SHM))), ("disk", folder)):
        state = make("large", scale / 6)
        stager, storage = build("stager", "pinned_cached"), DcpStorage(direct="never" if kind == "memory" else "auto")
        copy, planner = stager.stage(state.tree), StatePlanner()

        def turn(root: Path = root, storage: Any = storage, copy: Any = copy, planner: Any = planner) -> Iterator[None]:
            for old in root.iterdir():
                shutil.rmtree(old)
            target = tempfile.mkdtemp(dir=root)
            yield
            save(copy, checkpoint_id=target, storage_writer=storage, planner=planner, no_dist=True)
            yield

        cases = [_top(kind, state, root, ceiling.ROW), Case(f"tier:{kind}", turn=turn)]
        cases.append(_top(kind, state, root, f"again:{ceiling.ROW}"))
        series = interleave(cases, rounds)
        title = f"write to {kind}, {state.nbytes / 2**20:.0f} MiB"
        groups.append(report.of_series(kind, title, series, ceiling.ROW, {}))
        stager.close()
        shutil.rmtree(root)
    return groups


def _top(kind: str, state: State, root: Path, row: str) -> Case:
    copy = ceiling.memmove(state.nbytes) if kind == "memory" else None
    write = raw_write(state.nbytes)

    def turn() -> Iterator[None]:
        for old in root.iterdir():
            shutil.rmtree(old)
        target = Path(tempfile.mkdtemp(dir=root))
        yield
        if copy is not None:
            copy()
        else:
            write(target)
            ceiling.flush(target)
        yield

    return Case(row, turn=turn)


def _receiver(root: str, secret: bytes, pipe: Any) -> None:
    """The other process: takes parts, and plain streams of as many bytes into one buffer."""
    folder = MachineFolder(root, "ab" * 6, durable=False)
    folder.prepare()
    server = PartServer(folder, secret, False, lambda nbytes: "")
    plain = socket.create_server(("127.0.0.1", 0))
    pipe.send((server.address, plain.getsockname()))
    buffer = memoryview(bytearray(4 << 20))
    while (nbytes := pipe.recv()) is not None:
        if nbytes < 0:  # what came is deleted
            folder.delete((), keep=True)
            pipe.send(True)
            continue
        connection, _ = plain.accept()
        with connection:
            while nbytes:
                nbytes -= connection.recv_into(buffer)
            connection.send(b"x")
    server.close()


def copied(rounds: int, scale: float) -> Group:
    """How long a part takes to another process."""
    root, secret, nbytes = Path(tempfile.mkdtemp(dir=_SHM)), secrets.token_bytes(32), int(300 * 2**20 * scale)
    content, run = os.urandom(nbytes), "ab" * 6
    folder = MachineFolder(f"{root}/own", run, durable=False)
    folder.prepare()
    ours, theirs = get_context("spawn").Pipe()
    other = get_context("spawn").Process(target=_receiver, args=(f"{root}/other", secret, theirs))
    other.start()
    address, plain = ours.recv()
    peer, known, serial = Peer(address, secret), {"data": PartFile.of_bytes(content)}, iter(range(1, 10**6))

    def put() -> Iterator[None]:
        number = next(serial)
        part = Part(SaveId(run, 1, number, number, f"{number:012x}", 1), 0, known)
        ours.send(-1)
        ours.recv()
        Path(f"{root}/own/data").write_bytes(content)
        yield
        peer.put(part, f"{root}/own")
        yield

    def stream() -> Iterator[None]:
        Path(f"{root}/own/data").write_bytes(content)
        ours.send(nbytes)
        yield
        with socket.create_connection(plain) as connection, Path(f"{root}/own/data").open("rb") as file:
            connection.sendfile(file)
            connection.recv(1)
        yield

    try:
        cases = [Case(ceiling.ROW, turn=stream), Case("put", turn=put), Case(f"again:{ceiling.ROW}", turn=stream)]
        return report.of_series("copy", f"copy, {nbytes >> 20} MiB", interleave(cases, rounds), ceiling.ROW, {})
    finally:
        ours.send(None)
        other.join(10)
        peer.close()
        shutil.rmtree(root)


class Restoring(Turn):
    """One way to restore what was saved in the same way."""

    _checkpointer: Checkpointer | None = None

    def __init__(self, row: str, training: SplitTraining, folder: Path) -> None:
        super().__init__(row)
        self._training, self._folder, self._way = training, folder, row.removeprefix("again:")

    def turn(self) -> Iterator[None]:
        """Restore once more, into zeros."""
        if self._checkpointer is None:
            self._checkpointer = checkpointer("tier:memory" if self._way != "store" else "store", self._folder)
            self._checkpointer.maybe_save(1, self._training.given)
        settled(self._checkpointer)
        near = self._checkpointer._tiering.near
        if self._way == "peer" and near is not None and dist.get_rank() == 0:
            near.folder.delete((), keep=True)
        for x in local(self._training.tree()):
            x.zero_()
        dist.barrier()
        yield
        self._checkpointer.restore(self._training.given)
        yield
        if any(bool((x != number).any()) for number, x in enumerate(local(self._training.tree()))):
            raise ValueError("what was restored is not what was saved")

    def close(self) -> None:
        """Close it."""
        if self._checkpointer is not None:
            self._checkpointer.close()


class Streaming(Turn):
    """The ceiling of what comes from the other rank: a stream of as many bytes into a buffer."""

    def __init__(self, row: str, nbytes: int) -> None:
        super().__init__(row)
        self._data = memoryview(bytearray(os.urandom(1 << 20) * (nbytes >> 20)))

    def turn(self) -> Iterator[None]:
        """Send, or receive."""
        server = socket.create_server(("127.0.0.1", 0))
        ports = [0, 0]
        dist.all_gather_object(ports, server.getsockname()[1])
        dist.barrier()
        yield
        if dist.get_rank():
            with socket.create_connection(("127.0.0.1", ports[0])) as connection:
                connection.sendall(self._data)
        else:
            connection, _ = server.accept()
            with connection:
                at = 0
                while at < len(self._data):
                    at += connection.recv_into(self._data[at:])
        server.close()
        yield


def restored_on(rank: int, world: int, rounds: int, scale: float, folder: Path) -> dict[str, Series]:
    """Measure on a rank."""
    training = SplitTraining("ddp", scale)
    cases: list[Case] = [Restoring(row, training, folder / row) for row in ("store", "own", "peer", "again:store")]
    cases.append(Streaming("stream", training.nbytes))
    return {one.row: one for one in interleave(cases, rounds)}


def restored(rounds: int, scale: float, folder: Path) -> Group:
    """How long two ranks restore."""
    taken = on_ranks.measured("restores", 2, restored_on, rounds, scale, folder)
    lines = []
    for row in taken[0]:
        if failure := on_ranks.failure(taken, row):
            lines.append(Line(row, failure=failure))
            continue
        seconds = on_ranks.slowest(taken, row)
        cells = [ms(statistics.median(seconds)), iqr(seconds, ms)]
        cells += [f"{statistics.median(on_ranks.ratios(taken, row, base)):.2f}" for base in ("store", "stream")]
        lines.append(Line(row, cells, {"seconds": seconds}))
    return Group("restore", "restore, two ranks", ["median ms", "IQR ms", "x store", "x stream"], lines)


def measure(asked: argparse.Namespace, rows: Sequence[str]) -> list[Group]:
    """Measure the groups that were asked for."""
    groups: list[Group] = []
    for name in rows:
        with command.folder_below(asked.dir) as folder:
            if name == "write":
                groups += written(asked.rounds, asked.scale, Path(folder))
            elif name == "copy":
                groups.append(copied(asked.rounds, asked.scale))
            else:
                groups.append({"lost": lost, "restore": restored}[name](asked.rounds, asked.scale, Path(folder)))
            for left in Path(_SHM).glob(f"{Path(folder).name}-*"):
                shutil.rmtree(left)
    return groups


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description="What tiers cost and give.")
    command.add_options(parser, 9, lambda asked: [*GROUPS], measure)
    return program.main(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
