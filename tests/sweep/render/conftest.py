"""Comparisons made by hand, for the tests of their renderings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stagereg.sweep.comparison import Cell, Comparison, ComparisonRow
from stagereg.sweep.metric import METRICS, metric
from stagereg.sweep.result import JobResult

Values = Mapping[str, Sequence[float]]
Compared = Callable[..., Comparison]


def made_row(
    parameters: Mapping[str, str],
    values: Values,
    verdicts: Mapping[str, str] | None = None,
    *,
    error: str = "",
    again: bool = False,
    directory: Path = Path("sweep/0"),
) -> ComparisonRow:
    """A row of as many jobs as the longest of ``values`` has, or of one that failed."""
    found = verdicts or {}
    cells = {name: replace(Cell.of(list(many)), verdict=found.get(name, "")) for name, many in values.items()}
    count = max(map(len, values.values()), default=1)
    job = JobResult(
        directory,
        "failed" if error else "completed",
        error or None,
        tuple(f"{name}={value}" for name, value in parameters.items()),
        versions={"stagereg": "0.1.0", "torch": "2.13.0"},
        environment={"cpu": "Abacus 3000", "cores": 2},
        command="python train.py " + " ".join(f"{name}={value}" for name, value in parameters.items()),
    )
    jobs = tuple(replace(job, repeat=repeat) for repeat in range(count))
    return ComparisonRow(dict(parameters), jobs, cells, again=again, error=error)


def made_comparison(
    rows: Sequence[ComparisonRow], ranking: str = "stall_ms", warnings: Sequence[str] = ()
) -> Comparison:
    """The rows side by side, in that order; columns are the figures that any has."""
    parameters = tuple(dict.fromkeys(name for row in rows for name in row.parameters))
    known = tuple(one for one in METRICS if any(one.name in row.cells for row in rows))
    constant = ("train.steps=60",)
    repeats = max((len(row.jobs) for row in rows), default=1)
    return Comparison(
        Path("sweep"), parameters, constant, known, tuple(rows), repeats, metric(ranking), tuple(warnings)
    )


def usual() -> Comparison:
    """Three rows that completed, one of them the best, one a tie; the first once more; and one that failed."""

    def of(stager: str, mode: str) -> dict[str, str]:
        return {"stager": stager, "join.mode": mode}

    slow = {"stall_ms": (48.0, 50.0, 47.0), "samples_per_s": (9000, 9100, 9050), "loss": (2.4, 2.4, 2.4)}
    close = {"stall_ms": (9.0, 9.5, 10.0), "samples_per_s": (18000, 18100, 17900), "loss": (2.5, 2.5, 2.5)}
    best = {"stall_ms": (9.1, 8.2, 10.1), "samples_per_s": (17900, 18050, 17950)}
    rows = [
        made_row(of("blocking", "planned"), slow, {"loss": "best"}),
        made_row(of("blocking", "planned"), {"stall_ms": (49.5,), "samples_per_s": (9020,)}, again=True),
        made_row(of("pinned", "planned"), {}, error="CheckpointError: the disk is full\nand more of it"),
        made_row(of("pinned", "counted"), close, {"stall_ms": "tie", "samples_per_s": "best"}),
        made_row(of("overlapped", "counted"), best, {"stall_ms": "best", "samples_per_s": "tie"}),
    ]
    return made_comparison(rows, warnings=("The machine was busy.",))


@pytest.fixture
def row_of() -> Callable[..., ComparisonRow]:
    return made_row


@pytest.fixture
def compared() -> Compared:
    return made_comparison


@pytest.fixture(scope="session")
def comparison() -> Comparison:
    return usual()
