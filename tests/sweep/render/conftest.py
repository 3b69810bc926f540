"""A comparison made by hand, for the tests of its renderings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stagereg.sweep.comparison import Comparison


@pytest.fixture(scope="session")
def comparison() -> Comparison:
    """Three rows that completed, one of them the best, one a tie; the first once more; and one that failed."""
    # Imported here: the configuration of the tests lets Hydra look for its plugins before they are imported elsewhere.
    from ...support.samples import compared, row_of

    def of(stager: str, mode: str) -> dict[str, str]:
        return {"stager": stager, "join.mode": mode}

    slow = {"stall_ms": (48.0, 50.0, 47.0), "samples_per_s": (9000, 9100, 9050), "loss": (2.4, 2.4, 2.4)}
    close = {"stall_ms": (9.0, 9.5, 10.0), "samples_per_s": (18000, 18100, 17900), "loss": (2.5, 2.5, 2.5)}
    best = {"stall_ms": (9.1, 8.2, 10.1), "samples_per_s": (17900, 18050, 17950)}
    rows = [
        row_of(of("blocking", "planned"), slow, {"loss": "best"}),
        row_of(of("blocking", "planned"), {"stall_ms": (49.5,), "samples_per_s": (9020,)}, again=True),
        row_of(of("pinned", "planned"), {}, error="CheckpointError: the disk is full\nand more of it"),
        row_of(of("pinned", "counted"), close, {"stall_ms": "tie", "samples_per_s": "best"}),
        row_of(of("overlapped", "counted"), best, {"stall_ms": "best", "samples_per_s": "tie"}),
    ]
    return compared(rows, warnings=("The machine was busy.",))
