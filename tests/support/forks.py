"""Runs programs like ``python -c``, in forks of one process that has imported torch, because the import takes seconds.

The workers of one pytest run share this process, which imports torch when the first worker connects.

A program terminates like any interpreter, including its exit handlers. torch uses one thread. The program must not
check whether a module was imported, because the modules that this file imports are already in ``sys.modules``.

If a program starts ranks, the launcher can fork the ranks too, from a second fork of the same process, as it forks the
ranks of a restart. The launcher is not the parent of such a rank; its process ID is in ``FORKED_BY``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from stagereg.base.providers import has

_IMPORTED = ["hydra", "torch.distributed.checkpoint", "torch.distributed.run", "stagereg.assembly"]
_IMPORTED += ["torch._dynamo"]  # an optimizer imports it in its first step
_IMPORTED += ["stagereg.launch.main", "matplotlib.backends.backend_svg", "jinja2"]
_IMPORTED += ["stagereg.sweep.render"] if importlib.util.find_spec("stagereg.sweep") else []  # a copy may lack it
_PYTHON = [sys.executable, str(Path(__file__))]
ADDRESS = "STAGEREG_FORKS"
_RANKS = "STAGEREG_FORKS_OF_RANKS"


def run_forked(
    program: str | Path,
    *arguments: object,
    cwd: Path | None = None,
    given: str = "",
    timeout_s: float = 100,
    environment: Mapping[str, str] | None = None,
    ignores_warnings: bool = False,
    forks_ranks: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program, and return its exit code and its output.

    Args:
        program: the source as a string, or the file as a path, which may be relative to ``cwd``.
        arguments: the arguments of the program's command line.
        cwd: the program's working directory; default: the current directory.
        given: the content of the standard input.
        timeout_s: seconds until the program is killed.
        environment: the program's environment variables; default: those of this process. The directories in its
            ``PYTHONPATH`` come first in ``sys.path``.
        ignores_warnings: ignore warnings, like ``-W ignore``.
        forks_ranks: whether the launcher in the program forks its ranks.

    Raises:
        subprocess.TimeoutExpired: the program was killed.
    """
    with tempfile.TemporaryDirectory(prefix="stagereg-forks-") as folder:
        files = [Path(folder, name) for name in ("in", "out", "err")]
        files[0].write_text(given)
        asked = {"program": str(program), "is_file": isinstance(program, Path), "cwd": os.path.abspath(cwd or "")}
        asked |= {"arguments": [*map(str, arguments)], "files": [*map(str, files)], "ignores": ignores_warnings}
        asked["forks_ranks"] = forks_ranks
        asked["environment"] = dict(os.environ if environment is None else environment)
        server = _server()
        server.sendall(json.dumps(asked).encode() + b"\n")
        lines = server.makefile("rb", buffering=0)  # unbuffered, because select waits for the second line
        pid = int(lines.readline())
        try:
            if not select.select([server], [], [], timeout_s)[0]:
                printed = (file.read_bytes() for file in files[1:])
                raise subprocess.TimeoutExpired(asked["arguments"], timeout_s, *printed)
        except BaseException:  # includes a timeout of pytest
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            lines.readline()  # otherwise the next call would read this exit code as its own
            raise
        code = int(lines.readline())
        return subprocess.CompletedProcess(asked["arguments"], code, *(file.read_text() for file in files[1:]))


def start_server() -> None:
    """Start the server process, which exits with this process; workers find its address in the environment."""
    path = os.pathsep.join(os.path.abspath(each) for each in sys.path if each)
    address = os.environ[ADDRESS] = f"stagereg-forks-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.Popen(_PYTHON, stdin=listener, env=environment)


