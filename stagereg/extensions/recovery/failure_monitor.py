"""What a rank knows of the others' lives: it has a :mod:`.pulse` beside it, which says so, and listens to theirs."""

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
from stagereg.extensions.recovery.heartbeat import RETURN_S, printable, proof

_log = logging.getLogger(__name__)
_PULSE = Path(__file__).with_name("heartbeat.py")
_NAMED = 400  # characters of a message that name ranks, at most
_MOST_STARTS = 5  # starts of a pulse that dies again and again
_LASTS_S = 60.0
_PAUSE_S = 0.1  # before the second start once more, twice as long before each later one: in all less than RETURN_S


class FailureMonitor:
    """The pulse of one rank, which detects a loss in ``timeout_s`` seconds. All ranks construct theirs.

    ``secret`` is that of the run. ``meet`` publishes where rank 0's pulse is; given ``None``, it returns that. A thread
    of the watch calls ``on_lost`` with a sentence on each loss, and starts a pulse again that ends before its rank.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_s: float,
        secret: str,
        meet: Callable[[list[Any] | None], list[Any]],
        on_lost: Callable[[str], None],
    ) -> None:
        self.lost: dict[int, str] = {}  # by rank: its process, and how it was lost
        self._changed = threading.Condition()
        self._on_lost = on_lost
        name = f"process {os.getpid()} on {socket.gethostname()}"
        self._listener: socket.socket | None = None
        if rank == 0:  # the port is the rank's, so that a pulse that is started again has it too
            own = own_address()
            self._listener = listen(own)
            meet([own, self._listener.getsockname()[1], name])
        self._hub = None
        if rank > 0:
            host, port, its = meet(None)  # through a store to which any process may write
            self._hub = [host, port, printable(its)]
        self._about = rank, name, secret
        self._config = {"rank": rank, "name": name, "timeout_s": timeout_s, "secret": secret, "hub": self._hub}
        self._config["world_size"] = world_size
        self._here: dict[int, str] = {}  # on rank 0: the names of the others that have come, and not left
        self._given_s, self._hurries, self._closed = 0.0, False, False
        self._is_ready = False  # the hub knows this rank, or there is none
        self._pulse: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._keep, name="stagereg-watch", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self.lost)

    def close(self) -> None:
        """This rank ends in order, which is no loss. Twice is harmless."""
        with self._changed:
            self._closed = True
            self._write("bye")

    def give_time(self, seconds: float) -> None:
        """Have the pulse leave this rank so much more time to end that does not hear of rank 0."""
        with self._changed:
            self._given_s += seconds
            self._write(seconds)

    def shorten_timeout(self) -> None:
        """Shorten the failure detection timeout, on all ranks: this one is to exit. Idempotent."""
        with self._changed:
            self._hurries = True
            self._write("hurry")

    def sentence(self, seconds: float = 0.0) -> str:
        """Return a sentence on the ranks that are lost, or are so within that time; else nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost, seconds)
            text = "; ".join(f"rank {rank} {why}" for rank, why in sorted(self.lost.items()))
        return f"lost {textwrap.shorten(text, _NAMED, placeholder=' and more')}." if text else ""

    def _keep(self) -> None:
        """Start a pulse, and start another one when it ends, until the rank does or none lasts."""
        starts, ended, rank = 0, "", f"rank {self._about[0]}"
        while starts < _MOST_STARTS and not self._closed:
            if starts > 1:
                time.sleep(_PAUSE_S * 2 ** (starts - 2))
            starts, began = starts + 1, time.monotonic()
            try:
                pulse = self._start()
            except OSError as error:  # no memory for one more process
                ended = f"could not be started: {error}"
                continue
            assert pulse.stdout is not None
            for line in pulse.stdout:
                if line.endswith(b"\n"):
                    self._note(json.loads(line))
            if pulse.wait() == 0:
                return
            code = pulse.returncode
            ended = f"died of {signal_name(-code)}" if code < 0 else f"exited with code {code}"
            starts = starts if time.monotonic() - began < _LASTS_S else 1
            if not self._closed and starts < _MOST_STARTS:
                _log.warning("stagereg: The heartbeat process of %s %s, and is started again.", rank, ended)
        if not self._closed:
            without = "The run continues without it, and ranks no longer detect that others fail."
            _log.warning("stagereg: The heartbeat process of %s %s, %d times. %s", rank, ended, starts, without)
        self._set_ready()
        self._do_without()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a pulse, and tell it what the previous pulse knew. Raises: ``OSError``."""
        given = [] if self._listener is None else [self._listener.fileno()]
        with self._changed:
            # A session of its own: what ends the rank with a signal to its group does not end what has to tell of it.
            self._pulse = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PULSE), *map(str, (os.getpid(), *given))],
                pass_fds=given,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            told = {rank: name for rank, name in self._here.items() if rank not in self.lost}
            for value in (self._config, told, self._given_s, *["hurry"] * self._hurries, *["bye"] * self._closed):
                if value:
                    self._write(value)
            return self._pulse

    def _do_without(self) -> None:
        """Tell the pulses of the others that this rank has none any more, and so none is missed."""
        rank, name, secret = self._about
        if self._hub is not None:
            with contextlib.suppress(OSError), socket.create_connection((self._hub[0], self._hub[1]), RETURN_S) as line:
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

    def _write(self, value: Any) -> None:
        if self._pulse is not None and self._pulse.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._pulse.stdin.write(json.dumps(value).encode() + b"\n")
                self._pulse.stdin.flush()

    def _set_ready(self) -> None:
        with self._changed:
            self._is_ready = True
            self._changed.notify_all()

    def _note(self, said: dict[str, Any]) -> None:
        if "port" in said or "off" in said:
            self._set_ready()
        if "off" in said:
            _log.warning("stagereg: Rank 0 has no heartbeat process any more: rank failures are not detected.")
        if "came" in said:
            self._here[said["came"]] = said["name"]
        self._here.pop(said.get("left", -1), None)
        for rank, (name, why) in said.get("lost", {}).items():
            with self._changed:
                self.lost[int(rank)] = f"({name}): {why}"
                self._changed.notify_all()
            self._on_lost(self.sentence())
