"""What a rank knows of the others' lives: it has a :mod:`.pulse` beside it, which says so, and listens to theirs."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stagereg.address import own_address

_PULSE = Path(__file__).with_name("pulse.py")
_NAMED = 400  # characters of a message that name ranks, at most


class Watch:
    """The pulse of one rank, which detects a loss in ``notice_s`` seconds. All ranks construct theirs.

    ``meet`` publishes where rank 0's pulse is, and the secret of the run; given ``None``, it returns them. A thread of
    the watch calls ``on_lost`` with a sentence on each loss.
    """

    def __init__(
        self, rank: int, notice_s: float, meet: Callable[[list[Any] | None], list[Any]], on_lost: Callable[[str], None]
    ) -> None:
        self.lost: dict[int, str] = {}  # by rank: its process, and how it was lost
        self._changed = threading.Condition()
        self._on_lost = on_lost
        hub = None if rank == 0 else meet(None)
        secret = secrets.token_hex(16) if hub is None else hub.pop()
        name = f"process {os.getpid()} on {socket.gethostname()}"
        # A session of its own: what ends the rank with a signal to its group does not end what has to tell of it.
        self._pulse = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PULSE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._write({"rank": rank, "name": name, "notice_s": notice_s, "secret": secret, "hub": hub})
        assert self._pulse.stdout is not None
        first = json.loads(self._pulse.stdout.readline())
        if hub is None:
            meet([own_address(), first["port"], name, secret])
        self._note(first)
        threading.Thread(target=self._listen, name="stagereg-watch", daemon=True).start()

    def close(self) -> None:
        """This rank ends in order, which is no loss. Twice is harmless."""
        self._write("bye")

    def give_time(self, seconds: float) -> None:
        """Have the pulse leave this rank so much more time to end that does not hear of rank 0."""
        self._write(seconds)

    def hurry(self) -> None:
        """Have losses be noticed sooner, on all ranks: this one is to end. As often as one likes."""
        self._write("hurry")

    def sentence(self, seconds: float = 0.0) -> str:
        """Return a sentence on the ranks that are lost, or are so within that time; else nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost, seconds)
            text = "; ".join(f"rank {rank} {why}" for rank, why in sorted(self.lost.items()))
        return f"lost {textwrap.shorten(text, _NAMED, placeholder=' and more')}." if text else ""

    def _write(self, value: Any) -> None:
        assert self._pulse.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._pulse.stdin.write(json.dumps(value).encode() + b"\n")
            self._pulse.stdin.flush()

    def _listen(self) -> None:
        assert self._pulse.stdout is not None
        for line in self._pulse.stdout:
            self._note(json.loads(line))
        self._pulse.wait()

    def _note(self, said: dict[str, Any]) -> None:
        for rank, (name, why) in said.get("lost", {}).items():
            with self._changed:
                self.lost[int(rank)] = f"({name}): {why}"
                self._changed.notify_all()
            self._on_lost(self.sentence())
