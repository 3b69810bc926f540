"""Runs a program that measures, and returns what it wrote as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def bench(main: Callable[[Sequence[str]], int], folder: Path, *arguments: str, disk: bool = True) -> Any:
    """Nothing but the JSON is left in ``folder``, which it writes checkpoints to if it takes a disk at all."""
    file = folder / "result.json"
    where = ["--dir", str(folder)] if disk else []
    assert main([*arguments, *where, "--json", str(file)]) == 0
    assert list(folder.iterdir()) == [file]
    return json.loads(file.read_text())


def rows_by_group(seen: Any) -> dict[str, dict[str, Any]]:
    """Rows by the name of the group and their own."""
    return {group["name"]: {row["row"]: row for row in group["rows"]} for group in seen["groups"]}
