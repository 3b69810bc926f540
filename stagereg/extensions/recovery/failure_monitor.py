"""Detects failed ranks: keeps the :mod:`.heartbeat` process of this rank running, and reads the process's reports."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stagereg.base.address import listen, own_address
from stagereg.base.crash_report import signal_name
from stagereg.extensions.recovery.heartbeat import RETURN_S, Config, printable, proof

_log = logging.getLogger(__name__)
_HEARTBEAT = Path(__file__).with_name("heartbeat.py")
_NAMED = 400  # maximum characters of a sentence on failed ranks
_MOST_STARTS = 5  # maximum starts of a heartbeat process that dies repeatedly
_LASTS_S = 60.0  # seconds after which a heartbeat process is stable, so that the count of starts begins again
_PAUSE_S = 0.1  # seconds before the second restart, doubled for each later restart; the sum is below RETURN_S


class FailureMonitor:
    """The failure monitor of one rank, which detects failures of other ranks within ``timeout_s`` seconds.

    ``secret`` is the secret of the run. On rank 0, ``meet(address)`` publishes the address of the heartbeat process; on
    other ranks, ``meet(None)`` returns this address. A thread calls ``on_failure`` with a sentence on each failure. The
    same thread restarts the heartbeat process if the process dies before this rank. ``failed`` has for each failed rank
    a text that names its process and the failure.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_s: float,
        secret: str,
        meet: Callable[[list[Any] | None], list[Any]],
        on_failure: Callable[[str], None],
    ) -> None:
        self.failed: dict[int, str] = {}
        self._changed = threading.Condition()
        self._on_failure = on_failure
        name, hub = f"process {os.getpid()} on {socket.gethostname()}", None
        self._listener: socket.socket | None = None
        if rank == 0:  # the rank keeps the port open, for a restarted heartbeat process
            own = own_address()
            self._listener = listen(own)
            meet([own, self._listener.getsockname()[1], name])
        else:
            host, port, its = meet(None)  # untrusted, since any process may write to the store
            hub = [host, port, printable(its)]
        self._config = Config(rank, name, timeout_s, secret, hub, world_size)
        self._connected: dict[int, str] = {}  # on rank 0: the processes of the ranks that are connected
        self._given_s, self._shortened, self._closed = 0.0, False, False
        self._is_ready = False  # whether the wait for the hub (rank 0's heartbeat process) is over
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._keep, name="stagereg-monitor", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self.failed)

    def close(self) -> None:
        """Report to the other ranks that this rank terminates normally, which is not a failure. Idempotent."""
        with self._changed:
            self._closed = True
            self._send("bye")

    def give_time(self, seconds: float) -> None:
        """Delay by ``seconds`` the time at which this rank is killed for lack of heartbeats from rank 0."""
        with self._changed:
            self._given_s += seconds
            self._send(seconds)

    def shorten_timeout(self) -> None:
        """Shorten the failure detection timeout on all ranks, because this rank will exit soon. Idempotent."""
        with self._changed:
            self._shortened = True
            self._send("shorten")

    def sentence(self, seconds: float = 0.0) -> str:
        """Return a sentence on the failed ranks; wait at most ``seconds`` for a failure. Empty if no rank failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.failed, seconds)
            text = "; ".join(f"rank {rank} failed {why}" for rank, why in sorted(self.failed.items()))
        return f"{textwrap.shorten(text, _NAMED, placeholder=' and more')}." if text else ""

    def _keep(self) -> None:
        """Start a heartbeat process, and restart it when it dies, until this rank ends or restarts are exhausted."""
        starts, ended, rank = 0, "", self._config.rank
        while starts < _MOST_STARTS and not self._closed:
            if starts > 1:
                time.sleep(_PAUSE_S * 2 ** (starts - 2))
            starts, began = starts + 1, time.monotonic()
            try:
                process = self._start()
            except OSError as error:  # for example, no memory for another process
                ended = f"cannot be started: {error}"
                continue
            assert process.stdout is not None
            for line in process.stdout:
                if line.endswith(b"\n"):
                    self._note(json.loads(line))
            if process.wait() == 0:
                return
            code = process.returncode
            ended = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
            starts = starts if time.monotonic() - began < _LASTS_S else 1
            if not self._closed and starts < _MOST_STARTS:
                _log.warning("stagereg: The heartbeat process of rank %d %s; it is being restarted.", rank, ended)
        if not self._closed:
            without = "The run continues, but rank failures are no longer detected quickly."
            _log.warning("stagereg: The heartbeat process of rank %d %s, %d times. %s", rank, ended, starts, without)
        self._set_ready()
        self._do_without()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a heartbeat process, and resend the messages of the previous process to it. Raises: ``OSError``."""
        port = [] if self._listener is None else [self._listener.fileno()]
        with self._changed:
            # In its own session, the process survives a signal to the rank's process group and reports the rank's exit.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_HEARTBEAT), *map(str, (os.getpid(), *port))],
                pass_fds=port,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            awaited = {rank: name for rank, name in self._connected.items() if rank not in self.failed}
            about = (self._config._asdict(), awaited, self._given_s)
            for value in (*about, *["shorten"] * self._shortened, *["bye"] * self._closed):
                if value:
                    self._send(value)
            return self._process

    def _do_without(self) -> None:
        """Notify other ranks that this rank has no heartbeat process any more, so that they do not wait for it."""
        rank, name, secret, hub = self._config.rank, self._config.name, self._config.secret, self._config.hub
        if hub is not None:
            with contextlib.suppress(OSError), socket.create_connection((hub[0], hub[1]), RETURN_S) as line:
                challenge = line.makefile("rb").readline(100).decode(errors="replace").rstrip("\n")
                line.sendall(f"{rank} {proof(secret, challenge, rank)} {name}\nbye\n".encode())
                line.makefile("rb").read(1000)
            return
        assert self._listener is not None
        self._listener.setblocking(True)
        while True:
            try:
                caller, _ = self._listener.accept()
                with caller:
                    caller.sendall(f"off {proof(secret, '', 'off')}\n".encode())
            except OSError:
                time.sleep(_PAUSE_S)

    def _send(self, value: Any) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(json.dumps(value).encode() + b"\n")
                self._process.stdin.flush()

    def _set_ready(self) -> None:
        with self._changed:
            self._is_ready = True
            self._changed.notify_all()

    def _note(self, told: dict[str, Any]) -> None:
        if "port" in told or "off" in told:
            self._set_ready()
        if "off" in told:
            _log.warning("stagereg: Rank 0 has no heartbeat process: rank failures are no longer detected quickly.")
        if "came" in told:
            self._connected[told["came"]] = told["name"]
        self._connected.pop(told.get("left", -1), None)
        for rank, (name, why) in told.get("failed", {}).items():
            with self._changed:
                self.failed[int(rank)] = f"({name}): {why}"
                self._changed.notify_all()
            self._on_failure(self.sentence())
