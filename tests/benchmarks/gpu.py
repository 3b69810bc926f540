"""``make gpu`` and ``make gpu-quick``: tests and benchmarks on an NVIDIA GPU, on one page (``gpu.md``, ``gpu.json``).

``--quick`` takes at most :data:`QUICK_S` seconds: tests marked ``gpu``, the checks of twelve risks, and short
measurements. Without ``--quick``, all tests and benchmarks run with more rounds. The page has the tests and checks that
passed, failed or could not run, with reasons, the tables, and the versions of the software and the driver.

Each piece runs in a process of its own with a time limit. A piece that fails, crashes or takes too long costs only its
part of the page, which then has the error. The exit code is 1 if a piece failed, a test failed, or a check found a
fault.

Requires Linux, torch 2.11 or newer, Hydra, pytest and hypothesis. Without network, run it with the Python that has
these packages: ``python tests/benchmarks/gpu.py --out gpu-report``. ``--device cpu`` is a dry run without a GPU, which
shows that each piece runs. Its figures are not figures of a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parents[2]
QUICK_S = 480.0  # maximum seconds of --quick
NO_GPU = "No GPU: nothing here is a GPU figure"

FIRST = (
    "stagers/test_accelerator.py",
    "stagers",
    "kernel",
    "base",
    "extensions/recovery/test_queued_steps.py",
    "extensions/recovery/test_step_snapshot.py",
    "extensions/recovery/test_emergency*.py",
    "join",
    "extensions/numa",
    "launch",
)
"""The files and folders in ``tests`` that run first, in this order, because they hold the twelve risks."""

LAST = ("extensions/recovery/test_devices.py", "benchmarks")
"""The files and folders in ``tests`` that run last, because they take long."""

RISKS = {
    "R1": "an emergency save behind a collective that does not end",
    "R4": "a copy that holds the link for long",
    "R3": "page-locking on the training thread",
    "R5": "storages that are replaced or freed during a copy",
    "R2": "forked children and staging memory",
    "R9": "a captured optimizer that is replayed during a copy",
    "R8": "a CUDA graph that is captured during a copy",
    "R10": "thousands of small tensors",
    "R6": "`join.mean` and the device",
    "R11": "a core that spins in a wait",
    "R12": "views with holes, and a copy after a failed copy",
    "R7": "staging memory on another NUMA node",
}
"""What each check in ``gpu_risks.py`` looks for, in the order of the checks."""

OK, FAULT, COULD_NOT_RUN = "ok", "fault", "could not run"

_POLL_S = 0.1
_REAP_S = 2.0  # maximum seconds to wait for a killed process
_LEAST_S = 2.0  # a piece with less time does not start


@dataclass
class Piece:
    """A process, its limits and its result.

    Pieces with the same ``share`` have a limit together.
    """

    name: str
    command: list[str]
    limit_s: float
    share: str = ""
    seconds: float = 0.0
    error: str = ""  # empty if the piece succeeded
    printed: str = ""
    result: Any = field(default_factory=dict)  # the content of its JSON file

    def run(self, folder: Path, left_s: float = math.inf) -> None:
        """Run the command for at most ``limit_s`` and ``left_s`` seconds.

        ``{out}`` in the command is replaced by the path of a file for the result.
        """
        began = time.monotonic()
        if left_s < _LEAST_S:
            self.error = "no time was left"
        else:
            try:
                self._run(folder, min(self.limit_s, left_s))
            except (OSError, ValueError) as error:
                self.error = self.error or f"{type(error).__name__}: {error}"
        self.seconds = time.monotonic() - began
        self.conclude(left_s)

    def _run(self, folder: Path, limit_s: float) -> None:
        file = folder / f"{self.name}.out"
        with open(folder / f"{self.name}.log", "w+", errors="replace") as log:
            try:
                with _started([part.replace("{out}", str(file)) for part in self.command], log) as process:
                    try:
                        code = process.wait(limit_s)
                        self.error = f"exit code {code}" if code else ""
                    except subprocess.TimeoutExpired:
                        self.error = f"stopped after {limit_s:.3g} s"
            finally:
                log.seek(0)
                self.printed = log.read()
        if file.exists():
            self.result = json.loads(file.read_text())

    def conclude(self, left_s: float) -> None:
        """Add what follows from the result and the error."""


class Risk(Piece):
    """The check of one risk. ``result`` has the verdict and the figures. A process that crashes or hangs is a fault."""

    def conclude(self, left_s: float) -> None:
        lines = re.findall(rf"^{self.name} ({OK}|{FAULT}|{COULD_NOT_RUN}): (.*)$", self.printed, re.MULTILINE)
        if lines:
            verdict, figures = lines[-1]
        elif left_s < self.limit_s and not self.error.startswith("exit code"):
            verdict, figures = COULD_NOT_RUN, "the other checks used up the time"
        else:
            verdict, figures = FAULT, self.error or "the check printed no verdict"
        if lines and self.error and verdict != FAULT:  # for example a crash after the verdict
            verdict, figures = FAULT, f"{figures}; {self.error}"
        self.error = FAULT if verdict == FAULT else self.error
        self.result = {"verdict": verdict, "figures": figures}


class Bench(Piece):
    """A benchmark with rows. A failure of torch's own stager or storage is in the table, and is not an error."""

    def conclude(self, left_s: float) -> None:
        rows = [row for group in self.result.get("groups", ()) for row in group["rows"]]
        failed = [row["row"] for row in rows if row.get("failure")]
        if self.error == "exit code 1" and failed and all("torch:" in row for row in failed):
            self.error = ""


