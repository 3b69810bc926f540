"""Warm start: forks restarted ranks from a server process that has already imported slow modules, such as torch.

If the run may be restarted, the launcher starts the server while the ranks train. The server imports the installed
modules that the launcher has imported; each rank imports the program's own files. If the server has several threads or
an open GPU, it cannot be forked safely, so it exits, and restarted ranks are fresh interpreters.

The launcher sends lines of JSON over a socket: names of modules and the first folder of ``sys.path``, then a
:class:`.Start` for each rank. The server reports when it is ready, and the process ID and exit code of each rank.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import types
from typing import Any, NamedTuple

from stagereg.base.machine import end_with
from stagereg.launch.extension import Start

_ALWAYS = ("torch.distributed.checkpoint", "torch._dynamo", "stagereg.assembly", "stagereg.launch.main")
"""Modules that every rank imports sooner or later."""
_ANSWER_S = 10.0  # seconds to wait until the server has forked a rank
_SEED = 67280421310721  # initial seed of torch's generator, in torch releases with the same seed in every process


class WarmProcess:
    """A forked rank, with the methods of :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = threading.Event()
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process exits; return its exit code. Raises: ``subprocess.TimeoutExpired``."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self._code or 0

    def send_signal(self, number: int, /) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, code: int) -> None:
        self._code = code
        self._ended.set()


class WarmStart:
    """The client in the launcher: starts a server that forks ranks which run ``start.command``. Thread-safe."""

    def __init__(self, start: Start) -> None:
        self._processes: dict[int, WarmProcess] = {}
        self._answers = threading.Condition()
        self._answered: list[int] = []
        self._ready = self._gone = False
        split = split_command(start.command)
        ours, theirs = socket.socketpair()
        self._lines = ours.makefile("rwb", buffering=0)
        ours.close()
        options, folder = ([], None) if split is None else (split.options, split.folder(start.folder))
        self._server = subprocess.Popen(
            [
                sys.executable,
                *options,
                "-m",
                "stagereg.extensions.recovery.warm",
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            cwd=start.folder,
            env=start.variables,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        _write(self._lines, [[*filter(_is_installed, [*sys.modules]), *_ALWAYS], folder])
        threading.Thread(target=self._listen, name="stagereg-warm", daemon=True).start()

    def start(self, start: Start) -> WarmProcess | None:
        """Start a rank by forking the server; return ``None`` if the server is not ready or has failed."""
        with self._answers:
            if not self._ready or self._gone:
                return None
            _write(self._lines, start)
            if not self._answers.wait_for(lambda: self._gone or self._answered, _ANSWER_S) or self._gone:
                self._gone = True
                return None
            return self._processes[self._answered.pop()]

    def close(self) -> None:
        """Kill the server and all ranks that the server has started. Idempotent."""
        self._server.kill()
        self._server.wait()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                pid, code = json.loads(line)
                with self._answers:
                    if pid == 0:
                        self._ready = True
                    elif code is None:
                        self._processes[pid] = WarmProcess(pid)
                        self._answered.append(pid)
                        self._answers.notify_all()
                    else:
                        self._processes.pop(pid).end(code)
        with self._answers:
            self._gone = True
            self._answers.notify_all()
            for process in self._processes.values():  # the kernel kills them when the server exits
                process.end(-signal.SIGKILL)


def _write(lines: Any, value: Any) -> None:
    with contextlib.suppress(OSError):  # the other process has exited
        lines.write(json.dumps(value).encode() + b"\n")


class PythonCommand(NamedTuple):
    """A parsed command line of the Python interpreter."""

    options: list[str]  # options of the interpreter
    is_module: bool
    arguments: list[str]  # the script or module, then its arguments

    def folder(self, working: str) -> str:
        """Return the first folder of ``sys.path`` for a program with the working directory ``working``."""
        script = os.path.realpath(os.path.join(working, self.arguments[0]))
        return working if self.is_module else os.path.dirname(script)


def split_command(command: list[str]) -> PythonCommand | None:
    """Parse a command line of Python; return ``None`` if it has an unknown option."""
    rest, options = command[1:], list[str]()
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "-m" and rest:
            return PythonCommand(options, True, rest)
        if not set(option[1:]) <= set("bBdEIOPqsSuv") and option[:2] not in ("-W", "-X"):
            return None
        options.append(option)
        if option in ("-W", "-X") and rest:
            options.append(rest.pop(0))
    return PythonCommand(options, False, rest) if rest else None


def _is_installed(name: str) -> bool:
    """Return whether a module belongs to an installed package, to Python or to stagereg."""
    file = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None) or ""
    return name.startswith("stagereg.") or file.startswith(_places())


@functools.cache
def _places() -> tuple[str, ...]:
    """Return the folders of installed packages and of Python. Cached, because ``sysconfig`` is slow."""
    return tuple(f"{sysconfig.get_path(each)}{os.sep}" for each in ("stdlib", "platstdlib", "purelib", "platlib"))


class _Server:
    """Forks a rank for each request, and reports its exit code."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lines = link, link.makefile("rwb", buffering=0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ)

    def run(self) -> Start:
        """Serve until the launcher exits. Returns only in a forked process, with the command to run there."""
        names, folder = json.loads(self._lines.readline())
        if folder is None:
            os._exit(0)
        sys.path[0] = folder
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        if not _can_fork():
            os._exit(0)
        gc.collect()
        gc.freeze()  # otherwise garbage collection in a rank would write to, and so copy, all shared memory pages
        # Slurm sends these signals to every process of a job step; only ranks handle them.
        handlers = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGTERM, signal.SIGUSR1)}
        _write(self._lines, [0, None])  # signals that the server is ready
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._link:
                    self._reap(key.fd, key.data)
                    continue
                line = self._lines.readline()
                if not line:
                    os._exit(0)
                if (pid := os.fork()) == 0:
                    for number, handler in handlers.items():
                        signal.signal(number, handler)
                    self._close()
                    return Start(*json.loads(line))
                os.setpgid(pid, pid)  # the launcher sends signals to the process group of a rank
                self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                _write(self._lines, [pid, None])

    def _reap(self, descriptor: int, pid: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _write(self._lines, [pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])])

    def _close(self) -> None:
        for key in [*self._selector.get_map().values()]:
            if key.fileobj is not self._link:
                os.close(key.fd)
        self._selector.close()
        self._lines.close()
        self._link.close()


def _can_fork() -> bool:
    opened = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            opened.append(os.readlink(f"/proc/self/fd/{each}"))
    single = len(os.listdir("/proc/self/task")) == 1
    return single and hasattr(os, "pidfd_open") and not any(each.startswith("/dev/nvidia") for each in opened)


def _run(start: Start, server: int) -> None:
    end_with(server)
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update({**start.variables, "STAGEREG_LAUNCHER": str(server)})
    if "numpy" in sys.modules:  # otherwise all ranks draw the same random numbers
        sys.modules["numpy"].random.seed()
    torch = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() != _SEED:  # later torch releases draw a new seed in each process
        torch.default_generator.seed()
    program = split_command(start.command)
    assert program is not None
    sys.orig_argv, sys.argv = start.command, program.arguments
    sys.path[0] = program.folder(start.folder)
    if program.is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(sys.argv[0])
    with io.open_code(main.__file__) as file:
        exec(compile(file.read(), main.__file__, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that an import counts the GPUs without opening one
    server = os.getpid()
    _run(_Server(socket.socket(fileno=int(sys.argv[1]))).run(), server)
