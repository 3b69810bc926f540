"""Small messages between ranks of one machine, over sockets, with no thread and no collective.

Gloo runs each collective on threads of its own, which training's processes wake several times for a few numbers: half a
millisecond where all cores are busy. Here each rank sends its message to all others, which is one system call for each
of them, and reads theirs when it asks. That suits few ranks; for many, or on several machines, there is gloo.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

__all__ = ["MOST_RANKS", "BegunSteps", "LocalListener", "PeerCall", "PeerSockets"]

MOST_RANKS = 16
"""Above that each rank has too many others to send to."""
_TURN_S = 0.05  # after which a thread looks at what another one has read meanwhile
_HEAD = struct.Struct("<?Q")  # before each message: whether it is a note, and its length
_NOTE = struct.Struct("<Q?")  # the number of a step, and its flag; the name of the loop follows


class PeerCall:
    """One message of every rank."""

    def __init__(self, sockets: PeerSockets, parts: dict[int, bytes]) -> None:
        self.parts = parts  # by rank
        self._sockets = sockets

    def ready(self, seconds: float) -> bool:
        """Wait at most so long; return whether all have come. For any thread.

        Raises:
            DistNetworkError: a rank has closed its connection, or has ended, without sending its message.
        """
        return self._sockets.receive(self, time.monotonic() + seconds)

    def wait(self) -> list[bytes]:
        """Return what all ranks sent, in rank order. Raises: ``DistNetworkError`` also at the sockets' limit."""
        limit_s = self._sockets.options._timeout.total_seconds()
        if not self.ready(limit_s):
            raise dist.DistNetworkError(f"Timed out waiting {limit_s * 1000:.0f}ms for a message of another rank")
        return [part for _, part in sorted(self.parts.items())]


class BegunSteps:
    """Which steps of a loop have begun on other ranks, as these note: with the methods of a store that are used of it.

    The keys are ``begun/<step>``, with increasing numbers. A step is forgotten when this rank has begun or read it.
    """

    def __init__(self, sockets: PeerSockets, name: str) -> None:
        self._sockets, self._name = sockets, name

    def set(self, key: str, value: str) -> None:
        """Note that a step begins here, to all other ranks; does not wait for them."""
        self._sockets.note(self._name, _step_of(key), value == "1")

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether another rank has noted the step; does not wait."""
        return self._sockets.is_noted(self._name, _step_of(keys[0]))

    def get(self, key: str) -> bytes:
        """Return the value that another rank has noted; there is one."""
        return b"%d" % self._sockets.take_note(self._name, _step_of(key))

    def clear(self) -> None:
        """The loop is over on all ranks."""
        self._sockets.forget(self._name)


def _step_of(key: str) -> int:
    return int(key.rpartition("/")[2])


def _forget(notes: dict[int, bool], last: int) -> None:
    for step in [each for each in notes if each <= last]:
        del notes[step]


class PeerSockets:
    """One rank's connections to all others. All ranks send equally often, the n-th messages belong together.

    It has those members of a torch backend that are used of control channels.

    Args:
        rank: this one.
        peers: a connected stream socket for each other rank.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket]) -> None:
        self.options = SimpleNamespace(_timeout=timedelta.max)
        self._rank, self._peers = rank, peers
        self._lock = threading.Lock()
        self._begun = 0  # calls
        self._calls: dict[int, PeerCall] = {}  # by number, until all messages have come
        self._early: dict[int, dict[int, bytes]] = defaultdict(dict)  # messages of calls that have not begun here
        self._heard = dict.fromkeys(peers, 0)  # messages, of each rank
        self._notes: dict[str, dict[int, bool]] = defaultdict(dict)  # of other ranks, by name and step
        self._incoming = {peer: bytearray() for peer in peers}  # the beginning of a message
        self._unsent: dict[int, bytearray] = {}  # where a rank does not read as fast as this one sends
        self._closed: set[int] = set()
        for peer in peers.values():
            peer.setblocking(False)

    def send(self, message: bytes) -> PeerCall:
        """Send to all other ranks; does not wait for them."""
        with self._lock:
            call = PeerCall(self, {**self._early.pop(self._begun, {}), self._rank: message})
            if len(call.parts) <= len(self._peers):
                self._calls[self._begun] = call
            self._begun += 1
            self._post(False, message)
        return call

    def note(self, name: str, step: int, flag: bool) -> None:
        """Send to all other ranks, outside of the calls; what they have noted of the step and before is forgotten."""
        with self._lock:
            self._post(True, _NOTE.pack(step, flag) + name.encode())
            for peer in self._peers.keys() - self._closed:
                self._read(peer)  # or what others note would fill their memory
            _forget(self._notes[name], step)

    def is_noted(self, name: str, step: int) -> bool:
        """Whether another rank has noted a step; does not wait."""
        with self._lock:
            for peer in self._peers.keys() - self._closed:
                self._read(peer)
            return step in self._notes[name]

    def take_note(self, name: str, step: int) -> bool:
        """Return the flag of a step that another rank has noted, and forget it and those before."""
        with self._lock:
            flag = self._notes[name][step]
            _forget(self._notes[name], step)
            return flag

    def forget(self, name: str) -> None:
        """Nobody notes anything more under this name."""
        with self._lock:
            self._notes.pop(name, None)

    def receive(self, call: PeerCall, ends: float) -> bool:
        """Read until a call is complete, and this rank's messages are sent; or until a time, if it is not."""
        while True:
            with self._lock:
                self._flush()
                missing = self._peers.keys() - call.parts.keys()
                for peer in missing - self._closed:
                    self._read(peer)
                missing -= call.parts.keys()
                if gone := missing & self._closed:
                    raise dist.DistNetworkError(f"Connection closed by peer: rank {min(gone)} of the group")
                if not missing and not self._unsent:
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

    def _post(self, is_note: bool, message: bytes) -> None:
        for peer in self._peers:
            self._unsent.setdefault(peer, bytearray()).extend(_HEAD.pack(is_note, len(message)) + message)
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
            is_note, length = _HEAD.unpack_from(incoming)
            ends = _HEAD.size + length
            if len(incoming) < ends:
                break
            message = bytes(incoming[_HEAD.size : ends])
            del incoming[:ends]
            if is_note:
                step, flag = _NOTE.unpack_from(message)
                self._notes[message[_NOTE.size :].decode()][step] = flag
            else:
                self._hear(peer, message)

    def _hear(self, peer: int, message: bytes) -> None:
        number = self._heard[peer]
        self._heard[peer] += 1
        call = self._calls.get(number)
        parts = self._early[number] if call is None else call.parts
        parts[peer] = message
        if call is not None and len(parts) > len(self._peers):
            del self._calls[number]


