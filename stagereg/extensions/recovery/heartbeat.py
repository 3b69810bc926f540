"""The heartbeat process of a rank, which proves to the other ranks that the rank is alive.

It is a process of its own, since a thread of the rank waits for the interpreter's lock, which compilers and libraries
may hold for longer than any timeout, and since a rank that is cut off may not end by itself. It needs the standard
library alone, and runs as a file, ``python -I -S heartbeat.py``, so that it starts in milliseconds.

All heartbeat processes are connected to that of rank 0, the *hub*, and each sends a dot a few times in ``timeout_s``. A
rank has failed at once if its process has ended, and after ``timeout_s`` if it was stopped or silent. The hub tells all
of each failure. A heartbeat process that hears nothing of the hub for so long is cut off, or the hub's machine is gone:
it cannot know which. If its rank has not ended ``timeout_s`` later, it kills the rank. A rank that a debugger holds has
not failed. If one rank is asked to end by a signal, all ranks are about to, and none waits for longer than
:data:`SHORT_TIMEOUT_S` for another that is silent or stopped.

If a heartbeat process dies before its rank, :mod:`.failure_monitor` starts another one. Rank 0 holds the port of the
hub and passes it on as an inherited socket, so the others connect to the same port again, and a closed port means that
rank 0 has ended. If a connection ends without ``bye``, the hub waits for the rank: on one machine as long as the
process of the rank lives, for ``timeout_s`` at most, and on several machines for :data:`RETURN_S`.

Anybody may connect to the hub. It sends a challenge, and reads one short line, ``RANK PROOF NAME``, of which it parses
nothing before the proof is right. The rank in its turn heeds nothing before the hub has proved itself.

The rank sends lines of JSON: first its :class:`Config`, ``{RANK: NAME}`` of the ranks that an earlier hub had, seconds
that it needs more before it is killed, ``"shorten"`` when it has got a signal, and ``"bye"`` when it ends in order. It
receives ``{"port": N}`` once its heartbeat process is connected, the port on the hub, ``{"failed": {RANK: [NAME,
WHY]}}``, ``{"came": RANK, "name": NAME}`` and ``{"left": RANK}`` on the hub, and ``{"off": true}`` if rank 0 has no
heartbeat process any more.
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

SHORT_TIMEOUT_S = 4.0  # seconds until a failure is detected at most, once a rank has been asked to end
RETURN_S = 3.0  # seconds in which a heartbeat process that was started again connects to the hub
ENDED = "its process has terminated"
_STOPPED = "its process was suspended (SIGSTOP, or a suspended job)"
_SILENT = "no heartbeat for {:g} s. The process is suspended, or its machine failed or is disconnected"
_SHUT_OUT = (
    "its heartbeat process accepted no connection of this rank for {:g} s. The process is suspended, other programs "
    "fill its port, or STAGEREG_SECRET differs between the ranks"
)

_MOST_BYTES = 1 << 16  # maximum size of a line
_GREETING_BYTES = 1024  # maximum size of a line before the other side has proved that it belongs to this run
_STRANGERS = 64  # connections without a proof at a time
_STRANGER_S, _CROWDED_S = 5.0, 3.0  # seconds that each has; and if others wait for its place
_PAUSE_S = 0.5  # seconds without accepting, once no file can be opened
_AGAIN_S = 0.2  # seconds between attempts to reach the hub
_WELCOME_S = 20.0  # seconds in which the hub lets a rank in: strangers may be before it
_TEXT_LENGTH = 300  # characters of a name or a reason: terminals show them
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
    """A connection to another heartbeat process, or to the rank: sends and takes lines, and never waits."""

    def __init__(self, reads: Any, writes: Any, rank: int = -1, opened: socket.socket | None = None) -> None:
        self.reads, self.writes, self.opened = reads, writes, opened
        self.rank = rank  # -1 until the other side has proved which one it is
        self.heard = time.monotonic()
        self.name, self.challenge = "", ""
        self._came = b""

    def send(self, text: str) -> None:
        """Send a line; drop the rest if the write would block."""
        with contextlib.suppress(OSError):
            os.write(self.writes, text.encode() + b"\n")

    def take(self) -> list[str] | None:
        """Return the lines that have arrived; ``None`` at the end of the connection, or if a line is too long."""
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
    """A rank whose connection has ended, and which may connect again."""

    name: str
    since: float
    limit_s: float
    why: str  # the rank has failed if it does not


class Heartbeat:
    """The heartbeat of one rank, whose process is ``parent``. The hub listens on ``listener``, or on a new port."""

    def __init__(self, config: Config, parent: int, rank: Line, listener: socket.socket | None = None) -> None:
        self.config, self._parent, self._rank = config, parent, rank
        self._timeout_s = config.timeout_s
        self._beat_s = min(1.0, config.timeout_s / 5)
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, Line] = {}  # to other heartbeat processes, by descriptor
        self._strangers: dict[int, Line] = {}  # connections without a proof
        self._ranks: dict[int, Line] = {}  # proven connections, by rank
        self._awaited: dict[int, Awaited] = {}  # by rank
        self._failed: dict[int, tuple[str, str]] = {}
        self._leaves = False  # whether the rank has sent that it ends
        self._ends_by: float | None = None
        self._is_off = False  # rank 0 has no heartbeat process any more, or has ended in order
        self._was_welcome = False
        self._away_since, self._again_at = time.monotonic(), 0.0  # since when the hub has not let this one in
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
        """Beat until the rank has ended, or has sent that it does."""
        last = time.monotonic()
        while True:
            self._open(time.monotonic())
            for key, _ in self._selector.select(self._beat_s / 4):
                self._serve(key.fileobj)
            now = time.monotonic()
            if now - last > 3 * self._beat_s:  # this process was not running, and heard nothing in that time
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
        """Accept connections while there is room for them; or connect to the hub, unless that is done."""
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
        """Whether this process can end: ranks that connect to the hub later would take the end for a failure."""
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
        """Whether the process of a rank has ended, which only ranks of the same machine can see."""
        process = _PROCESS.match(name)
        return self._is_alone and process is not None and _state(int(process[1])) in ("", "Z", "X")

    def _report(self, rank: int, name: str, why: str) -> None:
        """Report the failure of a rank to this rank, and to all ranks that are connected."""
        self._awaited.pop(rank, None)
        if rank in self._failed:
            return
        self._failed[rank] = name, why
        for line in (self._rank, *self._ranks.values()):
            line.send(json.dumps({"failed": {rank: (name, why)}}))
        if rank == self.config.rank:
            self._kill_at = time.monotonic() + self._timeout_s
        elif rank == 0 and self._kill_at is None:  # or this one is cut off
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
            if texts is None:  # it has ended, or runs another program
                self._selector.unregister(source)
            for text in texts or ():
                self._obey(json.loads(text))
        elif (line := self._lines.get(source)) is not None:
            try:
                self._read(line)
            except Exception:  # a bad message ends this connection alone
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
        """Handle the lines that arrived. Raises any ``Exception`` if one is not a message of this run."""
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
                raise ValueError("this is not a message")

    def _greet(self, line: Line, text: str) -> bool:
        """Take a line of one that has proved nothing yet; return whether it may stay."""
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
        except OSError:  # no file can be opened
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
        """Close a connection that has ended without ``bye``: wait for the rank, or connect to the hub again."""
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
    """Return rank and name if a line answers a challenge; ``None`` if not. Parses nothing before the proof is right."""
    rank, given, name = (*text.split(" ", 2), "", "")[:3]
    if not hmac.compare_digest(given.encode(), proof(secret, challenge, rank).encode()):
        return None
    try:
        number = int(rank)
    except ValueError:
        return None
    return (number, printable(name)) if 0 <= number < world_size else None


def failures(text: str, world_size: int) -> list[tuple[int, str, str]]:
    """Return ranks, names and reasons of a message on failures. Raises any ``Exception`` for another text."""
    found = [(int(rank), printable(name), printable(why)) for rank, (name, why) in json.loads(text)["failed"].items()]
    if not all(0 <= rank < world_size for rank, _, _ in found):
        raise ValueError("this rank does not exist")
    return found


def printable(text: str) -> str:
    """Return a text of another process for a terminal: bounded, and without characters that control one."""
    return "".join(each if each.isprintable() else "?" for each in text[:_TEXT_LENGTH])


def proof(secret: str, challenge: str, who: int | str) -> str:
    """Return what proves that this process knows the secret, as an answer to this challenge only."""
    return hmac.new(secret.encode(), f"{challenge} {who}".encode(), hashlib.sha256).hexdigest()


def _state(process: int) -> str:
    """Return the state of a process as the kernel has it: ``T`` if it is stopped, ``t`` if a debugger holds it."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def main() -> None:
    """Run as the child of a rank: arguments are its process id and, on the hub, the descriptor of the port."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # Slurm sends them to every process of a step
        signal.signal(number, signal.SIG_IGN)
    parent = int(sys.argv[1])  # and not that of now: the rank may have ended already
    with contextlib.suppress(OSError, ValueError):  # the hub has a connection of each rank
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(OSError, AttributeError):  # a rank may read late, and its heartbeat must not wait for it
        fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20)
    with open(0, "rb", buffering=0, closefd=False) as given:  # no byte more than the line
        config = Config(**json.loads(given.readline()))
    os.set_blocking(0, False)
    listener = socket.socket(fileno=int(sys.argv[2])) if sys.argv[2:] else None
    Heartbeat(config, parent, Line(0, 1, config.rank), listener).run()


if __name__ == "__main__":
    main()
