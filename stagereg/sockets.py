"""Small messages between ranks of one machine, over sockets, with no thread and no collective.

A gloo collective runs on threads of its own. Where training keeps all cores busy, waking them takes half a millisecond
even for a few numbers. Here each rank sends its message to every other rank, one system call each, and reads theirs
when it asks. That suits few ranks; for many, or on several machines, there is gloo.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace

import torch.distributed as dist

MOST_RANKS = 16
"""With more ranks than this, gloo is used."""
_TURN_S = 0.05  # seconds after which a waiting thread checks whether another thread has read its message
_HEAD = struct.Struct("<Q")  # before each message: its length


class PeerCall:
    """One message of every rank."""

    def __init__(self, sockets: PeerSockets, parts: dict[int, bytes], end: int) -> None:
        self.parts = parts  # by rank
        self.end = end  # of this rank's message, in all bytes that this rank sends
        self._sockets = sockets

    def ready(self, seconds: float) -> bool:
        """Wait at most so long; return whether all have come, or raise that a rank is gone. For any thread."""
        return self._sockets.receive(self, time.monotonic() + seconds)

    def wait(self) -> list[bytes]:
        """Return what all ranks sent, in rank order. Raises: ``DistNetworkError`` also at the sockets' limit."""
        limit_s = self._sockets.options._timeout.total_seconds()
        if not self.ready(limit_s):
            raise dist.DistNetworkError(f"Timed out waiting {limit_s * 1000:.0f}ms for a message of another rank")
        return [part for _, part in sorted(self.parts.items())]


class PeerSockets:
    """One rank's connections to all others. All ranks send equally often, the n-th messages belong together.

    It has those members of a torch backend that are used of control channels.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket]) -> None:
        self.options = SimpleNamespace(_timeout=timedelta.max)
        self._rank, self._peers = rank, peers
        self._lock = threading.Lock()
        self._begun = 0  # calls
        self._parts: dict[int, dict[int, bytes]] = defaultdict(dict)  # messages, by call and rank, until all have come
        self._heard = dict.fromkeys(peers, 0)  # messages, of each rank
        self._incoming = {peer: bytearray() for peer in peers}  # the beginning of a message
        self._posted = 0  # bytes, to each rank
        self._unsent: dict[int, bytearray] = {}  # where a rank does not read as fast as this one sends
        self._closed: set[int] = set()
        for peer in peers.values():
            peer.setblocking(False)
            _connections.add(peer)

    def send(self, message: bytes) -> PeerCall:
        """Send to all other ranks; does not wait for them."""
        with self._lock:
            self._post(message)
            call = PeerCall(self, self._parts[self._begun], self._posted)
            self._add(self._begun, self._rank, message)
            self._begun += 1
        return call

    def receive(self, call: PeerCall, ends: float) -> bool:
        """Read until a call is complete, and this rank's messages up to it are sent; or until a time, if it is not."""
        while True:
            with self._lock:
                missing = self._peers.keys() - call.parts.keys()
                self._flush()
                for peer in missing - self._closed:
                    self._read(peer)
                missing -= call.parts.keys()
                if gone := missing & self._closed:
                    raise dist.DistNetworkError(f"Connection closed by peer: rank {min(gone)} of the group")
                # Not until all is sent: of later messages other ranks may read nothing before they wait for them.
                if not missing and all(self._posted - len(unsent) >= call.end for unsent in self._unsent.values()):
                    return True
                poll = select.poll()
                for peer in missing | self._unsent.keys():
                    events = select.POLLIN * (peer in missing) | select.POLLOUT * (peer in self._unsent)
                    poll.register(self._peers[peer], events)
            left = ends - time.monotonic()
            if left <= 0:
                return False
            poll.poll(1000 * min(left, _TURN_S))

    def abort(self) -> None:
        """Close all connections: whatever waits on one fails, on this rank and on others. For any thread."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        for peer in self._peers.values():
            peer.close()  # no shutdown: a forked process has these too

    def _set_default_timeout(self, limit: timedelta) -> None:
        self.options._timeout = limit

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def _post(self, message: bytes) -> None:
        message = _HEAD.pack(len(message)) + message
        self._posted += len(message)
        for peer in self._peers:
            self._unsent.setdefault(peer, bytearray()).extend(message)
        self._flush()

    def _flush(self) -> None:
        for peer, unsent in list(self._unsent.items()):
            try:
                del unsent[: self._peers[peer].send(unsent)]
            except BlockingIOError:
                continue
            except OSError:  # it has ended; what it had sent before may still be there
                unsent.clear()
            if not unsent:
                del self._unsent[peer]

    def _read(self, peer: int) -> None:
        incoming = self._incoming[peer]
        try:
            while chunk := self._peers[peer].recv(2**16):
                incoming += chunk
                if len(chunk) < 2**16:
                    break
            else:
                self._closed.add(peer)
        except BlockingIOError:
            pass
        except OSError:
            self._closed.add(peer)
        while len(incoming) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(incoming)
            ends = _HEAD.size + length
            if len(incoming) < ends:
                break
            message = bytes(incoming[_HEAD.size : ends])
            del incoming[:ends]
            self._add(self._heard[peer], peer, message)
            self._heard[peer] += 1

    def _add(self, number: int, rank: int, message: bytes) -> None:
        self._parts[number][rank] = message
        if len(self._parts[number]) > len(self._peers):
            del self._parts[number]


def connect_ranks(rank: int, exchange: Callable[[str, str], Sequence[str]]) -> PeerSockets | None:
    """Connect this rank to all others, which call this too; return ``None`` on all ranks if one of them cannot.

    ``exchange`` publishes a text of this rank under a key, and returns those of all ranks, in rank order.
    """
    own_name, own_secret = secrets.token_hex(8), secrets.token_hex(16)
    peers: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as closing:
        with contextlib.suppress(OSError):  # not on Linux, or no sockets in a sandbox; nobody can connect then
            listener = closing.enter_context(socket.socket(socket.AF_UNIX))
            listener.setblocking(False)
            listener.bind(f"\0stagereg-{own_name}")  # of the kernel, not of a file system
            listener.listen()
        addresses = [each.split() for each in exchange("here", f"{own_name} {own_secret}")]
        if len(addresses) > MOST_RANKS:
            return None
        try:
            for other, (name, secret) in enumerate(addresses[:rank]):
                peers[other] = socket.socket(socket.AF_UNIX)
                peers[other].setblocking(False)
                peers[other].connect(f"\0stagereg-{name}")
                peers[other].sendall(f"{secret}{rank:8}".encode())
            connected = "yes"
        except OSError:  # that rank is on another machine
            connected = "no"
        if "no" in exchange("connected", connected):
            for peer in peers.values():
                peer.close()
            return None
        expected = {f"{own_secret}{other:8}".encode(): other for other in range(rank + 1, len(addresses))}
        while expected:
            caller, _ = listener.accept()  # does not wait: all ranks have connected, and sent what is expected
            try:
                peers[expected.pop(caller.recv(40, socket.MSG_DONTWAIT))] = caller
            except (OSError, KeyError):  # of another program
                caller.close()
    return PeerSockets(rank, peers)


_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Global because a forked process closes them: while it holds them, others do not see that its parent has ended."""
os.register_at_fork(after_in_child=lambda: list(map(socket.socket.close, _connections)))
