"""Runs one rank of ``run_ranks`` in a process that was forked from a server.

The rank writes its result, traceback, output and stacks to files, which remain if the rank dies. pickle stores a
function as module and name. A new process cannot import a module that pytest imported by file path, so the rank
receives the names and files of the caller's modules, and imports the modules from there.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Directories of installed packages, which a rank can import as usual."""


@dataclass(frozen=True)
class Shipment(MetaPathFinder):
    """A pickled call, and where the rank finds the caller's modules. Also the import hook that loads these modules."""

    call: bytes
    modules: dict[str, tuple[str | None, list[str] | None]]  # by name: the file, and the folders of a package

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        file, folders = self.modules.get(name, (None, None))
        if file is not None:
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
        if folders is None:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = folders
        return spec


def pack(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shipment:
    """Pickle the call ``fn(*args, **kwargs)``. Raises ``ValueError`` if ``fn`` or an argument is not picklable."""
    wrong = f"{fn!r} cannot be imported in other processes. Define it with `def` at the top of a module"
    try:
        pickle.dumps(fn)
        wrong = f"the arguments for {fn!r} cannot be sent to other processes"
        return Shipment(pickle.dumps((fn, args, kwargs)), _own_modules())
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"{wrong}: {error}") from error


@dataclass(frozen=True)
class Assignment:
    """The settings of a rank. ``backend`` and ``pg_timeout_s`` (seconds) configure the process group."""

    rank: int
    world_size: int
    folder: Path
    shipment: Shipment
    environment: Mapping[str, str]
    backend: str
    store_port: int
    pg_timeout_s: float

    def file(self, kind: str) -> Path:
        """Return the path of a file of this rank. ``kind``: "result", "error", "output" or "stacks"."""
        return self.folder / f"{self.rank}.{kind}"


_is_rank = False


def is_rank() -> bool:
    """Return whether this process was started by ``run_ranks``."""
    return _is_rank


def work(job: Assignment) -> None:
    """Run the function of ``job`` in an initialized process group, and write its result or error to files."""
    gc.freeze()  # A garbage collection would write to, and so copy, all memory shared with the server.
    os.setpgid(0, 0)
    _end_with_parent()
    _redirect(job.file("output"))
    os.environ.clear()
    os.environ.update(job.environment)
    with job.file("stacks").open("wb") as stacks:
        # With chain=True, the default action of SIGUSR2 terminates the process after the dump, so the dump of an exited
        # process is complete. SIGUSR1 is not used, because a checkpointer handles it.
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True, chain=True)
        faulthandler.enable(file=stacks, all_threads=True)
        try:
            _call(job)
        except BaseException:
            job.file("error").write_text(traceback.format_exc())
            sys.exit(1)


def _call(job: Assignment) -> None:
    global _is_rank
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    sys.meta_path.insert(0, job.shipment)
    fn, args, kwargs = pickle.loads(job.shipment.call)
    limit = timedelta(seconds=job.pg_timeout_s)
    store: Any = dist.TCPStore("127.0.0.1", job.store_port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    _is_rank = True
    group = dist.PrefixStore("group", store)  # type: ignore[attr-defined]
    dist.init_process_group(job.backend, store=group, rank=job.rank, world_size=job.world_size, timeout=limit)
    # Wait for all ranks: if a rank exits early, ranks that still connect to the process group fail.
    _await_all(store, job, "connected")
    try:
        job.file("part").write_bytes(pickle.dumps(fn(job.rank, job.world_size, *args, **kwargs)))
        job.file("part").rename(job.file("result"))
    except BaseException:
        store.add("ended", 1)
        raise
    _await_all(store, job, "ended")
    if dist.is_initialized():
        dist.destroy_process_group()


def _await_all(store: Any, job: Assignment, milestone: str) -> None:
    store.add(milestone, 1)
    while store.add(milestone, 0) < job.world_size:
        time.sleep(0.002)


def _end_with_parent() -> None:
    """Terminate this process when the caller exits: the kernel then closes a pipe, and sends SIGIO to this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)


def _redirect(file: Path) -> None:
    with file.open("ab") as target:
        os.dup2(target.fileno(), 1)
        os.dup2(target.fileno(), 2)
    # Replace sys.stdout and sys.stderr: the objects of the server may be configured for a terminal of its first caller.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))


def _own_modules() -> dict[str, tuple[str | None, list[str] | None]]:
    """Return the loaded modules that a rank cannot import as usual. multiprocessing itself handles ``__main__``."""
    found: dict[str, tuple[str | None, list[str] | None]] = {}
    for name, module in list(sys.modules.items()):
        facts = vars(module) if isinstance(module, ModuleType) else {}
        file, folders = facts.get("__file__"), facts.get("__path__")
        lies_in = str(file or next(iter(folders or ()), ""))
        if os.path.isabs(lies_in) and not lies_in.startswith(_INSTALLED) and name not in ("__main__", "__mp_main__"):
            found[name] = file, None if folders is None else list(folders)
    for name in list(found):
        above = name.rpartition(".")[0]
        while above and above not in found and not hasattr(sys.modules.get(above), "__path__"):
            found[above] = None, []  # The parent is a folder without __init__.py, for which pytest made up a package.
            above = above.rpartition(".")[0]
    return found
