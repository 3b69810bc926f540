"""``make gpu``: the tests and benchmarks that need an NVIDIA GPU, on one page, ``gpu.md``, and in ``gpu.json``.

The tests have runs on GPUs fail and go on: the survivors' save, a tier, a restart, with gloo, and from two GPUs on with
NCCL. The page names each test that could not run, and why.

Each piece runs in a process of its own with a time limit. One that fails, or that takes too long, costs only its part
of the page, which then has its error. Needs Linux, torch and what the tests import; where there is no network, call it
with the Python that has them: ``python tests/benchmarks/gpu.py --out gpu-report``.

With ``--device cpu`` all of it runs without a GPU, to see that it does; no figure is one of a GPU then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[2]
STATE_BYTES = 10 * 10**9
NO_GPU = "No GPU: nothing here is a GPU figure"


@dataclass
class Piece:
    """What one process has come to."""

    name: str
    command: list[str]
    limit_s: float
    seconds: float = 0.0
    error: str = ""  # empty: it ended well
    printed: str = ""
    result: Any = field(default_factory=dict)  # of its JSON file

    def run(self, folder: Path) -> None:
        """Run the command; ``{out}`` in it becomes the name of the file for its result."""
        file, began = folder / f"{self.name}.out", time.monotonic()
        command = [part.replace("{out}", str(file)) for part in self.command]
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        try:
            with open(folder / f"{self.name}.log", "w+", errors="replace") as log:
                process = subprocess.Popen(
                    command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, start_new_session=True
                )
                try:
                    code = process.wait(self.limit_s)
                    self.error = f"exit code {code}" if code else ""
                except subprocess.TimeoutExpired:
                    self.error = f"stopped after {self.limit_s:g} s"
                finally:
                    with contextlib.suppress(ProcessLookupError):  # it, and what it has started
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                log.seek(0)
                self.printed = log.read()
            if file.exists():
                self.result = _tests_of(file) if self.name == "tests" else json.loads(file.read_text())
        except (OSError, ValueError, ElementTree.ParseError) as error:
            self.error = self.error or f"{type(error).__name__}: {error}"
        self.seconds = time.monotonic() - began


def pieces(device: str, scale: float, rounds: int, disk: Path) -> list[Piece]:
    """All there is to run. ``scale`` is of the bytes of each state, ``disk`` where checkpoints are written."""
    python = [sys.executable, "-P"]
    marked = [str(path) for path in sorted((REPOSITORY / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    chosen = "gpu" if device == "cuda" else "gpu or in_place_of_gpu"
    pytest = [*python, "-m", "pytest", "-m", chosen, "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    own = [*python, str(Path(__file__).resolve()), "--device", device, "--scale", str(scale), "--rounds", str(rounds)]
    sizes = ["--scale", str(scale), "--rounds", str(rounds), "--device", device, "--json", "{out}"]
    bench, where = [*python, "-m", "stagereg", "bench"], ["--dir", str(disk)]
    return [
        Piece("machine", [*own, "--piece", "machine", "{out}"], 120),
        Piece("tests", [*pytest, "--junitxml={out}", *marked], 1800),
        Piece("link", [*own, "--piece", "link", "{out}"], 180),
        Piece("large", [*own, "--piece", "large", "{out}"], 600),
        Piece("staging", [*bench, "staging", *sizes], 1200),
        Piece("stall", [*bench, "stall", *sizes, *where, "--torch-threads", "1"], 900),
        Piece("write", [*python, str(REPOSITORY / "tests/benchmarks/write.py"), *sizes, *where], 600),
    ]


def _tests_of(file: Path) -> dict[str, Any]:
    """How many tests passed, and the messages of those that failed and of those that could not run."""
    cases = list(ElementTree.parse(file).iter("testcase"))

    def messages(*tags: str) -> dict[str, str]:
        return {
            f"{case.get('classname')}::{case.get('name')}": str(each.get("message"))[:300]
            for case in cases
            for each in case
            if each.tag in tags
        }

    failed, skipped = messages("failure", "error"), messages("skipped")
    return {"passed": len(cases) - len(skipped) - len(failed), "failed": failed, "skipped": skipped}


# -- in a process of their own


def _machine(device: str, scale: float, rounds: int) -> dict[str, Any]:
    from stagereg.bench.environment import describe

    found = {"host": platform.node(), **describe(device)}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"]
    with contextlib.suppress(OSError):
        answer = subprocess.run([*query, "--format=csv"], capture_output=True, text=True, timeout=60, check=False)
        found["nvidia-smi"] = answer.stdout.strip()
    return found


def _clock(device: str) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Return what marks a moment of the current stream, and what returns the seconds between two."""
    import torch

    if device == "cpu":
        return time.perf_counter, lambda one, other: other - one

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(one: Any, other: Any) -> float:
        other.synchronize()
        return one.elapsed_time(other) / 1e3

    return mark, between


