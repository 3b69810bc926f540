"""One process that reads the inputs of ``make fuzz``, and watches itself meanwhile: a worker of ``fuzz.py``."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed.checkpoint.metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

import stagereg

from . import fuzz_inputs, fuzz_notes
from .fuzz import BROKEN, HUNG, LIMIT_S, Finding

MOST_MEMORY = 1 << 30  # bytes of address space that a worker may map, beyond what it has mapped at the beginning
_MOST_RESIDENT = 256 << 20  # bytes that a reading may add to the peak of the resident memory
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {
    f"os.{each}" for each in ["mkdir", "rename", "remove", "rmdir", "link", "symlink", "truncate", "chmod", "chown"]
}
_FORBIDDEN = {f"os.{each}" for each in ["posix_spawn", "exec", "fork", "forkpty", "system"]}
_FORBIDDEN |= {"subprocess.Popen", "pty.spawn", "ctypes.dlopen", "webbrowser.open", "sys.setprofile"}
_LEAVES_S = 2.0  # seconds in which the threads and files of a reading go
_UNPICKLED = ("torch", "collections", "stagereg", "numpy")  # packages whose names a reading may look up
_FOREIGN_MODULES = {"evil", "this", "antigravity"}  # which the inputs name


class Hang(BaseException):
    """A reading takes too long."""


class Watch:
    """Watches readings in this process: audit events, memory, time, and what is left changed."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.folder = os.path.realpath(scratch), os.path.realpath(scratch)
        self.seen: list[str] = []
        self._armed = False
        self._home: dict[str, bytes] = {}
        sys.addaudithook(self._hear)  # there is no way to take one back

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._armed:
            return
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, int) or not (flags & _WRITES if not mode else set(mode) & set("wax+")):
                return
            self._expect_inside(event, path)
        elif event in _CHANGES:
            if event in ("os.rename", "os.link"):
                self._expect_inside(event, arguments[0], arguments[2])
                self._expect_inside(event, arguments[1], arguments[3])
            else:
                self._expect_inside(event, arguments[event == "os.symlink"], arguments[-1])
        elif event in _FORBIDDEN or (event == "pickle.find_class" and arguments[0].split(".")[0] not in _UNPICKLED):
            self.seen.append(f"{event} {arguments!r:.100}")

    def _expect_inside(self, event: str, path: Any, folder: Any = None) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):  # a descriptor, which was opened before
            return
        path = os.fsdecode(path)
        if not os.path.isabs(path) and isinstance(folder, int) and folder >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        full = os.path.abspath(path)
        if not full.startswith((self.folder + os.sep, "/proc/self/")) and full not in (self.folder, os.devnull):
            self.seen.append(f"{event} {path:.100}")

    def run(self, action: Any) -> Iterator[tuple[str, str, str]]:
        """Run a reading, and yield what is wrong: in short, where, and all of it; the last is how it has ended."""
        from tests.benchmarks.fuzz_inputs import Wrong

        gc.collect(0)
        before, peak, self.seen = _settings(), _peak(), []
        self._home = _content(Path(self.scratch, "home"))
        ended = "read"
        handler = signal.signal(signal.SIGALRM, _hang)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        self._armed = True
        try:
            action()
        except stagereg.StageregError as error:
            ended = "refused"
            if any(isinstance(each, MemoryError) or "allocate memory" in str(each) for each in _chain(error)):
                yield "takes too much memory", _place(error), repr(error)
        except Wrong as error:
            ended = "wrong"
            yield error.args[0], _place(error), " ".join(error.args)
        except Hang as error:
            ended = "hangs"
            yield f"hangs for {LIMIT_S:g} s", _place(error), _trace(error)
        except BaseException as error:
            ended = "raises"
            yield type(error).__name__, _place(error), _trace(error)
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
        for each in self.seen:
            yield f"does {each.partition(' ')[0]}", "", each
        if (grown := _peak() - peak) > _MOST_RESIDENT:
            yield "takes too much memory", "", f"{grown >> 20} MiB"
        if changed := _differences(before, _settings()):
            yield f"leaves changed: {', '.join(changed)}", "", ""
        if (home := _content(Path(self.scratch, "home"))) != self._home:
            yield "changes files of the user", "", str({*home.items()} ^ {*self._home.items()})[:300]
        yield ended, "", ""


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _trace(error: BaseException) -> str:
    lines = traceback.format_exception(error, limit=-12)
    return "".join(each if len(each) < 600 else f"{each[:600]}…\n" for each in lines)[-6000:]


