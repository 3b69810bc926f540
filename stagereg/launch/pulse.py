"""The pulse of a rank: a small process beside it, which tells the pulses of the others that the rank is alive.

A process of its own, since a thread of the rank waits for the interpreter's lock, which compilers and libraries may
hold for longer than any time-out; and since somebody has to end a rank that is cut off and does not end by itself. It
needs the standard library alone, and runs as a file, ``python -I -S pulse.py``, so that it starts in milliseconds.

All pulses are connected to that of rank 0, the *hub*, and each sends a dot a few times in ``notice_s``. That a rank's
process has ended is told to all at once; that it was stopped, or that nothing was heard of it, after ``notice_s``. One
that hears nothing of the hub for so long is cut off, or the hub's machine is gone: it cannot know which. If it has not
ended ``notice_s`` later, its pulse kills it. A rank that a debugger holds is not lost. Where one is asked to end by a
signal, all ranks are about to, and none waits for longer than :data:`HURRIED_S` for one that is silent or stopped.

From the rank come lines of JSON: first its :class:`Config`, seconds that it needs more before it is killed,
``"hurry"`` when it has got a signal, and ``"bye"`` when it has ended in order. To it go
``{"port": N}`` once it is connected, the port on the hub, and ``{"lost": {RANK: [NAME, WHY]}}``.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import time
from typing import Any, NamedTuple

HURRIED_S = 4.0  # seconds in which a loss is noticed at most once a rank has been asked to end
_MOST_BYTES = 1 << 16  # that a line may have
ENDED = "its process has ended"
_STOPPED = "it was stopped (SIGSTOP, or a suspended job)"


class Config(NamedTuple):
    """What a pulse has to know."""

    rank: int
    name: str  # of the rank's process, for messages
    notice_s: float
    secret: str  # of the run
    hub: list[Any] | None  # host, port and name of the hub; ``None`` on the hub itself


class Line:
    """A connection to another pulse, or to the rank: sends and takes lines, and never waits."""

    def __init__(self, reads: Any, writes: Any) -> None:
        self.reads, self.writes, self.rank, self.heard = reads, writes, -1, time.monotonic()
        self.name, self.challenge = "", ""  # the challenge is not answered yet
        self._came = b""

    def send(self, text: str) -> None:
        """Send one; what does not go at once is lost, with who does not read."""
        with contextlib.suppress(OSError):
            os.write(self.writes, text.encode() + b"\n")

    def take(self) -> list[str] | None:
        """Return those that have come; ``None`` at the end."""
        try:
            data = os.read(self.reads, _MOST_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._came = (self._came + data).split(b"\n")
        return None if not data or len(self._came) > _MOST_BYTES else [line.decode(errors="replace") for line in lines]


class Pulse:
    """That of one rank, whose process ``parent`` is."""

    def __init__(self, config: Config, parent: int, rank: Line) -> None:
        self.config, self._parent, self._rank = config, parent, rank
        self._notice_s = config.notice_s
        self._beat_s = min(1.0, config.notice_s / 5)
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, Line] = {}  # to other pulses, by descriptor
        self._sockets: dict[int, socket.socket] = {}
        self._lost: dict[int, tuple[str, str]] = {}
        self._said = False  # whether the rank has said that it ends
        self._welcome = config.hub is None  # whether the hub knows this one
        self._stopped_since: float | None = None
        self._kill_at: float | None = None
        self._given_s = 0.0  # which the rank may live longer than that
        self._listener: socket.socket | None = None
        self._selector.register(rank.reads, selectors.EVENT_READ)
        if config.hub is None:
            self._listener = _listen()
            self._selector.register(self._listener, selectors.EVENT_READ)
            rank.send(json.dumps({"port": self._listener.getsockname()[1]}))
        else:
            self._connect(*config.hub)

    def run(self) -> None:
        """Beat until the rank has ended, or has said that it does."""
        last = time.monotonic()
        while True:
            for key, _ in self._selector.select(self._beat_s / 4):
                self._serve(key.fileobj)
            now = time.monotonic()
            if now - last > 3 * self._beat_s:  # this process was not running, and knows nothing of that time
                for line in self._lines.values():
                    line.heard = now
            if self._said or os.getppid() != self._parent:
                return self._end()
            if now - last >= self._beat_s:
                last = now
                self._beat(now)
            self._look(now)

    def _beat(self, now: float) -> None:
        stopped = _state(self._parent) == "T"
        self._stopped_since = (self._stopped_since or now) if stopped else None
        if self._stopped_since is not None and now - self._stopped_since > self._notice_s:
            self._tell(self.config.rank, self.config.name, _STOPPED)
        for line in self._lines.values():
            line.send(".")

    def _look(self, now: float) -> None:
        for line in [*self._lines.values()]:
            if line.rank >= 0 and now - line.heard > self._notice_s:
                why = f"nothing was heard of it for {self._notice_s:g} s: frozen, or its machine is gone or cut off"
                self._tell(line.rank, line.name, why)
                self._close(line)
        if self._kill_at is not None and now > self._kill_at + self._given_s:
            os.kill(self._parent, signal.SIGKILL)

    def _tell(self, rank: int, name: str, why: str) -> None:
        if rank in self._lost:
            return
        self._lost[rank] = name, why
        told = json.dumps({"lost": {rank: (name, why)}})
        for line in (self._rank, *self._lines.values()):
            line.send(told)
        if rank == self.config.rank:
            self._kill_at = time.monotonic() + self._notice_s
        elif rank == 0 and self.config.hub is not None and self._kill_at is None:  # or this one is cut off
            self._kill_at = time.monotonic() + self.config.notice_s

    def _hurry(self) -> None:
        if self._notice_s > HURRIED_S:
            self._notice_s = HURRIED_S
            for line in self._lines.values():
                line.send("hurry")

    def _serve(self, source: Any) -> None:
        if source is self._listener:
            self._accept()
        elif source == self._rank.reads:
            for text in self._rank.take() or ():
                if text == '"bye"':
                    self._said = True
                elif text == '"hurry"':
                    self._hurry()
                else:
                    self._given_s += float(text)
        elif (line := self._lines.get(source)) is not None:
            self._read(line)

    def _read(self, line: Line) -> None:
        texts = line.take()
        if texts is None:
            self._close(line)
            if line.rank >= 0:
                self._tell(line.rank, line.name, ENDED)
        line.heard = time.monotonic()
        for text in texts or ():
            if text == "bye" or (line.rank < 0 and not self._greet(line, text)):
                self._close(line)
                break
            if text == "hurry":
                self._hurry()
            if text == "." and not self._welcome:
                self._welcome = True
                self._rank.send(json.dumps({"port": None}))
            if text.startswith("{"):
                for rank, (name, why) in json.loads(text)["lost"].items():
                    self._tell(int(rank), name, why)

    def _greet(self, line: Line, text: str) -> bool:
        """Take the first line: on the hub ``RANK PROOF``; elsewhere the hub's challenge, which is answered."""
        if self._listener is None:
            line.rank, config = 0, self.config
            line.send(f"{config.rank} {_proof(config.secret, text, config.rank)} {config.name}")
            return True
        rank, proof, line.name = (*text.split(" ", 2), "", "")[:3]
        known = _proof(self.config.secret, line.challenge, int(rank)) if rank.isdecimal() else ""
        if not known or not hmac.compare_digest(proof.encode(), known.encode()):
            return False
        line.rank = int(rank)
        line.send(".")
        return True

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            caller, _ = self._listener.accept()
        except OSError:
            return
        line = self._add(caller)
        line.challenge = secrets.token_hex(16)
        line.send(line.challenge)
        if self._lost:
            line.send(json.dumps({"lost": self._lost}))

    def _connect(self, host: str, port: int, name: str) -> None:
        try:
            self._add(socket.create_connection((host, port), self.config.notice_s)).name = name
        except OSError as error:
            self._tell(0, name, f"its pulse at {host}:{port} cannot be reached: {error}")

    def _add(self, connected: socket.socket) -> Line:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = Line(connected.fileno(), connected.fileno())
        self._lines[line.reads], self._sockets[line.reads] = line, connected
        self._selector.register(line.reads, selectors.EVENT_READ)
        return line

    def _close(self, line: Line) -> None:
        if self._lines.pop(line.reads, None) is not None:
            self._selector.unregister(line.reads)
            self._sockets.pop(line.reads).close()

    def _end(self) -> None:
        if not self._said:
            self._tell(self.config.rank, self.config.name, ENDED)
        for line in self._lines.values():
            line.send("bye" if self._said else json.dumps({"lost": self._lost}))


def _proof(secret: str, challenge: str, rank: int) -> str:
    return hmac.new(secret.encode(), f"{challenge} {rank}".encode(), hashlib.sha256).hexdigest()


def _listen() -> socket.socket:
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", 0), backlog=512)


def _state(process: int) -> str:
    """Return the state of a process as the kernel has it: ``T`` if it is stopped, ``t`` if a debugger holds it."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def main() -> None:
    """Run as the child of a rank."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # Slurm sends them to every process of a step
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    with open(0, "rb", buffering=0, closefd=False) as given:  # no byte more than the line
        config = Config(**json.loads(given.readline()))
    os.set_blocking(0, False)
    Pulse(config, parent, Line(0, 1)).run()


if __name__ == "__main__":
    main()
