"""The measurements of ``make gpu`` that no other benchmark makes. Each runs in a process of its own.

``python tests/benchmarks/gpu_figures.py NAME FILE`` measures NAME and writes the figures to FILE as JSON:

======= ==============================================================================================
machine versions, processor, GPU, driver and PCIe link
link    bytes per second between the GPU and page-locked memory, in both directions
large   a large state with ``overlapped``: time in the call, time of the copy, step time during the copy
beside  step time with a save in every step, for each stager and for each way to pace its copies
restore time to restore a state on the GPU, compared with torch's own recipe
======= ==============================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

LARGE_BYTES, BESIDE_BYTES, RESTORE_BYTES = 10 * 10**9, 16 * 10**8, 12 * 10**8
STEP_S = 0.25  # maximum seconds of a step without a save in ``beside``
STEPS = 3  # steps of one sample of ``beside``, with a save in each
NO_SAVE, AGAIN = "no save", "no save (A/A)"
PACED = [{"device_piece_mib": 64}, {"device_piece_mib": 32}, {"device_rate": 10.0}]
"""Options of ``overlapped`` that pace its copies, in MiB and GB/s. If an option does not exist, its row is left out."""


def machine(asked: argparse.Namespace) -> dict[str, Any]:
    import stagereg.kernel.compiled as compiled
    from stagereg.bench.environment import describe

    built = "yes" if getattr(compiled, "copy", None) else "no"
    found = {"host": platform.node(), **describe(asked.device), "compiled part of stagereg": built}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run([*query, "--format=csv"], capture_output=True, text=True, timeout=8, check=False)
        found["nvidia-smi"] = answer.stdout.strip()
    return found


# -- link


def link(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure single copies between the device and page-locked memory, by size and direction."""
    import torch

    from stagereg.base.pages import Block

    mark, between = _clock(asked.device)
    stream = contextlib.nullcontext() if asked.device == "cpu" else torch.cuda.stream(torch.cuda.Stream())
    rows = []
    for mib in (1, 4, 16, 64, 256, 1024):
        nbytes = max(4096, int(mib * 2**20 * asked.scale))
        block = Block(nbytes, asked.device != "cpu")
        host = torch.frombuffer(block.view(), dtype=torch.uint8, count=nbytes)
        there = torch.ones(nbytes, dtype=torch.uint8, device=asked.device)
        row = {"bytes": nbytes, "page-locked": host.is_pinned() if asked.device != "cpu" else False}
        for name, to, source in (("to host", host, there), ("to device", there, host)):
            seconds = []
            with stream:
                for _ in range(3 + max(asked.rounds, 5)):
                    began = mark()
                    to.copy_(source, non_blocking=True)
                    seconds.append(between(began, mark()))
            row[name] = nbytes / statistics.median(seconds[3:])
        rows.append(row)
    return {"rows": rows, "bytes_per_s": max(row["to host"] for row in rows)}


