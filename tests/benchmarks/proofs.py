"""What the record for ``stagereg prove`` costs: blocks of 100 steps with one save each, with and without the record.

The three arms take turns in one process: without record, with ``prove.steps=3``, and without record again (A/A). Each
arm has its own model, optimizer and checkpoint directory. The table has the median over the rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

import stagereg

ARMS = {"without record": 0, "prove.steps=3, every=100": 3, "without record again": 0}
EVERY = 100


class Arm:
    """A model of one encoder layer stack with AdamW, and its checkpointer."""

    def __init__(self, folder: Path, steps: int, width: int, batch: int) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.checkpointer = stagereg.Checkpointer(str(folder), every=EVERY, prove=stagereg.Prove(steps=steps))
        self.data, self.step = torch.randn(batch, 32, width), 0

    def block(self) -> float:
        """Take one block of steps, whose first step is followed by the save of the block before; return seconds."""
        self.checkpointer.wait()
        began = time.perf_counter()
        for _ in range(EVERY):
            self.step += 1
            self.optimizer.zero_grad()
            self.model(self.data).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.maybe_save(self.step, self.state)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        arms = {name: Arm(Path(folder, str(at)), ARMS[name], asked.width, asked.batch) for at, name in enumerate(ARMS)}
        found: dict[str, list[float]] = {name: [] for name in ARMS}
        for number in range(asked.rounds + 1):
            for name, arm in arms.items():
                seconds = arm.block()
                if number:  # the first round warms up, and has no steps after a save
                    found[name].append(seconds)
        for arm in arms.values():
            arm.checkpointer.close()
    first = next(iter(found))
    nbytes = sum(x.nbytes for x in arms[first].model.parameters())
    print(f"{nbytes / 2**20:.1f} MiB of parameters, AdamW, torch {torch.__version__}, {asked.rounds} rounds")
    for name, values in found.items():
        ratios = [value / base for value, base in zip(values, found[first], strict=True)]
        print(f"{name:28} {1e3 * median(values) / EVERY:8.3f} ms per step  {median(ratios):.4f} x")


if __name__ == "__main__":
    main()
