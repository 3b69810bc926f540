"""Parts of a tier, and machines that have them, for tests: folders of one run, and servers over them."""

from __future__ import annotations

import os
import random
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from stagereg.extensions.tiers.folder import MachineFolder
from stagereg.extensions.tiers.part import Part, PartFile, SaveId
from stagereg.extensions.tiers.peer import Peer
from stagereg.extensions.tiers.server import PartServer

RUN = "0123456789abcdef"
SECRET = bytes(range(32))


def nothing_lacks(nbytes: int) -> str:
    """There is room for everything."""
    return ""


def new_folder(path: Path, durable: bool = False) -> MachineFolder:
    """A machine's folder of the run."""
    folder = MachineFolder(str(path), RUN, durable)
    folder.prepare()
    return folder


def data_of(nbytes: int) -> bytes:
    """The same bytes for the same size, whose pieces differ wherever a block begins: 4099 is prime."""
    return (random.Random(nbytes).randbytes(4099) * (nbytes // 4099 + 1))[:nbytes]


def write_part(
    folder: MachineFolder, sizes: Mapping[str, int], step: int = 1, rank: int = 0, run: str = RUN, token: str = ""
) -> Part:
    """Write a part with files of these sizes, and complete it; by default of a save of its own."""
    save = SaveId(run, 0, step, step, token or secrets.token_hex(8), 4)
    part = Part(save, rank, {name: PartFile.of_bytes(data_of(nbytes)) for name, nbytes in sizes.items()})
    os.makedirs(folder.directory(save), exist_ok=True)
    for name, nbytes in sizes.items():
        Path(folder.directory(save), name).write_bytes(data_of(nbytes))
    folder.complete(part)
    return part


def tier_threads() -> set[threading.Thread]:
    """The threads of this process that serve and copy parts."""
    return {each for each in threading.enumerate() if each.name.startswith("stagereg-tier")}


def files_below(folder: MachineFolder) -> list[str]:
    """Whatever lies in a machine's folder but what the folder itself is, and notes of which parts were received."""
    found = [name for _, _, names in os.walk(folder.path) for name in names]  # passes over what goes meanwhile
    return sorted(name for name in found if name != ".boot" and not name.endswith(".received"))


@contextmanager
def serving(
    folder: MachineFolder, room: Callable[[int], str] = nothing_lacks, durable: bool = False
) -> Iterator[PartServer]:
    """A server of a machine's folder, on the loopback interface."""
    with mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1"):  # as where all ranks are on one machine
        server = PartServer(folder, SECRET, durable, room)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def connected(address: tuple[str, int], secret: bytes = SECRET) -> Iterator[Peer]:
    """A connection to a server."""
    peer = Peer(address, secret)
    try:
        yield peer
    finally:
        peer.close()


@contextmanager
def damaging(address: tuple[str, int], flips: Callable[[int, bytearray], object]) -> Iterator[tuple[str, int]]:
    """An address between: ``flips`` is given what goes to the server, with its offset, and may change it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def forward(source: socket.socket, target: socket.socket, change: bool) -> None:
        at = 0
        with suppress(OSError):
            while count := len(data := bytearray(source.recv(1 << 16))):
                if change:
                    flips(at, data)
                target.sendall(data)
                at += count
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def run() -> None:
        with suppress(OSError):
            while True:
                caller, _ = listener.accept()
                called = socket.create_connection(address)
                for ends in ((caller, called, True), (called, caller, False)):
                    threading.Thread(target=forward, args=ends, daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield listener.getsockname()
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
