"""The files ``proofs/step-N.json`` and ``proofs/step-N.rankR.json`` in a checkpoint directory.

Each rank writes its snapshots of the steps after a save. Rank 0 writes the file without a rank when the checkpoint is
committed and its steps are over. ``stagereg prove`` adds the verdict to that file.

The adapters of trainers write a checkpoint in ``DIR/.stagereg``, and then move it to ``DIR/NAME``. The files stay in
``DIR/.stagereg/proofs``, because their numbers are unique in ``DIR``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stagereg.base.small_files import read_small
from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.format.manifest import Checkpoint, step_name, step_within
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import MALFORMED, printable

PROVEN, REFUTED, NOT_TRIED = "proven", "refuted", "not tried"
_FOLDER = "proofs"
_STAGED = ".stagereg"  # the directory in which the adapters write checkpoints
_MOST_BYTES = 1 << 20  # maximum size of a file without a rank
_FACTS = {"run": str, "key": str, "ranks": int, "steps": int, "wanted": int, "number": int, "hydra": bool}
_FACTS |= dict.fromkeys(("torch", "stagereg", "device", "verdict", "why"), str)


def write(store: CheckpointStore, step: int, content: dict[str, Any], rank: int | None = None) -> None:
    """Write the file of a step, or the file of one rank. Raises ``OSError``."""
    folder = _folder(store)
    store.backend.make(folder)
    store.backend.write(f"{folder}/{_name(step, rank)}", json.dumps(content).encode())


def read(store: CheckpointStore, checkpoint: Checkpoint, rank: int | None = None) -> dict[str, Any]:
    """Read a file; an empty dict if it is missing or invalid, or belongs to an earlier save of the same step."""
    try:
        path = f"{_folder(store)}/{_name(checkpoint.manifest.step, rank)}"
        whole = rank is not None or store.backend.remote
        found = json.loads(store.backend.read(path) if whole else read_small(path, _MOST_BYTES))
        if rank is not None:
            return found if all(type(row) is dict for row in found["rows"]) else {}
        facts = {"verdict": NOT_TRIED, "why": ""} | found
        valid = all(type(facts[name]) is kind for name, kind in _FACTS.items()) and facts["key"] == checkpoint.key
        valid &= (
            facts["verdict"] in (PROVEN, REFUTED, NOT_TRIED) and 0 < facts["ranks"] <= checkpoint.manifest.world_size
        )
        return found if valid else {}
    except (OSError, *MALFORMED):
        return {}


def clear(store: CheckpointStore) -> None:
    """Delete the files of committed steps whose checkpoints were deleted. Raises ``OSError``."""
    names = store.backend.list(f"{store.root}/{_FOLDER}")
    there = {step_within(name) for name in store.backend.list(store.root)}
    if (root := Path(store.root)).name == _STAGED:
        moved = [each for base in (root, root.parent) for each in base.glob("*/step-*") if each.is_dir()]
        there |= {step_within(each.name) for each in moved}
    gone = {step for name in names if (step := step_within(name)) not in there and name == _name(step or 0, None)}
    for name in names:
        if step_within(name) in gone:
            store.backend.delete(f"{store.root}/{_FOLDER}/{name}")


def verdict_of(store: CheckpointStore, each: VerificationResult) -> str:
    """Return the verdict about a checkpoint for ``stagereg ls``; empty if no steps were recorded after the save."""
    found = {} if each.checkpoint is None else read(store, each.checkpoint)
    verdict = str(found.get("verdict", NOT_TRIED)) if found else ""
    return printable(f"{verdict} by {found.get('why')}" if verdict == REFUTED else verdict, lines=False)


def _folder(store: CheckpointStore) -> str:
    own, staged = f"{store.root}/{_FOLDER}", Path(store.root).parent / _STAGED / _FOLDER
    return own if store.backend.remote or Path(own).is_dir() or not staged.is_dir() else str(staged)


def _name(step: int, rank: int | None) -> str:
    return f"{step_name(step)}.json" if rank is None else f"{step_name(step)}.rank{rank}.json"
