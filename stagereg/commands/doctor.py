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
from stagereg.commands.child import ChildCall
from stagereg.errors import ConfigError, StageregError
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
    help_ = "for importing each plugin, %(default)g"
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help=help_)


def run(asked: argparse.Namespace) -> int:
    """Print the findings. Returns 1 if something is broken, 0 otherwise.

    Raises:
        ConfigError: the limit of time is of no use.
    """
    if not asked.timeout > 0:
        raise ConfigError(f"--timeout must be above 0 seconds, not {asked.timeout:g}.")
    in_hydra, do = False, "Install stagereg (`pip install .` in a checkout)."
    with contextlib.suppress(ImportError):  # no plugin of any package is installed
        in_hydra = importlib.util.find_spec("hydra_plugins.stagereg_plugin") is not None
    options = "in every Hydra app" if in_hydra else "only in apps that import stagereg"
    with ChildCall(f"{__name__}:torch_findings") as child:
        found = [*versions(), *limits(), directory(Path(asked.dir or "."), chosen=bool(asked.dir))]
        found.append(_judged("Hydra options", in_hydra, options, do))
        of_torch, failure = child.result(_TORCH_LIMIT_S)
    found += [Finding(*each) for each in of_torch or ()]
    if failure:
        do = "Install a build of PyTorch that imports on this machine."
        found.append(Finding("torch works", "broken", failure, do))
    found += components(asked.timeout)
    output.progress()
    broken, warned = (sum(one.verdict == verdict for one in found) for verdict in ("broken", "warn"))
    if asked.json:
        output.as_json({"findings": [one._asdict() for one in found], "broken": broken, "warn": warned})
    else:
        rows = [(one.what, one.verdict, one.found + (f"\n-> {one.do}" if one.do else "")) for one in found]
        output.table("", ("what", "verdict", "found"), rows, verdict="verdict")
        output.echo(f"\n{broken} broken, {warned} to look at." if broken or warned else "\nNothing is broken.")
    return int(broken > 0)


def _judged(what: str, good: bool, found: str, do: str, otherwise: str = "warn") -> Finding:
    return Finding(what, "ok", found) if good else Finding(what, otherwise, found, do)


def versions() -> Iterator[Finding]:
    """Python, stagereg and each package that it requires, or has an extra for, against the versions that it takes."""
    from packaging.requirements import Requirement

    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield Finding("stagereg", "ok", f"{__version__} at {Path(__file__).parents[1]}")
    lines = ["torch", "hydra-core", "omegaconf"]  # of a checkout that is merely on the path
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        lines = importlib.metadata.requires(DISTRIBUTION) or lines
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
        good = need.specifier.contains(there, prereleases=True)
        found = there if good else f"{there}, but stagereg needs {need.specifier}"
        yield _judged(need.name, good, found, do, "warn" if extra else "broken")