def share_server_of_ranks() -> None:
    """Start the server from which ``run_ranks`` forks ranks, which takes seconds; a worker uses the runner's server."""
    from multiprocessing import forkserver

    from stagereg.testing import ranks

    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if hasattr(server, "_forkserver_authkey"):  # Python 3.14
        return
    if ADDRESS not in os.environ:
        ranks.start_server()
        os.environ[_RANKS] = server._forkserver_address
    elif _RANKS in os.environ:
        server._forkserver_address = os.environ[_RANKS]
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = forkserver.ensure_running = lambda: None


@functools.cache
def _server() -> socket.socket:
    """Return the connection to a fork of the server process. The fork exits with this process."""
    if ADDRESS not in os.environ:
        start_server()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{os.environ[ADDRESS]}")
    return connection


def _accept() -> None:
    """Import all modules, then fork for each worker; return in the children, with the worker's standard streams."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    listener = socket.socket(fileno=0)
    connection, _ = listener.accept()
    for each in _IMPORTED:
        importlib.import_module(each)
    gc.freeze()  # otherwise garbage collection in a child would write to all of this memory, and so copy it
    while os.fork():
        connection, _ = listener.accept()
    with connection:
        os.dup2(connection.fileno(), 1)
    os.dup2(1, listener.detach())


def _next_program() -> CodeType:
    """Fork for each request; return in the children, with the code to run."""
    while line := sys.stdin.readline():
        if pid := os.fork():
            print(pid, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            continue
        asked = json.loads(line)
        for descriptor, path in enumerate(asked["files"]):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        program, file = asked["program"], ""
        flags = [*(["-W", "ignore"] if asked["ignores"] else []), *([] if asked["is_file"] else ["-c"])]
        if asked["ignores"]:
            warnings.simplefilter("ignore")
        sys.orig_argv = [sys.executable, *flags, program, *asked["arguments"]]
        sys.argv = [program if asked["is_file"] else "-c", *asked["arguments"]]
        if asked["is_file"]:
            globals()["__file__"] = file = os.path.abspath(program)
            program = Path(file).read_text()
        else:
            del globals()["__file__"]
        sys.path[:1] = [os.path.dirname(file), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        if asked["forks_ranks"] and has("recovery"):
            _fork_server_of_ranks(os.path.dirname(file))
        return compile(program, file or "<string>", "exec", dont_inherit=True)
    sys.exit()


def _fork_server_of_ranks(folder: str) -> None:
    """Fork the server of ``stagereg.extensions.recovery.warm``, from which launchers in this process start ranks."""
    import stagereg.extensions.recovery.warm as warm
    from stagereg.extensions.recovery.launching import RecoveryLauncher
    from stagereg.launch.extension import Start

    class Forking(warm.WarmStart):
        def __init__(self, link: socket.socket) -> None:
            self._processes, self._answers, self._answered = {}, threading.Condition(), []
            self._lines, self._ready, self._gone = link.makefile("rwb", buffering=0), True, False
            warm._write(self._lines, [[], folder])
            self._lines.readline()
            threading.Thread(target=self._listen, daemon=True).start()

        def close(self) -> None:
            """Do not stop the server: the next launcher uses it, and it exits with this process."""

    launcher, (ours, theirs) = os.getpid(), socket.socketpair()
    os.environ["FORKED_BY"] = str(launcher)
    if os.fork() == 0:
        ours.close()
        os.setsid()
        warm.end_with(launcher)
        if not theirs.recv(1, socket.MSG_PEEK):  # the program exited without using a launcher
            os._exit(0)
        server = os.getpid()
        warm._run(warm._Server(theirs).run(), server)
        sys.exit()
    theirs.close()
    found: list[warm.WarmStart] = []

    def start_forking(launcher: RecoveryLauncher, rank: int, start: Start) -> warm.WarmProcess | None:
        found[:] = found or [Forking(ours)]
        launcher._warm = found[0]
        return found[0].start(start)

    RecoveryLauncher.start = start_forking  # type: ignore[method-assign]


if __name__ == "__main__":
    _accept()
    exec(_next_program())
