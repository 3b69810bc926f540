"""The heartbeat process of a rank, which proves to the other ranks that the rank is alive.

It is a separate process for two reasons: a thread of the rank would wait for Python's GIL, which compilers and
libraries may hold for longer than the timeout, and a disconnected rank may not terminate unless it is killed. The
process imports only the standard library and runs as ``python -I -S heartbeat.py``, so it starts in milliseconds.

All heartbeat processes connect to the heartbeat process of rank 0, the *hub*. Each connection carries a heartbeat (a
dot) in both directions several times per ``timeout_s``. A rank fails immediately if its process terminates, and after
``timeout_s`` if it is suspended or silent, unless a debugger has stopped it. The hub reports each failure to all ranks.
If a heartbeat process receives nothing from the hub for ``timeout_s``, its rank is disconnected or the hub's machine
has failed. The process then kills its rank, unless the rank terminates within a further ``timeout_s``. Once one rank
has received a signal to exit, all ranks are about to exit, and the timeout is at most :data:`SHORT_TIMEOUT_S`.

If a heartbeat process dies before its rank, :mod:`.failure_monitor` starts another one. Rank 0 keeps the port of the
hub open for the next process, as an inherited socket, so a closed port means that rank 0 has terminated. If a
connection ends without the message ``bye``, the hub waits for the rank to connect again. The limit is ``timeout_s`` if
all ranks are on one machine and the rank's process is alive, otherwise :data:`RETURN_S`.

Any process may connect to the hub. The hub sends a challenge and reads one short line, ``RANK PROOF NAME``. It does not
parse the line before it has verified the proof. The rank also verifies a proof of the hub before it reads messages.

The rank sends lines of JSON: its :class:`Config`; ``{RANK: NAME}``, the ranks that were connected to an earlier hub; a
number, the seconds by which to delay the kill; ``"shorten"`` after a signal; and ``"bye"`` before a normal exit. It
receives ``{"port": N}`` when its heartbeat process is connected (N is the hub's port, on the hub only), ``{"failed":
{RANK: [NAME, WHY]}}``, ``{"off": true}`` if rank 0 has no heartbeat process any more, and on the hub ``{"came": RANK,
"name": NAME}`` and ``{"left": RANK}``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import ipaddress
import json
import os
import re
import resource
import secrets
import selectors
import signal
import socket
import sys
import time
from typing import Any, NamedTuple

SHORT_TIMEOUT_S = 4.0  # maximum seconds until a failure is detected, once a rank has received a signal to exit
RETURN_S = 3.0  # seconds for a restarted heartbeat process to connect to the hub
ENDED = "its process has terminated"
_STOPPED = "its process was suspended (SIGSTOP, or a suspended job)"
_SILENT = "no heartbeat for {:g} s. The process is suspended, or its machine failed or is disconnected"
_SHUT_OUT = (
    "its heartbeat process has not accepted a connection from this rank for {:g} s. The process is suspended, other "
    "programs use all its connections, or STAGEREG_SECRET differs between the ranks"
)

_MOST_BYTES = 1 << 16  # maximum size of a line
_GREETING_BYTES = 1024  # maximum size of a line from an unauthenticated process
_STRANGERS = 64  # maximum number of unauthenticated connections
_STRANGER_S, _CROWDED_S = 5.0, 3.0  # seconds for a connection to authenticate; the same if other connections wait
_PAUSE_S = 0.5  # seconds until the next accept() after one failed for lack of file descriptors
_AGAIN_S = 0.2  # seconds between attempts to connect to the hub
_WELCOME_S = 20.0  # seconds for the hub to accept a rank, even if other programs also connect to the hub
_TEXT_LENGTH = 300  # maximum characters of a name or a reason, which are printed
_PROCESS = re.compile(r"process (\d{1,10}) on ")


class Config(NamedTuple):
    """The parameters of a heartbeat process."""

    rank: int
    name: str  # name of the rank's process, for messages
    timeout_s: float
    secret: str  # secret of the run
    hub: list[Any] | None  # host, port and name of the hub; ``None`` on the hub itself
    world_size: int


class Line:
    """A nonblocking connection to another heartbeat process or to the rank, which sends and receives lines."""

    def __init__(self, reads: Any, writes: Any, rank: int = -1, opened: socket.socket | None = None) -> None:
        self.reads, self.writes, self.opened = reads, writes, opened
        self.rank = rank  # -1 until the other process is authenticated
        self.heard = time.monotonic()
        self.name, self.challenge = "", ""
        self._came = b""

    def send(self, text: str) -> None:
        """Send a line. If the write would block, the rest of the line is dropped."""
        with contextlib.suppress(OSError):
            os.write(self.writes, text.encode() + b"\n")

    def take(self) -> list[str] | None:
        """Return the lines that have arrived; ``None`` if the connection has ended or a line is too long."""
        most = _GREETING_BYTES if self.rank < 0 else _MOST_BYTES
        try:
            data = os.read(self.reads, most)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._came = (self._came + data).split(b"\n")
        return None if not data or len(self._came) > most else [line.decode(errors="replace") for line in lines]


class Awaited(NamedTuple):
    """A rank whose connection was closed, but which may connect again."""

    name: str
    since: float
    limit_s: float
    why: str  # the failure to report if the rank does not connect again


class Heartbeat:
    """The heartbeat of one rank, whose process is ``parent``. The hub listens on ``listener``, or on a new port."""

    def __init__(self, config: Config, parent: int, rank: Line, listener: socket.socket | None = None) -> None:
        self.config, self._parent, self._rank = config, parent, rank
        self._timeout_s = config.timeout_s
        self._beat_s = min(1.0, config.timeout_s / 5)
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, Line] = {}  # connections to other heartbeat processes, by descriptor
        self._strangers: dict[int, Line] = {}  # unauthenticated connections, by descriptor
        self._ranks: dict[int, Line] = {}  # authenticated connections, by rank
        self._awaited: dict[int, Awaited] = {}  # ranks that may connect again, by rank
        self._failed: dict[int, tuple[str, str]] = {}  # name and reason, by rank
        self._leaves = False  # whether the rank has sent ``bye``
        self._ends_by: float | None = None
        self._is_off = False  # whether rank 0 has exited normally, or continues without a heartbeat process
        self._was_welcome = False  # whether the hub has ever accepted this process
        self._away_since, self._again_at = time.monotonic(), 0.0  # when the wait for the hub began; when to connect
        self._stopped_since: float | None = None
        self._kill_at: float | None = None
        self._given_s = 0.0  # seconds added to _kill_at
        self._listener: socket.socket | None = None
        self._accepts, self._accepts_at = False, 0.0
        self._selector.register(rank.reads, selectors.EVENT_READ)
        if config.hub is None:
            self._listener = listener or socket.create_server(("127.0.0.1", 0), backlog=512)
            self._listener.setblocking(False)
            host, port = self._listener.getsockname()[:2]
            self._is_alone = ipaddress.ip_address(host.partition("%")[0]).is_loopback  # all ranks are on this machine
            rank.send(json.dumps({"port": port}))

    def run(self) -> None:
        """Send heartbeats until the rank has terminated or has sent ``bye``."""
        last = time.monotonic()
        while True:
            self._open(time.monotonic())
            for key, _ in self._selector.select(self._beat_s / 4):
                self._serve(key.fileobj)
            now = time.monotonic()
            if now - last > 3 * self._beat_s:  # this process was suspended, and received nothing in that time
                self._forgive(now)
            if self._leaves or os.getppid() != self._parent:
                self._ends_by = self._ends_by or now + RETURN_S
                if self._is_settled() or now > self._ends_by:
                    return self._end()
            if now - last >= self._beat_s:
                last = now
                self._beat(now)
            self._look(now)

    def _open(self, now: float) -> None:
        """On the hub, accept connections up to the limit. On other ranks, connect to the hub unless connected."""
        if self._listener is not None:
            wants = len(self._strangers) < _STRANGERS and now >= self._accepts_at
            if wants and not self._accepts:
                self._selector.register(self._listener, selectors.EVENT_READ)
            elif self._accepts and not wants:
                self._selector.unregister(self._listener)
            self._accepts = wants
        elif not (self._lines or self._is_off or 0 in self._failed) and now >= self._again_at:
            self._connect(now)

    def _is_welcome(self) -> bool:
        return self._listener is not None or 0 in self._ranks

    def _is_settled(self) -> bool:
        """Whether this process can exit now, without ranks that connect to the hub later reporting it as failed."""
        alone = self._is_off or 0 in self._failed
        return alone or (self._is_welcome() and not (self._leaves and self._awaited))

    def _forgive(self, now: float) -> None:
        for line in self._lines.values():
            line.heard = now
        self._awaited = {rank: each._replace(since=now) for rank, each in self._awaited.items()}
        self._away_since = now

    def _beat(self, now: float) -> None:
        stopped = _state(self._parent) == "T"
        self._stopped_since = (self._stopped_since or now) if stopped else None
        if self._stopped_since is not None and now - self._stopped_since > self._timeout_s:
            self._report(self.config.rank, self.config.name, _STOPPED)
        for line in self._ranks.values():
            line.send(".")

    def _look(self, now: float) -> None:
        for line in [*self._strangers.values()] if self._listener is not None else ():
            if now - line.heard > (_STRANGER_S if self._accepts else _CROWDED_S):
                self._close(line)
        for line in [*self._ranks.values()]:
            if now - line.heard > self._timeout_s:
                self._report(line.rank, line.name, _SILENT.format(self._timeout_s))
                self._close(line)
        for rank, (name, since, limit_s, why) in [*self._awaited.items()]:
            if self._has_ended(name):
                self._report(rank, name, ENDED)
            elif now - since > min(limit_s, self._timeout_s):
                self._report(rank, name, why)
        limit_s = max(self._timeout_s, _WELCOME_S)
        if not (self._is_welcome() or self._is_off) and now - self._away_since > limit_s:
            self._report(0, self.config.hub[2] if self.config.hub else "", _SHUT_OUT.format(limit_s))
        if self._kill_at is not None and now > self._kill_at + self._given_s and os.getppid() == self._parent:
            os.kill(self._parent, signal.SIGKILL)

    def _has_ended(self, name: str) -> bool:
        """Whether the process of a rank has terminated; False if the ranks are on several machines."""
        process = _PROCESS.match(name)
        return self._is_alone and process is not None and _state(int(process[1])) in ("", "Z", "X")

    def _report(self, rank: int, name: str, why: str) -> None:
        """Report the failure of a rank to this rank, and to all connected ranks."""
        self._awaited.pop(rank, None)
        if rank in self._failed:
            return
        self._failed[rank] = name, why
        for line in (self._rank, *self._ranks.values()):
            line.send(json.dumps({"failed": {rank: (name, why)}}))
        if rank == self.config.rank:
            self._kill_at = time.monotonic() + self._timeout_s
        elif rank == 0 and self._kill_at is None:  # rank 0 has failed, or this rank is disconnected
            self._kill_at = time.monotonic() + self.config.timeout_s

    def _shorten_timeout(self) -> None:
        if self._timeout_s > SHORT_TIMEOUT_S:
            self._timeout_s = SHORT_TIMEOUT_S
            for line in self._ranks.values():
                line.send("shorten")

    def _serve(self, source: Any) -> None:
        if source is self._listener:
            self._accept()
        elif source == self._rank.reads:
            texts = self._rank.take()
            if texts is None:  # the rank has terminated, or executes another program
                self._selector.unregister(source)
            for text in texts or ():
                self._obey(json.loads(text))
        elif (line := self._lines.get(source)) is not None:
            try:
                self._read(line)
            except Exception:  # an invalid message closes only this connection
                self._drop(line)

    def _obey(self, value: Any) -> None:
        if value == "bye":
            self._leaves = True
        elif value == "shorten":
            self._shorten_timeout()
        elif isinstance(value, dict):
            now, why = time.monotonic(), _SILENT.format(self._timeout_s)
            self._awaited = {int(rank): Awaited(name, now, self._timeout_s, why) for rank, name in value.items()}
        else:
            self._given_s += value

    def _read(self, line: Line) -> None:
        """Handle the received lines. May raise any ``Exception`` if a line is not a message of this run."""
        texts = line.take()
        if texts is None:
            self._drop(line)
        for text in texts or ():
            if line.rank < 0:
                if self._greet(line, text):
                    continue
                self._close(line)
                break
            line.heard = time.monotonic()
            if text == "bye":
                self._is_off = self._listener is None
                self._rank.send(json.dumps({"left": line.rank}))
                self._close(line)
                break
            if text == "shorten":
                self._shorten_timeout()
            elif text.startswith("{"):
                for rank, name, why in failures(text, self.config.world_size):
                    self._report(rank, name, why)
            elif text.strip("."):
                raise ValueError("invalid message")

    def _greet(self, line: Line, text: str) -> bool:
        """Handle a line from an unauthenticated connection; return whether the connection stays open."""
        config = self.config
        if self._listener is not None:
            found = greeting(text, line.challenge, config.secret, config.world_size)
            if found is None or found[0] in self._ranks or found[0] == config.rank:
                return False
            self._admit(line, *found)
            line.send(f".{proof(config.secret, line.challenge, 'hub')}")
            self._rank.send(json.dumps({"came": line.rank, "name": line.name}))
            if self._failed:
                line.send(json.dumps({"failed": self._failed}))
            return True
        if not line.challenge and text.startswith("off "):
            self._is_off = hmac.compare_digest(text[4:].encode(), proof(config.secret, "", "off").encode())
            if self._is_off:
                self._rank.send(json.dumps({"off": True}))
            return False
        if not line.challenge:
            line.challenge = text
            line.send(f"{config.rank} {proof(config.secret, text, config.rank)} {config.name}")
            return True
        if not hmac.compare_digest(text.encode(), f".{proof(config.secret, line.challenge, 'hub')}".encode()):
            return False
        self._admit(line, 0, line.name)
        self._was_welcome = True
        self._rank.send(json.dumps({"port": None}))
        return True

    def _admit(self, line: Line, rank: int, name: str) -> None:
        line.rank, line.name, line.heard = rank, name, time.monotonic()
        self._strangers.pop(line.reads, None)
        self._awaited.pop(rank, None)
        self._ranks[rank] = line

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            caller, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # for example, no file descriptor is free
            self._accepts_at = time.monotonic() + _PAUSE_S
            return
        with contextlib.suppress(OSError):
            line = self._add(caller)
            line.challenge = secrets.token_hex(16)
            line.send(line.challenge)

    def _connect(self, now: float) -> None:
        assert self.config.hub is not None
        host, port, name = self.config.hub
        self._again_at = now + _AGAIN_S
        try:
            limit_s = max(_AGAIN_S, self._away_since + self._timeout_s - now)
            self._add(socket.create_connection((host, port), limit_s)).name = name
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            if refused or time.monotonic() - self._away_since > self._timeout_s:
                gone = f"its heartbeat process at {host}:{port} is unreachable: {error}"
                self._report(0, name, ENDED if refused and self._was_welcome else gone)

    def _add(self, connected: socket.socket) -> Line:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = Line(connected.fileno(), connected.fileno(), opened=connected)
        self._selector.register(line.reads, selectors.EVENT_READ)
        self._lines[line.reads] = self._strangers[line.reads] = line
        return line

    def _close(self, line: Line) -> None:
        if self._lines.pop(line.reads, None) is not None and line.opened is not None:
            self._strangers.pop(line.reads, None)
            if self._ranks.get(line.rank) is line:
                del self._ranks[line.rank]
            self._selector.unregister(line.reads)
            line.opened.close()

    def _drop(self, line: Line) -> None:
        """Close a connection that ended without ``bye``, and prepare for the next connection of the same rank."""
        self._close(line)
        if line.rank < 0:
            return
        now = time.monotonic()
        if self._listener is None:
            self._away_since, self._again_at = now, 0.0
        elif line.rank not in self._failed:
            lives = self._is_alone and _PROCESS.match(line.name) and not self._has_ended(line.name)
            limit_s, why = (self._timeout_s, _SILENT.format(self._timeout_s)) if lives else (RETURN_S, ENDED)
            self._awaited[line.rank] = Awaited(line.name, now, limit_s, why)

    def _end(self) -> None:
        if not self._leaves:
            self._report(self.config.rank, self.config.name, ENDED)
        for line in self._ranks.values():
            line.send("bye" if self._leaves else json.dumps({"failed": self._failed}))


def greeting(text: str, challenge: str, secret: str, world_size: int) -> tuple[int, str] | None:
    """Verify the answer to a challenge. Return the rank and the name in the answer; ``None`` if it is invalid."""
    rank, given, name = (*text.split(" ", 2), "", "")[:3]
    if not hmac.compare_digest(given.encode(), proof(secret, challenge, rank).encode()):
        return None
    try:
        number = int(rank)
    except ValueError:
        return None
    return (number, printable(name)) if 0 <= number < world_size else None


def failures(text: str, world_size: int) -> list[tuple[int, str, str]]:
    """Parse a failure message into (rank, name, reason). Raises any ``Exception`` if the text is invalid."""
    found = [(int(rank), printable(name), printable(why)) for rank, (name, why) in json.loads(text)["failed"].items()]
    if not all(0 <= rank < world_size for rank, _, _ in found):
        raise ValueError("invalid rank")
    return found


def printable(text: str) -> str:
    """Return text from another process, truncated and without control characters, so that it can be printed."""
    return "".join(each if each.isprintable() else "?" for each in text[:_TEXT_LENGTH])


def proof(secret: str, challenge: str, who: int | str) -> str:
    """Return the proof (an HMAC) that this process knows the secret, valid for this challenge only."""
    return hmac.new(secret.encode(), f"{challenge} {who}".encode(), hashlib.sha256).hexdigest()


def _state(process: int) -> str:
    """Return the kernel's state of a process: ``T`` if suspended, ``t`` if stopped by a debugger; empty if unknown."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def main() -> None:
    """Run as a child of the rank. Arguments: the rank's process ID and, on the hub, the listening descriptor."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # Slurm sends these to every process of a job step
        signal.signal(number, signal.SIG_IGN)
    parent = int(sys.argv[1])  # os.getppid() differs if the rank has already terminated
    with contextlib.suppress(OSError, ValueError):  # the hub needs one file descriptor for each rank
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(OSError, AttributeError):  # a large pipe, so that heartbeats continue if the rank is slow
        fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20)
    with open(0, "rb", buffering=0, closefd=False) as given:  # unbuffered, to read only the first line
        config = Config(**json.loads(given.readline()))
    os.set_blocking(0, False)
    listener = socket.socket(fileno=int(sys.argv[2])) if sys.argv[2:] else None
    Heartbeat(config, parent, Line(0, 1, config.rank), listener).run()


if __name__ == "__main__":
    main()