class Tests(Piece):
    """All tests marked ``gpu``, in one process of pytest, or in several if a test takes too long or crashes.

    ``result`` has the number of tests that passed, and the messages of tests that failed or could not run.
    """

    each_s = 600.0  # maximum seconds of one test

    def _run(self, folder: Path, limit_s: float) -> None:
        outcomes: dict[str, tuple[str, str]] = {}
        collected: set[str] = set()
        until, attempt, end = time.monotonic() + limit_s, 0, None
        while end is None:
            attempt += 1
            records, done = folder / f"tests.{attempt}.jsonl", folder / f"tests.{attempt}.json"
            done.write_text(json.dumps(list(outcomes)))
            command = [{"{out}": str(records), "{done}": str(done)}.get(part, part) for part in self.command]
            with open(folder / f"tests.{attempt}.log", "w+", errors="replace") as log:
                with _started(command, log) as process:
                    end = self._follow(process, records, outcomes, collected, until)
                log.seek(0)
                self.printed += log.read()
        not_run = dict.fromkeys(sorted(collected - outcomes.keys()), "no time was left")
        failed, skipped = (
            {k: v for k, (each, v) in outcomes.items() if each == kind} for kind in ("failed", "skipped")
        )
        passed = sum(each == "passed" for each, _ in outcomes.values())
        self.result = {"passed": passed, "failed": failed, "skipped": skipped | not_run}
        problems = [end, f"{len(failed)} failed" if failed else "", f"{len(not_run)} had no time" if not_run else ""]
        self.error = "; ".join(filter(None, [*problems, "" if outcomes or end else "no test was found"]))

    def _follow(
        self,
        process: subprocess.Popen[Any],
        records: Path,
        outcomes: dict[str, tuple[str, str]],
        collected: set[str],
        until: float,
    ) -> str | None:
        """Read the records of one process until it ends. Return ``None`` if another process must run the other tests.

        Otherwise, return the error, or an empty string.
        """
        read, running, since, before = 0, "", time.monotonic(), len(outcomes)
        while True:
            code = process.poll()
            lines = records.read_text().split("\n")[:-1] if records.exists() else []
            for record in map(json.loads, lines[read:]):
                if "collected" in record:
                    collected.update(record["collected"])
                elif record["outcome"] == "running":
                    running = record["test"]
                else:
                    outcomes[record["test"]], running = (record["outcome"], " ".join(record["message"].split())), ""
                since = time.monotonic()
            read, now = len(lines), time.monotonic()
            if code is not None:
                if running:
                    outcomes[running] = "failed", f"the process ended with exit code {code}"
                    return None
                return "" if code in (0, 1, 5) or len(outcomes) > before else f"exit code {code}"
            if now > until:
                if running:
                    outcomes[running] = "skipped", "no time was left to finish"
                return "stopped after its time" if running or not collected <= outcomes.keys() else ""
            if running and now - since > self.each_s:
                outcomes[running] = "failed", f"stopped after {self.each_s:g} s"
                return None
            if not running and collected and collected <= outcomes.keys() and now - since > 5 * _REAP_S:
                return "pytest did not end"
            time.sleep(_POLL_S)