def _place(error: BaseException) -> str:
    """Return the function of the package in which an error came up."""
    frames = [
        each for each in traceback.extract_tb(error.__traceback__) if f"{os.sep}stagereg{os.sep}" in each.filename
    ]
    last = frames[-1] if frames else None
    return "" if last is None else f"{last.filename.rpartition(f'{os.sep}stagereg{os.sep}')[2]}:{last.name}"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _settings() -> dict[str, Any]:
    """Return what no reading may change, by name."""
    kinds = [each for each in vars(torch_metadata).values() if isinstance(each, type)]
    classes = {each: {**vars(each)} for each in (*kinds, _StorageInfo, torch.Size)}
    return {
        "torch's safe globals": {*torch.serialization.get_safe_globals()},
        "torch's metadata classes": classes,
        "torch's default dtype": torch.get_default_dtype(),
        "the environment": {**os.environ},
        "sys.path": [*sys.path],
        "the recursion limit": sys.getrecursionlimit(),
        "the current directory": os.getcwd(),
        "foreign modules": _FOREIGN_MODULES & sys.modules.keys(),
        "handlers of signals": [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
    }


def _left(threads: int, descriptors: int) -> str:
    """Return what a reading has left: threads, or open files; both may take a moment to go."""
    ends = time.monotonic() + _LEAVES_S
    while (more := threading.active_count() > threads) or _descriptors() > descriptors:
        if time.monotonic() > ends:
            return "leaves threads" if more else "leaves files open"
        gc.collect()
        time.sleep(0.01)
    return ""


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name, value in before.items() if after[name] != value]


# -- a worker


def make_kind(name: str, scratch: Path) -> Any:
    """Return a kind of inputs, with its samples."""
    return {**vars(fuzz_inputs), **vars(fuzz_notes)}[name.capitalize()](scratch)


def examine(kind: Any, name: str, seed: int, number: int, watch: Watch) -> tuple[list[Finding], Counter[str]]:
    """Make one input, and run everything that reads it; return what is wrong, and how the readings ended."""
    rng = random.Random(f"{seed}/{name}/{number}")
    kind.folder = kind.scratch / f"{name}-{number}"
    kind.folder.mkdir()
    watch.folder = os.path.realpath(kind.folder)
    before = threading.active_count(), _descriptors()
    how = kind.make(rng)
    found: list[Finding] = []
    ends: Counter[str] = Counter()
    for action, run in kind.actions(rng):
        *wrong, (ended, _, _) = watch.run(run)
        ends[ended] += 1
        found += [Finding(name, seed, number, action, what, place, how[:500], text) for what, place, text in wrong]
        if ended == "hangs":  # threads may hang on: the worker ends
            break
    kind.values = {}  # of mapped files
    if not ends["hangs"] and (left := _left(*before)):
        found.append(Finding(name, seed, number, "all", left, "", how[:500]))
    shutil.rmtree(kind.folder, ignore_errors=True)
    return found, ends


def work(asked: argparse.Namespace, scratch: Path) -> int:
    """Be a worker: report each input on the standard output as a line of JSON."""
    report = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    os.chdir(scratch)
    try:
        _make_inputs(asked, scratch, report)
    except Exception:
        traceback.print_exc()
        os._exit(BROKEN)
    report.flush()
    os._exit(0)  # threads of a reading that went wrong may be there


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def bounded_memory() -> Iterator[int]:
    """Let this process map :data:`MOST_MEMORY` more than the bytes that it has mapped now, which it gives."""
    mapped, before = _mapped(), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_MEMORY, before[1]))
    try:
        yield mapped
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _make_inputs(asked: argparse.Namespace, scratch: Path, report: Any) -> None:
    watch, name = Watch(scratch), asked.kind[0]
    kind = make_kind(name, scratch)
    with bounded_memory():
        for number in range(3):  # which imports what is imported once
            examine(kind, name, -1, -1 - number, watch)
    gc.collect()
    gc.freeze()
    with bounded_memory() as mapped:
        for number in range(asked.first, asked.first + asked.count):
            print(json.dumps({"begin": [name, number]}), file=report)
            found, ends = examine(kind, name, asked.seed, number, watch)
            if is_full := _mapped() - mapped > MOST_MEMORY // 2:  # by no one input, which would have been refused
                what = f"{(_mapped() - mapped) >> 20} MiB after {number - asked.first + 1} inputs"
                found.append(Finding(name, asked.seed, number, "all", "keeps memory of earlier inputs", "", "", what))
            told = {"end": [name, number], "ends": ends, "found": [asdict(each) for each in found]}
            print(json.dumps(told), file=report)
            if ends["hangs"] or is_full:
                report.flush()
                os._exit(HUNG)
