"""The part server of a process: receives copies of other machines' parts, and sends blocks of this machine's parts.

Requests and answers are messages (:mod:`.wire`). The answer to a rejected request has a field ``error``. The request
``put`` starts the transfer of a part. The blocks follow on this connection and on further connections, which join with
``stream``. A message before each block names the file and the block. The server answers ``end`` when all blocks of a
connection have arrived, and ``finish`` when the part is complete. It writes only blocks whose CRC-32 matches.
:mod:`.peer` is the client.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from mmap import mmap
from typing import Any

import stagereg.extensions.tiers.wire as wire
from stagereg.base.address import listen, own_address
from stagereg.base.forks import private_memory
from stagereg.base.small_files import discard, sync, write_new
from stagereg.checkpoint.storage.aligned import BLOCK_BYTES
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.errors import CheckpointError, reason
from stagereg.extensions.tiers.folder import MachineFolder, open_own
from stagereg.extensions.tiers.part import Part, SaveId

_log = logging.getLogger(__name__)

_STRANGERS = 64  # maximum number of unauthenticated connections; further connections wait at most 5 s
_CLOSE_S = 5.0


class PartServer:
    """Serves the other machines of the run until :meth:`close`, on background threads.

    A connection without the secret of the run is closed within five seconds, and uses one thread until then.

    ``durable``: whether received parts are flushed before they are acknowledged. ``room(nbytes)``, called on any
    thread, returns why ``nbytes`` bytes do not fit on this machine; an empty string if they fit. ``address``: host and
    port of the server for other machines. The constructor raises ``OSError`` if the server cannot listen.
    """

    def __init__(self, folder: MachineFolder, secret: bytes, durable: bool, room: Callable[[int], str]) -> None:
        self.folder, self.durable, self._secret, self._room = folder, durable, secret, room
        self._lock = threading.Lock()
        self._coming: dict[str, IncomingPart] = {}
        self._sockets: dict[socket.socket, threading.Thread] = {}
        self._strangers = threading.Semaphore(_STRANGERS)
        self._closed, self._warned = False, False
        own = own_address()
        self._listener = listen(own)
        self.address: tuple[str, int] = (own, self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._listen, name="stagereg-tier-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections, and delete incomplete parts. Idempotent."""
        with self._lock:
            self._closed = True
            threads = [self._thread, *self._sockets.values()]
            for each in (self._listener, *self._sockets):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._strangers.release()
        ends = time.monotonic() + _CLOSE_S
        for thread in threads:
            thread.join(max(0.0, ends - time.monotonic()))
        self._listener.close()
        with self._lock:
            for incoming in self._coming.values():
                incoming.discard()

    def begin(self, part: Part) -> IncomingPart:
        """Start receiving a part. Raises: ``CheckpointError`` if the part does not fit, or after :meth:`close`."""
        with self._lock:
            if self._closed:
                raise CheckpointError("this process is shutting down")
            incoming = IncomingPart(part, self.folder, self.durable)
            if why := self._room(incoming.left + sum(each.left for each in self._coming.values())):
                incoming.discard()
                raise CheckpointError(f"not enough space: {why}")
            self._coming[incoming.token] = incoming
            return incoming

    def find(self, token: str) -> IncomingPart:
        """Return the part that is being received under a token. Raises: ``CheckpointError`` for an unknown token."""
        with self._lock:
            if token not in self._coming:
                raise CheckpointError("no transfer in progress has this token")
            return self._coming[token]

    def forget(self, incoming: IncomingPart) -> None:
        """Remove a part that is complete or aborted, and delete its hidden files."""
        with self._lock:
            self._coming.pop(incoming.token, None)
        incoming.discard()

    def _listen(self) -> None:
        while True:
            self._strangers.acquire()
            try:
                caller, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                self._strangers.release()
                time.sleep(0.1)  # for example, the process has no free file descriptor
                continue
            thread = threading.Thread(target=self._serve, args=[caller], name="stagereg-tier-serve", daemon=True)
            with self._lock, contextlib.suppress(RuntimeError):  # Python cannot start a thread while it exits
                if not self._closed:
                    thread.start()
                    self._sockets[caller] = thread
                    continue
            self._strangers.release()
            caller.close()

    def _serve(self, caller: socket.socket) -> None:
        try:
            try:
                connection = wire.accept(caller, self._secret)
            finally:
                self._strangers.release()
        except OSError as error:
            with self._lock:
                level, self._warned = logging.DEBUG if self._warned else logging.WARNING, True
            _log.log(level, "stagereg: Rejected a connection to the local tier from outside this run: %s", error)
        else:
            try:
                _Session(self, connection).run()
            except OSError as error:
                _log.debug("stagereg: a connection of the local tier was closed: %s", error)
        finally:
            with self._lock:
                self._sockets.pop(caller, None)
            caller.close()


