"""One error for whatever reading a file of others raises."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from stagereg.errors import CheckpointError, StageregError, reason


@contextlib.contextmanager
def refusing(what: str) -> Generator[None, None, None]:
    """Raise ``CheckpointError`` that ``what`` was not read in place of any error that is not of this project.

    Reading the files of others may raise anything: ``RecursionError`` and ``MemoryError`` too.
    """
    try:
        yield
    except StageregError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what} was not read: {reason(error)}") from error