def _link(device: str, scale: float, rounds: int) -> dict[str, Any]:
    """Bytes a second from the device to page-locked memory, one copy at a time, by size; and the other way."""
    import torch

    from stagereg.base.pages import Block

    mark, between = _clock(device)
    stream = contextlib.nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream())
    rows = []
    for mib in (1, 4, 16, 64, 256, 1024):
        nbytes = max(4096, int(mib * 2**20 * scale))
        block = Block(nbytes, device != "cpu")
        host = torch.frombuffer(block.view(), dtype=torch.uint8, count=nbytes)
        there = torch.ones(nbytes, dtype=torch.uint8, device=device)
        row = {"bytes": nbytes, "page-locked": host.is_pinned() if device != "cpu" else False}
        for name, to, source in (("to host", host, there), ("to device", there, host)):
            seconds = []
            with stream:
                for _ in range(3 + max(rounds, 5)):
                    began = mark()
                    to.copy_(source, non_blocking=True)
                    seconds.append(between(began, mark()))
            row[name] = nbytes / statistics.median(seconds[3:])
        rows.append(row)
    return {"rows": rows, "bytes_per_s": max(row["to host"] for row in rows)}


def _large(device: str, scale: float, rounds: int) -> dict[str, Any]:
    """A large state with ``overlapped``: the time in the call, the copy with nothing beside it, and steps with a copy.

    A step has as many passes over a batch as take half as long again as the copy, as far as 64 do; the optimizer is the
    first to write, so a step of a real model that is shorter than its copy waits for it.
    """
    import torch

    import stagereg

    settle = torch.cuda.synchronize if device != "cpu" else lambda: None
    free = torch.cuda.mem_get_info()[0] if device != "cpu" else 0
    lines = Path("/proc/meminfo").read_text().splitlines()
    host = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    # Weights and two moments are the state; gradients are as large as the weights, and something is left for the rest.
    wanted = min(STATE_BYTES * scale, *([free * 0.6] if free else []), host * 0.4)
    width, layers = (4096, 1) if wanted > 2**30 else (64, 1)
    layers = max(1, round(wanted / (3 * 4 * width * width)))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, device=device) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = torch.randn(512 if device != "cpu" else 8, width, device=device)
    stager = stagereg.build("stager", "overlapped", max_in_flight=1)
    passes = 1

    def step(saves: bool = False) -> tuple[float, float, Any]:
        """Seconds of a step and of the call in it, and the copy that was begun in it."""
        settle()
        began, called, promise = time.perf_counter(), 0.0, None
        if saves:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            before = time.perf_counter()
            promise = stager.stage(state)
            called = time.perf_counter() - before
        for _ in range(passes):
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        settle()
        return time.perf_counter() - began, called, promise

    for saves in (False, True, True, True):  # kernels are loaded, the memory is there, and the plan is made
        _, _, promise = step(saves)
        copy = promise.result() if promise else None
        del promise, copy
    alone, calls, plain, saving = [], [], [], []
    for _ in range(max(rounds, 3)):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        settle()
        began = time.perf_counter()
        copy = stager.stage(state).result()
        alone.append(time.perf_counter() - began)
        count, nbytes = len(_tensors(state)), sum(x.nbytes for x in _tensors(state))
        wrong = [i for i, (x, y) in enumerate(zip(_tensors(copy), _tensors(state), strict=True)) if not _equal(x, y)]
        if wrong:
            raise SystemExit(f"The copy differs from the state in tensor {wrong[0]}.")
        del copy, state
    took = statistics.median(alone)
    passes = min(64, max(1, round(1.5 * took / max(step()[0], 1e-6))))
    for _ in range(max(rounds, 5)):
        plain.append(step()[0])
        seconds, called, promise = step(True)
        saving.append(seconds)
        calls.append(called)
        promise.result()
        del promise
    stager.close()
    return {
        "bytes": nbytes,
        "tensors": count,
        "copy_s": took,
        "bytes_per_s": nbytes / took,
        "blocked_s": statistics.median(calls),
        "blocked_most_s": max(calls),
        "passes": passes,
        "step_s": statistics.median(plain),
        "step_with_copy_s": statistics.median(saving),
        "slower": statistics.median(b / a for a, b in zip(plain, saving, strict=True)) - 1,
        "samples": {"copy": alone, "blocked": calls, "step": plain, "step_with_copy": saving},
    }


def _tensors(tree: Any) -> list[Any]:
    from stagereg.bench.states import tensors

    return tensors(tree)


def _equal(x: Any, y: Any) -> bool:
    import torch

    return torch.equal(x, y.cpu())


# -- the page


