"""``stagereg doctor``: whether this machine, this installation and its plugins will do, and what to do if not.

PyTorch and each component of another package are imported in child processes with a limit of time, so that one that
crashes, exits or hangs is one row among the others. Nothing heavy is imported in this one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import stagereg.machine as machine
import stagereg.output as output
import stagereg.registry as registry
from stagereg._version import __version__
from stagereg.commands.child import call_in_child
from stagereg.errors import StageregError
from stagereg.installed import DISTRIBUTION
from stagereg.output import size_text

__all__ = ["Finding", "add_to", "load", "run", "torch_findings"]

_TORCH_LIMIT_S = 120.0
"""Seconds for PyTorch, whose first import from a network disk takes its time."""


class Finding(NamedTuple):
    """What was looked at, a verdict (ok, warn, missing where it is optional, broken), and what to do about it."""

    what: str
    verdict: str
    found: str
    do: str = ""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor`` to the commands of ``stagereg``."""
    parser = output.add_command(commands, "doctor", "look at versions, limits, disks and plugins: what is broken?", run)
    parser.add_argument("--dir", default="", help="a directory that checkpoints go to; the current one if not given")
    output.add_timeout(parser, "for importing each plugin")


def run(asked: argparse.Namespace) -> int:
    """Print the findings. Returns 1 if something is broken, 0 otherwise."""
    directory = _directory(Path(asked.dir or "."), "broken" if asked.dir else "warn")
    findings = [*_versions(), *_limits(), directory, *_torch(), *_components(asked.timeout)]
    findings = [one._replace(do="") if one.verdict == "ok" else one for one in findings]
    output.progress()
    broken, warned = (sum(one.verdict == verdict for one in findings) for verdict in ("broken", "warn"))
    if asked.json:
        output.as_json({"findings": [one._asdict() for one in findings], "broken": broken, "warn": warned})
    else:
        rows = [(one.what, one.verdict, one.found + (f"\n-> {one.do}" if one.do else "")) for one in findings]
        output.table("", ("what", "verdict", "found"), rows, verdict="verdict")
        output.echo(f"\n{broken} broken, {warned} to look at." if broken or warned else "\nNothing is broken.")
    return int(broken > 0)


def _versions() -> Iterator[Finding]:
    """Python, stagereg and each package that it requires, or has an extra for, against the versions that it takes."""
    from packaging.requirements import Requirement

    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    here, in_hydra = f"{__version__} at {Path(__file__).parents[1]}", False
    with contextlib.suppress(ImportError):  # no plugin of any package is installed
        in_hydra = importlib.util.find_spec("hydra_plugins.stagereg_plugin") is not None
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        lines, here = ["torch", "hydra-core", "omegaconf"], f"{here}, not installed"
    found = f"{here}; its options are {'in every Hydra app' if in_hydra else 'only in apps that import it'}"
    yield Finding("stagereg", "ok" if in_hydra else "warn", found, "Install it: `pip install .` in the checkout.")
    for need in map(Requirement, lines):
        extra = "".join(re.findall(r'extra == "(.+?)"', str(need.marker or "")))
        if extra in ("test", "dev") or need.name == DISTRIBUTION:
            continue
        do = f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install '{need.name}{need.specifier}'"
        try:
            there = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            of = f"; of the extra {extra!r}" if extra else ""
            yield Finding(need.name, "missing" if extra else "broken", f"not installed{of}", do)
            continue
        if need.specifier.contains(there, prereleases=True):
            yield Finding(need.name, "ok", there)
        else:
            found = f"{there}, but stagereg needs {need.specifier}"
            yield Finding(need.name, "warn" if extra else "broken", found, do)


