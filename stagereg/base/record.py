"""Record a run's events as JSON lines in its directory. All metrics of the run are computed from these events.

Each rank writes one file with one object per line. Each object has ``"event"``, ``"t"`` (:func:`now`) and ``"run"``,
the name of the attempt, which separates programs that share a directory. A line is one unbuffered write, so a killed
process loses at most one line. NaN and infinity are written as null. A step takes about 70 bytes and a few
microseconds. Without a recorder, events are dropped. A failure of the recorder never stops training. A forked child
records nothing. :mod:`stagereg.sweep.run` reads the events.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import numbers
import operator
import os
import platform
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

from stagereg.base.machine import memory
from stagereg.base.small_files import open_regular
from stagereg.errors import ConfigError, Preempted, Stopped

_log = logging.getLogger(__name__)

FORMAT = 1  # format number in the `start` event; readers reject newer formats
FILES = "metrics*.jsonl"
"""Pattern of the files in a run's directory: ``metrics.jsonl`` of rank 0, ``metrics.rank3.jsonl`` of rank 3."""

_EPOCH_S = time.time() - time.perf_counter()


class _Recorder:
    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        # Reentrant, because a signal handler may emit an event while this thread holds the lock.
        self._lock = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(self._file).st_size
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def write(self, line: bytes) -> None:
        try:
            with self._lock:
                if self._file is None:
                    return
                if self._torn:  # a killed process may have left an incomplete line
                    line, self._torn = b"\n" + line, False
                if os.write(self._file, line) < len(line):
                    raise OSError("the disk has no space for a whole line")
        except OSError as error:
            self.close()
            _warn(self.path, error)

    def close(self) -> None:
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                with contextlib.suppress(OSError):
                    os.close(file)


# Global because code that emits events, on any thread, has no reference to the run. One run records at a time.
_recorder: _Recorder | None = None


class LogListener(Protocol):
    """Receives all values that users log, even if this process does not record events."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the values of a step, on the thread that logs. Must neither raise nor block."""


_LATEST = ("resumed", "step", "stall")
latest: dict[str, Mapping[str, Any]] = {}
"""The latest events that show whether this process has taken a step, even if it does not record. Global like the
recorder. A sweep that runs its jobs in one process clears it."""
# Global like the recorder.
_listeners: weakref.WeakSet[LogListener] = weakref.WeakSet()


def _forget() -> None:
    global _recorder
    _recorder = None


os.register_at_fork(after_in_child=_forget)
os.register_at_fork(after_in_child=_listeners.clear)


@contextlib.contextmanager
def recording(directory: Path, rank: int, world_size: int, run: str = "", **facts: Any) -> Iterator[None]:
    """Record the events of this process within a ``with`` block, and how the block ends.

    Errors of the block propagate; the recording itself raises no errors. A process has one recording at a time: inside
    another recording, this function does nothing, and events go to the outer recording. ``run`` is the name of the
    attempt (:func:`attempt_of`), by default the first attempt of a new run. The ``start`` event includes ``facts``.
    """
    global _recorder
    path = Path(directory) / file_name(rank)
    try:
        if _recorder is not None:
            raise OSError(f"this process already records in {_recorder.path}")
        mine = _recorder = _Recorder(path, run or attempt_of(new_run(), 0))
    except OSError as error:
        _warn(path, error)
        yield
        return
    began = time.perf_counter()
    ending: dict[str, Any] = {"status": "completed"}
    try:
        emit("start", rank=rank, world_size=world_size, **_about_process(), **facts)
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            ending = {"status": "failed", "error": _in_one_line(error)}
        if isinstance(error, Preempted):
            ending = {"status": "preempted", "error": str(error)}
        raise
    finally:
        if _recorder is mine:
            peak_rss = 0  # unknown
            with contextlib.suppress(OSError, LookupError):
                # `ru_maxrss` would include the parent's peak before this process started (`exec_mmap` of Linux).
                peak_rss = memory("VmHWM")
            emit("end", seconds=time.perf_counter() - began, **ending, peak_rss=peak_rss)
            _forget()
            mine.close()


def emit(event: str, /, **fields: Any) -> None:
    """Record an event if this process records. Thread-safe; never raises. Values that JSON lacks become strings."""
    if event in _LATEST and (event != "resumed" or not latest):
        latest[event] = fields
    recorder = _recorder
    if recorder is not None:
        recorder.write(_line({"event": event} | fields | {"event": event, "t": now(), "run": recorder.run}))


