"""An authenticated connection between two processes of one run, with messages, raw bytes and timeouts.

Both sides first prove that they know the secret of the run, which excludes other programs and users. The data is not
encrypted, because the network of the cluster is trusted. Messages are JSON and never unpickled. File content goes from
the page cache to the socket without a copy in this process. A call fails if no byte has been transferred for
:data:`PROGRESS_S` seconds; the total duration of a call is not limited.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from stagereg.base.address import close_in_forks
from stagereg.checkpoint.format.checksum import crc32

PROGRESS_S = 10.0  # seconds without a transferred byte after which a transfer fails
HANDSHAKE_TIMEOUT_S = 5.0  # seconds in which a new connection must prove that it belongs to the run

_MOST_BYTES = 64 << 20  # maximum size of a message, enough for the manifest of a part of 20 TB
_LENGTH = struct.Struct("!I")
_PIECE_BYTES = 1 << 18  # small enough to stay in the processor's cache until the checksum is computed
_NONCE_BYTES = _PROOF_BYTES = 32
_HELLO = b"stagereg-tier/1\n"


class Connection:
    """A connection to another process of this run. Only :meth:`end` is thread-safe.

    All errors are ``OSError``: system errors, ``TimeoutError`` after :data:`PROGRESS_S` seconds without a transfer,
    ``ConnectionError`` if the other process has closed the connection or sent an invalid message.
    """

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        opened.settimeout(None)  # blocking, with the kernel's timeouts: one call transfers all available bytes
        limit = struct.pack("ll", int(PROGRESS_S), int(PROGRESS_S % 1 * 1e6))
        for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            opened.setsockopt(socket.SOL_SOCKET, name, limit)
        # No buffer size is set: an explicit size has a lower maximum, and disables the automatic growth of the buffer.
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a failed machine on an idle connection
        for name, seconds in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            opened.setsockopt(socket.IPPROTO_TCP, name, seconds)

    def send(self, message: dict[str, Any], more: bool = False) -> None:
        """Send a message. ``more``: whether the next call sends the bytes of a file."""
        text = json.dumps(message).encode()
        data = memoryview(_LENGTH.pack(len(text)) + text)
        while data:
            with _moving():
                data = data[self._socket.send(data, socket.MSG_MORE if more else 0) :]

    def receive(self) -> dict[str, Any]:
        head = bytearray(_LENGTH.size)
        self.receive_into(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > _MOST_BYTES:
            raise ConnectionAbortedError(f"received a message of {length} bytes; the maximum is {_MOST_BYTES}")
        text = bytearray(length)
        self.receive_into(memoryview(text))
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if type(message) is not dict:
            raise ConnectionAbortedError("received bytes that are not a valid message")
        return message

    def send_file(self, descriptor: int, offset: int, count: int) -> None:
        end = offset + count
        while offset < end:
            with _moving():
                sent = os.sendfile(self._socket.fileno(), descriptor, offset, end - offset)
            if not sent:
                raise ConnectionAbortedError(f"the file ends at byte {offset}: expected at least {end} bytes")
            offset += sent

    def receive_into(self, memory: memoryview) -> None:
        """Fill ``memory`` with the next bytes."""
        while memory:
            with _moving():
                count = self._socket.recv_into(memory, len(memory), socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the other process has closed the connection")
            memory = memory[count:]

    def receive_block(self, memory: memoryview, touch: Callable[[], object] = int) -> int:
        """Fill ``memory`` with the next bytes, return their CRC-32, and call ``touch`` after each chunk."""
        crc = 0
        while memory:
            piece, memory = memory[:_PIECE_BYTES], memory[_PIECE_BYTES:]
            self.receive_into(piece)
            crc = crc32(piece, crc)
            touch()
        return crc

    def is_readable(self, seconds: float | None) -> bool:
        """Wait until data arrives or the connection closes. Return False after ``seconds``; ``None``: wait forever."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def end(self) -> None:
        """Shut the connection down, so that all calls in both processes fail. Thread-safe."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self._socket.close()


@contextlib.contextmanager
def _moving() -> Iterator[None]:
    try:
        yield
    except BlockingIOError:
        raise TimeoutError(f"the other process has sent or received no data for {PROGRESS_S:g} s") from None


def accept(opened: socket.socket, secret: bytes) -> Connection:
    """Return the connection to a client, once the client has proved that it has the secret. Raises: ``OSError``."""
    close_in_forks(opened)
    ends, nonce = time.monotonic() + HANDSHAKE_TIMEOUT_S, secrets.token_bytes(_NONCE_BYTES)
    _put(opened, _HELLO + nonce, ends)
    answer = _take(opened, _NONCE_BYTES + _PROOF_BYTES, ends)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"calls", nonce, theirs)):
        raise ConnectionRefusedError("the client does not know the secret of this run")
    _put(opened, _proof(secret, b"answers", nonce, theirs), ends)
    return Connection(opened)


def connect(address: tuple[str, int], secret: bytes) -> Connection:
    """Return a connection to a server, once both have proved that they have the secret. Raises: ``OSError``."""
    opened = socket.create_connection(address, HANDSHAKE_TIMEOUT_S)
    try:
        close_in_forks(opened)
        ends = time.monotonic() + 2 * HANDSHAKE_TIMEOUT_S  # the server may first have to reject other connections
        own = secrets.token_bytes(_NONCE_BYTES)
        hello = _take(opened, len(_HELLO) + _NONCE_BYTES, ends)
        nonce = hello[len(_HELLO) :]
        if not hello.startswith(_HELLO):
            raise ConnectionRefusedError(f"the server {address[0]}:{address[1]} is not a process of this run")
        _put(opened, own + _proof(secret, b"calls", nonce, own), ends)
        proof = _take(opened, _PROOF_BYTES, ends)
        if not hmac.compare_digest(proof, _proof(secret, b"answers", nonce, own)):
            raise ConnectionRefusedError(f"the server {address[0]}:{address[1]} does not know the secret of this run")
        return Connection(opened)
    except BaseException:
        opened.close()
        raise


def _proof(secret: bytes, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, b"stagereg tier " + side + first + second, "sha256")


def _put(opened: socket.socket, data: bytes, ends: float) -> None:
    opened.settimeout(max(0.001, ends - time.monotonic()))
    opened.sendall(data)


def _take(opened: socket.socket, count: int, ends: float) -> bytes:
    data = b""
    while len(data) < count:
        opened.settimeout(max(0.001, ends - time.monotonic()))
        if not (got := opened.recv(count - len(data))):
            raise ConnectionResetError("the other process has closed the connection")
        data += got
    return data
