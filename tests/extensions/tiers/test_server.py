"""Parts between machines: checked, whole or absent, for members of the run alone."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stagereg.extensions.tiers.peer as peer_module
import stagereg.extensions.tiers.server as server_module
import stagereg.extensions.tiers.wire as wire
from stagereg.checkpoint.storage.aligned import BLOCK_BYTES
from stagereg.errors import CheckpointError, CorruptCheckpointError
from stagereg.extensions.tiers.folder import MachineFolder
from stagereg.extensions.tiers.part import Part, PartFile
from stagereg.extensions.tiers.peer import Peer
from stagereg.extensions.tiers.server import PartServer
from tests.support.programs import comes_true
from tests.support.tier_parts import (
    SECRET,
    connected,
    damaging,
    data_of,
    files_below,
    new_folder,
    serving,
    tier_threads,
    write_part,
)
from tests.support.watching import watching

BOUND_S = 30
SEVERAL = {"__r_0.distcp": 5 * BLOCK_BYTES + 17, "empty": 0, "small": 3}


@pytest.fixture
def here(tmp_path: Path) -> MachineFolder:
    return new_folder(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> MachineFolder:
    return new_folder(tmp_path / "there")


@pytest.fixture
def server(there: MachineFolder) -> Iterator[PartServer]:
    with serving(there) as opened:
        yield opened


@pytest.fixture
def peer(server: PartServer) -> Iterator[Peer]:
    with connected(server.address) as opened:
        yield opened


def until(condition: Callable[[], bool]) -> None:
    assert comes_true(condition, BOUND_S)


def blocks_of(
    peer: Peer,
    part: Part,
    name: str,
    numbers: list[int],
    known: PartFile | None = None,
    got: dict[int, bytes] | None = None,
) -> dict[int, bytes]:
    """Return blocks of a file of a part of rank 0, by their numbers; what comes before an error is in ``got``."""
    found = {} if got is None else got

    def take(number: int, block: memoryview) -> None:
        found[number] = bytes(block)

    peer.get(part.save, 0, name, numbers, known or part.files[name], take)
    return found


def has_ended(stranger: socket.socket) -> bool:
    try:
        return not stranger.recv(1000)
    except ConnectionError:
        return True


@pytest.mark.parametrize("durable", [False, True], ids=["memory", "disk"])
def test_a_part_arrives_whole_and_comes_back_checked(here: MachineFolder, tmp_path: Path, durable: bool) -> None:
    there = new_folder(tmp_path / "there", durable)
    part = write_part(here, SEVERAL)
    with serving(there, durable=durable) as server, connected(server.address) as peer:
        assert peer.part(part.save, 0) is None
        peer.put(part, here.directory(part.save))
        assert there.find(part.save, 0) == part == peer.part(part.save, 0)
        assert files_below(there) == sorted([*SEVERAL, "part-0.json"])
        for name, nbytes in SEVERAL.items():
            assert Path(there.directory(part.save), name).read_bytes() == data_of(nbytes)
            numbers = [*range(len(part.files[name].blocks))][::-1]
            got = blocks_of(peer, part, name, numbers)
            assert b"".join(got[number] for number in numbers[::-1]) == data_of(nbytes)
        peer.put(part, "/nowhere")  # it is there already, so nothing is read
        other = write_part(here, {"again": 2 * BLOCK_BYTES}, step=2)
        peer.put(other, here.directory(other.save))
        assert there.find(other.save, 0) is not None


sizes = st.integers(0, 3).flatmap(lambda n: st.integers(-2, 2).map(lambda more: max(0, n * BLOCK_BYTES + more)))


@given(found=st.lists(sizes, max_size=4), streams=st.integers(1, 4))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sizes_arrive_over_any_number_of_streams(
    here: MachineFolder, there: MachineFolder, peer: Peer, found: list[int], streams: int
) -> None:
    part = write_part(here, {f"f{n}": nbytes for n, nbytes in enumerate(found)})
    with mock.patch.object(peer_module, "_STREAMS", streams):
        peer.put(part, here.directory(part.save))
    for n, nbytes in enumerate(found):
        assert Path(there.directory(part.save), f"f{n}").read_bytes() == data_of(nbytes)
    assert there.find(part.save, 0) is not None
    here.delete([part.save.folder])
    there.delete([part.save.folder])


def test_strangers_harm_nobody(here: MachineFolder, there: MachineFolder, caplog: pytest.LogCaptureFixture) -> None:
    strangers: list[socket.socket] = []

    def call(name: str) -> None:
        if name == "sending":  # they are there while the other half is sent
            some = [socket.create_connection(server.address) for _ in range(50)]
            for stranger in some[::2]:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            strangers.extend(some)

    with mock.patch.object(wire, "HANDSHAKE_TIMEOUT_S", 2.0), serving(there) as server:
        call("sending")  # and more than there are threads, before anybody else
        call("sending")
        with connected(server.address, bytes(32)) as liar, pytest.raises(OSError, match=r"closed|reset|timed out"):
            liar.part(write_part(here, {}).save, 0)
        part = write_part(here, SEVERAL, step=2)
        with connected(server.address) as peer, watching(call):
            peer.put(part, here.directory(part.save))
        for stranger in strangers:
            with stranger:
                stranger.settimeout(BOUND_S)
                until(partial(has_ended, stranger))
    assert there.find(part.save, 0) is not None
    assert sum("outside this run" in each.getMessage() for each in caplog.records if each.levelname == "WARNING") == 1


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "part-0.json", ".boot", "..", "", 7, None, ["a"]], ids=repr
)
def test_nothing_but_blocks_of_the_part_can_be_read(
    here: MachineFolder, there: MachineFolder, server: PartServer, name: Any
) -> None:
    part = write_part(there, SEVERAL)
    (Path(there.path) / "secret").write_bytes(bytes(100))
    link = wire.connect(server.address, SECRET)
    request = {"do": "get", "save": part.save, "rank": 0, "file": name, "block": 0}
    for each in (
        request,
        {**request, "file": "small", "block": 1},
        {**request, "file": "small", "block": -1},
        {**request, "file": "small", "block": "0"},
        {**request, "file": "small", "block": [0]},
        {**request, "save": ["../..", 0, 0, 0, "x", 1]},
        {**request, "rank": "../1"},
        {"do": "no"},
        {"do": []},
        {},
    ):
        link.send(each)
        assert "error" in link.receive()
    link.send({**request, "file": "small"})
    assert link.receive() == {"nbytes": 3}
    link.close()


def test_a_part_that_names_other_places_is_refused(
    here: MachineFolder, there: MachineFolder, server: PartServer
) -> None:
    text = write_part(here, {"small": 3}).dumps()
    link = wire.connect(server.address, SECRET)
    for bad in (text.replace("small", "../ab"), text.replace(" 3,", " 4,"), "", "{}", None, 5, [text]):
        link.send({"do": "put", "part": bad})
        assert "error" in link.receive()
    link.close()
    assert files_below(there) == []


def test_a_part_of_another_run_is_refused(here: MachineFolder, there: MachineFolder, peer: Peer) -> None:
    part = write_part(here, SEVERAL, run="f" * 16)
    with pytest.raises(CheckpointError, match="belongs to run ffffffffffffffff, not to the run of this server"):
        peer.put(part, here.directory(part.save))
    assert files_below(there) == []


def test_a_part_without_room_is_refused_with_the_reason(here: MachineFolder, there: MachineFolder) -> None:
    part = write_part(here, SEVERAL)
    asked: list[int] = []

    def room(nbytes: int) -> str:
        asked.append(nbytes)
        return "the shelf is full"

    refused = pytest.raises(CheckpointError, match="not enough space: the shelf is full")
    with serving(there, room) as server, connected(server.address) as peer, refused:
        peer.put(part, here.directory(part.save))
    assert asked == [part.nbytes]
    assert files_below(there) == []


def test_memory_that_is_full_in_the_middle_leaves_nothing(
    here: MachineFolder, there: MachineFolder, peer: Peer
) -> None:
    part = write_part(here, {"big": 20 * BLOCK_BYTES})
    real, count = os.pwrite, iter(range(100))

    def pwrite(descriptor: int, data: memoryview, at: int) -> int:
        if next(count) >= 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, at)

    with mock.patch.object(server_module.os, "pwrite", pwrite), pytest.raises(CheckpointError, match="No space left"):
        peer.put(part, here.directory(part.save))
    until(lambda: files_below(there) == [])
    peer.put(part, here.directory(part.save))  # the same connection object begins anew
    assert there.find(part.save, 0) is not None


def test_a_bit_that_flips_on_the_way_ends_the_transfer_and_leaves_nothing(
    here: MachineFolder, there: MachineFolder, server: PartServer
) -> None:
    part = write_part(here, {"big": 3 * BLOCK_BYTES})
    left = [1]

    def flip(at: int, data: bytearray) -> None:
        if at > BLOCK_BYTES and left[0] and len(data) > 30000:
            data[20000] ^= 4
            left[0] -= 1

    with damaging(server.address, flip) as address, connected(address) as peer:
        with pytest.raises(CheckpointError, match=r"CRC-32 mismatch in block \d of big after the transfer"):
            peer.put(part, here.directory(part.save))
        until(lambda: files_below(there) == [])
        peer.put(part, here.directory(part.save))
    assert Path(there.directory(part.save), "big").read_bytes() == data_of(3 * BLOCK_BYTES)


def test_a_bit_that_flips_where_the_part_lies_is_noticed(there: MachineFolder, peer: Peer) -> None:
    part = write_part(there, SEVERAL)
    name, got = "__r_0.distcp", dict[int, bytes]()
    data = data_of(part.files[name].nbytes)
    with Path(there.directory(part.save), name).open("rb+") as file:
        file.seek(2 * BLOCK_BYTES + 5)
        file.write(b"?")
    with pytest.raises(CorruptCheckpointError, match=r"block 2 of __r_0\.distcp"):
        blocks_of(peer, part, name, [0, 1, 2, 3], got=got)
    assert got == {n: data[n * BLOCK_BYTES : (n + 1) * BLOCK_BYTES] for n in (0, 1, 3)}  # those beside it are good
    with pytest.raises(CorruptCheckpointError, match="wrong size"):
        blocks_of(peer, part, "small", [0], PartFile.of_bytes(b"1234"))
    Path(there.directory(part.save), "small").unlink()
    with connected(peer._address) as another, pytest.raises(CheckpointError, match="does not have"):
        blocks_of(another, part, "small", [0])


def test_a_file_that_was_cut_since_is_an_error(there: MachineFolder, peer: Peer) -> None:
    part = write_part(there, SEVERAL)
    assert blocks_of(peer, part, "small", [0])
    os.truncate(Path(there.directory(part.save), "small"), 1)
    with pytest.raises(OSError, match="closed"):
        blocks_of(peer, part, "small", [0])


SENDER = """
import sys
from pathlib import Path
import stagereg.checkpoint.store.failpoints as failpoints
from stagereg.extensions.tiers.part import Part
from stagereg.extensions.tiers.peer import Peer
folder, port = sys.argv[1], int(sys.argv[2])

