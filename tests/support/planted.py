"""What somebody else puts where a small file should be."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

KINDS = ("pipe", "endless", "sparse", "directory", "link")
MINE = "a file of the user\n"

_BOUND_S = 10.0


def plant(kind: str, path: Path, mine: Path) -> None:
    """Plant a thing at ``path``; ``mine`` is the file of the user that a link leads to."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 64 << 30)
    elif kind == "directory":
        path.mkdir()
        (path / "mine").write_text(MINE)
    elif kind == "link":
        path.symlink_to(mine)
    else:
        assert kind == "hard link"
        path.hardlink_to(mine)


def ends(act: Callable[[], object]) -> BaseException | None:
    """Return what an action raises, ``None`` if it succeeds; fails if the action waits for something."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            error.__cause__ = error.__context__ = None  # or a lock would live as long as its traceback
            found.append(error.with_traceback(None))
        else:
            found.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_BOUND_S)
    assert found, "it waits"
    return found[0]
