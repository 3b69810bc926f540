"""Runs a trial in a process of its own and ends it when it hangs: a plugin that crashes costs one row.

A process that dies or hangs is reported with its last output, its stack included, and another one goes on after what it
was trying. What a trial does is in ``check_trial``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from stagereg.commands.target import CheckJob, CheckRow
from stagereg.crash_report import innermost_frame, signal_name
from stagereg.errors import ConfigError

__all__ = ["Section", "run"]

_START_S = 300.0
"""Seconds that a process has to start and to import torch, which is not the plugin's doing."""
_LINGER_S = 3.0
"""Seconds that a hung process gets to dump its stacks."""
_END_S = 30.0
"""Seconds that a process which has tried everything gets to end."""
_PATIENCE = 4
"""How often a component may hang or end its process until the rest is left out: each time costs a limit, or a start."""
_LAST_WORDS = 4
"""Lines of what a process that died has printed last."""
_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from stagereg.commands import check_trial; "


@dataclass
class Section:
    """What was found out about one component, or one contract.

    Attributes:
        title: ``kind/name``, or the name of a contract or file.
        origin: where it is from.
        rows: how each thing that was tried fared.
        deaths: how many processes it has cost.
    """

    title: str
    origin: str = ""
    rows: list[CheckRow] = field(default_factory=list)
    deaths: int = 0


def run(
    job: CheckJob, options: Mapping[str, Any], limit_s: float, trying: Callable[[str], None] = lambda what: None
) -> list[Section]:
    """Try all of ``job``, in as many processes as it takes.

    Args:
        job: what to try.
        options: of a stager that is built without a contract's help.
        limit_s: seconds that each thing may take.
        trying: called with each promise before it is tried.

    Raises:
        ConfigError: the component does not take these options.
    """
    sections: dict[str, Section] = {}
    while _go_on(job, options, limit_s, trying, sections):
        pass
    return [section for section in sections.values() if section.rows]


def _go_on(
    job: CheckJob,
    options: Mapping[str, Any],
    limit_s: float,
    trying: Callable[[str], None],
    sections: dict[str, Section],
) -> bool:
    """Run one process and add its results; return whether another one has to go on after it."""
    tried = [(s.title, row.name, row.verdict != "broken") for s in sections.values() for row in s.rows]
    given_up = [section.title for section in sections.values() if section.deaths >= _PATIENCE]
    with tempfile.TemporaryFile() as stacks, tempfile.TemporaryFile() as printed, _leash() as leash:
        process, pipe = _start(job, options, (tried, given_up), stacks, printed, leash)
        section, attempt, begun, limit = Section(job.title), {}, 0, _START_S
        try:
            for message in _listen(process, pipe, limit_s):
                limit = limit_s
                if message["event"] == "section":
                    section = sections.setdefault(message["section"], Section(message["section"], message["origin"]))
                elif message["event"] == "trying":
                    attempt = message
                    begun = int(message["printed"])
                    trying(f"{message['section']}: {message['promise']}")
                elif message["event"] == "outcome":
                    attempt = {}
                    section.rows.append(
                        CheckRow(message["name"], message["promise"], message["verdict"], message["seen"])
                    )
                elif message["event"] == "refused":
                    raise ConfigError(message["why"])
                elif message["event"] == "end":
                    # Whose thread it is that holds it up is not known, where it has tried several.
                    sections.setdefault(job.title, section).rows.extend(_ended(process, stacks))
                    return False
            seen = _fate(process, stacks, printed, begun, limit)
        finally:
            _end(process)
            os.close(pipe)
    sections.setdefault(section.title, section).deaths += 1
    if not attempt:
        section.rows.append(CheckRow("runs", "It leaves the process that uses it alone.", "broken", seen))
        return False
    section.rows.append(CheckRow(attempt["name"], attempt["promise"], "broken", seen))
    return True


def _start(
    job: CheckJob,
    options: Mapping[str, Any],
    known: tuple[object, object],
    stacks: IO[bytes],
    printed: IO[bytes],
    leash: int,
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a process with this one's ``sys.path``, in a group of its own; return it and the pipe of its messages.

    ``leash`` is one end of a pipe: when the other is closed, as by the end of this process, that one ends.
    """
    reader, writer = os.pipe()
    path = [folder or os.getcwd() for folder in sys.path]
    message = [
        str(writer),
        str(stacks.fileno()),
        str(leash),
        *map(json.dumps, (dataclasses.asdict(job), dict(options), *known)),
    ]
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"{_CHILD}check_trial.main(sys.argv[1:])", json.dumps(path), *message],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=(writer, stacks.fileno(), leash),
            start_new_session=True,
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return process, reader


@contextlib.contextmanager
def _leash() -> Iterator[int]:
    theirs, ours = os.pipe()
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


def _listen(process: subprocess.Popen[bytes], pipe: int, limit_s: float) -> Iterator[dict[str, str]]:
    """Yield the messages of the process until it ends, or sends none for so many seconds."""
    rest = b""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        gone = process.poll() is not None
        # A process that the plugin has left behind may hold the pipe open.
        ready, _, _ = select.select([pipe], [], [], 0 if gone else 0.1)
        if not ready:
            if gone:
                return
            continue
        more = os.read(pipe, 2**16)
        if not more:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            return
        *lines, rest = (rest + more).split(b"\n")
        for line in lines:
            yield json.loads(line)
        deadline = time.monotonic() + limit_s


def _fate(process: subprocess.Popen[bytes], stacks: IO[bytes], printed: IO[bytes], begun: int, limit_s: float) -> str:
    """Describe how a process ended before it was done, or that it hangs.

    Its ``printed`` output counts from ``begun``.
    """
    code = process.poll()
    if code is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LINGER_S)
        return f"it hung: still running after {limit_s:g} s{_place(stacks)}"
    printed.seek(begun)
    last = [line for line in printed.read().decode(errors="replace").splitlines() if line.strip()][-_LAST_WORDS:]
    how = f"died of {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return "\n".join([f"the process {how}{_place(stacks)}", *(f"  {line}" for line in last)])


def _ended(process: subprocess.Popen[bytes], stacks: IO[bytes]) -> list[CheckRow]:
    """Wait for a process that has tried everything; a row if it does not come to its end."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LINGER_S)
        seen = f"it was still there {_END_S:g} s after all else{_place(stacks)}"
        return [CheckRow("ends", "The process that has used it comes to its end.", "broken", seen)]
    return []


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, if it is there, and those it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _place(stacks: IO[bytes]) -> str:
    """Where the plugin was, by the stacks that ``faulthandler`` wrote, if it did."""
    stacks.seek(0)
    where = innermost_frame(stacks.read().decode(errors="replace"))
    return f", in {where}" if where else ""
