"""What ``stagereg doctor`` looks at in a machine: versions, memory, limits, disks, what PyTorch finds there.

Each function returns findings: what was looked at, whether it will do, what was found, and what to do if it will not.
Facts that only PyTorch knows are asked in a child process (:func:`torch_facts`), so that a driver that hangs or a
library that is missing is a finding, too. Imports no torch otherwise.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import mmap
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stagereg.machine as machine
from stagereg.installed import DISTRIBUTION

__all__ = ["Finding", "directory", "host", "limits", "torch_facts", "torch_findings", "versions"]

_BLOCK = 4096
_LEAST_SHARED = 2**30
_LEAST_FILES = 1024
_FOR_DEVELOPERS = ("test", "dev")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: it is.
        verdict: ``"ok"``, ``"warn"``, ``"missing"`` (it is optional) or ``"broken"``.
        found: a text for people.
        do: what to do about it; empty where nothing has to be done.
        value: what was found, for programs; sizes are bytes.
    """

    what: str
    verdict: str
    found: str
    do: str = ""
    value: Any = None


# -- versions


def versions() -> Iterator[Finding]:
    """Python, stagereg and each package that it requires, or has an extra for, against the versions that it takes."""
    from stagereg._version import __version__

    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}", value=platform.python_version())
    yield Finding("stagereg", "ok", f"{__version__} at {Path(__file__).parents[1]}", value=__version__)
    for name, extra, accepted in _requirements():
        try:
            there = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if extra:
                yield Finding(
                    name, "missing", f"not installed; of the extra {extra!r}", f"pip install '{DISTRIBUTION}[{extra}]'"
                )
            else:
                yield Finding(name, "broken", "not installed", f"pip install '{name}{accepted}'")
            continue
        if _takes(accepted, there):
            yield Finding(name, "ok", there, value=there)
        else:
            found = f"{there}, but stagereg needs {accepted}"
            yield Finding(name, "warn" if extra else "broken", found, f"pip install '{name}{accepted}'", there)