def wait(name):
    if name == "sending":
        print(name, flush=True)
        sys.stdin.read()

failpoints.watch(wait)
part = Part.loads(Path(folder, "part-0.json").read_text())
Peer(("127.0.0.1", port), bytes(range(32))).put(part, folder)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "freezes"])
def test_a_sender_that_stops_in_the_middle_leaves_nothing(
    here: MachineFolder, there: MachineFolder, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setattr(wire, "PROGRESS_S", 1.0)
    part = write_part(here, {"big": 8 * BLOCK_BYTES})
    with serving(there) as server:
        sender = subprocess.Popen(
            [sys.executable, "-c", SENDER, here.directory(part.save), str(server.address[1])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        )  # fmt: skip
        try:
            assert sender.stdout is not None
            assert sender.stdout.readline() == b"sending\n"
            assert files_below(there) != []
            sender.send_signal(how)
            until(lambda: files_below(there) == [])
            assert there.parts() == []
        finally:
            sender.kill()
            sender.communicate(timeout=BOUND_S)


def test_a_put_lasts_while_something_comes_on_one_of_its_streams(
    here: MachineFolder, there: MachineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PROGRESS_S", 2.0)
    part = write_part(here, {f"f{n}": 1000 + n for n in range(5)})
    with serving(there) as server:
        control, stream = (wire.connect(server.address, SECRET) for _ in range(2))
        control.send({"do": "put", "part": part.dumps()})
        stream.send({"do": "stream", **control.receive()})
        assert stream.receive() == {}
        for name, file in part.files.items():
            time.sleep(0.7)
            stream.send({"do": "block", "file": name, "block": 0})
            with Path(here.directory(part.save), name).open("rb") as opened:
                stream.send_file(opened.fileno(), 0, file.nbytes)
        stream.send({"do": "end"})
        assert stream.receive() == {}
        control.send({"do": "finish"})
        assert control.receive() == {"have": True}
        control.close()
        stream.close()
    assert there.find(part.save, 0) is not None


def test_an_error_at_the_sender_leaves_nothing(here: MachineFolder, there: MachineFolder, peer: Peer) -> None:
    part = write_part(here, {"big": 8 * BLOCK_BYTES})
    os.truncate(Path(here.directory(part.save), "big"), 5 * BLOCK_BYTES)
    with pytest.raises(OSError, match="ends at byte"):
        peer.put(part, here.directory(part.save))
    until(lambda: files_below(there) == [])
    assert there.parts() == []


def test_a_receiver_that_freezes_ends_the_transfer(here: MachineFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PROGRESS_S", 0.5)
    monkeypatch.setattr(peer_module, "_ANSWER_S", 0.5)
    part = write_part(here, {"big": 8 * BLOCK_BYTES})
    listener, kept = socket.create_server(("127.0.0.1", 0)), []

    def freeze() -> None:
        opened, _ = listener.accept()
        kept.append(link := wire.accept(opened, SECRET))
        link.receive()
        link.send({"token": "x"})

    threading.Thread(target=freeze, daemon=True).start()
    monkeypatch.setattr(peer_module, "_STREAMS", 1)
    with listener, connected(listener.getsockname()) as peer, pytest.raises(TimeoutError):
        peer.put(part, here.directory(part.save))


def test_closing_the_server_ends_a_transfer_and_deletes_what_came(here: MachineFolder, there: MachineFolder) -> None:
    before = tier_threads()
    part = write_part(here, {"big": 8 * BLOCK_BYTES})
    reached, go_on = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        if name == "sending":
            reached.set()
            assert go_on.wait(BOUND_S)

    errors: list[BaseException] = []

    def put(peer: Peer) -> None:
        try:
            peer.put(part, here.directory(part.save))
        except (OSError, CheckpointError) as error:
            errors.append(error)

    with watching(wait), serving(there) as server, connected(server.address) as peer:
        thread = threading.Thread(target=put, args=[peer])
        thread.start()
        assert reached.wait(BOUND_S)
        server.close()
        assert files_below(there) == []
        go_on.set()
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert len(errors) == 1
    assert tier_threads() <= before


def test_two_senders_of_one_part_do_not_meet(here: MachineFolder, there: MachineFolder, server: PartServer) -> None:
    part = write_part(here, {"big": 4 * BLOCK_BYTES})
    begun = threading.Barrier(2, timeout=BOUND_S)
    with connected(server.address) as one, connected(server.address) as other:

        def both(name: str) -> None:
            if name == "sending":
                begun.wait()

        with watching(both), ThreadPoolExecutor() as threads:
            puts = [threads.submit(each.put, part, here.directory(part.save)) for each in (one, other)]
            for put in puts:
                put.result(BOUND_S)
    assert files_below(there) == ["big", "part-0.json"]
    assert Path(there.directory(part.save), "big").read_bytes() == data_of(4 * BLOCK_BYTES)


def test_blocks_that_nobody_announced_end_the_connection(server: PartServer) -> None:
    for request in ({"do": "block", "file": "x", "block": 0}, {"do": "finish"}):
        link = wire.connect(server.address, SECRET)
        link.send(request)
        with pytest.raises(ConnectionError):
            link.receive()
        link.close()
    link = wire.connect(server.address, SECRET)
    link.send({"do": "stream", "token": "0" * 32})
    assert "no transfer in progress" in link.receive()["error"]
    link.close()


def test_a_part_is_not_complete_before_every_block_has_come(
    here: MachineFolder, there: MachineFolder, server: PartServer
) -> None:
    part = write_part(here, SEVERAL)
    link = wire.connect(server.address, SECRET)
    link.send({"do": "put", "part": part.dumps()})
    assert link.receive()["token"]
    link.send({"do": "finish"})
    assert "7 blocks are missing" in link.receive()["error"]
    link.close()
    until(lambda: files_below(there) == [])
