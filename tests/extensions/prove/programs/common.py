"""The arguments of all programs in this folder, the options of their checkpointers, and the file with their results."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

import stagereg

OPTIONS: dict[str, Any] = {"every": 4, "keep": 3, "prove": stagereg.Prove(steps=3)}


def arguments(*faults: str, **choices: list[str]) -> argparse.Namespace:
    """Parse the command line: the checkpoint directory, the number of steps, a fault, and the program's own options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dir")
    parser.add_argument("steps", type=int)
    parser.add_argument("--fault", choices=faults, default="")
    parser.add_argument("--out", help="the file for the results of the run; each rank appends its number to the name")
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values, default=values[0])
    return parser.parse_args()


def write_results(args: argparse.Namespace, **results: Any) -> None:
    """Write the state of objects, tensors and numbers to the file ``--out``."""
    if args.out:
        found = {name: each.state_dict() if hasattr(each, "state_dict") else each for name, each in results.items()}
        torch.save(found, f"{args.out}.{os.environ.get('RANK', '0')}")
