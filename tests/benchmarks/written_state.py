"""Counts torn and failed saves of programs that write a parameter right after each save.

`python tests/benchmarks/written_state.py --saves 2000` trains an embedding with `max_norm`, and six programs that write
the weight by other operations, with the default stager. Each saves after every step, and writes while the copy is made.
Afterwards every checkpoint is read with its checksums, and its weight is compared with the weight at the save.

One row for each program: saves, committed, failed, torn.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import stagereg

ROWS, WIDTH, BATCH, STEPS = 60_000, 64, 2_000, 25  # steps of one run


def rows() -> torch.Tensor:
    """Return the rows that one step writes."""
    return torch.randperm(ROWS)[:BATCH]


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "embedding_renorm_": lambda w: torch.embedding_renorm_(w, rows(), 0.5, 2.0),
    "index_copy_": lambda w: w.index_copy_(0, rows(), torch.rand(BATCH, WIDTH)),
    "index_add_": lambda w: w.index_add_(0, rows(), torch.rand(BATCH, WIDTH)),
    "w[i] = v": lambda w: w.__setitem__(int(rows()[0]), torch.rand(WIDTH)),
    "masked_fill_": lambda w: w.masked_fill_(w > 0.9, 0.5),
    "data.clamp_": lambda w: w.data.clamp_(-0.5, 0.5),
}


def run(kind: str, folder: str) -> tuple[int, int]:
    """Save each step of one run; return how many checkpoints there are, and how many are torn."""
    embeds = kind.startswith("nn.")
    model: Any = getattr(torch.nn, kind.removeprefix("nn.") if embeds else "Embedding")(
        ROWS, WIDTH, max_norm=1.0 if embeds else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved: dict[int, torch.Tensor] = {}
    failure = stagereg.Failure(on_error="warn")
    with stagereg.Checkpointer(folder, every=1, keep=STEPS + 1, failure=failure) as checkpointer:
        for step in range(1, STEPS + 1):
            model.weight.grad = torch.full_like(model.weight, 0.01)
            optimizer.step()
            saved[step] = model.weight.detach().clone()
            checkpointer.maybe_save(step, {"model": model, "optimizer": optimizer})
            with torch.no_grad():
                model(rows()[None]) if embeds else WRITES[kind](model.weight)
    there = [step for step in saved if os.path.isdir(f"{folder}/step-{step:08d}")]
    torn = 0
    for step in there:
        with stagereg.open_checkpoint(f"{folder}/step-{step:08d}", verify=True) as checkpoint:
            torn += not torch.equal(checkpoint["model.weight"], saved[step])
    return len(there), torn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=2000, help="saves of the embedding; the others make a tenth each")
    saves = parser.parse_args().saves
    logging.getLogger("stagereg").setLevel(logging.CRITICAL)
    print(f"{'program':24}{'saves':>8}{'committed':>11}{'failed':>8}{'torn':>6}")
    for kind in ("nn.Embedding", "nn.EmbeddingBag", *WRITES):
        runs = -(-(saves if kind == "nn.Embedding" else saves // 10) // STEPS)
        committed = torn = 0
        for seed in range(runs):
            torch.manual_seed(seed)
            with tempfile.TemporaryDirectory() as folder:
                found = run(kind, folder)
            committed, torn = committed + found[0], torn + found[1]
        print(f"{kind:24}{runs * STEPS:8}{committed:11}{runs * STEPS - committed:8}{torn:6}", flush=True)
    os._exit(0)  # the exit code of a run whose last save failed is 1, which is not the point here


if __name__ == "__main__":
    main()
