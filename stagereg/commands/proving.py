"""``stagereg prove``: start a program from checkpoints, and compare its first steps with the recorded steps.

docs/prove.md explains the verdicts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import stagereg.base.output as output
import stagereg.extensions.prove.notes as notes
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.located import located, newest_first, path_of
from stagereg.checkpoint.store.open_store import local_part
from stagereg.commands.arguments import above_zero, add_command
from stagereg.errors import CheckpointError, ConfigError, StageregError, name_ranks, reason

_POLL_S = 2.0  # seconds between two listings of a directory that is followed
_EXIT_S = 20.0  # seconds in which a program that has taken its steps must exit
_GRACE_S = 5.0  # seconds between SIGTERM and SIGKILL
_ROWS = 8  # maximum number of differences in a table
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
_MORE = (
    "The run must have recorded them: checkpoint.prove.steps=3. The default is the newest checkpoint after which the "
    "run took all of these steps. The program runs as usual, but its checkpointer writes nothing."
)
_PAGE = "docs/prove.md"
_COMPARED = "Compared with another number of ranks: norms of whole tensors within 0.1 %, samples and options exactly."


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "start a program from a checkpoint, and compare its first steps with the steps after the save"
    parser = add_command(commands, "prove", text, prove, _MORE)
    parser.add_argument("directory", help="path or URL of a checkpoint directory, or of one checkpoint")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--latest", action="store_true", help="prove the newest checkpoint with recorded steps")
    which.add_argument("--all", action="store_true", help="prove each checkpoint with recorded steps")
    which.add_argument("--follow", action="store_true", help="prove each checkpoint during the run, until it ends")
    parser.add_argument("--after-run", action="store_true", help="with --follow: begin when the run has ended")
    parser.add_argument("--nproc", type=above_zero(int), default=0, metavar="N", help="override nproc (stagereg.main)")
    text = "limit for one proof in seconds; default %(default)g"
    parser.add_argument("--timeout", type=above_zero(float), default=600.0, metavar="S", help=text)
    parser.add_argument("command", nargs="+", help="the program with its arguments, after --")


def prove(asked: argparse.Namespace) -> int:
    """Prove checkpoints. Return 0 if all are proven, 1 if any is refuted, otherwise 2."""
    if shutil.which(asked.command[0]) is None:
        raise ConfigError(f"command not found: {asked.command[0]!r}")
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the program is ended too
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    verdicts = []
    try:
        for each in _follow(asked) if asked.follow else (_prove(asked, *one) for one in _chosen(asked)):
            verdicts.append(each)
            if not asked.json:
                _print(each)
    except (StageregError, BrokenPipeError):
        raise
    except Exception as error:  # exit code 1 would mean that a checkpoint is refuted
        raise CheckpointError(f"The proof failed: {reason(error)}") from error
    if asked.json:
        output.as_json({"root": asked.directory, "checkpoints": [_entry(each) for each in verdicts]})
    states = {each.state for each in verdicts}
    return 1 if notes.REFUTED in states else 2 if notes.NOT_TRIED in states else 0


def _chosen(asked: argparse.Namespace) -> list[tuple[CheckpointStore, Checkpoint]]:
    found = located(asked.directory)
    valid = [each.checkpoint for each in newest_first(found.conditions) if each.checkpoint is not None]
    recorded = [(found.store, each) for each in valid if _has_steps(found.store, each)]
    if not recorded:
        raise ConfigError(
            f"No checkpoint in {asked.directory} has recorded steps. Train with checkpoint.prove.steps=3 (in Python: "
            "Checkpointer(prove=stagereg.Prove(steps=3))), and take at least one step after a save."
        )
    whole = [each for each in recorded if _is_whole(notes.read(*each))]
    return recorded if asked.all else (recorded if asked.latest else whole or recorded)[:1]


def _rows(store: CheckpointStore, checkpoint: Checkpoint, note: Mapping[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """Return the recorded snapshots of each rank; an empty list if a rank recorded nothing in this run."""
    read = {rank: notes.read(store, checkpoint, rank) for rank in range(note["ranks"])}
    return {rank: each["rows"] if each.get("run") == note["run"] else [] for rank, each in read.items()}


def _has_steps(store: CheckpointStore, checkpoint: Checkpoint) -> bool:
    note = {} if checkpoint.manifest.dropped else notes.read(store, checkpoint)
    return bool(note) and any(len(rows) > 2 for rows in _rows(store, checkpoint, note).values())


def _is_whole(note: Mapping[str, Any]) -> bool:
    """Return whether the run took all the steps that it wanted to record after a save."""
    return bool(note["steps"] == note["wanted"])


def _follow(asked: argparse.Namespace) -> Iterator[Verdict]:
    """Prove recorded checkpoints that have no verdict yet, until no run holds the lock and none is left."""
    done: set[str] = set()
    while True:
        found = located(asked.directory, empty=True)
        ended = found.store.backend.holder() is None
        valid = [each.checkpoint for each in newest_first(found.conditions) if each.checkpoint is not None]
        open_ = [each for each in valid if each.key not in done and "verdict" not in notes.read(found.store, each)]
        ready = [each for each in open_ if _has_steps(found.store, each)]
        if ready and (ended or not asked.after_run):
            done.add(ready[0].key)
            yield _prove(asked, found.store, ready[0])
        elif ended:
            return
        time.sleep(_POLL_S)


@dataclass
class Verdict:
    """The result of one proof."""

    checkpoint: Checkpoint
    state: str = notes.NOT_TRIED
    why: str = ""  # the first difference in short, or why there was no proof
    steps: int = 0  # the number of compared steps
    differences: list[Any] = field(default_factory=list)
    likely: str = ""  # the likely cause
    remarks: list[str] = field(default_factory=list)


def _prove(asked: argparse.Namespace, store: CheckpointStore, checkpoint: Checkpoint) -> Verdict:
    """Run the program from a checkpoint, compare its steps with the recorded steps, and record the verdict."""
    verdict, note = Verdict(checkpoint), notes.read(store, checkpoint)
    if asked.nproc and not note["hydra"]:
        raise ConfigError("--nproc needs a program under stagereg.main. Give a command that starts N ranks.")
    every = _rows(store, checkpoint, note)
    if none := [rank for rank, rows in every.items() if not rows]:
        verdict.why = f"{name_ranks(none)} recorded no steps after this save: the run failed there"
        return verdict
    recorded = {rank: rows for rank, rows in every.items() if len(rows) > 2}  # the others had left their loops
    if not recorded:
        verdict.why = "no rank took a step after this save"
        return verdict
    local = not store.backend.remote and os.access(store.root, os.W_OK)
    scratch = tempfile.mkdtemp(prefix=".prove-", dir=store.root if local else None)
    try:
        with store.readers.read_lease(checkpoint.path):
            steps = {str(rank): len(rows) - 2 for rank, rows in every.items()}
            path = os.path.realpath(checkpoint.path) if not store.backend.remote else checkpoint.path
            known = {"number": note["number"], "ranks": note["ranks"], "steps": steps, "most": max(steps.values())}
            task = {"checkpoint": path, "step": checkpoint.manifest.step, "scratch": scratch, **known}
            Path(scratch, "task.json").write_text(json.dumps(task))
            more = [f"nproc={asked.nproc}"] * bool(asked.nproc) + [f"hydra.run.dir={scratch}/run"] * note["hydra"]
            code = _run([*asked.command, *more], scratch, asked.timeout, [f"rank{rank}.json" for rank in recorded])
            results = {int(each.stem[4:]): json.loads(each.read_text()) for each in Path(scratch).glob("rank*.json")}
            failed = code != 0 and any(
                len(each["rows"]) < len(recorded.get(rank, ())) for rank, each in results.items()
            )
            if results and not failed:
                _judge(verdict, note, recorded, results)
            else:
                verdict.why = _end(code, asked.timeout, scratch)
            if path_of(store, checkpoint) is None:
                verdict.state, verdict.why = notes.NOT_TRIED, "the checkpoint was deleted during the proof"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if verdict.state != notes.NOT_TRIED:
        more_facts = {"verdict": verdict.state, "why": verdict.why, "likely": verdict.likely, "time": int(time.time())}
        try:
            notes.write(store, checkpoint.manifest.step, note | more_facts)
        except OSError as error:
            verdict.remarks.append(f"The verdict could not be recorded: {error}")
    return verdict


def _judge(
    verdict: Verdict, note: Mapping[str, Any], recorded: Mapping[int, Any], results: Mapping[int, Mapping[str, Any]]
) -> None:
    from stagereg.commands.comparing import compare, explain
    from stagereg.extensions.prove.observing import DATA, GRADIENT, LOSS, PARAMETER, RANDOM

    other = next(iter(results.values()))
    tried = {rank: each["rows"] for rank, each in results.items()}
    if same_size := other["ranks"] == note["ranks"]:
        if missing := [rank for rank in recorded if rank not in tried]:
            verdict.why = f"no step of rank {missing[0]} could be compared: it failed, or left its loop earlier"
            return
        tried = {rank: tried[rank] for rank in recorded}
    else:
        verdict.remarks.append(_COMPARED)
    found = {key: value for rows in recorded.values() for row in rows for key, value in row.items()}
    if not any(isinstance(value, list) for value in found.values()):
        verdict.why = "the run recorded no tensors: its state has neither modules nor tensors"
        return
    kinds = {key.partition(":")[0] for key in found if key != "data: count"}
    if lacking := [kind for kind in (DATA, GRADIENT, PARAMETER) if kind not in kinds]:
        verdict.remarks.append(f"Not recorded, so not compared: {', '.join(lacking)}.")
    verdict.differences = compare(recorded, tried, same_size)
    verdict.steps = max(map(len, tried.values())) - 2
    if not _is_whole(note):
        verdict.remarks.append(f"The run took only {note['steps']} of {note['wanted']} steps after the save.")
    first = next((each for each in verdict.differences if each.refutes), None)
    verdict.state = notes.PROVEN if first is None else notes.REFUTED
    if first is not None:
        verdict.why = f"{first.kind}: {first.name}"
        verdict.likely = explain(verdict.differences, recorded, [note, other])
    changed = [name for name in ("torch", "stagereg", "device", "ranks") if note[name] != other[name]]
    verdict.remarks += [f"The run used {name} {note[name]}, and the proof {name} {other[name]}." for name in changed]
    others = [each for each in verdict.differences if not each.refutes and each.kind != LOSS]  # a consequence
    names = [f"{each.kind}: {each.name}" for each in others if each.found != str(verdict.checkpoint.manifest.step)]
    if first is not None and names:
        verdict.remarks.append(f"These differ too, perhaps the cause: {'; '.join(dict.fromkeys(names))[:300]}.")
    elif unused := [each.name for each in others if each.kind == RANDOM]:
        verdict.remarks.append(f"Different, but not used in these steps: {', '.join(dict.fromkeys(unused))}.")


def _end(code: int | None, limit_s: float, scratch: str) -> str:
    """Return why a program took no steps that could be compared."""
    printed = Path(scratch, "printed").read_text(errors="replace")
    lines = [line.strip() for line in printed.splitlines() if line.strip("=- ")] or ["nothing"]
    last = next((line for line in reversed(lines) if re.match(r"\w*(Error|Exception|Interrupt)\b", line)), lines[-1])
    how = f"did not end in {limit_s:g} s (--timeout)" if code is None else f"exited with code {code}"
    restored = Path(scratch, "restored").exists()
    what = "before it took all steps" if restored else "and did not restore the checkpoint with restore(state)"
    return f"the program {how} {what}; its last output: {last}"


def _run(command: Sequence[str], scratch: str, limit_s: float, results: Sequence[str]) -> int | None:
    """Run a program until it exits or all results exist, at most ``limit_s`` seconds, and end its processes.

    Returns the exit code, or ``None`` if this function has ended the program.
    """
    from stagereg.extensions.prove.recording import ENVIRONMENT

    variables = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    how: Any = {"env": {**variables, ENVIRONMENT: f"{scratch}/task.json"}, "start_new_session": True}
    with Path(scratch, "printed").open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, **how)
    until = time.monotonic() + limit_s
    try:
        while process.poll() is None and time.monotonic() < until:
            output.progress(f"running {' '.join(command)[:60]}")
            if results and all(Path(scratch, name).exists() for name in results):
                until = min(until, time.monotonic() + _EXIT_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        return process.poll()
    finally:
        output.progress()
        for number in (signal.SIGTERM, signal.SIGKILL):  # a launcher ends its ranks after SIGTERM
            if process.poll() is None:
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _entry(each: Verdict) -> dict[str, Any]:
    step = each.checkpoint.manifest.step
    first = next((one for one in each.differences if one.refutes), None)
    found = None
    if first is not None:
        shown = {"expected": _shown(first.expected, first.found), "found": _shown(first.found, first.expected)}
        found = {"step": step + first.row, "rank": first.rank, "kind": first.kind, "name": first.name, **shown}
    page = each.likely and f"{_PAGE}#{_anchor(each.why)}"
    verdict = {"path": each.checkpoint.path, "step": step, "verdict": each.state, "why": each.why, "steps": each.steps}
    return {**verdict, "first": found, "likely": each.likely, "page": page, "remarks": each.remarks}


def _print(each: Verdict) -> None:
    step, path = each.checkpoint.manifest.step, each.checkpoint.path
    inside = local_part(path) is not None and Path(path).is_relative_to(Path.cwd())
    title = f"{os.path.relpath(path) if inside else path}: {each.state}" + f" ({each.why})" * bool(each.why)
    if each.state == notes.PROVEN:
        title += f": {each.steps} step{'s' * (each.steps != 1)} equal to those of the run that saved it"
    refuting = [one for one in each.differences if one.refutes]
    rows = [
        (
            str(step + one.row) if one.row else f"{step}, restored",
            "all" if one.rank < 0 else str(one.rank),
            *(one.kind, one.name, _shown(one.expected, one.found), _shown(one.found, one.expected)),
        )
        for one in refuting
        if one.row == refuting[0].row
    ][:_ROWS]
    if rows:
        output.table(title, ("step", "rank", "differs", "name", "expected", "found"), rows)
    else:
        output.echo(title)
    if len(refuting) > len(rows):
        output.echo(f"  ... and {len(refuting) - len(rows)} more differences in this step and later ones")
    if each.likely:
        output.echo(f"\nLikely cause: {each.likely}\nHow to fix it: {_PAGE}#{_anchor(each.why)}")
    for remark in each.remarks:
        output.echo(remark)


def _anchor(why: str) -> str:
    """Return the heading of the page that explains a kind of difference."""
    return why.partition(":")[0].replace(" ", "-")


def _shown(value: Any, other: Any = None) -> str:
    """Return a value for the table: the digest and norm of a tensor, or its kind if that differs; or a plain value."""
    from stagereg.commands.comparing import kind_of

    if isinstance(value, list):
        if kind_of(value) and kind_of(other) and kind_of(value) != kind_of(other):
            return kind_of(value)
        return f"{value[0][-1]} (norm {value[1]:.6g})" if value[1] else str(value[0][-1])
    return f"{value:.9g}" if isinstance(value, float) else str(value)
