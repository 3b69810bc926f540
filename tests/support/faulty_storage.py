"""The storage ``dcp``, which fails on purpose at a moment of the commit protocol, as a disk would.

One at a time in a process: the moments do not show which checkpointer they belong to.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

import stagereg
import stagereg.checkpoint.store.failpoints as failpoints
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.store.open_store import is_url

from .crash_points import POINTS

_HIDDEN = ("agreed", "writing", "flushed", "written", "marked", "held", "described")
"""Moments at which the directory of the save has its first name still."""


class FaultyStorage(DcpStorage):
    """Fails where it is asked to.

    Args:
        fault: the name of an error, such as ``"ENOSPC"``, or ``"hang"``: a call that does not come back.
        at: the moment of ``crash_points.POINTS`` at which it comes; ``"writing"`` is in the middle of a file.
        after_bytes: with ``at="writing"``: how many bytes this rank's files take before that.
        saves: which of this process's saves fail, counted from 1; ``None`` for all.
        ranks: on which ranks; ``None`` for all.
        release: a path; what hangs goes on when there is a file.
    """

    def __init__(
        self,
        fault: str = "EIO",
        at: str = "writing",
        after_bytes: int = 0,
        saves: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
        release: str | None = None,
    ) -> None:
        assert at in POINTS
        self.fault, self.at, self.after_bytes, self.release = fault, at, after_bytes, release
        self.saves, self.ranks = saves, ranks
        self._count = self._rank = 0
        super().__init__()
        self.wraps = stagereg.build("storage", "dcp")  # reads what it wrote

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin another checkpoint, the next by the count of ``saves``."""
        super().reset(checkpoint_id)
        if checkpoint_id is not None:
            self._count += 1
            self._rank = dist.get_rank() if dist.is_initialized() else 0
            self._listen()

    def write_data(self, *args: Any) -> Any:
        """Write, maybe in another process."""
        self._listen()
        return super().write_data(*args)

    def _listen(self) -> None:
        wrong = (self.saves is None or self._count in self.saves) and (self.ranks is None or self._rank in self.ranks)
        failpoints.watch(self._reached if wrong else None)

    def _reached(self, name: str) -> None:
        if name in _HIDDEN and not is_url(self.path) and not os.path.isdir(self.path):
            failpoints.watch(None)  # of another save, whoever makes it, since what this one wrote has gone away
            return
        if name != self.at or (name == "writing" and self._written() < self.after_bytes):
            return
        failpoints.watch(None)
        if self.fault != "hang":
            number = getattr(errno, self.fault)
            raise OSError(number, os.strerror(number), self.path)
        while self.release is None or not os.path.exists(self.release):
            time.sleep(0.02)

    def _written(self) -> int:
        return sum(file.stat().st_size for file in Path(self.path).glob(f"__{self._rank}_*"))


def flip(path: Path, bit: int | None = None) -> None:
    """Flip a bit of a file, by default one in the middle."""
    content = bytearray(path.read_bytes())
    at = 4 * len(content) if bit is None else bit
    content[at // 8] ^= 1 << at % 8
    path.write_bytes(content)