@contextlib.contextmanager
def _started(command: Sequence[str], log: IO[str]) -> Iterator[subprocess.Popen[Any]]:
    """Start a command in a process group of its own. On exit, kill the group, and wait at most ``_REAP_S`` seconds."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):  # the process, and the processes that it started
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver can keep a killed process
            process.wait(_REAP_S)


def marked_files() -> list[str]:
    """Return the test files with tests marked ``gpu``: first :data:`FIRST`, in the end :data:`LAST`."""
    tests = REPOSITORY / "tests"
    found = [path for path in sorted(tests.rglob("test_*.py")) if "mark.gpu" in path.read_text()]

    def is_in(path: Path, entry: str) -> bool:
        return path.relative_to(tests).match(entry) or (tests / entry) in path.parents

    def place(path: Path) -> int:
        if any(is_in(path, entry) for entry in LAST):
            return len(FIRST) + 1
        return next((i for i, entry in enumerate(FIRST) if is_in(path, entry)), len(FIRST))

    return [str(path) for path in sorted(found, key=place)]


def pieces(device: str, scale: float, rounds: int | None, disk: Path, quick: bool = False) -> list[Piece]:
    """Return all pieces of the page, in order.

    Args:
        scale: fraction of the bytes of each state.
        rounds: measured rounds; ``None``: 7, or 3 with ``quick``.
        disk: directory for checkpoints.
        quick: whether to return the pieces of ``--quick``, whose limits together are below :data:`QUICK_S`.
    """
    rounds = rounds or (3 if quick else 7)
    python, here = [sys.executable, "-P"], Path(__file__).resolve().parent
    # In the whole dry run, some steps run on a CPU instead.
    chosen = "gpu" if device == "cuda" or quick else "gpu or in_place_of_gpu"
    pytest = [*python, str(here / "gpu_tests.py"), "{out}", "{done}", "-m", chosen, "-p", "no:cacheprovider"]
    pytest += ["--continue-on-collection-errors", "--tb=short", *(["--hypothesis-profile=quick"] if quick else [])]
    at = ["--device", device]
    sizes = ["--scale", str(scale), "--rounds", str(rounds), *at]
    bench, where, out = [*python, "-m", "stagereg", "bench"], ["--dir", str(disk)], ["--json", "{out}"]

    def figures(name: str, limit_s: float) -> Piece:
        return Piece(name, [*python, str(here / "gpu_figures.py"), name, "{out}", *sizes, *where], limit_s)

    def rows(*names: str) -> list[str]:
        return ["--rows", ",".join(names)] if quick else []

    torchs = ["torch:blocking", *(["torch:pinned"] if device != "cpu" else [])]
    staging = rows("overlapped:blocked", "overlapped:done", "pinned_cached", "again:pinned_cached", *torchs)
    stall = rows("torch:async_save", "pinned_cached+dcp", "overlapped+dcp")
    risk = [*python, str(here / "gpu_risks.py")]
    tests = Tests("tests", [*pytest, *marked_files()], 115 if quick else 1800)
    tests.each_s = 30.0 if quick else 600.0
    return [
        figures("machine", 15 if quick else 120),
        tests,
        *(Risk(name, [*risk, name, *at], 20 if quick else 60, "risks") for name in RISKS),
        figures("link", 20 if quick else 180),
        *([] if quick else [figures("large", 600)]),
        Bench("staging", [*bench, "staging", *sizes, *out, *staging], 50 if quick else 1200),
        Bench("stall", [*bench, "stall", *sizes, *out, *where, "--torch-threads", "1", *stall], 40 if quick else 900),
        figures("beside", 50 if quick else 600),
        figures("restore", 30 if quick else 600),
        *([] if quick else [Bench("write", [*python, str(here / "write.py"), *sizes, *out, *where], 600)]),
    ]


def shares(quick: bool) -> dict[str, float]:
    """Return the maximum seconds of all pieces with the same ``share``."""
    return {"risks": 145.0 if quick else 12 * 60.0}


def run(all_pieces: Sequence[Piece], limits: dict[str, float], most_s: float, folder: Path) -> None:
    """Run the pieces one after the other, each within its limit, the limit of its share, and ``most_s`` in total."""
    began, used = time.monotonic(), defaultdict[str, float](float)
    for piece in all_pieces:
        left_s = most_s - 2 * _REAP_S - (time.monotonic() - began)
        if piece.share:
            left_s = min(left_s, limits[piece.share] - used[piece.share])
        print(f"{piece.name}: at most {min(piece.limit_s, max(left_s, 0)):.0f} s", flush=True)
        piece.run(folder, left_s)
        used[piece.share] += piece.seconds
        if piece.error:
            print(f"{piece.name}: {piece.error}", flush=True)


# -- the page


def _results(done: Sequence[Piece]) -> dict[str, Any]:
    """Return the results by piece. A piece without a result has an empty dict."""
    return defaultdict(dict, {piece.name: piece.result for piece in done})


def targets(found: dict[str, Any], device: str) -> list[tuple[str, str, bool | None]]:
    """Return the targets, with the figures, and whether each is reached. ``None``: not measured, or not on a GPU."""
    link, large = found["link"].get("bytes_per_s"), found["large"]
    rows: list[tuple[str, str, bool | None]] = []

    def add(what: str, figure: float | None, shown: str, is_reached: Callable[[float], bool]) -> None:
        reached = None if figure is None or device == "cpu" else is_reached(figure)
        rows.append((what, "not measured" if figure is None else shown, reached))

    share = large["bytes_per_s"] / link if large and link else None
    size = f"{large.get('bytes', 0) / 1e9:.2f} GB in {large.get('tensors', 0)} tensors" if large else "10 GB"
    add(f"`overlapped`, {size}: copied at 0.95 of the link", share, f"{share or 0:.2f}", lambda x: x >= 0.95)
    ratio = _ratio(found["staging"], "large", "pinned_cached")
    speed = 1 / ratio if ratio else None
    add("`pinned_cached`, state `large`: 0.95 of one copy", speed, f"{speed or 0:.2f}", lambda x: x >= 0.95)
    blocked = large.get("blocked_s")
    add(f"`overlapped`, {size}: 2 ms in the call", blocked, f"{(blocked or 0) * 1e3:.2f} ms", lambda x: x <= 2e-3)
    slower = large.get("slower")
    shown = f"{(slower or 0) * 100:+.1f} % of {large.get('step_s', 0) * 1e3:.0f} ms"
    add("no step slower by more than 3 % while copying (median)", slower, shown, lambda x: x <= 0.03)
    every = next((row.get("ratio") for row in found["beside"].get("rows", ()) if row["row"] == "overlapped"), None)
    what = "`overlapped`, a save in every step: 1.2 times the step without a save"
    add(what, every, f"{every or 0:.2f}", lambda x: x <= 1.2)
    return rows


def _ratio(staging: dict[str, Any], state: str, name: str) -> float | None:
    groups = (group for group in staging.get("groups", ()) if group["name"] == state)
    return next((row.get("ratio") for group in groups for row in group["rows"] if row["row"] == name), None)


def page(done: Sequence[Piece], device: str, quick: bool = False) -> str:
    """Return the whole page, in Markdown."""
    found = _results(done)
    note = f"**{NO_GPU}.**" if device == "cpu" else ""
    title = "# stagereg on a GPU" + (" (`make gpu-quick`)" if quick else "")
    parts = [title, note, _table(("", ""), found["machine"].items())]
    words = {True: "yes", False: "**no**", None: "-"}
    rows = [(what, shown, words[reached]) for what, shown, reached in targets(found, device)]
    parts += ["## Targets", _table(("target", "measured", "reached"), rows)]
    others = [piece for piece in done if not isinstance(piece, Risk)]
    rows = [(piece.name, f"{piece.seconds:.0f}", piece.error or "ok") for piece in others]
    if risks := sorted((piece for piece in done if isinstance(piece, Risk)), key=lambda risk: int(risk.name[1:])):
        verdicts = [risk.result.get("verdict", COULD_NOT_RUN) for risk in risks]
        counts = ", ".join(f"{verdicts.count(each)} {each}" for each in (OK, FAULT, COULD_NOT_RUN))
        rows.insert(min(2, len(rows)), ("risks", f"{sum(risk.seconds for risk in risks):.0f}", counts))
    parts += ["## Pieces", _table(("piece", "seconds", "result"), rows)]
    if risks:
        rows = [
            (risk.name, RISKS[risk.name], _bold(verdict), risk.result.get("figures", ""), f"{risk.seconds:.0f}")
            for risk, verdict in zip(risks, verdicts, strict=True)
        ]
        parts += ["## Twelve risks", _table(("", "risk", "verdict", "figures or reason", "seconds"), rows)]
    if tests := found["tests"]:
        counts = f"{tests['passed']} passed, {len(tests['failed'])} failed, {len(tests['skipped'])} could not run."
        parts += ["## Tests marked `gpu`", counts]
        for head, which in (("### Failed", "failed"), ("### Could not run", "skipped")):
            reasons: dict[str, list[str]] = {}
            for name, why in tests[which].items():
                reasons.setdefault(_cell(why), []).append(f"  - `{name}`")
            lines = ["\n".join([f"- {why or 'no message'}", *names]) for why, names in reasons.items()]
            parts += [head, "\n".join(lines)] if lines else []
    if link := found["link"]:
        rows = [
            (f"{row['bytes'] / 2**20:.3g}", f"{row['to host'] / 1e9:.2f}", f"{row['to device'] / 1e9:.2f}")
            for row in link["rows"]
        ]
        parts += ["## Link", _table(("MiB", "GB/s to host", "GB/s to device"), rows)]
    if large := found["large"]:
        figures = {name: value for name, value in large.items() if name != "samples"}
        parts += ["## A large state with `overlapped`", "```\n" + json.dumps(figures, indent=1) + "\n```"]
    if beside := found["beside"]:
        parts += [
            "## Steps with a save in every step",
            _size(beside),
            _timed(beside, "step_s", "ms per step", "no save"),
        ]
    if restore := found["restore"]:
        parts += ["## Restore", _size(restore) + " Values are compared.", _timed(restore, "seconds", "ms", "torch")]
    for piece in done:
        if piece.error or piece.name in ("staging", "stall", "write"):
            command, tail = " ".join(Path(piece.command[0]).name.split() + piece.command[2:]), piece.printed[-12_000:]
            parts += [
                f"## {piece.name}",
                f"`{_cell(command)[:300]}`: {piece.error or 'ok'}",
                f"```\n{tail.rstrip()}\n```",
            ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _size(result: dict[str, Any]) -> str:
    return f"{result['bytes'] / 1e9:.3g} GB in {result['tensors']} tensors."


def _timed(result: dict[str, Any], key: str, head: str, base: str) -> str:
    """Return a table of rows with times, and their ratio to the row ``base``."""
    rows = [
        (row["row"], "-", row["failure"])
        if "failure" in row
        else (row["row"], f"{row[key] * 1e3:.1f}", f"{row['ratio']:.2f}")
        for row in result["rows"]
    ]
    return _table(("", head, f"ratio to {base} (median of rounds)"), rows)


def _bold(verdict: str) -> str:
    return f"**{verdict}**" if verdict == FAULT else verdict


def _table(head: Sequence[str], rows: Iterator[Sequence[object]] | Any) -> str:
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "/").split())


def report(done: Sequence[Piece], device: str, out: Path, quick: bool = False) -> bool:
    """Write the page and the JSON file. Return whether no piece failed and no check found a fault."""
    content = {
        "device": device,
        "quick": quick,
        "note": NO_GPU if device == "cpu" else "",
        "seconds": sum(piece.seconds for piece in done),
        "targets": [
            dict(zip(("target", "measured", "reached"), row, strict=True)) for row in targets(_results(done), device)
        ],
        "pieces": [asdict(piece) for piece in done],
    }
    (out / "gpu.json").write_text(json.dumps(content, indent=1) + "\n")
    (out / "gpu.md").write_text(page(done, device, quick))
    return not any(piece.error for piece in done)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all pieces and write the page. Return the exit code."""
    parser = argparse.ArgumentParser(description="Tests and benchmarks on an NVIDIA GPU, on one page.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("gpu-report"), help="directory of the page, %(default)s")
    add("--quick", action="store_true", help=f"take at most {QUICK_S / 60:g} minutes")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run")
    add("--scale", type=float, default=1.0, help="fraction of the bytes of each state, %(default)s")
    add("--rounds", type=int, help="measured rounds; default: 7, or 3 with --quick")
    asked = parser.parse_args(arguments)
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    done, limits = pieces(asked.device, asked.scale, asked.rounds, out, asked.quick), shares(asked.quick)
    most_s = QUICK_S if asked.quick else math.inf
    if asked.device == "cpu":  # a dry run, perhaps on a busy machine
        most_s = math.inf
        limits = {share: 4 * limit for share, limit in limits.items()}
        for piece in done:
            piece.limit_s *= 4
    with tempfile.TemporaryDirectory(prefix="stagereg-gpu-") as folder:
        run(done, limits, most_s, Path(folder))
    succeeded = report(done, asked.device, out, asked.quick)
    print(f"See {out / 'gpu.md'}")
    return int(not succeeded)


if __name__ == "__main__":
    sys.exit(main())