class LocalListener:
    """Where the other ranks of this machine can connect to this one, once.

    Attributes:
        address: to be given to all of them.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)
        name = secrets.token_hex(8)
        try:
            machine = _machine()
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(f"\0stagereg-{name}")  # of the kernel, not of a file system
            self._listener.listen(MOST_RANKS)
        except OSError:  # not on Linux
            machine, self._listener = name, socket.socket()  # where no other rank is
        self.address = f"{machine} {name} {self._secret}"

    def connect(
        self, rank: int, addresses: Sequence[str], waiting: Callable[[Callable[[float], bool], str], None]
    ) -> PeerSockets | None:
        """Connect to all other ranks, which call this too; return ``None`` where they are not on one machine.

        Args:
            rank: this one.
            addresses: of all ranks, in rank order.
            waiting: calls a function with seconds to wait until it returns True.

        Raises:
            DistNetworkError: a rank has ended meanwhile.
        """
        machines, names, hidden = zip(*(address.split() for address in addresses), strict=True)
        peers: dict[int, socket.socket] = {}
        with contextlib.closing(self._listener) as listener:
            if len(set(machines)) > 1:
                return None
            for other in range(rank):
                peers[other] = socket.socket(socket.AF_UNIX)
                try:
                    peers[other].connect(f"\0stagereg-{names[other]}")
                    peers[other].sendall(f"{hidden[other]}{rank:8}".encode())
                except OSError as error:
                    raise dist.DistNetworkError(f"Connection closed by rank {other} of the group: {error}") from error
            while len(peers) < len(addresses) - 1:
                poll = select.poll()
                poll.register(listener, select.POLLIN)
                waiting(lambda seconds, poll=poll: bool(poll.poll(1000 * seconds)), "the join")  # type: ignore[misc]
                caller, _ = listener.accept()
                caller.settimeout(5.0)
                with contextlib.suppress(OSError):
                    greeting = caller.recv(40, socket.MSG_WAITALL).decode(errors="replace")
                    if secrets.compare_digest(greeting[:32], self._secret):  # else it is of another program
                        peers[int(greeting[32:])] = caller
        return PeerSockets(rank, peers)


def _machine() -> str:
    """The same for all processes that can connect by a name: one system, as it has been started, and its network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{Path('/proc/self/ns/net').stat().st_ino}"