class IncomingPart:
    """A part that is being received. Its files are hidden until all blocks have arrived and are valid. Thread-safe.

    Each transfer uses a separate hidden folder, so concurrent and failed transfers of a part do not conflict.
    ``durable``: whether the files are flushed before the commit. Any method may raise ``OSError``, such as disk full.
    ``token``: identifies the part; only its sender has the token. ``left``: number of bytes that have not arrived.
    ``touched``: time of the last arrival of bytes, by ``time.monotonic``.
    """

    def __init__(self, part: Part, folder: MachineFolder, durable: bool) -> None:
        self.part, self._folder, self._durable = part, folder, durable
        self.token, self.touched = secrets.token_hex(16), time.monotonic()
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # one writer at a time: others would spin on the kernel's lock of the file
        self._hidden = f"{folder.directory(part.save)}/.{self.token}.tmp"
        folder.make(part.save)
        os.mkdir(self._hidden, 0o700)
        self._missing = {(name, number) for name, file in part.files.items() for number in range(len(file.blocks))}
        self.left = part.nbytes
        self._half = len(self._missing) // 2
        for name in part.files:
            write_new(f"{self._hidden}/{name}", b"", 0o600, flush=False)

    def write(self, name: str, number: int, block: memoryview) -> None:
        """Write a block, whose checksum the caller has verified."""
        at, begin = 0, self.part.files[name].block(number).start
        descriptor = os.open(f"{self._hidden}/{name}", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with self._turn:
                while at < len(block):
                    at += os.pwrite(descriptor, block[at:], begin + at)
            if self._durable:  # flushed immediately, so that the page cache stays free for training
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, begin, len(block), os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        with self._lock:
            if (name, number) not in self._missing:
                return
            self._missing.remove((name, number))
            self.left -= len(block)
            half = len(self._missing) == self._half
        if half:
            failpoint("receiving")

    def complete(self) -> None:
        """Commit the part on this machine. Raises: ``CheckpointError`` if blocks are missing."""
        if self._missing:
            name, number = min(self._missing)
            raise CheckpointError(f"{len(self._missing)} blocks are missing, the first is block {number} of {name}")
        failpoint("received")
        directory = self._folder.directory(self.part.save)
        for name in self.part.files:
            if self._durable:
                sync(f"{self._hidden}/{name}")
            os.replace(f"{self._hidden}/{name}", f"{directory}/{name}")
        os.rmdir(self._hidden)
        self._folder.complete(self.part, received=True)

    def discard(self) -> None:
        """Delete the hidden files of an incomplete part. Idempotent. Does not raise."""
        discard(self._hidden)


class _Session:
    """Handles the requests of one connection, in order."""

    def __init__(self, server: PartServer, connection: wire.Connection) -> None:
        self._server, self._folder, self._connection = server, server.folder, connection
        self._known: Part | None = None  # the part that the previous request named
        self._incoming: IncomingPart | None = None
        self._owns = False  # whether the end of this connection aborts the transfer of the part
        self._block: mmap | None = None  # not on the heap, so that the memory is released at the end of the connection
        self._requests: dict[Any, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
            "part": self._part,
            "get": self._get,
            "put": self._put,
            "stream": self._stream,
            "block": self._take_block,
            "end": self._end,
            "finish": self._finish,
        }

    def run(self) -> None:
        """Serve until the client closes the connection. Raises: ``OSError`` if the connection fails."""
        try:
            while True:
                self._wait()
                request = self._connection.receive()
                try:
                    if (answer := self._requests[request.get("do")](request)) is not None:
                        self._connection.send(answer)
                except (ConnectionError, TimeoutError):
                    raise
                except (OSError, CheckpointError, ValueError, TypeError, LookupError) as error:
                    self._connection.send({"error": reason(error)})
                    if self._incoming is not None:
                        return self._drain()
        finally:
            self._block = None
            if self._incoming is not None and self._owns:
                self._server.forget(self._incoming)

    def _wait(self) -> None:
        """Wait for the next request. Raises: ``TimeoutError`` if a transfer on any connection makes no progress."""
        while not self._connection.is_readable(None if self._incoming is None else wire.PROGRESS_S):
            if self._incoming is not None and time.monotonic() - self._incoming.touched >= wire.PROGRESS_S:
                raise TimeoutError(f"no data was received for {wire.PROGRESS_S:g} s")

    def _drain(self) -> None:
        """Read until the client closes the connection. Closing it here first could discard the error just sent."""
        scrap = memoryview(bytearray(1 << 16))
        while True:
            self._connection.receive_into(scrap)

    def _find(self, request: dict[str, Any]) -> Part | None:
        save, rank = SaveId.of(request.get("save")), int(request["rank"])
        if self._known is None or (self._known.save, self._known.rank) != (save, rank):
            self._known = self._folder.find(save, rank) if save.run == os.path.basename(self._folder.path) else None
        return self._known

    def _part(self, request: dict[str, Any]) -> dict[str, Any]:
        part = self._find(request)
        return {"part": None if part is None else part.dumps()}

    def _get(self, request: dict[str, Any]) -> None:
        part, name = self._find(request), request["file"]
        if part is None or name not in part.files:
            raise CheckpointError(f"this machine does not have the file {name!r:.100} of the requested part")
        span = part.files[name].block(request["block"])
        path = f"{self._folder.directory(part.save)}/{name}"
        with open_own(path) as file:
            try:
                self._connection.send({"nbytes": len(span)}, more=True)
                self._connection.send_file(file.fileno(), span.start, len(span))
            except OSError as error:  # the client would read an error message as bytes of the file
                raise ConnectionAbortedError(f"{path}: {error}") from error

    def _put(self, request: dict[str, Any]) -> dict[str, Any]:
        part = Part.loads(request["part"])
        if part.save.run != os.path.basename(self._folder.path):
            raise CheckpointError(f"the part belongs to run {part.save.run}, not to the run of this server")
        if (held := self._folder.find(part.save, part.rank)) is not None:
            if held != part:
                raise CheckpointError("this machine already has a different part for the same rank and save")
            return {"have": True}
        self._incoming, self._owns = self._server.begin(part), True
        return {"token": self._incoming.token}

    def _stream(self, request: dict[str, Any]) -> dict[str, Any]:
        self._incoming, self._owns = self._server.find(request["token"]), False
        return {}

    def _coming(self) -> IncomingPart:
        if self._incoming is None:
            raise ConnectionAbortedError("a block or finish request arrived before a put request")
        return self._incoming

    def _take_block(self, request: dict[str, Any]) -> None:
        incoming, name, number = self._coming(), request["file"], request["block"]
        file = incoming.part.files[name]
        span = file.block(number)
        self._block = self._block or private_memory(BLOCK_BYTES)
        block = memoryview(self._block)[: len(span)]

        def touch() -> None:
            incoming.touched = time.monotonic()

        if self._connection.receive_block(block, touch) != file.blocks[number]:
            raise CheckpointError(f"CRC-32 mismatch in block {number} of {name} after the transfer")
        incoming.write(name, number, block)

    def _end(self, _: dict[str, Any]) -> dict[str, Any]:
        if not self._owns:
            self._incoming = None
        return {}

    def _finish(self, _: dict[str, Any]) -> dict[str, Any]:
        incoming = self._coming()
        incoming.complete()
        self._server.forget(incoming)
        self._incoming = None
        return {"have": True}