def _clock(device: str) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Return a function that marks a point of the current stream, and one that returns the seconds between two."""
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


# -- a model whose weights and optimizer state have a given size


class Training:
    """A stack of square linear layers on the device, with AdamW. Weights and moments have about ``nbytes`` bytes.

    ``copies``: how many copies of the state must fit into host memory; otherwise the state is smaller.
    """

    def __init__(self, device: str, nbytes: float, copies: float, rows: int = 512) -> None:
        import torch

        self.settle = torch.cuda.synchronize if device != "cpu" else lambda: None
        free = torch.cuda.mem_get_info()[0] if device != "cpu" else 0
        lines = Path("/proc/meminfo").read_text().splitlines()
        host = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        # Gradients and activations need memory on the device as well.
        wanted = min(nbytes, *([free * 0.6] if free else []), host * 0.8 / copies)
        width, layers = (4096, 1) if wanted > 2**28 else (64, 1)
        layers = max(1, round(wanted / (3 * 4 * width * width)))
        linears = (torch.nn.Linear(width, width, device=device) for _ in range(layers))
        self.model = torch.nn.Sequential(*linears)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._batch = torch.randn(rows if device != "cpu" else 8, width, device=device)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def shorten(self, seconds: float) -> None:
        """Use a smaller batch if a step takes longer than ``seconds``."""
        for _ in range(2):  # the first step loads kernels
            self.settle()
            began = time.perf_counter()
            self.step()
            self.settle()
            taken = time.perf_counter() - began
        self._batch = self._batch[: max(1, int(len(self._batch) * min(1.0, seconds / taken)))]

    def step(self, passes: int = 1) -> None:
        """Queue one step with ``passes`` forward and backward passes."""
        for _ in range(passes):
            self.model(self._batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


# -- large


def large(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure a large state with ``overlapped``: the time in the call, the copy alone, and steps during a copy.

    A step has as many passes over a batch as take 1.5 times as long as the copy, but at most 64. The optimizer is the
    first to write, so a step of a real model that is shorter than its copy waits for the copy.
    """
    import stagereg

    training = Training(asked.device, LARGE_BYTES * asked.scale, 2)
    stager = stagereg.build("stager", "overlapped", max_in_flight=1)
    passes = 1

    def step(saves: bool = False) -> tuple[float, float, Any]:
        """Return the seconds of a step, the seconds of the call in it, and the copy that was begun in it."""
        training.settle()
        began, called, promise = time.perf_counter(), 0.0, None
        if saves:
            state = training.state()
            before = time.perf_counter()
            promise = stager.stage(state)
            called = time.perf_counter() - before
        training.step(passes)
        training.settle()
        return time.perf_counter() - began, called, promise

    for saves in (False, True, True, True):  # kernels are loaded, the memory exists, and the plan is made
        _, _, promise = step(saves)
        copy = promise.result() if promise else None
        del promise, copy
    alone, calls, plain, saving = [], [], [], []
    for _ in range(max(asked.rounds, 3)):
        state = training.state()
        training.settle()
        began = time.perf_counter()
        copy = stager.stage(state).result()
        alone.append(time.perf_counter() - began)
        count, nbytes = _compare(copy, state)
        del copy, state
    took = statistics.median(alone)
    passes = min(64, max(1, round(1.5 * took / max(step()[0], 1e-6))))
    for _ in range(max(asked.rounds, 5)):
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


def _compare(copy: Any, state: Any) -> tuple[int, int]:
    """Return the number of tensors and of bytes. Exit with a message if the copy differs from the state."""
    import torch

    from stagereg.bench.states import tensors

    found, expected = tensors(copy), tensors(state)
    pairs = enumerate(zip(found, expected, strict=True))
    if wrong := [i for i, (x, y) in pairs if not torch.equal(x, y.to(x.device))]:
        raise SystemExit(f"The copy differs from the state in {len(wrong)} tensors, first in number {wrong[0]}.")
    return len(expected), sum(x.nbytes for x in expected)


# -- beside


class Saving:
    """One row of ``beside``: a stager that stages in every step, or no stager."""

    def __init__(self, row: str, name: str = "", **options: Any) -> None:
        self.row, self.failure, self._stager = row, "", None
        self.samples: list[float] = []
        if name:
            import stagereg

            self._stager = stagereg.build("stager", name, **options)

    def steps(self, training: Training) -> None:
        """Record the seconds per step of :data:`STEPS` consecutive steps."""
        promise = None
        training.settle()
        began = time.perf_counter()
        for _ in range(STEPS):
            training.step()
            if self._stager is not None:
                promise = None  # releases the previous copy
                promise = self._stager.stage(training.state())
        training.settle()
        self.samples.append((time.perf_counter() - began) / STEPS)
        if isinstance(promise, Future):
            promise.result()

    def prove(self, training: Training) -> None:
        if self._stager is not None:
            copy = self._stager.stage(training.state())
            _compare(copy.result() if isinstance(copy, Future) else copy, training.state())

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


def saving_rows(paced: Sequence[dict[str, Any]] = PACED) -> list[Saving]:
    """Return the rows: stagers that copy on a side stream, ``overlapped`` with each way to pace, and no save twice."""
    import stagereg

    rows = [Saving(NO_SAVE)]
    for name in ("overlapped", "pinned_cached"):
        rows.append(Saving(name, name))
        has = inspect.signature(type(rows[-1]._stager)).parameters
        for options in (each for each in paced if name == "overlapped" and each.keys() <= has.keys()):
            row = ", ".join([name, *(f"{option}={value}" for option, value in options.items())])
            try:
                rows.append(Saving(row, name, **options))
            except stagereg.StageregError as error:
                rows.append(Saving(row))
                rows[-1].failure = str(error)
    return [*rows, Saving(AGAIN)]