def _results(done: Sequence[Piece]) -> dict[str, Any]:
    """By piece; nothing of those that failed before they had one."""
    return defaultdict(dict, {piece.name: piece.result for piece in done})


def targets(found: dict[str, Any], device: str) -> list[tuple[str, str, bool | None]]:
    """What is to be reached, what was, and whether it is; None if it was not measured, or not on a GPU."""
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
    return rows


def _ratio(staging: dict[str, Any], state: str, name: str) -> float | None:
    groups = (group for group in staging.get("groups", ()) if group["name"] == state)
    return next((row.get("ratio") for group in groups for row in group["rows"] if row["row"] == name), None)


def page(done: Sequence[Piece], device: str) -> str:
    """The whole page, in Markdown."""
    found = _results(done)
    note = f"**{NO_GPU}.**" if device == "cpu" else ""
    parts = ["# stagereg on a GPU", note, "| | |\n|---|---|"]
    parts[-1] += "".join(f"\n| {name} | {_cell(value)} |" for name, value in found["machine"].items())
    parts += ["## Targets", "| target | measured | reached |\n|---|---|---|"]
    words = {True: "yes", False: "**no**", None: "-"}
    parts[-1] += "".join(
        f"\n| {what} | {shown} | {words[reached]} |" for what, shown, reached in targets(found, device)
    )
    parts += ["## Pieces", "| piece | seconds | |\n|---|---|---|"]
    parts[-1] += "".join(f"\n| {piece.name} | {piece.seconds:.0f} | {piece.error or 'ok'} |" for piece in done)
    if tests := found["tests"]:
        counts = f"{tests['passed']} passed, {len(tests['failed'])} failed, {len(tests['skipped'])} could not run."
        parts += ["## Tests marked `gpu`", counts]
        for title, which in (("### Failed", "failed"), ("### Could not run", "skipped")):
            lines = [f"- `{name}`: {_cell(why)}" for name, why in tests[which].items()]
            parts += [title, "\n".join(lines)] if lines else []
    if link := found["link"]:
        rows = [f"| {_mib(row)} | {row['to host'] / 1e9:.2f} | {row['to device'] / 1e9:.2f} |" for row in link["rows"]]
        parts += ["## Link", "\n".join(["| MiB | GB/s to host | GB/s to device |", "|---|---|---|", *rows])]
    if large := found["large"]:
        figures = {name: value for name, value in large.items() if name != "samples"}
        parts += ["## A large state with `overlapped`", "```\n" + json.dumps(figures, indent=1) + "\n```"]
    for piece in done:
        if piece.error or piece.name in ("staging", "stall", "write"):
            command, tail = " ".join(Path(piece.command[0]).name.split() + piece.command[2:]), piece.printed[-12_000:]
            parts += [
                f"## {piece.name}",
                f"`{_cell(command)[:300]}`: {piece.error or 'ok'}",
                f"```\n{tail.rstrip()}\n```",
            ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _mib(row: dict[str, Any]) -> str:
    return f"{row['bytes'] / 2**20:.3g}"


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "/").split())


def report(done: Sequence[Piece], device: str, out: Path) -> bool:
    """Write the page and the JSON file. Returns whether all pieces ended well and no test failed."""
    content = {
        "device": device,
        "note": NO_GPU if device == "cpu" else "",
        "targets": [
            dict(zip(("target", "measured", "reached"), row, strict=True)) for row in targets(_results(done), device)
        ],
        "pieces": [asdict(piece) for piece in done],
    }
    (out / "gpu.json").write_text(json.dumps(content, indent=1) + "\n")
    (out / "gpu.md").write_text(page(done, device))
    return not any(piece.error for piece in done)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all pieces, or in a process of its own one of them."""
    parser = argparse.ArgumentParser(description="Tests and benchmarks on an NVIDIA GPU, on one page.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("gpu-report"), help="directory of the page, %(default)s")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to see that all of it runs")
    add("--scale", type=float, default=1.0, help="of the bytes of each state, %(default)s")
    add("--rounds", type=int, default=7, help="that count, %(default)s")
    add("--piece", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.piece:
        name, file = asked.piece
        found = {"machine": _machine, "link": _link, "large": _large}[name](asked.device, asked.scale, asked.rounds)
        Path(file).write_text(json.dumps(found))
        return 0
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    done = pieces(asked.device, asked.scale, asked.rounds, out)
    with tempfile.TemporaryDirectory(prefix="stagereg-gpu-") as folder:
        for piece in done:
            print(f"{piece.name}: at most {piece.limit_s:g} s", flush=True)
            piece.run(Path(folder))
            if piece.error:
                print(f"{piece.name}: {piece.error}", flush=True)
    ended_well = report(done, asked.device, out)
    print(f"See {out / 'gpu.md'}")
    return int(not ended_well)


if __name__ == "__main__":
    sys.exit(main())