def _limits() -> Iterator[Finding]:
    """Processor, memory, shared memory and open files."""
    load = os.getloadavg()[0]
    yield Finding("cores", "ok", f"{machine.cores()} of {os.cpu_count()} for this process, load {load:.1f}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bound = ""
    with contextlib.suppress(OSError, ValueError):  # not there, or "max"
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
        bound = ", the container's bound included"
    yield Finding("memory", "ok", f"{size_text(memory)}{bound}")
    shared = os.statvfs("/dev/shm")
    size, free = shared.f_frsize * shared.f_blocks, shared.f_frsize * shared.f_bavail
    do = "DataLoader workers and NCCL need more: `docker run --shm-size=8g` or `--ipc=host`."
    found = f"{size_text(size)}, {size_text(free)} free"
    yield Finding("/dev/shm", "ok" if free >= 2**30 else "warn", found, do)
    soft, hard = (n if n != resource.RLIM_INFINITY else 2**20 for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    do = f"`ulimit -n {min(hard, 65536)}` before training"
    found = f"at most {soft}, can be raised to {hard}"
    yield Finding("open files", "ok" if soft >= 1024 else "warn", found, do)


def _directory(where: Path, otherwise: str) -> Finding:
    """Space on the file system of a directory, or of the nearest parent that is there, and whether it has O_DIRECT."""
    folder = next(path for path in (where.absolute(), *where.absolute().parents) if path.is_dir())
    file, takes = folder / f".stagereg-doctor-{os.getpid()}", False
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with contextlib.suppress(OSError):
            os.close(os.open(file, os.O_WRONLY | os.O_DIRECT))
            takes = True
    except OSError as error:
        do = "Choose a directory that can be written, with --dir."
        return Finding(str(folder), otherwise, f"cannot be written: {error.strerror}", do)
    finally:
        file.unlink(missing_ok=True)
    space = os.statvfs(folder)
    kind, free = machine.file_system(folder) or "file system unknown", size_text(space.f_frsize * space.f_bavail)
    found = f"{kind}, {free} free, O_DIRECT {'yes' if takes else 'no'}"
    return Finding(
        str(folder), "ok" if takes else "warn", found, "Checkpoints are written through the page cache here."
    )


def _torch() -> list[Finding]:
    found, failure = call_in_child(f"{__name__}:torch_findings", limit_s=_TORCH_LIMIT_S)
    if failure:
        return [Finding("torch works", "broken", failure, "Install a build of PyTorch that imports on this machine.")]
    return [Finding(*each) for each in found]


def torch_findings() -> list[Finding]:
    """What PyTorch finds here; touches the accelerator and page-locks some memory. Runs in a child process."""
    import torch
    import torch.distributed as dist

    if not torch.accelerator.is_available():
        accelerators = Finding("accelerators", "missing", "none: checkpoints stay in host memory")
        found, kind = [accelerators], ""
    else:
        kind, count = str(torch.accelerator.current_accelerator()), torch.accelerator.device_count()
        names = [torch.cuda.get_device_name(i) for i in range(count)] if kind == "cuda" else []
        found = [Finding("accelerators", "ok", f"{count} of {kind}: {', '.join(names)}"), _page_locked()]
    there = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    backends = [name for name, available in there.items() if available()]
    verdict = "broken" if "gloo" not in backends else "warn" if kind == "cuda" and "nccl" not in backends else "ok"
    do = "Install a build of PyTorch with gloo, and with nccl for CUDA; without nccl, train with gloo."
    return [*found, Finding("collectives", verdict, ", ".join(backends) or "none", do)]


def _page_locked() -> Finding:
    import torch

    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"limit {size_text(soft)}"
    try:
        torch.empty(2**28, dtype=torch.uint8, pin_memory=True)  # beyond a usual limit, which some drivers ignore
    except RuntimeError as error:
        do = "Raise the limit: `ulimit -l unlimited`, or `docker run --ulimit memlock=-1`. Until then: stager.pin=false"
        return Finding("page-locked memory", "broken", f"{limit} (ulimit -l): {str(error).splitlines()[0]}", do)
    return Finding("page-locked memory", "ok", f"{limit} (ulimit -l); {size_text(2**28)} were page-locked")


def _components(limit_s: float) -> Iterator[Finding]:
    """Whether the built-in components and those of other packages load, and what packages announce in vain."""
    every = {(each.kind, each.name): each for each in registry.entries() if each.distribution}
    own = [f"{kind}/{name}" for (kind, name), each in every.items() if each.distribution == DISTRIBUTION]
    do = "Install stagereg again, with the versions of torch and hydra-core that it takes."
    yield _loaded("built-in components", own, f"{len(own)} of stagereg", do, max(limit_s, _TORCH_LIMIT_S))
    for (kind, name), each in every.items():
        if each.distribution != DISTRIBUTION:
            what = f"{kind}/{name}"
            do = f"Repair, update or uninstall {each.distribution}. Until then only runs that choose {what} fail."
            yield _loaded(what, [what], f"{each.distribution} {each.version}", do, limit_s)
    do = "Install it again, update it, or report it to its author. Its other plugins are there, if they can be read."
    yield from (Finding(package, "broken", reason, do) for package, reason in registry.unreadable())


def _loaded(what: str, names: list[str], who: str, do: str, limit_s: float) -> Finding:
    output.progress(f"importing {what}")
    failed, failure = call_in_child(f"{__name__}:load", *names, limit_s=limit_s)
    wrong = failed or failure
    return Finding(what, "broken" if wrong else "ok", f"{who}: {wrong}" if wrong else who, do)


def load(*components: str) -> str:
    """Load components, ``kind/name``, and make their configs; return what fails. Runs in a child process."""
    import stagereg.config.schema as schema

    failures = []
    for component in components:
        try:
            schema.schema(registry.find(*component.split("/", 1)))
        except StageregError as error:
            failures.append(f"{component}: {error}")
    return "\n".join(failures)
