"""Detects which other ranks have failed: starts the :mod:`.heartbeat` process of this rank, and listens to it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stagereg.base.address import listen, own_address
from stagereg.base.crash_report import signal_name
from stagereg.extensions.recovery.heartbeat import Config, printable

_log = logging.getLogger(__name__)
_HEARTBEAT = Path(__file__).with_name("heartbeat.py")
_NAMED = 400  # characters of a message that name ranks, at most


class FailureMonitor:
    """The failure monitor of one rank, which detects a failure in ``timeout_s`` seconds. All ranks construct theirs.

    ``secret`` is that of the run. ``meet`` publishes where rank 0's heartbeat process is; given ``None``, it returns
    that. A thread calls ``on_failure`` with a sentence on each failure. If the heartbeat process dies, the other ranks
    take this rank for failed, so that thread kills this process.

    Attributes:
        failed: by rank: its process, and how it has failed.
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
        self._is_in = self._closed = False  # the hub knows this rank; it has ended in order
        name, hub = f"process {os.getpid()} on {socket.gethostname()}", None
        with contextlib.ExitStack() as opened:
            port: list[int] = []
            if rank == 0:
                own = own_address()
                listener = opened.enter_context(listen(own))
                meet([own, listener.getsockname()[1], name])
                port = [listener.fileno()]
            else:
                host, number, its = meet(None)  # through a store to which any process may write
                hub = [host, number, printable(its)]
            self._config = Config(rank, name, timeout_s, secret, hub, world_size)
            # A session of its own: what ends the rank by a signal to its group does not end what has to report it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_HEARTBEAT), *map(str, (os.getpid(), *port))],
                pass_fds=port,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        self._send(self._config._asdict())
        threading.Thread(target=self._listen, name="stagereg-monitor", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_in or self.failed)

    def close(self) -> None:
        """This rank ends in order, which is not a failure. Idempotent."""
        self._closed = True
        self._send("bye")

    def give_time(self, seconds: float) -> None:
        """Give this rank so much more time before it is killed, if it does not hear of rank 0."""
        self._send(seconds)

    def shorten_timeout(self) -> None:
        """Shorten the failure detection timeout, on all ranks: this one is to exit. Idempotent."""
        self._send("shorten")

    def sentence(self, seconds: float = 0.0) -> str:
        """Return a sentence on the ranks that have failed, or fail within that time; else nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self.failed, seconds)
            text = "; ".join(f"rank {rank} {why}" for rank, why in sorted(self.failed.items()))
        return f"lost {textwrap.shorten(text, _NAMED, placeholder=' and more')}." if text else ""

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        with self._changed, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                break
            told = json.loads(line)
            with self._changed:
                self._is_in = self._is_in or "port" in told
                for rank, (name, why) in told.get("failed", {}).items():
                    self.failed[int(rank)] = f"({name}): {why}"
                self._changed.notify_all()
            if "failed" in told:
                self._on_failure(self.sentence())
        code = self._process.wait()
        if not self._closed:
            how = f"died of {signal_name(-code)}" if code < 0 else f"exited with code {code}"
            _log.error("stagereg: The heartbeat process of rank %d %s, so this rank ends.", self._config.rank, how)
            os.kill(os.getpid(), signal.SIGKILL)