def limits() -> Iterator[Finding]:
    """Processor, memory, shared memory and open files."""
    load = os.getloadavg()[0]
    yield Finding("cores", "ok", f"{machine.cores()} of {os.cpu_count()} for this process, load {load:.1f}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            memory = min(memory, int(Path(file).read_text()))
    yield Finding("memory", "ok", f"{size_text(memory)}, the container's bound included")
    if sys.platform == "linux":
        shared = os.statvfs("/dev/shm")
        free = shared.f_frsize * shared.f_bavail
        do = "DataLoader workers and NCCL need more: `docker run --shm-size=8g` or `--ipc=host`."
        found = f"{size_text(shared.f_frsize * shared.f_blocks)}, {size_text(free)} free"
        yield _judged("/dev/shm", free >= 2**30, found, do)
    soft, hard = (n if n != resource.RLIM_INFINITY else 2**20 for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    do = f"`ulimit -n {min(hard, 65536)}` before training"
    yield _judged("open files", soft >= 1024, f"at most {soft}, can be raised to {hard}", do)


def directory(where: Path, chosen: bool) -> Finding:
    """The file system that checkpoints in ``where`` would be on: space, and whether it takes ``O_DIRECT``.

    Args:
        where: a directory; one that does not exist yet stands for the nearest parent that does.
        chosen: the user named it, so a directory of no use is an error.
    """
    folder = next(path for path in (where.absolute(), *where.absolute().parents) if path.is_dir())
    file, takes = folder / f".stagereg-doctor-{os.getpid()}", False
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with contextlib.suppress(OSError, AttributeError):  # macOS has no O_DIRECT
            os.close(os.open(file, os.O_WRONLY | os.O_DIRECT))
            takes = True
    except OSError as error:
        do = "Choose a directory that can be written, with --dir."
        return Finding(f"{folder}", "broken" if chosen else "warn", f"cannot be written: {error.strerror}", do)
    finally:
        file.unlink(missing_ok=True)
    space = os.statvfs(folder)
    kind, free = machine.file_system(folder) or "file system unknown", size_text(space.f_frsize * space.f_bavail)
    found = f"{kind}, {free} free, O_DIRECT {'yes' if takes else 'no'}"
    return _judged(f"{folder}", takes, found, "Checkpoints are written through the page cache here.")


def torch_findings() -> list[Finding]:
    """What PyTorch finds here; touches the accelerator and page-locks some memory. Runs in a child process."""
    import torch
    import torch.distributed as dist

    kind = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else ""
    count = torch.accelerator.device_count() if kind else 0
    names = [torch.cuda.get_device_name(i) for i in range(count)] if kind == "cuda" else [kind] * count
    there = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    backends = [name for name, available in there.items() if dist.is_available() and available()]
    missing = {"gloo", *(["nccl"] if kind == "cuda" else [])} - set(backends)
    do = f"Install a build of PyTorch with {' and '.join(sorted(missing))}; without nccl, train with gloo."
    found = f"{', '.join(backends) or 'none'}" + (f", no {' and '.join(sorted(missing))}" if missing else "")
    devices = f"{count} of {kind}: {', '.join(names)}" if count else "none: checkpoints stay in host memory"
    return [
        Finding("accelerators", "ok" if count else "missing", devices),
        _judged("collectives", not missing, found, do, "broken" if "gloo" in missing else "warn"),
        _page_locked(bool(count)),
    ]


def _page_locked(needed: bool) -> Finding:
    import torch

    what, (soft, _) = "page-locked memory", resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"limit {'none' if soft == resource.RLIM_INFINITY else size_text(soft)} (ulimit -l)"
    if not needed:
        return Finding(what, "ok", f"{text}; of no use without an accelerator")
    # Beyond the limit, where there is one: some drivers count against it, and some do not.
    nbytes = 2**20 + (0 if soft == resource.RLIM_INFINITY else min(soft, 2**28))
    try:
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        do = "Raise the limit: `ulimit -l unlimited`, or `docker run --ulimit memlock=-1`. Until then: stager.pin=false"
        return Finding(what, "broken", f"{text}: {str(error).splitlines()[0]}", do)
    return Finding(what, "ok", f"{text}; {size_text(nbytes)} were page-locked")


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


def components(limit_s: float) -> Iterator[Finding]:
    """Whether the built-in components and those of other packages load, and what packages announce in vain."""
    own = [f"{e.kind}/{e.name}" for e in registry.entries() if e.distribution == DISTRIBUTION]
    do = "Install stagereg again, with the versions of torch and hydra-core that it takes."
    yield _loaded("built-in components", own, f"{len(own)} of stagereg", do, max(limit_s, _TORCH_LIMIT_S))
    for each in registry.entries():
        if each.distribution not in ("", DISTRIBUTION):
            what = f"{each.kind}/{each.name}"
            do = f"Repair, update or uninstall {each.distribution}. Until then only runs that choose {what} fail."
            yield _loaded(what, [what], f"{each.distribution} {each.version}", do, limit_s)
    do = "Install it again, update it, or report it to its author. Its other plugins are there, if they can be read."
    yield from (Finding(package, "broken", reason, do) for package, reason in registry.unreadable())


def _loaded(what: str, names: list[str], who: str, do: str, limit_s: float) -> Finding:
    output.progress(f"importing {what}")
    with ChildCall(f"{__name__}:load", *names) as child:
        failed, failure = child.result(limit_s)
    wrong = failed or failure
    return _judged(what, not wrong, f"{who}: {wrong}" if wrong else who, do, "broken")
