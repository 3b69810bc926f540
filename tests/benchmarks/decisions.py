"""How often the answer of a sweep claims a difference: where there is none, and where there is one.

Simulates sweeps whose runs are drawn from normal distributions, and judges them with the code that judges real ones.
``python -m tests.benchmarks.decisions`` prints the table of docs/sweeps.md; it takes some minutes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

from stagereg.sweep.cell import Cell, ties
from stagereg.sweep.rank_sum import LEVEL, p_value

MEAN, SIGMA = 10.0, 1.0
MATTERS = 0.05
RUNS = (2, 3, 4, 5, 6, 8, 10, 20, 30, 50, 100)


def claims(draw: random.Random, runs: int, means: Sequence[float]) -> tuple[bool, float]:
    """Simulate one sweep; return whether the answer names a best row, and the part of the others that do not tie."""
    cells = sorted((Cell.of([draw.gauss(mean, SIGMA) for _ in range(runs)]) for mean in means), key=lambda c: c.median)
    reasons = ties(cells[0], cells[1:], MATTERS)
    return not any(reasons), sum(not reason for reason in reasons) / len(reasons)


def rank_sum(draw: random.Random, runs: int, shift: float) -> bool:
    """The test alone, as a peer."""
    one, other = ([draw.gauss(mean, SIGMA) for _ in range(runs)] for mean in (MEAN, MEAN + shift))
    return p_value(one, other) <= LEVEL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweeps", type=int, default=4000, help="simulated for each figure")
    parser.add_argument("--runs", type=int, nargs="+", default=RUNS)
    asked = parser.parse_args()
    draw = random.Random(1)
    print(
        "| runs each | 2 equal | 3 equal | 9 equal | 9 equal: rows told apart | one sigma apart | rank-sum test alone |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for runs in asked.runs:
        found = []
        for number in (2, 3, 9):
            sweeps = [claims(draw, runs, [MEAN] * number) for _ in range(asked.sweeps)]
            found.append(sum(claimed for claimed, _ in sweeps) / asked.sweeps)
        found.append(sum(part for _, part in sweeps) / asked.sweeps)
        found.append(sum(claims(draw, runs, [MEAN, MEAN + SIGMA])[0] for _ in range(asked.sweeps)) / asked.sweeps)
        found.append(sum(rank_sum(draw, runs, SIGMA) for _ in range(asked.sweeps)) / asked.sweeps)
        print(f"| {runs} | {' | '.join(f'{100 * each:.1f} %' for each in found)} |", flush=True)


if __name__ == "__main__":
    main()