def is_recording() -> bool:
    """Return whether this process records events, as each job of ``stagereg.main`` does."""
    return _recorder is not None


def new_run() -> str:
    """Return a name for a run that is unique in its directory."""
    return os.urandom(3).hex()


def attempt_of(run: str, number: int | str) -> str:
    """Return the name of an attempt, the value of ``"run"`` in its events."""
    return f"{run}.{number}"


def run_of(attempt: str) -> str:
    """Return the run that an attempt belongs to."""
    return attempt.partition(".")[0]


def now() -> float:
    """Return monotonic seconds since the epoch; equal on all ranks of a machine except for clock drift."""
    return _EPOCH_S + time.perf_counter()


def log(step: int, **values: SupportsFloat) -> None:
    """Record numbers for a training step. ``stagereg report`` shows ``loss`` and ``samples``.

    Reading a tensor on an accelerator waits for the device, so log every few steps instead of at each step. The
    checkpoint of a step contains the values that rank 0 has logged for that step before the save, even if the process
    does not record. Values that are logged later are not part of the checkpoint.

    Args:
        step: the training step, the number that is passed to ``Checkpointer.maybe_save``.
        **values: real numbers or zero-dimensional tensors; NaN and infinity are recorded as null. ``samples`` is the
            number of samples that this rank has processed in this step, ``loss`` the loss of this step.

    Raises:
        ConfigError: ``step`` is not a whole number, or a value is not a real number.
    """
    try:
        whole = operator.index(step)
    except TypeError:
        raise ConfigError(f"stagereg.log: step={step!r} is not a whole number") from None
    found = {name: _real(name, value) for name, value in values.items()}
    emit("log", step=whole, values=found)
    for listener in list(_listeners):
        listener.add(whole, found)


def listen(listener: LogListener) -> None:
    """Pass values that are logged from now on to ``listener``. Holds a weak reference."""
    _listeners.add(listener)


def file_name(rank: int) -> str:
    """Return the name of a rank's file in the run's directory."""
    return f"metrics.rank{rank}.jsonl" if rank else "metrics.jsonl"


def _about_process() -> dict[str, Any]:
    from stagereg.base.version import __version__

    found: dict[str, Any] = {"format": FORMAT, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    found |= {"pid": os.getpid(), "host": platform.node(), "stagereg": __version__}
    for distribution in ("torch", "hydra-core"):
        found[distribution] = None
        with contextlib.suppress(Exception):  # not installed, or its metadata is unreadable
            found[distribution] = importlib.metadata.version(distribution)
    return found | {"python": platform.python_version()}


def _real(name: str, value: Any) -> float:
    shape = getattr(value, "shape", None)
    if isinstance(value, numbers.Real) or (getattr(value, "ndim", None) == 0 and hasattr(value, "__float__")):
        with contextlib.suppress(Exception):  # a method of a user-defined class may raise any error
            return float(value.detach() if hasattr(value, "detach") else value)
    shown = f"a {type(value).__name__} of shape {list(shape)}" if shape else f"{value!r:.60}"
    raise ConfigError(f"stagereg.log: {name} must be a real number or a zero-dimensional tensor, not {shown}")


def _line(fields: dict[str, Any]) -> bytes:
    try:
        text = _encode(fields)
    except Exception:  # a value cannot be encoded, so encode the fields one at a time
        text = _encode({str(name): plain(value) for name, value in fields.items()})
    return text.encode("ascii") + b"\n"


def plain(value: Any) -> Any:
    """Convert a value to JSON types, with null for NaN and infinity; ``None`` if JSON cannot represent the value."""
    try:
        return json.loads(json.dumps(value, default=_number_or_text, skipkeys=True), parse_constant=lambda name: None)
    except Exception:  # the value contains itself, or a method of a user-defined class raises
        return None


def _number_or_text(value: Any) -> int | float | str:
    for number in (operator.index, float):
        if not isinstance(value, (bytes, bytearray)):
            with contextlib.suppress(Exception):
                return number(value)
    return str(value)


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_number_or_text).encode


def _in_one_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})" + (f": {error}" if isinstance(error, Stopped) else "")
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # the method __str__ of a user-defined class raises
        lines = []
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def _warn(path: Path, error: OSError) -> None:
    _log.warning("stagereg: Stopped recording in %s: %s. Training continues.", path, error)
