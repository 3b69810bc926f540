"""Writes verdicts about checkpoints, as ``stagereg prove`` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stagereg.checkpoint.format.manifest import step_name
from stagereg.checkpoint.store.open_store import open_store


def note(root: Path | str, step: int, verdict: str = "", why: str = "", **other: Any) -> Path:
    """Write the file of a step with recorded steps, and with a verdict if there is one; return its path."""
    found = next(each for each in open_store(root).checkpoints()[0] if each.manifest.step == step)
    content = {"run": "a", "key": found.key, "ranks": 1, "steps": 3, "wanted": 3, "number": 0, "hydra": False}
    content |= {"torch": "2", "stagereg": "0", "device": "cpu", "benchmark": False}
    content |= {"verdict": verdict, "why": why} if verdict else {}
    path = Path(root, "proofs", f"{step_name(step)}.json")
    path.parent.mkdir(exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    content["run"] = before.get("run", "a")
    path.write_text(json.dumps(content | other))
    return path
