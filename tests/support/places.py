"""The kinds of places that this installation can keep checkpoints in."""

import uuid
from pathlib import Path

from stagereg.base.providers import has

PLACES = ("path", "url") if has("buckets") else ("path",)


def place(kind: str, folder: Path) -> str:
    """Return a new place of a kind: a folder in ``folder``, or a URL that nothing was written to."""
    return str(folder / "run") if kind == "path" else f"memory://{uuid.uuid4().hex}/run"
