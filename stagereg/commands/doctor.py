"""``stagereg doctor``: versions, limits, how memory is copied, the disk of checkpoints, accelerators, broken plugins.

PyTorch and the components of each package are imported in child processes with a limit of time, so that one that
crashes, exits or hangs is one row among the others. Nothing heavy is imported in this one.
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

_TORCH_LIMIT_S = 120.0  # seconds for PyTorch, whose first import from a network disk takes its time


class Finding(NamedTuple):
    """What was looked at, a verdict (ok, warn, missing where it is optional, broken), and what to do if not ok."""

    what: str
    verdict: str
    found: str
    do: str = ""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(commands, "doctor", "look at versions, limits, disks and plugins: what is broken?", run)
    parser.add_argument("--dir", default=".", help="a directory that checkpoints go to; the current one if not given")
    add_timeout(parser, "for importing each plugin")


def run(asked: argparse.Namespace) -> int:
    """Print the findings. Returns 1 if something is broken, 0 otherwise."""
    findings = [*_versions(), *_limits(), _directory(Path(asked.dir)), _torch(), *_components(asked.timeout)]
    output.progress()
    broken, warned = (sum(one.verdict == verdict for one in findings) for verdict in ("broken", "warn"))
    if asked.json:
        output.as_json({"findings": [one._asdict() for one in findings], "broken": broken, "warn": warned})
    else:
        rows = [(f.what, f.verdict, f.found if f.verdict == "ok" else f"{f.found}\n-> {f.do}") for f in findings]
        output.table("", ("what", "verdict", "found"), rows, verdict="verdict")
        output.echo(f"\n{broken} broken, {warned} to look at." if broken or warned else "\nNothing is broken.")
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
        do = f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install '{need.name}{need.specifier}'"
        try:
            there = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(need.name, "missing" if extra else "broken", "not installed", do)
            continue
        fits = need.specifier.contains(there, prereleases=True)
        found = there if fits else f"{there}, but stagereg needs {need.specifier}"
        yield Finding(need.name, "ok" if fits else "warn" if extra else "broken", found, do)


def _limits() -> Iterator[Finding]:
    memory = size_text(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    yield Finding("machine", "ok", f"{machine.cores()} of {os.cpu_count()} cores for this process, {memory}")
    how = f"the compiled part, with {compiled.way}" if compiled.way else "the C library; the compiled part is missing"
    do = f"Where there is a C compiler, it is built by `pip install --force-reinstall --no-deps {DISTRIBUTION}`."
    yield Finding("copying", "ok" if compiled.way else "missing", how, do)
    free = shutil.disk_usage("/dev/shm").free
    do = "DataLoader workers and NCCL need more: `docker run --shm-size=8g` or `--ipc=host`."
    yield Finding("/dev/shm", "ok" if free >= 2**30 else "warn", f"{size_text(free)} free", do)
    # -1 is no limit.
    locked, files = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    yield Finding("page-locked memory", "ok", "no limit" if locked < 0 else size_text(locked))
    yield Finding("open files", "warn" if 0 <= files < 1024 else "ok", f"at most {files}", "`ulimit -n 65536` before")


def _directory(where: Path) -> Finding:
    folder = next(path for path in (where.absolute(), *where.absolute().parents) if path.is_dir())
    found = f"{machine.file_system(folder)} {size_text(shutil.disk_usage(folder).free)} free"
    verdict, what = ("ok", "") if os.access(folder, os.W_OK) else ("broken", "cannot be written, ")
    return Finding(str(folder), verdict, what + found, "Choose a directory that can be written, with --dir.")


def _torch() -> Finding:
    found, failure = call_in_child(f"{__name__}:torch_finding", limit_s=_TORCH_LIMIT_S)
    verdict, text = ("broken", failure) if failure else found
    return Finding("accelerators", verdict, text, "Install a build of PyTorch that works here, with gloo or nccl.")


def torch_finding() -> tuple[str, str]:
    """What accelerators and backends PyTorch finds here. Runs in a child process."""
    import torch
    import torch.distributed as dist

    count = torch.accelerator.device_count()
    kind = str(torch.accelerator.current_accelerator())
    found = f"{count} of {kind}" if count else "none: checkpoints stay in host memory"
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    verdict = "broken" if not gloo else "warn" if kind == "cuda" and not nccl else "ok"
    return verdict, f"{found}; gloo {'yes' if gloo else 'no'}, nccl {'yes' if nccl else 'no'}"


def _components(limit_s: float) -> Iterator[Finding]:
    every = {f"{each.kind}/{each.name}": each for each in registry.entries() if each.distribution}
    own = [what for what, each in every.items() if each.distribution == DISTRIBUTION]
    others = [(what, [what], f"{e.distribution} {e.version}", limit_s) for what, e in every.items() if what not in own]
    for what, names, who, seconds in [("built-in components", own, "stagereg", _TORCH_LIMIT_S), *others]:
        output.progress(f"importing {what}")
        _, wrong = call_in_child(f"{__name__}:load", *names, limit_s=seconds)
        do = f"Repair, update or uninstall {who}. Until then only runs that choose {what} fail."
        yield Finding(what, "broken" if wrong else "ok", f"{who}: {wrong}" if wrong else who, do)
    for package, reason in registry.unreadable():
        yield Finding(package, "broken", reason, "Install it again, update it, or report it to its author.")


def load(*components: str) -> None:
    """Load components, ``kind/name``, and make their configs. Runs in a child process, whose result is its error."""
    import stagereg.config.schema as schema

    for component in components:
        schema.schema(registry.find(*component.split("/", 1)))