def beside(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure the step time with a save in every step. Each round measures every row, in a different order."""
    rows = saving_rows()
    training = Training(asked.device, BESIDE_BYTES * asked.scale, 4.0 * len(rows), rows=8192)
    training.shorten(STEP_S)

    def attempt(row: Saving, act: Callable[[Training], None]) -> None:
        if not row.failure:
            try:
                act(training)
            except Exception as error:
                row.failure = f"{type(error).__name__}: {error}"

    for row in rows:
        for _ in range(2):  # two optimizer steps show which tensors may be copied later; memory is page-locked
            attempt(row, row.steps)
        row.samples.clear()
    for number in range(asked.rounds):
        for row in (*rows[number % len(rows) :], *rows[: number % len(rows)]):
            attempt(row, row.steps)
    for row in rows:
        attempt(row, row.prove)
        with contextlib.suppress(Exception):  # the failure of a copy, which is in the row already
            row.close()
    plain = rows[0].samples

    def figures(row: Saving) -> dict[str, Any]:
        if row.failure:
            return {"row": row.row, "failure": row.failure}
        ratios = [mine / other for mine, other in zip(row.samples, plain, strict=True)]
        step = statistics.median(row.samples)
        return {"row": row.row, "step_s": step, "ratio": statistics.median(ratios), "samples": row.samples}

    count, nbytes = _compare(training.state(), training.state())
    return {"bytes": nbytes, "tensors": count, "rows": [figures(row) for row in rows]}


# -- restore


def restore(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure how long new objects on the device take to restore a state, and compare the values.

    ``torch`` is torch's documented recipe: ``get_state_dict``, ``dcp.load``, ``set_state_dict``. Files are read from
    the page cache. Each round restores once in each way, in a different order.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import stagereg
    from stagereg.bench.measure import quiet

    make = functools.partial(Training, asked.device, RESTORE_BYTES * asked.scale, 3)
    source = make()
    for _ in range(2):
        source.step()

    def with_torch(training: Training, path: Path) -> None:
        model, optimizer = get_state_dict(training.model, training.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        set_state_dict(training.model, training.optimizer, model_state_dict=model, optim_state_dict=state["optimizer"])

    def with_stagereg(training: Training, path: Path) -> None:
        with stagereg.Checkpointer(str(path), every=1) as checkpointer:
            if checkpointer.restore({"model": training.model, "optimizer": training.optimizer}) != 1:
                raise SystemExit("The checkpointer restored nothing.")

    with tempfile.TemporaryDirectory(prefix="stagereg-gpu-", dir=asked.dir) as folder, quiet():
        ours, theirs = Path(folder, "stagereg"), Path(folder, "torch")
        began = time.perf_counter()
        with stagereg.Checkpointer(str(ours), every=1) as checkpointer:
            checkpointer.save(1, {"model": source.model, "optimizer": source.optimizer})
            checkpointer.wait()
        saved_s = time.perf_counter() - began
        model, optimizer = get_state_dict(source.model, source.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=theirs, no_dist=True)
        ways = {"torch": (with_torch, theirs), "stagereg": (with_stagereg, ours), "torch (A/A)": (with_torch, theirs)}
        samples: dict[str, list[float]] = {row: [] for row in ways}
        for number in range(asked.rounds):
            for row in (*list(ways)[number % 3 :], *list(ways)[: number % 3]):
                act, path = ways[row]
                new = make()
                new.settle()
                began = time.perf_counter()
                act(new, path)
                new.settle()
                samples[row].append(time.perf_counter() - began)
                count, nbytes = _compare(new.state(), source.state())
                del new
                if asked.device != "cpu":
                    torch.cuda.empty_cache()
    rows = [
        {
            "row": row,
            "seconds": statistics.median(taken),
            "ratio": statistics.median(a / b for a, b in zip(taken, samples["torch"], strict=True)),
            "samples": taken,
        }
        for row, taken in samples.items()
    ]
    return {"bytes": nbytes, "tensors": count, "save_s": saved_s, "rows": rows}


FIGURES = {each.__name__: each for each in (machine, link, large, beside, restore)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one of :data:`FIGURES`, and write the figures to a file."""
    parser = argparse.ArgumentParser(description="One measurement of make gpu.")
    add = parser.add_argument
    add("name", choices=FIGURES)
    add("file", type=Path, help="JSON file for the figures")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--scale", type=float, default=1.0, help="fraction of the bytes of each state, %(default)s")
    add("--rounds", type=int, default=7, help="measured rounds, %(default)s")
    add("--dir", default=".", help="directory for checkpoints, %(default)s")
    asked = parser.parse_args(arguments)
    asked.file.write_text(json.dumps(FIGURES[asked.name](asked)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
