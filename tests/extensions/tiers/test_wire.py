"""Connections of a tier: who is let in, and that waits end."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import stagereg.extensions.tiers.wire as wire
from stagereg.checkpoint.format.checksum import crc32
from tests.support.tier_parts import SECRET


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["ipv4", "ipv6"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    host = "127.0.0.1" if request.param == socket.AF_INET else "::1"
    try:
        opened = socket.create_server((host, 0), family=request.param)
    except OSError as error:
        pytest.skip(f"no such network here: {error}")
    with opened:
        yield opened


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of a fraction of a second."""
    monkeypatch.setattr(wire, "PROGRESS_S", 0.3)
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 0.3)


def open_pair(listener: socket.socket, called: bytes = SECRET, calls: bytes = SECRET) -> list[object]:
    """What both sides get: connections, or errors."""
    found: list[object] = [None, None]

    def accept() -> None:
        opened, _ = listener.accept()
        try:
            found[0] = wire.accept(opened, called)
        except OSError as error:
            found[0] = error
            opened.close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        found[1] = wire.connect(listener.getsockname()[:2], calls)
    except OSError as error:
        found[1] = error
    thread.join(30)
    return found


@pytest.fixture
def pair(listener: socket.socket) -> Iterator[tuple[wire.Connection, wire.Connection]]:
    here, there = open_pair(listener)
    assert isinstance(here, wire.Connection)
    assert isinstance(there, wire.Connection)
    yield here, there
    here.close()
    there.close()


def test_messages_and_bytes_arrive_as_they_were_sent(
    pair: tuple[wire.Connection, wire.Connection], tmp_path: Path
) -> None:
    here, there = pair
    data = os.urandom(3 << 20)
    (tmp_path / "file").write_bytes(data)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)

    def send() -> None:
        here.send({"x": [1, "é", None]}, more=True)
        here.send_file(descriptor, 5, len(data) - 5)

    thread = threading.Thread(target=send)
    thread.start()
    assert there.receive() == {"x": [1, "é", None]}
    got = bytearray(len(data) - 5)
    assert there.receive_block(memoryview(got)) == crc32(data[5:])
    assert got == data[5:]
    thread.join(30)
    os.close(descriptor)


def test_another_secret_is_refused_by_both_sides(listener: socket.socket) -> None:
    here, there = open_pair(listener, calls=bytes(32))
    assert isinstance(here, ConnectionRefusedError)
    assert isinstance(there, OSError)


def test_a_server_that_does_not_know_the_secret_is_given_nothing(listener: socket.socket) -> None:
    def pretend() -> None:
        opened, _ = listener.accept()
        with opened:
            opened.sendall(b"stagereg-tier/1\n" + bytes(32))
            theirs = b""
            while len(theirs) < 64:
                theirs += opened.recv(64)
            opened.sendall(theirs[32:])  # the caller's own proof, sent back

    threading.Thread(target=pretend, daemon=True).start()
    with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
        wire.connect(listener.getsockname()[:2], SECRET)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"drip"], ids=str)
@pytest.mark.usefixtures("short")
def test_a_stranger_is_sent_away_in_time(listener: socket.socket, said: bytes) -> None:
    stranger = socket.create_connection(listener.getsockname()[:2])
    opened, _ = listener.accept()
    ended = threading.Event()

    def drip() -> None:
        while said == b"drip" and not ended.wait(0.05):
            stranger.send(b"x")

    with stranger, opened:
        stranger.sendall(said)
        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(OSError):  # noqa: PT011 - which, depends on what was said
            wire.accept(opened, SECRET)
        ended.set()
        thread.join(30)


@pytest.mark.usefixtures("short")
def test_a_side_that_sends_nothing_more_ends_the_wait(pair: tuple[wire.Connection, wire.Connection]) -> None:
    here, there = pair
    there._socket.sendall(struct.pack("!I", 100) + b"half")
    with pytest.raises(TimeoutError, match="sent or received no data"):
        here.receive()


@pytest.mark.usefixtures("short")
def test_a_side_that_reads_nothing_more_ends_the_wait(
    pair: tuple[wire.Connection, wire.Connection], tmp_path: Path
) -> None:
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(64 << 20)
        with pytest.raises(TimeoutError, match="sent or received no data"):
            pair[0].send_file(file.fileno(), 0, 64 << 20)


@pytest.mark.parametrize(
    "sent", [b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\1{", b"\0\0\0\1\xff", b"\0\1\x86\xa0" + b"[" * 100000]
)
def test_what_is_no_message_is_an_error(pair: tuple[wire.Connection, wire.Connection], sent: bytes) -> None:
    here, there = pair
    there._socket.sendall(sent)
    with pytest.raises(ConnectionAbortedError):
        here.receive()


def test_a_file_that_ends_early_is_an_error(pair: tuple[wire.Connection, wire.Connection], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(ConnectionAbortedError, match="ends at byte 3"):
        pair[0].send_file(descriptor, 0, 10)
    os.close(descriptor)


def test_a_forked_process_does_not_hold_connections(pair: tuple[wire.Connection, wire.Connection]) -> None:
    here, there = pair
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(write)  # or it would outlive a test that fails
        os.read(read, 1)
        os._exit(0)
    here._socket.close()  # no shutdown
    assert there.is_readable(30)
    os.write(write, b"x")
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
