"""``on_commit=journal``: a line of JSON for each complete checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

from stagereg.plugin import CommittedCheckpoint

__all__ = ["JournalWriter"]


class JournalWriter:
    """Appends step, path, size and metrics of each checkpoint to a file; a line that is there is not written again.

    Args:
        file: where the lines go.
    """

    def __init__(self, file: str = "checkpoints.jsonl") -> None:
        self.file = Path(file)

    def committed(self, checkpoint: CommittedCheckpoint, /) -> None:
        """Append the line of one checkpoint."""
        about = {
            "step": checkpoint.step,
            "path": str(checkpoint.path),  # a URL, where checkpoints go to an object store
            "bytes": sum(mark.bytes for mark in checkpoint.manifest.files.values()),
            "metrics": {name: value if math.isfinite(value) else None for name, value in checkpoint.metrics.items()},
        }
        line = json.dumps(about)
        if line not in self.lines():
            with self.file.open("a") as file:
                file.write(line + "\n")

    def lines(self) -> list[str]:
        """Return what is in the file."""
        return self.file.read_text().splitlines() if self.file.exists() else []
