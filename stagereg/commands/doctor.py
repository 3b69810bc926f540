"""``stagereg doctor``: checks versions, limits, memory copying, the checkpoint disk, accelerators and plugins.

Child processes with a timeout import PyTorch and each package, so that a failed import is only one row in the table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import stagereg.base.machine as machine
import stagereg.base.output as output
import stagereg.kernel.compiled as compiled
import stagereg.registry as registry
from stagereg.base.installed import DISTRIBUTION
from stagereg.base.output import size_text
from stagereg.base.version import __version__
from stagereg.commands.arguments import add_command, add_timeout
from stagereg.commands.child import call_in_child

_TORCH_LIMIT_S = 120.0  # seconds; the first import of PyTorch from a network disk is slow


class Finding(NamedTuple):
    """The result of a check. ``verdict``: ok, warn, broken or missing (not installed). ``do``: the remedy."""

    what: str
    verdict: str
    found: str
    do: str = ""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(commands, "doctor", "check versions, limits, disks, accelerators and plugins", run)
    parser.add_argument("--dir", default=".", help="checkpoint directory to check; default: the current directory")
    add_timeout(parser, "importing each plugin")


def run(asked: argparse.Namespace) -> int:
    """Print the findings. Return 1 if something is broken, otherwise 0."""
    findings = [*_versions(), *_limits(), _directory(Path(asked.dir)), _torch(), *_components(asked.timeout)]
    output.progress()
    broken, warned = (sum(one.verdict == verdict for one in findings) for verdict in ("broken", "warn"))
    if asked.json:
        output.as_json({"findings": [one._asdict() for one in findings], "broken": broken, "warn": warned})
    else:
        rows = [(f.what, f.verdict, f.found if f.verdict == "ok" else f"{f.found}\n-> {f.do}") for f in findings]
        output.table("", ("check", "verdict", "result"), rows, verdict="verdict")
        output.echo(f"\n{broken} broken, {warned} with warnings." if broken or warned else "\nNo problems found.")
    return int(broken > 0)


def _versions() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield Finding("stagereg", "ok", f"{__version__} at {Path(__file__).parents[1]}")
    try:
        needs = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        needs = [DISTRIBUTION]
    for need in map(Requirement, needs):
        extra = "".join(re.findall(r'extra == "(.+?)"', str(need.marker or "")))
        if extra in ("test", "dev"):
            continue
        do = f"pip install './stagereg[{extra}]'" if extra else f"pip install '{need.name}{need.specifier}'"
        try:
            installed = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(need.name, "missing" if extra else "broken", "optional, " * bool(extra) + "not installed", do)
            continue
        fits = need.specifier.contains(installed, prereleases=True)
        found = installed if fits else f"{installed}, but stagereg requires {need.specifier}"
        yield Finding(need.name, "ok" if fits else "warn" if extra else "broken", found, do)


def _limits() -> Iterator[Finding]:
    memory = size_text(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    yield Finding("machine", "ok", f"{machine.cores()} of {os.cpu_count()} cores for this process, {memory} of memory")
    how = f"compiled extension, {compiled.way}" if compiled.way else "memcpy of the C library: no compiled extension"
    do = "Install a C compiler, then run `pip install --force-reinstall --no-deps ./stagereg`."
    yield Finding("copying", "ok" if compiled.way else "missing", how, do)
    free = shutil.disk_usage("/dev/shm").free
    do = "DataLoader workers and NCCL need at least 1 GiB: `docker run --shm-size=8g` or `--ipc=host`."
    yield Finding("/dev/shm", "ok" if free >= 2**30 else "warn", f"{size_text(free)} free", do)
    # -1: unlimited
    locked, files = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    yield Finding("page-locked memory", "ok", "no limit" if locked < 0 else f"at most {size_text(locked)}")
    state = "warn" if 0 <= files < 1024 else "ok"
    yield Finding("open files", state, f"at most {files}", "Run `ulimit -n 65536` first.")


def _directory(where: Path) -> Finding:
    folder = next(path for path in (where.absolute(), *where.absolute().parents) if path.is_dir())
    found = ", ".join(filter(None, (machine.file_system(folder), f"{size_text(shutil.disk_usage(folder).free)} free")))
    verdict, what = ("ok", "") if os.access(folder, os.W_OK) else ("broken", "not writable, ")
    return Finding(str(folder), verdict, what + found, "Choose a writable directory with --dir.")


def _torch() -> Finding:
    found, failure = call_in_child(f"{__name__}:torch_finding", limit_s=_TORCH_LIMIT_S)
    verdict, text = ("broken", failure) if failure else found
    return Finding("accelerators", verdict, text, "Install a PyTorch build for this machine, with gloo (CUDA: nccl).")


def torch_finding() -> tuple[str, str]:
    """Return the accelerators and backends of PyTorch on this machine. Runs in a child process."""
    import torch
    import torch.distributed as dist

    count = torch.accelerator.device_count()
    kind = str(torch.accelerator.current_accelerator())
    found = f"{count} {kind}" if count else "none, so training runs on the CPU"
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    verdict = "broken" if not gloo else "warn" if kind == "cuda" and not nccl else "ok"
    return verdict, f"{found}; backends: {', '.join(['gloo'] * gloo + ['nccl'] * nccl) or 'neither gloo nor nccl'}"


def _components(limit_s: float) -> Iterator[Finding]:
    every = {f"{each.kind}/{each.name}": each for each in registry.entries() if each.distribution}
    own = [what for what, each in every.items() if each.distribution == DISTRIBUTION]
    others = [(what, [what], f"{e.distribution} {e.version}", limit_s) for what, e in every.items() if what not in own]
    for what, names, who, seconds in [("built-in components", own, "stagereg", _TORCH_LIMIT_S), *others]:
        output.progress(f"importing {what}")
        _, failure = call_in_child(f"{__name__}:load", *names, limit_s=seconds)
        do = f"Fix, update or uninstall {who}. Only runs that use {what} fail."
        yield Finding(what, "broken" if failure else "ok", f"{who}: {failure}" if failure else who, do)
    for package, reason in registry.unreadable():
        yield Finding(package, "broken", reason, f"Reinstall or update {package}, or report this to its author.")


def load(*components: str) -> None:
    """Import components (``kind/name``) and build their configs. Runs in a child process, which reports an error."""
    import stagereg.config.schema as schema

    for component in components:
        schema.schema(registry.find(*component.split("/", 1)))
