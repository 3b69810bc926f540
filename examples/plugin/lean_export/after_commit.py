"""``on_commit=journal``: appends a line of JSON to a file for each complete checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

from stagereg.plugin import CommittedCheckpoint

__all__ = ["JournalWriter"]


class JournalWriter:
    """Appends the step, path, size and metrics of each checkpoint to a file, unless the file has this line already.

    Args:
        file: path of the file.
    """

    def __init__(self, file: str = "checkpoints.jsonl") -> None:
        self.file = Path(file)

    def committed(self, checkpoint: CommittedCheckpoint, /) -> None:
        """Append the line of one checkpoint."""
        about = {
            "step": checkpoint.step,
            "path": str(checkpoint.path),  # a URL if the checkpoint is in an object store
            "bytes": sum(digest.bytes for digest in checkpoint.manifest.files.values()),
            "metrics": {name: value if math.isfinite(value) else None for name, value in checkpoint.metrics.items()},
        }
        line = json.dumps(about)
        if line not in self.lines():
            with self.file.open("a") as file:
                file.write(line + "\n")

    def lines(self) -> list[str]:
        """Return the lines of the file."""
        return self.file.read_text().splitlines() if self.file.exists() else []