def _requirements() -> Iterator[tuple[str, str, str]]:
    """Name, extra and accepted versions of what stagereg's metadata asks for; without metadata, the names alone."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is merely on the path
        lines = ["torch", "hydra-core", "omegaconf"]
    for line in lines:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker)
        found = re.match(r"\s*([A-Za-z0-9._-]+)\s*(\[[^\]]*\])?\s*\(?([^)]*)", requirement)
        if found and found[1] != DISTRIBUTION and not (extra and extra[1] in _FOR_DEVELOPERS):
            yield found[1], extra[1] if extra else "", found[3].strip()


def _takes(accepted: str, version: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # nothing to compare with
        return True
    return SpecifierSet(accepted).contains(version, prereleases=True)


# -- what PyTorch finds


def torch_facts() -> dict[str, Any]:
    """What PyTorch knows of itself and the machine; imports it, touches the accelerator and page-locks some memory."""
    import torch
    import torch.distributed as dist

    facts: dict[str, Any] = {"version": torch.__version__, "accelerator": "", "devices": [], "backends": []}
    if dist.is_available():
        there = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
        facts["backends"] = [name for name, available in there.items() if available()]
    if not torch.accelerator.is_available():
        return facts
    kind = torch.accelerator.current_accelerator()
    facts["accelerator"] = kind.type if kind else ""
    count = torch.accelerator.device_count()
    if facts["accelerator"] == "cuda":
        every = [torch.cuda.get_device_properties(i) for i in range(count)]
        facts["devices"] = [{"name": one.name, "bytes": one.total_memory} for one in every]
        facts["cuda"] = torch.version.cuda
    else:
        facts["devices"] = [{"name": facts["accelerator"], "bytes": 0}] * count
    # Beyond the limit of `ulimit -l`, where there is one: some drivers count against it, and some do not.
    nbytes = min(_locked_limit() or 0, 2**28) + 2**20
    try:
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        facts["page_locked"] = nbytes
    except RuntimeError as error:
        facts["not_page_locked"] = str(error).splitlines()[0]
    return facts


def torch_findings(facts: Mapping[str, Any] | None, failure: str) -> Iterator[Finding]:
    """What :func:`torch_facts` found, or how it failed."""
    if facts is None:
        yield Finding("torch works", "broken", failure, "Install a build of PyTorch that imports on this machine.")
        return
    kind, devices, backends = facts["accelerator"], facts["devices"], facts["backends"]
    if devices:
        names = ", ".join(f"{d['name']}" + (f" ({_size(d['bytes'])})" if d["bytes"] else "") for d in devices)
        yield Finding("accelerators", "ok", f"{len(devices)} of {kind}: {names}", value=devices)
    else:
        yield Finding("accelerators", "missing", "none: tensors and checkpoints stay in host memory", value=[])
    if "gloo" not in backends:
        do = "Install a build of PyTorch with torch.distributed and gloo."
        yield Finding("collectives", "broken", f"no gloo among {backends or 'no backends'}", do, backends)
    elif kind == "cuda" and "nccl" not in backends:
        do = "Install a build of PyTorch with NCCL, or train with gloo."
        yield Finding("collectives", "warn", "gloo, and no nccl beside CUDA devices", do, backends)
    else:
        yield Finding("collectives", "ok", ", ".join(backends), value=backends)
    limit = _locked_limit()
    found = f"limit {'none' if limit is None else _size(limit)} (ulimit -l)"
    if "not_page_locked" in facts:
        do = "Raise the limit: `ulimit -l unlimited`, or `docker run --ulimit memlock=-1`. Until then: stager.pin=false"
        yield Finding("page-locked memory", "broken", f"{found}: {facts['not_page_locked']}", do, limit)
    elif "page_locked" in facts:
        yield Finding(
            "page-locked memory", "ok", f"{found}; {_size(facts['page_locked'])} were page-locked", value=limit
        )
    else:
        yield Finding("page-locked memory", "ok", f"{found}; of no use without an accelerator", value=limit)


# -- the machine


def host() -> Iterator[Finding]:
    """Processor and memory."""
    text = f"{machine.cores()} of {os.cpu_count()} for this process, load {os.getloadavg()[0]:.1f}"
    yield Finding("cores", "ok", text, value=machine.cores())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bound = _container_bound()
    if bound is not None and bound < memory:
        yield Finding("memory", "ok", f"{_size(bound)}, the container's bound, of {_size(memory)}", value=bound)
    else:
        yield Finding("memory", "ok", _size(memory), value=memory)


def limits() -> Iterator[Finding]:
    """Shared memory and open files."""
    import resource

    if sys.platform == "linux":
        yield _shared_memory()
    soft, hard = (None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    low = soft is not None and soft < _LEAST_FILES
    found = f"at most {'any number' if soft is None else soft}, can be raised to {'any' if hard is None else hard}"
    do = f"`ulimit -n {_LEAST_FILES if hard is None else min(hard, 65536)}` before training"
    yield Finding("open files", "warn" if low else "ok", found, do if low else "", soft)


def _shared_memory() -> Finding:
    try:
        shared = os.statvfs("/dev/shm")
    except OSError as error:
        do = "Mount a tmpfs there. DataLoader workers and other processes share tensors through it."
        return Finding("/dev/shm", "warn", f"not there: {error.strerror}", do)
    size, free = shared.f_frsize * shared.f_blocks, shared.f_frsize * shared.f_bavail
    found, value = f"{_size(size)}, {_size(free)} free", {"bytes": size, "free": free}
    if free >= _LEAST_SHARED:
        return Finding("/dev/shm", "ok", found, value=value)
    do = "DataLoader workers and NCCL need more: `docker run --shm-size=8g` or `--ipc=host`."
    return Finding("/dev/shm", "warn", found, do, value)


def directory(where: Path, chosen: bool) -> Iterator[Finding]:
    """The file system that checkpoints in ``where`` would be on: space, and whether it takes ``O_DIRECT``.

    Args:
        where: a directory; one that does not exist yet stands for the nearest parent that does.
        chosen: the user named it, so a directory of no use is an error.
    """
    folder = next(path for path in (where.absolute(), *where.absolute().parents) if path.is_dir())
    kind = machine.file_system(folder)
    space = os.statvfs(folder)
    free = space.f_frsize * space.f_bavail
    file = folder / f".stagereg-doctor-{os.getpid()}"
    try:
        takes = _takes_direct(file)
    except OSError as error:
        do = (
            "Name the directory for checkpoints with --dir."
            if not chosen
            else "Choose a directory that can be written."
        )
        yield Finding(f"{folder}", "broken" if chosen else "warn", f"cannot be written: {error.strerror}", do)
        return
    finally:
        file.unlink(missing_ok=True)
    value = {"file_system": kind, "free": free, "o_direct": takes}
    found = f"{kind or 'file system unknown'}, {_size(free)} free, O_DIRECT {'yes' if takes else 'no'}"
    do = "" if takes else "storage=direct writes through the page cache here; storage=dcp does as well."
    yield Finding(f"{folder}", "ok" if takes else "warn", found, do, value)


def _takes_direct(file: Path) -> bool:
    """Whether a block can be written past the page cache; raises ``OSError`` if it cannot be written at all."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    os.close(os.open(file, flags, 0o600))
    if not hasattr(os, "O_DIRECT"):
        return False
    block = mmap.mmap(-1, _BLOCK)  # aligned, as O_DIRECT wants it
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.write(descriptor, block) == _BLOCK
    except OSError:
        return False
    finally:
        os.close(descriptor)
        block.close()


def _container_bound() -> int | None:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(file).read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
    return None


def _locked_limit() -> int | None:
    """Bytes that this process may lock; ``None`` for no limit."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _size(nbytes: int) -> str:
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"
