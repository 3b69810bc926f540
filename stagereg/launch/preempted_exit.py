"""How a run ends that was told to leave: what its ranks tell, the way of a signal to them, and what the user reads.

The parent of local ranks hands SIGTERM and SIGUSR1 on to them where all of them listen (``preemption``),
and waits for as long as they have. They agree on a step, save it and leave; that is no failure, so they end with 0 and
leave a file, and the parent ends with the code that says how it went. Ranks of ``torchrun`` end with that code
themselves.

Ending ranks that do not listen is left to :mod:`stagereg.launch.launch`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stagereg.errors import Preempted, Stopped
from stagereg.launch.preemption import SIGNALS, observed

__all__ = ["Left", "SignalForwarder", "announced", "deaf", "left", "note", "say"]

Left = Preempted | Stopped

_MARGIN_S = 5.0
"""Seconds that ranks may take to end, beyond those in which they have to be done."""
_SAME_S = 5.0
"""Seconds in which a signal that comes again is the same one."""


# -- the rank's side


@contextlib.contextmanager
def announced(file: Path | None) -> Iterator[None]:
    """Have ``file`` tell, for the time of a ``with`` block, whether this process listens, and how long it takes."""
    if file is None:
        yield
        return

    def tell(grace_s: float | None) -> None:
        with contextlib.suppress(OSError):  # of a folder that is gone with its parent, or a full disk
            if grace_s is None:
                file.unlink(missing_ok=True)
            else:
                _write(file, {"pid": os.getpid(), "grace_s": grace_s})

    with observed(tell):
        yield


def note(file: Path, error: Left) -> None:
    """Leave for the parent how this rank leaves."""
    if isinstance(error, Preempted):
        _write(file, {"received": error.received, "step": error.step, "directory": error.directory})
    else:
        _write(file, {"received": error.received, "why": error.why})


def deaf() -> None:
    """From here on, the two signals change nothing: all is done, and whoever still sends one would only spoil it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# -- the parent's side


class SignalForwarder:
    """The way of a signal to ranks that listen.

    Args:
        files: where each of them tells that it does (:func:`announced`).
        give_up: called on another thread when their time is up and they have not ended.
    """

    def __init__(self, files: Sequence[Path], give_up: Callable[[], None]) -> None:
        self.received: signal.Signals | None = None
        self._files = files
        self._give_up = give_up
        self._since = 0.0
        self._timer: threading.Timer | None = None

    def take(self, received: signal.Signals) -> bool:
        """Hand a signal on, or pass over one that is the same again; False where that is not for this one to do."""
        if received not in SIGNALS:
            return False
        if self.received is not None:
            return time.monotonic() < self._since + _SAME_S or received != self.received
        ranks = [_read(file) for file in self._files]
        if not all(ranks):
            return False
        self.received, self._since = received, time.monotonic()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank["pid"], received)
        self._timer = threading.Timer(max(rank["grace_s"] for rank in ranks) + _MARGIN_S, self._give_up)
        self._timer.daemon = True
        self._timer.start()
        return True

    def close(self) -> None:
        """The ranks have ended."""
        if self._timer is not None:
            self._timer.cancel()


def left(files: Sequence[Path]) -> Left | None:
    """What ranks have left with :func:`note`; ``None`` where none has."""
    for told in filter(None, map(_read, files)):
        received = signal.Signals(told["received"])
        if "step" in told:
            return Preempted(told["step"], told["directory"], received)
        return Stopped(received, told["why"])
    return None


def say(error: Left, hydra: Any) -> None:
    """Print how the run has left, and how it goes on.

    Args:
        error: that it has left with.
        hydra: the ``hydra`` node of the job's composed config.
    """
    print(_in_words(error, hydra) if isinstance(error, Preempted) else error, file=sys.stderr, flush=True)


def _in_words(error: Preempted, hydra: Any) -> str:
    from hydra.types import RunMode

    one = hydra.mode == RunMode.RUN
    own = Path(error.directory).is_relative_to(Path(hydra.runtime.output_dir))
    if not own or not _changes(hydra.run if one else hydra.sweep):
        return f"{error}; the same command goes on from there"
    sweep = None if one else Path(hydra.runtime.cwd, hydra.sweep.dir)
    there = f"checkpoint.dir={error.directory}" if sweep is None else f"hydra.sweep.dir={sweep}"
    saved = f"preempted by {error.received.name}: step {error.step} is saved"
    return f"{saved}; the same command with {there} goes on from there"


def _changes(run: Any) -> bool:
    """Whether the directory of a run, or of a sweep, is another one each time."""
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(run, resolve=False)
    return not isinstance(raw, dict) or "${now" in str(raw.get("dir"))


def _write(file: Path, told: dict[str, Any]) -> None:
    """Write a file that is there completely or not at all."""
    beside = file.with_name(f".{file.name}")
    beside.write_text(json.dumps(told))
    beside.replace(file)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None
